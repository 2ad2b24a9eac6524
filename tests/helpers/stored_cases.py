"""Random stored matrices of every form, and what rounded inputs stand for, for the tests of their kernels."""

from __future__ import annotations

import torch

from pagerunner.ops.quantize import GROUP, Quantized
from pagerunner.ops.stored import Stored, Stored4, Stored8, pack4

SCALES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "e4m3": torch.float8_e4m3fn}


def stored(form: str, outputs: int, inputs: int, *, experts: int | None = None, device: str = "cpu") -> Stored:
    """A random matrix, or one for each expert; `form` says its numbers and what shares a scale.

    8 bits: "fp8 row", "int8 group 64" (64 inputs of a row), "fp8 block" of 128 x 128 and "fp8 block 8x32".
    4 bits: numbers, dtype of scales, inputs in a group or "all" of a row, and then "zeros" or "rows" (factors of rows):
    "int4 f16 128 zeros", "e2m1 e8m0 32" (MXFP4), "e2m1 e4m3 16 rows" (NVFP4). Numbers are about as large as weights are.
    """
    torch.manual_seed(outputs + inputs)
    before = () if experts is None else (experts,)
    numbers, kind, *more = form.split()
    made = _8_bits if numbers in ("fp8", "int8") else _4_bits
    matrix = made(numbers, kind, more, before, outputs, inputs)
    tensors = {name: value.to(device) for name, value in matrix._asdict().items() if isinstance(value, torch.Tensor)}
    return matrix._replace(**tensors)


def _8_bits(numbers: str, kind: str, more: list[str], before: tuple[int, ...], outputs: int, inputs: int) -> Stored8:
    if kind == "block":
        high, _, wide = (more[0] if more else "128x128").partition("x")
        block = (int(high), int(wide))
    else:
        block = (1, int(more[0]) if kind == "group" else inputs)
    scales = torch.rand(*before, -(-outputs // block[0]), -(-inputs // block[1])) * 0.01 + 0.001
    if numbers == "int8":
        return Stored8(torch.randint(-127, 128, (*before, outputs, inputs), dtype=torch.int8), scales, block)
    codes = (torch.randn(*before, outputs, inputs) * 50).clamp(-448, 448).to(torch.float8_e4m3fn)
    return Stored8(codes, scales, block)


def _4_bits(numbers: str, kind: str, more: list[str], before: tuple[int, ...], outputs: int, inputs: int) -> Stored4:
    group = inputs if more[0] == "all" else int(more[0])
    shape = (*before, outputs, inputs // group)
    if kind == "e8m0":
        scales = torch.randint(118, 124, shape, dtype=torch.uint8)
    else:
        scales = (torch.rand(shape) * 0.1 + 0.02).to(SCALES[kind])
    zeros = torch.randint(0, 16, shape, dtype=torch.uint8) if "zeros" in more else None
    rows = torch.rand(*before, outputs) + 0.5 if "rows" in more else None
    codes = torch.randint(0, 16, (*before, outputs, inputs), dtype=torch.uint8)
    return Stored4(pack4(codes), scales, group, numbers, zeros, rows)


def dequantized(x: Quantized) -> torch.Tensor:
    """What the numbers stand for, float32."""
    tokens, inputs = x.codes.shape
    wide = inputs if x.scales.shape[1] == 1 else GROUP
    return x.codes.float() * x.scales.repeat_interleave(wide, 1)[:tokens, :inputs]
