"""Weights that a checkpoint holds in floats, and that are rounded to 8 bits while they are loaded.

Each tensor is rounded on the weights' device as soon as it is there, a few rows at a time. So neither the device nor the host ever holds the
model in its floats.

Shape letters: I input features, O output features, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pagerunner.quant.pack_sinks import PackSink, SlicesSink
from pagerunner.quant.sinks import FLOATS, Along, Axes, Sink
from pagerunner.quant.w8 import W8

_PIECE = 1 << 24  # elements that are rounded at once: 64 MiB in float32


class Online(W8):
    """8-bit numbers and scales as `W8` keeps them, made from floats.

    The largest number of a row, or of a block, becomes the largest that the number format has (448 of e4m3, 127 of int8).
    """

    def sinks(self, weights: Mapping[str, torch.Tensor], rows: slice) -> dict[str, Sink]:
        """See WeightMethod."""
        codes = weights["weight"][rows]
        first = weights["weight_scale"][rows.start // self.high : -(-rows.stop // self.high) : rows.step]

        def put(source: torch.Tensor) -> None:
            self._round(source, codes, first)

        return {"weight": PackSink(tuple(codes.shape), FLOATS, put, codes.device, self._axes, meant=self.dtype)}

    def stacked(self, weights: Mapping[str, torch.Tensor], *, transposed: bool = False) -> dict[str, Sink]:
        """See StoredMethod."""
        codes, scales = weights["weight"], weights["weight_scale"]
        experts, outputs, inputs = codes.shape

        def put(expert: int, source: torch.Tensor) -> None:
            self._round(source.T if transposed else source, codes[expert], scales[expert])

        shape = (experts, inputs, outputs) if transposed else (experts, outputs, inputs)
        rows, columns = self._axes
        axes: Axes = ("experts", columns, rows) if transposed else ("experts", rows, columns)
        return {"": SlicesSink(shape, FLOATS, put, codes.device, axes, meant=self.dtype)}

    def only_stacked(self, *, transposed: bool) -> bool:
        """See StoredMethod."""
        return transposed

    def _round(self, source_OI: torch.Tensor, codes_OI: torch.Tensor, scales: torch.Tensor) -> None:
        """Fill codes and scales of one matrix, or of a part of one."""
        high = self.high if self.block else 1
        step = max(1, _PIECE // source_OI.shape[1] // high) * high
        for start in range(0, source_OI.shape[0], step):
            piece = source_OI[start : start + step].float()
            own = self._scales(piece)
            scales[start // high : start // high + own.shape[0]] = own
            spread = own.repeat_interleave(high, 0)[: piece.shape[0]]
            if self.block:
                spread = spread.repeat_interleave(self.block[1], 1)[:, : piece.shape[1]]
            codes_OI[start : start + step] = self._numbers(piece / spread)

    def _scales(self, piece_OI: torch.Tensor) -> torch.Tensor:
        """What the largest number of each row or block is divided by, float32 [rows, columns]; 1 where all are 0."""
        largest = piece_OI.abs()
        if self.block is None:
            largest = largest.amax(1, keepdim=True)
        else:
            rows, columns = self.high, self.block[1]
            outputs, inputs = piece_OI.shape
            largest = torch.nn.functional.pad(largest, (0, -inputs % columns, 0, -outputs % rows))
            largest = largest.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).amax((1, 3))
        scale = largest / self._most
        return torch.where(scale > 0, scale, 1.0)

    @property
    def _axes(self) -> tuple[Along, Along]:
        """Of a matrix of floats: blocks are made of whole ones."""
        rows, columns = self.block or (1, 1)
        return Along("outputs", multiple=rows), Along("inputs", multiple=columns)

    @property
    def _most(self) -> float:
        return 127.0 if self.numbers == torch.int8 else torch.finfo(self.numbers).max

    def _numbers(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clamp_(-self._most, self._most)
        return (x.round_() if self.numbers == torch.int8 else x).to(self.numbers)
