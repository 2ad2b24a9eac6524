"""The kernels of recurrent layers at the sizes of Qwen3-Next and Bamba, and the backend that calls them in a graph."""

from __future__ import annotations

import pytest
import torch

from helpers.device import DEVICE
from helpers.drafted_states import DRAFTED, compare_drafts, drafted_step, run
from helpers.recurrent_cases import Step, close, compare, compare_orders, conv_call, delta_call, mamba_call
from pagerunner.attention.base import GraphShape, PlanInputs
from pagerunner.attention.calls import RecurrentCall
from pagerunner.attention.paged_recurrent import PagedRecurrentBackend
from pagerunner.attention.recurrent import GatedDelta, Mamba2
from pagerunner.batch import GroupBatch, StatePages, StepRows, WritePlaces
from pagerunner.memory.specs import RecurrentState
from pagerunner.ops.causal_conv import causal_conv_rows
from pagerunner.ops.gdn import gated_delta_rows
from pagerunner.ops.mamba2 import mamba2_rows
from pagerunner.ops.state_rows import StateRows
from pagerunner.types import StateSave

STEPS = {
    "decode": Step((1,) * 40, saves=((3, 1), (39, 1)), padding=(24, 24)),
    "mixed": Step(
        (1, 700, 5, 64, 1, 1200, 130), saves=((1, 63), (1, 64), (1, 640), (1, 700), (2, 3), (5, 1199)), padding=(0, 11)
    ),
    "room for more rows": Step((1, 300, 2, 90, *(9, 1) * 20), saves=((1, 128), (43, 1)), padding=(300, 7)),
}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-3}
each_kind = pytest.mark.parametrize("kind", ["gated delta", "mamba2"])
each = [pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys()), pytest.mark.parametrize("dtype", TOLERANCE)]


@each[0]
@each[1]
def test_convolution(step: Step, dtype: torch.dtype) -> None:
    call = conv_call(step, 8192, 4, dtype, "cuda", biased=True)
    compare(causal_conv_rows, call, 0, step, [(3, 8192)], [dtype], "cuda", TOLERANCE[dtype])


@each[0]
@each[1]
def test_gated_delta(step: Step, dtype: torch.dtype) -> None:
    call, shapes = delta_call(step, (16, 32, 128, 128), dtype, "cuda"), [(3, 8192), (32, 128, 128)]
    compare(gated_delta_rows, call, 1, step, shapes, [dtype, torch.float32], "cuda", TOLERANCE[dtype])


@each[0]
@each[1]
def test_mamba2(step: Step, dtype: torch.dtype) -> None:
    call, shapes = mamba_call(step, (1, 128, 64, 128), dtype, "cuda"), [(3, 8448), (128, 64, 128)]
    compare(mamba2_rows, call, 1, step, shapes, [dtype, torch.float32], "cuda", TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sizes", [(2, 4, 64, 64), (1, 2, 96, 40), (1, 2, 256, 256)])
def test_gated_delta_of_other_sizes(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    call, shapes = delta_call(STEPS["mixed"], sizes, dtype, "cuda"), [(3, 768), sizes[1:]]
    # of few heads the first one is a larger part: what is between products, rounded to bfloat16, makes 1.6e-2 of it
    tolerance = {torch.float32: 4e-5, torch.bfloat16: 2e-2}[dtype]
    compare(gated_delta_rows, call, 1, STEPS["mixed"], shapes, [dtype, torch.float32], "cuda", tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sizes", [(2, 4, 32, 16), (1, 2, 80, 128), (2, 4, 64, 256)])
def test_mamba2_of_other_sizes(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    call, shapes = mamba_call(STEPS["mixed"], sizes, dtype, "cuda"), [(3, 768), sizes[1:]]
    compare(mamba2_rows, call, 1, STEPS["mixed"], shapes, [dtype, torch.float32], "cuda", TOLERANCE[dtype])


@each[0]
@each[1]
def test_a_layer_whose_projection_is_ordered_by_key_heads(step: Step, dtype: torch.dtype) -> None:
    """In an engine, steps of one token a row have it ordered by parts."""
    compare_orders(step, (16, 32, 128, 128), dtype, DEVICE, TOLERANCE[dtype])


def layer(
    kind: str, dtype: torch.dtype, kept: torch.dtype, part: int = 1
) -> tuple[GatedDelta | Mamba2, RecurrentState]:
    """Qwen3-Next's or Bamba's layer with `dtype` weights and inputs, or one of a part of its heads; states are in `kept`."""

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE, dtype=dtype)

    names = {"entry_dtype": str(dtype).removeprefix("torch.")}
    dtypes = (names["entry_dtype"], str(kept).removeprefix("torch."))
    if kind == "gated delta":
        heads, channels = 32 // part, 8192 // part
        delta = GatedDelta(rand(channels, 4), rand(heads), rand(heads), 16 // part, 128, 128)
        entry = ((channels,), (heads,), (heads,))
        return delta, RecurrentState(((3, channels), (heads, 128, 128)), dtypes, entry=entry, **names)
    heads, channels = 128 // part, 8192 // part + 256
    mamba = Mamba2(rand(channels, 4), rand(channels), rand(heads), rand(heads), rand(heads), 64, 1, 128)
    return mamba, RecurrentState(((3, channels), (heads, 64, 128)), dtypes, entry=((channels,), (heads,)), **names)


@each_kind
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("step", DRAFTED.values(), ids=DRAFTED.keys())
def test_drafts(kind: str, step: Step, dtype: torch.dtype) -> None:
    compare_drafts(*layer(kind, dtype, torch.float32), step, dtype, DEVICE, 5 * TOLERANCE[dtype])


@each_kind
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_steps_of_drafts_alone(kind: str, drafts: int, rows: int, dtype: torch.dtype) -> None:
    """States are in the dtype of the inputs, as in engines."""
    step = drafted_step(rows, drafts, strided=rows != 8)
    compare_drafts(*layer(kind, dtype, dtype), step, dtype, DEVICE, 5 * TOLERANCE[dtype], kept=dtype)


@each_kind
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_drafts_are_plain_decoding(kind: str, drafts: int, dtype: torch.dtype) -> None:
    """Over many steps, with pages that move, saved states, and requests that go on from them."""

    def same(found: torch.Tensor, want: torch.Tensor) -> bool:
        error = (found.double() - want.double()).norm() / want.double().norm()
        return float(error) <= 5 * TOLERANCE[dtype]

    run(
        *layer(kind, dtype, dtype, 4),
        PagedRecurrentBackend(),
        drafts=drafts,
        seed=drafts,
        steps=30,
        device=DEVICE,
        same=same,
    )


@each_kind
def test_a_step_of_one_token_a_row_right_behind_a_write_of_its_states(kind: str) -> None:
    """Its kernel reads states before its turn. The convolution lies between, and has waited for the write."""
    dtype = torch.bfloat16
    made, spec = layer(kind, dtype, dtype)
    rows, table = StepRows.of([1] * 256, [1] * 256, range(256), DEVICE), torch.randperm(256, device=DEVICE)[:, None]
    given = [torch.randn(256, *shape, device=DEVICE, dtype=dtype) for shape in (*spec.shapes, *spec.entry)]
    found = []
    for waits in (True, False, False):
        states = tuple(torch.full_like(part, float("nan")) for part in given[:2])
        torch.cuda.synchronize()
        for state, part in zip(states, given[:2], strict=True):
            state.copy_(part)
        if waits:
            torch.cuda.synchronize()
        out = made.rows(tuple(given[2:]), StatePages(0, states), StateRows(rows, table))
        found.append((out, *states))
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))


def test_a_graph_replays_any_step_and_saves_states() -> None:
    torch.manual_seed(0)
    heads, dim, slots, unit = 4, 64, 8, 4 * 64 * 64 * 4 + 3 * 768 * 4
    layer = GatedDelta(
        torch.randn(768, 4, device="cuda"),
        torch.zeros(heads, device="cuda"),
        torch.zeros(heads, device="cuda"),
        heads,
        dim,
        dim,
    )
    pool = torch.randn(20, unit // 4, device="cuda")
    backend = PagedRecurrentBackend()

    def memory(pool: torch.Tensor) -> StatePages:
        own = pool[:, : heads * dim * dim].view(-1, heads, dim, dim)
        return StatePages(0, (pool[:, heads * dim * dim :].view(-1, 3, 768), own))

    table = torch.zeros(slots, 1, dtype=torch.int64, device="cuda")
    table[:, 0] = torch.randperm(19, device="cuda")[:slots] + 1

    def planned(rows, hosts, state, saves=()):
        plan = backend.plan(PlanInputs(rows, *hosts, table, 16, None, saves), state)
        none = torch.zeros(rows.num_tokens, dtype=torch.int64, device="cuda")
        return rows, GroupBatch(table, WritePlaces(none, none), 16, backend, plan)

    def run(inputs, pool, planned):
        rows, group = planned
        return backend.run(RecurrentCall(layer, tuple(inputs), memory(pool), group, rows))

    most = StepRows.of([1] * 4 + [60], [1] * 4 + [60], range(5), "cuda")
    static = [torch.randn(64, n, device="cuda") for n in (768, heads, heads)]
    state = backend.new_state(GraphShape(5, 64, 64))
    captured = planned(most, ([], [], []), state)
    spare = pool.clone()
    for _ in range(2):
        run(static, spare, captured)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(static, pool, captured)
    for lens, saves in (([3, 1, 20], ((2, 19, 5), (0, 9, 2))), ([1, 1], ()), ([40, 9, 1, 1, 2], ((0, 30, 7),))):
        table[:] = table.roll(1, 0)
        seq = [n + 7 for n in lens]
        order = torch.randperm(slots)[: len(lens)].tolist()
        free = sorted(set(range(1, 20)) - set(table[:, 0].tolist()))
        wanted = tuple(StateSave(r, p, 0, free[k % len(free)] * unit) for r, p, k in saves)
        eager = StepRows.of(lens, seq, order, "cuda")
        inputs = [torch.randn_like(x) for x in static]
        for mine, given in zip(static, inputs, strict=True):
            mine.copy_(given)
        tokens, rows = sum(lens), len(lens)
        most.slots_R.zero_()
        most.slots_R[:rows] = eager.slots_R
        most.query_start_R1.fill_(tokens)
        most.query_start_R1[: rows + 1] = eager.query_start_R1
        most.row_T.fill_(-1)
        most.row_T[:tokens] = eager.row_T
        most.positions_T[:tokens] = eager.positions_T
        most.seq_lens_R.zero_()
        most.seq_lens_R[:rows] = eager.seq_lens_R
        expected = pool.clone()
        backend.plan(PlanInputs(most, lens, seq, order, table, 16, None, wanted), state)
        plain = planned(eager, (lens, seq, order), backend.new_state(None), wanted)
        want = run([x[:tokens] for x in inputs], expected, plain)
        graph.replay()
        close(out[:tokens], want, 1e-5)
        assert bool(out.isfinite().all())
        close(pool, expected, 1e-5)


def test_planning_an_eager_steps_saves_does_not_wait_for_the_device() -> None:
    backend, table = PagedRecurrentBackend(), torch.zeros(2, 1, dtype=torch.int64, device="cuda")
    rows = StepRows.of([3, 70], [3, 90], [0, 1], "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        inputs = PlanInputs(rows, [3, 70], [3, 90], [0, 1], table, 16, None, (StateSave(1, 80, 0, 64),))
        saves = backend.plan(inputs, backend.new_state(None))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [part.tolist() for part in saves] == [[0, 0, 1], [1], [80], [64]]
