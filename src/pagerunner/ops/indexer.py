"""The slots that queries see by an indexer: scores of every slot of a row, and the exact best of them. DeepSeek-V3.2 and V4.

A slot of a page has one indexer key. A slot's score for a query is the sum over indexer heads of `weight * relu(query . key)`.

Shape letters: T tokens, J indexer heads, I indexer key size, E page table entries, S slots of a page, W page table columns, N slots of
a row, K chosen slots.
"""

from __future__ import annotations

from typing import Any

import torch

from pagerunner.batch import StepRows
from pagerunner.ops.dispatch import gpu_kernel
from pagerunner.ops.fp8 import fitting_scale, to_fp8


def width_of(rows: StepRows, ratio: int) -> int:
    """Slots that the step's longest row has at most; at least 1."""
    return max(1, rows.max_seq_len // ratio)


def is_choice(rows: StepRows, ratio: int, top_k: int) -> bool:
    """Whether a row may see more slots than are chosen. If none does, layers share one answer, and only the first launches something."""
    return width_of(rows, ratio) > top_k


def equal_parts(count: int, most: int) -> list[int]:
    """Where parts of at most `most` begin, and where the last one ends. No two differ by more than 1, as a part of few tokens has kernels of its own."""
    parts = max(1, -(-count // most))
    return [count * part // parts for part in range(parts + 1)]


def rounded_queries(
    q_TJI: torch.Tensor, weights_TJ: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries in float32 as fp8 rounds them, without the scale of each token and head, which its weight gets."""
    q_TJI = q_TJI.float()
    scale_TJ = fitting_scale(q_TJI.abs().amax(-1), dtype)
    return to_fp8(q_TJI, scale_TJ.unsqueeze(-1), dtype).float(), weights_TJ.float() * scale_TJ


@gpu_kernel("latent.indexer")
def choose_slots(
    q_TJI: torch.Tensor,
    weights_TJ: torch.Tensor,
    top_k: int,
    pages_ESI: torch.Tensor,
    table_SW: torch.Tensor,
    rows: StepRows,
    ratio: int,
    scratch: dict[Any, Any],
    scales_ES: torch.Tensor | None = None,
    *,
    beside: bool = False,
) -> torch.Tensor:
    """The best `top_k` slots of those that each token sees, in ascending order, [T, K] int32; -1 behind the last one.

    A slot stands for `ratio` tokens. The query at position p sees (p + 1) // ratio slots; if these are at most `top_k`, all are chosen.
    Of slots with equal scores the earlier ones are. K is `top_k`, or as many slots as the longest row may have. Padding gets -1.

    `scales` are those of keys in fp8. Queries are rounded to fp8, too, then: a power of two for each token and head scales them, as models
    that keep such keys were trained. `scratch` holds what the layers of one step share; it is empty at first.
    `beside`: the launch before stores this step's keys, and nothing else that is read here (`absorb_slots_`). So scores of older keys may be made meanwhile.
    """
    size, width = pages_ESI.shape[1], width_of(rows, ratio)
    count = min(top_k, width)
    chosen_TK = torch.full((q_TJI.shape[0], count), -1, dtype=torch.int32, device=q_TJI.device)
    q_TJI, weights_TJ = q_TJI.float(), weights_TJ.float()
    if scales_ES is not None:
        q_TJI, weights_TJ = rounded_queries(q_TJI, weights_TJ, pages_ESI.dtype)
    row_T = rows.row_T.long()
    for row in row_T[row_T >= 0].unique().tolist():
        tokens = (row_T == row).nonzero().squeeze(-1)
        seen_T1 = ((rows.positions_T[tokens] + 1) // ratio).unsqueeze(-1)
        at_N = torch.arange(int(seen_T1.max()), device=q_TJI.device)
        if not at_N.numel():
            continue
        entries_N, offsets_N = table_SW[rows.slots_R[row].long()][at_N // size], at_N % size
        if scales_ES is None:
            keys_NI = pages_ESI[entries_N, offsets_N].float()
        else:
            keys_NI = pages_ESI.view(torch.uint8)[entries_N, offsets_N].view(pages_ESI.dtype).float()
        dots_TJN = torch.matmul(q_TJI[tokens], keys_NI.T).relu_()
        scores_TN = (dots_TJN * weights_TJ[tokens].unsqueeze(-1)).sum(1)
        if scales_ES is not None:
            scores_TN *= scales_ES[entries_N, offsets_N]
        scores_TN = scores_TN.masked_fill_(at_N >= seen_T1, float("-inf"))
        best_TK = scores_TN.sort(dim=-1, descending=True, stable=True).indices[:, :count]
        best_TK = best_TK.masked_fill(torch.arange(best_TK.shape[1], device=q_TJI.device) >= seen_T1, 2**31 - 1)
        best_TK = best_TK.sort(dim=-1).values
        chosen_TK[tokens, : best_TK.shape[1]] = best_TK.masked_fill(best_TK == 2**31 - 1, -1).to(torch.int32)
    return chosen_TK
