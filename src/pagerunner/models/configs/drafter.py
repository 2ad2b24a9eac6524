"""Configurations of EAGLE drafters: models of one or few layers that draft tokens for another model, the target. Torch-free.

A config.json comes in one of three formats. EAGLE's own, which SpecForge writes too, has the fields of the drafter's layers and some more. Model
Optimizer puts these into `eagle_config`. speculators puts the layers' fields into `transformer_layer_config`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any, Literal

from pagerunner.errors import ConfigError
from pagerunner.models.configs.base import ModelConfig
from pagerunner.models.configs.decoder import DecoderConfig, read_llama, read_qwen3
from pagerunner.models.configs.fields import Fields
from pagerunner.models.configs.json_files import read_json
from pagerunner.models.configs.reader import locate, read_common, take_quantization

logger = logging.getLogger(__name__)
EagleMethod = Literal["eagle", "eagle3"]
_IDS = "eagle_aux_hidden_state_layer_ids"
_LAYERS = {"llama": read_llama, "qwen3": read_qwen3}
# What training or other engines need, or what a file's tensors say.
_IGNORED = (
    "speculators_version", "embed_requires_grad", "enable_sp_ulysses", "transformer_layer_architecture",
    "eagle_fc_bias", "has_lm_head", "train_meta", "ttt_length",
    "max_window_layers",  # of windows that are off, or refused
    "parallel_draft_heads_num_layers",  # of heads that _check_layout refuses
)  # fmt: skip


_NAMES = (("model.", ""), ("midlayer.", "layers.0."), ("transformer.", "layers.0."), ("fusion_fc.", "fc."))


def tensor_name(name: str) -> str:
    """The name of a drafter's tensor in EAGLE's own format, which has `layers.0.` where others have `midlayer.` or `transformer.`."""
    for theirs, ours in _NAMES:
        if name.startswith(theirs):
            name = ours + name.removeprefix(theirs)
    return name


@dataclass(frozen=True, kw_only=True)
class EagleConfig(DecoderConfig):
    """A drafter of EAGLE's first version or of its third.

    `takes` are the numbers of the target's layers after which its residual stream is taken; empty: the hidden state behind its final norm is.
    `target_size` are the target's hidden features, `target_vocab_size` its token ids. What is taken is brought to the drafter's hidden features by a product, where there is one: `joins`. Of it and of
    the embedding EAGLE-1 always makes one. `norm_before_fc` is a norm of all that is taken, `fc_norm` one of each part. With `norm_before_residual`
    the stream begins with the normed hidden state. With `norm_output` the next pass gets the hidden state behind the final norm.

    `own_embedding` and `own_head`: the checkpoint has these weights, where they aren't the target's. `maps_ids`: it has a table from ids of the drafter's
    vocabulary to the target's ids.
    """

    method: EagleMethod
    takes: tuple[int, ...]
    target_size: int
    target_vocab_size: int
    draft_vocab_size: int
    joins: bool
    fc_bias: bool
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    own_embedding: bool
    own_head: bool
    maps_ids: bool


class _DrafterFields(Fields):
    def _how_to_allow(self, name: str) -> str:
        return "It may change what the drafter computes, so it is not passed over. If it doesn't matter, remove it from this file."


def read_eagle_config(
    path: str | Path, method: EagleMethod, target: ModelConfig, held: Mapping[str, Any], *, same_embedding: bool = False
) -> EagleConfig:
    """Read the config of the drafter in the directory `path`, which drafts for `target`.

    `held` are the tensors of its files by the names of EAGLE's own format; empty if there are no files. `same_embedding`: its embedding is the target's.

    Raises:
        CheckpointError: there is no such directory, no config.json in it, or it is not a JSON object.
        ConfigError: a field's value is not supported, or doesn't suit the target; the message names both.
    """
    directory, file = locate(path)
    outer = _DrafterFields(read_json(file), str(file))
    layer = outer.mapping("transformer_layer_config")
    values = outer.mapping("eagle_config")
    inner = outer.inside("eagle_config", values or {})
    if layer is not None:
        fields = outer.inside("transformer_layer_config", layer)
        _check_speculators(outer, method)
    else:
        layer, fields = dict(read_json(file)), outer
    family = layer.get("model_type")
    normed = any(name.endswith("k_norm.weight") for name in held)
    if "LlamaForCausalLMEagle3" in str(layer.get("architectures")) and not normed:
        family = "llama"  # some heads have their target's model_type
    if family not in _LAYERS:
        raise fields.error("model_type", f"is {family!r}; drafters have layers of {' or '.join(_LAYERS)}.")
    said, layout = take_quantization(fields, directory, (), False)
    common = read_common(fields, layer, directory, family, target.dtype if said is None else "bfloat16")
    common |= {"quantization": said, "format": layout}
    own = {"method": method, **_read_own(outer, inner, common, method, target, held)}
    own["own_embedding"] = "embed_tokens.weight" in held and not same_embedding
    fields.length = common["max_position_embeddings"]
    _check_layout(inner, method)
    inner.finish(_IGNORED)
    base = _LAYERS[family](fields, common)
    if fields is not outer:
        fields.finish()
    outer.finish(_IGNORED)
    made = EagleConfig(**{field.name: getattr(base, field.name) for field in fields_of(base)}, **own)
    _check_target(made, target, str(file))
    if method == "eagle3":
        taken = f"after {', '.join(map(str, made.takes))}" if made.takes else "behind the final norm"
        logger.info("%s: the drafter takes hidden states %s of the target's %d layers.", path, taken, target.num_layers)
    return made


def _check_speculators(outer: Fields, method: EagleMethod) -> None:
    kind = outer.take("speculators_model_type")
    if kind not in ("eagle", "eagle3") or (kind == "eagle3") != (method == "eagle3"):
        raise outer.error("speculators_model_type", f"is {kind!r}, but speculative_config says method {method}.")
    if outer.flag("layernorms", False):
        raise outer.error("layernorms", "is true; EAGLE drafters with norms of their inputs are not supported.")
    outer.skip("speculators_config", "fusion_bias")


def _check_layout(inner: Fields, method: EagleMethod) -> None:
    """Take what Model Optimizer says of a head's parts, which those of a method have alike."""
    third = method == "eagle3"
    for name, usual in (
        ("use_input_layernorm_in_first_layer", third),
        ("use_last_layernorm", third),
        ("use_mtp_layernorm", False),
        ("next_layer_regular", True),
    ):
        if inner.flag(name, usual) != usual:
            said = str(not usual).lower()
            raise inner.error(
                name, f"is {said}; of method {method} only drafters with {str(usual).lower()} are supported."
            )
    if (steps := inner.integer("parallel_draft_step", 1)) != 1:
        raise inner.error(
            "parallel_draft_step", f"is {steps}; drafters that guess several tokens in one pass are not supported."
        )


def _read_own(
    outer: Fields,
    inner: Fields,
    common: Mapping[str, Any],
    method: EagleMethod,
    target: ModelConfig,
    held: Mapping[str, Any],
) -> dict[str, Any]:
    """The fields of EagleConfig beside those of its layers."""
    vocab = common["vocab_size"]
    draft_vocab = outer.integer("draft_vocab_size", outer.integer("truncated_vocab_size", vocab))
    if draft_vocab > vocab:
        raise outer.error("draft_vocab_size", f"is {draft_vocab}, more than vocab_size={vocab}.")
    takes = _read_takes(outer, inner, target) if method == "eagle3" else ()
    flags = {
        name: inner.flag(name, outer.flag(name, False))
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    }
    if method == "eagle" and any(flags.values()):
        said = next(name for name, value in flags.items() if value)
        raise outer.error(said, "is true, but method eagle (the first version of EAGLE) has no such norm.")
    return {
        **flags,
        "takes": takes,
        "target_size": outer.integer("target_hidden_size", target.hidden_size),
        "target_vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab,
        "joins": "fc.weight" in held if held else method == "eagle" or len(takes) > 1,
        "fc_bias": "fc.bias" in held,
        "own_head": "lm_head.weight" in held or draft_vocab != vocab or (not held and method == "eagle3"),
        "maps_ids": "d2t" in held or draft_vocab != vocab,
    }


def _read_takes(outer: Fields, inner: Fields, target: ModelConfig) -> tuple[int, ...]:
    """After which numbers of the target's layers its residual stream is taken.

    Ids at the top level count the layers that are done. Those in eagle_config are numbers of layers whose output it is, unless one of them is the
    number of all layers: then they count layers, too.
    """
    layers = target.num_layers
    found: list[tuple[int, ...]] = []
    for fields in (outer, inner):
        ids = fields.take(_IDS)
        if not ids:
            continue
        if not isinstance(ids, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
            raise fields.error(_IDS, f"must be a list of whole numbers, got {ids!r:.80}.")
        if len(set(ids)) < len(ids):
            raise fields.error(_IDS, f"is {ids}, which names a layer twice.")
        counted = fields is outer or max(ids) == layers
        takes = tuple(ids) if counted else tuple(one + 1 for one in ids)
        if min(takes) < 0 or max(takes) > layers:
            raise fields.error(_IDS, f"is {ids}, but the target has {layers} layers.")
        found.append(takes)
    if len(found) == 2 and found[0] != found[1]:
        raise outer.error(
            _IDS,
            f"means the states after {found[0]} layers, and that in eagle_config those after {found[1]}; remove the one that is wrong.",
        )
    if not inner.flag("use_aux_hidden_state", True):
        return ()
    takes = found[0] if found else (2, layers // 2, layers - 3)
    if not found and (min(takes) < 0 or len(set(takes)) < 3):
        raise outer.error(
            _IDS, f"is missing, and a target of {layers} layers has no layers 2, {layers // 2} and {layers - 3}."
        )
    if (count := outer.integer("num_aux_hidden_states", len(takes))) != len(takes):
        raise outer.error("num_aux_hidden_states", f"is {count}, but {_IDS} names {len(takes)}.")
    return takes


def _check_target(drafter: EagleConfig, target: ModelConfig, where: str) -> None:
    """Raise ConfigError if the drafter isn't one for models like the target."""
    if target.family.startswith(("gemma3", "deepseek_v4")):
        raise ConfigError(
            f"method {drafter.method}: drafters for models of model_type {target.family} are not supported."
        )
    name = "target_hidden_size" if drafter.target_size != drafter.hidden_size else "hidden_size"
    if drafter.target_size != target.hidden_size or (
        drafter.method == "eagle" and drafter.hidden_size != target.hidden_size
    ):
        size = drafter.target_size if drafter.target_size != target.hidden_size else drafter.hidden_size
        raise ConfigError(
            f"{where}: {name} is {size}, but the target {target.path} has hidden_size={target.hidden_size}; the drafter is for another model."
        )
    if drafter.hidden_size != target.hidden_size:
        for wants, what in (
            (not drafter.own_embedding, "embed_tokens.weight"),
            (not drafter.own_head, "lm_head.weight"),
            (not drafter.joins, "fc.weight"),
        ):
            if wants:
                raise ConfigError(
                    f"{where}: hidden_size is {drafter.hidden_size}, but the target {target.path} has hidden_size={target.hidden_size}. Such a drafter needs weights of its own, and its files hold no {what}."
                )
    if drafter.vocab_size != target.vocab_size:
        raise ConfigError(
            f"{where}: vocab_size is {drafter.vocab_size}, but the target {target.path} has vocab_size={target.vocab_size}; the drafter is for another model."
        )


def check_draft_length(drafter: ModelConfig, max_model_len: int) -> None:
    """Raise ConfigError if the drafter's positions end before `max_model_len`."""
    limit = drafter.max_position_embeddings
    if limit < max_model_len:
        raise ConfigError(
            f"max_model_len={max_model_len} is more than the {limit} positions of the drafter {drafter.path} (max_position_embeddings). "
            f"Lower max_model_len to {limit}. If the drafter guesses as well behind them, raise its max_position_embeddings in its config.json."
        )
