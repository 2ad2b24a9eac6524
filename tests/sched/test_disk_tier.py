"""Random traffic over a store below a host tier: pages go there and come back late, badly or too late, and every request has its own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from helpers.effort import effort
from helpers.host_traffic import HostTraffic, make_short
from helpers.page_checker import PageFault
from helpers.traffic import QUICK, mixes, run_until
from pagerunner.tiers.below import Below
from pagerunner.tiers.policy import Tiering


class Places:
    """Stands for the bytes of host memory: a part of it is its first and last place."""

    def __getitem__(self, part: slice) -> tuple[int, int]:
        return part.start, part.stop


class SlowStore:
    """A KeepingStore of what the checker says that places hold. What is being read holds nothing that anybody may use."""

    def __init__(self, traffic: DiskTraffic) -> None:
        self.traffic = traffic
        self.pages: dict[tuple[int, bytes], list[Any]] = {}
        self.begun: dict[int, tuple[float, bool, list[Any], list[Any]]] = {}
        self.done: list[tuple[int, list[bool]]] = []

    def find(self, group: int, keys: Sequence[bytes]) -> list[bool]:
        return [(group, key) in self.pages for key in keys]

    def read(self, number: int, pages: Sequence[Any]) -> None:
        self.begun[number] = self.traffic.now, True, list(pages), []
        self.scribble(pages)

    def write(self, number: int, pages: Sequence[Any]) -> None:
        held = [list(self.traffic.checker.outside[place]) for _, _, (place, _) in pages]
        self.begun[number] = self.traffic.now, False, list(pages), held

    def scribble(self, pages: Sequence[Any]) -> None:
        for _, _, (start, stop) in pages:
            self.traffic.fill(start, stop, ["half read"] * 1000)

    def end(self, number: int) -> None:
        _, reads, pages, held = self.begun.pop(number)
        outcomes = []
        for at, (group, key, (start, stop)) in enumerate(pages):
            well = (group, key) in self.pages or not reads
            if self.traffic.bad and (number + at) % (2 * self.traffic.bad) == 1:
                well = False
                self.pages.pop((group, key), None)
            if well and reads:
                self.traffic.fill(start, stop, self.pages[group, key])
                self.traffic.seen["read"] += 1
            elif not reads:
                assert self.traffic.checker.outside.get(start) == held[at], "a place was used while it was written"
                if well:
                    self.pages[group, key] = held[at]
            outcomes.append(well)
        self.done.append((number, outcomes))

    def ended(self) -> list[tuple[int, list[bool]]]:
        done, self.done = self.done, []
        return done

    def seconds(self, nbytes: int) -> float:
        return 0.1

    def forget(self, group: int, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.pages.pop((group, key), None)

    def clear(self) -> None:
        self.pages.clear()

    def close(self) -> None:
        """Nothing is to be done."""


class DiskTraffic(HostTraffic):
    """Host memory loses everything now and then, as at a restart."""

    below_class: type[Below[Any]] = Below

    def make_tiers(self, data: st.DataObject) -> Tiering:
        tiers = super().make_tiers(data)
        self.store = SlowStore(self)
        sizes = [group.page_bytes for group in self.plan.groups]
        memory: Any = Places()
        tiers.below = self.below_class(self.store, tiers.host, memory, sizes, clock=lambda: self.now)
        return tiers

    def fill(self, start: int, stop: int, content: list[Any]) -> None:
        """Places hold this now, and what overlaps them nothing any more."""
        for other in [at for at, long in self.held.items() if at < stop and start < at + long]:
            self.checker.outside.pop(other, None)
            del self.held[other]
        self.checker.outside[start], self.held[start] = content, stop - start

    def step(self, fault: bool = False) -> None:
        for number, (began, reads, pages, _) in list(self.store.begun.items()):
            if self.idle or self.now - began >= self.lag + number % 4:
                self.store.end(number)
            elif reads:
                self.store.scribble(pages)
        self.tiers.settle()
        self.seen["fetching"] += bool(self.tiers.fetching)
        self.seen["in line"] += bool(self.tiers._line)
        self.seen["late"] += self.tiers.below is not None and self.tiers.below.given_up
        if int(self.now) % 11 == 10:
            self.tiers.host.clear()
        super().step(fault)

    def end_transfers(self) -> None:
        super().end_transfers()
        for number in list(self.store.begun):
            self.store.end(number)
        self.tiers.settle()


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    make_short(monkeypatch)


def run(machine: type[DiskTraffic], examples: int) -> None:
    run_state_machine_as_test(machine, settings=settings(QUICK, max_examples=examples, stateful_step_count=40))


def test_traffic_over_a_disk_has_the_right_tokens() -> None:
    DiskTraffic.seen.clear()
    wanted = {"read", "fetching", "late", "in line"}
    run_until(DiskTraffic, lambda: all(DiskTraffic.seen[name] for name in wanted), effort(6, 1000))


class _GivesBackWhileWriting(Below[Any]):
    def keep(self, pages: Sequence[Sequence[int]]) -> None:
        before = set(self._writes)
        super().keep(pages)
        for number in self._writes.keys() - before:
            self._release(self._writes[number])
            self._writes[number].places = []


class _BelievesAll(Below[Any]):
    def _end_read(self, moving: Any, outcomes: Any) -> None:
        super()._end_read(moving, [True] * len(moving.places))


class _NeverTriesAgain(Tiering):
    def _room_may_be(self) -> bool:
        return False


@pytest.mark.days(2)
@pytest.mark.parametrize(
    "broken",
    [
        {"below_class": _GivesBackWhileWriting, "bads": st.just(3)},
        {"below_class": _BelievesAll, "bads": st.just(3)},
        {"tiering_class": _NeverTriesAgain, "sizes": st.just(1)},
    ],
    ids=["gives back while writing", "believes all", "never tries again"],
)
def test_the_traffic_finds_planted_bugs(broken: dict[str, Any]) -> None:
    machine = type("Broken", (DiskTraffic,), {"pools": mixes(("full",)), **broken})
    for number in range(6):
        try:
            run_state_machine_as_test(
                seed(number)(machine),
                settings=settings(QUICK, max_examples=50, stateful_step_count=40, phases=[Phase.generate]),
            )
        except (AssertionError, KeyError, PageFault):
            return
    pytest.fail("no traffic met the planted bug")
