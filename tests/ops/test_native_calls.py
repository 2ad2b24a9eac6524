"""Calls of the CPU kernels: what they refuse, the memory they work in, and recordings that run again."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from helpers.compiler import needs_compiler
from helpers.step_cases import GROUPS, check_build_rows, slot_state, staged_rows, tables
from pagerunner.batch import KVPages, StepRows, WritePlaces
from pagerunner.ops import panels as ops_panels
from pagerunner.ops.activation import gelu_tanh_and_mul, silu_and_mul, softcap_
from pagerunner.ops.batch import SlotState, StepTensors, TableSet, build_rows
from pagerunner.ops.embedding import embedding, scaled
from pagerunner.ops.linear import Norm
from pagerunner.ops.native import batch, calls, latent, mixture, paged, recurrent, small
from pagerunner.ops.native.calls import CannotRecordError, Commands, record
from pagerunner.ops.norm import add_rms_norm_, rms_norm
from pagerunner.ops.paged_attention import HeadPrep, PagedPlan, Scores
from pagerunner.ops.panels import Layout, panel_width, product, put_rows
from pagerunner.ops.rope import RopeAngles, rope_, rope_angles, rope_pairs_, temper
from pagerunner.ops.sample import greedy

pytestmark = needs_compiler


def memory(size: int = 1 << 20) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def panels(outputs: int, inputs: int) -> tuple[torch.Tensor, Layout]:
    width = panel_width()
    assert width is not None
    layout = Layout(width, outputs)
    made = torch.empty(layout.panels, inputs, width)
    put_rows(made, layout, 0, torch.randn(outputs, inputs))
    return made, layout


@pytest.mark.parametrize(("tokens", "features"), [(0, 8), (1, 5), (3, 64), (40, 300)])
@pytest.mark.parametrize("offset", [False, True])
def test_norms_equal_their_twins(offset, tokens: int, features: int) -> None:
    x_TD, weight_D = torch.randn(tokens, features + 2)[:, 1:-1], torch.rand(features)
    torch.testing.assert_close(rms_norm(x_TD, weight_D, 1e-6, offset), rms_norm.twin(x_TD, weight_D, 1e-6, offset))


@pytest.mark.parametrize(("tokens", "features"), [(0, 8), (1, 5), (3, 64), (40, 300)])
@pytest.mark.parametrize("offset", [False, True])
def test_norms_of_sums_equal_their_twins(offset, tokens: int, features: int) -> None:
    x_TD, residual_TD, weight_D = torch.randn(tokens, features), torch.randn(tokens, features + 3), torch.rand(features)
    sums = [residual_TD.clone()[:, 1:-2] for _ in range(2)]
    found = [
        op(x_TD, own, weight_D, 1e-6, offset) for op, own in zip((add_rms_norm_, add_rms_norm_.twin), sums, strict=True)
    ]
    torch.testing.assert_close(*found)
    assert torch.equal(*sums)


@pytest.mark.parametrize(("tokens", "heads", "size"), [(0, 2, 8), (1, 3, 6), (7, 4, 64), (40, 1, 34)])
@pytest.mark.parametrize("offset", [False, True])
def test_norms_of_heads_equal_their_twins(offset, tokens: int, heads: int, size: int) -> None:
    x_TND, weight_D = torch.randn(tokens, heads + 2, size)[:, 1:-1], torch.rand(size)
    torch.testing.assert_close(rms_norm(x_TND, weight_D, 1e-6, offset), rms_norm.twin(x_TND, weight_D, 1e-6, offset))


@pytest.mark.parametrize(("tokens", "heads", "size"), [(0, 2, 8), (1, 3, 6), (7, 4, 64), (40, 1, 34)])
@pytest.mark.parametrize("turn", [rope_, rope_pairs_])
def test_rotations_of_heads_equal_their_twins(turn, tokens: int, heads: int, size: int) -> None:
    angles = rope_angles(torch.arange(tokens) * 7, torch.rand(size // 2), 1.0, torch.float32)
    ours, theirs = torch.randn(tokens, heads + 2, size)[:, 1:-1], torch.empty(tokens, heads, size)
    theirs.copy_(ours)
    turn(ours, angles)
    turn.twin(theirs, angles)
    torch.testing.assert_close(ours, theirs)


def test_queries_grow_with_their_position() -> None:
    x_THD, positions_T = torch.randn(5, 6, 7)[:, 1:4], torch.tensor([0, 8189, 8190, 100_000, 9_999_999])
    growth_T = torch.log(1 + ((positions_T + 1.0) / 8192).floor()).double() * 0.1 + 1
    want = x_THD.double() * growth_T[:, None, None]
    torch.testing.assert_close(temper(x_THD.clone(), positions_T, 8192.0, 0.1).double(), want, atol=1e-6, rtol=1e-6)
    apart = x_THD.repeat_interleave(2, -1)[..., ::2]
    torch.testing.assert_close(temper(apart, positions_T, 8192.0, 0.1).double(), want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("tokens", "inner"), [(0, 8), (1, 5), (3, 64), (40, 301)])
@pytest.mark.parametrize("op", [silu_and_mul, gelu_tanh_and_mul])
def test_activations_equal_their_twins(op, tokens: int, inner: int) -> None:
    gate_up_T2I = 12 * torch.randn(tokens, 2 * inner + 2)[:, 1:-1]
    torch.testing.assert_close(op(gate_up_T2I), op.twin(gate_up_T2I), atol=1e-5, rtol=2e-6)
    odd = torch.tensor([[torch.nan, torch.inf, -torch.inf, 0.0, 1.0, 1.0, 1.0, 1.0]])
    torch.testing.assert_close(op(odd), op.twin(odd), equal_nan=True)
    assert torch.equal(scaled(gate_up_T2I, 1.7), gate_up_T2I * 1.7)


@pytest.mark.parametrize("features", [1, 7, 40, 515])
def test_soft_caps_equal_their_twin(features: int) -> None:
    for cap in (0.5, 30.0):
        sizes = torch.logspace(-9, 4, 3 * features).view(3, features) * torch.tensor([1.0, -1.0, 1.0])[:, None]
        sizes[0, 0], sizes[1, 0], sizes[2, 0] = torch.inf, -torch.inf, torch.nan
        found = sizes.clone()
        assert softcap_(found, cap) is found
        want = cap * torch.tanh(sizes.double() / cap)
        torch.testing.assert_close(found.double(), want, atol=0, rtol=5e-7, equal_nan=True)


@pytest.mark.parametrize("scale", [1.0, 1.25])
def test_angles_equal_their_twin(scale: float) -> None:
    positions_T = torch.tensor([0, 1, 17, 4095, 40_959, 131_071])
    frequencies = 1.0 / 1e6 ** (torch.arange(0, 64, 2) / 64)
    got = rope_angles(positions_T, frequencies, scale, torch.float32)
    want = rope_angles.twin(positions_T, frequencies, scale, torch.float32)
    torch.testing.assert_close(got, want, atol=2e-7, rtol=1e-6)


def test_rows_equal_their_twin_and_wrong_ids_are_refused() -> None:
    table = torch.randn(9, 12)[:, 2:7]
    ids_T = torch.tensor([8, 0, 3, 3])
    assert torch.equal(embedding(ids_T, table), torch.nn.functional.embedding(ids_T, table))
    for wrong in (-1, 9, 2**40):
        with pytest.raises(IndexError, match="outside the vocabulary"):
            embedding(torch.tensor([1, wrong]), table)


def test_ids_and_positions_with_gaps_and_tables_of_one_row_equal_their_twins() -> None:
    table, ids_T = torch.randn(9, 5), torch.arange(8)[::2]
    assert torch.equal(embedding(ids_T, table), table[ids_T])
    assert torch.equal(embedding(ids_T.view(2, 2), table), table[ids_T.view(2, 2)])
    same = table[3].expand(9, 5)
    assert torch.equal(embedding(torch.tensor([0, 8]), same), same[:2])
    frequencies = torch.rand(4)
    for positions in (ids_T, ids_T.view(2, 2)):
        want = rope_angles.twin(positions, frequencies, 1.0, torch.float32)
        torch.testing.assert_close(rope_angles(positions, frequencies, 1.0, torch.float32), want, atol=2e-7, rtol=1e-6)


def test_python_and_c_have_the_same_structures() -> None:
    structures = {
        calls.PRODUCT: ops_panels._PRODUCT,
        calls.PREPARE: paged._CALL,
        calls.ATTENTION: paged._CALL,
        calls.ROWS: small._ROWS,
        calls.ANGLES: small._ANGLES,
        calls.NORM: small._NORM,
        calls.STEP: batch._STEP,
        calls.GREEDY: small._GREEDY,
        calls.ROTATE: small._ROTATE,
        calls.MAP: small._MAP,
        calls.LOGITS: mixture._LOGITS,
        calls.ROUTE: mixture._ROUTE,
        calls.EXPERTS: mixture._EXPERTS,
        calls.HEAD_PRODUCT: latent._PRODUCT,
        calls.LATENT_HEADS: latent._HEADS,
        calls.TEMPER: small._TEMPER,
        calls.CONVOLUTION: recurrent._CONVOLUTION,
        calls.DELTA: recurrent._DELTA,
        calls.MAMBA: recurrent._MAMBA,
        calls.GATE: recurrent._GATE,
        calls.COPY: recurrent._COPY,
    }
    size = calls.kernels().bytes
    assert {kind: size(kind) for kind in structures} == {kind: one.size for kind, one in structures.items()}
    assert size(-1) == size(len(structures)) == 0


@pytest.mark.parametrize("lengths", [[1], [1] * 9, [7], [3, 1, 20, 1]])
@pytest.mark.parametrize("padding", [0, 3])
def test_a_steps_tensors_equal_their_twin(lengths: list[int], padding: int) -> None:
    check_build_rows(build_rows, lengths, len(lengths) + padding, sum(lengths) + 2 * padding)


def test_a_step_larger_than_its_tensors_is_refused() -> None:
    packed, where = staged_rows(random.Random(1), [3, 1], 2, 4, 9)
    for rows, tokens, room in ((2, 3, "token ids"), (1, 4, "slots")):
        out = StepTensors.empty(rows, tokens, len(GROUPS), torch.device("cpu"))
        with pytest.raises(ValueError, match=room):
            build_rows(packed, where, tables(9, "cpu"), slot_state(9), out)


@pytest.mark.parametrize("lengths", [[1, 1], [3, 1]])
def test_a_step_that_names_what_is_not_there_is_refused_and_nothing_written(lengths: list[int]) -> None:
    packed, where = staged_rows(random.Random(1), lengths, 2, sum(lengths), 9)
    held, state = tables(9, "cpu"), slot_state(9)
    out = StepTensors.empty(2, sum(lengths), len(GROUPS), torch.device("cpu"))
    build_rows(packed, where, held, state, out)
    before = [getattr(out, field.name).clone() for field in fields(out)]

    def refused(packed: torch.Tensor = packed, held: TableSet = held, state: SlotState = state) -> None:
        with pytest.raises(IndexError, match=r"isn't there \(command 1\)"):
            build_rows(packed, where, held, state, out)

    places = [(1, 10), (1, -1), (where.starts, -2), (where.query_start + 1, 9)]
    places += [] if where.one_token else [(where.token_rows + 1, 2), (where.token_rows + 1, -1)]
    for place, value in places:
        wrong = packed.clone()
        wrong[place] = value
        refused(wrong)
    few = int(packed[:2].max())
    refused(state=SlotState(*(getattr(state, field.name)[:few] for field in fields(state))))
    refused(state=replace(state, lengths=torch.full_like(state.lengths, -1)))
    refused(state=replace(state, drafts=state.drafts[:, :0])) if max(lengths) > 1 else None
    refused(held=replace(held, entries=held.entries[: held.shapes[-1, 0]]))
    for column in (1, 2):
        shapes = held.shapes.clone()
        shapes[0, column] = 0
        refused(held=replace(held, shapes=shapes))
    assert all(torch.equal(getattr(out, field.name), was) for field, was in zip(fields(out), before, strict=True))
    apart = replace(out, write_offset_GT=torch.zeros(len(GROUPS), 99, dtype=torch.int64)[:, : sum(lengths)])
    with pytest.raises(ValueError, match="same strides"):
        build_rows(packed, where, held, state, apart)


@pytest.mark.parametrize("vocabulary", [1, 7, 8, 100, 1000])
def test_greedy_tokens_equal_argmax(vocabulary: int) -> None:
    inf, nan = float("inf"), float("nan")
    logits_SV = torch.randn(40, 2 * vocabulary)[:, vocabulary:].round()  # many ties, rows apart
    for row, value in enumerate((inf, -inf, nan, 0.0)):
        logits_SV[row] = value
    for row, value in enumerate((inf, -inf, nan), 4):
        logits_SV[row, vocabulary // 2] = logits_SV[row, -1] = value
    logits_SV[7, vocabulary // 3], logits_SV[7, -1] = inf, nan
    tokens_S, best_S = greedy(logits_SV)
    assert torch.equal(tokens_S, logits_SV.argmax(-1))
    want_S = logits_SV.gather(1, tokens_S.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(best_S, want_S, equal_nan=True, rtol=0, atol=0)


CODE = """
import resource, torch
from pagerunner.ops.panels import Layout, panel_width, product
from pagerunner.ops.native import paged
from pagerunner.ops.paged_attention import PagedPlan, Scores
from pagerunner.batch import KVPages, StepRows
width = panel_width()
weights = torch.zeros(2, 256, width)
x = torch.zeros(1, 256).expand(60_000, 256)
out = torch.zeros(1, 1).expand(1, 1)
product(x[:2], weights, Layout(width, 2 * width))
into = torch.zeros(60_000, 2 * width)
heads = [torch.zeros(64, size, 4096) for size in (512, 1, 1)]
pages = KVPages(0, torch.zeros(1, 64, 1, 4096), torch.zeros(1, 64, 1, 4096))
table, rows = torch.zeros(1, 1, dtype=torch.int64), StepRows.of([64], [64], [0])
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + 20_000_000, now + 20_000_000))
def attend():
    paged.paged_attention(*heads, pages, table, rows, PagedPlan(), Scores(1.0))
for run in (lambda: product(x, weights, Layout(width, 2 * width), add_to_TO=into), attend):
    try:
        run()
    except RuntimeError as error:
        print("refused:", "allocate memory" in str(error))
print(product(x[:2], weights, Layout(width, 2 * width)).abs().sum().item())
"""


def test_memory_that_cannot_be_had_is_an_error_and_not_the_end_of_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:3] == ["refused: True", "refused: True", "0.0"]


def attention_inputs() -> dict[str, torch.Tensor]:
    """A row of 3 tokens after 2 in pages of 4; 2 query heads and 1 key/value head of 8 elements."""
    return {
        "qkv": torch.randn(3, 4, 8),
        "cos": torch.ones(3, 1, 8),
        "sin": torch.zeros(3, 1, 8),
        "norm": torch.ones(8),
        "k pages": torch.randn(5, 4, 1, 8),
        "v pages": torch.randn(5, 4, 1, 8),
        "entries": torch.tensor([3, 3, 1]),
        "offsets": torch.tensor([2, 3, 0]),
        "table": torch.tensor([[3, 1]]),
        "slots": torch.tensor([0], dtype=torch.int32),
        "starts": torch.tensor([0, 3], dtype=torch.int32),
        "lengths": torch.tensor([5], dtype=torch.int32),
        "sinks": torch.zeros(2),
    }


def attend(given: dict[str, torch.Tensor]) -> torch.Tensor:
    prep = HeadPrep(2, 1, RopeAngles(given["cos"], given["sin"]), given["norm"], given["norm"], 1e-6)
    rows = StepRows(given["slots"], given["starts"], given["lengths"], given["slots"], given["entries"], 3, 5, False)
    pages = KVPages(0, given["k pages"], given["v pages"])
    write = WritePlaces(given["entries"], given["offsets"])
    scores = Scores(1.0, 0.0, given["sinks"])
    return paged.projected_attention(given["qkv"], prep, pages, write, given["table"], rows, PagedPlan(), scores)


@pytest.mark.parametrize("name", list(attention_inputs()))
def test_attention_refuses_other_numbers_and_gaps(name: str) -> None:
    given = attention_inputs()
    assert attend(given).shape == (3, 2, 8)
    right = given[name]
    other = torch.float64 if right.is_floating_point() else torch.int16
    with pytest.raises(TypeError, match=r"a CPU kernel reads .* of shape \["):
        attend(given | {name: right.to(other)})
    gaps = torch.stack((right, right), -1)[..., 0]
    if right.numel() > 1 and name != "qkv":
        with pytest.raises(TypeError, match="strides"):
            attend(given | {name: gaps})


@pytest.mark.parametrize("name", ["cos", "norm", "v pages", "entries", "starts", "lengths", "sinks"])
def test_attention_refuses_other_shapes(name: str) -> None:
    given = attention_inputs()
    with pytest.raises(ValueError, match=r"a CPU kernel takes .* of shape"):
        attend(given | {name: torch.cat((given[name], given[name]), -1)})


def test_a_table_whose_rows_are_apart_is_read_by_its_width() -> None:
    """The columns are a ring: page 2 of a sequence is in column 0 of a table of two."""
    given = attention_inputs()
    given["lengths"] = torch.tensor([11], dtype=torch.int32)
    want = attend(dict(given, qkv=given["qkv"].clone()))
    apart = torch.full((1, 7), 10**12)
    apart[:, :2] = given["table"]
    assert torch.equal(attend(dict(given, table=apart[:, :2])), want)


def test_a_recording_does_the_same_again() -> None:
    weights, layout = panels(40, 24)
    x_TI, norm = torch.randn(3, 24), Norm(torch.rand(24), 1e-6)

    def work() -> torch.Tensor:
        return product(rms_norm(x_TI, norm.weight_I, 1e-6), weights, layout, norm=Norm(norm.weight_I, 1e-6))

    made, out = record(memory(), work)
    run = made.finish(2)
    for _ in range(3):
        run()
        assert torch.equal(out, work())
        x_TI.normal_()
    assert made.is_valid


def test_a_recording_is_of_kernels_alone() -> None:
    weights, layout = panels(40, 24)
    x_TI = torch.randn(3, 24)
    for compute in (lambda x: x + 1, lambda x: x.mul_(2), lambda x: x.t().contiguous(), lambda x: x.clone()):
        before = x_TI.clone()
        with pytest.raises(CannotRecordError, match="aten"):
            record(memory(), lambda compute=compute: compute(product(x_TI, weights, layout)))
        assert torch.equal(x_TI, before)
    assert product(x_TI, weights, layout).isfinite().all(), "the thread still records"


def test_a_recording_ends_where_its_memory_ends() -> None:
    weights, layout = panels(40, 24)
    x_TI, room = torch.randn(100, 24), memory(1024)
    with pytest.raises(CannotRecordError, match="more than 1024 bytes"):
        record(room, lambda: product(x_TI, weights, layout))


def test_a_recording_knows_when_a_tensor_has_moved() -> None:
    weights, layout = panels(40, 24)
    x_TI = torch.randn(2, 24)
    made, _ = record(memory(), lambda: product(x_TI, weights, layout))
    made.finish(2)
    assert made.is_valid
    weights.untyped_storage().resize_(0)
    assert not made.is_valid


def test_a_recorded_row_that_is_not_there_is_refused_each_time() -> None:
    table, ids_T = torch.randn(9, 4), torch.tensor([3])
    made, out_TD = record(memory(), lambda: embedding(ids_T, table))
    run = made.finish(2)
    run()
    assert torch.equal(out_TD, table[3:4])
    ids_T.fill_(-3)
    for _ in range(2):
        with pytest.raises(IndexError, match="outside the vocabulary"):
            run()
    ids_T.fill_(2)
    run()
    assert torch.equal(out_TD, table[2:3])


@pytest.mark.parametrize("recorded", [False, True])
def test_commands_that_were_put_off_run_together_and_keep_their_tensors(recorded: bool) -> None:
    weights, layout = panels(24, 24)
    x_TI = torch.randn(24, 3).t()  # it is copied, and nobody but the commands holds the copy
    want = product(product(x_TI, weights, layout), weights, layout)
    out_TO = torch.zeros(3, 24)

    def work() -> list[torch.Tensor]:
        commands = Commands()
        product(product(x_TI, weights, layout, commands=commands), weights, layout, out_TO=out_TO, commands=commands)
        others = [] if recorded else [torch.full((3, 24), 7.0) for _ in range(8)]
        assert recorded or not out_TO.any(), "it ran at once"
        commands.run()
        return others

    if recorded:
        x_TI = x_TI.contiguous()
        made, _ = record(memory(), work)
        assert not out_TO.any()
        made.finish(2)()
    else:
        work()
    assert torch.equal(out_TO, want)
    Commands().run()


def test_what_torch_computes_with_is_not_put_off() -> None:
    weights, layout = panels(24, 24)
    x_TI, columns_TO = torch.randn(3, 24), torch.zeros(24, 3).t()
    for put_off in ({"gate": True}, {"gate": True, "out_TO": torch.zeros(3, 12)}, {"add_to_TO": columns_TO}):
        with pytest.raises(ValueError, match="can't wait"):
            product(x_TI, weights, layout, commands=Commands(), **put_off)
    with pytest.raises(ValueError, match="not both"):
        product(x_TI, weights, layout, add_to_TO=torch.zeros(3, 24), out_TO=torch.zeros(3, 24))


def test_an_interrupt_at_any_line_of_a_recording_leaves_a_thread_that_does_not_record() -> None:
    """Also at the lines with which torch enters and leaves the mode that refuses other operations."""
    weights, layout = panels(24, 24)
    x_TI, room = torch.randn(3, 24), memory()
    want = product(x_TI, weights, layout)
    lines = line = 0
    while line <= lines:
        lines = interrupted_recording(line, lambda: product(x_TI, weights, layout).view(-1), room)
        torch.testing.assert_close(product(x_TI, weights, layout), want, rtol=0, atol=0)
        assert x_TI.clone().equal(x_TI)
        assert _get_current_dispatch_mode() is None, line
        line += 1
    assert lines > 60


def interrupted_recording(line: int, work: Callable[[], torch.Tensor], room: torch.Tensor) -> int:
    """Raise KeyboardInterrupt at the `line`-th line of a recording, from 0 on; how many lines ran."""
    ran = 0
    rooms = (calls.__file__, _python_dispatch.__file__)

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal ran
        if frame.f_code.co_filename not in rooms:
            return None
        if event == "line":
            ran += 1
            if ran == line + 1:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        record(room, work)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return ran


def test_what_two_interrupts_leave_behind_changes_nothing() -> None:
    """The second may come where the first is cleaned up after."""
    weights, layout = panels(24, 24)
    x_TI = torch.randn(3, 24)
    calls._ViewsAlone().__enter__()
    assert (x_TI + 1).sub_(1).allclose(x_TI, atol=1e-5)
    record(memory(), lambda: product(x_TI, weights, layout))
    assert _get_current_dispatch_mode() is None
