"""Kernel of ops/embedding.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.launch import blocks, dependent, start_next_and_wait

BLOCK = 1024


@triton.jit(do_not_specialize=["first", "rows"])
def _span_embedding(ids_T, table_VD, out_TD, first, rows, features, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start_next_and_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(ids_T + token).to(tl.int64) - first
    here = (place >= 0) & (place < rows)
    x = tl.load(table_VD + place * features + at, mask=here & (at < features), other=0.0)
    tl.store(out_TD + token * features + at, x, mask=at < features)


def span_embedding(ids_T: torch.Tensor, table_VD: torch.Tensor, first: int) -> torch.Tensor:
    """See ops/embedding.py. One launch, where torch has eight."""
    (rows, features), tokens = table_VD.shape, ids_T.shape[0]
    out_TD = table_VD.new_empty(tokens, features)
    if tokens:
        _span_embedding[(tokens, blocks(features, BLOCK))](
            ids_T.contiguous(), table_VD.contiguous(), out_TD, first, rows, features, BLOCK=BLOCK, **dependent(table_VD.device)
        )  # fmt: skip
    return out_TD
