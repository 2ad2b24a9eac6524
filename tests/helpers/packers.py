"""Packs one matrix as the formats' descriptions say, with loops over the places in a word, and says what the packed matrix means.

A packer takes float weights [O, I] and returns what a checkpoint holds of them, by the last part of the tensors' names, and float32 weights
[O, I]: number by number, scale times what is left after the zero point.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Packed = tuple[dict[str, torch.Tensor], torch.Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # bits 4 i of a word hold this one of eight columns
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP = 32


def words(numbers: torch.Tensor, bits: int, dimension: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """int32 words of the numbers; a word has neighbours along `dimension`, the first in its low bits, or `order[i]` at place i."""
    count = 32 // bits
    rows = numbers.to(torch.int64).movedim(dimension, 0)
    made = torch.zeros(rows.shape[0] // count, *rows.shape[1:], dtype=torch.int64)
    for i in range(count):
        made += rows[order[i] if order else i :: count] << (bits * i)
    made[made >= 2**31] -= 2**32
    return made.to(torch.int32).movedim(0, dimension).contiguous()


def whole(
    weight: torch.Tensor, group: int, *, bits: int, zeros: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers [O, I], float16 scales [O, G] and zero points [O, G] of the groups."""
    middle, most = 1 << bits - 1, (1 << bits) - 1
    outputs, inputs = weight.shape
    numbers = torch.empty(outputs, inputs, dtype=torch.int64)
    scales = torch.empty(outputs, inputs // group, dtype=torch.float16)
    zero = torch.full(scales.shape, middle, dtype=torch.int64)
    for g in range(inputs // group):
        part = weight[:, g * group : (g + 1) * group].float()
        least, largest = part.amin(1), part.amax(1)
        if zeros:
            scales[:, g] = ((largest - least) / most).half()
            zero[:, g] = (-least / scales[:, g].float()).round().clamp(1, most).long()
        else:
            scales[:, g] = (part.abs().amax(1) / (middle - 0.5)).half()
        scale = scales[:, g].float().unsqueeze(1)
        numbers[:, g * group : (g + 1) * group] = ((part / scale).round() + zero[:, g : g + 1]).clamp(0, most).long()
    return numbers, scales, zero


def meant(numbers: torch.Tensor, scales: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Each number less its group's zero point, times the group's scale."""
    group = torch.arange(numbers.shape[1]) // (numbers.shape[1] // scales.shape[1])
    return (numbers - zero[:, group]).float() * scales[:, group].float()


def compressed(
    weight: torch.Tensor, *, bits: int = 4, group: int = GROUP, zeros: bool = False, permuted: bool = False
) -> Packed:
    """compressed-tensors, pack-quantized."""
    outputs, inputs = weight.shape
    shuffled = torch.randperm(inputs, generator=torch.Generator().manual_seed(7)) if permuted else torch.arange(inputs)
    numbers, scales, zero = whole(weight[:, shuffled], group or inputs, bits=bits, zeros=zeros)
    back = shuffled.argsort()
    held = {
        "weight_packed": words(numbers[:, back], bits, 1),
        "weight_scale": scales,
        "weight_shape": torch.tensor([outputs, inputs]),
    }
    if zeros:
        held["weight_zero_point"] = words(zero, bits, 0)
    if permuted:
        held["weight_g_idx"] = (back // group).to(torch.int32)
    return held, meant(numbers, scales, zero)[:, back]


def awq(weight: torch.Tensor, *, group: int = GROUP) -> Packed:
    """AWQ, gemm."""
    numbers, scales, zero = whole(weight, group, bits=4, zeros=True)
    held = {
        "qweight": words(numbers.T, 4, 1, AWQ_ORDER),
        "qzeros": words(zero.T, 4, 1, AWQ_ORDER),
        "scales": scales.T.contiguous(),
    }
    return held, meant(numbers, scales, zero)


def gptq(
    weight: torch.Tensor,
    *,
    bits: int = 4,
    group: int = GROUP,
    zeros: bool = False,
    permuted: bool = False,
    version: int = 1,
) -> Packed:
    """GPTQ; `group` 0 is a whole column."""
    inputs = weight.shape[1]
    shuffled = torch.randperm(inputs, generator=torch.Generator().manual_seed(8)) if permuted else torch.arange(inputs)
    numbers, scales, zero = whole(weight[:, shuffled], group or inputs, bits=bits, zeros=zeros)
    back = shuffled.argsort()
    held = {
        "qweight": words(numbers[:, back].T, bits, 0),
        "qzeros": words(zero.T - (1 if version == 1 else 0), bits, 1),
        "scales": scales.T.contiguous(),
        "g_idx": (back // (group or inputs)).to(torch.int32),
    }
    return held, meant(numbers, scales, zero)[:, back]


def fp4(weight: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e2m1 numbers 0 to 15 of weight / scale, [O, I], and what they mean."""
    scale = scales.float()[:, torch.arange(weight.shape[1]) // (weight.shape[1] // scales.shape[1])]
    part = weight.float().contiguous() / scale
    table = torch.tensor(E2M1)
    nearest = torch.bucketize(part.abs(), (table[1:] + table[:-1]) / 2)  # in the middle, the smaller number
    return (nearest + 8 * (part < 0)).to(torch.uint8), torch.where(part < 0, -table[nearest], table[nearest]) * scale


def two_a_byte(codes: torch.Tensor) -> torch.Tensor:
    """The even column in the low half of a byte."""
    return codes[:, 0::2] + 16 * codes[:, 1::2]


def _powers(weight: torch.Tensor, group: int = 32) -> torch.Tensor:
    """The exponent of each group's scale plus 127, uint8 [O, G]."""
    largest = weight.float().unflatten(1, (-1, group)).abs().amax(2).clamp(min=2**-20)
    return ((largest / 6).log2().ceil() + 127).to(torch.uint8)


def mxfp4(weight: torch.Tensor) -> Packed:
    """compressed-tensors, mxfp4-pack-quantized."""
    exponents = _powers(weight)
    codes, found = fp4(weight, 2.0 ** (exponents.float() - 127))
    return {"weight_packed": two_a_byte(codes), "weight_scale": exponents}, found


def deepseek(weight: torch.Tensor) -> Packed:
    """The routed experts of DeepSeek-V4."""
    held, found = mxfp4(weight)
    return {
        "weight": held["weight_packed"].view(torch.int8),
        "scale": held["weight_scale"].view(torch.float8_e8m0fnu),
    }, found


def gpt_oss(weight_EOI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks [E, O, I/32, 16], scales [E, O, I/32], and what they mean."""
    packed = [mxfp4(weight) for weight in weight_EOI]
    blocks = torch.stack([held["weight_packed"].unflatten(1, (-1, 16)) for held, _ in packed])
    return (
        blocks,
        torch.stack([held["weight_scale"] for held, _ in packed]),
        torch.stack([found for _, found in packed]),
    )


def _nvfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes, e4m3 scales, the matrix's scale (a power of two, so that its inverse is exact), and what they mean."""
    overall = 2 ** (weight.float().abs().max() / (6 * 448)).log2().ceil()
    largest = weight.float().unflatten(1, (-1, 16)).abs().amax(2)
    scales = (largest / 6 / overall).clamp(min=2**-6).to(torch.float8_e4m3fn)
    codes, found = fp4(weight, scales.float() * overall)
    return two_a_byte(codes), scales, overall, found


def nvfp4_compressed(weight: torch.Tensor) -> Packed:
    """compressed-tensors, nvfp4-pack-quantized."""
    packed, scales, overall, found = _nvfp4(weight)
    held = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": (1 / overall).reshape(1)}
    return held, found


def nvfp4(weight: torch.Tensor) -> Packed:
    """Model Optimizer, NVFP4."""
    packed, scales, overall, found = _nvfp4(weight)
    held = {
        "weight": packed,
        "weight_scale": scales,
        "weight_scale_2": overall.reshape(()),
        "input_scale": torch.tensor(0.5),
    }
    return held, found


Packer = Callable[[torch.Tensor], Packed]
