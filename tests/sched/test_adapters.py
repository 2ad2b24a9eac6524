"""Random traffic of requests with adapters: no step reads a slot that holds another adapter than the row's, and no request waits for ever."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from helpers.effort import effort
from helpers.traffic import QUICK, Traffic, run_until
from pagerunner.sched.adapters import Adapters
from pagerunner.sched.request import Sequence
from pagerunner.types.lora import AdapterEnd, AdapterFill, AdapterInfo

NAMES = "abcde"
BYTES = 1_000


class AdapterTraffic(Traffic):
    """A device whose slots hold nothing while they are filled. Names get new contents while requests have the old ones."""

    books: type[Adapters] = Adapters
    seen: ClassVar[dict[str, int]] = {}

    def make_adapters(self, data: st.DataObject) -> Adapters:
        self.adapters = self.books(slots := data.draw(st.integers(1, 3)), slots * BYTES)
        self.versions = dict.fromkeys(NAMES, 0)
        for name in NAMES:
            self.change(name)
        self.slots = [""] * slots  # what they hold on the device
        self.fills: list[AdapterFill] = []
        self.filled = 0  # so often
        self.rows: dict[int, tuple[int, str]] = {}  # by requests' slots: slot of adapters, and its content
        return self.adapters

    def adapter_for(self, request_id: str) -> str:
        name = (*NAMES, "", "")[(31 * self.made + int(request_id[-1]) * (self.made % 3)) % 7]
        if name:
            self.checker.contents[request_id] = self.adapters.names[name].digest
        return name

    def change(self, name: str) -> None:
        self.versions[name] += 1
        digest = f"{name}{self.versions[name]}"
        self.adapters.names[name] = AdapterInfo(name, "/", digest, 4)

    @rule(name=st.sampled_from(NAMES))
    def load_inplace(self, name: str) -> None:
        self.change(name)

    @rule()
    def end_fill(self) -> None:
        if not self.fills:
            return
        fill = self.fills.pop(0)
        well = fill.number % 7 != 3
        self.filled += well
        self.slots[fill.slot] = fill.digest if well else ""
        error = "" if well else "its directory is gone"
        assert self.adapters.ended(AdapterEnd(fill.number, fill.digest, error=error, num_bytes=BYTES if well else 0))
        self.note(self.scheduler.take_failed())
        self.count("failed" if error else "filled")

    def step(self, fault: bool = False) -> None:
        run, self.checker.run = self.checker.run, self.look  # type: ignore[method-assign]
        self.run = run
        try:
            super().step(fault)
        finally:
            self.checker.run = run  # type: ignore[method-assign]
        for fill in self.adapters.take_fills():  # behind the step that was launched
            assert all(slot != fill.slot for slot in self.in_use()), "it is filled while a sequence runs with it"
            self.slots[fill.slot] = "on its way"
            self.fills.append(fill)
        if self.adapters.held and not self.flight:
            self.end_fill()  # or nothing goes on
        if self.adapters.held:
            self.count("held")

    def look(self, plan: Any, errors: Any = None) -> Any:
        for init in plan.admitted:
            self.rows[init.slot] = init.adapter, self.checker.contents.get(init.request.request_id, "")
        for row in plan.rows:
            slot, content = self.rows[row.slot]
            assert (slot < 0) is (not content)
            assert not content or self.slots[slot] == content, f"{content} is not in slot {slot}: {self.slots}"
        return self.run(plan, errors)

    def in_use(self) -> Iterable[int]:
        return [one.adapter_slot for one in self.all() if one.grant is not None]

    def all(self) -> list[Sequence]:
        return list(self.scheduler._state.sequences.values())

    def sleep(self) -> None:
        Traffic.sleep(self)
        self.fills.clear()  # the worker has waited for them
        self.slots = [""] * len(self.slots)

    sleep = rule()(sleep)

    def count(self, what: str) -> None:
        self.seen[what] = self.seen.get(what, 0) + 1

    @invariant()
    def adapters_balance(self) -> None:
        if hasattr(self, "scheduler") and not self.failed:
            self.adapters.check(self.all())
            stats = self.adapters.stats(self.all())
            assert stats.used_bytes == BYTES * sum(content in self.contents() for content in self.slots)
            assert stats.used_bytes <= stats.num_bytes == BYTES * len(self.slots)
            assert stats.fill_bytes_total == BYTES * self.filled

    def contents(self) -> set[str]:
        return {slot.digest for slot in self.adapters._slots if slot.digest and not slot.filling}

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "scheduler") and not self.failed:
            assert not self.adapters.held and not any(slot.users for slot in self.adapters._slots)


def test_no_step_reads_another_adapter_and_every_request_ends() -> None:
    AdapterTraffic.seen = {}
    enough = lambda: all(AdapterTraffic.seen.get(what, 0) > 20 for what in ("held", "filled", "failed"))  # noqa: E731
    run_until(AdapterTraffic, enough, effort(40, 600), steps=30, phases=[Phase.generate])


class _LetsGoTooEarly(Adapters):
    """A preempted sequence's slot may be filled, though the sequence believes that it has it."""

    def settle(self) -> list[Sequence]:
        for slot in self._slots:
            slot.users = 0
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
    def _gives(self, sequence: Sequence) -> bool:
        return sequence.adapter_slot >= 0 or self._assign(sequence)


@pytest.mark.days(3)
@pytest.mark.parametrize("broken", [_LetsGoTooEarly, _BelievesInNames, _RunsBeforeItIsThere])
def test_a_planted_bug_is_caught(broken: type[Adapters]) -> None:
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            type("Broken", (AdapterTraffic,), {"books": broken}),
            settings=settings(QUICK, max_examples=400, stateful_step_count=30, phases=[Phase.generate]),
        )
