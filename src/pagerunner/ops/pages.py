"""Whole pages, filled and copied; and reading and writing token slots of paged keys and values.

Whole pages are ranges of bytes in one buffer. Their places and sizes are multiples of 16 bytes.

A layer's pages are a strided view [entries, page_tokens, heads, head_dim] whose inner three dimensions are dense.
The view is seen as rows of `unit` elements. `unit` divides both a token slot and the distance between entries. So a token slot is
`rows_per_token` adjacent rows, and any set of slots is one `index_select` or `index_copy_` on dimension 0. In almost every plan
the unit is a whole token slot. Shape letters: T tokens, K key/value heads, D head size, N slots.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from pagerunner.ops.dispatch import gpu_kernel


@gpu_kernel("paged.pages")
def fill_pages(memory: torch.Tensor, fills_N3: torch.Tensor, most_bytes: int) -> None:
    """Set ranges of `memory` (uint8). Each row of `fills` is an offset, a size and the value of every byte there.

    All sizes are at most `most_bytes`.
    """
    for offset, size, value in fills_N3.tolist():
        memory[offset : offset + size].fill_(value)


@gpu_kernel("paged.pages")
def copy_pages(memory: torch.Tensor, copies_N3: torch.Tensor, most_bytes: int) -> None:
    """Copy ranges within `memory` (uint8). Each row of `copies` is a source, a target and a size of at most `most_bytes`.

    No range that is written overlaps another range, so the order doesn't matter.
    """
    for source, target, size in copies_N3.tolist():
        memory[target : target + size] = memory[source : source + size]


class SlotLayout(NamedTuple):
    """How slot numbers follow from (entry, offset): `entry * rows_per_entry + offset * rows_per_token`."""

    rows_per_entry: int
    rows_per_token: int
    unit: int


def slot_layout(pages: torch.Tensor) -> SlotLayout:
    """The layout of one layer's pages, [entries, page_tokens, heads, head_dim]."""
    token = pages.shape[2] * pages.shape[3]
    unit = math.gcd(pages.stride(0), token)
    return SlotLayout(pages.stride(0) // unit, token // unit, unit)


def slot_rows(entries_N: torch.Tensor, offsets_N: torch.Tensor, layout: SlotLayout) -> torch.Tensor:
    """Row numbers of the slots, [N * rows_per_token], for `gather_slots` and `write_slots`."""
    first_N = entries_N * layout.rows_per_entry + offsets_N * layout.rows_per_token
    if layout.rows_per_token == 1:
        return first_N
    return (first_N.unsqueeze(-1) + torch.arange(layout.rows_per_token, device=first_N.device)).flatten()


def _rows(pages: torch.Tensor, layout: SlotLayout) -> torch.Tensor:
    page = pages.shape[1] * pages.shape[2] * pages.shape[3]
    count = ((pages.shape[0] - 1) * pages.stride(0) + page) // layout.unit
    return pages.as_strided((count, layout.unit), (layout.unit, 1))


def write_slots(pages: torch.Tensor, rows: torch.Tensor, values_TKD: torch.Tensor, layout: SlotLayout) -> None:
    """Store one token's heads into each slot, converted to the pages' dtype."""
    _rows(pages, layout).index_copy_(0, rows, values_TKD.to(pages.dtype).reshape(-1, layout.unit))


def gather_slots(
    pages: torch.Tensor, rows: torch.Tensor, layout: SlotLayout, dtype: torch.dtype, out: torch.Tensor
) -> torch.Tensor:
    """The slots' contents, [N, K, D] in `dtype`; `out` is memory for them in the pages' dtype, [rows, unit]."""
    torch.index_select(_rows(pages, layout), 0, rows, out=out)
    return out.view(-1, pages.shape[2], pages.shape[3]).to(dtype)
