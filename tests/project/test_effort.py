"""What tests try on a day: every value each day, every combination in turn, and never nothing."""

from __future__ import annotations

import itertools

import pytest

from helpers import effort
from helpers.effort import by_days, share_of_the_day


@pytest.fixture(autouse=True)
def a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effort, "THOROUGH", False)
    monkeypatch.setattr(effort, "TEST_DAY", 739_577)


@pytest.mark.parametrize(
    ("sizes", "each"),
    [
        ((2, 2), 1),
        ((3, 4), 2),
        ((4, 4, 4), 1),
        ((2, 4, 3), 1),
        ((14, 19), 2),
        ((3, 2), 5),
        ((2, 10), 5),
        ((22, 14), 1),
        ((24, 17), 1),
    ],
)
def test_every_combination_has_its_day(sizes: tuple[int, ...], each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = [range(size) for size in sizes]
    found = set()
    for day in range(-(-sizes[-1] // each)):
        monkeypatch.setattr(effort, "TEST_DAY", 739_577 + day)
        today = by_days(*axes, each=each)
        assert len(today) == len(set(today)) == len(list(itertools.product(*axes[:-1]))) * min(each, sizes[-1])
        assert all({one[place] for one in today} == set(axis) for place, axis in enumerate(axes))
        found |= set(today)
    assert found == set(itertools.product(*axes))


def test_an_axis_that_a_day_cannot_meet_is_refused() -> None:
    with pytest.raises(ValueError, match="10 values can't all have a turn in 2 cases"):
        by_days(range(2), range(10))
    assert {last for *_, last in by_days(range(2), range(10), each=5)} == set(range(10))


@pytest.mark.parametrize("first", [0, 3])
def test_every_number_has_its_day_and_every_day_a_number(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = []
    for day in range(5):
        monkeypatch.setattr(effort, "TEST_DAY", 739_577 + day)
        shares.append(list(share_of_the_day(7, 5, first)))
    assert sorted(number for share in shares for number in share) == list(range(7)) and all(shares)
    with pytest.raises(ValueError, match="4 numbers can't be shared among 5 days"):
        share_of_the_day(4, 5)


def test_a_thorough_run_tries_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effort, "THOROUGH", True)
    assert by_days("abc", [1, 2, 3]) == list(itertools.product("abc", [1, 2, 3]))
    assert share_of_the_day(7, 5) == range(7)
