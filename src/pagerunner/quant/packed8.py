"""Whole numbers of 8 bits that a checkpoint holds packed in words, as those of 4 bits (`quant/w4.py`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pagerunner.ops.stored import Stored, Stored8
from pagerunner.quant.w4 import PackedMethod


class Packed8(PackedMethod):
    """Numbers 0 to 255 less their zero point, times a float32 scale for each group; kept as int8, 128 less.

    `Stored8` has no zero points. So a form with zero points of its own is only ever unpacked.
    """

    def stored(self, weights: Mapping[str, torch.Tensor]) -> Stored:
        """See StoredMethod."""
        assert not self.packing.zeros, "matrices with zero points are unpacked"
        codes, scales = weights["codes"], weights["scales"]
        return Stored8(codes, scales, (1, codes.shape[-1] // scales.shape[-1]))

    def columns(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See StoredMethod."""
        if not self.packing.zeros:
            return super().columns(weights)
        codes, scales = weights["codes"], weights["scales"]
        group = codes.shape[1] // scales.shape[1]
        numbers = codes.float() - (weights["zeros"].float() - 128).repeat_interleave(group, 1)
        return (numbers * scales.repeat_interleave(group, 1)).to(self.dtype)
