"""Weights of 8 bits: fp8 (e4m3) or int8 numbers, and scales of the matrix, of each output feature, or of each block.

A checkpoint's formats (`quant/formats.py`) name the same tensors differently:

| Writer | Scales | Tensors beside `weight` |
|---|---|---|
| fp8 | tensor | `weight_scale` (transformers: `weight_scale_inv`); static activations: `input_scale` (`activation_scale`) |
| fp8 | block | `weight_scale_inv`, which multiplies in spite of its name |
| deepseek-v4 | block | `scale`, e8m0 or powers of two in float32 |
| compressed-tensors, modelopt | tensor, channel, block | `weight_scale`; static activations: `input_scale` |
| fbgemm_fp8 | channel | `weight_scale` |

Experts of Llama 4 may lie in one tensor, input features before output features: `gate_up_proj` [E, I, O]. Its scales are
`gate_up_proj_weight_scale`, one number (modelopt), or `gate_up_proj_scale` [E, 1, O] (fbgemm_fp8, where `down_proj_scale` is [E, O, 1]).

Shape letters: T tokens, I input features, O output features, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from pagerunner.errors import ConfigError
from pagerunner.ops.stored import Stored, Stored8
from pagerunner.quant.base import Weights
from pagerunner.quant.formats import Format, Scheme
from pagerunner.quant.pack_sinks import NumberSink, PackSink, SlicesSink, UnusedSink
from pagerunner.quant.sinks import FLOATS, INDICES, Along, Axes, ByteSink, CopyWeight, ScaleCheck, Sink
from pagerunner.quant.stored import StoredMethod

_STORED = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
_UNUSED = {"input_scale": FLOATS, "input_zero_point": (torch.int8, torch.uint8, *INDICES)}
_SCALE_DTYPES = (*FLOATS, torch.float8_e8m0fnu)


class W8(StoredMethod):
    """e4m3 or int8 numbers [O, I] times float32 scales: [O, 1], or one for each block of rows and columns.

    A scale of a whole matrix is kept as one of each output feature. So matrices with different scales stand beside each other in one
    layer without being rounded again.

    Where the checkpoint's writer means activations to be rounded, products of many tokens round them, with scales that follow each token
    (`ops/quantize.py`). That is closer to the activations than one scale from the checkpoint, so `input_scale` is taken and not used. Blocks
    of weights have blocks of activations; other scales go with one of each token.

    `starts` are the output features that parts begin at. Where blocks don't divide them, a block's scale is kept several times, once for
    each `high` rows. Example: with blocks of 128 rows and a part that begins at 192, `high` is 64.
    """

    def __init__(self, checkpoint: Format, scheme: Scheme, dtype: torch.dtype, starts: Sequence[int] = ()) -> None:
        self.dtype, self.numbers = dtype, _STORED[scheme.number]
        self.block = scheme.block if scheme.scales == "block" else None
        self.high = math.gcd(self.block[0], *starts) if self.block else 1
        self.by_tensor = scheme.scales == "tensor"
        self.writer = checkpoint.writer
        whole = scheme.number == "int8"
        self.check_scale = ScaleCheck(dtype, 128 if whole else 448, signed=whole)
        self.unused = ("input_scale",) if scheme.rounding == "static" else scheme.unused
        rounds = checkpoint.rounds and scheme.rounding != ""
        self.activations = "none" if not rounds else "block" if self.block else "token"
        self.scale_name = "weight_scale"
        if self.block is not None:
            self.scale_name = {"fp8": "weight_scale_inv", "deepseek-v4": "scale"}.get(checkpoint.writer, "weight_scale")

    def create(self, out_features: int, in_features: int, dtype: torch.dtype) -> Weights:
        """See WeightMethod."""
        rows, columns = (self.high, self.block[1]) if self.block else (1, in_features)
        shape = (-(-out_features // rows), -(-in_features // columns))
        return {
            "weight": torch.empty(out_features, in_features, dtype=self.numbers, device="meta"),
            "weight_scale": torch.empty(shape, dtype=torch.float32, device="meta"),
        }

    def sinks(self, weights: Mapping[str, torch.Tensor], rows: slice) -> dict[str, Sink]:
        """See WeightMethod."""
        codes, scales, high = weights["weight"][rows], weights["weight_scale"], self.high
        if rows.start % high:
            raise ConfigError(
                f"A part begins at output feature {rows.start}, which {high}, its blocks' rows, don't divide."
            )
        own = scales[rows.start // high : -(-rows.stop // high) : rows.step]
        found: dict[str, Sink] = {"weight": ByteSink(codes, ("outputs", "inputs"))}
        found[self.scale_name] = (
            ScalarSink(own, self.check_scale) if self.by_tensor else self._scale_sink(own, codes.shape[0])
        )
        return found | {name: UnusedSink(_UNUSED[name]) for name in self.unused}

    def stacked(self, weights: Mapping[str, torch.Tensor], *, transposed: bool = False) -> dict[str, Sink]:
        """See StoredMethod."""
        codes, scales = weights["weight"], weights["weight_scale"]
        if not transposed or self.writer not in ("modelopt", "fbgemm_fp8"):
            return {}
        (experts, outputs, inputs), device = codes.shape, codes.device

        def put(expert: int, source: torch.Tensor) -> None:
            codes[expert].view(torch.uint8).copy_(source.view(torch.uint8).T)

        axes: Axes = ("experts", "inputs", "outputs")
        found: dict[str, Sink] = {"": SlicesSink((experts, inputs, outputs), (codes.dtype,), put, device, axes)}
        if self.by_tensor:
            found["_weight_scale"] = NumberSink(
                FLOATS, lambda x: scales.copy_(x.float().reshape(1)), device, self.check_scale
            )
            found["_input_scale"] = UnusedSink(FLOATS)
        else:
            found["_scale"] = _RowsSink(scales, self.check_scale)
        return found

    def stored(self, weights: Mapping[str, torch.Tensor]) -> Stored:
        """See StoredMethod."""
        codes = weights["weight"]
        block = (self.high, self.block[1] if self.block else codes.shape[-1])
        return Stored8(codes, weights["weight_scale"], block, self.activations)

    def _scale_sink(self, scales: torch.Tensor, outputs: int) -> Sink:
        if self.block is None:
            return ScaleSink(scales, (outputs, 1), (Along("outputs"), None), self.check_scale)
        rows, columns = self.block
        axes = (Along("outputs", rows), Along("inputs", columns))
        return ScaleSink(scales, (-(-outputs // rows), rows // self.high), axes, self.check_scale)

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


class ScaleSink(Sink):
    """Fills float32 scales from those of any float dtype; e8m0 is a power of two. Dimensions of 1 may be left out.

    `rows` are those of the checkpoint's scales, and how many of the target's rows each of them becomes.
    """

    def __init__(
        self, target: torch.Tensor, rows: tuple[int, int], axes: tuple[Along, Along | None], check: ScaleCheck
    ) -> None:
        super().__init__((rows[0], target.shape[1]), _SCALE_DTYPES, axes)
        self.target, self.times, self.check = target, rows[1], check

    def takes(self, shape: tuple[int, ...]) -> bool:
        """See Sink."""
        return shape == self.shape or tuple(n for n in shape if n > 1) == tuple(n for n in self.shape if n > 1) != ()

    def put(self, source: torch.Tensor, copy: CopyWeight) -> None:
        """See Sink."""
        self.check(source)
        scales = source.float().reshape(self.shape)
        copy(self.target, scales.repeat_interleave(self.times, 0)[: self.target.shape[0]])


class _RowsSink(PackSink):
    """Fills a float32 scale of each output feature of each expert, [E, O, 1], from [E, 1, O] or [E, O, 1]."""

    def __init__(self, target: torch.Tensor, check: ScaleCheck) -> None:
        experts, outputs, _ = target.shape
        shape = (experts, 1, outputs)
        axes: Axes = ("experts", None, "outputs")
        super().__init__(shape, FLOATS, lambda x: target.copy_(x.reshape(target.shape)), target.device, axes, check)

    def takes(self, shape: tuple[int, ...]) -> bool:
        """See Sink."""
        experts, _, outputs = self.shape
        return shape in (self.shape, (experts, outputs, 1))


class ScalarSink(Sink):
    """Fills every one of `target`'s numbers with the same, which a checkpoint holds as [] or [1]."""

    def __init__(self, target: torch.Tensor, check: ScaleCheck) -> None:
        super().__init__((1,), FLOATS)
        self.target, self.check = target, check

    def takes(self, shape: tuple[int, ...]) -> bool:
        """See Sink."""
        return shape in ((), (1,))

    def put(self, source: torch.Tensor, copy: CopyWeight) -> None:
        """See Sink."""
        self.check(source)
        copy(self.target, source.float().reshape(1, 1).expand(self.target.shape))
