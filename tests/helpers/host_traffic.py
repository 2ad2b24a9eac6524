"""Random traffic over a host tier, as a state machine: for tests of what decides, and of stores below it."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from helpers.recount import recount_pool
from helpers.traffic import Traffic
from pagerunner.memory import growth, rules
from pagerunner.tiers import below, bounds
from pagerunner.tiers.host import HostTier
from pagerunner.tiers.policy import Tiering
from pagerunner.types import TransferEnd

_PATIENCE = 4.0  # steps


def make_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long chunks are short, and little is patience."""
    for module in (rules, growth):
        monkeypatch.setattr(module, "SHORT_CHUNK", 24)
    monkeypatch.setattr(bounds, "LEAST_PATIENCE", _PATIENCE)
    monkeypatch.setattr(below, "LEAST_PATIENCE", 1.0)
    monkeypatch.setattr("pagerunner.tiers.host._OS_PAGE", 16)
    monkeypatch.setattr("pagerunner.tiers.host._ONE_GROUP_SLAB", 4_096)


class HostTraffic(Traffic):
    """Time is counted in steps. A transfer ends `lag` steps after it has begun, and some of them badly."""

    host_class: type[HostTier] = HostTier
    tiering_class: type[Tiering] = Tiering
    cachings = st.just(True)
    sizes = st.sampled_from([1, 2, 10])  # of the host memory, times the page memory
    pieces = st.sampled_from([1, 4, 1_024])  # pages that a plan begins to store
    bads = st.sampled_from([0, 7, 3])
    seen: ClassVar[Counter[str]] = Counter()

    def make_tiers(self, data: st.DataObject) -> Tiering:
        largest = max(group.page_bytes for group in self.plan.groups)
        size = data.draw(self.sizes)
        num_bytes = max(size * self.plan.kv_bytes, 2 * self.plan.slab_bytes + largest) + 8_192
        host = self.host_class(self.plan, num_bytes)
        self.ready = 0
        self.tiers = self.tiering_class(
            self.manager, host, prompts_only=data.draw(st.booleans()), clock=lambda: self.now
        )
        self.tiers._pieces.most = data.draw(self.pieces)
        return self.tiers

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.idle = 0
        self.begun: dict[int, float] = {}
        self.held: dict[int, int] = {}

    @initialize(data=st.data(), lag=st.integers(0, 8))
    def start_host(self, data: st.DataObject, lag: int) -> None:
        self.lag, self.bad = lag, data.draw(self.bads)

    def step(self, fault: bool = False) -> None:
        self.now += 1
        self.ready += self.tiers.host.num_bytes // 3 + 1
        self.tiers.grow(self.ready)
        steps, quiet = self.scheduler.stats().steps_total, not self.flight
        for number in self.checker.transfers:
            self.begun.setdefault(number, self.now)
        late = [number for number, began in self.begun.items() if self.now - began >= self.lag + number % 3]
        for number in late:
            self.end(number)
        self.note(failed := self.scheduler.take_failed())
        if self.now % 2 and (plan := self.scheduler.schedule_loads()) is not None:
            assert not plan.rows and plan.transfers and not self.scheduler._state.running
            self.flight.append((plan, self.checker.run(plan, None)))
        super().step(fault)
        self.note(more := self.scheduler.take_failed())
        self.seen["admission waits"] += any(one.awaits_transfer for one in self.scheduler._state.waiting)
        self.seen["quarantined"] += self.tiers.stats().given_up_total > 0
        self.seen["loaded"] += self.tiers.counts.load_bytes > 0
        self.seen["failed"] += self.tiers.counts.failed > 0
        moved = self.scheduler.stats().steps_total != steps
        self.idle = self.idle + 1 if quiet and not moved else 0
        if self.idle and self.scheduler.has_work:
            under_way = self.tiers.num_transfers or failed or more
            assert under_way, "nothing runs and nothing is under way"  # the engine's core would end here
        if self.idle > 2 and self.scheduler.has_work:
            if self.checker.transfers:  # else what is read from a disk ends with the next step
                self.end(next(iter(self.checker.transfers)))

    def end(self, number: int) -> None:
        """A transfer ends."""
        well = not self.bad or number % self.bad != 1
        self.begun.pop(number, None)
        transfer = self.checker.transfers[number]
        if not transfer.loads and well:  # what other pages held in these bytes is gone
            for group, _, place in transfer.pages:
                size = self.plan.groups[group].page_bytes
                for other in [at for at, long in self.held.items() if at < place + size and place < at + long]:
                    del self.checker.outside[other], self.held[other]
        self.checker.end_transfer(number, well=well)
        if not transfer.loads and not well:
            self.checker.outside |= {place: ["rubbish"] for _, _, place in transfer.pages}
        if not transfer.loads and well:
            self.held |= {place: self.plan.groups[group].page_bytes for group, _, place in transfer.pages}
        self.scheduler.end_transfer(TransferEnd(number, well, 0.5))

    def end_transfers(self) -> None:
        for number in list(self.checker.transfers):
            self.end(number)

    def reset_prefix_cache(self) -> None:
        self.scheduler.clear_tiers()
        super().reset_prefix_cache()

    def sleep(self) -> None:
        """Transfers end before the pages go; the host keeps what it has."""
        while self.flight:
            self.note(self.scheduler.commit(*self.flight.popleft()))
        self.end_transfers()
        super().sleep()

    def teardown(self) -> None:
        """When every request has ended, nothing is held."""
        if hasattr(self, "scheduler") and not self.failed:
            self.finish()
            assert not any(self.tiers.host.pool.used), "host pages are in use after the last transfer"
            recount_pool(self.tiers.host.pool)
            self.scheduler.clear_tiers()
        super().teardown()
