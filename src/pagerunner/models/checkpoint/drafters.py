"""Finding the drafter of a model: in its own checkpoint, or in a directory beside it, whose files say what it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from pagerunner.config import DRAFT_MODELS, SpeculativeConfig
from pagerunner.errors import CheckpointError, ConfigError
from pagerunner.models.checkpoint.loader import checkpoint_files, opened
from pagerunner.models.configs.base import ModelConfig
from pagerunner.models.configs.drafter import read_eagle_config, tensor_name
from pagerunner.models.configs.reader import read_model_config
from pagerunner.models.registry import FAMILIES

_EMBEDDINGS = ("embed_tokens.weight", "embed.weight")
_COMPARED_ROWS = 2_000
"""Rows of two embeddings of which equal ones say that all are. Training changes nearly all rows of an embedding, or none."""


def with_drafter(
    config: ModelConfig, method: Literal["eagle", "eagle3", "mtp"], path: str | None = None
) -> ModelConfig:
    """The config of a model with the drafter of `method` in the directory `path`; "mtp" is in the model's own checkpoint.

    Raises:
        CheckpointError: there is no such drafter.
        ConfigError: a field of the drafter's config is not supported, or doesn't suit the model.
    """
    if method == "mtp":
        made = replace(config, drafter=config.mtp())
        _check_held(made)
        return made
    assert path is not None, f"method {method} has a path"
    held = _held(Path(path))
    names = {tensor_name(name): one for name, one in held.items()}
    same = "embed_tokens.weight" in names and _is_same(names["embed_tokens.weight"], _held(Path(config.path)))
    return replace(config, drafter=read_eagle_config(path, method, config, names, same_embedding=same))


def with_smaller_model(config: ModelConfig, path: str) -> ModelConfig:
    """The config of a model for which the smaller model in the directory `path` drafts. Raises ConfigError if it can't."""
    own = read_model_config(path)
    said = f"method draft_model: {path}"
    if Path(path).resolve() == Path(config.path).resolve():
        raise ConfigError(
            f"{said} is the target itself, which drafts no faster than it computes; take a smaller model."
        )
    if own.vocab_size != config.vocab_size:
        raise ConfigError(
            f"{said} has vocab_size={own.vocab_size}, and the target {config.path} has {config.vocab_size}; drafts are token ids, so both need the same tokenizer."
        )
    if any(spec.kind == "recurrent" for spec in own.layer_specs("float32")):
        raise ConfigError(f"{said} has recurrent layers, whose states drafts would change; take a model without them.")
    if more := own.attention_scores - config.attention_scores:
        raise ConfigError(
            f"{said} has attention with {', '.join(sorted(more))}, which the target's hasn't; take another model."
        )
    return replace(config, drafter=own)


def with_draft_model(config: ModelConfig, drafts: SpeculativeConfig | None) -> ModelConfig:
    """The config of a model with the drafter that `drafts` names, if that is a model. Raises as `with_drafter`."""
    if drafts is None or drafts.method not in DRAFT_MODELS:
        return config
    if drafts.method == "draft_model":
        return with_smaller_model(config, drafts.model)
    method: Any = drafts.method
    return with_drafter(config, method, drafts.model)


class _Held(NamedTuple):
    """A tensor of a checkpoint: its file, and its name there."""

    file: Path
    name: str

    def rows(self, step: int) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Every so many of its rows, and its shape."""
        with opened(self.file) as tensors:
            part = tensors.get_slice(self.name)
            shape = tuple(part.get_shape())
            return torch.stack([part[row] for row in range(0, shape[0], max(step, 1))]), shape


def _held(directory: Path) -> dict[str, _Held]:
    """The tensors of a checkpoint; none if there are no files, or one of them is damaged, which whoever loads it hears of."""
    found: dict[str, _Held] = {}
    try:
        for file in checkpoint_files(directory):
            with opened(file) as tensors:
                found |= {name: _Held(file, name) for name in tensors.keys()}  # noqa: SIM118, no mapping
    except CheckpointError:
        return {}
    return found


def _is_same(own: _Held, target: Mapping[str, _Held]) -> bool:
    """Whether a drafter's embedding is a copy of the target's."""
    named = (one for name, one in target.items() if name.endswith(_EMBEDDINGS) and ".layers." not in name)
    theirs = next(named, None)
    if theirs is None:
        return False
    with opened(own.file) as tensors:
        step = tensors.get_slice(own.name).get_shape()[0] // _COMPARED_ROWS
    (rows, shape), (their_rows, their_shape) = own.rows(step), theirs.rows(step)
    return shape == their_shape and torch.equal(rows.float(), their_rows.float())


def _check_held(config: ModelConfig) -> None:
    """Raise CheckpointError if a model's files hold nothing of its multi-token prediction module."""
    held = _held(Path(config.path))
    family = FAMILIES[config.family]
    assert config.drafter is not None and family.mtp is not None
    prefix = family.mtp[2].format(layers=config.num_layers)
    if held and not any(name.startswith(prefix) or f".{prefix}" in name for name in held):
        raise CheckpointError(
            f"{config.path}: method mtp needs the model's multi-token prediction module, and the checkpoint holds no tensor that begins with {prefix}. "
            "Quantised and fine-tuned checkpoints often leave it out. Take one that holds it, or another method."
        )
