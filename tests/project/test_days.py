"""The marker `days`: every test has its turn, every day has tests, and a marker that chooses nothing is an error."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers import effort
from helpers.days import keep_the_days
from project.checks import parsed, python_files

MARKER = "mark" + ".days"


@pytest.fixture(autouse=True)
def a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effort, "THOROUGH", False)
    monkeypatch.setattr(effort, "TEST_DAY", 739_577)


class Item:
    """A collected test, as far as the choice looks at it."""

    def __init__(self, number: int, mark: pytest.MarkDecorator | None, path: str = "test_a.py") -> None:
        self.nodeid, self.path, self._mark = f"{path}::test_{number}", Path(path), mark

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self._mark.mark if self._mark is not None and name == "days" else None


def run(items: list[Item], *asked: str, keyword: str = "") -> tuple[list[Item], list[Item]]:
    """What runs, and what pytest is told that doesn't."""
    left_out: list[Any] = []
    config = SimpleNamespace(
        args=list(asked or ["tests"]),
        getoption=lambda name: keyword if name == "keyword" else "",
        hook=SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items)),
    )
    chosen: list[Any] = list(items)
    keep_the_days(config, chosen)  # type: ignore[arg-type]
    return chosen, left_out


def items_of_two_files() -> list[Item]:
    days = pytest.mark.days
    found = [Item(number, (None, days(3), days(2))[number % 3]) for number in range(12)]
    return found + [Item(number, days(3), "test_b.py") for number in range(3)]


def test_every_test_has_its_day_and_every_day_tests_of_each_file(monkeypatch: pytest.MonkeyPatch) -> None:
    items = items_of_two_files()
    runs = dict.fromkeys(items, 0)
    for day in range(6):
        monkeypatch.setattr(effort, "TEST_DAY", 739_577 + day)
        today, left_out = run(items)
        assert [one for one in items if one in today] == today and set(today) | set(left_out) == set(items)
        for item in today:
            runs[item] += 1
        for path in ("test_a.py", "test_b.py"):
            assert any(item.path == Path(path) and item._mark is not None for item in today)
    marks = {None: 6, 3: 2, 2: 3}
    assert all(times == marks[item._mark and item._mark.args[0]] for item, times in runs.items())


def test_tests_that_are_asked_for_by_name_run_and_so_does_everything_in_a_thorough_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    items = items_of_two_files()
    assert run(items, "tests/test_a.py::test_1") == run(items, keyword="test_1") == (items, [])
    assert len(run(items, "tests/test_a.py")[0]) < len(items)
    monkeypatch.setattr(effort, "THOROUGH", True)
    assert run(items)[0] == items


@pytest.mark.parametrize("mark", [pytest.mark.days, pytest.mark.days("3"), pytest.mark.days(1), pytest.mark.days(n=3)])
def test_a_marker_without_a_number_is_an_error(mark: pytest.MarkDecorator) -> None:
    with pytest.raises(pytest.UsageError, match=r"test_a\.py::test_0: the marker days needs a whole number"):
        run([Item(0, mark)], "tests/test_a.py::test_0")


def test_more_days_than_tests_are_an_error() -> None:
    with pytest.raises(pytest.UsageError, match=r"test_a\.py has 2 tests with days\(3\): on some days none would run"):
        run([Item(number, pytest.mark.days(3)) for number in range(2)])


def misplaced(source: str) -> int:
    """How often the marker is written where pytest doesn't read it: in a text, in a comment, or under another name than pytestmark."""
    read: list[ast.expr] = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            read += node.decorator_list
        elif isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["pytestmark"]:
            read += node.value.elts if isinstance(node.value, ast.List) else [node.value]
    return source.count(MARKER) - sum(ast.unparse(one).startswith(f"pytest.{MARKER}(") for one in read)


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        (f"pytestmark = pytest.{MARKER}(2)", 0),
        (f"pytestmark = [needs_compiler, pytest.{MARKER}(2)]", 0),
        (f"@pytest.{MARKER}(2)\ndef test(): ...", 0),
        (f'"""Some tests.\n\npytestmark = pytest.{MARKER}(2)\n"""', 1),
        (f"# pytestmark = pytest.{MARKER}(2)", 1),
        (f"pytestmarks = pytest.{MARKER}(2)", 1),
        (f"@pytest.{MARKER}\ndef test(): ...", 1),
    ],
)
def test_a_marker_that_pytest_does_not_read_is_found(source: str, wrong: int) -> None:
    assert misplaced(source) == wrong


def test_markers_stand_where_pytest_reads_them() -> None:
    sources = {path: path.read_text() for path in python_files() if path != Path(__file__)}
    found = {path: source for path, source in sources.items() if MARKER in source}
    assert len(found) >= 4
    assert {path: misplaced(source) for path, source in found.items()} == dict.fromkeys(found, 0)
