"""Causal attention of rows that have nothing before them, by torch's library: cuDNN on a CUDA device.

Shape letters: T tokens of all rows, H heads, K key/value heads, D query and key size, V value size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
import torch.nn.functional as F


def attend_fresh_rows(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKV: torch.Tensor, lengths: Sequence[int], scale: float
) -> torch.Tensor:
    """Attention of each row's tokens over the row's own tokens, [T, H, V]. Neighbours of one length are one call."""
    runs = list(_runs(lengths))
    if len(runs) == 1:
        return _equal_rows(q_THD, k_TKD, v_TKV, runs[0][1], scale)
    out_THV = q_THD.new_empty(*q_THD.shape[:2], v_TKV.shape[2])
    first = 0
    for tokens, length in runs:
        part = slice(first, first + tokens)
        out_THV[part] = _equal_rows(q_THD[part], k_TKD[part], v_TKV[part], length, scale)
        first += tokens
    return out_THV


def _runs(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The tokens of neighbours that are equally long, and that length."""
    for length, rows in groupby(lengths):
        yield length * len(list(rows)), length


def _equal_rows(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKV: torch.Tensor, length: int, scale: float
) -> torch.Tensor:
    q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q_THD, k_TKD, v_TKV))
    if q.is_cuda:
        attend = torch.ops.aten._scaled_dot_product_cudnn_attention
        out_BHLV = attend(q, k, v, None, False, 0.0, True, False, scale=scale)[0]
    else:
        out_BHLV = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out_BHLV.transpose(1, 2).flatten(0, 1)
