"""Recurrent layers with drafts against plain decoding, bit by bit: a journal of drafts, replayed as far as they were accepted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.compiler import needs_compiler
from helpers.drafted_states import Drafted, Request, layers, run
from helpers.effort import TEST_DAY, effort
from pagerunner.attention.cpu import CpuRecurrentBackend
from pagerunner.attention.paged_recurrent import PagedRecurrentBackend
from pagerunner.attention.recurrent import RecurrentBackend
from pagerunner.batch import StepRows

KINDS = ["gated delta", "mamba2", "slot pooling"]
BACKENDS = {
    "torch": RecurrentBackend,
    "twins": PagedRecurrentBackend,
    "cpu": pytest.param(CpuRecurrentBackend, marks=needs_compiler),
}


DTYPES = [
    (kind, dtype) for kind in KINDS for dtype in ("float32", "float16") if (kind, dtype) != ("slot pooling", "float16")
]


@pytest.mark.days(3)
@pytest.mark.parametrize(("kind", "dtype"), DTYPES)
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
def test_outputs_and_states_are_those_of_plain_decoding(kind: str, backend: Callable[[], Any], dtype: str) -> None:
    for drafts in effort((1, 3, 7), (1, 2, 3, 4, 5, 6, 7, 12)):
        run(*layers(dtype)[kind], backend(), drafts=drafts, seed=TEST_DAY + drafts, steps=effort(25, 120))


Fault = Callable[[Drafted, list[tuple[Request, int]], StepRows], StepRows]


def accepted(change: int) -> Fault:
    """So many more drafts than were accepted."""

    def fault(world: Drafted, work: list[tuple[Request, int]], rows: StepRows) -> StepRows:
        held = rows.accepted_R
        assert held is not None
        moved = (held + change).clamp(min=0, max=world.drafts)
        return replace(rows, accepted_R=torch.where(held >= 0, moved, held))

    return fault


def journals(change: Callable[[torch.Tensor, int], torch.Tensor]) -> Fault:
    """Journals of accepted drafts are others than were written."""

    def fault(world: Drafted, work: list[tuple[Request, int]], rows: StepRows) -> StepRows:
        for request, _ in work:
            for entries in world.pages.journal:
                entries[request.page] = change(entries[request.page].clone(), request.accepted)
        return rows

    return fault


def taps(world: Drafted, work: list[tuple[Request, int]], rows: StepRows) -> StepRows:
    """The last inputs before the state are one place off."""
    for request, _ in work:
        held = world.pages.states[0][request.page]
        held.copy_(held.roll(1, 0))
    return rows


def poison(entries: torch.Tensor, count: int) -> torch.Tensor:
    entries[max(count - 1, 0) : count] = float("nan")
    return entries


def leftover(world: Drafted, work: list[tuple[Request, int]], rows: StepRows) -> StepRows:
    """A prompt's row has what the slot's former request accepted, and the page has that request's journal."""
    assert rows.accepted_R is not None
    for request, _ in work:
        for entries in world.pages.journal:
            if not request.done:
                entries[request.page] = 1.0
    return replace(rows, accepted_R=torch.where(rows.accepted_R < 0, 1, rows.accepted_R))


def late(world: Drafted, work: list[tuple[Request, int]], rows: StepRows) -> StepRows:
    """Rows are a token further than they are."""
    return replace(rows, positions_T=rows.positions_T + 1, seq_lens_R=rows.seq_lens_R + 1)


FAULTS: dict[str, Fault] = {
    "one entry too many": accepted(1),
    "one entry too few": accepted(-1),
    "entries in another order": journals(lambda entries, count: entries.roll(1, 0)),
    "taps one place off": taps,
    "poison in an accepted entry": journals(poison),
    "the journal of a former request": leftover,
    "saves at another position": late,
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
@pytest.mark.parametrize("kind", KINDS)
def test_planted_faults_are_noticed(kind: str, fault: Fault) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        run(*layers("float32")[kind], PagedRecurrentBackend(), drafts=3, seed=3, tamper=fault, steps=80)


def test_poison_behind_the_accepted_entries_is_never_read() -> None:
    def unread(entries: torch.Tensor, count: int) -> torch.Tensor:
        entries[count:] = float("nan")
        return entries

    for kind in KINDS:
        run(*layers("float32")[kind], PagedRecurrentBackend(), drafts=3, seed=4, tamper=journals(unread))
