"""Weights of 8 bits: fp8 (e4m3) or int8 numbers, and scales of the matrix, of each output feature, or of each block.

A checkpoint's formats (`quant/formats.py`) name the same tensors differently:

| Writer | Scales | Tensors beside `weight` |
|---|---|---|
| fp8 | tensor | `weight_scale`; static activations: `input_scale` |
| fp8 | block | `weight_scale_inv`, which multiplies in spite of its name |
| compressed-tensors, modelopt | tensor, channel, block | `weight_scale`; static activations: `input_scale` |

Shape letters: T tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pagerunner.errors import ConfigError
from pagerunner.ops.linear import linear
from pagerunner.quant.base import WeightMethod, Weights
from pagerunner.quant.formats import Format, Scheme
from pagerunner.quant.sinks import FLOATS, ByteSink, CopyWeight, Sink

_STORED = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
_SCALE_DTYPES = (*FLOATS, torch.float8_e8m0fnu)


class W8(WeightMethod):
    """e4m3 or int8 numbers [O, I] times float32 scales: [O, 1], or one for each block of rows and columns.

    A scale of a whole matrix is kept as one of each output feature. So matrices with different scales stand beside each other in one
    layer without being rounded again. Activations aren't rounded, whatever the checkpoint's writer means them to be: that is
    closer to the weights, and `input_scale` is taken and not used.
    """

    def __init__(self, checkpoint: Format, scheme: Scheme, dtype: torch.dtype) -> None:
        self.dtype, self.stored = dtype, _STORED[scheme.number]
        self.block = scheme.block if scheme.scales == "block" else None
        self.by_tensor = scheme.scales == "tensor"
        self.static = scheme.rounding == "static"
        self.scale_name = (
            "weight_scale_inv" if checkpoint.writer == "fp8" and self.block is not None else "weight_scale"
        )

    def create(self, out_features: int, in_features: int, dtype: torch.dtype) -> Weights:
        """See WeightMethod."""
        rows, columns = self.block or (1, in_features)
        shape = (-(-out_features // rows), -(-in_features // columns))
        return {
            "weight": torch.empty(out_features, in_features, dtype=self.stored, device="meta"),
            "weight_scale": torch.empty(shape, dtype=torch.float32, device="meta"),
        }

    def sinks(self, weights: Mapping[str, torch.Tensor], rows: slice) -> dict[str, Sink]:
        """See WeightMethod."""
        codes, scales, high = weights["weight"][rows], weights["weight_scale"], self.block[0] if self.block else 1
        if rows.start % high:
            raise ConfigError(
                f"A part begins at output feature {rows.start}, which is not a multiple of {high}, its blocks' rows."
            )
        own = scales[rows.start // high : -(-rows.stop // high) : rows.step]
        found: dict[str, Sink] = {"weight": ByteSink(codes, ("outputs", "inputs"))}
        found[self.scale_name] = ScalarSink(own) if self.by_tensor else ScaleSink(own)
        if self.static:
            found["input_scale"] = ScalarSink(None)
        return found

    def dense(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """See WeightMethod."""
        codes, scales = weights["weight"], weights["weight_scale"]
        if self.block is not None:
            rows, columns = codes.shape
            scales = scales.repeat_interleave(self.block[0], 0)[:rows].repeat_interleave(self.block[1], 1)[:, :columns]
        return (codes.float() * scales).to(self.dtype)

    def randomize(self, weights: Weights, generator: torch.Generator) -> None:
        """See WeightMethod."""
        largest, deviation = 127, 0.02  # both number formats hold it
        for name, tensor in weights.items():
            if name == "weight":
                numbers = torch.empty(tensor.shape, device=tensor.device).normal_(0.0, largest / 4, generator=generator)
                tensor.copy_(numbers.clamp_(-largest, largest))
            elif name == "weight_scale":
                tensor.fill_(4 * deviation / largest)
            else:
                tensor.normal_(0.0, deviation, generator=generator)

    def apply(self, x_TI: torch.Tensor, weights: Weights) -> torch.Tensor:
        """See WeightMethod."""
        return linear(x_TI, self.dense(weights), weights.get("bias"))


class ScaleSink(Sink):
    """Fills float32 scales from those of any float dtype; e8m0 is a power of two. A scale of each row may lack its last dimension."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__(tuple(target.shape), _SCALE_DTYPES, ("outputs", "inputs"))
        self.target = target

    def takes(self, shape: tuple[int, ...]) -> bool:
        """See Sink."""
        return shape == self.shape or (self.shape[1] == 1 and shape == self.shape[:1])

    def put(self, source: torch.Tensor, copy: CopyWeight) -> None:
        """See Sink."""
        copy(self.target, source.float().reshape(self.shape))


class ScalarSink(Sink):
    """Fills every one of `target`'s numbers with the same, which a checkpoint holds as [] or [1]; none, if `target` is None."""

    def __init__(self, target: torch.Tensor | None) -> None:
        super().__init__((1,), FLOATS)
        self.target = target

    def takes(self, shape: tuple[int, ...]) -> bool:
        """See Sink."""
        return shape in ((), (1,))

    def put(self, source: torch.Tensor, copy: CopyWeight) -> None:
        """See Sink."""
        if self.target is not None:
            copy(self.target, source.float().reshape(1, 1).expand(self.target.shape))
