"""Layers of the sizes that one of several ranks has, made from declarations alone; nothing here knows a format."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Literal

import torch

from pagerunner.layers.linear import Linear
from pagerunner.layers.module import CheckpointTensor, Module
from pagerunner.layers.moe import Experts
from pagerunner.layers.shares import Parts, Share
from pagerunner.models.checkpoint.forms import Forms
from pagerunner.models.checkpoint.panels import store_in_panels
from pagerunner.models.decoder import CausalLM
from pagerunner.quant.base import Unquantized, UnquantizedExperts

Layers = dict[Linear | Experts, list[str]]
"""Layers, and for each of their parts the name of the checkpoint's module that it comes from."""


def layer_part(layer: Linear | Experts, tensors: Iterable[CheckpointTensor], own: Parts) -> Linear | Experts:
    """A layer of the sizes that a device has, in floats. `tensors` are the whole one's."""
    made = copy.copy(layer)
    if isinstance(made, Experts):
        for inner in {x.cut.sections[0].features for x in tensors if x.cut is not None}:
            made.sizes = made.sizes._replace(inner=len(own[inner]))
        return made
    made.parts = dict(layer.parts)
    for tensor in tensors:
        if tensor.cut is None:
            continue
        features = sum(len(own[section.features]) * section.width for section in tensor.cut.sections)
        along = tensor.sink.axes[tensor.cut.dimension]
        assert along is not None
        if along.axis == "outputs":
            made.parts[tensor.part] = features
        else:
            made.in_features = features
    made.out_features = sum(made.parts.values())
    return made


def fill(part: Module, prefix: str, share: Share, held: Mapping[str, torch.Tensor]) -> None:
    """Load a rank's part of a module from a checkpoint's whole tensors."""

    def put(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    for tensor in share.checkpoint(part, prefix):
        source = held.get(tensor.name)
        if source is None:
            assert tensor.sink.optional or tensor.instead_of, tensor.name
            continue
        assert tensor.sink.takes(tuple(source.shape))
        tensor.sink.put(source, put)


def layers_of(model: Module, prefix: str = "") -> Layers:
    """The layers that formats are for."""
    found: Layers = {}
    for owner, _, name in model.sources(prefix):
        assert isinstance(owner, Linear | Experts)
        found.setdefault(owner, []).append(name)
    return found


def store(layer: Linear | Experts, names: list[str], forms: Forms | None | Literal["panels"]) -> None:
    """Store the layer as a checkpoint's format says, or in floats, or in floats in panels."""
    layer.store(Unquantized() if isinstance(layer, Linear) else UnquantizedExperts())
    if forms == "panels":
        store_in_panels(layer)  # type: ignore[arg-type]  # it looks at modules alone
    elif forms is not None:
        forms.store((layer, part, name) for (_, part, _), name in zip(layer.sources(), names, strict=True))


def shorten(model: CausalLM) -> None:
    """Leave a layer of each kind, and two experts."""
    found: dict[str, Module] = {}
    for layer in model.model.layers:
        kind = [(type(x), [(name, t.shape) for name, t in x.weights.items()]) for x in layer.modules()]
        found.setdefault(repr(kind), layer)
    model.model.layers = tuple(found.values())
    for module in model.modules():
        if isinstance(module, Experts):
            module.sizes = module.sizes._replace(experts=2)
            module.store(module.method)
