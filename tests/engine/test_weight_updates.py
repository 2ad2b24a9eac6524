"""New weights for an LLM, whose own process holds its one rank."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers import faulty_ranks
from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_window import make_window_checkpoint
from helpers.patience import patient
from helpers.trainer import sender_to
from pagerunner import LLM, SamplingParams
from pagerunner.engine.core.executors.process import load_ranks
from pagerunner.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineSleepingError,
    InvalidRequestError,
    RequestFailedError,
)
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


NOBODY = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}


def test_a_join_ends_the_update_that_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(make_checkpoint(tmp_path, "qwen3")), weight_transfer_config=GLOO, **SETTINGS)
    before = tokens_of(llm)

    def join_nobody() -> None:
        with monkeypatch.context() as patch:
            patch.setattr("pagerunner.limits.TRANSFER_SECONDS", 1)
            llm.init_weight_transfer_engine({"init_info": NOBODY})

    one = {"names": ["model.norm.weight"], "dtype_names": ["float32"], "shapes": [[64]]}
    for join in (lambda: sender_to(llm), join_nobody):
        sender_to(llm)
        llm.start_weight_update()
        with contextlib.suppress(RequestFailedError):
            join()
        with pytest.raises(InvalidRequestError, match="No update of the weights has been started"):
            llm.update_weights({"update_info": one})
        assert tokens_of(llm) == before
    with pytest.raises(InvalidRequestError, match="No trainer is known; call init_weight_transfer_engine first"):
        llm.start_weight_update()

    sender = sender_to(llm)
    with monkeypatch.context() as patch:
        patch.setattr(llm, "finish_weight_update", lambda: None)
        sender.send([("model.norm.weight", torch.ones(64))])
    sender_to(llm)
    with pytest.raises(
        EngineSleepingError, match=r"half new, .* init_weight_transfer_engine came before finish_weight_update\."
    ):
        tokens_of(llm)


def test_memory_for_a_piece_is_taken_before_anything_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint(tmp_path, "qwen3")
    llm = LLM(str(path), weight_transfer_config=GLOO, **SETTINGS)
    before = tokens_of(llm)

    def full(*_: object) -> None:
        raise CapacityError("there is no room.")

    for target, put, said in (
        (
            "limits.TRANSFER_MEGABYTES",
            0,
            r"piece of new weights has .* more than the 0 MiB .*PAGERUNNER_LIMIT_TRANSFER_MEGABYTES",
        ),
        ("dist.transfer.TransferGroup.reserve", full, "there is no room"),
    ):
        sender = sender_to(llm)
        with monkeypatch.context() as patch:
            patch.setattr(f"pagerunner.{target}", put)
            with pytest.raises((InvalidRequestError, CapacityError), match=said):
                sender.send([("model.norm.weight", torch.zeros(64))])
        assert tokens_of(llm) == before
    sender_to(llm).send(load_file(path / "model.safetensors").items())
    assert tokens_of(llm) == before


@pytest.mark.days(2)  # they start processes
@pytest.mark.parametrize(
    ("family", "make", "layout"),
    [
        ("qwen3_moe", make_window_checkpoint, {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        ("qwen3", make_checkpoint, {"pipeline_parallel_size": 2}),
    ],
)
def test_ranks_with_whole_experts_or_whole_layers_take_what_is_theirs(
    family: str, make: Callable[..., Path], layout: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rank has no memory at first: all ranks keep what they have, and leave the trainer at once."""
    monkeypatch.setenv(faulty_ranks.VARIABLE, "update once")
    monkeypatch.setattr("pagerunner.engine.startup.build.load_ranks", partial(load_ranks, loader=faulty_ranks.LOADER))
    first, second = (make(tmp_path, family, seed=seed) for seed in range(2))
    weights = load_file(second / "model.safetensors")
    expected = tokens_of(LLM(str(second), **SETTINGS))
    llm = LLM(str(first), weight_transfer_config=GLOO, **SETTINGS, **layout)
    before = tokens_of(llm)
    began = time.monotonic()
    with pytest.raises(CapacityError, match=r"^Rank 1 of 2: there is no memory for a piece\.$"):
        sender_to(llm).send(weights.items())
    assert time.monotonic() - began < patient(10), (
        "not the 200 seconds of a trainer that waits for ranks that are there"
    )
    assert tokens_of(llm) == before != expected
    sender_to(llm).send(weights.items(), packed=False)
    assert tokens_of(llm) == expected
