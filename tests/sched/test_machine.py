"""Random traffic over manager and scheduler, every step executed by a runner that notices a wrong page."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from helpers.effort import effort
from helpers.traffic import QUICK, WORDS, Traffic, expect_failure, mixes, run_until
from pagerunner.memory import growth, rules
from pagerunner.memory.forks import Forks
from pagerunner.memory.grant import NO_PAGE, Grant
from pagerunner.memory.holdings import Holdings
from pagerunner.memory.manager import KVManager
from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.memory.prefix import PrefixChain
from pagerunner.memory.slabs import SlabPool
from pagerunner.memory.snapshots import Snapshots
from pagerunner.sched import results, scheduler, suffix
from pagerunner.sched.suffix import SuffixDrafter
from pagerunner.types import PageCopy, StateSave, TableWrite


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So short that prompts of these tests are long chunks."""
    for module in (rules, growth):
        monkeypatch.setattr(module, "SHORT_CHUNK", 24)


def test_random_traffic_finishes_with_the_right_tokens_and_loses_no_page() -> None:
    run_state_machine_as_test(Traffic, settings=settings(QUICK, max_examples=effort(60, 1000), stateful_step_count=30))


# -- the machine itself must be able to fail: planted bugs have their turn within three days, the traffic above is tried daily


class _ForgetsReference(SlabPool):
    def share(self, group: int, pages: Any) -> None:
        super().share(group, pages)
        for page in pages:
            if self.refs[group][page] > 1:
                self.refs[group][page] -= 1


class _LeaksPages(SlabPool):
    def release(self, group: int, pages: Any) -> None:
        super().release(group, pages[: len(pages) - len(pages) // 9])


class _IgnoresSalt(KVManager):
    def chain(self, cache_salt: str = "", parent_id: str = "", adapter: Any = None) -> PrefixChain:
        return super().chain("", parent_id)


class _LosesTableWrites(KVManager):
    def take_table_writes(self) -> list[TableWrite]:
        return [write for write in super().take_table_writes() if write.first != 2]


class _ForgetsPromises(KVManager):
    def release(self, grant: Grant) -> None:
        grant.promise = [0] * len(grant.promise)
        super().release(grant)


class _ForgetsReferenceManager(KVManager):
    def __init__(self, plan: MemoryPlan, **options: Any) -> None:
        super().__init__(plan, **options)
        self.pool.__class__ = _ForgetsReference


class _LeaksManager(KVManager):
    def __init__(self, plan: MemoryPlan, **options: Any) -> None:
        super().__init__(plan, **options)
        self.pool.__class__ = _LeaksPages


class _SharesOnePageTwice(KVManager):
    """A grown page that is already the request's first one."""

    def grow(self, grant: Grant, start: int, end: int, low: int | None = None) -> int:
        before = len(grant.pages[0])
        grown = super().grow(grant, start, end, low)
        if len(grant.pages[0]) > before + 1:
            grant.pages[0][-1] = grant.pages[0][0]
        return grown


class _UnchainedHashes(PrefixChain):
    """Equal units are taken for equal prefixes."""

    def cover(self, tokens: Any, limit: int) -> None:
        done = 16 * len(self.hashes)
        ends = range(done, min(limit, len(tokens)) - 15, 16)
        self.hashes += [bytes(str(tokens[at : at + 16]), "ascii") for at in ends]


class _ConfusesPrefixes(KVManager):
    def chain(self, cache_salt: str = "", parent_id: str = "", adapter: Any = None) -> PrefixChain:
        return _UnchainedHashes(super().chain(cache_salt, parent_id, adapter).seed)


@pytest.mark.days(3)
@pytest.mark.parametrize(
    "broken",
    [
        _ForgetsReferenceManager,
        _LeaksManager,
        _IgnoresSalt,
        _LosesTableWrites,
        _ForgetsPromises,
        _SharesOnePageTwice,
        _ConfusesPrefixes,
    ],
)
def test_a_planted_bug_is_caught(broken: type[KVManager]) -> None:
    expect_failure(type("Broken", (Traffic,), {"manager_class": broken}))


def _with_holdings(kind: type[Holdings]) -> type[KVManager]:
    """A manager whose holdings are of that kind."""

    class Broken(KVManager):
        def __init__(self, plan: MemoryPlan, **options: Any) -> None:
            super().__init__(plan, **options)
            self._holdings.__class__ = kind

    return Broken


class _TrimsTooMuch(Holdings):
    def trim(self, grant: Grant, group: int, first: int) -> int:
        return super().trim(grant, group, min(first + 1, len(grant.pages[group])))


class _WritesIntoHoles(KVManager):
    def take_table_writes(self) -> list[TableWrite]:
        return [
            write._replace(entries=[max(entry, 0) for entry in write.entries]) for write in super().take_table_writes()
        ]


class _TrimsBeforeSnapshots(KVManager):
    """Snapshots may overwrite what the same step still reads."""

    def end_plan(self, rows: Any) -> list[StateSave]:
        kept = list(rows)
        return [*super().end_plan([]), *super().end_plan(kept)]


class _SavesAnotherPosition(KVManager):
    def end_plan(self, rows: Any) -> list[StateSave]:
        kept = list(rows)
        saves = super().end_plan(kept)
        return [save._replace(position=max(save.position - 16, kept[save.row][1] + 1)) for save in saves]


class _ZeroingSnapshots(Snapshots):
    def restore(self, grant: Grant, hit: int, promised: Any) -> None:
        super().restore(grant, hit, promised)
        self._work._fresh[self._group][grant.pages[self._group][0]] = None


class _ZeroesTheCopy(KVManager):
    def __init__(self, plan: MemoryPlan, **options: Any) -> None:
        super().__init__(plan, **options)
        self._snapshots.__class__ = _ZeroingSnapshots


class _SharesTheSnapshot(KVManager):
    """Continues in the snapshot's own page: whoever hits next finds a later state."""

    def take_copies(self) -> list[PageCopy]:
        return [copy for copy in super().take_copies() if copy.group != self._snapshots._group]


class _WritesIntoBorrowedPages(Holdings):
    """Siblings go on in one page."""

    def borrowed_to_copy(self, grant: Grant, group: int) -> list[int]:
        return []


class _CopiesBeforeTheWrite(KVManager):
    """In the very step that computes what is copied."""

    def must_wait(self, grant: Grant) -> bool:
        return False


class _KeepsTheBorrowedEntry(Holdings):
    """The copy is made, but the table still names the sibling's page."""

    def replace_borrowed(self, grant: Grant, group: int, numbers: Any, fresh: Any) -> None:
        sent = grant.sent[group]
        super().replace_borrowed(grant, group, numbers, fresh)
        grant.sent[group] = sent


class _ZeroesTheBorrowedCopy(Holdings):
    def replace_borrowed(self, grant: Grant, group: int, numbers: Any, fresh: Any) -> None:
        super().replace_borrowed(grant, group, numbers, fresh)
        self._work._fresh[group].update(dict.fromkeys(fresh))


class _CarelessForks(Forks):
    def find(self, key: Any, tokens: int, rules: Any, index: Any, epoch: int) -> Any:
        for holder, plan in self.holders(key):
            found = []
            for group, kept in enumerate(rules):
                first, stop = kept.span(tokens, tokens)
                there = [page for page in holder.pages[group] if page != NO_PAGE]
                if len(there) >= stop - first:
                    found.append((first, there[: stop - first]))
            if len(found) == len(rules) and holder.epoch == epoch:
                return found, plan
        return None


class _BorrowsWhatIsGone(KVManager):
    """A window has moved past the prompt, or its last page went on with the sibling's text: any page will do."""

    def __init__(self, plan: MemoryPlan, **options: Any) -> None:
        super().__init__(plan, **options)
        self._forks.__class__ = _CarelessForks


@pytest.mark.days(3)
@pytest.mark.parametrize(
    ("broken", "kinds"),
    [
        (_with_holdings(_WritesIntoBorrowedPages), ("full",)),
        (_with_holdings(_WritesIntoBorrowedPages), ("full", "window-40")),
        (_CopiesBeforeTheWrite, ("full", "chunked-50")),
        (_with_holdings(_KeepsTheBorrowedEntry), ("latent-4",)),
        (_with_holdings(_ZeroesTheBorrowedCopy), ("full",)),
        (_BorrowsWhatIsGone, ("full", "window-40")),
        (_with_holdings(_TrimsTooMuch), ("full", "window-40")),
        (_with_holdings(_TrimsTooMuch), ("chunked-50",)),
        (_WritesIntoHoles, ("full", "window-5")),
        (_TrimsBeforeSnapshots, ("window-40", "recurrent")),
        (_SavesAnotherPosition, ("full", "recurrent")),
        (_ZeroesTheCopy, ("full", "recurrent")),
        (_SharesTheSnapshot, ("latent-4", "recurrent")),
    ],
)
def test_a_bug_planted_in_windows_snapshots_or_forks_is_caught(broken: type[KVManager], kinds: tuple[str, ...]) -> None:
    steps = 60 if broken is _TrimsBeforeSnapshots else 30  # short traffic seldom saves what its step still reads
    expect_failure(type("Broken", (Traffic,), {"manager_class": broken, "pools": mixes(kinds)}), steps=steps)


# -- drafts: how far a sequence is, the host knows by bounds only


class _TrimsByTheUpperBound(KVManager):
    def grow(self, grant: Grant, start: int, end: int, low: int | None = None) -> int:
        return super().grow(grant, start, end, None if low is None else start)


class _GrowsByTheLowerBound(KVManager):
    def grow(self, grant: Grant, start: int, end: int, low: int | None = None) -> int:
        return end if super().grow(grant, start, end if low is None else end - (start - low), low) else 0


class _LeavesDraftsWithoutPages(KVManager):
    def grow(self, grant: Grant, start: int, end: int, low: int | None = None) -> int:
        return end if super().grow(grant, start, end if low is None else start + 1, low) else 0


@pytest.mark.days(3)
@pytest.mark.parametrize(
    ("broken", "kinds"),
    [
        (_TrimsByTheUpperBound, ("full", "window-5")),
        (_TrimsByTheUpperBound, ("chunked-32",)),
        (_GrowsByTheLowerBound, ("full",)),
        (_LeavesDraftsWithoutPages, ("window-40",)),
    ],
)
def test_a_bug_planted_in_bounds_is_caught(broken: type[KVManager], kinds: tuple[str, ...]) -> None:
    pools = mixes(kinds, drafts=(3, 7))
    expect_failure(type("Broken", (Traffic,), {"manager_class": broken, "pools": pools}))


@pytest.mark.days(3)
def test_tables_that_are_not_wider_for_drafts_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    width = rules.ForgettingRule.table_width
    monkeypatch.setattr(
        rules.ForgettingRule,
        "table_width",
        lambda self, tokens: width(dataclasses.replace(self, open_tokens=1), tokens),
    )
    expect_failure(type("Broken", (Traffic,), {"pools": mixes(("window-5",), drafts=(7,))}))


@pytest.mark.days(3)
def test_a_bound_that_is_not_lowered_at_commit_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = results.commit

    def forgets(state: Any, plan: Any, result: Any) -> Any:
        before = [(sequence, sequence.scheduled) for sequence in state.running]
        updates = commit(state, plan, result)
        for sequence, scheduled in before:
            if sequence.grant is not None:
                sequence.scheduled = scheduled
        return updates

    monkeypatch.setattr(scheduler, "commit", forgets)
    expect_failure(type("Broken", (Traffic,), {"pools": mixes(("full",), drafts=(7,))}))


def test_drafts_are_accepted_and_pages_are_scarce_in_this_traffic() -> None:
    """Else the tests above mean little."""
    seen = {"accepted": 0, "preempted": 0}

    class Counted(Traffic):
        pools = mixes(drafts=(3, 7))

        def teardown(self) -> None:
            super().teardown()
            if hasattr(self, "checker"):
                seen["accepted"] += self.checker.accepted
                seen["preempted"] += self.scheduler.stats().preemptions_total

    run_until(Counted, lambda: seen["accepted"] > 200 and seen["preempted"] > 0, examples=effort(20, 200))


@pytest.mark.days(3)
def test_the_host_drafts_what_finished_answers_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the traffic with its drafts means little: prompts come again, and so do their answers."""
    monkeypatch.setattr(suffix, "LEAST_TOKENS", 8)  # so that texts outgrow their room
    seen = {"accepted": 0, "ahead": 0}

    class Worded(Traffic):
        pools = mixes(drafts=(3, 7))
        drafters = st.builds(SuffixDrafter, st.just(WORDS), tokens=st.just(1 << 12))

        def step(self, fault: bool = False) -> None:
            super().step(fault)
            if self.flight and (plan := self.flight[-1][0]).guesses:
                known = {guess.slot: guess.start for guess in plan.guesses}
                seen["ahead"] += any(row.start >= known.get(row.slot, row.start + 1) for row in plan.rows)

        def teardown(self) -> None:
            super().teardown()
            if hasattr(self, "checker"):
                seen["accepted"] += self.checker.accepted

    run_until(Worded, lambda: seen["accepted"] > 50 and seen["ahead"] > 5, examples=effort(20, 200))
