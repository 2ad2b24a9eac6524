"""Models with recurrent layers through the engine: hits come from snapshots, and tokens don't depend on them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoints import write_tokenizer
from helpers.checkpoints_hybrid import make_hybrid_checkpoint
from helpers.effort import share_of_the_day
from pagerunner import LLM, SamplingParams
from pagerunner.memory.specs import RecurrentState

FAMILIES = ["qwen3_next", "qwen3_5", "qwen3_5_windowed", "bamba"]
NEW_TOKENS = 8


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint, and the reference model it was written from."""
    path, reference = make_hybrid_checkpoint(tmp_path_factory.mktemp("prefix"), request.param, seed=3)
    write_tokenizer(path, 512, add_bos=False)
    return path, reference


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(4, 512) for _ in range(length)]


def run(llm: LLM, prompts: list[list[int]], **params: Any) -> list[Any]:
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, **params)
    return llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], sampling, use_tqdm=False)


@torch.inference_mode()
def check(reference: Any, outputs: list[Any]) -> None:
    """Every sequence is the reference's greedy one, with its log-probabilities."""
    for output in outputs:
        tokens = list(output.prompt_token_ids)
        for made in output.outputs:
            new = list(made.token_ids)
            logits = reference(torch.tensor([tokens + new[:-1]])).logits[0, len(tokens) - 1 :]
            want = logits.float().log_softmax(-1)
            assert want.argmax(-1).tolist() == new
            found = [entry[token].logprob for token, entry in zip(new, made.logprobs, strict=True)]
            assert found == pytest.approx(want.max(-1).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("batched_tokens", [(16, 50, 64, 1000)[number] for number in share_of_the_day(4, 2)])
def test_the_same_prompt_hits_its_last_unit_whatever_the_chunks(model: tuple[Path, Any], batched_tokens: int) -> None:
    path, reference = model
    llm = LLM(str(path), max_num_batched_tokens=batched_tokens, poison_fresh_pages=True)
    text = prompt(1, 155)
    check(reference, run(llm, [text]))
    before = llm.stats().prefix_hits_total
    check(reference, run(llm, [text]))
    assert llm.stats().prefix_hits_total - before == 144


@pytest.mark.days(3)
def test_a_conversation_continues_from_the_end_of_its_last_turn(model: tuple[Path, Any]) -> None:
    path, reference = model
    llm = LLM(str(path), max_num_batched_tokens=64, poison_fresh_pages=True)
    text = prompt(2, 61)
    for turn in range(4):
        before = llm.stats().prefix_hits_total
        outputs = run(llm, [text])
        check(reference, outputs)
        hits = llm.stats().prefix_hits_total - before
        assert hits == 0 if turn == 0 else hits >= len(text) - 16 - NEW_TOKENS - 16
        text = text + list(outputs[0].outputs[0].token_ids) + prompt(turn, 9)


@pytest.mark.days(3)
def test_prompts_that_branch_from_a_shared_prefix(model: tuple[Path, Any]) -> None:
    path, reference = model
    llm = LLM(str(path), max_num_batched_tokens=48, poison_fresh_pages=True)
    shared = prompt(4, 100)
    for first in range(0, 9, 3):
        check(reference, run(llm, [shared + prompt(10 + first + i, 5 + 20 * i) for i in range(3)]))
    assert llm.stats().prefix_hits_total >= 96


@pytest.mark.days(3)
def test_siblings_of_one_request(model: tuple[Path, Any]) -> None:
    path, reference = model
    llm = LLM(str(path), max_num_batched_tokens=48, poison_fresh_pages=True)
    check(reference, run(llm, [prompt(5, 70), prompt(6, 33)], n=3))


@pytest.mark.days(3)
def test_a_pool_too_small_for_all_of_them(model: tuple[Path, Any]) -> None:
    path, reference = model
    llm = LLM(
        str(path),
        max_num_batched_tokens=40,
        max_model_len=96,
        kv_cache_memory_bytes=200_000,
        max_in_flight=2,
        poison_fresh_pages=True,
    )
    shared = prompt(7, 40)
    check(reference, run(llm, [shared[: 8 * (i % 6)] + prompt(20 + i, 4 + 5 * (i % 9)) for i in range(24)]))
    assert llm.stats().preemptions_total or sum(group.evictions for group in llm.stats().groups)


@pytest.mark.days(3)
def test_without_zeroing_the_poison_is_noticed(model: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    path, reference = model
    monkeypatch.setattr(RecurrentState, "zero_fresh", False)
    llm = LLM(str(path), poison_fresh_pages=True)
    with pytest.raises(AssertionError):
        check(reference, run(llm, [prompt(8, 20)]))
