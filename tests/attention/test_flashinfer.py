"""The FlashInfer backends, with a stand-in for the library that reads its own buffers only."""

from __future__ import annotations

import importlib.util
import logging
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import fake_flashinfer, latent_cases
from helpers.attention_cases import Case, cases, make_batch, make_call, make_step, plain, run
from helpers.effort import effort
from helpers.graph_cases import replayed
from helpers.graphs import RecordedGraphs
from pagerunner.attention import capability, flashinfer_backend, select
from pagerunner.attention.base import GraphShape, PlanInputs
from pagerunner.attention.calls import Heads
from pagerunner.attention.flashinfer_backend import FlashInferBackend, FlashInferLatentBackend
from pagerunner.attention.paged_mla import PagedLatentBackend
from pagerunner.attention.paired import PairedBackend
from pagerunner.memory import specs


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr(flashinfer_backend, "WORKSPACE_BYTES", 16)


served = cases.map(
    lambda case: replace(
        case, reach=None, sinks=False, head_dim=case.head_dim // 8 * 8 + 8, head_dim_v=0, gap=case.gap // 4 * 4
    )
)


@settings(
    max_examples=effort(25, 120),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(served, st.sampled_from([0, 2]))
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
    shapes = (GraphShape(4, 4, 1024), GraphShape(6, 6, 1024), GraphShape(4, 24, 1024))
    for got, want in replayed(FlashInferBackend(), Case(STEPS[0], 16, 2, 2, 8), STEPS, shapes, RecordedGraphs()):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_a_graphs_rows_may_have_more_tokens_than_one() -> None:
    steps = [(plain(30, 9), plain(5, 1), plain(0, 10)), (plain(3, 20),), (plain(50, 1),)]
    shapes = (GraphShape(4, 20, 1024),)
    for got, want in replayed(FlashInferBackend(), Case(steps[0], 16, 2, 2, 8), steps, shapes, RecordedGraphs()):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def test_graphs_share_the_memory_for_partial_results() -> None:
    backend, device = FlashInferBackend(), torch.device("cpu")
    states = [backend.new_state(GraphShape(rows, rows, 1024)) for rows in (8, 4)]
    large, small = (state.workspace.on(device, needed) for state, needed in zip(states, (500, 100), strict=True))
    assert large.data_ptr() == small.data_ptr() and len(large) == 500
    assert len(states[0].workspace.on(device, 501)) == 501


# Heads, of which keys and values, elements; rows and tokens of a graph; bytes that FlashInfer 0.6.14 asks for on a device
# of 132 processors: partial values and their sums, blocks x heads x queries of a block x (elements + 1) float32.
ASKED = [
    ((32, 8, 128), (1, 1), 33 * 32 * 16 * 129 * 4),  # two blocks a processor for 8 heads
    ((64, 8, 128), (256, 256), (128 + 255) * 64 * 16 * 129 * 4),  # 2048 queries by 16, each row's last block in part
    ((32, 8, 128), (64, 256), (8 + 63) * 32 * 128 * 129 * 4),  # one row may have 193 x 4 queries
    ((32, 8, 256), (64, 256), (16 + 63) * 32 * 64 * 257 * 4),
    ((32, 32, 128), (8, 24), (1 + 7) * 32 * 64 * 129 * 4),  # 17 queries
    ((64, 8, 128), None, 33 * 64 * 128 * 129 * 4),
]


@pytest.mark.parametrize(("heads", "graph", "asked"), ASKED)
def test_there_is_memory_for_the_partial_results_of_any_step(heads: tuple, graph: tuple | None, asked: int) -> None:
    use = flashinfer_backend.Use(*heads, torch.bfloat16, 1.0, 0.0)
    shape = None if graph is None else GraphShape(*graph, 1024)
    assert asked <= flashinfer_backend.partial_bytes(use, shape, 132) <= asked + 4096


def test_a_layer_that_no_step_has_run_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_backend, "capturing", lambda device: True)
    backend = FlashInferBackend()
    case = Case(STEPS[0], 16, 2, 2, 8)
    step = make_step(case)
    batch = make_batch(step, case, backend)
    rows = batch.rows
    table = batch.groups[0].page_table
    plan = backend.plan(PlanInputs(rows, [], [], [], table, 16, None), backend.new_state(GraphShape(3, 3, 64)))
    batch = replace(batch, groups=(replace(batch.groups[0], plan=plan),))
    with pytest.raises(RuntimeError, match="no step before"):
        backend.run(make_call(case, step, batch, Heads(step.q, step.k, step.v)))


@pytest.mark.parametrize("padding", [0, 3])
def test_latents(padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [latent_cases.RowCase(start, 1) for start in (0, 15, 300, 64)]
    small = replace(FlashInferLatentBackend.capabilities, latent_dims=(8, 4))
    monkeypatch.setattr(FlashInferLatentBackend, "capabilities", small)
    backend = PairedBackend(FlashInferLatentBackend(), PagedLatentBackend())
    latent_cases.run(latent_cases.Case(tuple(lengths), key_dim=8), backend)
    case = latent_cases.Case(tuple(lengths), key_dim=8, padding=padding)
    got, want = latent_cases.run(case, backend)
    torch.testing.assert_close(got, want, atol=5e-5, rtol=5e-5)
    mixed = latent_cases.Case((*lengths, latent_cases.RowCase(30, 9)), key_dim=8)
    got, want = latent_cases.run(mixed, backend)
    torch.testing.assert_close(got, want, atol=5e-5, rtol=5e-5)


def test_says_what_it_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flashinfer")
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "flashinfer" else found(name))
    half = torch.bfloat16
    assert "not installed" in FlashInferBackend().capabilities.refusal(specs.FullKV(1, 64, "bfloat16"), "cuda", half)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for spec, dtype, word in (
        (specs.ChunkedKV(1, 64, "bfloat16", chunk=8), half, "chunked"),
        (specs.WindowKV(1, 64, "bfloat16", window=8), half, "window"),
        (specs.FullKV(1, 20, "bfloat16"), half, "20"),
        (specs.FullKV(1, 64, "bfloat16"), torch.float32, "float32"),
        (specs.FullKV(1, 64, "fp8_e4m3"), half, "fp8"),
    ):
        assert word in FlashInferBackend().capabilities.refusal(spec, "cuda", dtype)
    assert "cpu" in FlashInferBackend().capabilities.refusal(specs.FullKV(1, 64, "bfloat16"), "cpu", half)
    assert "latent" in FlashInferLatentBackend().capabilities.refusal(specs.FullKV(1, 64, "bfloat16"), "cpu", half)
    assert "(8, 4)" in FlashInferLatentBackend().capabilities.refusal(specs.LatentKV(8, 4, "bfloat16"), "cpu", half)


@pytest.mark.parametrize(
    ("installed", "spec", "words"),
    [
        (False, specs.LatentKV(512, 64, "bfloat16"), "the package flashinfer-python is not installed"),
        (True, specs.LatentKV(512, 64, "bfloat16"), "it plans on the host"),
        (True, specs.LatentKV(512, 64, "bfloat16", indexer_dim=128), "it serves latent memory, not chosen"),
        (True, specs.LatentKV(448, 64, "bfloat16", compression=4), "it serves latent memory, not compressed"),
        (True, specs.LatentKV(256, 64, "bfloat16"), "it needs latents of (512, 64) elements, not (256, 64)"),
        (True, specs.LatentKV(512, 64, "fp8_e4m3"), "not fp8_e4m3"),
    ],
)
def test_auto_says_why_it_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, installed: bool, spec: specs.LatentKV, words: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(capability, "lacks", lambda *_: None)  # the device of another machine
    group: Any = SimpleNamespace(name="latents", kind="latent", layers=[SimpleNamespace(spec=spec)])
    with caplog.at_level(logging.INFO):
        (found,) = select.select_backends([group], "auto", torch.device("cuda"), torch.bfloat16)
    assert not found.name.startswith("flashinfer")
    assert f"attention of group latents: {found.name} (not flashinfer_mla: " in caplog.text and words in caplog.text
