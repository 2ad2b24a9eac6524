"""Random traffic over a host tier: prompts are stored and loaded as the policy decides, and transfers end late, badly, or too late."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from helpers.effort import effort
from helpers.host_traffic import HostTraffic, make_short
from helpers.traffic import QUICK, mixes, run_until
from pagerunner.tiers.policy import Tiering
from pagerunner.types import TransferEnd


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    make_short(monkeypatch)


def test_traffic_over_a_host_tier_has_the_right_tokens() -> None:
    HostTraffic.seen.clear()
    wanted = {"admission waits", "quarantined", "loaded", "failed"}
    run_until(HostTraffic, lambda: all(HostTraffic.seen[name] for name in wanted), effort(12, 1000))


class _TakesFailedForWell(Tiering):
    """However a transfer has ended, its pages are taken for right."""

    def end(self, end: TransferEnd) -> None:
        super().end(end._replace(well=True))


class _FindsWhatIsOnItsWay(Tiering):
    """A place has its key before the bytes are there."""

    def _begun(self, lease: Any, pages: Any, fresh: Any, *, loads: bool, **more: Any) -> int:
        for group, named in enumerate(fresh):
            for key, page in named.items():
                self.host.index.publish(group, key, page)
        return super()._begun(lease, pages, fresh, loads=loads, **more)


@pytest.mark.days(2)
@pytest.mark.parametrize("broken", [_TakesFailedForWell, _FindsWhatIsOnItsWay])
def test_a_bug_planted_in_the_tier_is_caught(broken: type[Tiering]) -> None:
    machine = type("Broken", (HostTraffic,), {"tiering_class": broken, "pools": mixes(("full",)), "bads": st.just(3)})
    for number in range(20):
        try:
            run_state_machine_as_test(
                seed(number)(machine),
                settings=settings(QUICK, max_examples=100, stateful_step_count=40, phases=[Phase.generate]),
            )
        except (AssertionError, KeyError):
            return
    pytest.fail("no traffic met the planted bug")
