"""The seam between layers and backends: declared capabilities decide what serves a layer and how it is fed."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.attention_cases import Case, expected, make_batch, make_step, plain, run
from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_window import make_window_checkpoint
from helpers.effort import by_days
from helpers.fake_backend import FakeBackend
from helpers.graphs import RecordedGraphs
from pagerunner import LLM, SamplingParams
from pagerunner.attention import select
from pagerunner.attention.base import AttentionBackend, PlanInputs, Reach
from pagerunner.attention.calls import Heads, Projection
from pagerunner.attention.capability import HALVES, HEADS, SINKS, SOFTCAP, Capabilities, memory_form
from pagerunner.attention.paired import PairedBackend
from pagerunner.batch import StepRows
from pagerunner.engine.worker import build
from pagerunner.errors import ConfigError
from pagerunner.layers.attention import PagedAttention
from pagerunner.memory import specs
from pagerunner.ops.paged_attention import HeadPrep
from pagerunner.ops.rope import RopeAngles

ROWS = (plain(0, 40), plain(60, 1), plain(33, 3))
FORMS = {
    "full": specs.FullKV(2, 16, "float32"),
    "window": specs.WindowKV(2, 16, "float32", window=9),
    "chunked": specs.ChunkedKV(2, 16, "float32", chunk=9),
    "window vectors": specs.LatentKV(8, 4, "float32", window=9),
    "latent": specs.LatentKV(8, 4, "float32"),
    "chosen": specs.LatentKV(8, 4, "float32", indexer_dim=4),
    "compressed": specs.LatentKV(8, 4, "float32", compression=4),
    "recurrent": specs.RecurrentState(((2, 3),), ("float32",)),
}


def every_backend() -> Iterator[AttentionBackend[Any]]:
    """One of each that selection knows, and the fake."""
    kinds = itertools.chain(*select.KIND_BACKENDS.values(), *select.FLASHINFER_KINDS.values())
    return (make() for make in (*select.BACKENDS.values(), *kinds, FakeBackend))


def by_heads() -> list[AttentionBackend[Any]]:
    return [b for b in every_backend() if "full" in b.capabilities.forms and b.name != "flashinfer"]


def named(backend: Any) -> str:
    return str(backend.name)


def test_every_form_of_memory_has_a_name_and_a_backend() -> None:
    assert {memory_form(spec) for spec in FORMS.values()} == set(FORMS)
    served = frozenset().union(*(backend.capabilities.forms for backend in every_backend()))
    assert served == set(FORMS)


@pytest.mark.parametrize("backend", list(every_backend()), ids=named)
def test_what_is_not_declared_is_refused(backend: AttentionBackend[Any]) -> None:
    capabilities = replace(backend.capabilities, devices=None, package=None, head_dims=None, latent_dims=None)
    dtype = torch.float32 if capabilities.compute_dtypes is None else min(capabilities.compute_dtypes, key=str)
    for form, spec in FORMS.items():
        held = spec if form == "recurrent" else replace(spec, dtype=str(dtype).removeprefix("torch."))
        reason = capabilities.refusal(held, "cpu", dtype)
        assert (reason is None) == (form in capabilities.forms)
        assert reason is None or form in reason


@pytest.mark.parametrize(
    ("declared", "spec", "words"),
    [
        ({"scores": frozenset({SOFTCAP})}, FORMS["full"], "no sinks"),
        ({"compute_dtypes": HALVES}, FORMS["full"], "torch.float32"),
        ({"page_dtypes": frozenset({"bfloat16"})}, FORMS["full"], "bfloat16, not float32"),
        ({"same_dtype": True}, specs.FullKV(1, 8, "fp8_e4m3"), "fp8_e4m3"),
        ({"max_head_dim": 8}, FORMS["full"], "at most 8 elements, not 16"),
        ({"head_dims": frozenset({8, 64})}, FORMS["full"], "8, 64 elements, not 16"),
        ({"head_dims": frozenset({16})}, specs.FullKV(2, 16, "float32", 8), "not 16 and 8"),
        ({"latent_dims": (512, 64)}, FORMS["latent"], "not (8, 4)"),
        ({"devices": frozenset({"cuda"})}, FORMS["full"], "cuda device, not cpu"),
        ({"package": ("no_such_module", "no-such-package")}, FORMS["full"], "no-such-package is not installed"),
    ],
)
def test_a_refusal_names_what_is_lacking(declared: dict[str, Any], spec: specs.Spec, words: str) -> None:
    forms = frozenset(FORMS)
    assert Capabilities(forms=forms).refusal(spec, "cpu", torch.float32, {SINKS, SOFTCAP}) is None
    reason = Capabilities(forms=forms, **declared).refusal(spec, "cpu", torch.float32, {SINKS, SOFTCAP})
    assert reason is not None and words in reason


@pytest.mark.parametrize("backend", by_heads(), ids=named)
@pytest.mark.parametrize("reach", [None, Reach(20), Reach(32, chunked=True)], ids=["full", "window", "chunked"])
@pytest.mark.parametrize("scores", [(), (SINKS,), (SOFTCAP,), (SINKS, SOFTCAP)], ids="+".join)
def test_what_is_declared_is_computed(
    backend: AttentionBackend[Any], reach: Reach | None, scores: tuple[str, ...]
) -> None:
    assert set(scores) <= backend.capabilities.scores and backend.capabilities.forms >= HEADS
    case = Case(ROWS, 16, 2, 2, 8, reach=reach, sinks=SINKS in scores, softcap=2.0 * (SOFTCAP in scores))
    got, want = run(case, backend)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("projection", [False, True])
def test_a_layer_feeds_a_backend_as_it_declares(projection: bool, wanted: bool) -> None:
    """Whatever it declares, the layer's result is the same."""
    case, index = Case(ROWS, 16, 2, 2, 8), torch.tensor([39, 40, 43])
    tokens = sum(row.queries for row in ROWS)
    angles = RopeAngles(*torch.randn(2, tokens, 1, 8, generator=torch.Generator().manual_seed(1)))
    weight = torch.linspace(0.5, 2, 8)
    prep = HeadPrep(4, 2, angles, weight, weight, 1e-6)
    results = []
    for declared in ({}, {"projection": projection, "wanted": wanted}):
        backend, step = FakeBackend(Capabilities(forms=HEADS, **declared)), make_step(case)
        batch = make_batch(step, case, backend)
        layer = PagedAttention(0, step.scale, softcap=3.0)
        qkv = torch.cat((step.q, step.k, step.v), 1)
        results.append(layer.from_projection(qkv, prep, batch, wanted=index))
    torch.testing.assert_close(*results)
    (call,) = backend.calls
    assert isinstance(call.inputs, Projection if projection else Heads)
    assert (call.wanted is index) == wanted
    assert call.scores == (step.scale, 3.0, None) and call.pages is step.layer and call.group is batch.groups[0]


def test_a_call_s_scores_have_the_layer_s_sinks() -> None:
    case = Case(ROWS, 16, 2, 2, 8, sinks=True)
    step, backend = make_step(case), FakeBackend()
    layer = PagedAttention(0, step.scale)
    got = layer(step.q, step.k, step.v, make_batch(step, case, backend), step.sinks)
    torch.testing.assert_close(got.double(), torch.cat(expected(case, step)), atol=2e-5, rtol=2e-5)
    assert backend.calls[0].scores.sinks_H is step.sinks and layer.scores.sinks_H is None


def test_sinks_are_never_given_to_a_backend_that_does_not_declare_them() -> None:
    case = Case(ROWS, 16, 2, 2, 8, sinks=True)
    step, backend = make_step(case), FakeBackend(Capabilities(forms=HEADS, scores=frozenset({SOFTCAP})))
    layer = PagedAttention(0, step.scale)
    with pytest.raises(RuntimeError, match="Layer 0 has sinks, which fake doesn't compute"):
        layer(step.q, step.k, step.v, make_batch(step, case, backend), step.sinks)
    assert not backend.calls


class OneQuery(FakeBackend):
    name = "one_query"

    def __init__(self) -> None:
        super().__init__(Capabilities(forms=HEADS, several_queries=False, projection=True, wanted=True, graphs=True))


def group_of(*layers: specs.Spec) -> Any:
    return SimpleNamespace(name="full", kind="full", layers=[SimpleNamespace(spec=spec) for spec in layers])


def test_a_backend_for_one_query_a_row_is_paired_with_one_for_several(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(select.BACKENDS, "one_query", OneQuery)
    monkeypatch.setitem(select.BACKENDS, "fake", FakeBackend)
    monkeypatch.setitem(select.NAMED, "one_query", ("one_query", "fake"))
    device, groups = torch.device("cpu"), [group_of(FORMS["full"])]
    with caplog.at_level(logging.INFO):
        (found,) = select.select_backends(groups, "one_query", device, torch.float32)
    assert isinstance(found, PairedBackend) and found.capabilities.several_queries
    assert "one_query, fake for rows of several tokens" in caplog.text
    assert not (found.capabilities.projection or found.capabilities.wanted or found.capabilities.graphs)
    one, several = found._backends
    for rows, used, idle in (((plain(5, 1), plain(30, 1)), one, several), (ROWS, several, one)):
        got, want = run(Case(rows, 16, 2, 2, 8), found)
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
        assert used.calls and not idle.calls
        used.calls.clear()
    monkeypatch.setitem(select.NAMED, "one_query", ("one_query",))
    with pytest.raises(ConfigError, match="full on cpu.*several"):
        select.select_backends(groups, "one_query", device, torch.float32)


def test_scores_that_a_backend_lacks_send_the_group_to_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain_scores = Capabilities(forms=HEADS, scores=frozenset())
    monkeypatch.setitem(select.BACKENDS, "fake", lambda: FakeBackend(plain_scores))
    monkeypatch.setitem(select.NAMED, "fake", ("fake", "torch_ref"))
    groups, device = [group_of(FORMS["full"])], torch.device("cpu")
    with caplog.at_level(logging.INFO):
        found = select.select_backends(groups, "fake", device, torch.float32, {SINKS})
    assert [backend.name for backend in found] == ["torch_ref"]
    assert "not fake: its scores have no sinks" in caplog.text
    monkeypatch.setitem(select.NAMED, "fake", ("fake",))
    with pytest.raises(ConfigError, match="no sinks"):
        select.select_backends(groups, "fake", device, torch.float32, {SINKS})


MODELS: dict[str, Any] = {
    "qwen3": lambda path: make_checkpoint(path, "qwen3"),
    "gpt-oss": lambda path: make_window_checkpoint(path, "gpt_oss"),
    "gemma-3": lambda path: make_window_checkpoint(path, "gemma3_text", attn_logit_softcapping=20.0),
}


DECLARED: dict[str, dict[str, bool]] = {
    "heads": {},
    "projection": {"projection": True},
    "wanted": {"wanted": True},
    "graphs": {"projection": True, "wanted": True, "graphs": True},
}


@pytest.mark.parametrize(("model", "declares"), by_days(MODELS, DECLARED, each=2))
def test_an_engine_s_tokens_do_not_depend_on_what_a_backend_declares(
    model: str, declares: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = DECLARED[declares]
    path = str(MODELS[model](tmp_path))
    prompts = [{"prompt_token_ids": list(range(5 + n, 5 + 3 * n))} for n in (1, 9, 40, 17, 30)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "poison_fresh_pages": True, "max_model_len": 128}

    def tokens(**more: Any) -> list[list[int]]:
        llm = LLM(path, skip_tokenizer_init=True, **settings, **more)
        return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)]

    expected_tokens, made = tokens(), []

    def make() -> FakeBackend:
        made.append(FakeBackend(Capabilities(forms=HEADS, **declared)))
        return made[-1]

    monkeypatch.setitem(select.BACKENDS, "fake", make)
    engine = RecordedGraphs()
    monkeypatch.setattr(build, "graph_engine", lambda device: engine)
    assert tokens(attention_backend="fake") == expected_tokens
    assert bool(engine.graphs) == declared.get("graphs", False)
    assert all(backend.calls for backend in made)
    scores = {SINKS if call.scores.sinks_H is not None else "" for backend in made for call in backend.calls}
    assert (scores == {SINKS}) == (model == "gpt-oss")


def test_attention_backends_of_a_model_with_sinks_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(select.BACKENDS, "fake", lambda: FakeBackend(Capabilities(forms=HEADS, scores=frozenset())))
    with pytest.raises(ConfigError, match="its scores have no sinks"):
        LLM(str(MODELS["gpt-oss"](tmp_path)), attention_backend="fake", skip_tokenizer_init=True, max_model_len=64)
    with pytest.raises(ConfigError, match="its scores have no softcap"):
        LLM(str(MODELS["gemma-3"](tmp_path)), attention_backend="fake", skip_tokenizer_init=True, max_model_len=64)


def test_one_plan_a_step_and_group_whatever_the_layers() -> None:
    rows = StepRows.of([3], [10], [0])
    inputs = PlanInputs(rows, [3], [10], [0], torch.zeros(1, 1, dtype=torch.int64), 16, None)
    for backend in by_heads():
        state = backend.new_state(None)
        first, second = (backend.plan(inputs, state) for _ in range(2))
        assert first is not second, "a plan is made anew for each step"


def test_a_backend_that_nobody_knows_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "materialize", lambda *args: pytest.fail("weights are read"))
    with pytest.raises(ConfigError, match="attention_backend must be auto or one of triton, .*, got 'FLASH_ATTN'"):
        LLM(
            str(MODELS["gpt-oss"](tmp_path)), attention_backend="FLASH_ATTN", skip_tokenizer_init=True, max_model_len=64
        )
