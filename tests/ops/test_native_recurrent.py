"""Recurrences of one token a row by the CPU kernels against torch's, with NaN in every page of nobody, and the gates around them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from helpers.compiler import needs_compiler
from helpers.recurrent_cases import Memory, Step
from pagerunner.attention.recurrent import GatedDelta, Mamba2
from pagerunner.batch import StepRows
from pagerunner.ops.activation import add_sigmoid_gated_, sigmoid_gated
from pagerunner.ops.native import recurrent as native
from pagerunner.ops.native.calls import record
from pagerunner.ops.norm import gate_then_rms_norm, rms_norm_then_gate
from pagerunner.ops.side_by_side import side_by_side

pytestmark = needs_compiler
STEPS = [Step((1,)), Step((1,) * 5), Step((1,) * 3, padding=(2, 2))]


def gated_delta(key_heads: int, group: int, key_dim: int, value_dim: int, taps: int) -> tuple[GatedDelta, list[int]]:
    heads = key_heads * group
    channels = 2 * key_heads * key_dim + heads * value_dim
    weights = torch.randn(channels, taps), torch.randn(heads), torch.randn(heads)
    return GatedDelta(*weights, key_heads, key_dim, value_dim), [channels, heads, heads]


def mamba(heads: int, groups: int, head_dim: int, state_size: int, taps: int, bias: bool) -> tuple[Mamba2, list[int]]:
    channels = heads * head_dim + 2 * groups * state_size
    biases = torch.randn(channels) if bias else None
    weights = torch.randn(heads), torch.randn(heads), torch.randn(heads)
    return Mamba2(torch.randn(channels, taps), biases, *weights, head_dim, groups, state_size), [channels, heads]


def shapes_of(one: GatedDelta | Mamba2) -> list[tuple[int, ...]]:
    channels, taps = one.conv_weight_CW.shape
    heads = one.decay_log_H.shape[0]
    last = (one.key_dim, one.value_dim) if isinstance(one, GatedDelta) else (one.head_dim, one.state_size)
    return [(taps - 1, channels), (heads, *last)]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("recurrence", "sizes"),
    [
        gated_delta(1, 1, 1, 1, 2),
        gated_delta(2, 3, 8, 12, 4),
        gated_delta(3, 1, 130, 37, 3),
        mamba(2, 1, 3, 5, 2, bias=False),
        mamba(6, 2, 33, 40, 4, bias=True),
    ],
)
def test_a_token_of_each_row_equals_torchs(step: Step, recurrence: GatedDelta | Mamba2, sizes: Sequence[int]) -> None:
    shapes = shapes_of(recurrence)
    ours, theirs = (Memory(step, shapes, [torch.float32] * 2, "cpu") for _ in range(2))
    real, tokens = len(step.lengths), step.tokens
    apart = torch.randn(tokens, sum(sizes) + 3) * torch.tensor([1.0, 30.0])[torch.randint(2, (tokens, 1))]
    inputs = apart[:, 3:].split(sizes, -1)  # as slices of one projection
    for _ in range(3):
        got = recurrence.one_token(inputs, tuple(ours.states), ours.rows.page_table, ours.rows.step)
        held = tuple(state[theirs.entries] for state in theirs.states)
        want, states = recurrence.step(tuple(x[:real] for x in inputs), held)
        for pages, state in zip(theirs.states, states, strict=True):
            pages[theirs.entries] = state
        torch.testing.assert_close(got[:real], want, atol=1e-4, rtol=1e-4)
        assert got.isfinite().all()
    torch.testing.assert_close(
        ours.pool.view(torch.float32), theirs.pool.view(torch.float32), atol=1e-4, rtol=1e-4, equal_nan=True
    )


def test_a_row_is_the_same_beside_others_and_on_any_number_of_threads() -> None:
    recurrence, sizes = gated_delta(2, 2, 64, 300, 4)
    inputs = tuple(torch.randn(7, size) for size in sizes)
    before, threads = Memory(Step((1,) * 7), shapes_of(recurrence), [torch.float32] * 2, "cpu"), torch.get_num_threads()
    step = before.rows.step
    alone = StepRows.of([1] * 2, [1] * 2, step.slots_R[3:5].tolist())
    try:
        found = []
        for count, part, rows in ((1, slice(0, 7), step), (5, slice(0, 7), step), (2, slice(3, 5), alone)):
            torch.set_num_threads(count)
            pages = tuple(state.clone() for state in before.states)
            own = recurrence.one_token(tuple(x[part] for x in inputs), pages, before.rows.page_table, rows)
            found.append((own, *(state[before.entries[3:5]] for state in pages)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))
    assert all(torch.equal(a, b) for a, b in zip((found[0][0][3:5], *found[0][1:]), found[2], strict=True))


@pytest.mark.parametrize(("tokens", "heads", "size"), [(0, 1, 8), (1, 3, 7), (5, 4, 64), (3, 1, 515)])
def test_gates_equal_their_twins(tokens: int, heads: int, size: int) -> None:
    x_THD, gate_THD = torch.randn(tokens, heads + 1, size)[:, 1:], 9 * torch.randn(tokens, heads, size + 3)[..., 3:]
    weight_D = torch.rand(size)
    for op in (rms_norm_then_gate, gate_then_rms_norm):
        for x, gate in ((x_THD, gate_THD), (x_THD[:, 0], gate_THD[:, 0])):
            torch.testing.assert_close(op(x, gate, weight_D, 1e-6), op.twin(x, gate, weight_D, 1e-6))
    torch.testing.assert_close(sigmoid_gated(x_THD, gate_THD), x_THD * gate_THD.sigmoid())
    own_TD, residual_TD = torch.randn(tokens, size), torch.randn(tokens, size)
    want = residual_TD + own_TD * gate_THD[:, 0, :1].sigmoid()
    add_sigmoid_gated_(own_TD, gate_THD[:, 0, :1], residual_TD)
    torch.testing.assert_close(residual_TD, want)


@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_parts_of_groups_stand_side_by_side(tokens: int) -> None:
    grouped = torch.randn(tokens, 3, 12)
    parts = grouped.split((5, 4, 3), -1)
    want = torch.cat([part.flatten(1) for part in parts], 1)
    assert torch.equal(side_by_side(parts), want)
    assert torch.equal(side_by_side(parts[1:2]), parts[1].flatten(1))
    recording, made = record(torch.empty(1 << 16, dtype=torch.uint8), lambda: side_by_side(parts))
    recording.finish(1)()
    assert torch.equal(made, want)


def test_steps_of_more_tokens_than_rows_are_refused() -> None:
    memory = Memory(Step((1, 1)), [(2, 5)], [torch.float32], "cpu")
    states = native.RowStates(memory.states[0], memory.rows.page_table, memory.rows.step)
    with pytest.raises(ValueError, match="a step of 2 rows has 3 tokens"):
        native.convolution(torch.randn(3, 5), states, torch.randn(5, 3), None)
    with pytest.raises(ValueError, match=r"states of a convolution of shape \['any', 2, 6\]"):
        native.convolution(torch.randn(2, 6), states, torch.randn(6, 3), None)
