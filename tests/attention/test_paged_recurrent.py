"""The backend of recurrent groups that reads tables: what it is told to save, in eager steps and in graphs."""

from __future__ import annotations

from dataclasses import replace

import torch

from pagerunner.attention.base import GraphShape, PlanInputs
from pagerunner.attention.paged_recurrent import PagedRecurrentBackend
from pagerunner.batch import StepRows
from pagerunner.memory import specs
from pagerunner.types import StateSave


def inputs(query_lens, seq_lens, saves):
    rows = StepRows.of(query_lens, seq_lens, range(len(query_lens)))
    table = torch.zeros(8, 1, dtype=torch.int64)
    return PlanInputs(rows, query_lens, seq_lens, range(len(query_lens)), table, 16, None, saves)


SAVES = (StateSave(2, 40, 0, 700), StateSave(0, 3, 0, 100), StateSave(2, 37, 0, 900))


def test_saves_are_ordered_by_row_and_position():
    backend = PagedRecurrentBackend()
    saves = backend.plan(inputs([3, 1, 10], [3, 9, 40], SAVES), backend.new_state(None))
    assert saves.start_R1.tolist() == [0, 1, 1, 3]
    assert saves.row_N.tolist() == [0, 2, 2] and saves.position_N.tolist() == [3, 37, 40]
    assert saves.target_N.tolist() == [100, 900, 700]
    assert backend.plan(inputs([1], [5], ()), backend.new_state(None)).start_R1.tolist() == [0, 0]


def test_a_graphs_saves_stay_in_place_and_do_not_outlive_their_step():
    backend = PagedRecurrentBackend()
    state = backend.new_state(GraphShape(4, 16, 64))
    captured = backend.plan(replace(inputs([1], [1], ()), query_lens=[], seq_lens=[], slots=[]), state)
    pointers = [x.data_ptr() for x in captured]
    replay = backend.plan(inputs([3, 1, 10], [3, 9, 40], SAVES), state)
    assert [x.data_ptr() for x in replay] == pointers
    assert captured.start_R1.tolist() == [0, 1, 1, 3, 3] and captured.position_N[:3].tolist() == [3, 37, 40]
    other = backend.new_state(GraphShape(4, 16, 64))
    backend.plan(inputs([1], [5], ()), other)
    assert captured.start_R1.tolist() == [0, 1, 1, 3, 3]
    backend.plan(inputs([1, 1], [4, 10], ()), state)
    assert captured.start_R1.tolist() == [0] * 5


def test_a_graph_has_room_for_all_saves_that_a_plan_asks_for():
    """A row of one token may have two: with 32 drafts in a plan in flight, its state may be before 64 tokens or behind 128."""
    backend = PagedRecurrentBackend()
    state = backend.new_state(GraphShape(2, 2, 512))
    saves = [StateSave(row, position, 0, 100 * position) for row in (0, 1) for position in (64, 128)]
    found = backend.plan(inputs([1, 1], [130, 131], saves), state)
    assert found.start_R1.tolist() == [0, 2, 4]
    assert found.position_N.tolist() == [64, 128] * 2 and found.target_N.tolist() == [6400, 12800] * 2


def test_says_what_it_does_not_serve():
    backend = PagedRecurrentBackend()
    assert backend.capabilities.refusal(specs.RecurrentState(((2, 3),), ("float32",)), "cpu", torch.float32) is None
    assert "full" in backend.capabilities.refusal(specs.FullKV(1, 8, "float32"), "cpu", torch.float32)
