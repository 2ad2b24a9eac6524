"""New weights for an LLM, whose own process holds its one rank."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers.checkpoints import make_checkpoint
from helpers.trainer import sender_to
from pagerunner import LLM, SamplingParams
from pagerunner.errors import CheckpointError, ConfigError, EngineSleepingError, InvalidRequestError, RequestFailedError
from pagerunner.types.weights import AbortUpdate

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 32,
    "use_tqdm": False,
}
GLOO = {"backend": "gloo"}
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPT = {"prompt_token_ids": list(range(20, 60))}


def tokens_of(llm: LLM) -> list[int]:
    return list(llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids)


def test_a_stream_goes_on_after_an_update_and_new_prompts_have_new_weights(tmp_path: Path) -> None:
    first, second = (make_checkpoint(tmp_path, "qwen3", seed=seed) for seed in range(2))
    expected = tokens_of(LLM(str(second), **SETTINGS))
    llm = LLM(str(first), weight_transfer_config=GLOO, **SETTINGS)
    before = tokens_of(llm)
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    sender = sender_to(llm)
    llm.start_weight_update()
    with pytest.raises(EngineSleepingError, match="being updated"):
        next(stream)
    with pytest.raises(EngineSleepingError, match="being updated"):
        llm.generate(PROMPT, GREEDY, use_tqdm=False)
    llm.finish_weight_update()
    sender.send(load_file(second / "model.safetensors").items())
    *_, last = stream
    assert len(last.outputs[0].token_ids) == 16 and last.outputs[0].token_ids[0] == before[0]
    assert tokens_of(llm) == expected != before

    bad = torch.full((64,), torch.nan)
    with pytest.raises(CheckpointError, match="update_weights: model.norm.weight holds nan"):
        sender.send([("model.norm.weight", bad)])
    with pytest.raises(EngineSleepingError, match="half new"):
        tokens_of(llm)
    with pytest.raises(EngineSleepingError, match="half new"):
        llm.wake_up()
    sender_to(llm).send(load_file(first / "model.safetensors").items())
    assert tokens_of(llm) == before


def test_what_is_not_there_is_refused_with_a_sentence(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3")
    with pytest.raises(ConfigError, match='on a CPU the backend is "gloo"'):
        LLM(str(path), weight_transfer_config='{"backend": "nccl"}', **SETTINGS)
    with pytest.raises(ConfigError, match="weight_transfer_config must be JSON such as"):
        LLM(str(path), weight_transfer_config={"backend": "ipc"}, **SETTINGS)
    llm = LLM(str(path), **SETTINGS)
    info = {"master_address": "localhost", "master_port": 1, "rank_offset": 1, "world_size": 2}
    with pytest.raises(ConfigError, match="without weight_transfer_config"):
        llm.init_weight_transfer_engine(SimpleNamespace(init_info=info))  # as vLLM's WeightTransferInitRequest
    with pytest.raises(InvalidRequestError, match="master_port"):
        llm.init_weight_transfer_engine({"init_info": {**info, "master_port": 0}})
    with pytest.raises(InvalidRequestError, match="call init_weight_transfer_engine first"):
        llm.start_weight_update()
    with pytest.raises(ConfigError, match="run code that it is sent"):
        llm.collective_rpc("sleep", args=(1,))
    assert llm.get_world_size() == 1 and len(tokens_of(llm)) == 16


def test_a_trainer_that_does_not_come_is_waited_for_so_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagerunner.limits.TRANSFER_SECONDS", 1)
    llm = LLM(str(make_checkpoint(tmp_path, "qwen3")), weight_transfer_config=GLOO, **SETTINGS)
    info = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    with pytest.raises(RequestFailedError, match=r"could not join 2 processes at 127\.0\.0\.1:1 .* up to 1 seconds"):
        llm.init_weight_transfer_engine({"init_info": info})
    assert len(tokens_of(llm)) == 16


def test_nothing_says_that_an_engine_runs_in_the_middle_of_an_update(tmp_path: Path) -> None:
    llm = LLM(str(make_checkpoint(tmp_path, "qwen3")), weight_transfer_config=GLOO, **SETTINGS)
    sender_to(llm)
    llm.start_weight_update()
    with pytest.raises(EngineSleepingError, match="finish_weight_update lets the engine go on.*only with tags"):
        llm.wake_up()
    llm.wake_up(tags=["kv_cache"])
    with pytest.raises(EngineSleepingError, match="being updated"):
        tokens_of(llm)
    llm.finish_weight_update()
    assert len(tokens_of(llm)) == 16


def half_new(llm: LLM) -> None:
    """What an engine gets that has taken tensors when another engine has failed."""
    sender = sender_to(llm)
    finish, llm.finish_weight_update = llm.finish_weight_update, lambda: None  # type: ignore[method-assign]
    sender.send([("model.norm.weight", torch.ones(64))])
    llm.finish_weight_update = finish  # type: ignore[method-assign]
    llm._core.change_weights(AbortUpdate("Engine 1 has lost the trainer."))


def test_an_update_that_fails_elsewhere_ends_here_too(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3")
    llm = LLM(str(path), weight_transfer_config=GLOO, enable_sleep_mode=True, **SETTINGS)
    before = tokens_of(llm)
    llm._core.change_weights(AbortUpdate("There is no update."))
    sender_to(llm)
    llm.start_weight_update()
    llm._core.change_weights(AbortUpdate("Another engine knows no trainer."))
    assert tokens_of(llm) == before  # nothing had come

    half_new(llm)
    for call in (llm.wake_up, lambda: tokens_of(llm)):
        with pytest.raises(EngineSleepingError, match=r"half new, .* Engine 1 has lost the trainer\."):
            call()
    with pytest.raises(InvalidRequestError, match=r"half new, .* Engine 1 has lost the trainer\."):
        llm.finish_weight_update()
    with pytest.raises(InvalidRequestError, match="lacks the tensor"):
        sender_to(llm).send([("model.norm.weight", torch.ones(64))])
    llm.sleep(level=2)
    llm.wake_up()
    assert tokens_of(llm) == before


def test_half_new_weights_that_a_failed_sleep_has_dropped_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(make_checkpoint(tmp_path, "qwen3")), weight_transfer_config=GLOO, enable_sleep_mode=True, **SETTINGS)
    before = tokens_of(llm)
    half_new(llm)
    with monkeypatch.context() as patch:
        patch.setattr("pagerunner.runner.sleep.Scratch.give_back", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.sleep(level=2)
    llm.wake_up()
    assert tokens_of(llm) == before
