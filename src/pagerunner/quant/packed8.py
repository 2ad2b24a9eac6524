"""Whole numbers of 8 bits that a checkpoint holds packed in words, as those of 4 bits (`quant/w4.py`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pagerunner.ops.stored import Stored, Stored8
from pagerunner.quant.base import Weights
from pagerunner.quant.sinks import Sink
from pagerunner.quant.stored import StoredMethod
from pagerunner.quant.w4 import LAYOUTS, Packing, Target


class Packed8(StoredMethod):
    """Numbers 0 to 255 less their zero point, times a float32 scale for each group; kept as int8, 128 less.

    `Stored8` has no zero points. So a form with zero points of its own is only ever unpacked.
    """

    def __init__(self, packing: Packing, dtype: torch.dtype) -> None:
        self.packing, self.dtype = packing, dtype

    def create(self, out_features: int, in_features: int, dtype: torch.dtype) -> Weights:
        """See WeightMethod."""
        groups, _ = self.packing.groups(in_features)
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "codes": ((out_features, in_features), torch.int8),
            "scales": ((out_features, groups), torch.float32),
        }
        if self.packing.zeros:
            shapes["zeros"] = ((out_features, groups), torch.uint8)
        if self.packing.permuted:
            shapes["order"] = ((in_features,), torch.int32)
        return {name: torch.empty(shape, dtype=own, device="meta") for name, (shape, own) in shapes.items()}

    def check(self, out_features: int, in_features: int) -> None:
        """See StoredMethod."""
        self.packing.check(out_features, in_features)

    def stored(self, weights: Mapping[str, torch.Tensor]) -> Stored:
        """See StoredMethod."""
        assert not self.packing.zeros, "matrices with zero points are unpacked"
        codes, scales = weights["codes"], weights["scales"]
        return Stored8(codes, scales, (1, codes.shape[-1] // scales.shape[-1]))

    def order(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """See StoredMethod."""
        return weights.get("order")

    def joins(self, starts: tuple[int, ...]) -> bool:
        """Parts may have their input features in different orders."""
        return not self.packing.permuted

    def dense(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See WeightMethod."""
        if not self.packing.zeros:
            return super().dense(weights)
        codes, scales = weights["codes"], weights["scales"]
        group = codes.shape[1] // scales.shape[1]
        zeros = weights["zeros"].float() - 128
        numbers = codes.float() - zeros.repeat_interleave(group, 1)
        matrix, order = (numbers * scales.repeat_interleave(group, 1)).to(self.dtype), self.order(weights)
        return matrix if order is None else torch.empty_like(matrix).index_copy_(1, order.long(), matrix)

    def sinks(self, weights: Mapping[str, torch.Tensor], rows: slice) -> dict[str, Sink]:
        """See WeightMethod."""
        return LAYOUTS[self.packing.layout](self.packing, Target.of(weights, rows))

    def randomize(self, weights: Weights, generator: torch.Generator) -> None:
        """See WeightMethod."""
        deviation = 0.02
        for name, tensor in weights.items():
            if name == "codes":
                tensor.view(torch.uint8).random_(0, 256, generator=generator)
            elif name == "zeros":
                tensor.fill_(128)
            elif name == "order":
                tensor.copy_(torch.randperm(tensor.numel(), generator=generator, device=tensor.device))
            elif name == "scales":
                tensor.fill_(deviation / 73.9)  # over the deviation of all 256 numbers
            else:
                tensor.normal_(0.0, deviation, generator=generator)
