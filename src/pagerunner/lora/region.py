"""A fixed region of memory for adapters: every slot has room for one adapter of the highest rank.

The table says where each block lies, so the region's order is known here alone. Example: two slots, rank 32, a matrix of 64 inputs and 96
outputs have 2 * 2 blocks of A with 1,024 elements each, and 2 * 2 of B with 1,536.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pagerunner.errors import ConfigError
from pagerunner.layers.linear import Linear
from pagerunner.layers.module import Module
from pagerunner.lora.adapter import Adapter, Targets
from pagerunner.ops.lora import TILE, Blocks, Fused


@dataclass(frozen=True, slots=True)
class Products:
    """The numbers of a model's products in the table, by names of the checkpoint, with their outputs and inputs, and the layers that have them."""

    sizes: Mapping[str, tuple[int, int]]
    layers: tuple[tuple[Linear, int], ...]
    """Each layer and its first product's number."""

    @classmethod
    def of(cls, model: Module) -> Products:
        """Those of a model, which needs no memory yet. A fused layer's follow each other."""
        sizes: dict[str, tuple[int, int]] = {}
        layers: dict[Linear, int] = {}
        for name, target in Targets.of(model).matrices.items():
            if not target.refused and isinstance(target.owner, Linear):
                layers.setdefault(target.owner, len(sizes))
                sizes[name] = target.out_features, target.in_features
        return cls(sizes, tuple(layers.items()))

    def elements(self, max_rank: int) -> int:
        """Those of one adapter of the highest rank."""
        return -(-max_rank // TILE) * TILE * sum(outputs + inputs for outputs, inputs in self.sizes.values())

    def adapt(self, device: torch.device | str = "cpu") -> None:
        """Tell the layers that they may have adapters from now on."""
        for layer, first in self.layers:
            layer.adapted = Fused.of(first, list(layer.parts.values()), device)


class Region:
    """The adapters on a device, by slot. `pool` has `slots` times `Products.elements`."""

    def __init__(self, products: Products, pool: torch.Tensor, slots: int, max_rank: int) -> None:
        self.products, self.slots, self.max_rank = products, slots, max_rank
        shape = slots, len(products.sizes), -(-max_rank // TILE), 2
        self.blocks = Blocks(pool, torch.full(shape, -1, dtype=torch.int64, device=pool.device))

    def put(self, slot: int, adapter: Adapter) -> None:
        """Copy an adapter into a slot that no step in flight uses. What was there is gone.

        Raises:
            ConfigError: a matrix has an adapter that no layer computes.
        """
        if others := adapter.products.keys() - self.products.sizes.keys():
            raise ConfigError(f"{min(others)} can't have an adapter: those of experts aren't computed so far.")
        pool, places = self.blocks
        table = torch.full(places.shape[1:], -1, dtype=torch.int64)
        at = slot * self.products.elements(self.max_rank)
        for number, (name, sizes) in enumerate(self.products.sizes.items()):
            product = adapter.products.get(name)
            if product is None:
                continue
            for block, first in enumerate(range(0, product.rank, TILE)):
                for side, whole in enumerate((product.b_OR.T, product.a_RI)):
                    own = whole[first : first + TILE].to(pool.dtype)
                    pool[at : at + TILE * sizes[side]].zero_()
                    pool[at : at + own.numel()].copy_(own.reshape(-1))
                    table[number, block, 1 - side] = at
                    at += TILE * sizes[side]
        places[slot].copy_(table)

    def clear(self, slot: int) -> None:
        """Forget a slot's adapter."""
        self.blocks.places[slot].fill_(-1)
