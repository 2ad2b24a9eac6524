"""Steps of attention to a window's vectors and slots, for kernels and their twins. Every page that no query may read, and every slot that isn't
complete, is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from pagerunner.batch import StepRows
from pagerunner.ops.fp8 import exponents, fitting_scale, to_fp8
from pagerunner.ops.rope import RopeAngles
from pagerunner.ops.sparse_latents import Latents
from pagerunner.ops.vectors_attention import Choice, Slots, Window


@dataclass(frozen=True)
class Case:
    """Rows of (past, new tokens). `lost` of a row's first new tokens have no page where there are several."""

    rows: tuple[tuple[int, int], ...]
    window: int = 20
    ratio: int = 4
    top_k: int | None = None
    heads: int = 3
    size: int = 24
    stride: int = 0
    padding: int = 0
    dtype: torch.dtype = torch.float32
    block: int = 0  # elements of windows and slots in fp8 that share a scale


DECODE = ((0, 1), (3, 1), (19, 1), (200, 1), (63, 1))
PREFILL = ((0, 70), (37, 1), (101, 33), (5, 3), (15, 17))
CASES = {
    "decode": Case(DECODE),
    "decode, window only": Case(DECODE, ratio=0),
    "decode, heavy": Case(DECODE, ratio=32, window=7),
    "decode, chosen": Case(DECODE, top_k=9),
    "decode, halves": Case(DECODE, top_k=9, dtype=torch.float16, heads=20, size=40),
    "decode, fp8": Case(DECODE, top_k=9, block=8),
    "decode, heavy, fp8": Case(DECODE, ratio=32, window=7, block=16, heads=20, size=40, dtype=torch.float16),
    "decode, window only, fp8": Case(DECODE, ratio=0, block=8),
    "prefill, fp8": Case(PREFILL, padding=3, top_k=9, block=8),
    "prefill, window only, fp8": Case(PREFILL, ratio=0, window=5, block=16),
    "prefill": Case(PREFILL, padding=3),
    "prefill, window only": Case(PREFILL, ratio=0, window=5),
    "prefill, chosen": Case(PREFILL, top_k=9, padding=2, heads=17),
    "prefill, halves": Case(PREFILL, dtype=torch.float16),
    "drafts": Case(((0, 3), (40, 4), (18, 1)), stride=4, padding=4),
    "drafts, chosen": Case(((0, 3), (80, 4), (18, 1)), stride=4, top_k=5),
}


def rows_of(case: Case) -> StepRows:
    new, ends, slots = (
        [n for _, n in case.rows],
        [p + n for p, n in case.rows],
        [3 * r + 1 for r in range(len(case.rows))],
    )
    rows = StepRows.of(new, ends, slots)
    if not case.stride and not case.padding:
        return rows
    total = case.stride * (len(new) + case.padding // case.stride) if case.stride else rows.num_tokens + case.padding
    real = (
        torch.cat([torch.arange(n) + r * case.stride for r, n in enumerate(new)])
        if case.stride
        else torch.arange(sum(new))
    )
    row_T, positions_T = torch.full((total,), -1, dtype=torch.int32), torch.zeros(total, dtype=torch.int64)
    row_T[real], positions_T[real] = rows.row_T, rows.positions_T
    start = torch.arange(len(new) + 1, dtype=torch.int32) * case.stride if case.stride else rows.query_start_R1
    return replace(
        rows, row_T=row_T, positions_T=positions_T, query_start_R1=start, stride=case.stride, one_token=False
    )


def inputs(case: Case, page: int = 8, held: int = 4) -> tuple[tuple[Any, ...], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Arguments of `vectors_attention`, and by row its tokens' vectors and slots."""
    rows, dtype = rows_of(case), case.dtype
    longest = max(p + n for p, n in case.rows)
    columns = (
        -(-longest // page) if case.stride or rows.one_token else -(-(case.window + 40) // page)
    )  # used again and again
    window_pages = torch.full((len(case.rows) * columns + 1, page, case.size + 8), float("nan")).to(dtype)[..., 4:-4]
    window_table = torch.full((3 * len(case.rows) + 2, columns), -1)
    ratio = case.ratio or 1
    slot_columns = -(-longest // (ratio * held))
    slot_pages = torch.full((len(case.rows) * slot_columns + 1, held, case.size), float("nan")).to(dtype)
    slot_table = torch.full((3 * len(case.rows) + 2, slot_columns), -1)
    vectors_TD = rounded(torch.randn(rows.num_tokens, case.size).to(dtype), case.block)
    entries = torch.randperm(len(window_pages)).tolist(), torch.randperm(len(slot_pages)).tolist()
    told = []
    for row, (past, new) in enumerate(case.rows):
        slot = 3 * row + 1
        every = rounded(torch.randn(past + new, case.size).to(dtype), case.block)
        first = row * case.stride if case.stride else int(rows.query_start_R1[row])
        every[past:] = vectors_TD[first : first + new]
        paged = past + new if case.stride or rows.one_token else past
        for position in range(max(0, paged - case.window - 3), paged):
            column = position // page % columns
            if window_table[slot, column] < 0:
                window_table[slot, column] = entries[0].pop()
            window_pages[window_table[slot, column], position % page] = every[position]
        slots = rounded(torch.randn((past + new) // ratio, case.size).to(dtype), case.block)
        for number in range(len(slots)):
            if slot_table[slot, number // held] < 0:
                slot_table[slot, number // held] = entries[1].pop()
            slot_pages[slot_table[slot, number // held], number % held] = slots[number]
        told.append((every, slots))
    q_THD = torch.randn(rows.num_tokens, case.heads, case.size).to(dtype)
    angle = torch.rand(rows.num_tokens, 1, 4)
    angles = RopeAngles(
        torch.cat([angle.cos()] * 2, -1).to(dtype), torch.cat((-angle.sin(), angle.sin()), -1).to(dtype)
    )
    chosen = None
    if case.top_k is not None:
        chosen = torch.full((rows.num_tokens, case.top_k), -1, dtype=torch.int32)
        for token in (rows.row_T >= 0).nonzero().squeeze(-1).tolist():
            picked = torch.randperm((int(rows.positions_T[token]) + 1) // ratio)[: case.top_k]
            chosen[token, : len(picked)] = picked
    both = [in_fp8(pages, case.block)[0] if case.block else pages for pages in (window_pages, slot_pages)]
    window = Window(vectors_TD, both[0], window_table, case.window)
    slots = Slots(both[1], slot_table, ratio, chosen) if case.ratio else None
    return (q_THD, window, slots, rows, case.size**-0.5, torch.randn(case.heads), angles), told


def rounded(vectors: torch.Tensor, block: int) -> torch.Tensor:
    """Vectors as pages hold them."""
    return in_fp8(vectors, block)[1] if block else vectors


def in_fp8(slots: torch.Tensor, block: int) -> tuple[Latents, torch.Tensor]:
    """Slots [.., D] whose last 8 elements are rotary, as pages hold their vectors and behind these their scales, and what they are then."""
    size = slots.shape[-1] - 8
    held = torch.zeros(*slots.shape[:-1], size + 16, dtype=torch.uint8)
    scales = torch.zeros(*slots.shape[:-1], -(-size // block // 8) * 8, dtype=torch.uint8)
    pages = Latents(
        held[..., :size].view(torch.float8_e4m3fn),
        held[..., -16:].view(torch.bfloat16),
        scales[..., : size // block],
    )
    flat = Latents(*(part.view(1, -1, part.shape[-1]) if held.dim() == 2 else part for part in pages))
    where = torch.ones(flat.latent_ESC.shape[:2], dtype=torch.bool).nonzero(as_tuple=True)
    flat.write(slots.flatten(0, -2), *where)
    found = torch.cat(flat.read(*where), -1).view(slots.shape).to(slots.dtype)
    return pages, found


def published(pages: torch.Tensor) -> tuple[Latents, torch.Tensor]:
    """Slots of 512 numbers as published pages of DeepSeek-V4 hold them, 576 bytes each and behind all of them their scales; and the same as numbers."""
    entries, slots, _ = pages.shape
    held = torch.full((entries + 1, slots * 584 + 16), 0x7F, dtype=torch.uint8, device=pages.device)[
        :entries, : slots * 584
    ]
    parts = held[:, : slots * 576].unflatten(1, (slots, 576)), held[:, slots * 576 :].unflatten(1, (slots, 8))
    found = Latents(
        parts[0][..., :448].view(torch.float8_e4m3fn), parts[0][..., 448:].view(torch.bfloat16), parts[1][..., :7]
    )
    blocks = pages[..., :448].float().unflatten(-1, (7, 64)) * 2.0 ** torch.arange(
        -3, 4, device=pages.device
    ).unsqueeze(-1)
    scales = fitting_scale(blocks.abs().amax(-1), torch.float8_e4m3fn)
    codes = to_fp8(blocks, scales.unsqueeze(-1), torch.float8_e4m3fn)
    there = ~blocks.isnan().any(-1).any(-1)
    found.latent_ESC.view(torch.uint8)[there] = codes.flatten(-2).view(torch.uint8)[there]
    found.rope_ESP.copy_(pages[..., 448:])
    found.scales_ESG[there] = exponents(scales)[there]
    numbers = torch.cat(((codes.float() * scales.unsqueeze(-1)).flatten(-2).bfloat16(), pages[..., 448:]), -1)
    return found, torch.where(there.unsqueeze(-1), numbers, float("nan"))


def with_choice(arguments: tuple[Any, ...], top_k: int, fp8: bool) -> tuple[Any, ...]:
    """The same with an indexer in the sizes of V4-Flash that chooses slots. Its numbers are small integers, so scores are exact, and many of them are equal."""
    q_THD, window, slots, *others = arguments
    device, tokens, held = q_THD.device, len(q_THD), int(slots.table_SW.max()) + 2
    size = (slots.pages.latent_ESC if isinstance(slots.pages, Latents) else slots.pages).shape[1]
    numbers = torch.randint(-2, 3, (tokens, 64, 128), device=device).to(q_THD.dtype)
    keys = torch.randint(-2, 3, (held, size, 128), device=device).to(torch.float8_e4m3fn if fp8 else q_THD.dtype)
    weights = 2.0 ** torch.randint(-2, 2, (tokens, 64), device=device) * (
        1 - 2 * torch.randint(0, 2, (tokens, 64), device=device)
    )
    scales = 2.0 ** torch.randint(-1, 2, (held, size), device=device) if fp8 else None
    return q_THD, window, slots._replace(chosen=Choice(numbers, weights, top_k, keys, scales, {})), *others


def in_published_pages(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The same with windows and slots as published pages hold them, and with what these are as numbers."""
    q_THD, window, slots, *others = arguments
    both = [published(window.pages), None if slots is None else published(slots.pages)]
    window = window._replace(vectors_TD=published(window.vectors_TD.unsqueeze(0))[1][0])  # as pages hold them
    found = [
        (q_THD, window._replace(pages=both[0][at]), slots and slots._replace(pages=both[1][at]), *others)
        for at in range(2)
    ]
    return found[0], found[1]


def densely(arguments: tuple[Any, ...], told: list[tuple[torch.Tensor, torch.Tensor]], case: Case) -> torch.Tensor:
    q_THD, _, slots, rows, scale, sinks_H, angles = arguments
    out_THD = torch.zeros_like(q_THD)
    for token in (rows.row_T >= 0).nonzero().squeeze(-1).tolist():
        position, (every, complete) = int(rows.positions_T[token]), told[int(rows.row_T[token])]
        keys = [every[max(0, position - case.window + 1) : position + 1]]
        if slots is not None:
            chosen = torch.arange((position + 1) // case.ratio) if slots.chosen is None else slots.chosen[token]
            keys.append(complete[chosen[chosen >= 0].long()])
        keys_ND = torch.cat(keys).float()
        scores = torch.cat((q_THD[token].float() @ keys_ND.T * scale, sinks_H[:, None]), -1)
        found = scores.softmax(-1)[:, :-1] @ keys_ND
        turn = torch.complex(angles.cos_T1D[token, 0, :4].float(), -angles.sin_T1D[token, 0, 4:].float())
        pairs = torch.view_as_complex(found[:, -8:].unflatten(-1, (4, 2)).contiguous()) * turn
        out_THD[token] = torch.cat((found[:, :-8], torch.view_as_real(pairs).flatten(1)), -1).to(out_THD.dtype)
    return out_THD


def moved(arguments: Any, device: str) -> Any:
    """The same on a device; values may be dataclasses and named tuples."""
    if isinstance(arguments, torch.Tensor):
        return arguments.to(device)
    if isinstance(arguments, StepRows):
        named = {name: moved(getattr(arguments, name), device) for name in arguments.__dataclass_fields__}
        return StepRows(**named)
    if isinstance(arguments, tuple):
        parts = [moved(part, device) for part in arguments]
        return type(arguments)(*parts) if hasattr(arguments, "_fields") else tuple(parts)
    return arguments
