"""Configurations of decoders whose feed-forwards are mixtures of experts: Qwen3-MoE. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagerunner.models.configs.decoder import DecoderConfig, read_decoder, read_window
from pagerunner.models.configs.fields import Fields


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(DecoderConfig):
    """Qwen3's decoder with `num_experts` experts of `expert_size` inner features, of which a token runs `active_experts`.

    `dense_layers` have a feed-forward of `intermediate_size` instead. `normalise_weights` makes a token's weights add
    up to 1.
    """

    num_experts: int
    active_experts: int
    expert_size: int
    normalise_weights: bool
    dense_layers: frozenset[int]

    divided = {**DecoderConfig.divided, "expert_size": "inner"}


def read_qwen3_moe(fields: Fields, common: dict[str, Any]) -> Qwen3MoeConfig:
    """Qwen3-MoE."""
    layers = common["num_layers"]
    used, window = fields.flag("use_sliding_window", False), fields.take("sliding_window", 4096)
    fields.take("max_window_layers")  # the reference reads it in no layer of this family
    bias = fields.flag("attention_bias", False)
    fields.take("use_qk_norm")  # the reference norms heads whatever it says; a file without these norms isn't loaded
    if shared := fields.integer("shared_expert_intermediate_size", 0, least=0):
        raise fields.error("shared_expert_intermediate_size", f"is {shared}; this family has no shared expert.")
    experts, active = read_expert_counts(fields)
    dense = fields.layers("mlp_only_layers", layers) or []
    step = fields.integer("decoder_sparse_step", 1)
    own = {
        **read_window(fields, window, (used,) * layers),
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": True,
        "num_experts": experts,
        "active_experts": active,
        "expert_size": fields.integer("moe_intermediate_size"),
        "normalise_weights": fields.flag("norm_topk_prob", False),
        "dense_layers": frozenset(i for i in range(layers) if i in dense or (i + 1) % step),
    }
    ignore_router_training(fields)
    return read_decoder(fields, common, own, default_head_dim=128, kind=Qwen3MoeConfig)


def read_expert_counts(fields: Fields, default_experts: int | None = None) -> tuple[int, int]:
    """Experts of a layer (`num_experts`, or `num_local_experts`) and how many of them a token runs."""
    other = fields.take("num_local_experts")
    given = fields.take("num_experts", other)
    if other is not None and given != other:
        raise fields.error("num_local_experts", f"is {other!r}, beside num_experts={given!r}.")
    counts = Fields({"num_experts": given}, fields.where)
    experts = counts.integer("num_experts", default_experts)
    active = fields.integer("num_experts_per_tok")
    if active > experts:
        raise fields.error("num_experts_per_tok", f"is {active}, more than the {experts} experts of num_experts.")
    return experts, active


def ignore_router_training(fields: Fields) -> None:
    """Take what only matters in training: the router's auxiliary loss."""
    fields.skip("router_aux_loss_coef", "output_router_logits")
