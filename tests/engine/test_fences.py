"""A fault that one request meets, wherever it is planted, ends that request; its neighbours' tokens don't change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from helpers.checkpoints import make_checkpoint
from pagerunner.llm import LLM
from pagerunner.runner.sampling import sampler
from pagerunner.sched import results
from pagerunner.types import RequestOutput, SamplingParams

PROMPTS = [[5, 6, 7, 8], [99, 100, 101, 102], [9, 10, 11]]
VICTIM = 1
PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = make_checkpoint(tmp_path_factory.mktemp("models"), "qwen3", vocab_size=400)
    return LLM(str(path), use_tqdm=False, max_model_len=128, max_num_seqs=8, num_gpu_blocks_override=64)


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[RequestOutput]:
    return run(llm)


def run(llm: LLM) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], PARAMS, use_tqdm=False)


def raise_for_victim(original: Callable[..., Any], tokens_of: Callable[..., list[int]]) -> Callable[..., Any]:
    def planted(*args: Any, **kwargs: Any) -> Any:
        if PROMPTS[VICTIM][0] in tokens_of(*args)[:4]:
            raise KeyError("planted")
        return original(*args, **kwargs)

    return planted


def plant(place: str, llm: LLM, patch: pytest.MonkeyPatch) -> None:
    scheduler = llm._core._scheduler
    manager = scheduler.manager
    if place == "admission":
        patch.setattr(manager, "admit", raise_for_victim(manager.admit, lambda slot, chain, tokens, *rest: tokens))
    elif place == "publishing":
        patch.setattr(manager, "publish", raise_for_victim(manager.publish, lambda grant, tokens, *rest: tokens))
    elif place == "commit":
        appended = raise_for_victim(results._append, lambda state, sequence, *rest: sequence.tokens)
        patch.setattr(results, "_append", appended)
    elif place == "sampler":
        compiled = raise_for_victim(sampler.compile_slot, lambda request, *rest: request.prompt_token_ids)
        patch.setattr(sampler, "compile_slot", compiled)


@pytest.mark.parametrize("place", ["admission", "publishing", "commit", "sampler"])
def test_a_fault_in_the_core_ends_its_own_request(
    place: str, llm: LLM, expected: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        plant(place, llm, patch)
        outputs = run(llm)
    assert outputs[VICTIM].outputs[0].finish_reason == "error"
    assert "planted" in (outputs[VICTIM].error or "")
    for index in (0, 2):
        assert outputs[index].outputs[0].token_ids == expected[index].outputs[0].token_ids
    assert llm._core.stats().kv_usage == 0  # its pages are back
    assert [one.outputs[0].token_ids for one in run(llm)] == [one.outputs[0].token_ids for one in expected]


def test_a_request_that_fails_alone_leaves_nothing_to_do(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    plant("admission", llm, monkeypatch)
    [output] = llm.generate([{"prompt_token_ids": PROMPTS[VICTIM]}], PARAMS, use_tqdm=False)
    assert output.outputs[0].finish_reason == "error" and not llm._core.has_work


def test_a_device_fault_still_ends_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(sampler, "compile_slot", broken)
    with pytest.raises(Exception, match="illegal memory access"):
        run(llm)
