"""A model cut down to one layer of each kind.

Layers that are alike need the same kernels. So steps that are run only to find, compile and load kernels need no more layers.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch

from pagerunner.batch import LayerMemory
from pagerunner.dist.base import Comm
from pagerunner.ops.lora import Fused

_WEIGHTS_ALIGNMENT = 256  # bytes; what libraries look at most
_PAGES_ALIGNMENT = 16  # only our kernels read pages, and Triton asks for no more
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, type)


@contextmanager
def one_layer_of_each_kind(model: Any, memory: Sequence[LayerMemory]) -> Iterator[None]:
    """Inside this context the model's decoder has only the first layer of each kind, in order.

    A model whose layers aren't a tuple `model.layers` stays as it is.
    """
    decoder = getattr(model, "model", None)
    layers = getattr(decoder, "layers", None)
    if decoder is None or not isinstance(layers, tuple):
        yield
        return
    decoder.layers = first_of_each_kind(layers, memory)
    try:
        yield
    finally:
        decoder.layers = layers


def first_of_each_kind(layers: tuple[Any, ...], memory: Sequence[LayerMemory]) -> tuple[Any, ...]:
    """The first layer of each kind, in order.

    Two layers are of one kind if all of these are equal: their classes; their settings; shapes, strides, dtypes and
    alignment of their weights and pages; whether a layer of the same memory group comes before them; and the class of the
    feed-forward of the layer before. A group's first layer launches kernels whose results the group's other layers only
    read. What a feed-forward has left to be added, the next layer's first kernels add. A value that can't be compared
    makes its layer a kind of its own.
    """
    before: Counter[int] = Counter()
    feed_forward: type | None = None
    found: dict[Any, Any] = {}
    for layer in layers:
        found.setdefault((feed_forward, _kind(layer, _WEIGHTS_ALIGNMENT, memory, before)), layer)
        feed_forward = type(getattr(layer, "feed_forward", None))
    return tuple(found.values())


def _kind(value: Any, alignment: int, memory: Sequence[LayerMemory], before: Counter[int]) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.data_ptr() % alignment
    if isinstance(value, FunctionType):
        return value.__module__, value.__qualname__
    if isinstance(value, Fused):  # its kernels don't depend on which of the products come first
        value = value[1:]
    if isinstance(value, tuple | list):
        return tuple(_kind(item, alignment, memory, before) for item in value)
    if dataclasses.is_dataclass(value):
        fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
        return type(value), _kind(fields, alignment, memory, before)
    if isinstance(value, dict):
        return tuple((key, _kind(item, alignment, memory, before)) for key, item in value.items())
    # layers share their Comm, which may refer to anything
    if not hasattr(value, "__dict__") or isinstance(value, Comm):
        return id(value)
    own = dict(vars(value))
    index = own.pop("layer_index", None)
    pages: Any = None
    if index is not None:
        group = memory[index].group
        pages = min(before[group], 1), _kind(memory[index], _PAGES_ALIGNMENT, memory, before)
        before[group] += 1
    return type(value), pages, _kind(own, alignment, memory, before)
