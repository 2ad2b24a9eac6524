"""A corpus of published config.json files: each is read as its maker wrote it, and its weights take what the maker's do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagerunner.models.checkpoint.loader import build_model, weights_bytes
from pagerunner.models.configs.reader import read_model_config

CORPUS = Path(__file__).parent / "published"
# Bytes of the text model's weights in bfloat16: the total_size of the published index. Where that counts more (a vision
# part, layers that guess several tokens, a tied head that is stored twice), it is less that part, as the model card counts it.
BYTES = {
    "Qwen/Qwen2.5-0.5B": 988_065_536,
    "Qwen/Qwen2.5-7B-Instruct": 15_231_233_024,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": 15_231_233_024,
    "Qwen/Qwen3-0.6B": 1_192_099_840,
    "Qwen/Qwen3-8B": 16_381_470_720,
    "Qwen/Qwen3-30B-A3B": 61_064_245_248,
    "meta-llama/Llama-3.1-8B-Instruct": 16_060_522_496,
    "meta-llama/Llama-3.1-70B-Instruct": 141_107_412_992,
    "meta-llama/Llama-3.2-1B-Instruct": 2_471_628_800,
    "mistralai/Mistral-7B-Instruct-v0.3": 14_496_047_104,
    "mistralai/Mistral-Nemo-Instruct-2407": 24_495_564_800,
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": 47_144_806_400,
    "deepseek-ai/DeepSeek-V2-Lite-Chat": 31_412_968_448,
    "google/gemma-3-1b-it": 1_999_771_904,
    "google/gemma-3-4b-it": 7_760_526_336,
    "google/gemma-3-12b-it": 23_532_068_352,
    "google/gemma-3-27b-it": 54_018_692_608,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 159_350_000_000,
    "Qwen/Qwen3.6-27B": 53_800_000_000,
    "ibm-ai-platform/Bamba-9B-v2": 19_560_000_000,
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": 215_540_000_000,
}
QUANTISED = {
    "openai/gpt-oss-20b": "mxfp4",
    "openai/gpt-oss-120b": "mxfp4",
    "Qwen/Qwen2.5-7B-Instruct-AWQ": "awq",
    "deepseek-ai/DeepSeek-V3": "fp8",
}


def file_of(repository: str) -> Path:
    return CORPUS / f"{repository.replace('/', '--')}.json"


def test_every_file_is_checked() -> None:
    assert {file_of(name) for name in (*BYTES, *QUANTISED)} == set(CORPUS.glob("*.json"))


@pytest.mark.parametrize("repository", BYTES)
def test_published_configs_are_read_and_their_weights_take_the_published_bytes(repository: str) -> None:
    config = read_model_config(file_of(repository))
    assert config.dtype == "bfloat16"
    assert weights_bytes(build_model(config, "bfloat16")) == pytest.approx(BYTES[repository], rel=0.01)
    assert len(config.layer_specs("bfloat16")) == config.num_layers


@pytest.mark.parametrize("repository", QUANTISED)
def test_quantised_ones_have_a_format(repository: str) -> None:
    config = read_model_config(file_of(repository))
    assert config.format is not None and config.format.writer == QUANTISED[repository]


@pytest.mark.parametrize("size", ["1b", "4b", "12b", "27b"])
def test_what_gemma_leaves_out_is_what_its_config_class_says(size: str) -> None:
    transformers = pytest.importorskip("transformers")
    path = file_of(f"google/gemma-3-{size}-it")
    values = json.loads(path.read_text())
    kind = transformers.Gemma3Config if "text_config" in values else transformers.Gemma3TextConfig
    want: Any = kind.from_dict(values).get_text_config()
    found: Any = read_model_config(path)
    assert (found.vocab_size, found.hidden_size, found.num_layers) == (
        want.vocab_size,
        want.hidden_size,
        want.num_hidden_layers,
    )
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (
        want.num_attention_heads,
        want.num_key_value_heads,
        want.head_dim,
    )
    assert (found.max_position_embeddings, found.window) == (want.max_position_embeddings, want.sliding_window)
    assert (found.query_scalar, found.rms_norm_eps) == (want.query_pre_attn_scalar, want.rms_norm_eps)
    assert found.tie_word_embeddings is want.tie_word_embeddings
    assert found.local_layers == tuple(kind == "sliding_attention" for kind in want.layer_types)
    ropes = want.rope_parameters
    full, local = ropes["full_attention"], ropes["sliding_attention"]
    assert (found.rope.kind, found.rope.theta) == (full["rope_type"], full["rope_theta"])
    assert found.rope.factor == full.get("factor", 1.0)
    assert (found.local_rope.kind, found.local_rope.theta) == ("default", local["rope_theta"])
    assert set(found.eos_token_ids) == {1, 106}
