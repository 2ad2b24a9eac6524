"""The path of a GPU on the CPU: page tables read by the attention's operations, steps replayed from recorded graphs.

Tokens equal those of the eager path with the reference backend, which equal transformers'.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import make_checkpoint, write_tokenizer
from helpers.checkpoints_hybrid import make_hybrid_directory
from helpers.checkpoints_latent import make_latent_checkpoint
from helpers.checkpoints_window import make_window_checkpoint
from helpers.effort import by_days
from helpers.families import MAKERS
from helpers.graphs import RecordedGraphs
from helpers.once import made_once
from pagerunner import LLM, SamplingParams
from pagerunner.engine.worker import build


def make_compressed(directory: Path, family: str) -> Path:
    path = MAKERS[family](directory)
    write_tokenizer(path, 512, add_bos=False)
    return path


FAMILIES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "full": (make_checkpoint, "qwen3", {"head_dim": 32}),
    "window": (make_window_checkpoint, "gemma3_text", {}),
    "sinks": (make_window_checkpoint, "gpt_oss", {}),
    "latent": (
        lambda *args, **overrides: make_latent_checkpoint(*args, tokenizer=True, **overrides)[0],
        "deepseek_v3",
        {},
    ),
    "chosen latents": (
        lambda *args, **overrides: make_latent_checkpoint(*args, tokenizer=True, **overrides)[0],
        "deepseek_v32",
        {},
    ),
    "hybrid": (make_hybrid_directory, "qwen3_next", {}),
    "windows and slots": (make_compressed, "deepseek_v4", {}),
}
CONDITIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "two-in-flight": {"max_in_flight": 2, "max_num_batched_tokens": 40},
    "tight": {"num_gpu_blocks_override": 14, "max_model_len": 128, "max_in_flight": 2},
    "poison": {"poison_fresh_pages": True, "block_size": 48},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    def make_family(family: str, path: Path) -> Path:
        make, name, overrides = FAMILIES[family]
        return Path(make(path, name, **overrides))

    return made_once(tmp_path_factory, {family: functools.partial(make_family, family) for family in FAMILIES})


def prompts() -> list[dict[str, list[int]]]:
    rng = random.Random(3)
    shared = [rng.randrange(4, 500) for _ in range(40)]
    found = []
    for index in range(11):
        own = [rng.randrange(4, 500) for _ in range(rng.choice((1, 5, 21, 45)))]
        found.append({"prompt_token_ids": shared[: rng.choice((16, 33))] + own if index % 3 == 0 else own})
    return found


def params() -> list[SamplingParams]:
    """Most rows take the best token; one is random with a seed, one asks for log-probabilities, one has siblings."""
    plain = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    found = [plain] * 11
    found[4] = SamplingParams(temperature=0.9, seed=5, max_tokens=9, ignore_eos=True)
    found[6] = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    found[9] = SamplingParams(temperature=0.8, seed=6, n=3, max_tokens=6, ignore_eos=True)
    return found


def tokens(outputs: list[Any]) -> list[list[list[int]]]:
    return [[list(one.token_ids) for one in output.outputs] for output in outputs]


@pytest.mark.days(3)
@pytest.mark.parametrize(("family", "mode", "condition"), by_days(FAMILIES, ["graphs", "eager"], CONDITIONS))
def test_tokens_are_those_of_the_reference(
    checkpoint: Callable[[str], str], family: str, mode: str, condition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, graphs = checkpoint(family), mode == "graphs"
    settings = {"max_num_seqs": 10, "max_num_batched_tokens": 64, **CONDITIONS[condition]}
    expected = LLM(path, **settings).generate(prompts(), params(), use_tqdm=False)
    engine = RecordedGraphs()
    monkeypatch.setattr(build, "graph_engine", lambda device: engine)

    llm = LLM(path, attention_backend="triton", enforce_eager=not graphs, **settings)
    outputs = llm.generate(prompts(), params(), use_tqdm=False)
    greedy = [
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)[0]
        for prompt in prompts()[:2]
    ]

    assert tokens(outputs) == tokens(expected)
    assert [one[0] for one in tokens(greedy)] == [one[0][:4] for one in tokens(expected)[:2]]
    for got, want in zip(outputs[6].prompt_logprobs[1:], expected[6].prompt_logprobs[1:], strict=True):
        assert {token: entry.rank for token, entry in got.items()} == {
            token: entry.rank for token, entry in want.items()
        }
        for token, entry in got.items():
            assert entry.logprob == pytest.approx(want[token].logprob, abs=1e-3)
    replays = sum(graph.replays for graph in engine.graphs)
    assert replays >= 12 if graphs else not engine.graphs  # a request has 9 tokens, and two more follow with 4 each


@pytest.mark.parametrize("family", ["sinks", "windows and slots"])
def test_a_prompt_longer_than_a_window_runs_in_a_graph(
    checkpoint: Callable[[str], str], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first tokens are in no page of the window: no later step reads them."""
    engine = RecordedGraphs()
    monkeypatch.setattr(build, "graph_engine", lambda device: engine)
    prompt, one = {"prompt_token_ids": list(range(5, 65))}, SamplingParams(temperature=0, max_tokens=1, logprobs=2)
    found = []
    for eager in (False, True):
        llm = LLM(
            checkpoint(family),
            attention_backend="triton",
            max_num_seqs=2,
            max_num_batched_tokens=64,
            enforce_eager=eager,
        )
        found.append(llm.generate([prompt], one, use_tqdm=False)[0].outputs[0])
    assert sum(graph.replays for graph in engine.graphs) == 1
    assert found[0].token_ids == found[1].token_ids
    assert found[0].cumulative_logprob == pytest.approx(found[1].cumulative_logprob, abs=1e-4)
