"""Configurations of families that mix recurrent layers with attention: Qwen3-Next, Qwen3.5 and Bamba. Torch-free."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from pagerunner.config import DTYPE_BYTES, KVDtype
from pagerunner.errors import ConfigError
from pagerunner.memory.specs import FullKV, RecurrentState, Spec, WindowKV
from pagerunner.models.configs.base import HeadsConfig
from pagerunner.models.configs.decoder import read_rope, read_shared, read_window
from pagerunner.models.configs.fields import Fields

LayerKind = Literal["full_attention", "sliding_attention", "linear_attention"]
# Names that transformers' layer lists have had.
_KINDS: dict[str, LayerKind] = {
    "full_attention": "full_attention",
    "attention": "full_attention",
    "sliding_attention": "sliding_attention",
    "linear_attention": "linear_attention",
    "mamba": "linear_attention",
}


@dataclass(frozen=True, kw_only=True)
class HybridConfig(HeadsConfig):
    """A decoder whose layers are attention or recurrent, by `layer_kinds`, each with a feed-forward after it.

    Sliding attention sees the last `window` tokens, its own among them. `state_shapes` are those of a recurrent layer: the
    convolution's last inputs, and the recurrence's state per head. `recurrence_dtype` is the dtype of the recurrence's
    state (None: that of keys and values). The convolution's inputs have the dtype of keys and values.
    """

    attention_bias: bool
    layer_kinds: tuple[LayerKind, ...]
    window: int = 0
    recurrence_dtype: str | None = None

    @property
    def rotary_dim(self) -> int:
        """Elements of a head, from its start, that are rotated by position."""
        return int(self.head_dim * self.rope.partial)

    @property
    @abstractmethod
    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(taps - 1, channels) of the convolution, then the recurrence's state."""

    @property
    @abstractmethod
    def entry(self) -> tuple[tuple[int, ...], ...]:
        """What a recurrent layer takes of a token: the convolution's input, then numbers for each head."""

    def layer_specs(self, kv_dtype: KVDtype) -> tuple[Spec, ...]:
        """Keys and values of every token for attention layers, one state for recurrent ones.

        Quantised keys and values leave the states in the checkpoint's dtype: they are read and written at every token.
        """
        kept = self.dtype if kv_dtype not in DTYPE_BYTES else kv_dtype
        specs: dict[LayerKind, Spec] = {
            "full_attention": FullKV(self.num_kv_heads, self.head_dim, kv_dtype),
            "linear_attention": RecurrentState(
                self.state_shapes, (kept, self.recurrence_dtype or kept), entry=self.entry
            ),
        }
        if "sliding_attention" in self.layer_kinds:
            specs["sliding_attention"] = WindowKV(self.num_kv_heads, self.head_dim, kv_dtype, window=self.window)
        return tuple(specs[kind] for kind in self.layer_kinds)


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of gated feed-forwards: `per_token` of `count` experts, and one shared by all tokens behind a gate.

    With `normalise` the chosen experts' weights sum to one.
    """

    count: int
    per_token: int
    intermediate_size: int
    shared_intermediate_size: int
    normalise: bool


@dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig(HybridConfig):
    """Qwen3-Next and Qwen3.5: gated delta rule layers, and attention with gated outputs and normed heads.

    `expert_layers` says of each layer whether its feed-forward is `experts`. `mtp_layers` are those of the multi-token prediction module,
    which has embeddings of its own with `mtp_embeddings`.
    """

    conv_taps: int
    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    experts: ExpertsConfig | None
    expert_layers: tuple[bool, ...]
    mtp_layers: int = 1
    mtp_embeddings: bool = False
    divided = {**HybridConfig.divided, "key_heads": "key_heads"}

    def of_rank(self, own: Mapping[tuple[str, int], int]) -> Self:
        """See ModelConfig. Each key head has its value heads with it, and each rank a part of every expert."""
        found, experts = super().of_rank(own), self.experts
        if experts is not None:
            inner, shared = (("inner", size) for size in (experts.intermediate_size, experts.shared_intermediate_size))
            inner_size, shared_size = own.get(inner, inner[1]), own.get(shared, shared[1])
            experts = replace(experts, intermediate_size=inner_size, shared_intermediate_size=shared_size)
        return replace(found, value_heads=self.value_heads // self.key_heads * found.key_heads, experts=experts)

    def mtp(self) -> Self:
        """See ModelConfig. Its layer attends to everything."""
        self._one_mtp_layer("mtp_num_hidden_layers", self.mtp_layers)
        if self.mtp_embeddings:
            raise ConfigError("method mtp: config.json says mtp_use_dedicated_embeddings; false is supported.")
        experts = (self.experts is not None,)
        return replace(self, num_layers=1, layer_kinds=("full_attention",), expert_layers=experts, window=0)

    @property
    def conv_channels(self) -> int:
        """Queries, keys and values side by side."""
        return 2 * self.key_heads * self.key_head_dim + self.value_heads * self.value_head_dim

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See HybridConfig."""
        return (self.conv_taps - 1, self.conv_channels), (self.value_heads, self.key_head_dim, self.value_head_dim)

    @property
    def entry(self) -> tuple[tuple[int, ...], ...]:
        """See HybridConfig: rates and decays."""
        return (self.conv_channels,), (self.value_heads,), (self.value_heads,)


@dataclass(frozen=True, kw_only=True)
class BambaConfig(HybridConfig):
    """Bamba: Mamba-2 layers, and Llama's attention with half of each head rotated."""

    conv_taps: int
    conv_bias: bool
    proj_bias: bool
    mlp_bias: bool
    mamba_heads: int
    mamba_head_dim: int
    mamba_groups: int
    state_size: int
    divided = {**HybridConfig.divided, "mamba_heads": "mamba_heads", "mamba_groups": "mamba_groups"}

    @property
    def inner_size(self) -> int:
        """Features of all heads."""
        return self.mamba_heads * self.mamba_head_dim

    @property
    def conv_channels(self) -> int:
        """Inputs, then B and C of every group."""
        return self.inner_size + 2 * self.mamba_groups * self.state_size

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See HybridConfig."""
        return (self.conv_taps - 1, self.conv_channels), (self.mamba_heads, self.mamba_head_dim, self.state_size)

    @property
    def entry(self) -> tuple[tuple[int, ...], ...]:
        """See HybridConfig: step sizes."""
        return (self.conv_channels,), (self.mamba_heads,)


def read_qwen3_next(fields: Fields, common: dict[str, Any]) -> GatedDeltaConfig:
    """Qwen3-Next: every layer a mixture of experts except those that the config names."""
    layers = common["num_layers"]
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.layers("mlp_only_layers", layers) or []
    count = fields.integer("num_experts", 512, least=0)
    used = tuple(count > 0 and index not in dense and (index + 1) % step == 0 for index in range(layers))
    normalise = fields.flag("norm_topk_prob", True)
    inner = fields.integer("intermediate_size", 5632)
    return _read_gated_delta(fields, common, inner, _read_experts(fields, count, normalise, 10), used)


def read_qwen3_5(fields: Fields, common: dict[str, Any]) -> GatedDeltaConfig:
    """Qwen3.5, dense."""
    inner = fields.integer("intermediate_size")
    return _read_gated_delta(fields, common, inner, None, (False,) * common["num_layers"])


def read_qwen3_5_moe(fields: Fields, common: dict[str, Any]) -> GatedDeltaConfig:
    """Qwen3.5 with experts in every layer."""
    fields.integer("intermediate_size", 1)  # older files carry a dense size that no layer has
    experts = _read_experts(fields, fields.integer("num_experts", 256), True, 8)
    return _read_gated_delta(fields, common, 1, experts, (True,) * common["num_layers"])


def _read_experts(fields: Fields, count: int, normalise: bool, default_per_token: int) -> ExpertsConfig | None:
    per_token = fields.integer("num_experts_per_tok", default_per_token)
    inner = fields.integer("moe_intermediate_size", 512)
    shared = fields.integer("shared_expert_intermediate_size", 512)
    fields.skip("output_router_logits", "router_aux_loss_coef")  # training only
    if not count:
        return None
    if per_token > count:
        raise fields.error("num_experts_per_tok", f"is {per_token}, more than num_experts={count}.")
    return ExpertsConfig(
        count=count, per_token=per_token, intermediate_size=inner, shared_intermediate_size=shared, normalise=normalise
    )


def _read_gated_delta(
    fields: Fields, common: dict[str, Any], inner: int, experts: ExpertsConfig | None, expert_layers: tuple[bool, ...]
) -> GatedDeltaConfig:
    key_heads = fields.integer("linear_num_key_heads", 16)
    value_heads = fields.integer("linear_num_value_heads", 32)
    fields.check_divided("linear_num_value_heads", value_heads, "linear_num_key_heads", key_heads)
    dtype = fields.choice("mamba_ssm_dtype", tuple(DTYPE_BYTES), "") or None
    mtp_layers = fields.integer(
        "mtp_num_hidden_layers", fields.integer("num_nextn_predict_layers", 1, least=0), least=0
    )
    dedicated = fields.flag("mtp_use_dedicated_embeddings", False)
    if dense := fields.take("mlp_only_layers"):
        raise fields.error("mlp_only_layers", f"is {dense!r}; in this family it must be empty.")
    fields.choice("output_gate_type", ("swish", "silu"), "swish")
    if not fields.flag("attn_output_gate", True):
        raise fields.error("attn_output_gate", "is false; only gated attention is supported in this family.")
    return GatedDeltaConfig(
        **common,
        **_read_attention(fields, common, partial=0.25, ignored=("mrope_section", "mrope_interleaved")),
        intermediate_size=inner,
        **_read_kinds(fields, common["num_layers"]),
        recurrence_dtype=dtype,
        conv_taps=fields.integer("linear_conv_kernel_dim", 4, least=2),
        key_heads=key_heads,
        value_heads=value_heads,
        key_head_dim=fields.integer("linear_key_head_dim", 128),
        value_head_dim=fields.integer("linear_value_head_dim", 128),
        experts=experts,
        expert_layers=expert_layers,
        mtp_layers=mtp_layers,
        mtp_embeddings=dedicated,
    )


def read_bamba(fields: Fields, common: dict[str, Any]) -> BambaConfig:
    """Bamba."""
    layers, hidden = common["num_layers"], fields.integer("hidden_size")
    heads = fields.integer("mamba_n_heads", 128)
    groups = fields.integer("mamba_n_groups", 1)
    inner = fields.integer("mamba_expand", 2) * hidden
    size = fields.take("mamba_d_head")
    if inner % heads or size not in (None, "auto", inner // heads):
        raise fields.error("mamba_n_heads", f"is {heads}, which with mamba_d_head={size!r} does not make {inner}.")
    fields.check_divided("mamba_n_heads", heads, "mamba_n_groups", groups)
    limit = fields.take("time_step_limit")
    if limit is not None and limit not in ([0.0, math.inf], [0.0, {"__float__": "Infinity"}]):
        raise fields.error("time_step_limit", f"is {limit!r}; only [0, infinity] is supported.")
    attention = fields.layers("attn_layer_indices", layers) or []
    partial = fields.take("partial_rotary_factor")
    if partial not in (None, 0.5):
        raise fields.error(
            "partial_rotary_factor", f"is {partial!r} beside rope_parameters; this family has 0.5 there."
        )
    fields.skip("num_logits_to_keep", "z_loss_coefficient", "mamba_chunk_size")  # no effect on results
    rotated = fields.integer("attn_rotary_emb", 0, least=0)  # how the first files of the family write half a head
    shared = _read_attention(fields, common, partial=0.5, hidden=hidden)
    if rotated not in (0, shared["head_dim"] // 2):
        raise fields.error(
            "attn_rotary_emb", f"is {rotated}; this family rotates half of {shared['head_dim']} elements."
        )
    return BambaConfig(
        **common,
        **shared,
        intermediate_size=fields.integer("intermediate_size"),
        mlp_bias=fields.flag("mlp_bias", False),
        layer_kinds=tuple("full_attention" if at in attention else "linear_attention" for at in range(layers)),
        conv_taps=fields.integer("mamba_d_conv", 4, least=2),
        conv_bias=fields.flag("mamba_conv_bias", True),
        proj_bias=fields.flag("mamba_proj_bias", False),
        mamba_heads=heads,
        mamba_head_dim=inner // heads,
        mamba_groups=groups,
        state_size=fields.integer("mamba_d_state", 256),
    )


def _read_kinds(fields: Fields, layers: int) -> dict[str, Any]:
    """`layer_kinds` and `window`.

    transformers' classes of these families have no windowed layers, but a config may name them. The fields mean the same as
    for Qwen2 and Qwen3: `sliding_attention` in layer_types, sliding_window, and use_sliding_window to allow it.
    """
    interval = fields.integer("full_attention_interval", 4)
    used, window = fields.flag("use_sliding_window", False), fields.take("sliding_window")
    kinds = fields.names("layer_types", _KINDS, layers)
    if kinds is None:
        kinds = ["full_attention" if (at + 1) % interval == 0 else "linear_attention" for at in range(layers)]
    named = tuple(_KINDS[kind] for kind in kinds)
    windowed = tuple(kind == "sliding_attention" for kind in named)
    if any(windowed) and not used:
        raise fields.error("layer_types", "holds 'sliding_attention', but use_sliding_window is not true.")
    if used and not any(windowed):
        raise fields.error("use_sliding_window", "is true, but no layer of layer_types is 'sliding_attention'.")
    if any(windowed) and window is None:
        raise fields.error("sliding_window", "is missing, but layer_types holds 'sliding_attention'.")
    limit = read_window(fields, window, windowed)
    if not limit:  # no windows, or one that no sequence outgrows
        named = tuple("full_attention" if kind == "sliding_attention" else kind for kind in named)
    return {"layer_kinds": named, "window": limit.get("window", 0)}


def _read_attention(
    fields: Fields, common: dict[str, Any], *, partial: float, hidden: int = 0, ignored: tuple[str, ...] = ()
) -> dict[str, Any]:
    """What the families' attention layers, embeddings and norms share; `hidden` where hidden_size has been taken."""
    shared = read_shared(fields, hidden or fields.integer("hidden_size"), 0 if hidden else 256)
    head_dim = shared["head_dim"]
    rope = read_rope(fields, common["max_position_embeddings"], partial_default=partial, ignored=ignored)
    if int(head_dim * rope.partial) % 2 or not int(head_dim * rope.partial):
        raise fields.error("head_dim", f"is {head_dim}, of which partial_rotary_factor={rope.partial:g} is not even.")
    return {**shared, "attention_bias": fields.flag("attention_bias", False), "rope": rope}
