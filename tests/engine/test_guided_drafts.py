"""Rows with a grammar and drafts, as somebody would ask who wants them to fail: tokens, texts and ends are those without drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.test_drafts import DEFAULTS, accepted, check_logprobs, prompts
from helpers.families import MAKERS
from helpers.planted_drafts import drafting, plant
from pagerunner import LLM, SamplingParams
from pagerunner.sched import guided
from pagerunner.types import StructuredOutputsParams

TEXT = {"detokenize": True, "ignore_eos": False, "max_tokens": 40}
HOW = {key: value for key, value in DEFAULTS.items() if key != "skip_tokenizer_init"}
CONDITIONS: dict[str, dict[str, Any]] = {
    "as usual": {},
    "three in flight": {"max_in_flight": 3},
    "budget of 7": {"max_num_batched_tokens": 7},
    "few pages": {"max_model_len": 128, "kv_cache_memory_bytes": None, "num_gpu_blocks_override": 9},
}


def asked() -> list[SamplingParams]:
    """With grammars: siblings, ends in the middle of drafts, texts of one way only, and everything that changes logits or ends texts; and without."""
    many: list[dict[str, Any]] = [
        {"structured_outputs": {"regex": "[a-z ]{4,30}"}, "n": 3, "temperature": 1.2, "logprobs": 2},
        {"structured_outputs": {"regex": "[a-m]{2,30}"}, "temperature": 0.0, "bad_words": ["ab", "c"], "min_tokens": 9},
        {"structured_outputs": {"regex": "[a-z ]{3,40}"}, "temperature": 1.5, "stop": ["e", "qu"]},
        {"structured_outputs": {"choice": ["yes", "no", "yes and no"]}, "temperature": 1.0, "n": 2},
        {"structured_outputs": {"choice": ["one text and no other one"]}, "temperature": 0.7, "prompt_logprobs": 1},
        {"structured_outputs": {"regex": "(ab|cd){2,12}"}, "temperature": 0.9, "logit_bias": {7: 4.0}, "presence_penalty": 1.0},
        {"structured_outputs": {"regex": "[a-z]+"}, "temperature": 1.0, "stop_token_ids": list(range(4, 90)), "min_tokens": 4},
        {"structured_outputs": {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}, "temperature": 0.0, "max_tokens": 3},
        {"temperature": 1.0, "repetition_penalty": 1.3},
    ]  # fmt: skip
    return [
        SamplingParams(
            **{
                **TEXT, "seed": 100 * at, **own,
                "structured_outputs": StructuredOutputsParams(**own["structured_outputs"]) if "structured_outputs" in own else None,
            }
        )
        for at, own in enumerate(many)
    ]  # fmt: skip


def said(found: list[Any]) -> list[Any]:
    assert not any(output.error for output in found)
    return [[(list(one.token_ids), one.text, one.finish_reason) for one in output.outputs] for output in found]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("qwen3")
    MAKERS["qwen3"](directory)
    return str(next(found.parent for found in Path(directory).rglob("config.json")))


@pytest.fixture(scope="module")
def expected(path: str) -> list[Any]:
    return LLM(path, **HOW).generate(questions(), asked(), use_tqdm=False)


def questions() -> list[dict[str, list[int]]]:
    return [*prompts(), {"prompt_token_ids": [9, 8, 7, 9, 8]}]


def plant_texts(patched: pytest.MonkeyPatch, expected: list[Any], right: float) -> None:
    """The planted drafter goes on behind a text's end, and knows each sibling's."""
    known = {
        (*output.prompt_token_ids, (params.seed or 0) + at): [*output.prompt_token_ids, *one.token_ids]
        for output, params in zip(expected, asked(), strict=True)
        for at, one in enumerate(output.outputs)
    }
    plant(patched, known, right)
    patched.setattr(guided, "GRACE_SECONDS", 60.0)  # so that the number of drafts doesn't depend on the machine


@pytest.mark.days(2)
@pytest.mark.parametrize("condition", CONDITIONS)
def test_everything_at_once_is_as_without_drafts(
    path: str, expected: list[Any], monkeypatch: pytest.MonkeyPatch, condition: str
) -> None:
    plant_texts(monkeypatch, expected, 0.7)
    llm = LLM(path, **HOW | CONDITIONS[condition], **drafting(5))
    found = llm.generate(questions(), asked(), use_tqdm=False)
    assert said(found) == said(expected)
    check_logprobs(expected, found)
    assert accepted(llm) > 5  # with a budget of 7 tokens a step has few drafts


def test_who_leaves_in_the_middle_takes_nobody_along(
    path: str, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are given up after their first tokens, while masks of their drafts are made."""
    plant_texts(monkeypatch, expected, 1.0)
    llm = LLM(path, **HOW, **drafting(5))
    for prompt, params in zip(questions(), asked(), strict=True):
        if params.n == 1:
            stream = llm.stream(prompt, params)
            next(stream)
            stream.close()
    assert said(llm.generate(questions(), asked(), use_tqdm=False)) == said(expected)


def test_masks_that_are_never_in_time_cost_drafts_and_no_steps(
    path: str, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_texts(monkeypatch, expected, 1.0)
    monkeypatch.setattr(guided, "GRACE_SECONDS", 0.0)
    llm = LLM(path, **HOW, **drafting(7))
    assert said(llm.generate(questions(), asked(), use_tqdm=False)) == said(expected)


def test_answers_that_come_again_are_drafted_by_the_host_under_a_grammar(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guided, "GRACE_SECONDS", 60.0)
    config = {"method": "suffix", "num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": [[1, 64, 4]]}
    params, few = asked()[:-1], questions()[:-1]
    plain, drafted = LLM(path, **HOW), LLM(path, **HOW, max_in_flight=2, speculative_config=config)
    for rounds in range(2):
        before = accepted(drafted)
        assert said(drafted.generate(few, params, use_tqdm=False)) == said(plain.generate(few, params, use_tqdm=False))
        assert accepted(drafted) - before > 40 * rounds


@pytest.mark.parametrize("right", [1.0, 0.7])
def test_what_excludes_every_token_ends_a_text_behind_the_same_token(
    path: str, monkeypatch: pytest.MonkeyPatch, right: float
) -> None:
    params = SamplingParams(
        temperature=0,
        seed=0,
        max_tokens=40,
        logprobs=1,
        bad_words=["8"],
        structured_outputs=StructuredOutputsParams(regex="[0-3]{6}8"),
    )

    def ends(llm: LLM) -> list[Any]:
        found = llm.generate(questions(), params, use_tqdm=False)
        assert all(output.error is not None for output in found)
        ended = [one for output in found for one in output.outputs]
        assert all(len(one.logprobs or ()) == len(one.token_ids) for one in ended)
        return [(one.token_ids, one.text, one.finish_reason) for one in ended]

    expected = ends(LLM(path, **HOW))
    texts = {
        (*prompt["prompt_token_ids"], 0): [*prompt["prompt_token_ids"], *tokens]
        for prompt, (tokens, *_) in zip(questions(), expected, strict=True)
    }
    plant(monkeypatch, texts, right)
    assert ends(LLM(path, **HOW, **drafting())) == expected
    assert any(len(tokens) > 1 for tokens, *_ in expected)
