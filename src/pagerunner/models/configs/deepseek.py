"""Configurations of DeepSeek-V2 (and V2-Lite), DeepSeek-V3 (and R1) and DeepSeek-V3.2. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from pagerunner.config import KVDtype
from pagerunner.memory.specs import SCALE_BYTES, LatentKV, Spec
from pagerunner.models.configs.base import ModelConfig, RopeConfig
from pagerunner.models.configs.decoder import read_rope
from pagerunner.models.configs.fields import Fields

LATENT_BLOCK = 128  # elements of a latent in fp8 that share a scale, where an indexer chooses

# Training losses and expert parallelism; none changes what the model computes.
_TRAINING_FIELDS = ("aux_loss_alpha", "seq_aux", "ep_size", "router_aux_loss_coef", "output_router_logits")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingConfig:
    """How tokens find experts: `top_k` of `experts`. The experts stand in `groups` groups, and `kept_groups` groups are
    eligible.

    `normalise` makes a token's weights sum to one before they are multiplied by `factor`.
    """

    scores: Literal["softmax", "sigmoid"]
    experts: int
    top_k: int
    groups: int
    kept_groups: int
    normalise: bool
    factor: float


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """Which `top_k` slots a query sees, chosen by `heads` heads of `head_dim`."""

    heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(ModelConfig):
    """Latent attention in every layer; feed-forwards of routed and shared experts after `dense_layers` plain ones.

    `query_rank` is the size of the compressed query (None: queries are projected directly). A query or key head has
    `key_dim` elements without positions and then `rope_dim` rotary ones, whose pairs are adjacent if `rope_pairs`.
    `shared_size` are the inner features of all shared experts together. `indexer` chooses what a query sees (None:
    everything). `extra_layers` follow the decoder in the checkpoint for multi-token prediction.
    `first_layer` is the number of the first layer in the checkpoint.
    """

    num_heads: int
    query_rank: int | None
    latent_dim: int
    key_dim: int
    rope_dim: int
    value_dim: int
    rope: RopeConfig
    rope_pairs: bool
    attention_bias: bool
    mlp_bias: bool
    intermediate_size: int
    expert_size: int
    shared_size: int
    dense_layers: int
    routing: RoutingConfig
    extra_layers: int
    indexer: IndexerConfig | None = None
    first_layer: int = 0
    divided = {**ModelConfig.divided, "expert_size": "inner", "shared_size": "inner"}

    @property
    def choices(self) -> frozenset[tuple[int, int]]:
        """See ModelConfig."""
        return frozenset() if self.indexer is None else frozenset({(self.indexer.top_k, 1)})

    def mtp(self) -> Self:
        """See ModelConfig. Its layer has experts."""
        self._one_mtp_layer("num_nextn_predict_layers", self.extra_layers)
        return replace(self, num_layers=1, dense_layers=0, first_layer=self.num_layers)

    def layer_specs(self, kv_dtype: KVDtype) -> tuple[Spec, ...]:
        """One latent and rotary vector per token in every layer, and an indexer key where there is an indexer."""
        keys = 0 if self.indexer is None else self.indexer.head_dim
        spec = LatentKV(self.latent_dim, self.rope_dim, kv_dtype, indexer_dim=keys)
        if keys and spec.quantised and self.latent_dim % SCALE_BYTES == 0 and self.rope_dim % 2 == 0:
            blocks, rest = divmod(self.latent_dim, LATENT_BLOCK)
            if rest or blocks.bit_count() > 1:  # kernels divide a latent by a power of two
                blocks = 1
            size = SCALE_BYTES
            spec = replace(spec, rope_dtype="bfloat16", scale_bytes=blocks * size, indexer_scale_bytes=size)
        return (spec,) * self.num_layers


def read_deepseek_v2(fields: Fields, common: dict[str, Any]) -> DeepseekConfig:
    """DeepSeek-V2, V2-Lite and V2.5: softmax routing, greedy or limited to the best groups."""
    fields.choice("scoring_func", ("softmax",), "softmax")
    method = fields.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    if fields.flag("norm_topk_prob", False):
        raise fields.error("norm_topk_prob", "is true; only false is supported in this family.")
    limited = method == "group_limited_greedy"
    groups = _read_groups(fields, fields.integer("n_routed_experts"), 1 if not limited else None)
    if not limited:
        groups = {**groups, "groups": 1, "kept_groups": 1}
    factor = fields.number("routed_scaling_factor", 1.0, above=0)
    routing = RoutingConfig(scores="softmax", normalise=False, factor=factor, **groups)
    return _read(fields, common, routing, mlp_bias=fields.flag("mlp_bias", False), rope_pairs=True)


def read_deepseek_v3(fields: Fields, common: dict[str, Any]) -> DeepseekConfig:
    """DeepSeek-V3 and R1: sigmoid routing with a correction bias, limited to the best groups."""
    routing = _read_sigmoid_routing(fields)
    return _read(fields, common, routing, mlp_bias=False, rope_pairs=fields.flag("rope_interleave", True))


def read_deepseek_v32(fields: Fields, common: dict[str, Any]) -> DeepseekConfig:
    """DeepSeek-V3.2: V3 with an indexer in every layer."""
    layers = common["num_layers"]
    kinds = fields.take("layer_types")
    if kinds not in (None, ["deepseek_sparse_attention"] * layers):
        raise fields.error("layer_types", f"must be deepseek_sparse_attention for {layers} layers, got {kinds!r:.80}.")
    if not fields.flag("rope_interleave", True):
        raise fields.error("rope_interleave", "is false; only true is supported in this family.")
    mlps = fields.take("mlp_layer_types")
    mlp_bias = fields.flag("mlp_bias", False)
    made = _read(
        fields, common, _read_sigmoid_routing(fields), mlp_bias=mlp_bias, rope_pairs=True, sparse=True, dense_layers=3
    )
    dense = min(made.dense_layers, layers)
    if mlps not in (None, ["dense"] * dense + ["sparse"] * (layers - dense)):
        raise fields.error("mlp_layer_types", f"must be dense up to first_k_dense_replace={dense} and sparse after it.")
    return made


def read_indexer(fields: Fields, rope_dim: int, top_k: int) -> IndexerConfig:
    """The indexer's fields; `top_k` is what an absent index_topk means, `rope_dim` the rotary part of its heads."""
    found = IndexerConfig(
        fields.integer("index_n_heads", 64), fields.integer("index_head_dim", 128), fields.integer("index_topk", top_k)
    )
    if found.head_dim < rope_dim:
        raise fields.error("index_head_dim", f"is {found.head_dim}; its rotary part alone has {rope_dim} elements.")
    return found


def _read_sigmoid_routing(fields: Fields) -> RoutingConfig:
    fields.choice("scoring_func", ("sigmoid",), "sigmoid")
    fields.choice("topk_method", ("noaux_tc",), "noaux_tc")
    groups = _read_groups(fields, fields.integer("n_routed_experts", 256), None)
    if groups["experts"] < 2 * groups["groups"]:
        raise fields.error("n_group", f"is {groups['groups']}; a group needs 2 of the {groups['experts']} experts.")
    normalise = fields.flag("norm_topk_prob", True)
    factor = fields.number("routed_scaling_factor", 2.5, above=0)
    return RoutingConfig(scores="sigmoid", normalise=normalise, factor=factor, **groups)


def _read_groups(fields: Fields, experts: int, default: int | None) -> dict[str, int]:
    groups = fields.integer("n_group", default)
    kept = fields.integer("topk_group", default)
    top_k = fields.integer("num_experts_per_tok")
    fields.check_divided("n_routed_experts", experts, "n_group", groups)
    if kept > groups:
        raise fields.error("topk_group", f"is {kept}; there are only n_group={groups} groups.")
    if top_k > kept * experts // groups:
        raise fields.error(
            "num_experts_per_tok", f"is {top_k}; {kept} of {groups} groups hold {kept * experts // groups} experts."
        )
    return {"experts": experts, "top_k": top_k, "groups": groups, "kept_groups": kept}


def _read(
    fields: Fields,
    common: dict[str, Any],
    routing: RoutingConfig,
    *,
    mlp_bias: bool,
    rope_pairs: bool,
    sparse: bool = False,
    dense_layers: int = 0,
) -> DeepseekConfig:
    heads = fields.integer("num_attention_heads")
    if (kv_heads := fields.integer("num_key_value_heads", heads)) != heads:
        raise fields.error("num_key_value_heads", f"is {kv_heads}; latent attention has one per head, {heads}.")
    key_dim = fields.integer("qk_nope_head_dim", 128)
    rope_dim = fields.integer("qk_rope_head_dim", 64)
    if rope_dim % 2:
        raise fields.error("qk_rope_head_dim", f"is {rope_dim}; rotary positions need an even number.")
    for name, implied in (("head_dim", rope_dim), ("qk_head_dim", key_dim + rope_dim)):
        if (value := fields.integer(name, implied)) != implied:
            raise fields.error(name, f"is {value}; qk_nope_head_dim and qk_rope_head_dim make it {implied}.")
    if (frequency := fields.integer("moe_layer_freq", 1)) != 1:
        raise fields.error("moe_layer_freq", f"is {frequency}; only 1 is supported.")
    fields.choice("hidden_act", ("silu", "swish"), "silu")
    expert_size = fields.integer("moe_intermediate_size")
    rank = fields.integer("q_lora_rank") if fields.holds("q_lora_rank") else None
    if sparse and rank is None:
        raise fields.error("q_lora_rank", "is null; the indexer's queries come from compressed ones.")
    fields.skip(*_TRAINING_FIELDS)
    return DeepseekConfig(
        **common,
        hidden_size=fields.integer("hidden_size"),
        num_heads=heads,
        query_rank=rank,
        latent_dim=fields.integer("kv_lora_rank", 512),
        key_dim=key_dim,
        rope_dim=rope_dim,
        value_dim=fields.integer("v_head_dim", 128),
        rope=read_rope(fields, common["max_position_embeddings"]),
        rope_pairs=rope_pairs,
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=mlp_bias,
        intermediate_size=fields.integer("intermediate_size"),
        expert_size=expert_size,
        shared_size=expert_size * fields.integer("n_shared_experts"),
        dense_layers=fields.integer("first_k_dense_replace", dense_layers, least=0),
        routing=routing,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6, above=0),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        extra_layers=fields.integer("num_nextn_predict_layers", 0, least=0),
        indexer=read_indexer(fields, rope_dim, 2048) if sparse else None,
    )
