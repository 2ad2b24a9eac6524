"""What holds of all declarations of a model."""

from __future__ import annotations

import math

from pagerunner.layers.module import CheckpointTensor
from pagerunner.models.checkpoint.loader import Model


def elements(tensor: CheckpointTensor) -> int:
    return math.prod(tensor.sink.shape)


def held(model: Model) -> int:
    return sum(tensor.numel() for module in model.modules() for tensor in module.weights.values())


def check(model: Model) -> dict[str, CheckpointTensor]:
    """Names are told once; what a checkpoint must hold is as much as there is to fill, and what it may hold instead is too.

    A cut is about all of its dimension.
    """
    tensors = list(model.checkpoint())
    known = {tensor.name: tensor for tensor in tensors}
    assert len(known) == len(tensors)
    assert sum(elements(tensor) for tensor in tensors if not tensor.instead_of) == held(model)
    for tensor in tensors:
        if tensor.cut is not None:
            features = sum(section.size for section in tensor.cut.sections)
            assert tensor.sink.shape[tensor.cut.dimension] == -(-features // tensor.cut.step), tensor.name
        if tensor.instead_of:
            alternative = [tensor, *(known[name] for name in tensor.beside)]
            assert sum(map(elements, alternative)) == sum(elements(known[name]) for name in tensor.instead_of)
            assert all(one.instead_of == tensor.instead_of for one in alternative)
            assert all(known[name].owner is tensor.owner for name in tensor.instead_of)
    return known
