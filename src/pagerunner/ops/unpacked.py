"""How much of stored weights products unpack at a time, if they unpack any. Kernels and the plan of memory read the same numbers.

Shape letters: E experts, O output features, I input features.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from pagerunner.ops import numerics
from pagerunner.ops.quantize import rounding
from pagerunner.ops.stored import Stored, Stored8

UNPACKED_BYTES = 2**25  # of a matrix that is unpacked at a time, at most, if there are many tokens
FEW_UNPACKED_BYTES = 2**28  # of a matrix for fewer tokens: the whole of most matrices, and not of output weights
STEP = 128  # output features
EXPERTS_BYTES = 2**28
"""Of experts' matrices that are unpacked at a time, at most, unless four experts take more."""


def experts_at_once(weights_EOI: Stored, itemsize: int, most: int = EXPERTS_BYTES) -> tuple[int, int]:
    """Experts whose matrices are unpacked together, and how many times there is room for so many.

    4 bits are unpacked while the experts before are multiplied, so there is room for both: half of `most` each, if four experts take no more.
    """
    experts, outputs, inputs = weights_EOI.shape
    at_once = max(4, most // (outputs * inputs * itemsize) // 4 * 4)
    if experts <= at_once or at_once < 8 or isinstance(weights_EOI, Stored8):
        return min(experts, at_once), 1
    return at_once // 8 * 4, 2


def outputs_at_once(weight_OI: Stored, itemsize: int, most: int) -> int:
    """Output features that are unpacked together: equal numbers of them in whole steps, and at most so many bytes if a step has no more.

    A step is a whole number of the blocks that share scales. Example: blocks of 96 rows make steps of 384 output features.
    """
    outputs, inputs = weight_OI.shape
    step = math.lcm(STEP, weight_OI.block[0]) if isinstance(weight_OI, Stored8) else STEP
    steps, room = -(-outputs // step), max(most // (inputs * itemsize), step)
    return min(-(-steps // -(-outputs // room)) * step, outputs)


def tile_tokens(weight_OI: Stored) -> int:
    """Up to so many tokens, a product converts the codes in registers, where a kernel can, and unpacks nothing."""
    borders = numerics.FAST.products
    return borders.converted_tokens_8 if isinstance(weight_OI, Stored8) else borders.converted_tokens_4


def product_bytes(weight_OI: Stored, dtype: torch.dtype, tokens: int) -> int:
    """The most that a product with up to so many tokens in `dtype` unpacks at a time."""
    if tokens <= tile_tokens(weight_OI) or rounds(weight_OI, dtype):
        return 0
    return outputs_at_once(weight_OI, dtype.itemsize, FEW_UNPACKED_BYTES) * weight_OI.shape[1] * dtype.itemsize


def rooms_of(matrices_EOI: Sequence[Stored], itemsize: int, most: int = EXPERTS_BYTES) -> tuple[int, int]:
    """How many rooms the products of these matrices share, and the numbers that each of them holds."""
    sizes = [(*experts_at_once(weights, itemsize, most), math.prod(weights.shape[1:])) for weights in matrices_EOI]
    return max(rooms for _, rooms, _ in sizes), max(at_once * numbers for at_once, _, numbers in sizes)


def experts_bytes(matrices_EOI: Iterable[Stored], dtype: torch.dtype, pairs: int) -> int:
    """The most that products of up to so many (token, expert) pairs in `dtype` unpack of a mixture's matrices."""
    unpacked = [weights for weights in matrices_EOI if _unpacks(weights, dtype, pairs)]
    return math.prod(rooms_of(unpacked, dtype.itemsize)) * dtype.itemsize if unpacked else 0


def _unpacks(weights_EOI: Stored, dtype: torch.dtype, pairs: int) -> bool:
    experts, _, inputs = weights_EOI.shape
    single = {name: part[0] for name, part in weights_EOI._asdict().items() if isinstance(part, torch.Tensor)}
    eight_bit_floats = isinstance(weights_EOI, Stored8) and weights_EOI.codes.dtype == torch.float8_e4m3fn
    rounded = eight_bit_floats and inputs % 128 == 0 and rounds(weights_EOI._replace(**single), dtype)
    return not rounded and pairs > numerics.FAST.experts.unpacked * experts


def rounds(weight_OI: Stored, dtype: torch.dtype) -> bool:
    """Whether products of many tokens round their input, and so unpack nothing."""
    return isinstance(weight_OI, Stored8) and dtype != torch.float32 and rounding(weight_OI) is not None
