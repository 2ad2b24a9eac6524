"""Which scores of rows of one token are made in Gluon (`kernels/latent/indexer_gluon.py`), and their launch."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from pagerunner.batch import StepRows
from pagerunner.ops.kernels.launch import dependent, padded
from pagerunner.ops.kernels.linear.linear_wide import has_gluon
from pagerunner.ops.kernels.paged.paged_heads import FP8_MAX, fp8_type

SIZE, MOST_HEADS = 128, 64  # elements of queries and keys; an indexer's heads


@functools.cache
def _gluon() -> Any:
    """The module in Gluon. It isn't imported with Triton versions that may not have what it names."""
    return importlib.import_module("pagerunner.ops.kernels.latent.indexer_gluon")


def takes_gluon(q_TJI: torch.Tensor, pages_ESI: torch.Tensor, rows: StepRows, fp8: bool) -> bool:
    """Whether Gluon makes these scores: it copies 16 bytes at a time."""
    _, heads, size = q_TJI.shape
    if not rows.one_token or heads > MOST_HEADS or size != SIZE or q_TJI.dtype.itemsize != 2:
        return False
    for part in (q_TJI, pages_ESI):
        if part.data_ptr() % 16 or part.stride(-1) != 1 or any(step * part.itemsize % 16 for step in part.stride()[:2]):
            return False
    return (fp8 or pages_ESI.dtype == q_TJI.dtype) and has_gluon(q_TJI.device)


def run_one(
    q_TJI: torch.Tensor, weights_TJ: torch.Tensor, top_k: int, pages_ESI: torch.Tensor, table_SW: torch.Tensor, rows: StepRows, ratio: int,
    scales_ES: torch.Tensor | None, scores_TN: torch.Tensor, parts: int, early: int, choice: tuple[torch.Tensor, torch.Tensor] | None = None, chunk: int = 0,
) -> None:  # fmt: skip
    """Fill the scores. `early` 1: an earlier layer of the step has launched this, so rows and tables are there when it starts. 2: all is there but this step's keys, which the launch before
    stores. `choice`: where chosen slots go, of at most `chunk`,
    and counters of tokens that are zeros.
    """
    (tokens, heads, size), dtype = q_TJI.shape, pages_ESI.dtype
    held, scales = (pages_ESI, pages_ESI) if scales_ES is None else (pages_ESI.view(torch.uint8), scales_ES)
    steps = (0, 0) if scales_ES is None else scales.stride()
    chosen_TK, counter_T = choice or (rows.row_T, rows.row_T)
    _gluon().scores_kernel[(tokens, parts)](
        q_TJI, weights_TJ, held, scales, scores_TN, chosen_TK, counter_T, rows.row_T, rows.positions_T, rows.slots_R, table_SW, parts, int(early), *q_TJI.stride()[:2],
        weights_TJ.stride(0), *held.stride()[:2], *steps, table_SW.stride(0), scores_TN.stride(0), J=heads, D=size, BJ=max(16, padded(heads)),
        PAGE=pages_ESI.shape[1], RATIO=ratio, TOP_K=top_k, C=chunk, FP8=fp8_type(dtype), FP8_MAX=FP8_MAX.get(dtype, 0.0), num_warps=4, **dependent(q_TJI.device),
    )  # fmt: skip
