"""Page tables as rings."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from pagerunner.runner.tables import PageTables
from pagerunner.types import TableWrite


def make(width: int) -> PageTables:
    plan = SimpleNamespace(max_num_seqs=2, groups=(SimpleNamespace(table_width=width),))
    return PageTables(plan)  # type: ignore[arg-type]


def look(tables: PageTables, slot: int, pages: list[int]) -> list[int]:
    return tables.lookup(0, np.full(len(pages), slot), np.array(pages)).tolist()


def test_page_numbers_beyond_the_width_take_the_place_of_those_before() -> None:
    tables = make(4)
    tables.apply([TableWrite(0, 1, 0, [10, 11, 12])])
    assert look(tables, 1, [0, 1, 2]) == [10, 11, 12]
    tables.apply([TableWrite(0, 1, 3, [13, 14])])  # wraps
    assert look(tables, 1, [1, 2, 3, 4]) == [11, 12, 13, 14]
    tables.apply([TableWrite(0, 1, 41, [-1, 52, 53])])
    assert look(tables, 1, [41, 42, 43]) == [-1, 52, 53]
    assert look(tables, 0, [0, 1, 2, 3]) == [0] * 4
