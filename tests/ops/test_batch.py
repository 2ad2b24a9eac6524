"""The definition of what a step's rows become, against a loop over tokens."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from helpers.step_cases import DRAFTS, GROUPS, slot_state, staged_rows, tables
from pagerunner.ops.batch import StepTensors, build_rows


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1, 1], [7], [3, 1, 20, 1]])
def test_every_token_has_its_position_and_place(lengths: list[int]) -> None:
    slots, rows, tokens = 9, len(lengths), sum(lengths)
    padded_rows, padded_tokens = rows + 2, tokens + 3
    packed, where = staged_rows(random.Random(1), lengths, padded_rows, padded_tokens, slots)
    all_tables, state = tables(slots, "cpu"), slot_state(slots)
    out = StepTensors.empty(padded_rows, padded_tokens, len(GROUPS), torch.device("cpu"))
    build_rows(packed, where, all_tables, state, out)

    slot_of, start_of = packed[:rows].tolist(), packed[where.starts : where.starts + rows].tolist()
    generates = [start < 0 for start in start_of]
    assert any(generates)
    start_of = [int(state.lengths[slot]) if start < 0 else start for slot, start in zip(slot_of, start_of, strict=True)]
    ids = packed[where.token_ids : where.token_ids + tokens].tolist()
    token = 0
    for row, length in enumerate(lengths):
        for step in range(length):
            position = start_of[row] + step
            assert (out.row_T[token], out.positions_T[token]) == (row, position)
            draft = (
                state.drafts[slot_of[row], min(step, DRAFTS) - 1].clamp(min=0) if step else state.tokens[slot_of[row]]
            )
            assert out.token_ids_T[token] == (draft if generates[row] else ids[token])
            for group, (page_tokens, width) in enumerate(GROUPS):
                first = int(all_tables.shapes[group, 0]) + slot_of[row] * width
                assert out.write_entry_GT[group, token] == all_tables.entries[first + position // page_tokens % width]
                assert out.write_offset_GT[group, token] == position % page_tokens
            token += 1
    assert out.slots_R.tolist() == [*slot_of, 0, 0]
    assert out.sample_slots.tolist() == [*slot_of, -1, -1]
    accepted = [int(state.accepted[slot]) if found else -1 for slot, found in zip(slot_of, generates, strict=True)]
    assert out.accepted_R.tolist() == [*accepted, 0, 0]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    assert out.query_start_R1.tolist() == [0, *ends, tokens, tokens]
    assert out.seq_lens_R.tolist() == [s + n for s, n in zip(start_of, lengths, strict=True)] + [0, 0]
    assert out.row_T[tokens:].tolist() == [-1] * 3
    assert out.positions_T[tokens:].tolist() == out.token_ids_T[tokens:].tolist() == [0] * 3
    assert out.write_entry_GT[:, tokens:].eq(-1).all()


def test_rows_at_a_stride_have_their_padding_behind_their_tokens() -> None:
    counts, slots, width = [3, 1, 4], 9, 4
    packed, where = staged_rows(random.Random(2), counts, 5, 20, slots, stride=width)
    all_tables, state = tables(slots, "cpu"), slot_state(slots)
    out = StepTensors.empty(6, 0, len(GROUPS), torch.device("cpu"), DRAFTS)
    build_rows(packed, where, all_tables, state, out)
    slot_of = packed[:3].tolist()
    for row in range(5):
        for place in range(width):
            token = row * width + place
            if row >= 3 or place >= counts[row]:
                there = (out.row_T, out.sample_slots, out.positions_T, out.token_ids_T, out.write_entry_GT[0])
                assert [int(tensor[token]) for tensor in there] == [-1, -1, 0, 0, -1]
                continue
            slot, position = slot_of[row], int(state.lengths[slot_of[row]]) + place
            wanted = int(state.drafts[slot, place - 1].clamp(min=0) if place else state.tokens[slot])
            there = (out.row_T, out.sample_slots, out.positions_T, out.token_ids_T)
            assert [int(tensor[token]) for tensor in there] == [row, slot, position, wanted]
            for group, (page_tokens, columns) in enumerate(GROUPS):
                first = int(all_tables.shapes[group, 0]) + slot * columns
                entry = all_tables.entries[first + position // page_tokens % columns]
                assert out.write_entry_GT[group, token] == entry
                assert out.write_offset_GT[group, token] == position % page_tokens
    lengths = [int(state.lengths[slot]) + count for slot, count in zip(slot_of, counts, strict=True)]
    assert out.seq_lens_R[:5].tolist() == [*lengths, 0, 0]
    assert out.query_start_R1[:6].tolist() == [0, 4, 8, 12, 16, 20]
    assert out.accepted_R[:5].tolist() == [*(int(state.accepted[slot]) for slot in slot_of), 0, 0]


def test_the_bytes_of_a_steps_tensors_are_known_beforehand() -> None:
    for sizes, drafts in (((7, 40, 3), 0), ((7, 40, 3), 2), ((7, 10, 3), 2)):
        made = StepTensors.empty(*sizes, torch.device("cpu"), drafts)
        taken = sum(getattr(made, field.name).nbytes for field in dataclasses.fields(made))
        assert taken == StepTensors.num_bytes(*sizes, drafts)
