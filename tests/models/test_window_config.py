"""Reading the configurations of mixtures of experts and of models with windows, as they stand on the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagerunner.errors import ConfigError
from pagerunner.models.configs.reader import read_model_config

QWEN3_30B = {
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GEMMA3_1B = {
    "model_type": "gemma3_text",
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def read(tmp_path: Path, config: dict[str, Any], max_model_len: int | None = None, **overrides: Any) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(config | overrides))
    return read_model_config(tmp_path, max_model_len)


def windows(config: Any) -> list[int]:
    return [getattr(spec, "window", 0) for spec in config.layer_specs("bfloat16")]


def test_qwen3_moe(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN3_30B)
    assert (config.num_experts, config.active_experts, config.expert_size) == (128, 8, 768)
    assert config.normalise_weights and not config.dense_layers and windows(config) == [0] * 48
    dense = read(tmp_path, QWEN3_30B, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[1]).dense_layers
    assert dense == {0, 1, 2, 4}


def test_gemma3(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA3_1B)
    assert windows(config) == ([512] * 5 + [0]) * 4 + [512] * 2
    assert (config.rope.theta, config.local_rope.theta) == (1e6, 1e4)
    assert config.tie_word_embeddings and config.query_scalar == 256
    scaled = read(tmp_path, GEMMA3_1B, rope_scaling={"factor": 8.0, "rope_type": "linear"})
    assert (scaled.rope.factor, scaled.local_rope.factor) == (8.0, 1.0)


def test_a_window_as_long_as_the_longest_sequence_keeps_the_local_positions(tmp_path: Path) -> None:
    config = read(tmp_path, GEMMA3_1B, max_model_len=512)
    assert windows(config) == [0] * 26
    assert config.local_layers[:6] == (True,) * 5 + (False,)


def test_gpt_oss(tmp_path: Path) -> None:
    config = read(tmp_path, GPT_OSS_20B)
    assert windows(config) == [128, 0] * 12
    assert (config.num_experts, config.active_experts, config.activation_limit) == (32, 4, 7.0)
    assert (config.rope.kind, config.rope.factor, config.rope.truncate) == ("yarn", 32.0, False)


@pytest.mark.parametrize(
    ("config", "overrides", "words"),
    [
        (QWEN3_30B, {"num_experts_per_tok": 129}, ["num_experts_per_tok", "129", "128"]),
        (QWEN3_30B, {"num_experts": 0}, ["num_experts", "0"]),
        (QWEN3_30B, {"num_local_experts": 64}, ["num_local_experts", "64", "128"]),
        (QWEN3_30B, {"mlp_only_layers": "all"}, ["mlp_only_layers", "all"]),
        (QWEN3_30B, {"decoder_sparse_step": 0}, ["decoder_sparse_step", "0"]),
        (GEMMA3_1B, {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        (GEMMA3_1B, {"sliding_window": 0}, ["sliding_window", "0"]),
        (GEMMA3_1B, {"sliding_window_pattern": 0}, ["sliding_window_pattern", "0"]),
        (GEMMA3_1B, {"hidden_activation": "relu"}, ["hidden_activation", "relu"]),
        (GEMMA3_1B, {"rope_parameters": {"elsewhere": {}}}, ["rope_parameters", "elsewhere"]),
        (GEMMA3_1B, {"layer_types": ["full_attention"]}, ["layer_types", "26"]),
        (GPT_OSS_20B, {"layer_types": ["chunked_attention"] * 24}, ["layer_types", "chunked_attention"]),
        (GPT_OSS_20B, {"experts_per_token": 2}, ["experts_per_token", "2", "4"]),
        (GPT_OSS_20B, {"swiglu_limit": 0}, ["swiglu_limit", "0"]),
        (
            GPT_OSS_20B,
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            ["quantization_config", "bitsandbytes"],
        ),
    ],
)
def test_what_can_not_be_is_refused(tmp_path: Path, config: Any, overrides: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, config, **overrides)
    for word in words:
        assert word in str(caught.value)
