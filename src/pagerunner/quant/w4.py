"""Weights of 4 bits: whole numbers (int4) or e2m1 floats (fp4), and a scale for each group of input features.

In memory all of them are a `Stored4` (`ops/stored.py`). Checkpoints hold them in these ways; g is a group's number of input features,
and a word is an int32 with eight numbers:

| Layout | Tensors | A weight is |
|---|---|---|
| compressed-tensors, pack-quantized | `weight_packed` words [O, I/8], `weight_scale` [O, I/g], `weight_shape`; `weight_zero_point` words [O/8, I/g]; `weight_g_idx` [I] | (n - zero) * scale; zero is 8 without zero points |
| AWQ, gemm | `qweight` words [I, O/8], `qzeros` words [I/g, O/8], `scales` [I/g, O] | (n - zero) * scale |
| GPTQ | `qweight` words [I/8, O], `qzeros` words [I/g, O/8], `scales` [I/g, O], `g_idx` [I] | (n - zero) * scale; the first version stores zero - 1 |
| compressed-tensors, mxfp4-pack-quantized | `weight_packed` bytes [O, I/2], `weight_scale` e8m0 as bytes [O, I/32] | n * scale |
| gpt-oss | `.._blocks` bytes [E, O, I/32, 16], `.._scales` e8m0 as bytes [E, O, I/32] | n * scale |
| DeepSeek-V4 | `weight` int8 [O, I/2], `scale` e8m0 [O, I/32] | n * scale |
| compressed-tensors, nvfp4-pack-quantized | `weight_packed` bytes [O, I/2], `weight_scale` e4m3 [O, I/16], `weight_global_scale` | n * scale / global scale |
| Model Optimizer, NVFP4 | `weight` bytes [O, I/2], `weight_scale` e4m3 [O, I/16], `weight_scale_2` | n * scale * scale 2 |
| the same, experts of Llama 4 | `..` bytes [E, I/2, O], `.._weight_scale` e4m3 [E, I/16, O], `.._weight_scale_2` | n * scale * scale 2 |

The low half of a byte is an even input feature. AWQ's words hold output features in the order of `words.AWQ_PLACES`.

Shape letters: I input features, O output features, E experts, G groups of input features.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from pagerunner.errors import ConfigError
from pagerunner.ops.stored import LIFTED_SCALES, RUN, Stored, Stored4, pack4
from pagerunner.quant.base import Weights
from pagerunner.quant.formats import Layout
from pagerunner.quant.pack_sinks import EqualSink, NumberSink, PackSink, SlicesSink, Sorting, UnusedSink
from pagerunner.quant.sinks import FLOATS, INDICES, Along, Axes, ScaleCheck, Sink
from pagerunner.quant.stored import StoredMethod
from pagerunner.quant.words import AWQ_PLACES, numbers_of, words_for

SCALES: dict[Layout, torch.dtype] = {  # those whose dtype isn't the file's to choose
    "gpt-oss": torch.uint8,
    "mxfp4": torch.uint8,
    "deepseek": torch.uint8,
    "compressed nvfp4": torch.float8_e4m3fn,
    "nvfp4": torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class Packing:
    """How a checkpoint holds a matrix of small numbers.

    `group` is the input features that share a scale, 0 for all. `scales` is the scales' dtype. `zeros`: groups have zero points of their
    own. `zero_offset` is added to stored zero points. `permuted`: a tensor says the group of each input feature.
    """

    layout: Layout
    group: int
    scales: torch.dtype
    zeros: bool = False
    zero_offset: int = 0
    permuted: bool = False
    bits: int = 4

    @property
    def is_float(self) -> bool:
        """Whether numbers are e2m1."""
        return self.layout in SCALES

    @property
    def kept_scales(self) -> torch.dtype:
        """The dtype of scales in memory."""
        return torch.float32 if self.bits == 8 else self.scales

    @property
    def scale_dtypes(self) -> tuple[torch.dtype, ...]:
        """Those that a checkpoint's scales may have: those whose numbers memory's scales can hold, and float64 where they are float32."""
        kept = self.kept_scales
        return tuple(own for own in FLOATS if kept in (torch.promote_types(own, kept), torch.float32))

    def inputs(self, step: int) -> Along | None:
        """A dimension of codes, `step` input features an element.

        Groups of a permuted matrix have input features from everywhere, so a part of them has no groups of one size.
        """
        return None if self.permuted else Along("inputs", step, RUN if self.bits == 4 else 1)

    @property
    def by_group(self) -> Along | None:
        """A dimension of scales or zero points, an element for each group. One for all input features is every part's."""
        return None if self.permuted or not self.group else Along("inputs", self.group)

    @property
    def most(self) -> float:
        """The largest number that a code stands for, less its zero point."""
        if self.is_float:
            return 6.0
        return (1 << self.bits) - 1 if self.zeros else 1 << self.bits - 1

    @property
    def has_rows(self) -> bool:
        """Whether a further scale multiplies the matrix."""
        return self.layout in ("compressed nvfp4", "nvfp4")

    def groups(self, in_features: int) -> tuple[int, int]:
        """Groups of a row, and input features of a group.

        Raises:
            ConfigError: groups would be of different sizes.
        """
        group = self.group or in_features
        if in_features % group:
            raise ConfigError(
                f"it has {in_features} input features, which groups of {group} (group_size) don't divide."
            )
        return in_features // group, group

    def check(self, out_features: int, in_features: int) -> None:
        """Raise ConfigError if no checkpoint holds a matrix of these sizes so."""
        self.groups(in_features)
        packed = {"awq": (out_features,), "gptq": (out_features, in_features)}.get(self.layout, ())
        for features in packed:
            if features * self.bits % 32:
                raise ConfigError(f"it has {features} features where {32 // self.bits} share a word.")


class Target(NamedTuple):
    """The weights of one part: codes (a `Stored4`'s, or int8 [O, I]), scales and zero points [O, G], factors [O], columns' order [I]."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @classmethod
    def of(cls, weights: Mapping[str, torch.Tensor], rows: slice) -> Target:
        """Those of the output features `rows`."""
        own = {name: tensor[rows] for name, tensor in weights.items() if name in ("codes", "scales", "zeros", "rows")}
        return cls(order=weights.get("order"), **own)

    @property
    def shape(self) -> tuple[int, int]:
        """Output and input features."""
        return self.codes.shape[0], self.codes.shape[1] * (1 if self.codes.dtype == torch.int8 else 2)

    def put_codes(self, codes: torch.Tensor) -> None:
        """Fill the codes from numbers 0 to 15, or 0 to 255, [O, I]."""
        if self.codes.dtype == torch.int8:
            self.codes.copy_((codes ^ 128).view(torch.int8))  # less 128
        else:
            self.codes.copy_(pack4(codes))


class PackedMethod(StoredMethod):
    """Numbers [O, I] that a checkpoint holds packed, times a scale for each group of input features; as bytes in memory."""

    def __init__(self, packing: Packing, dtype: torch.dtype) -> None:
        self.packing, self.dtype = packing, dtype
        # AutoRound has scales below 0 beside whole numbers.
        limit = LIFTED_SCALES if dtype == torch.bfloat16 and packing.bits == 4 else math.inf
        self.check_scale = ScaleCheck(dtype, packing.most, signed=not packing.is_float, limit=limit)

    def create(self, out_features: int, in_features: int, dtype: torch.dtype) -> Weights:
        """See WeightMethod."""
        packing, (groups, _) = self.packing, self.packing.groups(in_features)
        codes = torch.int8 if packing.bits == 8 else torch.uint8
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "codes": ((out_features, in_features * packing.bits // 8), codes),
            "scales": ((out_features, groups), packing.kept_scales),
        }
        if packing.zeros:
            shapes["zeros"] = ((out_features, groups), torch.uint8)
        if packing.has_rows:
            shapes["rows"] = ((out_features,), torch.float32)
        if packing.permuted:
            shapes["order"] = ((in_features,), torch.int32)
        return {name: torch.empty(shape, dtype=own, device="meta") for name, (shape, own) in shapes.items()}

    def check(self, out_features: int, in_features: int) -> None:
        """See StoredMethod."""
        self.packing.check(out_features, in_features)

    def order(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """See StoredMethod."""
        return weights.get("order")

    def joins(self, starts: tuple[int, ...]) -> bool:
        """Parts may have their input features in different orders."""
        return not self.packing.permuted

    def sinks(self, weights: Mapping[str, torch.Tensor], rows: slice) -> dict[str, Sink]:
        """See WeightMethod."""
        return LAYOUTS[self.packing.layout](self.packing, Target.of(weights, rows), self.check_scale)

    def randomize(self, weights: Weights, generator: torch.Generator) -> None:
        """See WeightMethod."""
        deviation, packing = 0.02, self.packing
        scale = deviation / (73.9 if packing.bits == 8 else 2.93 if packing.is_float else 4.61)  # that of all numbers
        for name, tensor in weights.items():
            if name == "codes":
                tensor.view(torch.uint8).random_(0, 256, generator=generator)
            elif name == "zeros":
                tensor.fill_(1 << packing.bits - 1)
            elif name == "rows":
                tensor.fill_(scale)
            elif name == "order":
                tensor.copy_(torch.randperm(tensor.numel(), generator=generator, device=tensor.device))
            elif name == "scales" and tensor.dtype == torch.uint8:  # a mixture of 2^-7 and 2^-8
                chance = torch.rand(tensor.shape, generator=generator, device=tensor.device)
                tensor.copy_(120 - (chance > 0.7).to(torch.uint8))
            elif name == "scales":
                tensor.fill_(1.0 if "rows" in weights else scale)
            else:
                tensor.normal_(0.0, deviation, generator=generator)


class W4(PackedMethod):
    """4-bit numbers [O, I] times a scale for each group of input features."""

    def check(self, out_features: int, in_features: int) -> None:
        """See StoredMethod."""
        super().check(out_features, in_features)
        if in_features % RUN:
            raise ConfigError(
                f"it has {in_features} input features, which {RUN} doesn't divide, and numbers of 4 bits."
            )

    def stored(self, weights: Mapping[str, torch.Tensor]) -> Stored:
        """See StoredMethod."""
        codes, scales = weights["codes"], weights["scales"]
        group = 2 * codes.shape[-1] // scales.shape[-1]
        numbers = "e2m1" if self.packing.is_float else "int4"
        return Stored4(codes, scales, group, numbers, weights.get("zeros"), weights.get("rows"))

    def stacked(self, weights: Mapping[str, torch.Tensor], *, transposed: bool = False) -> dict[str, Sink]:
        """See StoredMethod."""
        if self.packing.layout == "nvfp4" and transposed:
            return _nvfp4_stacked(self.packing, weights, self.check_scale)
        if self.packing.layout != "gpt-oss":
            return {}
        packing, codes, scales = self.packing, weights["codes"], weights["scales"]
        experts, outputs, half = codes.shape
        device = codes.device

        def put_codes(expert: int, blocks: torch.Tensor) -> None:
            codes[expert].copy_(pack4(_nibbles(blocks.flatten(1))))

        def put_scales(expert: int, source: torch.Tensor) -> None:
            scales[expert].copy_(source)

        blocks_shape = (experts, outputs, half // 16, 16)
        return {
            "_blocks": SlicesSink(
                blocks_shape, (torch.uint8,), put_codes, device, ("experts", "outputs", packing.inputs(32), None)
            ),
            "_scales": SlicesSink(
                blocks_shape[:3],
                (torch.uint8,),
                put_scales,
                device,
                ("experts", "outputs", packing.by_group),
                self.check_scale,
            ),
        }

    def only_stacked(self, *, transposed: bool) -> bool:
        """See StoredMethod."""
        return self.packing.layout == "gpt-oss"


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The numbers [.., I] of bytes [.., I / 2]: the low half of a byte comes first."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def _compressed(packing: Packing, target: Target, check: ScaleCheck) -> dict[str, Sink]:
    (outputs, inputs), (groups, group), bits = target.shape, packing.groups(target.shape[1]), packing.bits
    device, take_codes = target.scales.device, target.put_codes
    found: dict[str, Sink] = {}
    if target.order is not None:
        sorting = Sorting(target.order, group, target.put_codes)
        take_codes, found["weight_g_idx"] = sorting.take_codes, sorting.groups_sink()

    def put_words(words: torch.Tensor) -> None:
        take_codes(numbers_of(words, bits, 1)[:, :inputs])

    said = f"the config's matrix is [{outputs}, {inputs}]"
    found |= {
        "weight_packed": PackSink(
            (outputs, words_for(inputs, bits)), torch.int32, put_words, device, ("outputs", packing.inputs(32 // bits))
        ),
        "weight_scale": PackSink(
            (outputs, groups), packing.scale_dtypes, target.scales.copy_, device, ("outputs", packing.by_group), check
        ),
        "weight_shape": EqualSink(torch.tensor([outputs, inputs]), INDICES, said),
    }
    if target.zeros is not None:
        zeros = target.zeros

        def put_zeros(words: torch.Tensor) -> None:
            zeros.copy_(numbers_of(words, bits, 0)[:outputs])

        axes = Along("outputs", 32 // bits), packing.by_group
        found["weight_zero_point"] = PackSink((words_for(outputs, bits), groups), torch.int32, put_zeros, device, axes)
    return found


def _awq(packing: Packing, target: Target, check: ScaleCheck) -> dict[str, Sink]:
    (outputs, inputs), (groups, _) = target.shape, packing.groups(target.shape[1])
    device, zeros = target.scales.device, target.zeros
    assert zeros is not None, "AWQ has zero points"

    def put_words(words: torch.Tensor) -> None:
        target.put_codes(numbers_of(words, 4, 1, AWQ_PLACES).T)

    def put_zeros(words: torch.Tensor) -> None:
        zeros.copy_(numbers_of(words, 4, 1, AWQ_PLACES).T)

    words, by_group = Along("outputs", 8), packing.by_group
    return {
        "qweight": PackSink((inputs, outputs // 8), torch.int32, put_words, device, (packing.inputs(1), words)),
        "qzeros": PackSink((groups, outputs // 8), torch.int32, put_zeros, device, (by_group, words)),
        "scales": _transposed_scales(packing, target, check),
    }


def _transposed_scales(packing: Packing, target: Target, check: ScaleCheck) -> Sink:
    """Scales [G, O]."""
    outputs, groups = target.scales.shape
    axes: Axes = (packing.by_group, "outputs")
    return PackSink(
        (groups, outputs), packing.scale_dtypes, lambda x: target.scales.copy_(x.T), target.scales.device, axes, check
    )


def _gptq(packing: Packing, target: Target, check: ScaleCheck) -> dict[str, Sink]:
    (outputs, inputs), (groups, group), bits = target.shape, packing.groups(target.shape[1]), packing.bits
    device, take_codes, zeros = target.scales.device, target.put_codes, target.zeros
    found: dict[str, Sink] = {}
    if target.order is not None:
        sorting = Sorting(target.order, group, target.put_codes)
        take_codes, found["g_idx"] = sorting.take_codes, sorting.groups_sink()
    else:
        said = "quantization_config says desc_act false"
        found["g_idx"] = EqualSink(_in_order(inputs, group), INDICES, said, axes=("inputs",), optional=True)
    said = "the config's layer has no bias"
    found["bias"] = EqualSink(_zeros(outputs), FLOATS, said, axes=("outputs",), optional=True)

    def put_words(words: torch.Tensor) -> None:
        take_codes(numbers_of(words, bits, 0).T)

    def put_zeros(words: torch.Tensor) -> None:
        assert zeros is not None
        zeros.copy_((numbers_of(words, bits, 1).T + packing.zero_offset) & (1 << bits) - 1)

    count = 32 // bits
    zeros_shape, zeros_axes = (groups, outputs // count), (packing.by_group, Along("outputs", count))
    if zeros is not None:
        found["qzeros"] = PackSink(zeros_shape, torch.int32, put_zeros, device, zeros_axes)
    else:
        said = "quantization_config says sym true"
        found["qzeros"] = EqualSink(_middles(zeros_shape, packing), (torch.int32,), said, axes=zeros_axes)
    # Outputs fill whole words of zero points, also where these are only compared.
    axes: Axes = (packing.inputs(count), Along("outputs", multiple=count))
    return found | {
        "qweight": PackSink((inputs // count, outputs), torch.int32, put_words, device, axes),
        "scales": _transposed_scales(packing, target, check),
    }


# Thousands of matrices are compared with a few tensors, which nobody writes to.
@functools.lru_cache(maxsize=16)
def _in_order(inputs: int, group: int) -> torch.Tensor:
    """The group of each input feature."""
    return torch.arange(inputs) // group


@functools.lru_cache(maxsize=16)
def _zeros(outputs: int) -> torch.Tensor:
    return torch.zeros(outputs)


@functools.lru_cache(maxsize=16)
def _middles(shape: tuple[int, int], packing: Packing) -> torch.Tensor:
    """Words of GPTQ's zero points that are the middle of all numbers."""
    bits = packing.bits
    word = sum(((1 << bits - 1) - packing.zero_offset) << place for place in range(0, 32, bits))
    return torch.full(shape, word - (1 << 32 if word >> 31 else 0), dtype=torch.int32)


def _bytes(packing: Packing, target: Target, name: str, dtype: torch.dtype = torch.uint8) -> dict[str, Sink]:
    """fp4 numbers, two in a byte."""
    shape = target.codes.shape[0], target.codes.shape[1]
    axes: Axes = ("outputs", packing.inputs(2))

    def put(packed: torch.Tensor) -> None:
        target.put_codes(_nibbles(packed.view(torch.uint8)))

    return {name: PackSink(shape, dtype, put, target.scales.device, axes)}


def _scales(packing: Packing, target: Target, dtype: torch.dtype, check: ScaleCheck) -> Sink:
    """Scales whose bytes are kept."""
    shape = target.scales.shape[0], target.scales.shape[1]
    return PackSink(
        shape,
        dtype,
        lambda x: target.scales.copy_(x.view(target.scales.dtype)),
        target.scales.device,
        ("outputs", packing.by_group),
        check,
    )


def _mxfp4(packing: Packing, target: Target, check: ScaleCheck) -> dict[str, Sink]:
    return _bytes(packing, target, "weight_packed") | {"weight_scale": _scales(packing, target, torch.uint8, check)}


def _deepseek(packing: Packing, target: Target, check: ScaleCheck) -> dict[str, Sink]:
    return _bytes(packing, target, "weight", torch.int8) | {
        "scale": _scales(packing, target, torch.float8_e8m0fnu, check)
    }


def _of_matrix(check: ScaleCheck, *, divides: bool = False) -> ScaleCheck:
    """What looks at the scale of a whole matrix, beside scales of groups in e4m3 that `check` looks at."""
    return replace(check, most=check.most * torch.finfo(torch.float8_e4m3fn).max, divides=divides, limit=math.inf)


def _compressed_nvfp4(packing: Packing, target: Target, check: ScaleCheck) -> dict[str, Sink]:
    rows = target.rows
    assert rows is not None
    return _bytes(packing, target, "weight_packed") | {
        "weight_scale": _scales(packing, target, torch.float8_e4m3fn, check),
        "weight_global_scale": NumberSink(
            FLOATS, lambda x: rows.copy_(1 / x.float().reshape(1)), rows.device, _of_matrix(check, divides=True)
        ),
        "input_global_scale": UnusedSink(FLOATS),
    }


def _nvfp4(packing: Packing, target: Target, check: ScaleCheck) -> dict[str, Sink]:
    rows = target.rows
    assert rows is not None
    return _bytes(packing, target, "weight") | {
        "weight_scale": _scales(packing, target, torch.float8_e4m3fn, check),
        "weight_scale_2": NumberSink(
            FLOATS, lambda x: rows.copy_(x.float().reshape(1)), rows.device, _of_matrix(check)
        ),
        "input_scale": UnusedSink(FLOATS),
    }


def _nvfp4_stacked(packing: Packing, weights: Mapping[str, torch.Tensor], check: ScaleCheck) -> dict[str, Sink]:
    """All experts' matrices in one tensor, input features before output features, as Llama 4 has them."""
    codes, scales, rows = weights["codes"], weights["scales"], weights["rows"]
    experts, outputs, half = codes.shape
    device = codes.device

    def put_codes(expert: int, packed: torch.Tensor) -> None:
        codes[expert].copy_(pack4(_nibbles(packed.T)))

    def put_scales(expert: int, source: torch.Tensor) -> None:
        scales[expert].view(torch.uint8).copy_(source.view(torch.uint8).T)

    codes_axes: Axes = ("experts", packing.inputs(2), "outputs")
    scales_axes: Axes = ("experts", packing.by_group, "outputs")
    return {
        "": SlicesSink((experts, half, outputs), (torch.uint8,), put_codes, device, codes_axes),
        "_weight_scale": SlicesSink(
            (experts, scales.shape[2], outputs), (scales.dtype,), put_scales, device, scales_axes, check
        ),
        "_weight_scale_2": NumberSink(FLOATS, lambda x: rows.copy_(x.float().reshape(1)), device, _of_matrix(check)),
        "_input_scale": UnusedSink(FLOATS),
    }


LAYOUTS = {
    "compressed": _compressed,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
    "deepseek": _deepseek,
    "compressed nvfp4": _compressed_nvfp4,
    "nvfp4": _nvfp4,
}
