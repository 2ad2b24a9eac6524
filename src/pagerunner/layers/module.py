"""A tree of layers with named weights.

Not `torch.nn.Module`: weights here are views into memory that someone else owns and may replace, attribute access is on
the hot path of small models, and nothing here needs gradients, hooks or buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch


class Module:
    """Base of everything that holds weights.

    `weights` maps the last part of a checkpoint name to a tensor, on the meta device until it is given memory.
    Attributes that are modules, or tuples of modules, are children. Their names are those in the checkpoint, unless `names`
    maps the attribute's name to another one there.
    `unused_tensors` are beginnings of tensor names. A checkpoint may hold such tensors, and no part of the model uses them.
    """

    unused_tensors: tuple[str, ...] = ()
    names: Mapping[str, str] = MappingProxyType({})

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    def children(self) -> Iterator[tuple[str, Module]]:
        """Named children; a tuple's members are named `name.index`."""
        for attribute, value in vars(self).items():
            name = self.names.get(attribute, attribute)
            if isinstance(value, Module):
                yield name, value
            elif isinstance(value, tuple):
                yield from ((f"{name}.{i}", child) for i, child in enumerate(value) if isinstance(child, Module))

    def modules(self) -> Iterator[Module]:
        """This module and everything below it, each once even if it is shared."""
        seen: set[int] = set()
        stack: list[Module] = [self]
        while stack:
            module = stack.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            yield module
            stack.extend(child for _, child in reversed(list(module.children())))

    def checkpoint(self, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor that a checkpoint must hold: its name there, and the view of this module's weights it fills."""
        for name, tensor in self.weights.items():
            yield f"{prefix}{name}", tensor
        for name, child in self.children():
            yield from child.checkpoint(f"{prefix}{name}.")

    def stacked(self, prefix: str = "") -> Iterator[tuple[str, torch.Tensor, tuple[str, ...]]]:
        """Tensors that a checkpoint may hold in place of several of `checkpoint`'s: name, view, and the replaced names."""
        for name, child in self.children():
            yield from child.stacked(f"{prefix}{name}.")
