"""Configurations of families that mix windows with full attention: Gemma-3 (text) and gpt-oss. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagerunner.models.configs.base import RopeConfig
from pagerunner.models.configs.decoder import DecoderConfig, read_decoder, read_layer_types, read_rope, read_window
from pagerunner.models.configs.fields import Fields
from pagerunner.models.configs.moe import ignore_router_training, read_expert_counts


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(DecoderConfig):
    """Gemma-3's decoder. `local_layers` have `local_rope`, the others `rope`; scores are scaled by
    `query_scalar ** -0.5`; a soft cap of 0 is none.
    """

    local_rope: RopeConfig
    local_layers: tuple[bool, ...]
    query_scalar: float
    attention_softcap: float
    logits_softcap: float

    @property
    def attention_scores(self) -> frozenset[str]:
        """A soft cap, if it is not 0."""
        return frozenset({"softcap"} if self.attention_softcap else ())


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(DecoderConfig):
    """gpt-oss: every feed-forward is a mixture of `num_experts` experts of `intermediate_size` inner features, of which
    a token runs `active_experts`; the inputs of their activation are clamped to `activation_limit`.
    """

    num_experts: int
    active_experts: int
    activation_limit: float

    @property
    def attention_scores(self) -> frozenset[str]:
        """A sink per head."""
        return frozenset({"sinks"})


# What the published files leave out: the defaults of the reference implementation's config class.
GEMMA3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2_304,
    "intermediate_size": 9_216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 4_096,
    "bos_token_id": 2,
    "eos_token_id": 1,
}


def read_gemma3_text(fields: Fields, common: dict[str, Any]) -> Gemma3Config:
    """Gemma-3's text model."""
    if fields.flag("use_bidirectional_attention", False):
        raise fields.error("use_bidirectional_attention", "is true; only causal attention is supported.")
    saved = fields.integer("_sliding_window_pattern", 6)
    pattern = fields.integer("sliding_window_pattern", saved)
    fields.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    fields.take("cache_implementation")
    rope, local_rope = _read_gemma_ropes(fields, common["max_position_embeddings"])
    bias = fields.flag("attention_bias", False)
    layers = common["num_layers"]
    windowed = read_layer_types(fields, layers, tuple(bool((i + 1) % pattern) for i in range(layers)))
    own = {
        **read_window(fields, fields.take("sliding_window", 4096), windowed),
        "local_layers": windowed,
        "local_rope": local_rope,
        "query_scalar": fields.number("query_pre_attn_scalar", 256, above=0),
        "attention_softcap": fields.number("attn_logit_softcapping", 0.0, above=0),
        "logits_softcap": fields.number("final_logit_softcapping", 0.0, above=0),
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": True,
    }
    return read_decoder(fields, common, own, 256, Gemma3Config, rope=rope, tied=True)


def read_gpt_oss(fields: Fields, common: dict[str, Any]) -> GptOssConfig:
    """gpt-oss."""
    other = fields.take("experts_per_token")
    experts, active = read_expert_counts(fields, 128)
    if other not in (None, active):
        raise fields.error("experts_per_token", f"is {other!r}, beside num_experts_per_tok={active}.")
    fields.take("initial_context_length")  # what rope's original_max_position_embeddings says
    bias = fields.flag("attention_bias", True)
    layers = common["num_layers"]
    windowed = read_layer_types(fields, layers, tuple(i % 2 == 0 for i in range(layers)))
    own = {
        **read_window(fields, fields.take("sliding_window", 128), windowed),
        "num_experts": experts,
        "active_experts": active,
        "activation_limit": fields.number("swiglu_limit", 7.0, above=0),
        "qkv_bias": bias,
        "o_bias": bias,
    }
    ignore_router_training(fields)
    return read_decoder(fields, common, own, 64, GptOssConfig)


def _read_gemma_ropes(fields: Fields, length: int) -> tuple[RopeConfig, RopeConfig]:
    """Of full and of windowed layers: `rope_parameters` by layer type (transformers v5), or the older flat fields."""
    theta = fields.number("rope_theta", 1_000_000.0, above=0)
    local_theta = fields.number("rope_local_base_freq", 10_000.0, above=0)
    by_type = fields.take("rope_parameters")
    scaling = fields.mapping("rope_scaling")
    if by_type is None:
        by_type = {"full_attention": {"rope_type": "default", **(scaling or {})}}
    elif scaling is not None:
        raise fields.error("rope_scaling", f"is {scaling!r}, beside rope_parameters.")
    if not isinstance(by_type, dict) or set(by_type) - {"full_attention", "sliding_attention"}:
        raise fields.error("rope_parameters", f"must hold full_attention and sliding_attention, got {by_type!r}.")

    def read(kind: str, base: float) -> RopeConfig:
        given = {"rope_parameters": by_type.get(kind), "rope_theta": base}
        return read_rope(Fields(given, f"{fields.where}: {kind}", path=fields.path), length)

    return read("full_attention", theta), read("sliding_attention", local_theta)
