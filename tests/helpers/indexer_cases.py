"""Steps whose queries choose slots. Numbers are small integers, so scores are exact, and many of them are equal."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from helpers.attention_cases import padded, strided
from pagerunner.batch import StepRows


@dataclass(frozen=True)
class Case:
    """Rows of (past tokens, new tokens)."""

    rows: tuple[tuple[int, int], ...]
    top_k: int = 20
    heads: int = 3
    size: int = 8
    ratio: int = 1
    slots: int = 16  # of a page
    dtype: torch.dtype = torch.float32
    stride: int = 0
    padding: int = 0
    longest: int = 0  # a graph's bound, if it is more than the step's
    most: int = 2  # the largest integer


def made(case: Case, device: str = "cpu") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `choose_slots`, with NaN in every slot that no row sees."""
    new, ends = [n for _, n in case.rows], [past + n for past, n in case.rows]
    pages = [-(-(end // case.ratio) // case.slots) for end in ends]
    total = sum(pages) + 2
    fp8 = case.dtype.itemsize == 1
    keys = torch.full((total, case.slots, case.size), float("nan"))
    scales = torch.full((total, case.slots), float("nan"))
    free, slots = torch.randperm(total).tolist(), torch.randperm(len(ends) + 1).tolist()
    table = torch.full((len(ends) + 1, max(pages) + 1), -1, dtype=torch.int64)
    for row, (end, count) in enumerate(zip(ends, pages, strict=True)):
        held = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int64)
        table[slots[row], :count] = held
        at = torch.arange(end // case.ratio)
        entries, offsets = held[at // case.slots], at % case.slots
        keys[entries, offsets] = torch.randint(-case.most, case.most + 1, (len(at), case.size)).float()
        scales[entries, offsets] = 2.0 ** torch.randint(-1, 2, (len(at),))
    rows = StepRows.of(new, ends, slots[: len(ends)], device)
    if case.stride:
        rows, _ = strided(rows, case.stride, case.padding)
    elif case.padding:
        rows = padded(rows, case.padding)
    if case.longest:
        rows = replace(rows, max_seq_len=case.longest)
    q = torch.randint(-case.most, case.most + 1, (rows.num_tokens, case.heads, case.size)).float()
    weights = 2.0 ** torch.randint(-2, 2, (rows.num_tokens, case.heads)) * (
        1 - 2 * torch.randint(0, 2, (rows.num_tokens, case.heads))
    )
    compute = torch.float32 if fp8 else case.dtype
    given = (q.to(compute), weights, case.top_k, keys.to(case.dtype), table)
    args = tuple(x.to(device) if isinstance(x, torch.Tensor) else x for x in given)
    return (*args, rows, case.ratio, {}), {"scales_ES": scales.to(device) if fp8 else None}


SCORES = "all differ", "most are equal", "near ones are alike", "no numbers"


def check_best(kind: str, seen: list[int], top_k: int, device: str = "cpu") -> None:
    """The best of given scores, of rows that see so many slots."""
    from pagerunner.ops.kernels.latent.indexer import run_choice

    given = torch.randn(len(seen), -(-max(seen) // 128) * 128, device=device)
    if kind == "most are equal":
        given = given.round().clamp(0) + 0.0  # a zero has one sign
    if kind == "near ones are alike":
        given = given.cumsum(1)
    if kind == "no numbers":
        odd = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, 1e-40, -1e-40], device=device)
        given = torch.where(given > 1, odd[torch.randint(6, given.shape, device=device)], given)
    found = run_choice(given, top_k, StepRows.of([1] * len(seen), seen, range(len(seen)), device), 1, {})
    for row, count in enumerate(seen):
        want = given[row, :count].sort(descending=True, stable=True).indices[:top_k].sort().values
        assert found[row, : len(want)].tolist() == want.tolist(), (kind, count)
        assert (found[row, len(want) :] == -1).all(), (kind, count)
