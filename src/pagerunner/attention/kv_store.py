"""Keys and values as pages hold them: written in the pages' dtype, read back in the model's.

A step's new tokens take part in attention rounded as their pages will hold them. So a dtype that rounds doesn't make a token's
result depend on how its prompt was divided into steps.

An fp8 page carries two scales for each head and layer: one for keys, one for values. (Latents: one for the vectors.) A scale is
zero in a fresh page, so fresh pages must be zeroed. A scale grows when a token needs a larger one. Then the head's older
elements in the page are converted. Static scales are the checkpoint's and never change: larger numbers saturate.

Shape letters: T tokens, U pages, S token slots, K key/value heads, D head size.
"""

from __future__ import annotations

from typing import Protocol

import torch

from pagerunner.batch import GroupBatch, KVPages
from pagerunner.ops.fp8 import from_fp8, to_fp8
from pagerunner.ops.fp8_pages import grow_scales
from pagerunner.ops.sparse_latents import held_in_fp8


class Writer(Protocol):
    """Stores the values of every token that has a page."""

    def write(self, group: GroupBatch, pages: torch.Tensor, values_TKD: torch.Tensor) -> None:
        """`values` are converted to the pages' dtype."""


def store(layer: KVPages, which: int, values_TKD: torch.Tensor, group: GroupBatch, writer: Writer) -> torch.Tensor:
    """Write keys (`which` 0) or values (1), and return them as the pages hold them, [T, K, D] in their own dtype."""
    if coded := held_in_fp8(layer.coded):
        return coded[0].write(values_TKD.squeeze(1), *group.write).unsqueeze(1)
    pages = (layer.k, layer.v)[which]
    if layer.scales is not None and layer.static:
        scale = layer.scales[0, which].unsqueeze(-1)
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
    """As `store`, into `pages` [entries, slots, K, D] whose own scales, if there are `scales`, are `scales[entry, which]`, [K]."""
    if scales is not None:
        return _store_scaled(pages, scales, which, values_TKD, group, writer)
    writer.write(group, pages, values_TKD)
    return values_TKD if pages.dtype == values_TKD.dtype else values_TKD.to(pages.dtype).to(values_TKD.dtype)


def _store_scaled(
    pages: torch.Tensor, scales: torch.Tensor, which: int, values_TKD: torch.Tensor, group: GroupBatch, writer: Writer
) -> torch.Tensor:
    scale_TK1 = grow_scales(pages, scales, which, values_TKD, group.write.entry_T).unsqueeze(-1)
    quantised_TKD = to_fp8(values_TKD, scale_TK1, pages.dtype)
    writer.write(group, pages.view(torch.uint8), quantised_TKD.view(torch.uint8))
    return from_fp8(quantised_TKD, scale_TK1, values_TKD.dtype)
