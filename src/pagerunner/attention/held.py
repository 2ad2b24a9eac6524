"""Keys and values as pages hold them: written in the pages' dtype, read back in the model's.

The attention of a step's new tokens takes them as their pages will hold them, not as the projection made them, so that
a dtype that rounds doesn't make a token's result depend on how its prompt was divided into steps.

fp8 pages carry a scale for their keys and one for their values (latents: one for their vectors), per layer. It is zero in
a fresh page, which must therefore be zeroed, and grows when a token needs a larger one; what the page held is then
converted. Static scales are the checkpoint's and never change: what is too large for them saturates. Shape letters: T
tokens, U pages, S token slots, K key/value heads, D head size.
"""

from __future__ import annotations

from typing import Protocol

import torch

from pagerunner.batch import GroupBatch, LayerKV
from pagerunner.ops.fp8 import fitting_scale, from_fp8, to_fp8
from pagerunner.ops.pages import gather_slots, slot_layout, slot_rows, write_slots


class Writer(Protocol):
    """Stores the values of every token that has a page."""

    def write(self, group: GroupBatch, pages: torch.Tensor, values_TKD: torch.Tensor) -> None:
        """`values` are converted to the pages' dtype."""
        ...


def store(layer: LayerKV, which: int, values_TKD: torch.Tensor, group: GroupBatch, writer: Writer) -> torch.Tensor:
    """Write keys (`which` 0) or values (1), and return them as the pages hold them, [T, K, D] in their own dtype."""
    pages = (layer.k, layer.v)[which]
    if layer.scales is not None and layer.static:
        scale = layer.scales[0, which]
        quantised_TKD = to_fp8(values_TKD, scale, pages.dtype)
        writer.write(group, pages.view(torch.uint8), quantised_TKD.view(torch.uint8))
        return from_fp8(quantised_TKD, scale, values_TKD.dtype)
    return store_pages(pages, layer.scales, which, values_TKD, group, writer)


def store_pages(
    pages: torch.Tensor,
    scales: torch.Tensor | None,
    which: int,
    values_TKD: torch.Tensor,
    group: GroupBatch,
    writer: Writer,
) -> torch.Tensor:
    """As `store`, into `pages` [entries, slots, K, D] whose own scale, if there are `scales`, is `scales[entry, which]`."""
    if scales is not None:
        return _store_scaled(pages, scales, which, values_TKD, group, writer)
    writer.write(group, pages, values_TKD)
    return values_TKD if pages.dtype == values_TKD.dtype else values_TKD.to(pages.dtype).to(values_TKD.dtype)


def _store_scaled(
    pages: torch.Tensor,
    scales: torch.Tensor,
    which: int,
    values_TKD: torch.Tensor,
    group: GroupBatch,
    writer: Writer,
) -> torch.Tensor:
    wanted_T = fitting_scale(values_TKD.abs().amax((1, 2)), pages.dtype)
    stored_T = group.write_entry >= 0
    entries_U, page_T = group.write_entry[stored_T].unique(return_inverse=True)
    old_U = scales[entries_U, which]
    new_U = old_U.scatter_reduce(0, page_T, wanted_T[stored_T], "amax")
    grown = (new_U > old_U) & (old_U > 0)
    if grown.any():
        _rescale(pages, entries_U[grown], old_U[grown] / new_U[grown])
    scales[entries_U, which] = new_U
    scale_T = wanted_T.clone()  # of a token without a page: its own
    scale_T[stored_T] = new_U[page_T]
    scale_T11 = scale_T[:, None, None]
    quantised_TKD = to_fp8(values_TKD, scale_T11, pages.dtype)
    writer.write(group, pages.view(torch.uint8), quantised_TKD.view(torch.uint8))
    return from_fp8(quantised_TKD, scale_T11, values_TKD.dtype)


def _rescale(pages: torch.Tensor, entries_U: torch.Tensor, factor_U: torch.Tensor) -> None:
    """Convert everything in the pages `entries` to scales of which the old ones are `factor`."""
    size = pages.shape[1]
    raw = pages.view(torch.uint8)
    layout = slot_layout(raw)
    entries_S = entries_U.repeat_interleave(size)
    rows = slot_rows(entries_S, torch.arange(size, device=raw.device).repeat(len(entries_U)), layout)
    out = torch.empty(rows.numel(), layout.unit, dtype=torch.uint8, device=raw.device)
    held_SKD = gather_slots(raw, rows, layout, torch.uint8, out).view(pages.dtype)
    factor_S11 = factor_U.repeat_interleave(size)[:, None, None]
    converted = to_fp8(from_fp8(held_SKD, factor_S11, torch.float32), torch.ones_like(factor_S11), pages.dtype)
    write_slots(raw, rows, converted.view(torch.uint8), layout)
