"""The kernels of recurrent layers against their twins, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from helpers.drafted_states import DRAFTED, compare_drafts, layers, run
from helpers.effort import TEST_DAY, effort
from helpers.recurrent_cases import Memory, Step, compare, compare_orders, conv_call, delta_call, mamba_call
from pagerunner.attention import recurrent
from pagerunner.attention.paged_recurrent import PagedRecurrentBackend
from pagerunner.batch import StatePages
from pagerunner.ops.causal_conv import causal_conv_rows, journaled_conv_rows
from pagerunner.ops.gdn import gated_delta_rows
from pagerunner.ops.kernels.recurrent import causal_conv, gdn, mamba2
from pagerunner.ops.mamba2 import mamba2_rows
from pagerunner.ops.side_by_side import by_groups

pytest.importorskip("triton")
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402

STEPS = {
    "decode": Step((1, 1, 1)),
    "decode, padded, saves": Step((1, 1), saves=((1, 1),), padding=(2, 2)),
    "a long row": Step((70,)),
    "long, short and one, saves, padded": Step(
        (3, 75, 1, 9), saves=((1, 61), (1, 64), (1, 7), (0, 2), (1, 75), (3, 9)), padding=(1, 4)
    ),
}
MANY_ROWS = Step((70, 3, 1, 9, 10, 65, 9, 9, 12, 1, 130), saves=((0, 64), (5, 3), (8, 12), (10, 129)), padding=(40, 3))
each_dtype = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float16, 2e-3)])
each_step = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())


@each_step
@pytest.mark.parametrize(("taps", "biased", "dtype"), [(4, False, torch.float32), (2, True, torch.float16)])
def test_convolution(step, taps, biased, dtype):
    call = conv_call(step, 6, taps, dtype, "cpu", biased=biased)
    compare(causal_conv_rows, call, 0, step, [(taps - 1, 6)], [dtype], "cpu", 1e-3 if dtype == torch.float16 else 1e-6)


@each_step
@each_dtype
def test_gated_delta(step, dtype, tolerance):
    sizes = (1, 2, 8, 5)
    shapes, dtypes = [(3, 6), (2, 8, 5)], [torch.float16, torch.float32]
    compare(gated_delta_rows, delta_call(step, sizes, dtype, "cpu"), 1, step, shapes, dtypes, "cpu", tolerance)


@each_step
@each_dtype
def test_mamba2(step, dtype, tolerance):
    sizes = (1, 2, 6, 5)
    shapes, dtypes = [(3, 6), (2, 6, 5)], [torch.float16, torch.float32]
    compare(mamba2_rows, mamba_call(step, sizes, dtype, "cpu"), 1, step, shapes, dtypes, "cpu", tolerance)


@each_dtype
def test_keys_and_states_beyond_the_usual_tiles(dtype, tolerance):
    step, dtypes = STEPS["long, short and one, saves, padded"], [torch.float16, torch.float32]
    call = delta_call(step, (1, 2, 136, 24), dtype, "cpu")
    compare(gated_delta_rows, call, 1, step, [(3, 6), (2, 136, 24)], dtypes, "cpu", tolerance)
    call = mamba_call(step, (1, 2, 20, 136), dtype, "cpu")
    compare(mamba2_rows, call, 1, step, [(3, 6), (2, 20, 136)], dtypes, "cpu", tolerance)


@pytest.mark.parametrize(
    ("module", "op", "call"), [(gdn, gated_delta_rows, delta_call), (mamba2, mamba2_rows, mamba_call)]
)
def test_rows_of_a_graph_that_has_room_for_more(module, op, call, monkeypatch):
    """Programs take several rows in turn, and the rows are looked through in several turns."""
    monkeypatch.setattr(module, "LISTED", 16)
    arguments = call(MANY_ROWS, (1, 2, 8, 5), torch.float32, "cpu")
    compare(op, arguments, 1, MANY_ROWS, [(3, 6), (2, 8, 5)], [torch.float16, torch.float32], "cpu", 2e-5)


@pytest.mark.parametrize("kind", ["gated delta", "mamba2"])
def test_between_what_was_before_and_a_kernel_that_reads_states_early_is_the_convolution(kind, monkeypatch):
    """`_one` starts when the convolution has waited for what was before it, so nothing that writes states still runs. Nothing else lies between."""
    launched, plain = [], InterpretedFunction.run
    made, spec = layers("float32", 2)[kind]
    step = STEPS["decode, padded, saves"]
    memory = Memory(step, spec.shapes, [torch.float32] * 2, "cpu")
    for op in (causal_conv_rows, gated_delta_rows, mamba2_rows):
        monkeypatch.setattr(recurrent, op.__name__, op.kernel)
    monkeypatch.setattr(
        InterpretedFunction, "run", lambda kernel, *a, **how: (launched.append(kernel.fn), plain(kernel, *a, **how))[1]
    )
    inputs = tuple(torch.randn(step.tokens, *shape) for shape in spec.entry)
    made.rows(inputs, StatePages(0, tuple(memory.states)), memory.rows)
    assert launched == [causal_conv._step.fn, (gdn if kind == "gated delta" else mamba2)._one.fn]


@pytest.mark.parametrize(("tokens", "taps", "biased"), [(130, 4, True), (2100, 2, False)])
def test_convolution_of_many_tokens(tokens, taps, biased):
    """So long that programs have as many tokens as they may, and most of these see inputs of their own row alone."""
    step = Step((3, tokens, 1), saves=((1, tokens - 1),), padding=(1, 2))
    call = conv_call(step, 6, taps, torch.float32, "cpu", biased=biased)
    compare(causal_conv_rows, call, 0, step, [(taps - 1, 6)], [torch.float32], "cpu", 1e-6)


@each_step
def test_convolution_of_inputs_ordered_by_groups(step):
    """Two groups of 3 queries, 3 keys, 4 values and 4 gates; groups' gates and other columns behind them are not read."""
    torch.manual_seed(1)
    x, weight = torch.randn(step.tokens, 28 + 5)[:, :28], torch.randn(20, 4)

    def call(state, rows):
        return x, state, weight, None, rows, 2, 3

    compare(causal_conv_rows, call, 0, step, [(3, 20)], [torch.float32], "cpu", 1e-6)
    found, memory = (Memory(step, [(3, 20)], [torch.float32], "cpu") for _ in range(2))
    ordered = torch.cat([part.flatten(1) for part in by_groups(x, 2, 3)[:3]], 1)
    want = causal_conv_rows.twin(ordered, memory.states[0], weight, None, memory.rows)
    assert torch.equal(causal_conv_rows.twin(*call(found.states[0], found.rows)), want)


@each_step
def test_a_layer_whose_projection_is_ordered_by_key_heads(step):
    compare_orders(step, (2, 4, 8, 5), torch.float32, "cpu", 1e-6)


@pytest.mark.parametrize("step", DRAFTED.values(), ids=DRAFTED.keys())
@pytest.mark.parametrize("kind", ["gated delta", "mamba2"])
@each_dtype
def test_drafts(step, kind, dtype, tolerance):
    compare_drafts(
        *layers("float32", 2)[kind], step, dtype, "cpu", 5 * tolerance
    )  # whose numbers are larger than those above


@pytest.mark.days(2)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", ["gated delta", "mamba2"])
def test_drafts_are_bit_by_bit_plain_decoding(kind, dtype, monkeypatch):
    for op in (causal_conv_rows, journaled_conv_rows, gated_delta_rows, mamba2_rows):
        monkeypatch.setattr(recurrent, op.__name__, op.kernel)
    run(*layers(dtype, 2)[kind], PagedRecurrentBackend(), drafts=3, seed=TEST_DAY, steps=effort(8, 60), length=16)


def test_journals_that_are_not_parts_of_one_page_are_refused():
    """Kernels find all of them by one stride."""
    step = DRAFTED["one token and none"]
    memory = Memory(step, [(3, 6), (3, 6), (3, 2)], [torch.float32] * 3, "cpu")
    state, *journal = memory.states
    inputs, weight = (torch.randn(step.tokens, 6), (torch.randn(step.tokens, 2),)), torch.randn(6, 4)
    journaled_conv_rows.kernel(*inputs, state, tuple(journal), weight, None, memory.rows)
    apart = tuple(part.clone() for part in journal)
    with pytest.raises(AssertionError, match="one stride"):
        journaled_conv_rows.kernel(*inputs, state, apart, weight, None, memory.rows)


def test_a_planted_fault_is_caught():
    step = STEPS["a long row"]

    class Wrong:
        twin = mamba2_rows.twin

        @staticmethod
        def kernel(*arguments):
            out = mamba2_rows.twin(*arguments)
            arguments[-2][:] = 0
            return out

    with pytest.raises(AssertionError):
        compare(
            Wrong,
            mamba_call(step, (1, 2, 6, 5), torch.float32, "cpu"),
            0,
            step,
            [(2, 6, 5)],
            [torch.float32],
            "cpu",
            2e-5,
        )
