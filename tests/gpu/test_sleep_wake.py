"""Whole engines asleep and awake on the device, with graphs that are captured once: nothing changes but the memory."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.checkpoints import make_checkpoint
from helpers.device import (
    MIB,
    ON_CUDA,
    all_taken_but,
    collect,
    counted_graphs,
    device_llm,
    free_memory,
    needs_cuda,
    wait_for_host_copies,
)
from helpers.trainer import sender_to
from pagerunner import LLM, SamplingParams
from pagerunner.demo import demo_path
from pagerunner.engine.startup.measure import DRIVER_BYTES
from pagerunner.errors import CapacityError, ConfigError, EngineSleepingError
from pagerunner.runner.runner import ModelRunner

LIMITS: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 512}
PROMPTS = [
    {"prompt_token_ids": [(13 * i + 7 * j) % 400 + 20 for j in range(length)]}
    for i, length in enumerate((300, 1, 17, 64, 5, 33, 90, 2, 40, 11))
]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("demo", {}),
    "hybrid": ("demo-hybrid", {}),
    "dense, fp8 pages": ("demo", {"kv_cache_dtype": "fp8"}),
    "hybrid, fp8 pages": ("demo-hybrid", {"kv_cache_dtype": "fp8"}),
    "fp8 pages, the checkpoint's scales": ("scaled", {"kv_cache_dtype": "fp8", "skip_tokenizer_init": True}),
}


def path_of(name: str, directory: Path) -> Path:
    if name != "scaled":
        return Path(demo_path(name))
    path = make_checkpoint(directory, "qwen3", dtype="bfloat16")
    file = path / "model.safetensors"
    names = [f"model.layers.{layer}.self_attn.{x}_scale" for layer in range(2) for x in "kv"]
    save_file(load_file(file) | {name: torch.tensor(0.02 + 0.01 * i) for i, name in enumerate(names)}, file)
    return path


def sleeper(model: str, directory: Path, **options: Any) -> LLM:
    name, own = MODELS[model]
    settings = {"dtype": "bfloat16", "enable_sleep_mode": True} | LIMITS | own | options
    return device_llm(path_of(name, directory), **settings)


def results(llm: LLM) -> list[Any]:
    """Tokens and log-probabilities, every bit of them, computed without what is cached: rows in graphs and beside them."""
    assert llm.reset_prefix_cache()
    params = [SamplingParams(temperature=0, max_tokens=4 + i, ignore_eos=True, logprobs=4) for i in range(len(PROMPTS))]
    params[3] = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, prompt_logprobs=2)
    params[5] = SamplingParams(temperature=0.9, seed=4, max_tokens=9, ignore_eos=True)
    found: list[Any] = []
    for output in llm.generate(PROMPTS, params, use_tqdm=False):
        assert output.error is None
        one = output.outputs[0]
        for steps in (one.logprobs or (), (output.prompt_logprobs or ())[1:]):
            found.append([[(token, entry.logprob) for token, entry in step.items()] for step in steps])
        found.append(list(one.token_ids))
    return found


def greedy(llm: LLM) -> list[list[int]]:
    """Tokens of steps that run in graphs from beginning to end."""
    assert llm.reset_prefix_cache()
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def mapped(llm: LLM) -> int:
    """Bytes of the device's memory behind weights and pages."""
    return sum(llm._core._executor._sleeper._arena.mapped_bytes().values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("model", MODELS)
def test_results_are_the_same_bit_for_bit_and_no_graph_is_captured_again(model: str, tmp_path: Path) -> None:
    with counted_graphs() as graphs:
        llm = sleeper(model, tmp_path)
        captured = graphs.captures
        before, tokens = results(llm), greedy(llm)
        assert captured > 8 and {key.decode for key in graphs.replays} == {True, False}
        assert results(llm) == before, "two runs differ, so that what follows would say nothing"
        for level, tags in ((1, None), (2, None), (1, "one by one"), (2, "one by one"), (0, None), (1, None)):
            llm.sleep(level)
            said = f"level {level}.*wake_up" if level else "is paused; wake_up"
            with pytest.raises(EngineSleepingError, match=said):
                llm.generate(PROMPTS[0], use_tqdm=False)
            if tags is None:
                llm.wake_up()
            else:
                llm.wake_up(["weights"])
                with pytest.raises(EngineSleepingError):
                    llm.generate(PROMPTS[0], use_tqdm=False)
                llm.wake_up(["kv_cache"])
            graphs.replays.clear()
            assert results(llm) == before, f"after level {level}"
            assert greedy(llm) == tokens, f"after level {level}"
            assert {key.decode for key in graphs.replays} == {True, False}
        assert graphs.captures == captured


@pytest.mark.alone
@needs_cuda
@pytest.mark.parametrize("model", ["dense", "hybrid, fp8 pages"])
def test_free_memory_is_the_same_to_the_mib_before_and_after(model: str, tmp_path: Path) -> None:
    llm = sleeper(model, tmp_path)
    for level in (1, 2, 1, 2):  # what is taken at first use is not what is measured
        results(llm)
        llm.sleep(level)
        llm.wake_up()
    results(llm)
    awake = free_memory()
    for level in (0, 1, 2, 1, 2):
        held, cached = mapped(llm), torch.cuda.memory_reserved()
        llm.sleep(level)
        gone = held - mapped(llm)
        cached -= torch.cuda.memory_reserved()
        assert (gone, cached > 0) == ((0, False) if level == 0 else (held, True))
        # a page-locked copy of these weights takes a few KiB of page tables, which the driver takes 2 MiB at a time
        assert abs(free_memory() - awake - gone - cached) <= 2 * MIB
        llm.wake_up()
        assert mapped(llm) == held
        results(llm)
        assert abs(free_memory() - awake) < MIB, f"after level {level}"


def runners() -> int:
    return sum(type(found) is ModelRunner for found in gc.get_objects())


@pytest.mark.alone
@pytest.mark.parametrize("model", ["dense", "hybrid, fp8 pages"])
def test_an_engine_that_nobody_refers_to_gives_everything_back_at_once(model: str, tmp_path: Path) -> None:
    """Not when garbage is collected some time."""
    results(sleeper(model, tmp_path))  # what is taken at first use is not what is measured
    collect()
    there, free = runners(), free_memory() if ON_CUDA else 0
    gc.disable()
    try:
        llm = sleeper(model, tmp_path)
        results(llm)
        llm.sleep(1)
        llm.wake_up()
        assert runners() == there + 1
        del llm
        assert runners() == there
    finally:
        gc.enable()
    if ON_CUDA:
        wait_for_host_copies()
        torch.cuda.empty_cache()
        assert free_memory() > free - 32 * MIB


def test_regions_wake_one_by_one_and_their_names_are_checked(tmp_path: Path) -> None:
    llm = sleeper("dense", tmp_path)
    before, held = greedy(llm), mapped(llm)
    llm.sleep(2)
    assert mapped(llm) == 0
    with pytest.raises(ConfigError, match="'gpu'"):
        llm.wake_up(["gpu"])
    llm.wake_up(["weights"])
    weights = mapped(llm)
    assert 0 < weights < held
    llm.wake_up(["weights"])
    assert mapped(llm) == weights
    llm.sleep(2)  # half awake, and to sleep again
    assert mapped(llm) == 0
    llm.wake_up(["kv_cache"])
    assert mapped(llm) == held - weights
    llm.wake_up()
    assert mapped(llm) == held and greedy(llm) == before
    llm.wake_up()


@pytest.mark.parametrize("level", [0, 1, 2])
def test_cached_prompts_are_forgotten_with_their_pages_only(level: int, tmp_path: Path) -> None:
    llm = sleeper("hybrid", tmp_path)
    one = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    hits = [0]
    for _ in range(3):
        llm.generate(PROMPTS[0], one, use_tqdm=False)
        hits.append(llm.stats().prefix_hits_total)
        if len(hits) == 3:
            llm.sleep(level)
            llm.wake_up()
    first, again, after = (later - earlier for earlier, later in zip(hits, hits[1:], strict=False))
    assert (first, after) == (0, again if level == 0 else 0) and again > 256


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_unfinished_requests_end_finish_or_go_on(mode: Any, tmp_path: Path) -> None:
    llm = sleeper("hybrid", tmp_path, dtype="float32")  # tokens don't change where a kept request is computed again
    params = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)
    texts = [PROMPTS[0], *PROMPTS[2:6]]
    expected = [list(output.outputs[0].token_ids) for output in llm.generate(texts, params, use_tqdm=False)]
    for level in (0, 1, 2):
        llm.reset_prefix_cache()
        streams = [llm.stream(text, params) for text in texts]
        begun = [next(stream) for stream in streams[:-1] for _ in range(2)]
        assert not any(output.finished for output in begun)

        llm.sleep(level, mode)
        stats = llm.stats()
        assert stats.running + stats.waiting == (len(texts) - 1 if mode == "keep" else 0)
        llm.wake_up()

        last = [list(stream)[-1] for stream in streams]  # the last stream's request comes after waking
        tokens = [list(output.outputs[0].token_ids) for output in last]
        reasons = [output.outputs[0].finish_reason for output in last]
        if mode == "abort":
            assert reasons == ["abort"] * (len(texts) - 1) + ["length"]
            assert all(0 < len(found) < 25 for found in tokens[:-1])
            assert all(found == whole[: len(found)] for found, whole in zip(tokens, expected, strict=True))
        else:
            assert reasons == ["length"] * len(texts)
            assert tokens == expected
        assert llm.stats().running == llm.stats().waiting == 0


@pytest.mark.alone
@needs_cuda
@pytest.mark.parametrize("level", [1, 2])
def test_memory_taken_while_asleep_is_missed_with_numbers_and_waking_works_when_it_is_back(
    level: int, tmp_path: Path
) -> None:
    with counted_graphs() as graphs:
        llm = sleeper("hybrid", tmp_path, max_num_batched_tokens=4096)
        before, captured, held = results(llm), graphs.captures, mapped(llm)
        torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")  # so that torch has at least that much in its cache
        cached = torch.cuda.memory_reserved()
        llm.sleep(level)
        cached -= torch.cuda.memory_reserved()
        assert cached > DRIVER_BYTES
        for left, missing, least in (
            (lambda: 2 * MIB, "weights", 0),
            (lambda: held // 2, "pages", 1),
            (lambda: held - mapped(llm) + DRIVER_BYTES, "the activations of a step", held),
        ):
            with all_taken_but(left()):
                for _ in range(2):
                    with pytest.raises(CapacityError, match=f"are wanted for {missing}") as caught:
                        llm.wake_up()
                    assert re.fullmatch(
                        r"\d+\.\d\d MiB of device memory .*, but .* of the device's .* GiB are free.* The "
                        r"engine stays asleep, and wake_up can be tried again\.",
                        str(caught.value),
                    )
                    with pytest.raises(EngineSleepingError):
                        llm.generate(PROMPTS[0], use_tqdm=False)
            assert mapped(llm) >= least, "what could be woken is awake"
        llm.wake_up()
        assert (mapped(llm), graphs.captures) == (held, captured)
        assert results(llm) == before
        llm.sleep(level)
        llm.wake_up()
        assert results(llm) == before


@needs_cuda
def test_new_weights_are_computed_with_and_outlive_sleep(tmp_path: Path) -> None:
    first, second = (make_checkpoint(tmp_path, "qwen3", dtype="bfloat16", seed=seed) for seed in range(2))
    expected = greedy(device_llm(second, dtype="bfloat16", skip_tokenizer_init=True, **LIMITS))
    options = {"enable_sleep_mode": True, "weight_transfer_config": {"backend": "gloo"}, "skip_tokenizer_init": True}
    llm = device_llm(first, dtype="bfloat16", **options, **LIMITS)
    before = greedy(llm)
    sender_to(llm).send(load_file(second / "model.safetensors").items())
    assert greedy(llm) == expected != before
    llm.sleep(1)
    llm.wake_up()
    assert greedy(llm) == expected
