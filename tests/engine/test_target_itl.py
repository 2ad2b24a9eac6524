"""target_itl_ms in whole engines: the same tokens, whatever the pieces, and steps that are timed and priced."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

import pytest

from helpers.checkpoints import make_checkpoint
from helpers.graphs import RecordedGraphs
from pagerunner import LLM, SamplingParams
from pagerunner.engine.worker import build
from pagerunner.runner import step_costs
from pagerunner.sched.pace import Pace
from pagerunner.types.steps import StepShape

pytestmark = [pytest.mark.days(5)]

SETTINGS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 600,
    "max_model_len": 1024,
    "attention_backend": "triton",
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("target"), "qwen3", max_position_embeddings=1024))


def tokens_of(llm: LLM) -> list[list[int]]:
    generator = random.Random(4)
    prompts = [{"prompt_token_ids": [generator.randrange(60) for _ in range(size)]} for size in (5, 500, 90, 300, 1)]
    params = [SamplingParams(temperature=0.9, seed=number, max_tokens=24, ignore_eos=True) for number in range(5)]
    return [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("target", [0.001, 30])
def test_tokens_are_those_without_a_target_and_every_step_is_priced(path: str, target: float) -> None:
    cut: list[int] = []
    end = Pace.end

    def counted(self: Pace, start: int, wanted: int, **options: Any) -> int:
        found = end(self, start, wanted, **options)
        cut.append(wanted - found)
        return found

    plain = LLM(path, **SETTINGS)
    bounded = LLM(path, target_itl_ms=target, **SETTINGS)
    with patch.object(Pace, "end", counted):
        found = tokens_of(bounded)
    assert found == tokens_of(plain)
    assert plain.stats().costs is None
    costs = bounded.stats().costs
    assert costs is not None and 0 < costs.predicted_seconds_total and 0 < costs.measured_seconds_total
    assert costs.measured_seconds_total <= bounded.stats().busy_seconds
    if target < 1:
        assert max(cut) > 100, "a prompt was cut beside one that generates"


def test_a_start_measures_what_runs_in_graphs_and_what_does_not(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "graph_engine", lambda device: RecordedGraphs())
    llm = LLM(path, target_itl_ms=20, **SETTINGS)
    measured = llm.startup.steps
    assert measured.decode_graphs == {0: [1, 2, 4]}
    assert measured.mixed_graphs == [16, 32, 64, 96, 128, 192, 256]
    shapes = [shape for shape, seconds in measured.steps if seconds > 0]
    assert [(shape.rows, shape.tokens) for shape in shapes if shape.decode] == [(1, 1), (4, 4)]
    assert [shape.tokens for shape in shapes if not shape.decode] == [16, 256, 272, 512, 512]
    assert len({shape.pairs for shape in shapes if shape.tokens == 512}) == 2, "with a past and without"
    assert all(isinstance(shape, StepShape) for shape in shapes)
    assert llm.startup.seconds["step costs"] > 0
    assert tokens_of(llm) == tokens_of(LLM(path, enforce_eager=True, **SETTINGS))


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def test_a_start_measures_steps_with_drafts_and_their_number_follows(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tokens_of(LLM(path, enforce_eager=True, **SETTINGS))
    assert tokens_of(LLM(path, speculative_config=NGRAM, **SETTINGS)) == plain, "nothing is measured without graphs"
    monkeypatch.setattr(build, "graph_engine", lambda device: RecordedGraphs())
    best = step_costs._best
    # else drafts look dear where other programs work
    monkeypatch.setattr(step_costs, "_best", lambda clock: 1e-3 * bool(best(clock)))
    llm = LLM(path, speculative_config=NGRAM, **SETTINGS)
    measured = llm.startup.steps
    assert sorted(measured.decode_graphs) == [0, 1, 2, 3]
    sizes = {
        drafts: [shape.rows for shape, _ in measured.steps if shape.decode and shape.drafts == drafts]
        for drafts in (0, 1, 2, 3)
    }
    assert sizes == {0: [1, 4], 1: [1, 4], 2: [1, 4], 3: [1, 4]}
    assert all(shape.tokens == shape.rows * (1 + shape.drafts) for shape, _ in measured.steps if shape.decode)
    assert tokens_of(llm) == plain
    stats = llm.stats()
    assert stats.spec is not None and stats.spec.num_drafts > 0
    assert stats.costs is not None and stats.costs.measured_seconds_total > 0


@pytest.mark.usefixtures("forked")
def test_ranks_tell_how_long_their_steps_took(path: str) -> None:
    llm = LLM(path, target_itl_ms=20, tensor_parallel_size=2, device="cpu", **SETTINGS)
    tokens_of(llm)
    costs = llm.stats().costs
    assert costs is not None and costs.measured_seconds_total > 0


def test_the_model_survives_an_interrupt(path: str) -> None:
    llm = LLM(path, target_itl_ms=20, **SETTINGS)
    tokens_of(llm)
    before = llm.stats().costs
    llm._core.recover([])
    assert llm.stats().costs == before
    tokens_of(llm)
    after = llm.stats().costs
    assert after is not None and before is not None
    assert after.measured_seconds_total > before.measured_seconds_total
