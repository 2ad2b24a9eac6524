"""An adapter's blocks, packed into pages of the page memory, and the table that says where they lie.

A block lies in one page, and a page has as many blocks as fit. Which pages an adapter has, the memory manager decides (`memory/adapters.py`): a page may
lie anywhere. Example: a page has 8,192 elements, and an adapter of rank 16 has a matrix of 64 inputs and 96 outputs. Its A has 1,024
elements and its B 1,536, so three such matrices share a page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F

from pagerunner.batch import ForwardBatch
from pagerunner.errors import ConfigError
from pagerunner.layers.linear import Linear
from pagerunner.layers.module import Module
from pagerunner.layers.moe import Experts, Router
from pagerunner.layers.shares import Parts
from pagerunner.lora.adapter import Adapter, Stack, Targets
from pagerunner.lora.pauses import in_turns
from pagerunner.ops.lora import TILE, Adapters, Blocks, Fused, FusedExperts
from pagerunner.types.checks import show

LOCK_BYTES = 2**22
"""Bytes of a buffer that are page-locked at once. No copy to the device crosses a multiple of it: the driver takes no copy from two locked ranges."""
MakeBuffer = Callable[[int, torch.dtype], tuple[torch.Tensor, object]]
"""A buffer of so many elements in host memory, and what must be kept with it."""


class Packed(NamedTuple):
    """An adapter's pages, and where each block begins: page * elements of a page + place in it, -1 for those that it doesn't have."""

    pages: torch.Tensor  # [pages, elements of a page]
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
    active: int = 0
    """A token's experts."""

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
        active = max((module.routing.active for module in model.modules() if isinstance(module, Router)), default=0)
        return cls(sizes, tuple(layers.items()), names, experts, divided, only, active)

    @property
    def widest(self) -> int:
        """Elements of the largest block: a page must have as many."""
        return TILE * max(map(max, self.sizes.values()), default=0)

    def num_pages(self, max_rank: int, page: int) -> int:
        """Pages of so many elements that an adapter of all products takes."""
        blocks = -(-max_rank // TILE)
        sizes = [TILE * size for sizes in self.sizes.values() for size in sizes for _ in range(blocks)]
        return lay(torch.tensor(sizes, dtype=torch.int64), page)[1]

    def table_bytes(self, slots: int, max_rank: int) -> int:
        """Bytes of the table of so many slots."""
        return slots * 16 * len(self.sizes) * -(-max_rank // TILE)

    def pairs_bytes(self, tokens: int) -> int:
        """The most that a mixture of a step of so many tokens takes on a CUDA device, if all their adapters have products of experts."""
        experts = (layer for layer, _ in self.layers if isinstance(layer, Experts))
        return max((layer.adapted_bytes(tokens * self.active) for layer in experts), default=0)

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
        self, adapter: Adapter, max_rank: int, dtype: torch.dtype, page: int, make_buffer: MakeBuffer = plain_buffer
    ) -> Packed:
        """The adapter, or a rank's part of it, in pages of so many elements. Raises what `check` raises."""
        self.check(adapter)
        numbers = {name: number for number, name in enumerate(self.sizes)}
        here = [stack for stack in map(self._part_of, adapter.stacks) if stack.names]
        sides = [
            (names, side, all_PRX) for names, a_PRI, b_POR in here for side, all_PRX in enumerate((a_PRI, b_POR.mT))
        ]
        counts = [len(names) * -(-all_PRX.shape[1] // TILE) for names, _, all_PRX in sides]
        sizes = [TILE * all_PRX.shape[2] for *_, all_PRX in sides]
        begins, num_pages = lay(torch.tensor(sizes).repeat_interleave(torch.tensor(counts)), page)
        elements, holder = make_buffer(max(num_pages, 1) * page, dtype)  # a stage may have none of an adapter's layers
        elements.zero_()
        places = torch.full((len(self.sizes), -(-max_rank // TILE), 2), -1, dtype=torch.int64)
        for (names, side, all_PRX), size, at in zip(sides, sizes, begins.split(counts), strict=True):
            blocks = len(at) // len(names)
            places[[numbers[name] for name in names], :blocks, side] = at.view(-1, blocks)
            rows = F.pad(all_PRX, (0, 0, 0, -all_PRX.shape[1] % TILE)).reshape(-1, size)
            ends = [*(torch.nonzero(at.diff() != size).flatten() + 1).tolist(), len(at)]
            for first, end in in_turns(pairwise([0, *ends])):  # those that follow each other in a page are one copy
                place = int(at[first])
                elements[place : place + (end - first) * size].view(-1, size).copy_(rows[first:end])
        experts = any(stack.names[0] in self.experts for stack in adapter.stacks)
        return Packed(elements.view(-1, page)[:num_pages], places, holder, experts)

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
        assert {self.sizes[name] for name in names} <= {sizes}, (
            f"{names[0]}: other parts than those of the rank's model"
        )
        return Stack(names, a_PRI, b_POR)


def _ends(name: str, ends: tuple[str, ...]) -> bool:
    """Whether a module has one of these names, or a name that ends so."""
    return any(name == end or name.endswith(f".{end}") for end in ends)


def lay(sizes: torch.Tensor, page: int) -> tuple[torch.Tensor, int]:
    """Where blocks of these sizes begin, in pages of so many elements that follow each other, and how many pages that takes. Each page takes the largest
    blocks that still fit.
    """
    found, pages = torch.empty_like(sizes), 0
    all_sizes, counts = sizes.unique(return_counts=True)
    left = dict(zip(all_sizes.tolist(), counts.tolist(), strict=True))
    places: dict[int, list[int]] = {size: [] for size in sorted(left, reverse=True)}
    assert page >= max(left, default=0), "a block doesn't fit a page"
    while any(left.values()):
        at = 0
        for size, own in places.items():
            count = min(left[size], (page - at) // size)
            own.extend(range(pages * page + at, pages * page + at + count * size, size))
            at += count * size
            left[size] -= count
        pages += 1
    for size, own in places.items():
        found[sizes == size] = torch.tensor(own)
    return found, pages


class AdapterTable:
    """Where the blocks of the adapters in slots lie in the page memory `kv_bytes`, whose pages have `page_bytes`."""

    def __init__(
        self, products: Products, kv_bytes: torch.Tensor, page_bytes: int, dtype: torch.dtype, slots: int, max_rank: int
    ) -> None:
        self.products, self.dtype, self.slots, self.max_rank = products, dtype, slots, max_rank
        self.page = page_bytes // dtype.itemsize
        shape = slots, len(products.sizes), -(-max_rank // TILE), 2
        places = torch.full(shape, -1, dtype=torch.int64, device=kv_bytes.device)
        self.blocks = Blocks(kv_bytes.view(dtype), places, torch.zeros(slots, dtype=torch.bool, device=kv_bytes.device))
        self._laid: dict[int, torch.Tensor] = {}  # the places of `Packed`, by slot
        self.of_experts: set[int] = set()
        """Slots whose adapters have products of experts."""

    def fill(self, slot: int, packed: Packed, offsets: Sequence[int], missing: Sequence[int]) -> None:
        """Copy the `missing` ones of an adapter's pages to their places (`offsets`, in bytes, of all its pages), on the current stream. They are the slot's from then on."""
        pool, itemsize = self.blocks.pool, self.dtype.itemsize
        elements, piece = packed.pages.view(-1), LOCK_BYTES // itemsize
        for number in in_turns(missing):
            if number < len(packed.pages):  # other ranks may have more
                first, end = number * self.page, (number + 1) * self.page
                to = offsets[number] // itemsize - first
                for begin, stop in pairwise([first, *range(-(-(first + 1) // piece) * piece, end, piece), end]):
                    pool[to + begin : to + stop].copy_(elements[begin:stop], non_blocking=True)
        self._laid[slot] = packed.places
        (self.of_experts.add if packed.experts else self.of_experts.discard)(slot)
        assert self.blocks.experts_S is not None
        self.blocks.experts_S[slot : slot + 1].fill_(packed.experts)
        self.place(slot, offsets)

    def place(self, slot: int, offsets: Sequence[int]) -> None:
        """The pages of the slot's adapter lie here now."""
        laid, bases = self._laid[slot], torch.tensor(offsets, dtype=torch.int64) // self.dtype.itemsize
        places = bases[laid.clamp(min=0) // self.page] + laid % self.page
        self.blocks.places[slot].copy_(torch.where(laid < 0, laid, places), non_blocking=True)

    def clear(self) -> None:
        """Forget all adapters."""
        for one, value in ((self.blocks.places, -1), (self.blocks.experts_S, 0)):
            assert one is not None
            one.fill_(value)
        self.of_experts.clear()


class RowAdapters:
    """Which slot of adapters each request's slot has, on the device and as far as the host must know it."""

    def __init__(self, table: AdapterTable, max_num_seqs: int) -> None:
        self.table = table
        self._own = torch.full((max_num_seqs,), -1, dtype=torch.int32, device=table.blocks.places.device)
        self._has: dict[int, int] = {}
        self._max_num_seqs = max_num_seqs
        self.may_be_of_experts = bool(table.products.experts)
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
        self.table.of_experts = {adapter} if adapter >= 0 and self.may_be_of_experts else set()

    def any(self, slots: tuple[int, ...] | list[int]) -> bool:
        """Whether any of these requests has an adapter."""
        return not self._has.keys().isdisjoint(slots)

    def of_experts(self, slots: Sequence[int]) -> bool:
        """Whether any of these requests has an adapter with products of experts."""
        return any(self._has.get(slot, -1) in self.table.of_experts for slot in slots)

    def of(self, batch: ForwardBatch, experts: bool) -> Adapters:
        """The adapters of a batch's tokens, which may have products of `experts`: two launches."""
        rows, table = batch.rows, self.table
        own_R = self._own.index_select(0, rows.slots_R)
        return Adapters.of_rows(own_R, rows.query_start_R1, rows.row_T, table.slots, table.blocks, experts=experts)
