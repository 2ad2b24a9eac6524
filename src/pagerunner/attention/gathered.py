"""Page tables by row, for backends that divide a step on the host."""

from __future__ import annotations

import torch

from pagerunner.attention.base import PlanInputs
from pagerunner.ops.async_copy import to_device


def gathered_rows(inputs: PlanInputs) -> tuple[torch.Tensor, list[int]]:
    """The entries of each row's pages, [R, P] int64, and by row the page number of column 0.

    A group that keeps everything has page 0 in column 0. In other groups it is the page of the oldest token that the first
    query sees. Entries beyond a row's pages are leftovers of other sequences. A page that no later step reads may be
    missing (-1).
    """
    table, size, reach, slots_R = inputs.page_table, inputs.page_tokens, inputs.reach, inputs.rows.slots_R
    stops = [-(-end // size) for end in inputs.seq_lens]
    if reach is None:
        return table[:, : max(stops)].index_select(0, slots_R), [0] * len(stops)
    starts = [end - queries for end, queries in zip(inputs.seq_lens, inputs.query_lens, strict=True)]
    firsts = [max(reach.oldest(start), 0) // size for start in starts]
    width = max(stop - first for first, stop in zip(firsts, stops, strict=True))
    first_R1 = to_device(firsts, torch.int64, table.device).unsqueeze(-1)
    columns_RP = (first_R1 + torch.arange(width, device=table.device)) % table.shape[1]
    return table[slots_R.unsqueeze(-1), columns_RP], firsts
