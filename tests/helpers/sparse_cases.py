"""Steps of attention over chosen latents, with NaN in every slot that isn't chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from helpers.attention_cases import padded, strided
from pagerunner.batch import StepRows
from pagerunner.ops.fp8 import fitting_scale, to_fp8
from pagerunner.ops.sparse_latents import Latents


@dataclass(frozen=True)
class Case:
    """Rows of (past tokens, new tokens). `groups`: blocks of a latent in fp8 that have a scale each; 0 for pages of the queries' dtype.
    `size`: of a latent's numbers, about.
    """

    rows: tuple[tuple[int, int], ...]
    top_k: int = 40
    heads: int = 3
    latent: int = 24
    rope: int = 8
    value: int = 5
    slots: int = 16  # of a page
    groups: int = 0
    fp8: torch.dtype = torch.float8_e4m3fn
    size: float = 1.0
    dtype: torch.dtype = torch.float32
    stride: int = 0
    padding: int = 0
    longest: int = 0


def made(case: Case, device: str = "cpu") -> tuple[Any, ...]:
    """Arguments of `chosen_values`."""
    new, ends = [n for _, n in case.rows], [past + n for past, n in case.rows]
    pages = [-(-end // case.slots) for end in ends]
    total, latent = sum(pages) + 2, case.latent
    slots = torch.randperm(len(ends) + 1).tolist()
    table = torch.full((len(ends) + 1, max(pages) + 1), -1, dtype=torch.int64)
    free = torch.randperm(total).split([*pages, 2])
    for slot, held in zip(slots, free, strict=False):
        table[slot, : len(held)] = held
    rows = StepRows.of(new, ends, slots[: len(ends)], device)
    if case.stride:
        rows, _ = strided(rows, case.stride, case.padding)
    elif case.padding:
        rows = padded(rows, case.padding)
    count = min(case.top_k, case.longest or rows.max_seq_len)
    chosen = torch.full((rows.num_tokens, count), -1, dtype=torch.int32)
    seen = torch.zeros(total, case.slots, dtype=torch.bool)
    for token in (rows.row_T >= 0).nonzero().squeeze(-1).tolist():
        sees = int(rows.positions_T[token]) + 1
        own = torch.randperm(sees)[:count].sort().values
        chosen[token, : len(own)] = own.to(torch.int32)
        held = table[slots[int(rows.row_T[token])]]
        seen[held[own // case.slots], own % case.slots] = True
    vectors = torch.randn(total, case.slots, latent + case.rope)
    rope = vectors[..., latent:].to(case.dtype)
    if case.groups:
        factors = case.size * 2.0 ** torch.arange(case.groups).unsqueeze(-1)
        blocks = vectors[..., :latent].unflatten(-1, (case.groups, -1)) * factors
        scales = fitting_scale(blocks.abs().amax(-1), case.fp8)
        codes = to_fp8(blocks, scales.unsqueeze(-1), case.fp8).flatten(-2).view(torch.uint8)
        codes[~seen], scales[~seen] = 0x7F, float("nan")
        # a slot's parts are one after another, as pages have them
        slots_ESB = torch.cat((codes, scales.view(torch.uint8), rope.view(torch.uint8)), -1).to(device)
        codes, scales, rope = slots_ESB.split((latent, 4 * case.groups, case.rope * rope.itemsize), -1)
        held = Latents(codes.view(case.fp8), rope.view(case.dtype), scales.view(torch.float32))
    else:
        vectors = vectors.to(case.dtype)
        vectors[~seen] = float("nan")
        held = Latents(vectors[..., :latent].to(device), vectors[..., latent:].to(device))
    q = torch.randn(rows.num_tokens, case.heads, latent + case.rope).to(case.dtype).to(device)
    up = (torch.randn(case.heads, case.value, latent) / latent**0.5).to(case.dtype).to(device)
    return q[..., :latent], q[..., latent:], held, table.to(device), rows, chosen.to(device), 0.3, up, {}
