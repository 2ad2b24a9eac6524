"""Products of rounded inputs with matrices of 8-bit codes on Hopper, whose weights are on their way before the kernel before has ended.

As `kernels/linear/linear_dense.py` does with numbers, each multiprocessor fills its shared memory with codes while the rounding of the inputs, and what stands
before it, still runs. Example: 128 programs hold up to 22 MB, so an output projection of 4096 x 4096 is there as a whole.

A tile has all tokens. They are blocks of up to 64, and perhaps a smaller one. With scales of blocks the product of each step and block of tokens is
multiplied by its scales before it is added.

Shape letters: P parts, T tokens, I input features, O output features.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from pagerunner.ops.kernels.launch import blocks, dependent, multiprocessors, padded
from pagerunner.ops.kernels.linear.linear_dense import STEP_TIMES
from pagerunner.ops.kernels.linear.linear_parts import Product
from pagerunner.ops.kernels.linear.linear_sums import PART_INPUTS, add_parts
from pagerunner.ops.kernels.linear.linear_wide import has_gluon
from pagerunner.ops.quantize import GROUP, Quantized
from pagerunner.ops.stored import Stored8

SIZES = 16, 32, 64, 96, 128, 160
"""Tokens of a tile."""
MOST_OF_ROWS = 96
"""With more tokens and scales of rows, `linear_rounded.py` was faster."""
LAUNCH = 4.0
"""Microseconds of a launch more."""
BLOCK = 64
"""Tokens of a product."""
ROOM = 196 * 1024
"""Bytes of shared memory for steps. Scales and outputs that change places take up to 20 KB more."""


class EightConfig(NamedTuple):
    """Tokens of a tile; groups of four warps, each with 64 rows; the tiles of a program, or the parts of a tile."""

    tokens: int
    groups: int
    tiles: int
    parts: int

    @property
    def cut(self) -> tuple[int, int, int]:
        """The tile's tokens: how many blocks, their tokens, and those of the last and smaller one."""
        block = min(BLOCK, self.tokens)
        return self.tokens // block, block, self.tokens % block

    @property
    def stages(self) -> tuple[int, int]:
        """Steps in shared memory, weights' and inputs'. Inputs take at most a quarter of it, or two fifths if they are as large as weights."""
        inputs, weights = self.tokens * GROUP, self.groups * 64 * GROUP
        x_stages = min(8, max(2, (ROOM // 4 if self.tokens <= 64 else ROOM * 2 // 5) // inputs))
        w_stages = min(32, (ROOM - x_stages * inputs) // weights)
        return w_stages, min(x_stages, w_stages)

    @property
    def serial(self) -> bool:
        """Whether a step's products run one after another: three groups have no registers for all of them."""
        return self.groups == 3 and self.tokens > 96

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread: those of a group that multiplies, and those that the kernel starts with. Beside the sums there are a step's products, or outputs that change places."""
        held = self.tokens // 2 + (min(BLOCK, self.tokens) if self.serial else self.tokens) // 2
        most = min({1: 248, 2: 232, 3: 160}[self.groups], blocks(held + 56, 8) * 8)
        return most, max(64, blocks(most * self.groups + 32, 8 * (self.groups + 1)) * 8)


@functools.lru_cache(4096)
def _fastest(tokens: int, outputs: int, inputs: int, programs: int) -> tuple[float, EightConfig]:
    """About how many microseconds a product takes, and the tile that takes least, on a device with so many multiprocessors; the same for all numbers of tokens that a tile has.

    Each multiprocessor has one program: equally many whole tiles, or one of the parts of a tile. A single group of warps is for matrices so small that
    others would leave half of the multiprocessors idle.
    """
    size, total, found = next(size for size in SIZES if tokens <= size), blocks(inputs, GROUP), []
    busy = 0
    for groups in (3, 2, 1):
        if groups == 1 and 2 * busy > programs:
            break
        tiles = blocks(outputs, 64 * groups)
        each, parts = blocks(tiles, programs), max(1, min(programs // tiles, inputs // PART_INPUTS))
        busy, time = tiles * parts, each * blocks(total, parts) * STEP_TIMES[groups] * (1 + size / 450)
        if parts > 1:
            time += 1.75 + parts * outputs * size * 4e-6
        found.append((time, EightConfig(size, groups, each, parts)))
    return min(found)


@functools.lru_cache(4096)
def pieces(tokens: int, outputs: int, inputs: int, programs: int, high: int) -> tuple[tuple[int, EightConfig], ...]:
    """The last output feature and the tile of each launch: of one, or of whole rounds of tiles and then the rest, as in `linear_wide.pieces`.

    `high` rows share a scale, and each launch begins with such a block.
    """
    time, whole = _fastest(tokens, outputs, inputs, programs)
    found = [(0.9 * time, ((outputs, whole),))]
    for groups in (3, 2):
        rounds = outputs // (64 * groups * programs)
        first = rounds * 64 * groups * programs
        if 0 < first < outputs and first % high == 0:
            after, rest = _fastest(tokens, outputs - first, inputs, programs)
            steps = rounds * blocks(inputs, GROUP) * STEP_TIMES[groups] * (1 + whole.tokens / 450)
            found.append(
                (steps + after + LAUNCH, ((first, EightConfig(whole.tokens, groups, rounds, 1)), (outputs, rest)))
            )
    return min(found)[1]


@functools.cache
def _gluon() -> Any:
    """The kernel's module. It isn't imported with Triton versions that may not have what it names."""
    return importlib.import_module("pagerunner.ops.kernels.linear.linear_eight_gluon")


def serves(tokens: int, weight_OI: Stored8, dtype: torch.dtype, device: torch.device, *, grouped: bool) -> bool:
    """Whether the kernel multiplies so many rounded tokens with this matrix: scales of rows, or of blocks that hold whole groups of warps' rows."""
    inputs, (high, wide) = weight_OI.shape[1], weight_OI.block
    if not 0 < tokens <= (SIZES[-1] if grouped else MOST_OF_ROWS) or inputs % 16 or dtype == torch.float32:
        return False
    whole = high % 64 == 0 and wide == GROUP if grouped else high == 1
    return whole and weight_OI.scales.is_contiguous() and weight_OI.codes.data_ptr() % 16 == 0 and has_gluon(device)


def _pieces(tokens: int, weight_OI: Stored8, device: torch.device) -> tuple[tuple[int, EightConfig], ...]:
    return pieces(tokens, *weight_OI.shape, multiprocessors(device), weight_OI.block[0])


def kernels_of(tokens: int, weight_OI: Stored8, device: torch.device) -> Hashable:
    """What decides which kernels are launched."""
    found = [config for _, config in _pieces(tokens, weight_OI, device)]
    return found[0] if len(found) == 1 else tuple(found)


def run_eight(
    x: Quantized, weight_OI: Stored8, bias_O: torch.Tensor | None, out_TO: torch.Tensor, *, grouped: bool, add: bool = False
) -> None:  # fmt: skip
    """Write the product into `out`, or add it."""
    first, whole = 0, Product(x.codes, weight_OI, bias_O, out_TO, add=add)
    for last, config in _pieces(x.codes.shape[0], weight_OI, out_TO.device):
        _run_piece(x, whole.of_rows(first, last), grouped, config)
        first = last


def _run_piece(x: Quantized, product: Product, grouped: bool, config: EightConfig) -> None:
    """One launch, and one that adds parts."""
    _, weight_OI, bias_O, out_TO, _, _, add = product
    assert isinstance(weight_OI, Stored8)
    (tokens, inputs), outputs = x.codes.shape, weight_OI.shape[0]
    part = blocks(blocks(inputs, GROUP), config.parts)
    tile, done = part * config.parts, config.parts == 1
    sums_PTO = out_TO if done else torch.empty(config.parts, tokens, outputs, dtype=torch.float32, device=out_TO.device)
    gluon, (count, block, more), (w_stages, x_stages) = _gluon(), config.cut, config.stages
    described, total = gluon.TensorDescriptor.from_tensor, blocks(outputs, 64 * config.groups) * tile
    steps = config.tiles * tile if done else part
    registers, average = config.registers
    gluon.eight_kernel[(blocks(total, steps),)](
        described(weight_OI.codes, [64, GROUP], gluon.OPERANDS), described(x.codes, [block, GROUP], gluon.OPERANDS),
        described(x.codes, [more or 8, GROUP], gluon.OPERANDS), x.scales, weight_OI.scales, out_TO if bias_O is None else bias_O, sums_PTO, tokens, outputs,
        sums_PTO.stride(-2), x.scales.stride(1), weight_OI.scales.shape[1], total, tile, steps, N=count, BT=block, MORE=more, WIDE=padded(config.tokens),
        C=config.groups, W_STAGES=w_stages, X_STAGES=x_stages, GROUPED=grouped, HIGH=weight_OI.block[0] if grouped else 1, SERIAL=config.serial, DONE=done,
        ADD=add and done, BIAS=bias_O is not None and done, REGS=registers, num_warps=4, maxnreg=average, **dependent(out_TO.device),
    )  # fmt: skip
    if not done:
        add_parts(sums_PTO, bias_O, out_TO, add=add)
