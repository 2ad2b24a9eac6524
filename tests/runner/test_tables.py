"""Page tables as rings."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from pagerunner.ops.batch import SlotState
from pagerunner.runner.tables import PageTables
from pagerunner.types import TableWrite


def make(*widths: int) -> PageTables:
    groups = tuple(SimpleNamespace(table_width=width, page_tokens=16) for width in widths)
    return PageTables(SimpleNamespace(max_num_seqs=2, groups=groups))  # type: ignore[arg-type]


def apply(tables: PageTables, writes: list[TableWrite]) -> None:
    places = tables.places(writes)
    tables.write(torch.tensor(list(places)), torch.tensor(list(places.values())))


def look(tables: PageTables, slot: int, pages: list[int], group: int = 0) -> list[int]:
    table = tables.of(group)
    return table[slot, torch.tensor(pages) % table.shape[1]].tolist()


def test_page_numbers_beyond_the_width_take_the_place_of_those_before() -> None:
    tables = make(4)
    apply(tables, [TableWrite(0, 1, 0, [10, 11, 12])])
    assert look(tables, 1, [0, 1, 2]) == [10, 11, 12]
    apply(tables, [TableWrite(0, 1, 3, [13, 14])])  # wraps
    assert look(tables, 1, [1, 2, 3, 4]) == [11, 12, 13, 14]
    apply(tables, [TableWrite(0, 1, 41, [-1, 52, 53])])
    assert look(tables, 1, [41, 42, 43]) == [-1, 52, 53]
    assert look(tables, 0, [0, 1, 2, 3]) == [0] * 4


def test_groups_have_tables_of_their_own() -> None:
    tables = make(3, 5)
    apply(tables, [TableWrite(0, 1, 2, [7]), TableWrite(1, 0, 4, [8, 9]), TableWrite(1, 1, 0, [5])])
    assert tables.of(0).tolist() == [[0, 0, 0], [0, 0, 7]]
    assert tables.of(1).tolist() == [[9, 0, 0, 0, 8], [5, 0, 0, 0, 0]]
    assert tables.all.entries.nbytes == 8 * 2 * 8


def test_of_two_entries_for_one_place_the_later_one_is_written() -> None:
    tables = make(4)
    apply(tables, [TableWrite(0, 0, 0, [1, 2, 3]), TableWrite(0, 0, 1, [4]), TableWrite(0, 0, 4, [5])])
    assert tables.of(0)[0].tolist() == [5, 4, 3, 0]


def test_no_token_is_stored_for_a_slot_of_minus_one() -> None:
    state = SlotState.empty(3, "cpu")
    state.store(torch.tensor([2, -1, 0, -1]), torch.tensor([7, 8, 9, 10]), torch.tensor([4, 5, 6, 7]))
    assert state.tokens[:3].tolist() == [9, 0, 7]
    assert state.lengths[:3].tolist() == [7, 0, 5]
