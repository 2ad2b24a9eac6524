"""What one of several devices would hold of a model, from its declarations alone; nothing here knows a format."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Literal

import torch

from pagerunner.layers.cuts import Features
from pagerunner.layers.linear import Linear
from pagerunner.layers.module import CheckpointTensor, Module
from pagerunner.layers.moe import Experts
from pagerunner.models.checkpoint.forms import Forms
from pagerunner.models.checkpoint.panels import store_in_panels
from pagerunner.models.decoder import CausalLM
from pagerunner.quant.base import Unquantized, UnquantizedExperts

Parts = dict[Features, range]
Layers = dict[Linear | Experts, list[str]]
"""Layers, and for each of their parts the name of the checkpoint's module that it comes from."""


class CannotBeCutError(Exception):
    """Some features can't be divided among so many devices."""


def together(tensors: Iterable[CheckpointTensor]) -> dict[Features, int]:
    """How many neighbours of each of the features can't be divided."""
    found: dict[Features, int] = {}
    for tensor in tensors:
        for features, count in tensor.cut.together().items() if tensor.cut is not None else ():
            found[features] = math.lcm(found.get(features, 1), count)
    return found


def parts(tensors: Iterable[CheckpointTensor], devices: int) -> list[Parts]:
    """Each device's features, which are as many as the others' or as nearly so as can be."""
    found = {features: _ranges(features, count, devices) for features, count in together(tensors).items()}
    return [{features: ranges[device] for features, ranges in found.items()} for device in range(devices)]


def _ranges(features: Features, together: int, devices: int) -> list[range]:
    count = features.count
    if features.repeated and devices % count == 0 and together == 1:
        return [range(device * count // devices, device * count // devices + 1) for device in range(devices)]
    pieces = -(-count // together)
    if pieces < devices or (features.even and (count % together or pieces % devices)):
        raise CannotBeCutError(f"{count} {features.name}, {together} together, among {devices}")
    bounds = [min(device * pieces // devices * together, count) for device in range(devices + 1)]
    return [range(*pair) for pair in zip(bounds, bounds[1:], strict=False)]


def shape_of(tensor: CheckpointTensor, own: Parts) -> tuple[int, ...]:
    """The shape of a device's part of the tensor."""
    shape = list(tensor.sink.shape)
    if tensor.cut is not None:
        shape[tensor.cut.dimension] = sum(part.stop - part.start for part in tensor.cut.slices(own))
    return tuple(shape)


def taken(tensor: CheckpointTensor, held: torch.Tensor, own: Parts) -> torch.Tensor:
    """A device's part of the tensor."""
    held = held.reshape(tensor.sink.shape)
    if tensor.cut is None:
        return held
    dimension = tensor.cut.dimension
    return torch.cat([held.narrow(dimension, s.start, s.stop - s.start) for s in tensor.cut.slices(own)], dimension)


def part_of(layer: Linear | Experts, tensors: Iterable[CheckpointTensor], own: Parts) -> Linear | Experts:
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


def fill(
    part: Module,
    prefix: str,
    whole: Mapping[str, CheckpointTensor],
    held: Mapping[str, torch.Tensor],
    own: Parts,
    device: int,
) -> None:
    """Load a device's part of a module from a checkpoint's whole tensors. `whole` are the declarations of the whole module."""

    def put(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    for tensor in part.checkpoint(prefix):
        declared, source = whole[tensor.name], held.get(tensor.name)
        if source is None:
            assert declared.sink.optional or declared.instead_of, tensor.name
            continue
        assert declared.sink.takes(tuple(source.shape))
        if not declared.sink.fills:
            declared.sink.put(source, put)
            continue
        source = taken(declared, source, own)
        assert tensor.sink.takes(tuple(source.shape)), (tensor.name, source.shape, tensor.sink.shape)
        tensor.sink.put(torch.zeros_like(source) if declared.once and device else source.contiguous(), put)


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
