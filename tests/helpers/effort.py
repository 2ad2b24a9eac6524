"""How much the tests try.

`make test` tries what finds most faults in the least time: each value of each parameter, not each combination. With
PAGERUNNER_THOROUGH=1 in the environment (`make test-thorough`) tests try every combination and more random cases.

Where all cases are too many, `make test` tries another share of them on each day, so that all have their turn. No choice is made
once and for good: a combination that was left out for ever would be one that nobody tests.
PAGERUNNER_TEST_DAY=739577 in the environment tries that day's share again.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, TypeVar

T = TypeVar("T")

THOROUGH = os.environ.get("PAGERUNNER_THOROUGH", "") not in ("", "0")

TEST_DAY = int(os.environ.get("PAGERUNNER_TEST_DAY", "") or datetime.now(UTC).toordinal())


def effort(usual: T, thorough: T) -> T:
    """One of the two, by PAGERUNNER_THOROUGH.

    Example: `effort(20, 100)` is 20 in `make test` and 100 in `make test-thorough`.
    """
    return thorough if THOROUGH else usual


def share_of_the_day(count: int, days: int, first: int = 0) -> range:
    """Every `days`-th number below `count`. After as many days each number has had its turn.

    `first` makes several tests try different numbers on the same day. `make test-thorough` gets all.

    Raises:
        ValueError: there are fewer numbers than days. On some days nothing would be tested, and nobody would see it.
    """
    if not 1 <= days <= count:
        raise ValueError(f"{count} numbers can't be shared among {days} days: each day needs one.")
    return range(count) if THOROUGH else range((TEST_DAY + first) % days, count, days)


def by_days(*axes: Iterable[Any], each: int = 1) -> list[tuple[Any, ...]]:
    """Every combination of the axes but the last, each with `each` values of the last one, and with the next ones on the next day.

    Example: `by_days("ab", [1, 7])` is [(a, 1), (b, 7)] on one day and [(a, 7), (b, 1)] on the next. Each day meets every value
    of every axis. A combination has its turn after `len(last) / each` days. `make test-thorough` gets all.

    Raises:
        ValueError: the last axis has more values than a day has cases. Put the longest axis first.
    """
    *first, last = (list(axis) for axis in axes)
    outer = list(itertools.product(*first))
    if len(outer) * each < len(last):
        raise ValueError(
            f"{len(last)} values can't all have a turn in {len(outer) * each} cases: put the longest axis first."
        )
    if THOROUGH:
        return [(*one, value) for one in outer for value in last]
    each, inner = min(each, len(last)), len(first[-1])
    # else a value would meet the same ones of the axis before again and again
    shift = math.gcd(inner * each, len(last)) > 1
    return [
        (*one, last[((TEST_DAY + number) * each + shift * (number // inner) + turn) % len(last)])
        for number, one in enumerate(outer)
        for turn in range(each)
    ]
