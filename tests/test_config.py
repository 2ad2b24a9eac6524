"""EngineArgs takes values of the declared types, converts what stands for one, and refuses the rest by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagerunner import LLM
from pagerunner.config import EngineArgs, engine_args
from pagerunner.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("gpu_memory_utilization", "0.9", 0.9),
        ("gpu_memory_utilization", 1, 1.0),
        ("block_size", "16", 16),
        ("block_size", 16.0, 16),
        ("seed", np.int64(5), 5),
        ("enable_prefix_caching", "false", False),
        ("enforce_eager", 1, True),
        ("max_model_len", "256", 256),
        ("max_model_len", 4096.0, 4096),
        ("max_model_len", "auto", "auto"),
        ("max_model_len", -1, -1),
        ("tokenizer", Path("/somewhere"), "/somewhere"),
        ("dtype", torch.bfloat16, "bfloat16"),
        ("cudagraph_capture_sizes", [1, "2", 4.0], (1, 2, 4)),
        ("pooler_config", {"pooling_type": "LAST"}, {"pooling_type": "LAST"}),
        ("chat_template", "null", "null"),
    ],
)
def test_what_stands_for_a_value_is_converted(name: str, given: Any, taken: Any) -> None:
    found = getattr(engine_args(model="x", **{name: given}), name)
    assert found == taken and type(found) is type(taken)


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("model", None, r"model must be a text, got None \(NoneType\)"),
        ("enforce_eager", "no", r"enforce_eager must be true or false, got 'no' \(str\)"),
        ("enforce_eager", None, "enforce_eager must be true or false"),
        ("seed", "x", r"seed must be a whole number, got 'x' \(str\)"),
        ("seed", 2**63, "seed must be below 2 .. 63, got a number of 64 bits"),
        ("num_gpu_blocks_override", 10**21, "num_gpu_blocks_override must be below 2 .. 63"),
        ("kv_cache_memory_bytes", 10**400, "kv_cache_memory_bytes must be below 2 .. 63, got a number of 1329 bits"),
        ("block_size", True, r"block_size must be a whole number, got True \(bool\)"),
        ("block_size", 16.5, "block_size must be a whole number"),
        ("max_model_len", True, "max_model_len must be a whole number"),
        ("max_model_len", "long", "or None or \"auto\", got 'long'"),
        ("max_model_len", 0, "max_model_len must be at least 1"),
        ("attention_backend", 3, r"attention_backend must be a text, got 3 \(int\)"),
        ("cudagraph_capture_sizes", 4, "must be a list of whole numbers or None, got 4"),
        ("cudagraph_capture_sizes", [1, "two"], "must be a list of whole numbers"),
        ("cudagraph_capture_sizes", [0], "at least 1"),
        ("kv_cache_metrics_sample", "a", "kv_cache_metrics_sample must be a number"),
        ("gpu_memory_utilization", float("nan"), "gpu_memory_utilization must be a finite number, got nan"),
        ("kv_offloading_size", float("inf"), "kv_offloading_size must be a finite number, got inf"),
        ("pooler_config", 3, "pooler_config must be a text or a mapping or None"),
        ("max_num_seqs", "null", "max_num_seqs must be a whole number or None, got 'null'"),
        ("per_request_spec_decode_metrics", "all", "must be one of none, summary, detailed, got 'all'"),
        ("per_request_spec_decode_metrics", "summary", "there are none without speculative_config"),
        ("max_in_flight", 0, "max_in_flight must be a whole number of at least 1"),
        ("target_itl_ms", 0, "target_itl_ms must be above 0, got 0; without it"),
        ("target_itl_ms", -3, "target_itl_ms must be above 0, got -3"),
        ("target_itl_ms", "fast", "target_itl_ms must be a number or None, got 'fast'"),
    ],
)
def test_anything_else_is_refused_by_name(name: str, given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        engine_args(**{"model": "x", name: given})
    with pytest.raises(ConfigError, match=words):
        EngineArgs(**{"model": "x", name: given})


@pytest.mark.parametrize(
    ("others", "words"),
    [
        (
            {"enable_chunked_prefill": False},
            "target_itl_ms=25 cuts prompts into pieces, which enable_chunked_prefill=False rules out",
        ),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 must be 1"),
        (
            {"data_parallel_size": 2, "enable_expert_parallel": True},
            "data_parallel_size=2 must be 1 with enable_expert_parallel",
        ),
    ],
)
def test_a_target_is_refused_beside_what_it_cannot_bound(others: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        engine_args(model="x", target_itl_ms=25, **others)
    assert engine_args(model="x", target_itl_ms=25, data_parallel_size=2).engines == 2, "each has a target of its own"


def test_llm_knows_the_demos_by_name() -> None:
    llm = LLM("demo", use_tqdm=False, num_gpu_blocks_override=256, max_num_seqs=2)
    [output] = llm.chat([{"role": "user", "content": "What is 12 + 30?"}], use_tqdm=False)
    assert output.outputs[0].text == "12 + 30 = 42"
