"""A fixed region of memory for adapters: every slot has room for one adapter of the highest rank.

The table says where each block lies, so the region's order is known here alone. Example: two slots, rank 32, a matrix of 64 inputs and 96
outputs have 2 * 2 blocks of A with 1,024 elements each, and 2 * 2 of B with 1,536.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pagerunner.batch import ForwardBatch
from pagerunner.errors import ConfigError
from pagerunner.layers.linear import Linear
from pagerunner.layers.module import Module
from pagerunner.layers.moe import Experts
from pagerunner.layers.shares import Parts
from pagerunner.lora.adapter import Adapter, Stack, Targets
from pagerunner.ops.lora import TILE, Adapters, Blocks, Fused, FusedExperts
from pagerunner.types.checks import show

MakeBuffer = Callable[[int, torch.dtype], tuple[torch.Tensor, object]]
"""A buffer of so many elements in host memory, and what must be kept with it."""


class Packed(NamedTuple):
    """An adapter as it lies in a slot: all its blocks one behind the other, and where each begins, -1 for those that it doesn't have."""

    elements: torch.Tensor
    places: torch.Tensor  # [products, blocks, 2] int64
    holder: object
    experts: bool
    """Whether the adapter has products of experts, here or on other ranks."""


def plain_buffer(elements: int, dtype: torch.dtype) -> tuple[torch.Tensor, object]:
    """A buffer in ordinary memory."""
    return torch.empty(elements, dtype=dtype), None


class Whole(NamedTuple):
    """The whole model, without memory, of which a rank has a part, and which `parts` of its features that has; None where sizes alone are asked for."""

    model: Module
    parts: Parts | None = None


@dataclass(frozen=True, slots=True)
class Products:
    """The numbers of a model's products in the table, by names of the checkpoint, with their outputs and inputs, and the layers that have them.

    The model of a rank has some of the matrices, or some features of them: rows of B where outputs are divided, and columns of A where inputs are.
    """

    sizes: Mapping[str, tuple[int, int]]
    layers: tuple[tuple[Linear | Experts, int], ...]
    """Each layer and its first product's number."""
    every: frozenset[str]
    """The whole model's names: an adapter may have products of these."""
    experts: frozenset[str]
    """Those of experts among them."""
    divided: Mapping[str, list[slice]]
    """Of matrices that ranks divide, which rows of B or columns of A are here."""
    only: tuple[str, ...] | None = None
    """What names end in, if not all matrices may have an adapter."""

    @classmethod
    def of(cls, model: Module, only: tuple[str, ...] | None = None, whole: Whole | None = None) -> Products:
        """Those of a model, which needs no memory yet; or of its layers that have a matrix whose name ends in one of `only`.

        `whole`: of which the model is a rank's part. A fused layer's products follow each other. Raises ConfigError for an end that no name has.
        """
        sizes: dict[str, tuple[int, int]] = {}
        layers: dict[Linear | Experts, int] = {}
        here = {name: target for name, target in Targets.of(model).matrices.items() if not target.refused}
        every = here
        if whole is not None:
            every = {name: target for name, target in Targets.of(whole.model).matrices.items() if not target.refused}
        for end in only or ():
            if not any(_ends(name, (end,)) for name in every):
                known = ", ".join(sorted({name.rpartition(".")[2] for name in every}))
                raise ConfigError(
                    f"lora_target_modules: no matrix that may have an adapter is called {show(end)}; there are {known}."
                )
        asked = {target.owner for name, target in every.items() if only is None or _ends(name, only)}
        names = frozenset(name for name, target in every.items() if target.owner in asked)
        divided: dict[str, list[slice]] = {}
        for name, target in here.items():
            if name in names and isinstance(target.owner, Linear | Experts):
                layers.setdefault(target.owner, len(sizes))
                sizes[name] = target.sizes
                if whole is not None and whole.parts is not None and target.sizes != every[name].sizes:
                    divided[name] = every[name].slices(whole.parts)
        experts = frozenset(name for name in names if isinstance(every[name].owner, Experts))
        return cls(sizes, tuple(layers.items()), names, experts, divided, only)

    def elements(self, max_rank: int) -> int:
        """Those of one adapter of the highest rank."""
        return -(-max_rank // TILE) * TILE * sum(outputs + inputs for outputs, inputs in self.sizes.values())

    def num_bytes(self, slots: int, max_rank: int, itemsize: int) -> int:
        """Bytes of a region with so many slots, and of its table."""
        table = 16 * len(self.sizes) * -(-max_rank // TILE)
        return slots * (self.elements(max_rank) * itemsize + table)

    def adapt(self, device: torch.device | str = "cpu") -> None:
        """Tell the layers that they may have adapters from now on."""
        for layer, first in self.layers:
            if isinstance(layer, Experts):
                layer.adapted = FusedExperts.of(first, *layer.sizes, device)
            else:
                layer.adapted = Fused.of(first, list(layer.parts.values()), device)

    def check(self, adapter: Adapter) -> None:
        """Raise ConfigError for an adapter of a matrix whose adapters no layer computes, or that isn't asked for."""
        names = adapter.names
        if others := names - self.every:
            raise ConfigError(
                f"{min(others)} can't have an adapter: {'no layer computes it' if self.only is None else self._left_out()}."
            )
        if self.only is not None and (others := {name for name in names if not _ends(name, self.only)}):
            raise ConfigError(f"{min(others)} can't have an adapter: {self._left_out()}.")

    def _left_out(self) -> str:
        return f"lora_target_modules, {', '.join(self.only or ())}, leaves it out"

    def pack(
        self, adapter: Adapter, max_rank: int, dtype: torch.dtype, make_buffer: MakeBuffer = plain_buffer
    ) -> Packed:
        """The adapter, or a rank's part of it, in the order of a slot. Raises what `check` raises."""
        self.check(adapter)
        numbers = {name: number for number, name in enumerate(self.sizes)}
        here = [stack for stack in map(self._part_of, adapter.stacks) if stack.names]
        count = sum(
            _blocks(stack) * TILE * (stack.b_POR.shape[1] + stack.a_PRI.shape[2]) * len(stack.names) for stack in here
        )
        elements, holder = make_buffer(max(count, 1), dtype)  # a stage may have none of an adapter's layers
        elements.zero_()
        places = torch.full((len(self.sizes), -(-max_rank // TILE), 2), -1, dtype=torch.int64)
        at = 0
        for stack in here:
            names, a_PRI, b_POR = stack
            blocks, (_, rank, inputs), outputs = _blocks(stack), a_PRI.shape, b_POR.shape[1]
            shape, size = (len(names), blocks), TILE * (outputs + inputs)
            own = elements[at : at + len(names) * blocks * size].view(*shape, size)
            begins = at + torch.arange(len(names) * blocks).view(shape) * size
            places[[numbers[name] for name in names], :blocks] = torch.stack([begins + TILE * outputs, begins], 2)
            for to, whole_PRX in zip(own.split([TILE * outputs, TILE * inputs], 2), (b_POR.mT, a_PRI), strict=True):
                for block, first in enumerate(range(0, rank, TILE)):
                    some = whole_PRX[:, first : first + TILE]
                    to[:, block].unflatten(1, (TILE, -1))[:, : some.shape[1]].copy_(some)
            at += own.numel()
        return Packed(elements, places, holder, any(stack.names[0] in self.experts for stack in adapter.stacks))

    def _part_of(self, stack: Stack) -> Stack:
        """What a rank has of some products, which may be none."""
        names, a_PRI, b_POR = stack
        here = [number for number, name in enumerate(names) if name in self.sizes]
        if len(here) < len(names):
            names, a_PRI, b_POR = [names[number] for number in here], a_PRI[here], b_POR[here]
        if here and names[0] in self.divided:
            outputs, slices = self.sizes[names[0]][0], self.divided[names[0]]
            if b_POR.shape[1] != outputs:
                b_POR = torch.cat([b_POR[:, some] for some in slices], 1)
            else:
                a_PRI = torch.cat([a_PRI[..., some] for some in slices], 2)
        sizes = b_POR.shape[1], a_PRI.shape[2]
        assert all(self.sizes[name] == sizes for name in names), (
            f"{names[0]}: other parts than those of the rank's model"
        )
        return Stack(names, a_PRI, b_POR)


def _blocks(stack: Stack) -> int:
    """How many blocks a product has."""
    return -(-int(stack.a_PRI.shape[1]) // TILE)


def _ends(name: str, ends: tuple[str, ...]) -> bool:
    """Whether a module has one of these names, or a name that ends so."""
    return any(name == end or name.endswith(f".{end}") for end in ends)


class Region:
    """The adapters on a device, by slot. `pool` has `slots` times `Products.elements`."""

    def __init__(self, products: Products, pool: torch.Tensor, slots: int, max_rank: int) -> None:
        self.products, self.slots, self.max_rank = products, slots, max_rank
        shape = slots, len(products.sizes), -(-max_rank // TILE), 2
        self.blocks = Blocks(pool, torch.full(shape, -1, dtype=torch.int64, device=pool.device))
        self.of_experts: set[int] = set()
        """Slots whose adapters have products of experts."""

    def put(self, slot: int, adapter: Adapter) -> None:
        """Copy an adapter into a slot that no step in flight uses. What was there is gone. Raises what `Products.check` raises."""
        self.fill(slot, self.products.pack(adapter, self.max_rank, self.blocks.pool.dtype))

    def fill(self, slot: int, packed: Packed) -> None:
        """As `put`, on the current stream."""
        pool, places = self.blocks
        at = slot * self.products.elements(self.max_rank)
        pool[at : at + packed.elements.numel()].copy_(packed.elements, non_blocking=True)
        places[slot].copy_(torch.where(packed.places < 0, packed.places, packed.places + at), non_blocking=True)
        (self.of_experts.add if packed.experts else self.of_experts.discard)(slot)

    def clear(self) -> None:
        """Forget all adapters."""
        self.blocks.places.fill_(-1)
        self.of_experts.clear()


class RowAdapters:
    """Which slot of adapters each request's slot has, on the device and as far as the host must know it."""

    def __init__(self, region: Region, max_num_seqs: int) -> None:
        self._region = region
        self._own = torch.full((max_num_seqs,), -1, dtype=torch.int32, device=region.blocks.places.device)
        self._has: dict[int, int] = {}
        self._max_num_seqs = max_num_seqs
        self.may_be_of_experts = bool(region.products.experts)
        """Whether adapters may have products of experts."""

    def set(self, slot: int, adapter: int) -> None:
        """A request with this slot of adapters, or -1, takes a slot."""
        if adapter >= 0 or slot in self._has:
            self._own[slot : slot + 1].fill_(adapter)
        self._has.pop(slot, None)
        if adapter >= 0:
            self._has[slot] = adapter

    def set_all(self, adapter: int) -> None:
        """Have all slots' requests have this slot of adapters, or -1. It may be empty, and is one of adapters that have all products."""
        self._own.fill_(adapter)
        self._has = dict.fromkeys(range(self._max_num_seqs), adapter) if adapter >= 0 else {}
        self._region.of_experts = {adapter} if adapter >= 0 and self.may_be_of_experts else set()

    def any(self, slots: tuple[int, ...] | list[int]) -> bool:
        """Whether any of these requests has an adapter."""
        return not self._has.keys().isdisjoint(slots)

    def of_experts(self, slots: Sequence[int]) -> bool:
        """Whether any of these requests has an adapter with products of experts."""
        return any(self._has.get(slot, -1) in self._region.of_experts for slot in slots)

    def of(self, batch: ForwardBatch, experts: bool) -> Adapters:
        """The adapters of a batch's tokens, which may have products of `experts`: two launches."""
        rows, region = batch.rows, self._region
        own_R = self._own.index_select(0, rows.slots_R)
        return Adapters.of_rows(own_R, rows.query_start_R1, rows.row_T, region.slots, region.blocks, experts=experts)
