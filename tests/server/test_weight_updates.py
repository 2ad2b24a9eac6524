"""New weights from a trainer: every rank takes its share, and weights that are half new are never served."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers.checkpoints import make_checkpoint
from helpers.patience import LONG, until
from helpers.scripts import script
from helpers.serving import RunningServer, running_server
from pagerunner import LLM, SamplingParams
from pagerunner.config import EngineArgs
from pagerunner.engine.core.client import DEFAULT_FACTORY
from pagerunner.errors import CheckpointError
from pagerunner.types.weights import AbortUpdate, StartUpdate, UpdateWeights

pytestmark = [pytest.mark.days(3), pytest.mark.usefixtures("forked")]  # they start processes
rl_trainer = script("rl_trainer")
SETTINGS: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 4, "num_gpu_blocks_override": 32, "device": "cpu"}
PROMPT = list(range(20, 60))
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one shape. Ranks take 257 and 256 of their token ids."""
    path = tmp_path_factory.mktemp("models")
    return [make_checkpoint(path, "qwen3", intermediate_size=100, vocab_size=513, seed=seed) for seed in range(2)]


def tokens_of(server: RunningServer, **headers: str) -> list[int]:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    answer = server.post("/v1/completions", body, headers=headers)
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


@pytest.fixture(scope="module")
def expected(models: list[Path]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompt = {"prompt_token_ids": PROMPT}
    found = [
        LLM(str(path), use_tqdm=False, **SETTINGS).generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
        for path in models
    ]
    assert found[0] != found[1]
    return found


@pytest.fixture(scope="module")
def server(models: list[Path]) -> Iterator[RunningServer]:
    args = EngineArgs(
        model=str(models[0]),
        tensor_parallel_size=2,
        enable_sleep_mode=True,
        weight_transfer_config={"backend": "gloo"},
        **SETTINGS,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGERUNNER_LIMIT_TRANSFER_SECONDS", "100")
        with running_server(args, core_factory=DEFAULT_FACTORY) as server:
            yield server


@pytest.fixture
def sender(server: RunningServer) -> Any:
    return rl_trainer.Sender(rl_trainer.Server(server.url), seconds=200)


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(path / "model.safetensors"))


@pytest.mark.parametrize("packed", [True, False])
def test_every_rank_takes_its_share_and_no_old_prompt_is_found(
    packed: bool, server: RunningServer, sender: Any, models: list[Path], expected: list[list[int]]
) -> None:
    assert tokens_of(server) == tokens_of(server) == expected[0]  # the prompt is cached
    rl_trainer.PACKED_BYTES = 50_000
    sender.send(weights_of(models[1]).items(), packed=packed)
    assert tokens_of(server) == expected[1]
    assert server.get("/is_paused").json() == {"is_paused": False}
    sender.send(weights_of(models[0]).items())
    assert tokens_of(server) == expected[0]


def test_a_pause_lasts_over_an_update_and_requests_wait(
    server: RunningServer, sender: Any, models: list[Path], expected: list[list[int]]
) -> None:
    assert server.post("/pause?mode=keep").status_code == 200
    sender.send(
        [("model.norm.weight", weights_of(models[0])["model.norm.weight"])]
    )  # some weights may stay as they are
    assert server.get("/is_paused").json() == {"is_paused": True}
    assert server.post("/resume").status_code == 200
    assert tokens_of(server) == expected[0]


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("model.layers.7.input_layernorm.weight", torch.ones(64), "is not part of the model"),
        (NORM, torch.ones(65), r"has shape \[65\]; .* asks for \[64\]"),
        (NORM, torch.ones(64, dtype=torch.int32), "has dtype int32"),
    ],
)
def test_what_the_model_does_not_have_is_refused_before_anything_changes(
    name: str, tensor: torch.Tensor, said: str, server: RunningServer, sender: Any, expected: list[list[int]]
) -> None:
    with pytest.raises(RuntimeError, match=said):
        sender.send([("model.norm.weight", torch.zeros(64)), (name, tensor)])
    assert tokens_of(server) == expected[0]


def spoil_by_nan(server: RunningServer, sender: Any, weights: dict[str, torch.Tensor]) -> None:
    bad = torch.ones(513, 64)
    bad[512, 3] = torch.nan  # the last rank's
    with pytest.raises(RuntimeError, match=r"Rank 1 of 2: update_weights: lm_head\.weight holds nan at \[512, 3\]"):
        sender.send(
            ({NORM: weights[NORM], "lm_head.weight": bad} | weights | {"lm_head.weight": bad}).items(), packed=False
        )


def spoil_by_leaving(server: RunningServer, sender: Any, weights: dict[str, torch.Tensor]) -> None:
    def leave(piece: torch.Tensor, call: Any) -> None:
        sender._group = None
        raise KeyError("the trainer has a fault of its own")

    sender._broadcast = leave
    with pytest.raises(KeyError):
        sender.send(weights.items())
    sender._threads.shutdown()  # the server has heard of it


def spoil_by_other_bytes(server: RunningServer, sender: Any, weights: dict[str, torch.Tensor]) -> None:
    """A trainer that sends by another dtype than it says, or loses tensors on the way."""
    for comes, said in (
        (
            [torch.zeros(10**6, dtype=torch.uint8)],
            r"sends a piece of 1,000,000 bytes, where .* declared a piece of 256 bytes",
        ),
        ([torch.zeros(128, dtype=torch.uint8)], r"sends a piece of 128 bytes, where .* declared a piece of 256 bytes"),
        ([], "has sent its last piece, where .* declared a piece of 256 bytes"),
        ([torch.ones(256, dtype=torch.uint8)] * 2, "sends a piece of 256 bytes, where .* declared no more pieces"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rl_trainer, "pieces", lambda tensors, most, comes=comes: iter(comes))
            with pytest.raises(RuntimeError, match=said):
                sender.send([(NORM, weights[NORM].float())])
        sender = rl_trainer.Sender(rl_trainer.Server(server.url), seconds=200)
        health = server.get("/health")
        assert health.status_code == 503 and re.search(said, health.json()["error"]["message"]), health.text


@pytest.mark.parametrize("spoil", [spoil_by_nan, spoil_by_leaving, spoil_by_other_bytes])
@pytest.mark.parametrize("heal", ["all", "checkpoint"])
def test_half_new_weights_are_never_served(
    spoil: Callable[..., None],
    heal: str,
    server: RunningServer,
    sender: Any,
    models: list[Path],
    expected: list[list[int]],
) -> None:
    weights = weights_of(models[1])
    spoil(server, sender, weights)
    assert server.get("/is_paused").json() == {"is_paused": True}
    asked = {"prompt": PROMPT, "max_tokens": 1}
    for refused in (server.get("/health"), server.post("/v1/completions", asked), server.post("/resume")):
        assert refused.status_code == 503 and "half new, as an update of them has failed" in refused.text
    if heal == "checkpoint":
        assert server.post("/sleep?level=2").status_code == 200
        assert server.post("/wake_up").status_code == 200
    else:
        with pytest.raises(RuntimeError, match="lacks the tensor lm_head.weight and 23 more"):
            rl_trainer.Sender(rl_trainer.Server(server.url), seconds=200).send([(NORM, weights[NORM])])
        assert server.get("/is_paused").json() == {"is_paused": True}
        rl_trainer.Sender(rl_trainer.Server(server.url), seconds=200).send(weights_of(models[0]).items())
    assert tokens_of(server) == expected[0] and server.get("/health").status_code == 200


def test_requests_wait_for_a_trainer_that_is_late_and_the_server_is_healthy(
    server: RunningServer, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer has opened its store and doesn't join."""
    ready, join = threading.Event(), rl_trainer.Sender._join
    monkeypatch.setattr(rl_trainer.Sender, "_join", lambda *given: ready.wait(LONG) and join(*given))
    monkeypatch.setattr(server.engine.replicas[0], "_stall_seconds", 0.2)
    with ThreadPoolExecutor(2) as threads:
        sender = threads.submit(rl_trainer.Sender, rl_trainer.Server(server.url), seconds=200)
        until(lambda: server.engine.replicas[0].level == 0)
        tokens = threads.submit(tokens_of, server)
        until(lambda: server.engine.num_unfinished)
        time.sleep(0.4)
        assert server.get("/health").status_code == 200 and not tokens.done() and not sender.done()
        ready.set()
        assert tokens.result() == expected[0]
        sender.result()


def test_the_example_trains_what_the_server_then_serves(server: RunningServer, sender: Any, models: list[Path]) -> None:
    pytest.importorskip("transformers")
    trained = rl_trainer.train(rl_trainer.Server(server.url), sender, str(models[0]), 3, PROMPT, answers=4)
    found = trained.generate(torch.tensor([PROMPT]), max_new_tokens=12, min_new_tokens=12, do_sample=False)
    assert tokens_of(server) == found[0, len(PROMPT) :].tolist()
    sender.send(weights_of(models[0]).items())


def test_all_engines_behind_one_port_take_them(
    models: list[Path], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = EngineArgs(
        model=str(models[0]), data_parallel_size=2, weight_transfer_config={"backend": "gloo"}, **SETTINGS
    )
    monkeypatch.setenv("PAGERUNNER_LIMIT_TRANSFER_SECONDS", "10")
    with running_server(args, core_factory=DEFAULT_FACTORY) as server:
        assert server.get("/get_world_size").json() == {"world_size": 2}
        assert server.get("/get_world_size?include_dp=false").json() == {"world_size": 1}
        assert "include_dp must be one of true, false" in server.get("/get_world_size?include_dp=no").text
        rl_trainer.Sender(rl_trainer.Server(server.url), seconds=200).send(weights_of(models[1]).items())
        for engine in ("0", "1"):
            assert tokens_of(server, **{"X-data-parallel-rank": engine}) == expected[1]
        one_engine_that_fails_ends_it_on_all(server, weights_of(models[0]), expected)
        a_trainer_that_goes_away_is_waited_for_so_long(server, expected)
        an_engine_that_dies_ends_the_call(server, weights_of(models[1]))


def one_engine_that_fails_ends_it_on_all(
    server: RunningServer, weights: dict[str, torch.Tensor], expected: list[list[int]]
) -> None:
    info = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    refused = server.post("/init_weight_transfer_engine", {"init_info": info})
    said = "world_size=2 is too small: rank_offset=1 and the 2 ranks of all engines make 3."
    assert refused.status_code == 400 and said in refused.json()["error"]["message"]
    first, second = server.engine.replicas
    real, failing = second.client.call, StartUpdate
    slow = first.client.call

    async def late(make: Any) -> Any:
        part = type(getattr(make(0), "change", None))
        await asyncio.sleep(0.3 if part is AbortUpdate else 0)
        answer = await slow(make)
        await asyncio.sleep(0.3 if part is StartUpdate else 0)
        return answer

    async def call(make: Any) -> Any:
        message = make(0)
        answer = await real(make)
        if type(getattr(message, "change", None)) is failing:
            raise CheckpointError("a fault of one engine alone.")
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(second.client, "call", call)
        patch.setattr(first.client, "call", late)
        refused = server.post("/start_weight_update")
        assert "Engine 1 of 2: a fault of one engine alone." in refused.text
        assert refused.status_code == 500 and [one.level for one in server.engine.replicas] == [-1, -1]
        assert tokens_of(server) == tokens_of(server) == expected[1]
        failing = UpdateWeights
        with pytest.raises(RuntimeError, match="Engine 1 of 2: a fault of one engine alone"):
            rl_trainer.Sender(rl_trainer.Server(server.url), seconds=200).send([(NORM, weights[NORM])])
    assert [one.level for one in server.engine.replicas] == [0, 0]
    until(lambda: server.get("/health").status_code == 503)  # engines say why with their next figures
    health = server.get("/health")
    assert (
        health.status_code == 503
        and "half new, as an update of them has failed: Engine 1 of 2: a fault of one engine" in health.text
    )
    rl_trainer.Sender(rl_trainer.Server(server.url), seconds=200).send(weights.items())
    for engine in ("0", "1"):
        assert tokens_of(server, **{"X-data-parallel-rank": engine}) == expected[0]
    assert server.get("/health").content == b""


def a_trainer_that_goes_away_is_waited_for_so_long(server: RunningServer, expected: list[list[int]]) -> None:
    sender = rl_trainer.Sender(rl_trainer.Server(server.url), seconds=200)
    assert server.post("/start_weight_update").status_code == 200
    assert tokens_of(server) == expected[0], "the engine goes on with the weights that it has"
    with pytest.raises(RuntimeError, match="No trainer is known"):
        sender.send([])


def an_engine_that_dies_ends_the_call(server: RunningServer, weights: dict[str, torch.Tensor]) -> None:
    """While the trainer sends. The other engine's weights are half new, and the trainer is told at once."""
    sender = rl_trainer.Sender(rl_trainer.Server(server.url), seconds=200)
    broadcast, pids = sender._broadcast, [one.client.pid for one in server.engine.replicas]

    def die(piece: torch.Tensor, call: Any) -> None:
        broadcast(piece, call)
        os.kill(pids[1], signal.SIGKILL)
        with contextlib.suppress(RuntimeError):
            call.result(7)
        assert call.done(), "not the 10 seconds that the other engine waits for the next piece"
        raise RuntimeError("the server has answered")

    sender._broadcast = die
    with pytest.raises(RuntimeError, match="engine 1 of 2 was ended by SIGKILL"):
        sender.send(weights.items(), packed=False)
    until(lambda: server.get("/health").status_code == 503)
    assert "half new" in server.get("/health").text and server.get("/get_world_size").json() == {"world_size": 1}
    rl_trainer.Sender(rl_trainer.Server(server.url), seconds=200).send(weights.items())
    assert list(server.get("/health").json()["lost"]) == ["1"]


def test_updates_out_of_order_and_other_machines_are_refused(server: RunningServer) -> None:
    info = {"master_address": "10.0.0.7", "master_port": 29500, "rank_offset": 1, "world_size": 3}
    one = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}
    for path, body, said in (
        ("/update_weights", {"update_info": one}, "No update of the weights has been started"),
        ("/finish_weight_update", None, "No update of the weights has been started"),
        ("/init_weight_transfer_engine", {"init_info": info}, "PAGERUNNER_HOST_IP"),
        ("/init_weight_transfer_engine", {"init_info": {**info, "world_size": 2}}, "world_size=2 is too small"),
        ("/init_weight_transfer_engine", {"init_info": {"master_port": 1}}, "master_address"),
        ("/update_weights", {"update_info": {**one, "shapes": []}}, "shapes has 0 entries for 1 names"),
        ("/update_weights", {"update_info": {**one, "dtype_names": ["object"]}}, "Invalid enum value 'object'"),
        ("/collective_rpc", {"method": "sleep"}, "run code"),
    ):
        refused = server.post(path, body)
        assert refused.status_code == 400, refused.text
        assert said in refused.json()["error"]["message"]
    rl_trainer.Sender(rl_trainer.Server(server.url), seconds=200)  # the groups of tests before are gone
    assert server.get("/get_world_size?include_dp=true").json() == {"world_size": 2}
    assert server.post("/start_weight_update").status_code == 200
    assert server.post("/sleep?level=1").status_code == 503
    assert server.post("/start_weight_update").status_code == 200  # instead of one that a trainer hasn't finished
    assert server.post("/finish_weight_update").status_code == 200
    assert server.post("/sleep?level=2").status_code == 200
    asleep = server.post("/start_weight_update")
    assert asleep.status_code == 503 and "weights are asleep" in asleep.json()["error"]["message"]
    assert server.post("/wake_up?tags=weights").status_code == 200
    assert server.post("/start_weight_update").status_code == 200
    assert server.post("/finish_weight_update").status_code == 200
    assert server.post("/wake_up?tags=kv_cache").status_code == 200
