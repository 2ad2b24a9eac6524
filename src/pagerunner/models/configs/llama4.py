"""Configuration of Llama-4's text model. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagerunner.config import KVDtype
from pagerunner.memory.specs import ChunkedKV, FullKV, Spec
from pagerunner.models.configs.decoder import DecoderConfig, read_decoder, read_rope
from pagerunner.models.configs.fields import Fields
from pagerunner.models.configs.moe import ignore_router_training, read_expert_counts


@dataclass(frozen=True, kw_only=True)
class Llama4Config(DecoderConfig):
    """Llama-4's decoder.

    Three things differ by layer. Attention stays in chunks of `chunk` tokens if `chunked` says so (no layer's does if
    `chunked` is empty). Heads have rotary positions or not. The feed-forward is dense, of `dense_size`, or a mixture of
    `num_experts` experts of `intermediate_size` inner features, of which a token runs `active_experts` and a shared one.

    `head_norm` is a norm without weights of query and key heads in rotary layers. The queries of the others are multiplied by
    `1 + temperature_scale * log(1 + floor((position + 1) / temperature_floor))`; a scale of 0 leaves them.
    """

    chunk: int
    chunked: tuple[bool, ...]
    rotary: tuple[bool, ...]
    expert_layers: frozenset[int]
    dense_size: int
    num_experts: int
    active_experts: int
    head_norm: bool
    temperature_floor: int
    temperature_scale: float

    divided = {**DecoderConfig.divided, "dense_size": "inner"}

    def layer_specs(self, kv_dtype: KVDtype) -> tuple[Spec, ...]:
        """Chunks or full attention in every layer."""
        full = FullKV(self.num_kv_heads, self.head_dim, kv_dtype)
        if not any(self.chunked):
            return (full,) * self.num_layers
        chunked = ChunkedKV(self.num_kv_heads, self.head_dim, kv_dtype, chunk=self.chunk)
        return tuple(chunked if short else full for short in self.chunked)


def read_llama4_text(fields: Fields, common: dict[str, Any]) -> Llama4Config:
    """Llama-4 Scout and Maverick."""
    layers = common["num_layers"]
    interval = fields.integer("no_rope_layer_interval", 4)
    flags = fields.take("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(layers)]
    if not isinstance(flags, list) or len(flags) < layers or not all(flag in (0, 1) for flag in flags):
        raise fields.error("no_rope_layers", f"must be 0 or 1 for each of {layers} layers, got {flags!r:.80}.")
    rotary = tuple(bool(flag) for flag in flags[:layers])
    step = fields.integer("interleave_moe_layer_step", 1)
    expert_layers = fields.layers("moe_layers", layers)
    if expert_layers is None:
        expert_layers = list(range(step - 1, layers, step))
    experts, active = read_expert_counts(fields, 16)
    tuned = bool(fields.take("attn_temperature_tuning", True))
    floor, scale = fields.integer("floor_scale", 8192), fields.number("attn_scale", 0.1)
    bias = fields.flag("attention_bias", False)
    ignore_router_training(fields)
    fields.skip("router_jitter_noise", "for_llm_compressor")
    rope = read_rope(
        Fields(
            {
                "rope_theta": fields.number("rope_theta", 500_000.0, above=0),
                "rope_parameters": fields.take("rope_parameters"),
                "rope_scaling": fields.take("rope_scaling"),
            },
            fields.where,
            path=fields.path,
        ),
        common["max_position_embeddings"],
    )
    own = {
        **_read_chunks(fields, layers, rotary),
        "rotary": rotary,
        "expert_layers": frozenset(expert_layers),
        "dense_size": fields.integer("intermediate_size_mlp", 16_384),
        "num_experts": experts,
        "active_experts": active,
        "head_norm": fields.flag("use_qk_norm", True),
        "temperature_floor": floor,
        "temperature_scale": scale if tuned else 0.0,
        "qkv_bias": bias,
        "o_bias": bias,
    }
    return read_decoder(fields, common, own, 128, Llama4Config, rope=rope)


def _read_chunks(fields: Fields, layers: int, rotary: tuple[bool, ...]) -> dict[str, Any]:
    """`chunk` and `chunked`. A chunk that no sequence outgrows is none."""
    names = ("full_attention", "chunked_attention")
    types = fields.names("layer_types", names, layers) or [names[rope] for rope in rotary]
    chunked = tuple(kind == "chunked_attention" for kind in types)
    chunk = fields.take("attention_chunk_size", 8192)
    if any(chunked) and (not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1):
        raise fields.error("attention_chunk_size", f"must be a whole number of at least 1, got {chunk!r}.")
    if not any(chunked) or chunk >= fields.length:
        return {"chunk": 0, "chunked": ()}
    return {"chunk": chunk, "chunked": chunked}
