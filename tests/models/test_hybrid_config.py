"""Readers of the families with recurrent layers: what they declare, and what they refuse."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from pagerunner.errors import ConfigError
from pagerunner.memory.specs import FullKV, RecurrentState, WindowKV
from pagerunner.models.configs.reader import read_model_config

GATED_DELTA: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
}
BAMBA: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "attn_layer_indices": [1],
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
}


def read(directory: Path, family: str, base: dict[str, Any], **overrides: Any) -> Any:
    file = directory / "config.json"
    file.write_text(json.dumps({"model_type": family} | base | overrides), encoding="utf-8")
    return read_model_config(file)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_every_fourth_layer_is_attention_and_the_others_hold_one_state(tmp_path: Path, family: str) -> None:
    config = read(tmp_path, family, GATED_DELTA)
    state = RecurrentState(((3, 2 * 2 * 8 + 4 * 16), (4, 8, 16)), ("bfloat16", "bfloat16"), entry=((96,), (4,), (4,)))
    assert config.layer_specs("bfloat16") == (state, state, state, FullKV(2, 32, "bfloat16"))
    assert config.rotary_dim == 8


def test_the_state_is_kept_in_the_dtype_that_the_config_names(tmp_path: Path) -> None:
    config = read(tmp_path, "qwen3_5_text", GATED_DELTA, mamba_ssm_dtype="float32")
    assert config.layer_specs("bfloat16")[0].dtypes == ("bfloat16", "float32")


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_quantised_keys_and_values_leave_the_states_alone(tmp_path: Path, kv_dtype: Any) -> None:
    specs = read(tmp_path, "qwen3_5_text", GATED_DELTA).layer_specs(kv_dtype)
    assert specs[0].dtypes == ("bfloat16", "bfloat16")
    assert specs[3].dtype == kv_dtype


def test_bamba_names_its_attention_layers(tmp_path: Path) -> None:
    config = read(tmp_path, "bamba", BAMBA, time_step_limit=[0.0, math.inf], partial_rotary_factor=0.5)
    state = RecurrentState(((3, 128 + 2 * 16), (8, 16, 16)), ("bfloat16", "bfloat16"), entry=((160,), (8,)))
    assert config.layer_specs("bfloat16") == (state, FullKV(2, 16, "bfloat16"), state)
    assert config.rotary_dim == 8


def test_the_layers_with_experts(tmp_path: Path) -> None:
    assert read(tmp_path, "qwen3_next", GATED_DELTA, mlp_only_layers=[2]).expert_layers == (True, True, False, True)
    assert read(tmp_path, "qwen3_next", GATED_DELTA, decoder_sparse_step=2).expert_layers == (False, True, False, True)
    assert not any(read(tmp_path, "qwen3_next", GATED_DELTA, num_experts=0).expert_layers)


def request_bytes(config: Any, tokens: int) -> int:
    """What a request of `tokens` tokens holds in pages of 16."""
    specs = config.layer_specs("bfloat16")
    return sum(spec.page_bytes(16) * (1 if spec.kind == "recurrent" else -(-tokens // 16)) for spec in specs)


PUBLISHED: dict[str, Any] = {
    "attention_bias": False,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "dtype": "bfloat16",
}


def test_qwen3_next_80b_holds_40_mib_for_100_tokens(tmp_path: Path) -> None:
    own = {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2}
    own |= {"linear_num_value_heads": 32, "vocab_size": 151936, "partial_rotary_factor": 0.25, "rope_theta": 1e7}
    config = read(tmp_path, "qwen3_next", PUBLISHED, **own, rope_scaling=None, num_experts=512, mlp_only_layers=[])
    assert 40.0 < request_bytes(config, 100) / 2**20 < 41.0


def test_qwen3_5_27b_holds_153_mib_for_100_tokens(tmp_path: Path) -> None:
    text = {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4}
    text |= {"linear_num_value_heads": 48, "vocab_size": 248320, "intermediate_size": 17408, "mlp_only_layers": []}
    text |= {"mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    rope = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 10000000}
    text |= {"rope_parameters": rope | {"partial_rotary_factor": 0.25}, "model_type": "qwen3_5_text"}
    config = read(tmp_path, "qwen3_5", {"text_config": PUBLISHED | text, "vision_config": {}, "video_token_id": 1})
    assert 150 < request_bytes(config, 100) / 2**20 < 156


WINDOWED: dict[str, Any] = {
    "layer_types": ["linear_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "use_sliding_window": True,
    "sliding_window": 48,
}


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_layers_may_have_windows(tmp_path: Path, family: str) -> None:
    specs = read(tmp_path, family, GATED_DELTA, **WINDOWED).layer_specs("bfloat16")
    windowed = WindowKV(2, 32, "bfloat16", window=48)
    assert specs[0].kind == "recurrent"
    assert specs[1:] == (windowed, FullKV(2, 32, "bfloat16"), windowed)


def test_a_window_that_no_sequence_outgrows_is_none(tmp_path: Path) -> None:
    specs = read(tmp_path, "qwen3_5_text", GATED_DELTA, **WINDOWED | {"sliding_window": 2048}).layer_specs("bfloat16")
    assert [spec.kind for spec in specs] == ["recurrent", "full", "full", "full"]


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("qwen3_next", {"linear_num_value_heads": 3}, "linear_num_value_heads is 3", "linear_num_key_heads=2"),
    ("qwen3_next", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim", "at least 2"),
    ("qwen3_next", {"linear_key_head_dim": 0}, "linear_key_head_dim", "at least 1"),
    ("qwen3_next", {"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok is 5", "num_experts=4"),
    ("qwen3_next", {"mlp_only_layers": "all"}, "mlp_only_layers", "list of layer numbers"),
    ("qwen3_next", {"layer_types": ["linear_attention"]}, "layer_types", "list of 4 names"),
    ("qwen3_next", {"layer_types": ["chunked_attention"] * 4}, "chunked_attention", "not supported"),
    ("qwen3_next", {"layer_types": ["sliding_attention"] * 4}, "sliding_attention", "use_sliding_window is not true"),
    (
        "qwen3_5_text",
        {"use_sliding_window": True, "sliding_window": 48},
        "use_sliding_window",
        "no layer of layer_types",
    ),
    ("qwen3_5_text", WINDOWED | {"sliding_window": None}, "sliding_window is missing", "sliding_attention"),
    ("qwen3_5_text", WINDOWED | {"sliding_window": 0}, "sliding_window", "at least 1, got 0"),
    ("qwen3_5_text", {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5", "at most 1"),
    ("qwen3_5_text", {"head_dim": 20}, "head_dim is 20", "not even"),
    ("qwen3_5_text", {"mamba_ssm_dtype": "float8"}, "mamba_ssm_dtype", "float32"),
    ("qwen3_5_text", {"mamba_ssm_dtype": []}, "mamba_ssm_dtype", "float32"),
    ("qwen3_5_text", {"layer_types": [{}] * 4}, "layer_types holds {}", "full_attention"),
    ("qwen3_5_text", {"dtype": ["bfloat16"]}, "dtype is ['bfloat16']", "float32"),
    ("qwen3_next", {"mlp_only_layers": [4]}, "mlp_only_layers", "from 0 to 3"),
    ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate", "gated attention"),
    ("qwen3_5_text", {"output_gate_type": "relu"}, "output_gate_type", "swish"),
    ("qwen3_5_moe_text", {"mlp_only_layers": [1]}, "mlp_only_layers", "must be empty"),
    ("qwen3_5_text", {"num_key_value_heads": 3}, "num_attention_heads is 4", "num_key_value_heads=3"),
    ("qwen3_5_text", {"num_experts": 4}, "num_experts", "does not know"),
    ("qwen3_5_text", {"hidden_act": "gelu"}, "hidden_act", "silu"),
    ("bamba", {"mamba_n_heads": 7}, "mamba_n_heads is 7", "128"),
    ("bamba", {"mamba_d_head": 8}, "mamba_d_head=8", "128"),
    ("bamba", {"mamba_n_groups": 3}, "mamba_n_heads is 8", "mamba_n_groups=3"),
    ("bamba", {"time_step_limit": [0.001, 0.1]}, "time_step_limit", "infinity"),
    ("bamba", {"attn_layer_indices": [3]}, "attn_layer_indices", "from 0 to 2"),
    ("bamba", {"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25", "0.5"),
]


@pytest.mark.parametrize(("family", "overrides", "what", "why"), REFUSED)
def test_what_cannot_be_run_is_refused_by_name(
    tmp_path: Path, family: str, overrides: dict[str, Any], what: str, why: str
) -> None:
    base = BAMBA if family == "bamba" else GATED_DELTA
    with pytest.raises(ConfigError) as error:
        read(tmp_path, family, base, **overrides)
    assert what in str(error.value)
    assert why in str(error.value)


def test_the_text_part_of_a_model_with_vision(tmp_path: Path) -> None:
    text = GATED_DELTA | {"model_type": "qwen3_5_text", "tie_word_embeddings": False}
    outer = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 2}, "image_token_id": 7}
    outer |= {"eos_token_id": 3, "tie_word_embeddings": True}
    config = read(tmp_path, "qwen3_5", outer)
    assert (config.family, config.eos_token_ids, config.tie_word_embeddings) == ("qwen3_5", (3,), True)
    assert config.layer_specs("bfloat16")[3] == FullKV(2, 32, "bfloat16")


@pytest.mark.parametrize(
    ("overrides", "what"),
    [({"text_config": None}, "text_config"), ({"text_config": GATED_DELTA}, "qwen3_5_text"), ({"twist": 1}, "twist")],
)
def test_a_model_with_vision_whose_text_part_is_unclear(tmp_path: Path, overrides: dict[str, Any], what: str) -> None:
    outer = {"text_config": GATED_DELTA | {"model_type": "qwen3_5_text"}} | overrides
    with pytest.raises(ConfigError, match=what):
        read(tmp_path, "qwen3_5", outer)
