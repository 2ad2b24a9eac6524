"""Random stored matrices of every form."""

from __future__ import annotations

import torch

from pagerunner.ops.stored import Stored, Stored4, Stored8, pack4

SCALES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "e4m3": torch.float8_e4m3fn}


def stored(form: str, outputs: int, inputs: int) -> Stored:
    """A random matrix; `form` says its numbers and scales."""
    torch.manual_seed(outputs + inputs)
    numbers, _, rest = form.partition(" ")
    if numbers in ("fp8", "int8"):
        kind, _, wide = rest.partition(" ")
        block = (128, 128) if kind == "block" else (1, int(wide or inputs))
        scales = torch.rand(-(-outputs // block[0]), -(-inputs // block[1])) * 0.01 + 0.001
        if numbers == "int8":
            return Stored8(torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8), scales, block)
        codes = (torch.randn(outputs, inputs) * 50).clamp(-448, 448).to(torch.float8_e4m3fn)
        return Stored8(codes, scales, block)
    kind, size, *more = rest.split()
    group = inputs if size == "all" else int(size)
    shape = (outputs, inputs // group)
    if kind == "e8m0":
        scales = torch.randint(118, 124, shape, dtype=torch.uint8)
    else:
        scales = (torch.rand(shape) * 0.1 + 0.02).to(SCALES[kind])
    zeros = torch.randint(0, 16, shape, dtype=torch.uint8) if "zeros" in more else None
    rows = torch.rand(outputs) + 0.5 if "rows" in more else None
    return Stored4(
        pack4(torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)), scales, group, numbers, zeros, rows
    )
