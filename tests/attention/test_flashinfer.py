"""The FlashInfer backends, with a stand-in for the library that reads its own buffers only."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import fake_flashinfer, latent_cases
from helpers.attention_cases import Case, batch_for_tables, cases, expected, make_step, plain, run
from pagerunner.attention import flashinfer_backend
from pagerunner.attention.base import GraphShape, PlanInputs
from pagerunner.attention.flashinfer_backend import FlashInferBackend, FlashInferLatentBackend
from pagerunner.batch import StepRows
from pagerunner.memory import specs


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr(flashinfer_backend, "WORKSPACE_BYTES", 16)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases.map(lambda case: replace(case, reach=None)), st.sampled_from([0, 2]))
def test_equals_attention_row_by_row(case: Case, spare: int) -> None:
    got, want = run(replace(case, spare_columns=spare), FlashInferBackend())
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


STEPS = [
    (plain(30, 1), plain(5, 1), plain(100, 1)),
    (plain(31, 1),),
    (plain(700, 1), plain(0, 1), plain(16, 1), plain(47, 1)),  # longer than any before
    (plain(1, 1), plain(15, 1)),
]


def test_a_replay_sees_this_steps_pages_whatever_was_planned_before() -> None:
    backend = FlashInferBackend()
    base = Case(STEPS[0], 16, 2, 2, 8)
    run(base, backend)  # the step before a capture
    states = {}
    for rows, name in ((4, "small"), (6, "large")):
        shape = GraphShape(rows, rows, 1024)
        states[name] = (backend.new_state(shape), shape)
    captured = {}
    for name, (state, shape) in states.items():
        rows = StepRows.of([1] * shape.rows, [1] * shape.rows, range(shape.rows))
        table = torch.zeros(8, 64, dtype=torch.int64)
        captured[name] = (backend.plan(PlanInputs(rows, [], [], [], table, 16, None), state), rows, table)
    for turn, step_rows in enumerate(STEPS * 2):
        name = ("small", "large")[turn % 2]
        state, shape = states[name]
        metadata, rows, table = captured[name]
        case = replace(base, rows=step_rows)
        step = make_step(case, seed=turn)
        batch = batch_for_tables(step, case, backend)  # an eager step in between
        mine = batch.groups[0].page_table
        table[: len(mine), : mine.shape[1]] = mine
        slots = batch.rows.slots_R.tolist()
        inputs = PlanInputs(rows, step.query_lens, step.seq_lens, slots, table, 16, None)
        backend.plan(inputs, state)
        extra = shape.rows - len(step_rows)
        q, k, v = (torch.cat((x, torch.zeros_like(x[:1]).expand(extra, -1, -1))) for x in (step.q, step.k, step.v))
        none = torch.full((extra,), -1)
        group = replace(
            batch.groups[0],
            metadata=metadata,
            page_table=table,
            write_entry=torch.cat((step.write_entry, none)),
            write_offset=torch.cat((step.write_offset, none * 0)),
        )
        out = backend.forward(q, k, v, step.layer, group, batch, step.scale)
        assert out.isfinite().all()
        want = torch.cat(expected(case, step))
        torch.testing.assert_close(out[: len(step_rows)].double(), want, atol=2e-5, rtol=2e-5)


def test_a_layer_that_no_step_has_run_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_backend, "capturing", lambda device: True)
    backend = FlashInferBackend()
    case = Case(STEPS[0], 16, 2, 2, 8)
    step = make_step(case)
    batch = batch_for_tables(step, case, backend)
    rows = batch.rows
    table = batch.groups[0].page_table
    metadata = backend.plan(PlanInputs(rows, [], [], [], table, 16, None), backend.new_state(GraphShape(3, 3, 64)))
    group = replace(batch.groups[0], metadata=metadata)
    with pytest.raises(RuntimeError, match="no step before"):
        backend.forward(step.q, step.k, step.v, step.layer, group, batch, step.scale)


@pytest.mark.parametrize("padding", [0, 3])
def test_latents(padding: int) -> None:
    lengths = [latent_cases.RowCase(start, 1) for start in (0, 15, 300, 64)]
    backend = FlashInferLatentBackend()
    latent_cases.run(latent_cases.Case(tuple(lengths)), backend)
    case = latent_cases.Case(tuple(lengths), padding=padding)
    got, want = latent_cases.run(case, backend)
    torch.testing.assert_close(got, want, atol=5e-5, rtol=5e-5)
    mixed = latent_cases.Case((*lengths, latent_cases.RowCase(30, 9)))
    got, want = latent_cases.run(mixed, FlashInferLatentBackend())
    torch.testing.assert_close(got, want, atol=5e-5, rtol=5e-5)


def test_says_what_it_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flashinfer")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "flashinfer" else found(name))
    half = torch.bfloat16
    assert "not installed" in FlashInferBackend().unsupported(specs.FullKV(1, 64, "bfloat16"), "cuda", half)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for spec, dtype, word in (
        (specs.ChunkedKV(1, 64, "bfloat16", chunk=8), half, "chunked"),
        (specs.WindowKV(1, 64, "bfloat16", window=8), half, "window"),
        (specs.FullKV(1, 20, "bfloat16"), half, "20"),
        (specs.FullKV(1, 64, "bfloat16"), torch.float32, "float32"),
        (specs.FullKV(1, 64, "fp8_e4m3"), half, "fp8"),
    ):
        assert word in FlashInferBackend().unsupported(spec, "cuda", dtype)
    assert "cpu" in FlashInferBackend().unsupported(specs.FullKV(1, 64, "bfloat16"), "cpu", half)
    assert "latent" in FlashInferLatentBackend().unsupported(specs.FullKV(1, 64, "bfloat16"), "cpu", half)
    assert "(8, 4)" in FlashInferLatentBackend().unsupported(specs.LatentKV(8, 4, "bfloat16"), "cpu", half)
