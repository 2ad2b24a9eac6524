"""Drafts that become tokens, against a loop over places."""

from __future__ import annotations

import pytest
import torch

from pagerunner.ops.accept import Chances, accept, count_drafts
from pagerunner.ops.batch import SlotState


def state_of(drafts: list[list[int]]) -> SlotState:
    state = SlotState.empty(len(drafts), "cpu", len(drafts[0]))
    state.drafts[:-1] = torch.tensor(drafts)
    return state


@pytest.mark.parametrize(
    ("drafts", "has", "wanted"),
    [
        ([11, 12, 13], 4, [11, 12, 13, 14]),
        ([11, 12, 99], 4, [11, 12, 13, -2]),
        ([99, 12, 13], 4, [11, -2, -2, -2]),
        ([11, -1, 13], 4, [11, 12, -1, -2]),
        ([11, 12, 13], 2, [11, 12, -1, -1]),
        ([11, 12, 13], 1, [11, -1, -1, -1]),
    ],
)
def test_drafts_are_taken_up_to_the_first_that_is_not_the_models_token(
    drafts: list[int], has: int, wanted: list[int]
) -> None:
    state = state_of([[0, 0, 0], drafts])
    targets = torch.tensor([[11, 12, 13, 14]])
    found = accept(targets, torch.tensor([1]), torch.tensor([40]), torch.tensor([40 + has]), state)
    assert found.tolist() == [wanted]
    tokens = [token for token in wanted if token >= 0]
    assert (int(state.tokens[1]), int(state.lengths[1]), int(state.accepted[1])) == (
        tokens[-1],
        40 + len(tokens),
        len(tokens) - 1,
    )
    assert (int(state.tokens[0]), int(state.lengths[0])) == (0, 0)
    there = sum(draft >= 0 for draft in drafts[: has - 1])
    assert count_drafts(wanted) == (there, len(tokens) - 1)


def test_a_row_is_settled_again_from_other_targets() -> None:
    state = state_of([[5, 6]])
    place = torch.tensor([0]), torch.tensor([9]), torch.tensor([12])
    assert accept(torch.tensor([[5, 6, 7]]), *place, state).tolist() == [[5, 6, 7]]
    assert accept(torch.tensor([[4, 6, 7]]), *place, state).tolist() == [[4, -2, -2]]
    assert (int(state.tokens[0]), int(state.lengths[0]), int(state.accepted[0])) == (4, 10, 0)


def test_chances_take_drafts_whatever_the_model_says() -> None:
    rows, state = 4000, state_of([[5, 6, 7]] * 4000)
    chances = Chances(torch.tensor([0.8, 0.5, 1.0], dtype=torch.float64), torch.arange(rows))
    place = torch.arange(rows), torch.full((rows,), 30), torch.full((rows,), 34)
    found = accept(torch.full((rows, 4), 1), *place, state, chances)
    shares = [float((found[:, at] == 5 + at).double().mean()) for at in range(3)]
    assert shares == pytest.approx([0.8, 0.4, 0.4], abs=0.03)
    assert int((found == 1).sum()) == rows, "after them comes the model's own token"
    assert torch.equal(found, accept(torch.full((rows, 4), 1), *place, state, chances)), "the same at each try"
