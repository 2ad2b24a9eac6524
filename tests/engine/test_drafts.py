"""Output with drafts is output without: whoever drafts, whatever requests ask for, whatever memory is like."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import pytest

from helpers.effort import by_days, effort
from helpers.families import MAKERS
from helpers.graphs import RecordedGraphs
from helpers.planted_drafts import PlantedDrafter, drafting, plant
from pagerunner import LLM, SamplingParams
from pagerunner.engine.worker import build
from pagerunner.runner.graphs import StepGraphs
from pagerunner.types import StructuredOutputsParams

DEFAULTS: dict[str, Any] = {
    "poison_fresh_pages": True,
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 96,
    "kv_cache_memory_bytes": 8_000_000,
}
CONDITIONS: dict[str, dict[str, Any]] = {
    "as usual": {},
    "budget of 7": {"max_num_batched_tokens": 7},
    "pages of 48": {"block_size": 48},
    "pages of 1": {"block_size": 1},
    "three in flight": {"max_in_flight": 3},
    "one in flight": {"max_in_flight": 1},
    "no prefix hits": {"enable_prefix_caching": False},
    "by priority": {"scheduling_policy": "priority"},
}
TOKENS = effort(14, 20)
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0, "seed": 4},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "seed": 6, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    {"temperature": 0.0, "seed": 3, "presence_penalty": 0.8, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    {"temperature": 0.7, "seed": 7, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 1.0, "seed": 8, "min_tokens": 9, "stop_token_ids": list(range(4, 120)), "ignore_eos": False},
    {"temperature": 1.0, "seed": 9, "logit_bias": {7: 3.0, 9: 2.0}, "n": 3},
    {"temperature": 0.5, "seed": 10, "allowed_token_ids": list(range(4, 60)), "repetition_penalty": 1.3},
]


def prompts() -> list[dict[str, list[int]]]:
    """Prompts that repeat themselves, some of which begin alike."""
    rng = random.Random(2)
    bases = [[rng.randrange(4, 400) for _ in range(length)] for length in (5, 9, 21, 33)]
    return [{"prompt_token_ids": (bases[number % 4] * 3)[: 11 + 7 * number]} for number in range(len(ASKED))]


def asked(**more: Any) -> list[SamplingParams]:
    return [
        SamplingParams(**{"max_tokens": TOKENS, "ignore_eos": True, "detokenize": False, **own, **more})
        for own in ASKED
    ]


def outputs(llm: LLM) -> list[Any]:
    found = llm.generate(prompts(), asked(), use_tqdm=False)
    assert not any(output.error for output in found)
    return found


def tokens(found: list[Any]) -> list[list[tuple[list[int], str | None]]]:
    return [[(list(one.token_ids), one.finish_reason) for one in output.outputs] for output in found]


def texts(found: list[Any], wanted: list[SamplingParams] | None = None) -> dict[tuple[int, ...], list[int]]:
    """What the planted drafter knows: the first of siblings' tokens, whoever asks."""
    known: dict[tuple[int, ...], list[int]] = {}
    for output, params in zip(found, wanted or asked(), strict=True):
        for number, one in enumerate(output.outputs):
            seed = (params.seed or 0) + number
            known[(*output.prompt_token_ids, seed)] = [*output.prompt_token_ids, *one.token_ids]
    return known


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            MAKERS[family](made[family])
        return next(path.parent for path in made[family].rglob("config.json"))

    return of


def check_logprobs(one: list[Any], other: list[Any]) -> None:
    for want, got in zip(one, other, strict=True):
        for first, second in zip(want.outputs, got.outputs, strict=True):
            assert (first.logprobs is None) == (second.logprobs is None)
            for entry, found in zip(first.logprobs or [], second.logprobs or [], strict=True):
                assert {token: value.rank for token, value in entry.items()}.keys() == found.keys()
                for token, value in entry.items():
                    assert value.logprob == pytest.approx(found[token].logprob, abs=1e-4)


@pytest.fixture(scope="module")
def plain(checkpoints: Any) -> Any:
    """What a family says without drafts."""
    return functools.cache(lambda family: outputs(LLM(str(checkpoints(family)), **DEFAULTS)))


@pytest.mark.days(3)
@pytest.mark.parametrize(("family", "condition"), by_days(MAKERS, CONDITIONS))
def test_tokens_are_those_without_drafts(
    checkpoints: Any, monkeypatch: pytest.MonkeyPatch, family: str, condition: str
) -> None:
    path, how = str(checkpoints(family)), {**DEFAULTS, **CONDITIONS[condition]}
    expected = outputs(LLM(path, **how))
    plant(monkeypatch, texts(expected), 0.6)
    llm = LLM(path, **how, **drafting(3))
    found = outputs(llm)
    assert tokens(found) == tokens(expected)
    check_logprobs(expected, found)
    assert PlantedDrafter.made > 0


@pytest.mark.parametrize("right", [0.0, 1.0])
@pytest.mark.parametrize("drafts", [1, 5])
def test_drafters_that_are_always_right_and_always_wrong(
    checkpoints: Any, plain: Any, monkeypatch: pytest.MonkeyPatch, right: float, drafts: int
) -> None:
    path, expected = str(checkpoints("qwen3")), plain("qwen3")
    plant(monkeypatch, texts(expected), right)
    llm = LLM(path, **DEFAULTS, **drafting(drafts))
    assert tokens(outputs(llm)) == tokens(expected)
    counts = llm.stats().spec
    assert counts is not None and (counts.num_accepted_tokens > 0) == (right > 0)
    if right:  # but for what is drafted behind a text's end
        assert counts.num_accepted_tokens > 0.8 * counts.num_draft_tokens > 30


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_ngrams_draft_and_change_nothing(checkpoints: Any, plain: Any, family: str) -> None:
    assert tokens(outputs(LLM(str(checkpoints(family)), **DEFAULTS, **drafting(4)))) == tokens(plain(family))


@pytest.mark.parametrize(("family", "pages"), [("qwen3", 11), ("gemma3_text", 14), ("qwen3_next", 14)])
def test_scarce_pages_and_preemption_change_nothing(
    checkpoints: Any, plain: Any, monkeypatch: pytest.MonkeyPatch, family: str, pages: int
) -> None:
    path, expected = str(checkpoints(family)), plain(family)
    plant(monkeypatch, texts(expected), 0.6)
    scarce = {**DEFAULTS, "max_model_len": 128, "kv_cache_memory_bytes": None, "num_gpu_blocks_override": pages}
    llm = LLM(path, **scarce, **drafting(3))
    assert tokens(outputs(llm)) == tokens(expected)
    assert llm.stats().preemptions_total > 0 or family == "qwen3_next"  # whose pages of states are held to the end


def test_sleep_and_aborts_in_the_middle_change_nothing(
    checkpoints: Any, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = str(checkpoints("qwen3")), plain("qwen3")
    plant(monkeypatch, texts(expected), 0.7)
    llm = LLM(path, **DEFAULTS, enable_sleep_mode=True, **drafting(3))
    for _ in range(2):
        for prompt, params in zip(prompts(), asked(), strict=True):
            stream = llm.stream(prompt, params)
            next(stream)
            stream.close()
        llm.sleep(level=1)
        llm.wake_up()
        assert tokens(outputs(llm)) == tokens(expected)


def accepted(llm: LLM) -> int:
    spec = llm.stats().spec
    assert spec is not None
    return sum(count * rows for count, rows in enumerate(spec.accepted))


def guided_params() -> list[SamplingParams]:
    """Grammars that allow much, little, or one text alone, and one that begins late; greedy and drawn."""
    asked = [
        (1.0, StructuredOutputsParams(regex="[a-z ]{20}")),
        (0.0, StructuredOutputsParams(regex="[a-z ]{3,25}")),
        (1.5, StructuredOutputsParams(choice=["left or right", "left and right", "nothing of it"])),
        (0.8, StructuredOutputsParams(regex="(ab|cd){3,9}")),
        (0.0, StructuredOutputsParams(json={"type": "object", "properties": {"a": {"enum": ["xyzzy", "xyz"]}}})),
    ]
    odd = {"logprobs": 2, "presence_penalty": 0.5, "bad_words": ["ab"]}
    return [
        SamplingParams(temperature=t, seed=at, max_tokens=30, structured_outputs=one, **(odd if at == 1 else {}))
        for at, (t, one) in enumerate(asked)
    ]


@pytest.mark.days(3)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_rows_with_a_grammar_have_drafts_and_the_same_tokens(
    checkpoints: Any, monkeypatch: pytest.MonkeyPatch, family: str, right: float
) -> None:
    path = str(checkpoints(family))
    how = {key: value for key, value in DEFAULTS.items() if key != "skip_tokenizer_init"}
    how["tokenizer"] = str(checkpoints("qwen3"))
    guided = guided_params()
    wanted = [*prompts(), *({"prompt_token_ids": [8 + at, 9, 10]} for at in range(len(guided)))]
    params = [*asked(), *guided]
    expected = LLM(path, **how).generate(wanted, params, use_tqdm=False)
    plant(monkeypatch, texts(expected, params), right)
    llm = LLM(path, **how, **drafting(3))
    found = llm.generate(wanted, params, use_tqdm=False)
    assert tokens(found) == tokens(expected)
    before = accepted(llm)
    again = llm.generate(wanted[-len(guided) :], guided, use_tqdm=False)
    assert tokens(again) == tokens(expected[-len(guided) :])
    more = accepted(llm) - before
    assert more > 20 if right == 1.0 else more > 0 if right else more == 0


@pytest.mark.days(2)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
def test_graphs_and_eager_steps_are_alike(checkpoints: Any, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    path, how = str(checkpoints(family)), {**DEFAULTS, "attention_backend": "triton"}
    expected = outputs(LLM(path, **how, enforce_eager=True))
    plant(monkeypatch, texts(expected), 0.7)
    monkeypatch.setattr(build, "graph_engine", lambda device: RecordedGraphs())
    replayed: list[int] = []
    replay = StepGraphs.replay
    monkeypatch.setattr(
        StepGraphs, "replay", lambda self, one, *more: replayed.append(one.key.drafts) or replay(self, one, *more)
    )
    assert tokens(outputs(LLM(path, **how, **drafting(3)))) == tokens(expected)
    assert replayed.count(3) > 5


def test_drafts_taken_by_chance_are_as_many_as_asked_for(checkpoints: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the model says: so that acceptance can be measured with random weights."""
    plant(monkeypatch, {}, 1.0)
    how = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
    llm = LLM(str(checkpoints("qwen3")), **DEFAULTS, **drafting(3, **how))
    params = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True, detokenize=False)
    found = llm.generate([{"prompt_token_ids": [7 + number, 8]} for number in range(6)], params, use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == 150 for output in found)
    counts = llm.stats().spec
    assert counts is not None and counts.mean_acceptance_length == pytest.approx(2.5, abs=0.1)
    assert counts.accepted[0] < 10 and counts.accepted[3] < 10, (
        "one draft for certain, the second one half of the times"
    )


def test_tokens_are_distributed_as_the_model_says(checkpoints: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chi-square test of the whole loop: the tokens of many seeds, with drafts that are often right, against the same without drafts of other seeds."""
    path, seeds, allowed = str(checkpoints("qwen3")), effort(600, 4000), [5, 60, 120, 200]
    how = {**DEFAULTS, "max_num_seqs": 64, "max_num_batched_tokens": 512}

    def drawn(llm: LLM, first_seed: int) -> list[list[int]]:
        params = [
            SamplingParams(
                temperature=1.5, seed=first_seed + number, max_tokens=6, ignore_eos=True, detokenize=False, allowed_token_ids=allowed,
            )
            for number in range(seeds)
        ]  # fmt: skip
        found = llm.generate([{"prompt_token_ids": [9, 8, 7]}] * seeds, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in found]

    plain = drawn(LLM(path, **how), 10_000)
    monkeypatch.setattr(PlantedDrafter, "_guess", lambda self, token: allowed[self._rng.randrange(3)])
    plant(monkeypatch, {}, 1.0)
    llm = LLM(path, **how, **drafting(2))
    found = drawn(llm, 20_000)
    counts = llm.stats().spec
    assert counts is not None and counts.num_accepted_tokens > 0.5 * seeds
    for place in range(1, 6):
        pairs = [(sum(t[place] == token for t in plain), sum(t[place] == token for t in found)) for token in allowed]
        chi = sum((one - other) ** 2 / (one + other) for one, other in pairs if one + other)
        assert chi < 21.1, f"place {place}: {pairs} differ by more than one time in ten thousand"


def test_fp8_pages_hold_the_same_with_drafts(checkpoints: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, how = str(checkpoints("qwen3")), {**DEFAULTS, "kv_cache_dtype": "fp8"}
    expected = outputs(LLM(path, **how))
    plant(monkeypatch, texts(expected), 0.6)
    assert tokens(outputs(LLM(path, **how, **drafting(3)))) == tokens(expected)


@pytest.mark.days(2)
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
def test_ranks_that_divide_the_model_accept_alike(checkpoints: Any, family: str) -> None:
    path, how = str(checkpoints(family)), {**DEFAULTS, "tensor_parallel_size": 2}
    llm = LLM(path, **how, **drafting(3))
    found = tokens(outputs(llm))
    counts = llm.stats().spec
    assert counts is not None and counts.num_drafts > 0
    assert found == tokens(outputs(LLM(path, **how)))
