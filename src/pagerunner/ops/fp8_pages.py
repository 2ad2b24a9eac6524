"""fp8 pages whose scales grow with what is written to them. Shape letters: E entries, T tokens, U pages, S slots, K heads."""

from __future__ import annotations

import torch

from pagerunner.ops.fp8 import from_fp8, grown_scale, to_fp8
from pagerunner.ops.pages import gather_slots, slot_layout, slot_rows, write_slots


def grow_scales(
    pages: torch.Tensor, scales_E2K: torch.Tensor, which: int, values_TKD: torch.Tensor, write_entry_T: torch.Tensor
) -> torch.Tensor:
    """Grow the scales of `pages` [entries, slots, K, D] for the values that are about to be written.

    Where a head's scale grows, the page's older elements of that head are converted. Returns the tokens' scales, [T, K]. A token
    without a page (entry -1) has a scale of its own.
    """
    largest_TK = values_TKD.abs().amax(2)
    scale_TK = grown_scale(torch.zeros_like(largest_TK, dtype=torch.float32), largest_TK, pages.dtype)
    stored_T = write_entry_T >= 0
    entries_U, page_T = write_entry_T[stored_T].unique(return_inverse=True)
    old_UK = scales_E2K[entries_U, which]
    page_TK = page_T.unsqueeze(1).expand(-1, old_UK.shape[1])
    most_UK = torch.zeros_like(old_UK).scatter_reduce(0, page_TK, largest_TK[stored_T].float(), "amax")
    new_UK = grown_scale(old_UK, most_UK, pages.dtype)
    grown_U = ((new_UK > old_UK) & (old_UK > 0)).any(1)
    if grown_U.any():
        _convert(pages, entries_U[grown_U], old_UK[grown_U] / torch.where(new_UK > 0, new_UK, 1.0)[grown_U])
    scales_E2K[entries_U, which] = new_UK
    scale_TK[stored_T] = new_UK[page_T]
    return scale_TK


def _convert(pages: torch.Tensor, entries_U: torch.Tensor, factor_UK: torch.Tensor) -> None:
    """Convert the pages `entries` to new scales. `factor` is the old scale over the new one."""
    size = pages.shape[1]
    raw = pages.view(torch.uint8)
    layout = slot_layout(raw)
    entries_S = entries_U.repeat_interleave(size)
    rows = slot_rows(entries_S, torch.arange(size, device=raw.device).repeat(len(entries_U)), layout)
    out = torch.empty(rows.numel(), layout.unit, dtype=torch.uint8, device=raw.device)
    held_SKD = gather_slots(raw, rows, layout, torch.uint8, out).view(pages.dtype)
    factor_SK1 = factor_UK.repeat_interleave(size, 0).unsqueeze(-1)
    converted = to_fp8(from_fp8(held_SKD, factor_SK1, torch.float32), torch.ones_like(factor_SK1), pages.dtype)
    write_slots(raw, rows, converted.view(torch.uint8), layout)
