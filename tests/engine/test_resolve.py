"""Resolving arguments: everything that is allocated is in the plan, and the plan stays within what was granted."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from helpers.checkpoints import make_checkpoint
from helpers.families import MAKERS
from helpers.published import all_published
from helpers.quantise import quantise
from pagerunner.config import EngineArgs
from pagerunner.engine.startup.resolve import resolve
from pagerunner.errors import CapacityError, ConfigError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("resolve"), "qwen3"))


@pytest.mark.parametrize("utilization", [0.5, 0.9, 1.0])
def test_pages_and_everything_else_stay_within_the_memory(checkpoint: str, utilization: float) -> None:
    memory = 256 * 2**20
    plan = resolve(EngineArgs(model=checkpoint, gpu_memory_utilization=utilization), memory).plan
    total = plan.kv_bytes + plan.other_bytes
    assert memory * utilization - plan.slab_bytes < total <= memory * utilization
    assert {"weights", "page tables", "sampling state"} <= {name for name, _ in plan.other}


def test_too_little_memory_names_what_needs_it(checkpoint: str) -> None:
    with pytest.raises(CapacityError, match=r"weights .* sampling state .*gpu_memory_utilization=0.9"):
        resolve(EngineArgs(model=checkpoint), 1 * 2**20)


def test_bytes_and_overrides_are_taken_as_they_are(checkpoint: str) -> None:
    plan = resolve(EngineArgs(model=checkpoint, kv_cache_memory_bytes=2**24)).plan
    assert 2**24 - plan.slab_bytes < plan.kv_bytes <= 2**24
    assert resolve(EngineArgs(model=checkpoint, num_gpu_blocks_override=200)).plan.num_pages(0) == 200


def test_a_length_above_the_models_names_both(checkpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"4096.*2048"):
        resolve(EngineArgs(model=checkpoint, max_model_len=4096))


def test_unchunked_prompts_need_a_step_that_holds_them(checkpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens=64.*max_model_len=2048"):
        resolve(EngineArgs(model=checkpoint, enable_chunked_prefill=False, max_num_batched_tokens=64))


def test_cuda_is_refused_by_name(checkpoint: str) -> None:
    with pytest.raises(ConfigError, match="cuda"):
        resolve(EngineArgs(model=checkpoint, device="cuda"))


@pytest.mark.parametrize("asked", ["auto", "none"])
def test_a_user_may_keep_activations_as_they_are(tmp_path: Path, asked: str) -> None:
    path = make_checkpoint(tmp_path, "qwen3")
    quantise(path, "compressed-tensors channel")
    model = resolve(EngineArgs(model=str(path), activation_quantization=asked)).model
    assert model.format is not None and model.format.rounds is (asked == "auto")
    with pytest.raises(ConfigError, match="activation_quantization must be one of auto, none, got 'int3'"):
        EngineArgs(model=str(path), activation_quantization="int3")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gemma_in_float16_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    model = all_published()["google/gemma-3-1b-it"].place(tmp_path)
    monkeypatch.setattr("pagerunner.engine.startup.resolve.resolve_device", lambda asked: asked)
    resolve(EngineArgs(model=str(model), device="cuda", dtype=dtype), 2**34, plan_only=True)
    assert ('dtype="bfloat16" holds it' in caplog.text) is (dtype == "float16")


def test_whole_experts_of_one_rank_are_passed_over_with_a_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in vLLM, so commands with the flag start on a single GPU."""
    args = EngineArgs(model=str(MAKERS["qwen3_moe"](tmp_path)), device="cpu")
    wanted = resolve(args)
    assert caplog.text == ""
    found = resolve(msgspec.structs.replace(args, enable_expert_parallel=True))
    assert (found.args, found.model) == (wanted.args, wanted.model) and not found.config.enable_expert_parallel
    assert (
        "divides experts among the ranks of tensor_parallel_size times data_parallel_size, which is 1." in caplog.text
    )
