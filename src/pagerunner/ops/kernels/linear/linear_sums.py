"""Adds the sums of programs that divided a product's input features among them.

Shape letters: P parts, T tokens, O output features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.launch import blocks, dependent, start_next_and_wait
from pagerunner.ops.kernels.linear.linear_parts import store_or_add

PART_INPUTS = 1024
"""A part has so many input features or more. A product with less takes about as long as writing its sums and reading them again."""


REGISTERS = 96
"""Of a thread that adds parts. By its own choice ptxas takes fewer, and lets some parts' loads wait for others'. Eight parts of one token: 1.46 us so, and 1.09 with these."""


@triton.jit(do_not_specialize=["num_tokens"])
def _sum_kernel(sums_ptr, bias_ptr, y_ptr, num_tokens, num_features, y_stride, PARTS: tl.constexpr, BLOCK: tl.constexpr,
                ADD: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BLOCK features of one token: the sum of its parts."""
    start_next_and_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    features = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = features < num_features
    acc = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        place = (part * num_tokens + token) * num_features + features
        acc += tl.load(sums_ptr + place, mask=live, other=0.0)
    if BIAS:
        acc += tl.load(bias_ptr + features, mask=live, other=0.0).to(tl.float32)
    store_or_add(y_ptr + token * y_stride + features, acc, live, ADD)


def add_parts(sums_PTO: torch.Tensor, bias_O: torch.Tensor | None, out_TO: torch.Tensor, *, add: bool = False) -> None:
    """Write the float32 sums' sum, and the bias, into `out`, or add it. Parts are added in their order."""
    parts, tokens, features = sums_PTO.shape
    _sum_kernel[(tokens, blocks(features, 1024))](
        sums_PTO, sums_PTO if bias_O is None else bias_O, out_TO, tokens, features, out_TO.stride(0), PARTS=parts,
        BLOCK=1024, ADD=add, BIAS=bias_O is not None, num_warps=4, maxnreg=REGISTERS, **dependent(out_TO.device),
    )  # fmt: skip
