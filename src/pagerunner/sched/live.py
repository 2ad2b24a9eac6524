"""What runs, what waits and why, and who holds which pages at one moment: small enough to be asked for while steps run.

Page ids travel as bytes, four bytes an id. So fifty thousand ids cost the core under a millisecond.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Literal

import msgspec

from pagerunner.memory.ownership import held_pages

if TYPE_CHECKING:
    from pagerunner.memory.manager import KVManager
    from pagerunner.memory.memory_plan import GroupPlan
    from pagerunner.sched.request import Sequence
    from pagerunner.sched.state import SchedulerState

Wait = Literal[
    "", "sibling", "slot", "pages", "snapshot", "transfer", "moves", "budget", "turn", "line", "grammar", "adapter",
    "paused",
]  # fmt: skip
"""Why a request has no row in the next step: nothing; a sibling's pages that are still being filled; every slot is taken;
the pages of its prompt don't fit; another request is about to leave a snapshot that saves it work; a
transfer brings pages that save it work; pages are
still being moved together to make room; the step's tokens are spoken for; its own last step is under way; others are before it; what its
grammar allows next is not known yet; its adapter isn't on the device; the engine is paused or sleeps."""

MAX_WAITING = 256
"""How many waiting requests are listed; the others are only counted."""


class LiveRequest(msgspec.Struct, frozen=True, array_like=True):
    """One unfinished request. `slot` is -1 while it waits; lengths are in tokens, `limit` is the longest it may become.

    Of its `tokens`, `computed` are in pages; `cached` came from the prefix cache (-1: not known yet). `pages` has, by group, the
    int32 page ids in the order of its tokens, -1 for pages that it doesn't keep. `arrival` is on the clock of the state.
    """

    request_id: str
    slot: int
    arrival: float
    prompt: int
    tokens: int
    computed: int
    cached: int
    limit: int
    wait: Wait
    pages: list[bytes]


def live_request(sequence: Sequence, groups: Iterable[GroupPlan], wait: Wait = "") -> LiveRequest:
    """How a request stands."""
    grant = sequence.grant
    pages: list[bytes] = []
    if grant is not None:
        pages = [array("i", held_pages(grant, number, group)).tobytes() for number, group in enumerate(groups)]
        if not wait and any(grant.borrowed) and sequence.scheduled == sequence.cached_tokens:
            wait = "sibling"
    return LiveRequest(
        sequence.request_id,
        -1 if grant is None else grant.slot,
        sequence.request.arrival_time,
        sequence.prompt_len,
        len(sequence.tokens),
        min(sequence.scheduled, len(sequence.tokens)),
        sequence.cached_tokens,
        sequence.max_total,
        wait,
        pages,
    )


def live_requests(state: SchedulerState, *, paused: bool = False) -> list[LiveRequest]:
    """The running requests, then the first of those that wait, and why: those that a grammar holds back, then the line."""
    groups = state.manager.plan.groups
    held = state.guided.held.values()
    wait = why_first_waits(state)
    listed: list[tuple[Sequence, Wait]] = [(one, "adapter" if one.awaits_adapter else "") for one in state.running]
    listed += [(sequence, "grammar") for sequence in islice(held, MAX_WAITING)]
    if state.adapters is not None:
        listed += [(sequence, "adapter") for sequence in islice(state.adapters.held.values(), MAX_WAITING)]
    for sequence in islice(state.waiting, max(MAX_WAITING + len(state.running) - len(listed), 0)):
        listed.append((sequence, wait))
        wait = "line"
    return [live_request(sequence, groups, "paused" if paused else wait) for sequence, wait in listed]


def why_first_waits(state: SchedulerState, *, paused: bool = False) -> Wait:
    """Why the first of those that wait has no row in the next step; empty if nobody waits.

    Requests that a grammar holds back come last here: they keep nobody waiting.
    """
    lacks_adapter = state.adapters is not None and bool(state.adapters.held)
    if paused and (state.waiting or state.guided.held or lacks_adapter):
        return "paused"
    if not state.waiting:
        return "adapter" if lacks_adapter else "grammar" if state.guided.held else ""
    first = state.waiting.peek()
    if not state.free_slots:
        return "slot"
    if first.in_flight:
        return "turn"
    if first.blocked:
        return "grammar"
    if first.awaits_transfer and first.retry_version >= 0 or state.tiers is not None and state.tiers.fills(first):
        return "transfer"
    if first.retry_version >= 0 and state.manager.awaits == "snapshot":
        return "snapshot"
    if state.manager.moves_unfinished:
        return "moves"
    return "pages" if first.retry_version == state.manager.version else "budget"


def page_books(manager: KVManager) -> tuple[bytes, bytes, list[bytes]]:
    """Int32 ids of the slabs that a group owns, one byte for each of them with its group, and, by group, the int32 ids of the
    pages that are found by their content, but aren't in a request's table: those that only the prefix index holds, and those of adapters that requests run with.
    """
    pool, adapters = manager.pool, manager.adapters
    return (
        array("i", pool.owner).tobytes(),
        bytes(pool.owner.values()),
        [array("i", [*cached, *adapters.holders(group)]).tobytes() for group, cached in enumerate(pool.cached)],
    )
