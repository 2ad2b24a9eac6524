"""Configurations of the dense decoder families: Llama, Mistral, Qwen2 and Qwen3. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeVar

from pagerunner.config import KVDtype
from pagerunner.memory.specs import FullKV, Spec, WindowKV
from pagerunner.models.configs.base import HeadsConfig, RopeConfig
from pagerunner.models.configs.fields import Fields


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(HeadsConfig):
    """A decoder of equal layers: grouped-query attention with rotary positions, and a gated SiLU feed-forward.

    `qkv_bias`, `o_bias` and `mlp_bias` say which projections have one; `qk_norm` is a norm of every query and key head.
    Layers whose place in `windowed` is true see only the last `window` tokens; none where it is empty.
    """

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window: int = 0
    windowed: tuple[bool, ...] = ()

    def layer_specs(self, kv_dtype: KVDtype) -> tuple[Spec, ...]:
        """A window or full attention in every layer."""
        full = FullKV(self.num_kv_heads, self.head_dim, kv_dtype)
        if not any(self.windowed):
            return (full,) * self.num_layers
        windowed = WindowKV(self.num_kv_heads, self.head_dim, kv_dtype, window=self.window)
        return tuple(windowed if short else full for short in self.windowed)


ConfigT = TypeVar("ConfigT", bound=DecoderConfig)


def read_llama(fields: Fields, common: dict[str, Any]) -> DecoderConfig:
    """Llama 2 and 3.x."""
    bias = fields.flag("attention_bias", False)
    mlp_bias = fields.flag("mlp_bias", False)
    return read_decoder(fields, common, {"qkv_bias": bias, "o_bias": bias, "mlp_bias": mlp_bias})


def read_mistral(fields: Fields, common: dict[str, Any]) -> DecoderConfig:
    """Mistral: Llama's computation, with a sliding window in every layer or in none."""
    # The reference implementation reads an absent field as a window of 4096.
    window = fields.take("sliding_window", 4096)
    windowed = window is not None
    return read_decoder(fields, common, read_window(fields, window, (windowed,) * common["num_layers"]))


def read_mistral3(fields: Fields, common: dict[str, Any]) -> DecoderConfig:
    """The text model of Mistral-Small-3.1: Mistral's, whose window is none where the field is absent."""
    window = fields.take("sliding_window")
    return read_decoder(fields, common, read_window(fields, window, (window is not None,) * common["num_layers"]))


def read_qwen2(fields: Fields, common: dict[str, Any]) -> DecoderConfig:
    """Qwen2 and Qwen2.5: biases on the query, key and value projections only."""
    return read_decoder(fields, common, {**_read_qwen_window(fields, common), "qkv_bias": True})


def read_qwen3(fields: Fields, common: dict[str, Any]) -> DecoderConfig:
    """Qwen3, dense: norms of query and key heads, and heads whose size is not hidden_size / heads."""
    bias = fields.flag("attention_bias", False)
    own = {**_read_qwen_window(fields, common), "qkv_bias": bias, "o_bias": bias, "qk_norm": True}
    return read_decoder(fields, common, own, default_head_dim=128)


def read_window(fields: Fields, window: Any, windowed: tuple[bool, ...]) -> dict[str, Any]:
    """`window` and `windowed` of a DecoderConfig. A window that no sequence outgrows is none."""
    if not any(windowed):
        return {}
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise fields.error("sliding_window", f"must be null or a whole number of at least 1, got {window!r}.")
    return {"window": window, "windowed": windowed} if window < fields.length else {}


def read_layer_types(fields: Fields, layers: int, default: tuple[bool, ...]) -> tuple[bool, ...]:
    """Which layers have a window, from layer_types; `default` where that is absent."""
    types = fields.names("layer_types", ("sliding_attention", "full_attention"), layers)
    return default if types is None else tuple(kind == "sliding_attention" for kind in types)


def _read_qwen_window(fields: Fields, common: dict[str, Any]) -> dict[str, Any]:
    layers = common["num_layers"]
    used = fields.flag("use_sliding_window", False)
    window = fields.take("sliding_window", 4096)
    first = fields.integer("max_window_layers", layers, least=0)
    windowed = read_layer_types(fields, layers, tuple(used and i >= first for i in range(layers)))
    if any(windowed) and not used:
        raise fields.error("layer_types", "holds 'sliding_attention', but use_sliding_window is not true.")
    return read_window(fields, window, windowed)


def read_decoder(
    fields: Fields,
    common: dict[str, Any],
    own: dict[str, Any],
    default_head_dim: int = 0,
    kind: type[ConfigT] = DecoderConfig,  # type: ignore[assignment]
    *,
    rope: RopeConfig | None = None,
    tied: bool = False,
) -> ConfigT:
    """Read what every decoder has into a `kind`, beside the fields `common` and `own` that are known already.

    `rope` is given where the family reads it by itself, and `tied` is what an absent tie_word_embeddings means.
    """
    shared = read_shared(fields, fields.integer("hidden_size"), default_head_dim, tied=tied)
    if shared["head_dim"] % 2:
        raise fields.error("head_dim", f"is {shared['head_dim']}; rotary positions need an even number.")
    return kind(
        **common,
        **own,
        **shared,
        intermediate_size=fields.integer("intermediate_size"),
        rope=rope or read_rope(fields, common["max_position_embeddings"]),
    )


def read_shared(fields: Fields, hidden: int, default_head_dim: int, *, tied: bool = False) -> dict[str, Any]:
    """What every decoder with heads says: sizes of the heads, norms, and whether the embedding is the output's weights.

    `default_head_dim` is a family's own, 0 where it is the heads' share of `hidden`; `tied` is tie_word_embeddings' default.
    """
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    fields.check_divided("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    head_dim = fields.integer("head_dim", default_head_dim)
    if not head_dim:
        fields.check_divided("hidden_size", hidden, "num_attention_heads", heads)
        head_dim = hidden // heads
    fields.choice("hidden_act", ("silu", "swish"), "silu")
    return {
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6, above=0),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", tied),
    }


def read_rope(
    fields: Fields, length: int, *, partial_default: float | None = None, ignored: tuple[str, ...] = ()
) -> RopeConfig:
    """Read `rope_parameters` (transformers v5), or `rope_theta` with `rope_scaling` (before it).

    Families that rotate a part of each head give the share where none is written, `partial_default`; others must rotate
    all of it. `ignored` are fields of the object that change nothing for text.
    """
    partial = fields.number("partial_rotary_factor", 1.0 if partial_default is None else partial_default)
    given, name = fields.mapping("rope_parameters"), "rope_parameters"
    scaling = fields.mapping("rope_scaling")
    if given is None:
        given, name = scaling, "rope_scaling"
    elif scaling is not None and scaling != given:
        raise fields.error("rope_scaling", f"is {scaling!r}, beside a different rope_parameters {given!r}.")
    theta = fields.number("rope_theta", 10000.0, above=0)
    rope = fields.inside(name, given or {})
    theta = rope.number("rope_theta", theta, above=0)
    partial = rope.number("partial_rotary_factor", partial)
    if partial != 1.0 and partial_default is None:
        raise fields.error("partial_rotary_factor", f"is {partial:g}; only 1 is supported in this family.")
    if not 0 < partial <= 1:
        raise fields.error("partial_rotary_factor", f"is {partial:g}; it must be above 0 and at most 1.")
    old_kind = rope.take("type")
    kind = rope.choice("rope_type", ("default", "linear", "llama3", "yarn"), old_kind or "default")
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise rope.error("type", f"is {kind!r}, which is not supported; it must be default, linear, llama3 or yarn.")
    where = fields if fields.holds("original_max_position_embeddings") else rope
    original = where.integer("original_max_position_embeddings", length)
    rope.skip("original_max_position_embeddings")
    values: dict[str, Any] = {}
    if kind == "default":
        if rope.number("factor", 1.0) != 1.0:
            raise rope.error("factor", "has no meaning with rope_type default.")
    elif kind == "linear":
        values["factor"] = rope.number("factor", above=0)
    elif kind == "llama3":
        values["factor"] = rope.number("factor", above=0)
        values["low_freq_factor"] = rope.number("low_freq_factor", above=0)
        values["high_freq_factor"] = rope.number("high_freq_factor", above=0)
        if values["high_freq_factor"] < values["low_freq_factor"]:
            raise rope.error(
                "high_freq_factor",
                f"is {values['high_freq_factor']:g}, less than low_freq_factor={values['low_freq_factor']:g}.",
            )
    else:
        values.update(_read_yarn(rope, length / original))
    rope.finish(ignored)
    return RopeConfig(kind=kind, theta=theta, partial=partial, original_length=original, **values)  # type: ignore[arg-type]


def _read_yarn(rope: Fields, implied_factor: float) -> dict[str, Any]:
    factor = rope.number("factor", implied_factor, above=0)
    scale = rope.number("attention_factor", 0.0, above=0)
    mscale, mscale_all = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if not scale:
        scale = magnitude(mscale) / magnitude(mscale_all) if mscale and mscale_all else magnitude(1.0)
    beta_fast = rope.number("beta_fast", 32.0, above=0)
    beta_slow = rope.number("beta_slow", 1.0, above=0)
    truncate = rope.flag("truncate", True)
    return {
        "factor": factor,
        "scale": scale,
        "beta_fast": beta_fast,
        "beta_slow": beta_slow,
        "truncate": truncate,
        "softmax_scale": magnitude(mscale_all) ** 2 if mscale_all else 1.0,
    }
