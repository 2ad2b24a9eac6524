"""Floors agree with sums done by hand, and say what bounds a workload."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pagerunner.bench.floors import Ceilings, DenseModel
from pagerunner.bench.runner import ThroughputReport
from pagerunner.bench.workloads import BenchRequest, workload, write_model
from pagerunner.cli import bench
from pagerunner.config import EngineArgs
from pagerunner.engine.startup.resolve import resolve
from pagerunner.engine.startup.step_weights import step_bytes
from pagerunner.errors import ConfigError

CARD = Ceilings(4.35e12, 760e12)


def dense(shape: str, path: Path, quantization: str | None = None) -> DenseModel:
    model = write_model(shape, path, quantization)
    config = json.loads((model / "config.json").read_text())
    token_bytes = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * 128
    found = DenseModel.read(config, step_bytes(EngineArgs(model=str(model)), "bfloat16", "cuda"), token_bytes)
    assert found is not None
    return found


@pytest.mark.parametrize(("shape", "rate"), [("qwen3-0.6b", 3649), ("qwen3-8b", 287)])
def test_one_request_is_bound_by_reading_the_weights(shape: str, rate: int, tmp_path: Path) -> None:
    model = dense(shape, tmp_path)
    one = [BenchRequest([1], 1)]
    assert 1 / model.floor(one, 0, CARD, 1.0).bytes_seconds == pytest.approx(rate, rel=0.01)


def test_quantised_weights_are_read_as_they_are_stored(tmp_path: Path) -> None:
    # 36 layers of 192,937,984 weights in groups of 128: 4 bits and a scale of 16; the logits' matrix and the norms stay in 16 bits
    layers, head, norms = 36 * 192_937_984, 151_936 * 4096, 4096 * (2 * 36 + 1) + 36 * 2 * 128
    model = dense("qwen3-8b", tmp_path, "compressed-tensors")
    assert model.step_bytes == layers // 2 + 2 * (layers // 128) + 2 * (head + norms)


def test_a_long_prompt_is_bound_by_operations(tmp_path: Path) -> None:
    model = dense("qwen3-8b", tmp_path)
    requests = workload("prefill8k", 151936)
    floor = model.floor(requests, 0, CARD, best_seconds=1.742)
    assert floor.flops_seconds > 10 * floor.bytes_seconds
    linear = 2 * 6_945_767_424 * 65_536  # 36 layers of 192,937,984 weights
    scores = 8 * 36 * 4 * 4096 * 8192 * 8193 // 2
    assert floor.flops == linear + scores + 2 * 8 * 4096 * 151936
    assert floor.share == pytest.approx(floor.flops / 760e12 / 1.742)
    assert "operations" in floor.text()


def test_decoding_reads_each_requests_context_for_every_token_after_the_first(tmp_path: Path) -> None:
    model = dense("qwen3-0.6b", tmp_path)
    norms = 1024 * (2 * 28 + 1) + 28 * 2 * 128
    weights = 2 * (model.body_weights + model.head_weights + norms)
    token = 2 * 2 * 28 * 8 * 128
    assert model.bytes([BenchRequest([1] * 10, 3)]) == 3 * weights + (11 + 12) * token
    assert model.bytes([BenchRequest([1] * 10, 3), BenchRequest([1] * 5, 1)]) == 3 * weights + (11 + 12) * token


def test_cached_prompt_tokens_are_not_computed(tmp_path: Path) -> None:
    model = dense("qwen3-0.6b", tmp_path)
    requests = [BenchRequest([1] * 64, 1), BenchRequest([1] * 64, 1)]
    less = model.flops(requests, 0) - model.flops(requests, 64)
    assert less == 2 * (2 * model.body_weights * 32 + 4 * 28 * 2048 * (32 * 33 // 2))


def test_other_families_have_no_known_floor_and_ceilings_are_two_numbers() -> None:
    assert DenseModel.read({"model_type": "qwen3_moe"}, 2, 1) is None
    assert Ceilings.parse("4.3,760") == Ceilings(4.3e12, 760e12)
    for bad in ("4.3", "a,b", "1,2,3", "0,5"):
        with pytest.raises(ConfigError, match="--ceilings"):
            Ceilings.parse(bad)


@pytest.mark.parametrize(
    ("ways", "label"), [({"tensor_parallel_size": 2}, "tp 2"), ({"pipeline_parallel_size": 2}, "pp 2")]
)
def test_two_ranks_read_as_many_bytes_from_two_devices(ways: dict[str, int], label: str, tmp_path: Path) -> None:
    model = write_model("qwen3-0.6b", tmp_path)
    requests = [BenchRequest([1] * 10, 3)]
    report = ThroughputReport(
        label="", num_requests=1, prompt_tokens=10, output_tokens=3, cached_tokens=0, seconds=[1.0], elapsed=1.0, requests_per_second=1.0,
        output_tokens_per_second=3.0, total_tokens_per_second=13.0, best=1.0, best_output_tokens_per_second=3.0, best_total_tokens_per_second=13.0,
    )  # fmt: skip
    floors = []
    for asked in ({}, ways):
        args = EngineArgs(model=str(model), **asked)
        plan = resolve(args, 2**36, plan_only=True).plan
        llm: Any = SimpleNamespace(device="cuda", dtype="bfloat16", memory_plan=plan)
        floors.append(bench._with_limits(argparse.Namespace(ceilings=CARD), args, llm, report, requests).floor)
    one, two = floors
    assert one is not None and two is not None
    assert (two.bytes, two.flops, two.bytes_seconds) == (one.bytes, one.flops, one.bytes_seconds / 2)
    assert bench._held(llm, args) == f"cuda, {label}, bfloat16"
