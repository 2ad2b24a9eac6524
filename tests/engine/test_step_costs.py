"""What each feature of one request costs the steps that it shares with others: graphs, launches, copies, waits.

Three of four requests are greedy; the fourth has the feature. The costs are counted, so they don't depend on the machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_drafters import make_followed
from helpers.checkpoints_hybrid import make_hybrid_directory
from helpers.effort import share_of_the_day
from helpers.graphs import RecordedGraphs
from helpers.step_costs import StepCost, counted_steps
from pagerunner import LLM, SamplingParams
from pagerunner.engine.worker import build
from pagerunner.types import StructuredOutputsParams

TOKENS = 12
PLAIN = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}


class Most(NamedTuple):
    """The most that a decode step may take of each. `share` is the least part of all steps in graphs."""

    launches: int
    to_device: int
    to_host: int = 1
    share: float = 1.0


GREEDY = Most(launches=1, to_device=1)  # one launch fills the batch; then the graph
FEATURES: dict[str, tuple[dict[str, Any], Most]] = {
    "greedy": ({}, GREEDY),
    "drawn": ({"temperature": 1.0, "seed": 3}, GREEDY),
    "filtered": ({"temperature": 0.7, "top_p": 0.95, "top_k": 20, "min_p": 0.01}, GREEDY),
    "scored": ({"prompt_logprobs": 2}, GREEDY),
    "reported": ({"logprobs": 3}, Most(launches=17, to_device=2, to_host=2)),  # tokens, and what is told of them
    "penalised": ({"presence_penalty": 0.5, "repetition_penalty": 1.1}, Most(launches=40, to_device=6)),
    "biased": ({"logit_bias": {5: 2.0}}, Most(launches=20, to_device=3)),
    "allowed": ({"allowed_token_ids": [5, 6, 7]}, Most(launches=20, to_device=3)),
    "kept going": ({"min_tokens": 6, "ignore_eos": False, "stop_token_ids": [9]}, Most(launches=20, to_device=3)),
    "structured": (
        {"structured_outputs": StructuredOutputsParams(regex="[a-z ]{40}"), "ignore_eos": False},
        Most(launches=16, to_device=4),
    ),
}


@pytest.fixture(scope="module", params=["full", "hybrid"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    directory = tmp_path_factory.mktemp("costs")
    if request.param == "full":
        path = make_checkpoint(directory, "qwen3")
    else:
        path = make_hybrid_directory(directory, "qwen3_next")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(build, "graph_engine", lambda device: RecordedGraphs())
        return start(path)


def start(path: Path, **settings: Any) -> LLM:
    wanted = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "attention_backend": "triton", **settings}
    return LLM(str(path), **wanted)


def prompts(salt: int) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": [5 + i + salt, 9, 30 + i, 4, 8]} for i in range(4)]


def steps_of(llm: LLM, feature: str) -> list[StepCost]:
    params = [SamplingParams(**PLAIN)] * 3 + [SamplingParams(**{**PLAIN, **FEATURES[feature][0]})]
    with counted_steps() as steps:
        llm.generate(prompts(list(FEATURES).index(feature)), params, use_tqdm=False)
    return steps


@pytest.mark.parametrize("feature", [list(FEATURES)[i] for i in share_of_the_day(len(FEATURES), 4)])
def test_a_feature_takes_nothing_from_the_others(engine: LLM, feature: str) -> None:
    steps, most = steps_of(engine, feature), FEATURES[feature][1]
    assert sum(step.in_graph for step in steps) >= most.share * len(steps) > 0
    assert [step for step in steps if step.waits] == [], "a launch looked at a value on the device"
    decode = [step for step in steps if step.decode]
    assert len(decode) >= TOKENS - 2
    assert max(step.launches for step in decode) <= most.launches
    assert max(step.to_device for step in decode) <= most.to_device
    assert max(step.to_host for step in decode) <= most.to_host


def test_what_is_finished_costs_nothing_more(engine: LLM) -> None:
    """A prompt that has been scored, and a least number of tokens that has been reached."""
    for feature in ("scored", "kept going"):
        late = [step for step in steps_of(engine, feature) if step.decode][-3:]
        assert all((step.launches, step.to_device, step.to_host) == (1, 1, 1) for step in late), feature


@pytest.mark.parametrize("method", ["ngram", "eagle"])
def test_drafts_cost_the_host_one_launch_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Tokens are accepted in the graph. A head drafts in a second graph, and n-grams are looked up in one launch: whatever the rows ask for and how many drafts there are."""
    monkeypatch.setattr(build, "graph_engine", lambda device: RecordedGraphs())
    target, head = make_followed(tmp_path)
    config = {"method": method, "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 4, 3]]}
    config |= {"prompt_lookup_min": 1} if method == "ngram" else {"model": str(head)}
    llm = start(target, skip_tokenizer_init=True, speculative_config=config)
    params = [SamplingParams(**PLAIN | {"temperature": 0.3 * at, "seed": at, "detokenize": False}) for at in range(4)]
    with counted_steps() as steps:
        llm.generate(prompts(0), params, use_tqdm=False)
    assert all(step.in_graph and not step.waits for step in steps)
    decode = [step for step in steps if step.decode]
    assert len(decode) >= TOKENS // 4
    assert {(step.to_device, step.to_host) for step in decode} == {(1, 1)}
    launches = [step.launches - (method == "ngram") for step in decode]
    assert min(launches) == 1 and max(launches) <= 2, "a page more is a launch more"


@pytest.mark.parametrize("kind", ["MEAN", "LAST"])
def test_pooling_runs_in_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """All vectors of a step come to the host together, beside what is sampled."""
    monkeypatch.setattr(build, "graph_engine", lambda device: RecordedGraphs())
    path = make_checkpoint(tmp_path, "qwen3")
    how = {"pooler_config": {"pooling_type": kind}}
    llm, eager = start(path, **how), start(path, enforce_eager=True, **how)
    wanted = [{"prompt_token_ids": [7 + i, 12, 40] * (1 + i)} for i in range(3)] + [{"prompt_token_ids": [11]}]
    expected = eager.embed(wanted, use_tqdm=False)
    with counted_steps() as steps:
        found = llm.embed(wanted, use_tqdm=False)
    assert all(step.in_graph and not step.waits for step in steps)
    assert max(step.rows for step in steps) == 4 and all(step.to_host <= 2 for step in steps)
    for got, want in zip(found, expected, strict=True):
        assert got == pytest.approx(want, abs=1e-5)


def test_counting_notices_an_eager_step_and_a_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail."""
    from pagerunner.runner.runner import ModelRunner

    monkeypatch.setattr(build, "graph_engine", lambda device: RecordedGraphs())
    llm = start(make_checkpoint(tmp_path, "qwen3"))
    sampled_rows = ModelRunner._sampled_rows
    monkeypatch.setattr(
        ModelRunner, "_sampled_rows", lambda self, step: step.packed[:1].tolist() and sampled_rows(self, step)
    )
    assert all(step.waits for step in steps_of(llm, "greedy"))
    (tmp_path / "eager").mkdir()
    eager = start(make_checkpoint(tmp_path / "eager", "qwen3"), enforce_eager=True)
    assert min(step.launches for step in steps_of(eager, "greedy")) > 10
