"""The marker `days(n)`: of a file's tests that have it every n-th runs, and the others have their turn on the next days.

Each day chooses by a test's place among the marked tests of its file. So these must be the same tests each day: cases that another
choice of the day has made (`by_days`, `share_of_the_day`) keep the marker's turn only if the two numbers of days have no common divisor.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

from helpers.effort import share_of_the_day

HELP = "days(n): of a file's tests with this marker every n-th runs, others on the next day"


def keep_the_days(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the marked tests whose turn is on another day. Tests that were asked for by name all run.

    Raises:
        pytest.UsageError: a marker has no number of days, or more of them than its file has tests to share among them.
    """
    dear: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if (mark := item.get_closest_marker("days")) is not None:
            if len(mark.args) != 1 or type(mark.args[0]) is not int or mark.args[0] < 2 or mark.kwargs:
                raise pytest.UsageError(
                    f"{item.nodeid}: the marker days needs a whole number of at least 2, as in days(3)"
                )
            dear[str(item.path), mark.args[0]].append(item)
    if config.getoption("keyword") or config.getoption("markexpr") or any("::" in asked for asked in config.args):
        return
    others = set()
    for (path, days), of_file in dear.items():
        if len(of_file) < days:
            raise pytest.UsageError(f"{path} has {len(of_file)} tests with days({days}): on some days none would run")
        others |= set(of_file) - {of_file[number] for number in share_of_the_day(len(of_file), days)}
    items[:] = [item for item in items if item not in others]
    config.hook.pytest_deselected(items=list(others))
