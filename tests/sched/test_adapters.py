"""Random traffic of requests with adapters in pages of the pool: each row's adapter is whole in the pages that its slot's table names, and no request waits for
ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import pytest
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from helpers.effort import effort
from helpers.plans import two_groups
from helpers.recount import recount_adapters
from helpers.traffic import Traffic, expect_failure, plans, run_until
from pagerunner.memory import manager
from pagerunner.memory.adapters import AdapterLease, AdapterPages, adapter_keys
from pagerunner.memory.grant import Grant
from pagerunner.sched.adapters import Adapters
from pagerunner.sched.request import Sequence
from pagerunner.types import StepPlan
from pagerunner.types.lora import AdapterEnd, AdapterFill, AdapterInfo, AdapterMove

NAMES = "abcde"
COARSE = st.builds(
    lambda slabs, shape, size: two_groups(slabs, *shape, slab_bytes=size),
    st.integers(3, 12),
    st.sampled_from([((16, 4), (1, 3)), ((4, 16), (1, 3)), ((32, 16), (2, 1)), ((1, 8), (1, 3))]),
    st.sampled_from([4096, 6160, 10_000]),
)
"""Pools whose pages are often moved together."""


class AdapterTraffic(Traffic):
    """A device whose pages hold nothing while they are filled, and host memory that forgets. Names get new contents while requests have the old ones."""

    books: type[Adapters] = Adapters
    pools = st.one_of(plans(), COARSE)
    seen: ClassVar[dict[str, int]] = {}

    def make_adapters(self, data: st.DataObject) -> Adapters:
        self.adapters = self.books(slots := data.draw(st.integers(1, 3)))
        self.most_pages = data.draw(st.sampled_from([1, 3, 5, 8]))
        self.host = set[str]()
        self.adapters.copies = self.host
        self.versions = dict.fromkeys(NAMES, 0)
        for name in NAMES:
            self.change(name)
        self.tables: list[tuple[str, list[int]] | None] = [None] * slots  # contents, and where their pages lie
        self.reads: list[tuple[int, str]] = []
        self.fills: list[AdapterFill] = []
        self.rows: dict[int, tuple[int, str]] = {}  # by requests' slots: slot of adapters, and its content
        self.group = self.plan.largest_group
        return self.adapters

    def adapter_for(self, request_id: str) -> str:
        name = (*NAMES, "", "")[(31 * self.made + int(request_id[-1]) * (self.made % 3)) % 7]
        if name:
            self.checker.contents[request_id] = self.adapters.names[name].digest
        return name

    def info_of(self, name: str) -> AdapterInfo | None:
        return self.adapters.names.get(name)

    def change(self, name: str) -> None:
        self.versions[name] += 1
        digest = f"{name}{self.versions[name]}"
        twin = self.adapters.names.get(NAMES[(NAMES.index(name) + 1) % len(NAMES)])
        if self.versions[name] % 3 == 0 and twin is not None:  # in a directory of its own
            digest = twin.digest
        pages = 1 + ord(digest[0]) % self.most_pages
        self.adapters.names[name] = AdapterInfo(name, f"{digest}@{name}", digest, 4, num_pages=pages)

    @rule(name=st.sampled_from(NAMES))
    def load_inplace(self, name: str) -> None:
        self.change(name)

    @rule(choice=st.integers(0, 9))
    def forget(self, choice: int) -> None:
        spare = sorted(self.host - self.adapters.to_fill())
        if spare:
            self.host.remove(spare[choice % len(spare)])

    @rule()
    def end_read(self) -> None:
        if not self.reads:
            return
        number, path = self.reads.pop(0)
        digest = path.partition("@")[0]
        end, waiting = AdapterEnd(number, digest), len(self.adapters._reads)
        if number % 9 == 3:
            end = AdapterEnd(number, error="its directory is gone")
        elif number % 9 == 6:
            end = AdapterEnd(number, "another")
        self.host |= {end.digest} - {""}
        if self.adapters.ended(end):
            self.count("read" if end.digest == digest else "unread")
            self.count("read elsewhere" if len(self.adapters._reads) > waiting else "")
        self.note(self.scheduler.take_failed())

    @rule()
    def end_fill(self) -> None:
        if not self.fills:
            return
        fill = self.fills.pop(0)
        well = fill.number % 7 != 3
        for number in fill.missing if well else ():
            self.write(fill.offsets[number], f"{fill.digest}:{number}")
        self.tables[fill.slot] = (fill.digest, fill.offsets) if well else None
        error = "" if well else "a copy has failed"
        assert self.adapters.ended(AdapterEnd(fill.number, error=error))
        self.note(self.scheduler.take_failed())
        self.count("filled" if well else "failed")
        self.count("filled in part" if well and 0 < len(fill.missing) < len(fill.offsets) else "")

    def write(self, offset: int, content: str) -> None:
        self.checker._page(self.group, offset)[:] = [content] * self.checker._size(self.group)

    def step(self, fault: bool = False) -> None:
        run, self.checker.run = self.checker.run, self.look  # type: ignore[method-assign]
        self.run, self.launched = run, False
        try:
            super().step(fault)
        finally:
            self.checker.run = run  # type: ignore[method-assign]
        recount_adapters(self.adapters, self.all())
        self.reads += self.adapters.take_reads()
        for fill in self.adapters.take_fills():  # behind the step that was launched
            assert self.launched, "what the step before moves may lie there"
            assert fill.digest in self.host, "there is no copy of it"
            self.tables[fill.slot] = None
            self.fills.append(fill)
        if self.adapters.busy and not self.flight:  # or nothing goes on
            self.end_fill()
            self.end_read()
        self.count("held" if self.adapters.held else "")

    def look(self, plan: StepPlan, errors: Any = None) -> Any:
        self.launched = True
        for fill in self.fills:
            for number in fill.missing:
                self.write(fill.offsets[number], "arriving")
        for init in plan.admitted:
            self.rows[init.slot] = init.adapter, self.checker.contents.get(init.request.request_id, "")
        for move in plan.adapter_moves:
            before = self.tables[move.slot]
            assert before is not None, "the device doesn't know what is in this slot"
            self.tables[move.slot] = before[0], move.offsets
            self.count("moved")
        result = self.run(plan, errors)
        for row in plan.rows:
            slot, content = self.rows[row.slot]
            assert (slot < 0) is (not content)
            if content:
                table = self.tables[slot]
                assert table is not None and table[0] == content, f"{content} is not in slot {slot}: {table}"
                for number, offset in enumerate(table[1]):
                    held = set(self.checker.pages[self.group].get(offset, ["nothing"]))
                    assert held == {f"{content}:{number}"}, f"page {number} of {content} holds {held}"
        return result

    def all(self) -> list[Sequence]:
        return list(self.scheduler._state.sequences.values())

    def sleep(self) -> None:
        Traffic.sleep(self)
        self.fills.clear()  # the worker has waited for them
        self.tables = [None] * len(self.tables)

    sleep = rule()(sleep)

    def end_transfers(self) -> None:
        while self.reads or self.fills:
            self.end_read()
            self.end_fill()

    def count(self, what: str) -> None:
        self.seen[what] = self.seen.get(what, 0) + 1

    @invariant()
    def adapters_balance(self) -> None:
        if hasattr(self, "scheduler") and not self.failed:
            stats, state = self.adapters.stats(self.all()), self.adapters.memory_state()
            page_bytes = self.plan.groups[self.group].page_bytes
            used = {one.adapter.digest: one.adapter for one in self.all() if one.grant is not None and one.adapter}
            assert stats.used_bytes >= page_bytes * sum(one.num_pages for one in used.values())
            assert page_bytes * len(self.manager.index.adapters[self.group]) <= stats.num_bytes == state.num_bytes
            assert stats.num_bytes == sum(one.num_bytes for one in state.there)
            assert {one.digest for one in state.there if one.used} >= used.keys()

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "scheduler") and not self.failed:
            assert not self.adapters.held and not any(slot.users for slot in self.adapters._slots)


def test_no_step_reads_another_adapter_and_every_request_ends() -> None:
    AdapterTraffic.seen = {}
    usual, rare = ("held", "filled", "failed", "read", "unread"), ("filled in part", "moved", "read elsewhere")
    seen = lambda what: AdapterTraffic.seen.get(what, 0)  # noqa: E731
    enough = lambda: all(seen(what) > 10 for what in usual) and all(map(seen, rare))  # noqa: E731
    run_until(AdapterTraffic, enough, effort(12, 600), steps=30, phases=[Phase.generate])


class _LetsGoTooEarly(Adapters):
    """A preempted sequence's slot may be filled, though the sequence believes that it has it."""

    def settle(self) -> list[Sequence]:
        for slot in self._slots:
            slot.users = {}
        return super().settle()


class _BelievesInNames(Adapters):
    """A new content is taken for what has the name in a slot."""

    def _assign(self, sequence: Sequence) -> bool:
        assert sequence.adapter is not None
        for digest, place in self._place.items():
            self._place = (
                {**self._place, sequence.adapter.digest: place} if digest[0] == sequence.adapter.name else self._place
            )
        return super()._assign(sequence)


class _RunsBeforeItIsThere(Adapters):
    def admitted(self, sequence: Sequence, grant: Grant) -> None:
        super().admitted(sequence, grant)
        sequence.awaits_adapter = False

    def check(self, sequences: Iterable[Sequence]) -> None:
        """The books of what waits aren't looked at, only what is read."""


class _TellsNoMoves(Adapters):
    def take_moves(self) -> list[AdapterMove]:
        super().take_moves()
        return []


class _FindsFailedFills(AdapterPages):
    """What a failed copy has left is published."""

    def filled(self, lease: AdapterLease, *, well: bool) -> None:
        super().filled(lease, well=True)


class _FindsTooEarly(AdapterPages):
    """Pages can be found while they are being filled, so a fill that fails later was believed."""

    def fill(self, lease: AdapterLease) -> list[int]:
        keys = adapter_keys(lease.digest, len(lease.pages))
        self._index.publish_adapter(self.group, lease.digest, keys, lease.pages)
        return super().fill(lease)


class _LeavesForAll(AdapterPages):
    """The first request to end gives the pages back that others run with."""

    def leave(self, lease: AdapterLease) -> None:
        super().leave(lease)
        if lease.users and not lease.filling:
            self._pool.release(self.group, lease.pages[::-1])


class _FillsWhatIsFresh(AdapterPages):
    """The step that hands out a page zeroes it, or later."""

    def complete(self, lease: AdapterLease, promised: Any) -> None:
        super().complete(lease, promised)
        self._work.add_fresh(self.group, lease.pages)


@pytest.mark.days(4)
@pytest.mark.parametrize(
    "broken",
    [
        _LetsGoTooEarly, _BelievesInNames, _RunsBeforeItIsThere, _TellsNoMoves,
        _FindsFailedFills, _FindsTooEarly, _LeavesForAll, _FillsWhatIsFresh,
    ],
)  # fmt: skip
def test_a_planted_bug_is_caught(broken: type[Adapters] | type[AdapterPages], monkeypatch: pytest.MonkeyPatch) -> None:
    changed: dict[str, Any] = {"books": broken} if issubclass(broken, Adapters) else {}
    if broken is _TellsNoMoves:
        changed["pools"] = COARSE
    if issubclass(broken, AdapterPages):
        monkeypatch.setattr(manager, "AdapterPages", broken)
    expect_failure(type("Broken", (AdapterTraffic,), changed))
