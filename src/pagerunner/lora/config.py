"""`adapter_config.json` of a PEFT directory: which modules have an adapter, of which rank, and by what it is scaled.

A field that says nothing about the forward pass is passed over. One that would change it in a way that isn't computed here is refused by
its name. So is a field that isn't known, unless its value says that it isn't used.
"""

from __future__ import annotations

import math
import re
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pagerunner.errors import ConfigError
from pagerunner.lora.expressions import Budget, Expression, ExpressionError, Patterns
from pagerunner.models.configs.json_files import read_json
from pagerunner.types.checks import is_finite, is_int, show

CONFIG = "adapter_config.json"
MOST_RANK = 512
MOST_BYTES = 2**24
"""Of a config. One with a pattern for each matrix of 128 experts in 48 layers has 2 MB."""
ALL_LINEAR: Literal["all-linear"] = "all-linear"
Names = Expression | frozenset[str]
Made = TypeVar("Made")

# What is about training, or about where files come from.
_SAY_NOTHING = frozenset(
    "auto_mapping base_model_name_or_path corda_config eva_config inference_mode loftq_config lora_dropout lora_ga_config megatron_config "
    "megatron_core peft_version qalora_group_size revision runtime_config task_type".split()
)
_REFUSED = {
    "use_dora": "DoRA scales whole weights by the norms of their rows",
    "modules_to_save": "whole modules are stored beside the adapter, and would replace the base's",
    "lora_bias": "B would have a bias",
    "trainable_token_indices": "rows of the embedding would be replaced",
    "layer_replication": "layers of the base would be repeated",
    "fan_in_fan_out": "the base's weights would be stored transposed",
    "ensure_weight_tying": "the adapter would be of tied embedding and output weights",
    "alora_invocation_tokens": "the adapter would begin at a token of the prompt",
    "use_qalora": "inputs would be pooled in groups",
    "use_bdlora": "A and B would be block-diagonal",
    "arrow_config": "several adapters would be routed by token",
    "kasa_config": "there would be singular values between A and B",
    "velora_config": "it is another forward pass",
    "monteclora_config": "it is another forward pass",
}
_TAKEN = frozenset(
    "peft_type r lora_alpha use_rslora rank_pattern alpha_pattern target_modules exclude_modules target_parameters layers_to_transform "
    "layers_pattern bias init_lora_weights".split()
)
_KEEP_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways to begin a training that leave the base's weights as they are."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What a config says of the forward pass. `directory` is for messages.

    `version` is that of PEFT that has written it, as (0, 19, 1), None if the file doesn't say.
    """

    directory: str
    rank: int
    alpha: float
    rslora: bool
    ranks: Patterns
    alphas: Patterns
    targets: Names | Literal["all-linear"]
    excluded: Names
    parameters: frozenset[str]
    layers: frozenset[int]
    layers_patterns: tuple[str, ...]
    version: tuple[int, ...] | None = None

    def rank_of(self, name: str) -> int:
        """The rank of a module's adapter, by the module's whole name."""
        return int(self.ranks.of(name, self.rank))

    def scale_of(self, name: str) -> float:
        """What a module's `B A` is multiplied by."""
        rank = self.rank_of(name)
        return self.alphas.of(name, self.alpha) / (math.sqrt(rank) if self.rslora else rank)

    @property
    def most_rank(self) -> int:
        """The largest rank that any module may have."""
        return int(max(self.rank, *self.ranks.numbers)) if self.ranks.numbers else self.rank

    def asks_for(self, name: str) -> bool:
        """Whether the module of this whole name has an adapter.

        Example: with `target_modules=["q_proj"]` and `layers_to_transform=[1]` it is so of `model.layers.1.self_attn.q_proj` alone.
        """
        if _matches(self.excluded, name):
            return False
        if self.targets == ALL_LINEAR:
            return not name.endswith("lm_head")
        if isinstance(self.targets, Expression) or name in self.targets or not self.layers:
            return _matches(self.targets, name)
        return _matches(self.targets, name) and self._layer_of(name) in self.layers

    def asks_for_parameter(self, name: str) -> bool:
        """Whether the parameter of this whole name has an adapter."""
        return _matches(self.parameters, name)

    def _layer_of(self, name: str) -> int | None:
        """The first number of the name, or the first behind one of the patterns."""
        patterns = [rf"(?:^|.*?\.){one}\.(\d+)\." for one in self.layers_patterns] or [r".*?\.[^.]*\.(\d+)\."]
        found = next(filter(None, (re.match(pattern, name) for pattern in patterns)), None)
        return None if found is None else int(found[1])


def read_config(directory: Path) -> AdapterConfig:
    """Read a directory's `adapter_config.json`.

    Raises:
        CheckpointError: there is none, or it isn't JSON.
        ConfigError: it asks for what isn't computed; the message names the field.
    """
    file = directory / CONFIG
    with suppress(OSError):  # which reading has a sentence for
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):  # a device has no end
            raise ConfigError(f"{file} isn't a file.")
        if (size := found.st_size) > MOST_BYTES:
            raise ConfigError(f"{file} has {size:,} bytes, and at most {MOST_BYTES:,} are read of an adapter's config.")
    return _Reader(file, read_json(file)).config(str(directory))


class _Reader:
    """Checks the fields of one file."""

    def __init__(self, file: Path, values: Mapping[str, Any]) -> None:
        self.file, self.values, self._budget = file, values, Budget(str(file))

    def config(self, directory: str) -> AdapterConfig:
        """Every field checked."""
        if self.values.get("peft_type") != "LORA":
            self.refuse("peft_type", 'only "LORA" is supported')
        self._check_names()
        all_linear = self.values.get("target_modules") == ALL_LINEAR
        targets = ALL_LINEAR if all_linear else self._targets("target_modules")
        parameters = frozenset(self._names("target_parameters"))
        if not targets and not parameters:
            raise ConfigError(f"{self.file} has no target_modules, so it doesn't say which modules have an adapter.")
        layers = self.values.get("layers_to_transform")
        layers = [layers] if is_int(layers) else layers or []
        if not isinstance(layers, list) or not all(map(is_int, layers)):
            self.refuse("layers_to_transform", "it must be a layer's number or a list of such")
        if layers and not isinstance(targets, frozenset):
            self.refuse("layers_to_transform", "target_modules must be a list with it")
        return AdapterConfig(
            directory,
            self._rank("r", self.values.get("r", 8)),
            self._alpha("lora_alpha", self.values.get("lora_alpha", 8)),
            self._flag("use_rslora"),
            self._patterns("rank_pattern", self._rank),
            self._patterns("alpha_pattern", self._alpha),
            targets,
            self._targets("exclude_modules"),
            parameters,
            frozenset(layers),
            self._layers_patterns(),
            self._version(),
        )

    def refuse(self, field: str, why: str) -> Any:
        """Raise ConfigError with the field's name and value."""
        raise ConfigError(f"{self.file}: {field}={show(self.values.get(field))} is not supported: {why}.")

    def _check_names(self) -> None:
        """Refuse what would change the forward pass, and what isn't known and may do so."""
        for field, value in self.values.items():
            unused = value is None or value is False or value in ("", [], {})
            if field in _REFUSED and not unused:
                self.refuse(field, _REFUSED[field])
            if not unused and field not in _TAKEN and field not in _SAY_NOTHING:
                self.refuse(field, "the field is not known, and may change what the adapter computes")
        if self.values.get("bias", "none") != "none":
            self.refuse("bias", "biases of the base would be replaced")
        if self.values.get("init_lora_weights", True) not in _KEEP_BASE:
            why = "the base's weights were changed before the training; save the adapter converted (path_initial_model_for_weight_conversion)"
            self.refuse("init_lora_weights", why)

    def _version(self) -> tuple[int, ...] | None:
        found = re.match(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})", str(self.values.get("peft_version")))
        return tuple(map(int, found.groups())) if found else None

    def _flag(self, field: str) -> bool:
        value = self.values.get(field, False)
        if not isinstance(value, bool):
            self.refuse(field, "it must be true or false")
        return bool(value)

    def _rank(self, field: str, value: Any) -> int:
        if not is_int(value) or not 0 < value <= MOST_RANK:
            self.refuse(field, f"a rank must be an integer from 1 to {MOST_RANK}")
        return int(value)

    def _alpha(self, field: str, value: Any) -> float:
        if not is_finite(value):
            self.refuse(field, "it must be a finite number")
        return float(value)

    def _patterns(self, field: str, number: Callable[[str, Any], float]) -> Patterns:
        found = self.values.get(field) or {}
        if not isinstance(found, dict):
            self.refuse(field, "it must map regular expressions to numbers")
        numbers = {key: number(field, value) for key, value in found.items()}
        return self._checked(field, lambda: Patterns(numbers, self._budget))

    def _layers_patterns(self) -> tuple[str, ...]:
        found = self.values.get("layers_pattern")
        patterns = (found,) if isinstance(found, str) and found else self._names("layers_pattern")
        if not all(map(re.compile(r"[\w.]+").fullmatch, patterns)):
            self.refuse("layers_pattern", 'it must be a name such as "layers" or "transformer.h", or a list of names')
        return patterns

    def _targets(self, field: str) -> Names:
        found = self.values.get(field)
        if not isinstance(found, str):
            return frozenset(self._names(field))
        if not found:
            return frozenset()
        return self._checked(field, lambda: Expression(found, self._budget))

    def _names(self, field: str) -> tuple[str, ...]:
        found = self.values.get(field) or []
        if not isinstance(found, list) or not all(isinstance(one, str) and one for one in found):
            self.refuse(field, "it must be a list of names")
        return tuple(found)

    def _checked(self, field: str, make: Callable[[], Made]) -> Made:
        try:
            return make()
        except ExpressionError as error:
            self.refuse(field, str(error))
            raise


def _matches(targets: Names, name: str) -> bool:
    """Whether a module is meant: by an expression for its whole name, or by the names that its own is or ends in, behind a point."""
    if isinstance(targets, Expression):
        return targets.matches(name)
    if name in targets:
        return True
    end = name
    while end := end.partition(".")[2]:
        if end in targets:
            return True
    return False
