"""Codes of stored matrices to numbers, in registers; see `ops/stored.py`.

Each conversion is written twice. The first is Triton's casts, for any dtype of numbers and for Triton's interpreter. The second is for bfloat16 on
Hopper: four codes at a time, in the words of PTX. It makes a number's bits from a code's bits, exactly:

* int4: nibble n beside the byte 0x43 is the bfloat16 128 + n. 136 is taken off. In float16, n in bits 6 to 9 beside 0x4C00 is 16 + n.
* e2m1: the sign goes to bit 15, the other three bits to bits 6 to 8. That is 2 ** -126 of the number.
* e4m3: the sign goes to bit 15, the other seven bits to bits 4 to 10. That is 2 ** -120 of the number. NaN (0x7F) becomes 480.
* int8: seven bits beside 0x43 are 128 + n, and the sign beside 0x43 is 128 or 256, which is taken off. In float16, 128 + n beside 0x64 is 1152 + n.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from pagerunner.ops.stored import Stored, Stored8

E4M3, INT8, INT4, E2M1 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""Number formats of codes, a kernel's FORM. Those of 4 bits come last."""
DENSE = tl.constexpr(4)
"""The FORM of weights that aren't stored in codes."""

ROW_SCALES, STEP_SCALES, GROUP_SCALES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""What scales multiply, a kernel's SCALES: the sum of a whole row, the sum of each step, or what belongs to each group inside a step."""


def form_of(stored: Stored) -> int:
    """The number format of its codes, as kernels know it."""
    if isinstance(stored, Stored8):
        form = INT8 if stored.codes.dtype == torch.int8 else E4M3
    else:
        form = E2M1 if stored.numbers == "e2m1" else INT4
    return int(form.value)


def uses_words(dtype: torch.dtype, form: int = INT4.value) -> bool:
    """Whether the conversions of PTX serve this dtype of numbers here. Of float16 they serve int8 alone, whose casts take four times as long as others."""
    served = dtype == torch.bfloat16 or (dtype == torch.float16 and form == INT8.value)
    return served and os.environ.get("TRITON_INTERPRET") != "1"


@triton.jit
def spread(values, COUNT: tl.constexpr):
    """Every value of [.., C] COUNT times, [.., C * COUNT]."""
    wide = tl.broadcast_to(tl.expand_dims(values, len(values.shape)), values.shape + (COUNT,))
    return tl.reshape(wide, values.shape[:-1] + (values.shape[-1] * COUNT,))


@triton.jit
def _four(codes, PTX: tl.constexpr):
    """Numbers in bfloat16 of four codes at a time: words of PTX write $0 and $1, of the codes in $2."""
    return tl.inline_asm_elementwise(PTX, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def _four_halves(codes, PTX: tl.constexpr):
    """The same in float16."""
    return tl.inline_asm_elementwise(PTX, "=r,=r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)


# One return for each function: Triton compiles what stands behind a return inside an `if`.


@triton.jit
def numbers8(codes, dtype: tl.constexpr, FORM: tl.constexpr, WORDS: tl.constexpr):
    """Numbers of 8-bit codes, uint8."""
    if FORM == E4M3 and WORDS:
        numbers = _four(codes, """{ .reg .b32 p, q, a, b, m; mov.b32 m, 0x7b807b80;
            prmt.b32 p, 0, $2, 0x5140; prmt.b32 q, 0, $2, 0x7362;
            and.b32 a, p, 0x80008000; shr.u32 b, p, 4; lop3.b32 a, b, 0x07F007F0, a, 0xEA; mul.rn.bf16x2 $0, a, m;
            and.b32 a, q, 0x80008000; shr.u32 b, q, 4; lop3.b32 a, b, 0x07F007F0, a, 0xEA; mul.rn.bf16x2 $1, a, m; }""")  # fmt: skip
    elif FORM == E4M3:
        numbers = codes.to(tl.float8e4nv, bitcast=True).to(dtype)
    elif WORDS and dtype == tl.float16:
        numbers = _four_halves(codes, """{ .reg .b32 a, p, c, m; mov.b32 c, 0x64646464; mov.b32 m, 0x64806480; xor.b32 a, $2, 0x80808080;
            prmt.b32 p, a, c, 0x4140; sub.rn.f16x2 $0, p, m; prmt.b32 p, a, c, 0x4342; sub.rn.f16x2 $1, p, m; }""")  # fmt: skip
    elif WORDS:
        numbers = _four(codes, """{ .reg .b32 a, s, p, q, c; mov.b32 c, 0x43434343; and.b32 a, $2, 0x7F7F7F7F; and.b32 s, $2, 0x80808080;
            prmt.b32 p, a, c, 0x4140; prmt.b32 q, s, c, 0x4140; sub.rn.bf16x2 $0, p, q;
            prmt.b32 p, a, c, 0x4342; prmt.b32 q, s, c, 0x4342; sub.rn.bf16x2 $1, p, q; }""")  # fmt: skip
    else:
        numbers = codes.to(tl.int8, bitcast=True).to(tl.float32).to(dtype)
    return numbers


@triton.jit
def numbers4(pairs, HIGH: tl.constexpr, dtype: tl.constexpr, FORM: tl.constexpr, WORDS: tl.constexpr):
    """Numbers of the high or the low nibbles of bytes; 8 counts as 0 of int4."""
    if WORDS:
        numbers = _by_words(pairs, HIGH, FORM)
    else:
        nibble = (pairs >> 4 if HIGH else pairs & 15).to(tl.int16)
        if FORM == INT4:  # 1024 + n in float16
            numbers = ((nibble | 0x6400).to(tl.float16, bitcast=True).to(tl.float32) - 1032.0).to(dtype)
        else:  # 2 ** -14 of the number in float16
            bits = ((nibble & 8) << 12) | ((nibble & 7) << 9)
            numbers = (bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0).to(dtype)
    return numbers


@triton.jit
def _by_words(pairs, HIGH: tl.constexpr, FORM: tl.constexpr):
    if FORM == INT4 and HIGH:
        numbers = _four(pairs, """{ .reg .b32 a, p, q, k, m; mov.b32 k, 0x43434343; mov.b32 m, 0x43084308; shr.u32 a, $2, 4; and.b32 a, a, 0x0F0F0F0F;
            prmt.b32 p, a, k, 0x4140; prmt.b32 q, a, k, 0x4342; sub.rn.bf16x2 $0, p, m; sub.rn.bf16x2 $1, q, m; }""")  # fmt: skip
    elif FORM == INT4:
        numbers = _four(pairs, """{ .reg .b32 a, p, q, k, m; mov.b32 k, 0x43434343; mov.b32 m, 0x43084308; and.b32 a, $2, 0x0F0F0F0F;
            prmt.b32 p, a, k, 0x4140; prmt.b32 q, a, k, 0x4342; sub.rn.bf16x2 $0, p, m; sub.rn.bf16x2 $1, q, m; }""")  # fmt: skip
    elif HIGH:
        numbers = _four(pairs, """{ .reg .b32 p, q, a, b, m; mov.b32 m, 0x7e807e80; prmt.b32 p, 0, $2, 0x5140; prmt.b32 q, 0, $2, 0x7362;
            and.b32 a, p, 0x80008000; shr.u32 b, p, 6; lop3.b32 a, b, 0x01C001C0, a, 0xEA; mul.rn.bf16x2 $0, a, m;
            and.b32 a, q, 0x80008000; shr.u32 b, q, 6; lop3.b32 a, b, 0x01C001C0, a, 0xEA; mul.rn.bf16x2 $1, a, m; }""")  # fmt: skip
    else:
        numbers = _four(pairs, """{ .reg .b32 w, p, q, a, b, m; mov.b32 m, 0x7e807e80; shl.b32 w, $2, 4; prmt.b32 p, 0, w, 0x5140; prmt.b32 q, 0, w, 0x7362;
            and.b32 a, p, 0x80008000; shr.u32 b, p, 6; lop3.b32 a, b, 0x01C001C0, a, 0xEA; mul.rn.bf16x2 $0, a, m;
            and.b32 a, q, 0x80008000; shr.u32 b, q, 6; lop3.b32 a, b, 0x01C001C0, a, 0xEA; mul.rn.bf16x2 $1, a, m; }""")  # fmt: skip
    return numbers


@triton.jit
def raw_int4(pairs, HIGH: tl.constexpr, dtype: tl.constexpr, WORDS: tl.constexpr):
    """Numbers of the high or the low nibbles of bytes for products that take off what they count from.

    With WORDS a nibble n is 128 + n, or 16 + n in float16, and the bytes 0, 1, 2, 3 of a word have their numbers in the order 0, 2, 1, 3: one
    operation makes two numbers. Without, n - 8 and the order of the bytes.
    """
    if not WORDS:
        numbers = numbers4(pairs, HIGH, dtype, INT4, False)
    elif dtype == tl.float16 and HIGH:
        numbers = _four_halves(pairs, """{ .reg .b32 a, b; shl.b32 a, $2, 2; shr.u32 b, $2, 6;
            lop3.b32 $0, a, 0x03C003C0, 0x4C004C00, 0xEA; lop3.b32 $1, b, 0x03C003C0, 0x4C004C00, 0xEA; }""")  # fmt: skip
    elif dtype == tl.float16:
        numbers = _four_halves(pairs, """{ .reg .b32 a, b; shl.b32 a, $2, 6; shr.u32 b, $2, 2;
            lop3.b32 $0, a, 0x03C003C0, 0x4C004C00, 0xEA; lop3.b32 $1, b, 0x03C003C0, 0x4C004C00, 0xEA; }""")  # fmt: skip
    elif HIGH:
        numbers = _four(pairs, """{ .reg .b32 a, b; shr.u32 a, $2, 4; shr.u32 b, $2, 12;
            lop3.b32 $0, a, 0x000F000F, 0x43004300, 0xEA; lop3.b32 $1, b, 0x000F000F, 0x43004300, 0xEA; }""")  # fmt: skip
    else:
        numbers = _four(pairs, """{ .reg .b32 b; shr.u32 b, $2, 8;
            lop3.b32 $0, $2, 0x000F000F, 0x43004300, 0xEA; lop3.b32 $1, b, 0x000F000F, 0x43004300, 0xEA; }""")  # fmt: skip
    return numbers


@triton.jit
def behind(x, last, never, WORDS: tl.constexpr):
    """`x` of 16 bits, not before `last` has been loaded, too: the compiler doesn't know that `never` is 0.

    It would put loads behind the first products, which wait for the loads before these: one latency of memory after another.
    """
    if WORDS:
        x = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xF8;", "=r,r,r,r,r", [x, last, never], dtype=x.dtype, is_pure=True, pack=2
        )
    return x


@triton.jit
def scaled_e2m1(pairs, scales, HIGH: tl.constexpr, dtype: tl.constexpr, WORDS: tl.constexpr):
    """Numbers of the high or the low nibbles of bytes times scales; with WORDS, scales are 2 ** 64 times as large, in bfloat16,
    and the results are 2 ** -62 of the numbers, in the order of `raw_int4`."""
    if not WORDS:
        numbers = (numbers4(pairs, HIGH, tl.float32, E2M1, False) * scales).to(dtype)
    elif HIGH:
        numbers = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b; and.b32 a, $2, 0x00F000F0; shr.u32 b, $2, 8; and.b32 b, b, 0x00F000F0;
            mul.lo.u32 a, a, 0x104; mul.lo.u32 b, b, 0x104; and.b32 a, a, 0x81C081C0; and.b32 b, b, 0x81C081C0;
            mul.rn.bf16x2 $0, a, $3; mul.rn.bf16x2 $1, b, $4; }""",
            "=r,=r,r,r,r", [pairs, scales], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        numbers = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b; and.b32 a, $2, 0x000F000F; shr.u32 b, $2, 8; and.b32 b, b, 0x000F000F;
            mul.lo.u32 a, a, 0x1040; mul.lo.u32 b, b, 0x1040; and.b32 a, a, 0x81C081C0; and.b32 b, b, 0x81C081C0;
            mul.rn.bf16x2 $0, a, $3; mul.rn.bf16x2 $1, b, $4; }""",
            "=r,=r,r,r,r", [pairs, scales], dtype=tl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    return numbers


@triton.jit
def lifted_int4(scales):
    """Scales as `scaled_int4` wants them."""
    if scales.dtype == tl.bfloat16:
        scales = (scales.to(tl.float32) * 1180591620717411303424.0).to(tl.bfloat16)  # 2 ** 70
    return scales


@triton.jit
def zero_bits(zeros, dtype: tl.constexpr):
    """Zero points as `scaled_int4` takes them off."""
    BASE: tl.constexpr = 0x6400 if dtype == tl.float16 else 0x8000
    return (zeros.to(tl.uint16) | BASE).to(dtype, bitcast=True)


@triton.jit
def eight_scales(scales):
    """What `scaled_int4` takes off in bfloat16 without zero points, of scales 2 ** 70 times as large: -8 of them times 2 ** -133."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 m; mov.b16 m, 0x8008; mul.rn.bf16 $0, $1, m; }", "=h,h", [scales], dtype=tl.bfloat16, is_pure=True, pack=1
    )  # fmt: skip


@triton.jit
def scaled_int4(pairs, scales, taken, HIGH: tl.constexpr, ZEROS: tl.constexpr):
    """Numbers of the low or the high nibbles of bytes times scales, by words, in the order of `raw_int4`.

    bfloat16: a nibble is n * 2 ** -133, the scale s * 2 ** 70; `taken` is -8 s * 2 ** -63, or -z * 2 ** -133 if ZEROS. float16: a nibble is
    1024 + n, the scale s, and `taken` is 1032 or 1024 + z.
    """
    shifts: tl.constexpr = "shr.u32 a, $2, 4; shr.u32 b, $2, 12; " if HIGH else "mov.b32 a, $2; shr.u32 b, $2, 8; "
    if scales.dtype == tl.float16:
        steps: tl.constexpr = (
            "lop3.b32 a, a, 0x000F000F, 0x64006400, 0xEA; lop3.b32 b, b, 0x000F000F, 0x64006400, 0xEA; "
            "sub.rn.f16x2 a, a, $5; sub.rn.f16x2 b, b, $6; mul.rn.f16x2 $0, a, $3; mul.rn.f16x2 $1, b, $4; }"
        )
    elif ZEROS:
        steps: tl.constexpr = (
            "and.b32 a, a, 0x000F000F; and.b32 b, b, 0x000F000F; mov.b32 c, 0x3F803F80; "
            "fma.rn.bf16x2 a, a, c, $5; fma.rn.bf16x2 b, b, c, $6; mul.rn.bf16x2 $0, a, $3; mul.rn.bf16x2 $1, b, $4; }"
        )
    else:
        steps: tl.constexpr = (
            "and.b32 a, a, 0x000F000F; and.b32 b, b, 0x000F000F; "
            "fma.rn.bf16x2 $0, a, $3, $5; fma.rn.bf16x2 $1, b, $4, $6; }"
        )
    words: tl.constexpr = "{ .reg .b32 a, b, c; " + shifts + steps
    return tl.inline_asm_elementwise(
        words, "=r,=r,r,r,r,r,r", [pairs, scales, taken], dtype=scales.dtype, is_pure=True, pack=4
    )
