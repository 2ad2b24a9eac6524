"""Tiles of keys and values on their way from pages to the matrix units, and the softmax over one tile after another."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)  # the score of a masked key: finite, so that its differences are finite


@triton.jit
def softcapped(scores, softcap):
    """`softcap * tanh(scores / softcap)`."""
    return softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores / softcap)))


@triton.jit
def load_tile(ptr, offsets, mask, D: tl.constexpr, DP: tl.constexpr, FP8: tl.constexpr, TO: tl.constexpr):
    """Rows of keys or values at element `offsets`, [rows, DP] of dtype TO; rows outside the mask are zeros."""
    d = tl.arange(0, DP)
    if D == DP:
        tile = tl.load(ptr + offsets[:, None] + d[None, :], mask=mask[:, None], other=0)
    else:
        tile = tl.load(ptr + offsets[:, None] + d[None, :], mask=mask[:, None] & (d < D)[None, :], other=0)
    if FP8 is not None:
        tile = tile.to(FP8, bitcast=True)
    return tile.to(TO)


# Two pairs of bytes, in one register, to float16: those at even places in one register, those at odd ones in another.
_E4M3_PAIRS = tl.constexpr(
    "{ .reg .b16 a, b; .reg .b32 x, y; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 x, a; cvt.rn.f16x2.e4m3x2 y, b;"
    " prmt.b32 $0, x, y, 0x5410; prmt.b32 $1, x, y, 0x7632; }"
)
_E5M2_PAIRS = tl.constexpr("prmt.b32 $0, $2, 0, 0x2404; and.b32 $1, $2, 0xFF00FF00;")  # the upper byte of a float16


@triton.jit
def load_pairs(
    ptr, offsets, mask, D: tl.constexpr, DP: tl.constexpr, FP8: tl.constexpr, TO: tl.constexpr, ASM: tl.constexpr,
    TRANS: tl.constexpr = False,
):  # fmt: skip
    """As `load_tile` for fp8: the elements at even and at odd places, [rows, DP / 2] each, of dtype TO; TRANS: [DP / 2, rows].

    Tiles are moved in pairs, as 16-bit elements. So they reach the matrix units in the order that these units want, which bytes
    would not. ASM: convert four at a time, which the compiler doesn't find by itself.
    """
    d = tl.arange(0, DP // 2)
    pairs = (ptr + offsets[:, None]).to(tl.pointer_type(tl.uint16)) + d[None, :]
    x = tl.load(pairs, mask=mask[:, None] & (d < D // 2)[None, :], other=0)
    if TRANS:
        x = tl.trans(x)
    if ASM and TO == tl.float16:
        convert: tl.constexpr = _E4M3_PAIRS if FP8 == tl.float8e4nv else _E5M2_PAIRS
        even, odd = tl.inline_asm_elementwise(convert, "=r,=r,r", [x], (tl.float16, tl.float16), True, 2)
    else:
        even = (x & 0xFF).to(tl.uint8).to(FP8, bitcast=True).to(TO)
        odd = (x >> 8).to(tl.uint8).to(FP8, bitcast=True).to(TO)
    return even, odd


@triton.jit
def _spread(x, BN: tl.constexpr):
    """One element for each page, for each of its keys: [BN]."""
    return tl.reshape(tl.broadcast_to(x[:, None], [x.shape[0], BN // x.shape[0]]), [BN])


@triton.jit
def tile_scales(
    scales_ptr, scales_se, row_table, width, start, oldest, stop,
    K: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr, RING: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Three numbers for each of BN fp8 keys from `start` on, of which [oldest, stop) exist.

    * The scale of the key.
    * log2 of the value's scale. It is added to the score, which multiplies the key's weight by the value's scale. The weight is
      still at most 1, and merges with earlier weights as usual.
    * The inverse of the value's scale. Times this, the weight counts in the total weight.

    All three are exact, because scales are powers of two. ASM: a logarithm in one instruction, not the compiler's function.
    """
    PART: tl.constexpr = PAGE if BN % PAGE == 0 else (BN if PAGE % BN == 0 else 1)  # keys that are in one page for sure
    first = start + tl.arange(0, BN // PART) * PART
    there = (first + PART > oldest) & (first < stop)
    page = first // PAGE
    if RING:
        page = page % width
    at = scales_ptr + tl.load(row_table + page, mask=there, other=0) * scales_se
    k_scale = tl.load(at, mask=there, other=0.0)
    v_scale = tl.load(at + K, mask=there, other=0.0)
    v_scale = tl.where(v_scale > 0, v_scale, 1.0)  # of a page of zeros
    if ASM:
        exponent = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=r,r", [v_scale], tl.float32, True, 1)
    else:
        exponent = tl.math.log2(v_scale)
    return _spread(k_scale, BN), _spread(exponent, BN), _spread(tl.math.exp2(-exponent), BN)


@triton.jit
def scaled(scores, k_scale, exponent, scale, softcap, SOFTCAP: tl.constexpr):
    """Products of queries with fp8 keys as scores in units of log2, with the value scales' logarithms."""
    if SOFTCAP:
        return softcapped(scores * (k_scale * scale), softcap) * LOG2E + exponent
    return scores * (k_scale * (scale * LOG2E)) + exponent


@triton.jit
def online(scores, share, highest, total, AXIS: tl.constexpr):
    """One step of a softmax over tiles. Keys lie along AXIS of `scores`.

    Returns the tile's weights; the highest score so far; the total weight so far, in which a weight counts times `share`; and the
    factor for the results of earlier tiles.
    """
    new = tl.maximum(highest, tl.max(scores, AXIS))
    weights = tl.math.exp2(scores - tl.expand_dims(new, AXIS))
    shrink = tl.math.exp2(highest - new)
    return weights, new, total * shrink + tl.sum(weights * share, AXIS), shrink


@triton.jit
def online_of(products, factor, highest, total):
    """`online` for scores [M, N] that are `products` times a positive factor. The multiplication is part of the subtraction."""
    new = tl.maximum(highest, tl.max(products, 1) * factor)
    weights = tl.math.exp2(products * factor - new[:, None])
    shrink = tl.math.exp2(highest - new)
    return weights, new, total * shrink + tl.sum(weights, 1), shrink


@triton.jit
def keys_at(row_table, width, start, oldest, stop, PAGE: tl.constexpr, BN: tl.constexpr, RING: tl.constexpr):
    """BN keys from `start` on: their positions, which of them are in [oldest, stop), their pages' entries, and their places in these."""
    at = start + tl.arange(0, BN)
    mask = (at >= oldest) & (at < stop)
    page = at // PAGE
    if RING:
        page = page % width
    return at, mask, tl.load(row_table + page, mask=mask, other=0), at % PAGE


@triton.jit
def prefetch_tile(
    ptr, stride_e, stride_s, row_table, width, start, oldest, stop,
    D: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Ask for a tile to be brought into the second-level cache, by lines of 128 bytes."""
    _, mask, entry, inside = keys_at(row_table, width, start, oldest, stop, PAGE, BN, RING)
    SIZE: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
    row = tl.cast(ptr, tl.int64) + (entry * stride_e + inside * stride_s) * SIZE
    # for keys that don't exist, ask for the pool's first bytes, which do
    row = tl.where(mask, row, tl.cast(ptr, tl.int64))
    for line in tl.static_range(0, D * SIZE, 128):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [row + line], tl.int32, False, 1
        )  # fmt: skip


@triton.jit
def attend_fp8(
    q_even, q_odd, highest, total, even, odd, kp_ptr, k_offsets, vp_ptr, v_offsets, k_scale, exponent, share, there, seen,
    scale, softcap,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, SOFTCAP: tl.constexpr, FP8: tl.constexpr,
    TO: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One tile of fp8 pages: `there` [BN], which of its keys exist; `seen` [M or 1, BN], by which query; `tile_scales`.
    Queries are two halves [M, DP / 2], of their even and odd elements, and so are the results, [M, DVP / 2].
    """
    k_even, k_odd = load_pairs(kp_ptr, k_offsets, there, D, DP, FP8, TO, ASM)
    v_even, v_odd = load_pairs(vp_ptr, v_offsets, there, DV, DVP, FP8, TO, ASM)
    scores = tl.dot(q_even, tl.trans(k_even), input_precision="ieee")
    scores = tl.dot(q_odd, tl.trans(k_odd), scores, input_precision="ieee")
    scores = scaled(scores, k_scale[None, :], exponent[None, :], scale, softcap, SOFTCAP)
    scores = tl.where(seen, scores, float("-inf"))
    weights, highest, total, shrink = online(scores, share[None, :], highest, total, 1)
    weights = weights.to(TO)
    even = tl.dot(weights, v_even, even * shrink[:, None], input_precision="ieee")
    odd = tl.dot(weights, v_odd, odd * shrink[:, None], input_precision="ieee")
    return highest, total, even, odd


@triton.jit
def attend_fp8_few(
    q_even, q_odd, highest, total, even, odd, kp_ptr, k_offsets, vp_ptr, v_offsets, k_scale, exponent, share, there, seen,
    scale, softcap,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, SOFTCAP: tl.constexpr, FP8: tl.constexpr,
    TO: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """As `attend_fp8`, for as few as 8 queries. Queries [DP / 2, M] and results [DVP / 2, M] are the products' columns. Keys and
    values are the rows, and `seen` is [BN, M or 1].
    """
    k_even, k_odd = load_pairs(kp_ptr, k_offsets, there, D, DP, FP8, TO, ASM)
    v_even, v_odd = load_pairs(vp_ptr, v_offsets, there, DV, DVP, FP8, TO, ASM, True)
    scores = tl.dot(k_even, q_even, input_precision="ieee")
    scores = tl.dot(k_odd, q_odd, scores, input_precision="ieee")
    scores = scaled(scores, k_scale[:, None], exponent[:, None], scale, softcap, SOFTCAP)
    scores = tl.where(seen, scores, float("-inf"))
    weights, highest, total, shrink = online(scores, share[:, None], highest, total, 0)
    weights = weights.to(TO)
    even = tl.dot(v_even, weights, even * shrink[None, :], input_precision="ieee")
    odd = tl.dot(v_odd, weights, odd * shrink[None, :], input_precision="ieee")
    return highest, total, even, odd


@triton.jit
def halves(x):
    """The elements at even and at odd places of rows, [M, N / 2] each."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def joined(even, odd):
    """What `halves` has divided."""
    return tl.reshape(tl.join(even, odd), [even.shape[0], even.shape[1] * 2])
