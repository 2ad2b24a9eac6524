"""Which form each of a model's layers gets from the format that its checkpoint is in."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pagerunner.errors import ConfigError
from pagerunner.layers.linear import Linear
from pagerunner.layers.module import CheckpointTensor, Module
from pagerunner.layers.moe import Experts
from pagerunner.quant.base import WeightMethod
from pagerunner.quant.dequantized import Dequantized, DequantizedExperts
from pagerunner.quant.formats import Format, Scheme
from pagerunner.quant.w8 import W8


def store_as(tensors: Iterable[CheckpointTensor], checkpoint: Format, dtype: torch.dtype) -> None:
    """Give every layer of the model that takes `tensors` and that the checkpoint holds quantised a form that unpacks it to `dtype` while it is loaded.

    Raises:
        ConfigError: experts of one layer are stored in different ways.
    """
    for owner, modules in _sources(tensors).items():
        schemes = {part: checkpoint.scheme(name) for part, name in modules.items()}
        if isinstance(owner, Experts):
            if len(set(schemes.values())) > 1:
                example = next(iter(modules.values()))
                raise ConfigError(f"quantization_config stores experts beside {example} in different ways.")
            scheme = next(iter(schemes.values()))
            if scheme is not None:
                owner.store(DequantizedExperts(_form(checkpoint, scheme, dtype)))
        elif isinstance(owner, Linear) and any(schemes.values()):
            forms: dict[int, WeightMethod] = {}
            first = 0
            for part, size in owner.parts.items():
                scheme = schemes[part]
                if scheme is not None:
                    forms[first] = _form(checkpoint, scheme, dtype)
                first += size
            owner.store(Dequantized(forms))


def _form(checkpoint: Format, scheme: Scheme, dtype: torch.dtype) -> WeightMethod:
    assert scheme.is_w8, "the config reader lets no other format through"
    return W8(checkpoint, scheme, dtype)


def _sources(tensors: Iterable[CheckpointTensor]) -> dict[Module, dict[str, str]]:
    """Of each layer that formats are for: the names of the checkpoint's modules that its parts come from."""
    found: dict[Module, dict[str, str]] = {}
    for tensor in tensors:
        owner = tensor.owner
        if tensor.instead_of or tensor.name.endswith("bias"):
            continue
        if isinstance(owner, Experts) or (isinstance(owner, Linear) and not owner.plain):
            found.setdefault(owner, {})[tensor.part] = tensor.name.removesuffix(".weight")
    return found
