"""Configuration of DeepSeek-V4. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from pagerunner.config import KVDtype
from pagerunner.memory.specs import SCALE_BYTES, LatentKV, RecurrentState, Spec
from pagerunner.models.configs.base import ModelConfig, RopeConfig
from pagerunner.models.configs.decoder import read_rope
from pagerunner.models.configs.deepseek import IndexerConfig, read_indexer
from pagerunner.models.configs.fields import Fields
from pagerunner.quant.formats import Format, Names, Scheme

_TRAINING_FIELDS = ("router_aux_loss_coef", "output_router_logits", "router_jitter_noise")
_SPARSE, _HEAVY, _WINDOW = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"
_KINDS = {0: _WINDOW, 4: _SPARSE, 128: _HEAVY}  # as older files number them
_RATIOS = {_SPARSE: 4, _HEAVY: 128}
_HASHED_LAYERS = 3

LATENT_BLOCK = 64  # elements of a slot in fp8 that share a scale, at most


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One layer of DeepSeek-V4.

    The fields say how many tokens a slot stands for (1: the layer has a window only), whether slots overlap and are chosen,
    whether experts are looked up by token id, and the place of the layer's first piece of memory.
    """

    ratio: int
    sparse: bool
    hashed: bool
    memory_index: int


@dataclass(frozen=True, kw_only=True)
class DeepseekV4Config(ModelConfig):
    """Vectors that are keys and values of all heads, in a window and compressed; residuals in `streams` parallel streams.

    The last `rope_dim` of a head's `head_dim` elements are rotary, with adjacent pairs. Outputs are projected by
    `output_groups` groups of heads to `output_rank` elements each, and then together. `hash_size` token ids name experts.
    """

    num_heads: int
    head_dim: int
    rope_dim: int
    query_rank: int
    window: int
    layers: tuple[LayerConfig, ...]
    indexer: IndexerConfig
    window_rope: RopeConfig
    slot_rope: RopeConfig
    output_groups: int
    output_rank: int
    streams: int
    stream_iterations: int
    stream_eps: float
    experts: int
    active_experts: int
    expert_size: int
    hash_size: int
    routing: Literal["sqrtsoftplus", "sigmoid"]
    routing_factor: float
    activation_limit: float
    mtp_layers: int = 0

    divided = {**ModelConfig.divided, "output_groups": "output_groups", "expert_size": "inner"}

    def of_rank(self, own: Mapping[tuple[str, int], int]) -> Self:
        """See ModelConfig. Heads are divided by output group."""
        found = super().of_rank(own)
        return replace(found, num_heads=self.num_heads // self.output_groups * found.output_groups)

    @property
    def attention_scores(self) -> frozenset[str]:
        """A sink per head."""
        return frozenset({"sinks"})

    @property
    def choices(self) -> frozenset[tuple[int, int]]:
        """See ModelConfig."""
        return frozenset((self.indexer.top_k, layer.ratio) for layer in self.layers if layer.sparse)

    @property
    def spec_layers(self) -> tuple[int, ...]:
        """See ModelConfig."""
        return tuple(number for number, layer in enumerate(self.layers) for _ in range(1 if layer.ratio == 1 else 3))

    def mtp(self) -> Self:
        """See ModelConfig. Its layer has a window only, and a router of its own."""
        self._one_mtp_layer("num_nextn_predict_layers", self.mtp_layers)
        return replace(self, num_layers=1, layers=(LayerConfig(1, False, False, 0),))

    def layer_specs(self, kv_dtype: KVDtype) -> tuple[Spec, ...]:
        """By layer: a window of vectors; where it compresses, slots and the inputs of the slots that aren't complete.

        Slots and windows in fp8 have scales of their own, a byte for each block and no less than eight bytes, as their makers' kernels keep
        them. Their rotary parts are bfloat16. Example: a slot of 512 elements takes 584 bytes.
        """
        found: list[Spec] = []
        latent = self.head_dim - self.rope_dim
        block = math.gcd(latent, LATENT_BLOCK)
        window, key_scale = LatentKV(latent, self.rope_dim, kv_dtype, window=self.window), 0
        if kv_dtype.startswith("fp8") and block % SCALE_BYTES == 0:
            blocks, key_scale = latent // block, SCALE_BYTES
            window = replace(window, rope_dtype="bfloat16", scale_bytes=-(-blocks // 8) * 8, byte_scales=blocks)
        for layer in self.layers:
            found.append(window)
            if layer.ratio == 1:
                continue
            keys = self.indexer.head_dim if layer.sparse else 0
            slots = replace(window, window=None, compression=layer.ratio, indexer_dim=keys)
            found.append(replace(slots, indexer_scale_bytes=key_scale if keys else 0))
            tokens, parts = (2 * layer.ratio, 4) if layer.sparse else (layer.ratio, 2)
            shapes = ((tokens, parts * self.head_dim), (tokens, parts * keys))
            kept = shapes if layer.sparse else shapes[:1]
            entry = tuple(shape[1:] for shape in kept)
            found.append(RecurrentState(kept, ("float32",) * len(kept), entry=entry, entry_dtype="float32"))
        return tuple(found)


def read_deepseek_v4(fields: Fields, common: dict[str, Any]) -> DeepseekV4Config:
    """DeepSeek-V4, as transformers writes it and as published."""
    heads, head_dim = fields.integer("num_attention_heads"), fields.integer("head_dim", 512)
    expert_dtype = fields.choice("expert_dtype", ("fp4", "fp8"), "fp4")  # quantization_config leaves it out
    hidden = fields.integer("hidden_size")
    if (kv_heads := fields.integer("num_key_value_heads", 1)) != 1:
        raise fields.error("num_key_value_heads", f"is {kv_heads}; all heads share one vector in this family.")
    groups = fields.integer("o_groups", 8)
    if heads % groups:
        raise fields.error("o_groups", f"is {groups}, which does not divide num_attention_heads={heads}.")
    window_rope, slot_rope, rope_dim = _read_ropes(fields, head_dim, common["max_position_embeddings"])
    indexer = read_indexer(fields, rope_dim, 512)
    experts, active = fields.integer("n_routed_experts", 256), fields.integer("num_experts_per_tok", 6)
    if active > experts:
        raise fields.error("num_experts_per_tok", f"is {active}; there are n_routed_experts={experts}.")
    for name, wanted in (("norm_topk_prob", True), ("tie_word_embeddings", False), ("mlp_bias", False)):
        if fields.flag(name, wanted) != wanted:
            raise fields.error(name, f"is {not wanted}; only {wanted} is supported in this family.".lower())
    fields.choice("hidden_act", ("silu", "swish"), "silu")
    fields.choice("topk_method", ("noaux_tc",), "noaux_tc")
    if (shared := fields.integer("n_shared_experts", 1)) != 1:
        raise fields.error("n_shared_experts", f"is {shared}; only 1 is supported in this family.")
    fields.skip(*_TRAINING_FIELDS)
    routing: Any = fields.choice("scoring_func", ("sqrtsoftplus", "sigmoid"), "sqrtsoftplus")
    return DeepseekV4Config(
        **common | {"format": _published_format(common["format"], expert_dtype)},
        hidden_size=hidden,
        tie_word_embeddings=False,
        num_heads=heads,
        head_dim=head_dim,
        rope_dim=rope_dim,
        query_rank=fields.integer("q_lora_rank", 1024),
        window=fields.integer("sliding_window", 128),
        layers=_read_layers(fields, common["num_layers"]),
        indexer=indexer,
        window_rope=window_rope,
        slot_rope=slot_rope,
        output_groups=groups,
        output_rank=fields.integer("o_lora_rank", 1024),
        streams=fields.integer("hc_mult", 4),
        stream_iterations=fields.integer("hc_sinkhorn_iters", 20),
        stream_eps=fields.number("hc_eps", 1e-6, above=0),
        experts=experts,
        active_experts=active,
        expert_size=fields.integer("moe_intermediate_size", 2048),
        hash_size=common["vocab_size"],
        mtp_layers=fields.integer("num_nextn_predict_layers", 0, least=0),
        routing=routing,
        routing_factor=fields.number("routed_scaling_factor", 1.5, above=0),
        activation_limit=fields.number("swiglu_limit", 10.0, above=0),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6, above=0),
    )


def _published_format(found: Format | None, expert_dtype: str) -> Format | None:
    """The format of published files: fp8 blocks, whose scales are called `scale`, and routed experts in fp4.

    NVIDIA's files name these experts, which are in NVFP4.
    """
    if found is None or found.writer != "fp8":
        return found
    schemes = found.schemes
    if expert_dtype == "fp4" and not any(scheme.number == "fp4" for scheme in found.schemes_said):
        schemes = (
            (Names("module", (r"re:.*\.ffn\.experts\.",)), Scheme("fp4", "group", (1, 32), layout="deepseek")),
            *schemes,
        )
    return replace(found, writer="deepseek-v4", schemes=schemes)


def _read_ropes(fields: Fields, head_dim: int, length: int) -> tuple[RopeConfig, RopeConfig, int]:
    """The rotary embedding of layers with a window only, that of all other layers, and the rotary elements of a head.

    A file has one object for each of the two, or the older fields. The older fields' stretching is for the other layers only.
    """
    asked = fields.take("qk_rope_head_dim")
    given = (
        head_dim // 8
        if asked is None
        else Fields({"qk_rope_head_dim": asked}, fields.where).integer("qk_rope_head_dim")
    )
    partial = fields.number("partial_rotary_factor", given / head_dim)
    rope_dim = int(head_dim * partial)
    given = rope_dim if asked is None else given
    if given != rope_dim or rope_dim % 2 or not 0 < rope_dim <= head_dim:
        raise fields.error(
            "qk_rope_head_dim",
            f"is {given} and partial_rotary_factor {partial:g}; a head of {head_dim} needs an even share.",
        )
    theta, slot_theta = fields.number("rope_theta", 1e4, above=0), fields.number("compress_rope_theta", 1.6e5, above=0)
    given_ropes, scaling = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
    found = given_ropes or scaling or {}
    if scaling and scaling != found:
        raise fields.error("rope_scaling", f"is {scaling!r:.80}, beside a different rope_parameters.")
    if all(isinstance(found.get(name), dict) for name in ("main", "compress")):
        Fields(found, f"{fields.where}: rope_parameters").finish(("main", "compress"))
    else:
        found = {"main": {}, "compress": {name: x for name, x in found.items() if name != "rope_theta"}}
    ropes = []
    for name, base in (("main", theta), ("compress", slot_theta)):
        values = {"rope_theta": base, **found[name]}
        if values.pop("partial_rotary_factor", partial) != partial:
            raise fields.error("rope_parameters", f"names another partial_rotary_factor than {partial:g} in {name}.")
        if "yarn" in (values.get("rope_type"), values.get("type")):
            values.setdefault("attention_factor", 1.0)
        ropes.append(read_rope(Fields({"rope_parameters": values}, f"{fields.where}: {name}"), length))
    return ropes[0], ropes[1], rope_dim


def _read_ratios(fields: Fields, count: int) -> list[str] | None:
    """The kinds of layers as published files number them."""
    ratios = fields.take("compress_ratios")
    if ratios is None:
        return None
    if not isinstance(ratios, list) or len(ratios) < count or not all(ratio in tuple(_KINDS) for ratio in ratios):
        raise fields.error(
            "compress_ratios", f"must be {', '.join(map(str, _KINDS))} for each of {count} layers, got {ratios!r:.80}."
        )
    return [_KINDS[ratio] for ratio in ratios[:count]]


def _read_layers(fields: Fields, count: int) -> tuple[LayerConfig, ...]:
    rates = dict(_RATIOS)
    given = fields.take("compress_rates")
    if given is not None:
        if not isinstance(given, dict) or not set(given) <= set(rates):
            raise fields.error("compress_rates", f"must map {_SPARSE} and {_HEAVY} to numbers, got {given!r}.")
        rates |= given
    rates[_SPARSE] = fields.integer("compress_rate_csa", rates[_SPARSE], least=2)
    rates[_HEAVY] = fields.integer("compress_rate_hca", rates[_HEAVY], least=2)
    for rate in rates.values():
        if not isinstance(rate, int) or isinstance(rate, bool) or rate < 2:
            raise fields.error("compress_rates", f"must be whole numbers of at least 2, got {rate!r}.")
    kinds = fields.names("layer_types", (_WINDOW, _SPARSE, _HEAVY), count, more=True)
    numbered = _read_ratios(fields, count)
    if numbered is not None and kinds not in (None, numbered):
        raise fields.error("compress_ratios", f"means {numbered!r:.80}, beside another layer_types.")
    kinds = kinds or numbered or [_HEAVY if i < 2 or i % 2 == 0 else _SPARSE for i in range(count)]
    hashed = fields.integer("num_hash_layers", _HASHED_LAYERS, least=0)
    mlps = fields.names("mlp_layer_types", ("hash_moe", "moe"), count, more=True)
    mlps = mlps or ["hash_moe" if i < hashed else "moe" for i in range(count)]
    found, memory = [], 0
    for kind, mlp in zip(kinds, mlps, strict=True):
        found.append(LayerConfig(rates.get(kind, 1), kind == _SPARSE, mlp == "hash_moe", memory))
        memory += 1 if kind == _WINDOW else 3
    return tuple(found)
