"""A tree of layers with named weights.

Not `torch.nn.Module`: weights here are views into memory that someone else owns and may replace, attribute access is on
the hot path of small models, and nothing here needs gradients, hooks or buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from pagerunner.layers.cuts import TensorCut
from pagerunner.quant.sinks import CopySink, Sink


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """What a model takes of a checkpoint: a tensor's name there, its shape and dtypes (`sink`), and what it fills.

    `owner` is the module whose weights it fills, and `part` says which part of them if the checkpoint holds them in several:
    "k_proj" of a matrix of queries, keys and values.

    `cut` is how devices may divide the tensor's features; None: each device reads the whole tensor. `once`: the tensor is one term of a
    sum that devices add up, so one device has it and the others have zeros. `experts` are those whose weights it holds, None if it isn't
    about experts. Devices may divide whole experts instead of their features; a tensor of several has a dimension for them
    (`sink.along("experts")`), or is one number for all.

    `instead_of` names the tensors for which a checkpoint may hold this one; it is empty for those that a checkpoint must hold.
    Several tensors may stand for `instead_of` only together, as packed numbers and their scales. Then `beside` names the others.

    Example: `model.layers.0.self_attn.k_proj.weight` has shape [1024, 4096], its owner is the FusedLinear `qkv_proj`, its part
    is "k_proj", and its cut is along dimension 0, by key/value heads of 128 rows: each of two devices may take 512 rows.
    """

    name: str
    sink: Sink
    owner: Module
    part: str = ""
    cut: TensorCut | None = None
    once: bool = False
    experts: range | None = None
    instead_of: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()


class Module:
    """Base of everything that holds weights.

    `weights` maps the last part of a checkpoint name to a tensor, on the meta device until it is given memory.
    Attributes that are modules, or tuples of modules, are children. Their names are those in the checkpoint, unless `names`
    maps the attribute's name to another one there; "": the child's tensors have no name before theirs.
    `unused_tensors` are beginnings of tensor names. A checkpoint may hold such tensors, and no part of the model uses them.
    `asked_by` names in messages what says which tensors a checkpoint must hold.
    `cuts` says of the module's own weights, by their names, how devices may divide them.
    """

    unused_tensors: tuple[str, ...] = ()
    asked_by: str = "the config"
    names: Mapping[str, str] = MappingProxyType({})
    cuts: Mapping[str, TensorCut] = MappingProxyType({})

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

    def join(self, most_tokens: int) -> None:
        """Take part in a step for which other teams of ranks have up to so many tokens, and this one none. Only mixtures have a part in it."""
        for _, child in self.children():
            child.join(most_tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of this module's own weights."""
        return sum(tensor.nbytes for tensor in self.weights.values())

    def randomize(self, generator: torch.Generator) -> None:
        """Fill this module's own weights with small random values: norms near 1, indices 0, all others with a deviation of 0.02."""
        for name, tensor in self.weights.items():
            if tensor.is_floating_point():
                is_norm = name == "weight" and tensor.dim() == 1
                tensor.normal_(1.0 if is_norm else 0.0, 0.02, generator=generator)
            else:
                tensor.zero_()

    def sources(self, prefix: str = "") -> Iterator[tuple[Module, str, str]]:
        """The checkpoint's modules whose matrices fill this module and its children: owner, part, and name; formats are for them."""
        for name, child in self.children():
            yield from child.sources(f"{prefix}{name}." if name else prefix)

    def checkpoint(self, prefix: str = "") -> Iterator[CheckpointTensor]:
        """Every tensor that a checkpoint holds, or may hold, for this module and its children; their names begin with `prefix`.

        The sinks are made by the call and are good for one load.
        """
        for name in self.weights:
            yield CheckpointTensor(f"{prefix}{name}", self.sink(name), self, cut=self.cuts.get(name))
        for name, child in self.children():
            yield from child.checkpoint(f"{prefix}{name}." if name else prefix)

    def sink(self, name: str) -> Sink:
        """What takes the tensor of a checkpoint that fills the whole of the module's own weights `name`."""
        return CopySink(self.weights[name])
