"""Llama-4 through the engine against `transformers` in float32: chunked attention beside full attention.

Chunks of prompts, prefix hits, preemption and the pages' size change nothing; every fresh page holds NaN.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints_chunked import make_chunked_checkpoint
from helpers.engine_oracle import CONDITIONS, check, check_tokens, engine, prompt, run
from pagerunner.config import EngineArgs
from pagerunner.engine.startup.resolve import resolve
from pagerunner.errors import ConfigError
from pagerunner.models.configs.reader import read_model_config

pytest.importorskip("transformers")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "every other layer with experts": {},
    "all experts, three at once": {"interleave_moe_layer_step": 1, "num_experts_per_tok": 3},
    "llama3 rope, plain heads and temperature": {
        "rope_parameters": LLAMA3,
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "no_rope_layer_interval": 2,
    },
    "listed layers, biases, tied": {
        "moe_layers": [0, 3],
        "no_rope_layers": [0, 1, 1, 0],
        "attention_chunk_size": 3,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "no positions anywhere": {"no_rope_layers": [0] * 4},
    "with images": {"vision": True},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from a variant's name to its directory and reference model, each made once."""
    directory = tmp_path_factory.mktemp("models")
    return functools.cache(lambda name: make_chunked_checkpoint(directory, seed=len(name), **VARIANTS[name]))


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant(models: Any, name: str) -> None:
    path, reference = models(name)
    texts = [prompt(i, n) for i, n in enumerate((1, 35, 20, 170, 64))]
    check(reference, run(engine(path, max_num_batched_tokens=100), texts))


@pytest.mark.parametrize("condition", CONDITIONS)
def test_results_do_not_depend_on_the_memory(models: Any, condition: str) -> None:
    path, reference = models("every other layer with experts")
    check(reference, run(engine(path, **CONDITIONS[condition]), [prompt(i, n) for i, n in enumerate((5, 130, 33, 20))]))


def test_prefix_hits_and_a_pool_too_small(models: Any) -> None:
    path, reference = models("every other layer with experts")
    llm = engine(path, max_num_batched_tokens=40, max_model_len=128, kv_cache_memory_bytes=200_000)
    shared = prompt(7, 64)
    texts = [shared[: 16 * (i % 5)] + prompt(20 + i, 4 + 5 * (i % 9)) for i in range(20)]
    for _ in range(2):
        check_tokens(reference, llm, texts)
    assert llm.stats().prefix_hits_total
    assert llm.stats().preemptions_total or sum(group.evictions for group in llm.stats().groups)


def test_chunks_that_no_sequence_outgrows_are_full_attention(models: Any) -> None:
    path = str(models("every other layer with experts")[0])
    kinds = [group.kind for group in resolve(EngineArgs(model=path, max_model_len=64)).plan.groups]
    assert sorted(kinds) == ["chunked", "full"]
    assert [group.kind for group in resolve(EngineArgs(model=path, max_model_len=20)).plan.groups] == ["full"]


def test_fields_as_the_published_files_have_them(tmp_path: Path) -> None:
    path, reference = make_chunked_checkpoint(tmp_path, rope_parameters=LLAMA3)
    values = json.loads((path / "config.json").read_text())
    for name in ("rope_parameters", "layer_types", "moe_layers"):
        del values[name]
    scaling = {name: x for name, x in LLAMA3.items() if name != "rope_theta"}
    old = {"rope_theta": 500000.0, "rope_scaling": scaling, "no_rope_layers": [], "attn_temperature_tuning": 4}
    (path / "config.json").write_text(json.dumps(values | old | {"for_llm_compressor": False}))
    check(reference, run(engine(path), [prompt(1, 90)]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_experts_per_tok", 6),
        ("no_rope_layers", [1, 1]),
        ("no_rope_layers", [2] * 4),
        ("layer_types", ["sliding_attention"] * 4),
        ("layer_types", ["full_attention"]),
        ("moe_layers", 3),
        ("moe_layers", [0, 4]),
        ("layer_types", [[]] * 4),
        ("attention_chunk_size", 0),
        ("floor_scale", 0),
        ("num_key_value_heads", 3),
        ("hidden_act", "gelu"),
    ],
)
def test_refuses_what_it_would_not_compute(tmp_path: Path, field: str, value: Any) -> None:
    path, _ = make_chunked_checkpoint(tmp_path)
    values = json.loads((path / "config.json").read_text()) | {field: value}
    (path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=field):
        read_model_config(path)
