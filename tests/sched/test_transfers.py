"""Random traffic while pages are stored in another memory and loaded from it: transfers end late, badly or never by themselves."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import pytest
from hypothesis import Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from helpers import traffic
from helpers.effort import effort
from helpers.traffic import QUICK, Traffic, mixes, run_until
from pagerunner.memory import growth, rules
from pagerunner.memory.leases import Lease, Leases
from pagerunner.memory.manager import KVManager
from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.memory.slabs import SlabPool

MOST_DOUBT = 50
"""Steps after which a transfer that has failed can't write any more."""


class TierTraffic(Traffic):
    """Any page that can be found is stored somewhere at some time, and any page that was stored is loaded."""

    manager_class: type[KVManager] = KVManager
    seen: ClassVar[Counter[str]] = Counter()

    cachings = st.sampled_from([True, True, True, False])
    eagers = st.sampled_from([True, True, True, False])

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[tuple[int, bytes], int] = {}
        self.under_way: dict[int, Lease] = {}
        self.born: dict[int, int] = {}
        self.doubtful: set[int] = set()
        self.places = self.idle = self.loads = 0

    @initialize(data=st.data(), lag=st.integers(0, 6))
    def start_tier(self, data: st.DataObject, lag: int) -> None:
        """An `eager` memory stores what it can and loads what it has; its transfers end so many plans later, most of them well."""
        self.eager, self.lag = data.draw(self.eagers), lag

    @rule(choice=st.integers(0, 10**6), count=st.integers(1, 30))
    def store(self, choice: int, count: int) -> None:
        """Store some pages that can be found."""
        groups = range(len(self.plan.groups))
        keys = [[key for key in self.manager.index.pages[group] if (group, key) not in self.known] for group in groups]
        keys = [part[choice % (len(part) + 1) :][:count] for part in keys]
        places = [[self._place() for _ in part] for part in keys]
        self._begun("store", self.manager.store(keys, places))

    @rule(choice=st.integers(0, 10**6), count=st.integers(1, 60))
    def load(self, choice: int, count: int) -> None:
        """Load some pages, whether they are there or not."""
        known = [pair for pair in self.known if pair[1] not in self.manager.index.pages[pair[0]]]
        known = known[choice % (len(known) + 1) :][:count]
        wanted = [[key for number, key in known if number == group] for group in range(len(self.plan.groups))]
        places = [[self.known[group, key] for key in part] for group, part in enumerate(wanted)]
        self._begun("load", self.manager.load(wanted, places))

    @rule(choice=st.integers(0, 10**6), how=st.sampled_from(["well", "well", "badly", "doubtful"]))
    def end(self, choice: int, how: str) -> None:
        """A transfer ends, or it is given up while it may still write."""
        if not self.under_way:
            return
        number = list(self.under_way)[choice % len(self.under_way)]
        if how == "doubtful" and number not in self.doubtful:
            self._doubt(number)
        else:
            self._end(number, well=how == "well" and number not in self.doubtful)

    def _doubt(self, number: int) -> None:
        self.manager.quarantine(number)
        self.doubtful.add(number)
        self.seen["quarantined"] += 1

    def _place(self) -> int:
        self.places += 1
        return self.places

    def _begun(self, what: str, lease: Lease | None) -> None:
        if lease is not None:
            assert any(lease.pages) and [len(part) for part in lease.pages] == [len(part) for part in lease.places]
            self.under_way[lease.number] = lease
            self.born[lease.number] = self.scheduler.stats().steps_total
            self.seen[what] += 1
            self.loads += what == "load"

    def _end(self, number: int, *, well: bool) -> None:
        lease = self.under_way.pop(number)
        began = number in self.checker.transfers
        stores = lease.state == "held"
        self.checker.end_transfer(number, well=well)
        stood = self.manager.end_transfer(number, well=well and began)
        if stores and began:
            for group, (keys, places) in enumerate(zip(lease.keys, lease.places, strict=True)):
                self.known |= {
                    (group, key): place for key, place in zip(keys, places, strict=True) if key in stood[group]
                }

    def end_transfers(self) -> None:
        for number in list(self.under_way):
            self._end(number, well=number not in self.doubtful)

    def step(self, fault: bool = False) -> None:
        """Where nothing can run, the next thing that happens is that a transfer ends."""
        before, quiet = self.scheduler.stats().steps_total, not self.flight
        if self.eager:
            self.store(0, 30)
            if (
                self.loads < 10 and self.scheduler.stats().waiting
            ):  # without end, each would evict what the one before brought
                self.load(0, 30)
            for number in [n for n in self.under_way if before - self.born[n] > self.lag and n not in self.doubtful]:
                if number % 6 == 5:
                    self._doubt(number)
                else:
                    self._end(number, well=number % 6 != 2)
        # a request that needs these pages is admitted and preempted again and again meanwhile
        for number in [n for n in self.doubtful & self.under_way.keys() if before - self.born[n] > MOST_DOUBT]:
            self._end(number, well=False)
        super().step(fault)
        if self.manager.awaits == "transfer":
            self.seen["admission waits"] += 1
        if self.manager.waits and not self.manager.moves_unfinished:
            self.seen["growth waits"] += 1
        self.idle = self.idle + 1 if quiet and self.scheduler.stats().steps_total == before else 0
        if self.idle > 2 and self.scheduler.has_work:  # a request that was just preempted is tried again first
            assert self.under_way, "nothing runs and nothing is under way"
            self._end(next(iter(self.under_way)), well=next(iter(self.under_way)) not in self.doubtful)

    @rule()
    def sleep(self) -> None:
        """Transfers end before the pages go."""
        if self.under_way:
            with pytest.raises(AssertionError, match="under way"):
                self.scheduler.preempt_all()
        self.end_transfers()
        super().sleep()


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So short that prompts of these tests are long chunks."""
    for module in (rules, growth):
        monkeypatch.setattr(module, "SHORT_CHUNK", 24)


def test_traffic_over_pages_that_come_and_go_has_the_right_tokens() -> None:
    TierTraffic.seen.clear()
    wanted = {"store", "load", "quarantined", "admission waits", "growth waits"}
    run_until(TierTraffic, lambda: wanted <= TierTraffic.seen.keys(), effort(12, 1000))


class _MovesLeasedPages(SlabPool):
    def pin(self, group: int, pages: Any) -> None:
        pass

    def unpin(self, group: int, pages: Any) -> None:
        pass


class _FreesTheQuarantined(Leases):
    """Failed is taken for over."""

    def quarantine(self, number: int) -> None:
        super().quarantine(number)
        lease = self._transfers[number]
        for group, pages in enumerate(lease.pages):
            self._pool.unpin(group, pages)
            self._pool.release(group, pages)
        lease.pages, lease.keys = [[] for _ in lease.pages], [[] for _ in lease.pages]


class _PublishesWhatFailed(Leases):
    def end(self, number: int, *, well: bool, keep: bool = False) -> list[list[bytes]]:
        return super().end(number, well=True, keep=keep)


class _PublishesAtOnce(Leases):
    """A load's pages are findable before they have arrived."""

    def _begin(self, lease: Lease) -> Lease:
        for group, pages in enumerate(lease.pages):
            for key, page in zip(lease.keys[group], pages, strict=True):
                self._index.publish(group, key, page)
        return super()._begin(lease)


def _with(leases: type[Leases] | None = None, pool: type[SlabPool] | None = None) -> type[KVManager]:
    class Broken(KVManager):
        def __init__(self, plan: MemoryPlan, **options: Any) -> None:
            super().__init__(plan, **options)
            if leases is not None:
                self._leases.__class__ = leases
            if pool is not None:
                self.pool.__class__ = pool

    return Broken


@pytest.mark.days(2)
@pytest.mark.parametrize(
    ("broken", "kinds"),
    [
        (_with(pool=_MovesLeasedPages), ("full", "window-5", "latent-1")),
        (_with(_FreesTheQuarantined), ("full",)),
        (_with(_PublishesWhatFailed), ("full",)),
        (_with(_PublishesAtOnce), ("full", "window-40")),
    ],
)
def test_a_bug_planted_in_leases_is_caught(
    broken: type[KVManager], kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The books would show some of the bugs. Tokens must show all of them."""
    monkeypatch.setattr(traffic, "recount", lambda manager: None)
    always = {"cachings": st.just(True), "eagers": st.just(True)}
    machine = type("Broken", (TierTraffic,), {"manager_class": broken, "pools": mixes(kinds), **always})
    for number in range(20):
        try:
            run_state_machine_as_test(
                seed(number)(machine),
                settings=settings(QUICK, max_examples=100, stateful_step_count=40, phases=[Phase.generate]),
            )
        except (AssertionError, KeyError):
            return
    pytest.fail("no traffic met the planted bug")
