"""Products of few tokens with bfloat16 or float16 weights on Hopper, whose weights are on their way before the kernel before has ended.

cuBLAS reads no weights before its predecessor has ended. While norms, sums and attention run, memory is idle then. This kernel
(`kernels/linear/linear_dense_gluon.py`, in Gluon) fills its shared memory with weights first. Example: 132 programs of 144 KB each hold 19 MB. That is a product
of 4096 times 2048 as a whole.

**Division.** A *step* is 64 columns of a tile of 64, 128 or 192 rows. All steps of all tiles are numbered, tile after tile, and each program has equally many.
Example: 3072 x 4096 has 24 tiles of 128 rows, 64 steps each. 128 programs have 12 steps each. A tile then belongs to six or seven programs.
Each of them stores a sum in float32. A second kernel adds a tile's sums in the order of programs, so results are the same in every run. Where a tile belongs to one program,
that program stores the outputs, and there is no second kernel. With 33 to 64 tokens so it is where a tile's weights all have room: they are there before the kernel's turn.
So it is with a gate, too, where tiles of some height have most multiprocessors (`whole_gates`): a tile then has gates and the ups that belong to them, and the kernel stores what the gate makes of both.
Example: 12,288 x 4096, gates and ups of 8B on two devices, are 128 tiles of 96 rows.

**Overlap.** The kernel lets its successor start first of all. Its `ROOM` of shared memory leaves some for small kernels beside it, and it asks for few
registers. The next product's programs start as this one's end. A longer row of kernels between two products makes no difference, as each lets its successor start.

Shape letters: P parts, T tokens, I input features, O output features.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from pagerunner.ops import numerics
from pagerunner.ops.kernels.launch import blocks, dependent, multiprocessors, padded, start_next, wait_turn
from pagerunner.ops.kernels.linear.linear_parts import Product, silu_gate
from pagerunner.ops.kernels.linear.linear_wide import has_gluon

MAX_TOKENS = 128
ROWS, STEP = 64, 64
"""Rows of weights of a group of warps, and columns of a step."""
ROOM = 200 * 1024
"""Bytes of shared memory of a program. A multiprocessor has 228 KB."""
STEP_TIMES = {1: 0.345, 2: 0.545, 3: 0.80}
"""Microseconds of a step by groups, with few tokens."""
SUM_REGISTERS = 96
"""Of a thread that adds parts. By its own choice ptxas takes fewer, and lets some parts' loads wait for others', so that they come in up to six turns and not in one."""
WHOLE_GATES = {(1, 64): range(33, 65), (3, 32): range(17, 65), (3, 64): range(17, 65)}
"""Groups of whole tiles with a gate and rows of each, with the tokens for which they serve. They were faster than parts with 4,096 inputs, at 64 tokens and, of
96 and 192 rows, at 32; other numbers of inputs weren't measured."""
LEAST_TILES = 32
"""So many programs or more, each with one tile whose weights all have room, are faster than twice as many whose sums must be added, if sums are of 64 tokens."""


class DenseConfig(NamedTuple):
    """Tokens of a tile, groups of four warps, each with `high` rows of a tile, steps of a program, and steps in shared memory, weights' and inputs'."""

    tokens: int
    groups: int
    steps: int
    w_stages: int
    x_stages: int
    high: int = ROWS

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.high * self.groups

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread: those of a group that multiplies, and those that the kernel starts with. ptxas uses no more than the latter.

        The warp that copies has the place of a group, so a kernel may start with fewer than its groups have.
        """
        most, least = (88, 64) if self.tokens <= 64 else (128, 96)
        return most, max(least, blocks(most * self.groups + 32, 8 * (self.groups + 1)) * 8)


class Piece(NamedTuple):
    """Steps of one tile that are a program's, and which of the tile's parts they are."""

    tile: int
    first: int
    steps: int
    part: int


def config_of(tokens: int, groups: int, steps: int, room: int = ROOM, high: int = ROWS) -> DenseConfig:
    """The configuration with as many stages as have room. Inputs take at most a quarter of it, or two fifths if they are as large as weights."""
    size = max(8, 1 << (tokens - 1).bit_length())
    inputs, weights = size * STEP * 2, groups * high * STEP * 2
    x_stages = min(8, max(2, (room // 4 if size <= 64 else room * 2 // 5) // inputs))
    w_stages = min(32, (room - 2048 - x_stages * inputs) // weights)
    return DenseConfig(size, groups, steps, w_stages, min(x_stages, w_stages), high)


def parts_of(config: DenseConfig, total: int) -> int:
    """The most programs that a tile of so many steps may belong to; 1 if each tile is one program's."""
    return (config.steps - math.gcd(config.steps, total) + total - 1) // config.steps + 1


def microseconds(config: DenseConfig, tiles: int, total: int) -> float:
    """About how long a product takes on an H200, for choosing among configurations: a start, the steps, and the sums if there are parts.

    312 measurements were within 6 % of it in the mean (2026-11-26). In 89 of 91 cases where its choice was measured, this was the best or within 2 %.
    """
    time = 1.0 + config.steps * STEP_TIMES[config.groups] * (1 + config.tokens / 450)
    if parts_of(config, total) == 1:
        return time
    apart = config.steps // math.gcd(config.steps, total)  # tiles between those with which a program begins
    pieces = blocks(tiles * total, config.steps) + tiles - 1 - (tiles - 1) // apart
    return time + 1.75 + pieces * config.rows * config.tokens * 4 * 0.65e-6


@functools.lru_cache(4096)
def dense_config(tokens: int, outputs: int, inputs: int, programs: int) -> DenseConfig:
    """What takes least by `microseconds`, on a device with so many multiprocessors; the same for all numbers of tokens that a tile has."""
    tokens = config_of(tokens, 1, 1).tokens
    total = blocks(inputs, STEP)
    whole = config_of(tokens, 1, total)
    if tokens == 64 and total <= whole.w_stages and LEAST_TILES <= blocks(outputs, ROWS) <= programs // 2:
        return whole
    found = []
    for groups in (1, 2, 3) if tokens <= 64 else (1, 2):  # with three there is room for too few stages
        tiles = blocks(outputs, ROWS * groups)
        least = blocks(tiles * total, programs)
        for steps in {*range(least, least + max(2, least // 8)), blocks(least, total) * total}:
            config = config_of(tokens, groups, steps)
            found.append((microseconds(config, tiles, total), config))
    return min(found)[1]


@functools.lru_cache(4096)
def _even_config(tokens: int, outputs: int, inputs: int, programs: int) -> DenseConfig | None:
    """What takes least where every tile has equally many parts, two to four, as who reads these reads each at the same time."""
    total, found = blocks(inputs, STEP), []
    for groups, parts in itertools.product((1, 2, 3), (2, 3, 4)):
        tiles, rest = divmod(outputs, ROWS * groups)
        if rest == total % parts == 0 and tiles * parts <= programs:
            config = config_of(tokens, groups, total // parts)
            found.append((microseconds(config, tiles, total), config))
    return min(found)[1] if found else None


def whole_gates(tokens: int, outputs: int, inputs: int, programs: int) -> DenseConfig | None:
    """Whole tiles for a product of few tokens with a gate, of which each multiprocessor has at most one, if these have most of them.

    No sums are left to add, and the gate is the product's own.
    """
    for (groups, high), measured in WHOLE_GATES.items():
        tiles, rest = divmod(outputs, groups * high)
        if rest == 0 and programs < 2 * tiles <= 2 * programs and tokens in measured:
            exchanged = 64 * groups * high  # bytes, so that a thread has features that lie side by side
            return config_of(64, groups, blocks(inputs, STEP), ROOM - exchanged, high)
    return None


def pieces(config: DenseConfig, outputs: int, inputs: int) -> Iterator[list[Piece]]:
    """What each program computes: the twin of the kernel's arithmetic."""
    total = blocks(inputs, STEP)
    last = blocks(outputs, config.rows) * total
    for program in range(blocks(last, config.steps)):
        own, step = [], program * config.steps
        while step < min(last, (program + 1) * config.steps):
            tile = step // total
            end = min((tile + 1) * total, last, (program + 1) * config.steps)
            own.append(Piece(tile, step - tile * total, end - step, program - tile * total // config.steps))
            step = end
        yield own


def new_sums(tokens: int, outputs: int, inputs: int, config: DenseConfig, device: torch.device) -> torch.Tensor:
    """Room for the sums [P, O, T] of all programs, with features and tokens of whole tiles."""
    parts = parts_of(config, blocks(inputs, STEP))
    rows = blocks(outputs, config.rows) * config.rows
    return torch.empty(parts, rows, config.tokens, dtype=torch.float32, device=device)


def sums_twin(x_TI: torch.Tensor, weight_OI: torch.Tensor, config: DenseConfig) -> torch.Tensor:
    """The sums that the kernel's programs store; what none stores is not a number."""
    (tokens, inputs), outputs = x_TI.shape, weight_OI.shape[0]
    sums_POT = new_sums(tokens, outputs, inputs, config, x_TI.device).fill_(torch.nan)
    for own in pieces(config, outputs, inputs):
        for tile, first, steps, part in own:
            rows = slice(tile * config.rows, (tile + 1) * config.rows)
            columns = slice(first * STEP, (first + steps) * STEP)
            weights = weight_OI[rows, columns].float()
            sums_POT[part, rows.start : rows.start + weights.shape[0], :tokens] = weights @ x_TI[:, columns].float().T
    return sums_POT


@triton.jit
def _count(feature, rows, total, steps):
    """How many parts a feature's tile has."""
    begin = feature // rows * total
    return (begin + total - 1) // steps - begin // steps + 1


@triton.jit
def _parts_of(sums_ptr, features, count, tokens, num_tokens, live, all_features, BT: tl.constexpr, PARTS: tl.constexpr):
    """All parts of the sums [features, tokens], of which `count` are there. Tokens are read by eights, so that a load is of 16 bytes."""
    at = sums_ptr + (features.to(tl.int64)[:, None] * BT + tokens[None, :])
    known = live[:, None] & (tokens < (num_tokens + 7) // 8 * 8)[None, :]
    parts = ()
    for part in tl.static_range(PARTS):
        parts = parts + (tl.load(at + part * all_features.to(tl.int64) * BT, mask=known & (part < count), other=0.0),)
    return parts


@triton.jit
def _sum_of(parts, bias_ptr, features, live, PARTS: tl.constexpr, BIAS: tl.constexpr):
    acc = parts[0]
    for part in tl.static_range(1, PARTS):
        acc += parts[part]
    if BIAS:
        acc += tl.load(bias_ptr + features, mask=live, other=0.0).to(tl.float32)[:, None]
    return acc


@triton.jit(do_not_specialize=["num_tokens", "all_features", "rows", "total", "steps"])
def _sum_kernel(sums_ptr, bias_ptr, y_ptr, num_tokens, num_outputs, all_features, y_stride, rows, total, steps, BT: tl.constexpr,
                PARTS: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BLOCK outputs of all tokens: the sums of their parts. With GATED they are gates, and further features their ups.

    A block's features are one tile's, and its ups one's or two neighbours'. The divisions that say how many parts these have come before the wait. The compiler leaves them there,
    because whether to wait seems to depend on them.
    """
    start_next(PDL)
    first = tl.program_id(0) * BLOCK
    tokens, features = tl.arange(0, BT), first + tl.arange(0, BLOCK)
    live, ups = features < num_outputs, features + num_outputs
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    count, most = _count(first, rows, total, steps), 1
    if GATED:
        up_count, most = (
            _count(first + num_outputs, rows, total, steps),
            _count(first + num_outputs + BLOCK - 1, rows, total, steps),
        )
        next_tile = (first + num_outputs) // rows * rows + rows
    if (count > 0) & (most > 0):
        wait_turn(PDL)
        parts = _parts_of(sums_ptr, features, count, tokens, num_tokens, live, all_features, BT, PARTS)
        if GATED:
            counts = tl.where(ups < next_tile, up_count, most)[:, None]
            more = _parts_of(sums_ptr, ups, counts, tokens, num_tokens, live, all_features, BT, PARTS)
        y = _sum_of(parts, bias_ptr, features, live, PARTS, BIAS)
        if GATED:
            y = silu_gate(y, _sum_of(more, bias_ptr, ups, live, PARTS, BIAS), dtype)
        place = y_ptr + tokens.to(tl.int64)[:, None] * y_stride + features[None, :]
        mask = (tokens < num_tokens)[:, None] & live[None, :]
        y = tl.trans(y.to(dtype))
        if ADD:
            y = (tl.load(place, mask=mask, other=0.0).to(tl.float32) + y.to(tl.float32)).to(dtype)
        tl.store(place, y, mask=mask)


def add_sums(sums_POT: torch.Tensor, product: Product, config: DenseConfig) -> None:
    """Write the sums' sum into `out`, or what the gate makes of it, or add it. Parts are added in their order."""
    parts, features, size = sums_POT.shape
    x_TI, _, bias_O, out_TO, _, gated, add = product
    tokens, outputs = out_TO.shape
    block = 32 if size <= 16 else 16 if size <= 64 else 8  # at most 64 registers of 8 parts
    programs = blocks(outputs, block)
    few = programs <= 2 * multiprocessors(out_TO.device)  # these have room beside the product's
    _sum_kernel[(programs,)](
        sums_POT, sums_POT if bias_O is None else bias_O, out_TO, tokens, outputs, features, out_TO.stride(0), config.rows,
        blocks(x_TI.shape[1], STEP), config.steps, BT=size, PARTS=padded(parts), BLOCK=block, GATED=gated, ADD=add, BIAS=bias_O is not None,
        num_warps=4, maxnreg=SUM_REGISTERS if few else None, **dependent(out_TO.device),
    )  # fmt: skip


@functools.cache
def _gluon() -> Any:
    """The kernel's module. It isn't imported with Triton versions that may not have what it names."""
    return importlib.import_module("pagerunner.ops.kernels.linear.linear_dense_gluon")


def serves(tokens: int, dtype: torch.dtype, weight_OI: torch.Tensor, device: torch.device) -> bool:
    """Whether the kernel computes products of so many tokens: half precision, and rows that begin at multiples of 16 bytes, as the copy engine wants."""
    borders = numerics.FAST.products
    sized = borders.least_dense_weights < weight_OI.numel() <= borders.most_dense_weights
    if tokens not in borders.dense_tokens or not sized or weight_OI.shape[1] % 8:
        return False
    whole = weight_OI.is_contiguous() and weight_OI.data_ptr() % 16 == 0
    return whole and weight_OI.dtype == dtype and dtype in (torch.bfloat16, torch.float16) and has_gluon(device)


def fits(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
    """Whether the kernel computes this product, with inputs that lie like these."""
    if not serves(x_TI.shape[0], x_TI.dtype, weight_OI, x_TI.device):
        return False
    return x_TI.dim() == 2 and x_TI.stride(1) == 1 and x_TI.stride(0) % 8 == 0 and x_TI.data_ptr() % 16 == 0


def kernels_of(tokens: int, dtype: torch.dtype, weight_OI: torch.Tensor, device: torch.device) -> DenseConfig | None:
    """What decides which kernels are launched; None where they don't serve."""
    served = serves(tokens, dtype, weight_OI, device)
    return dense_config(tokens, *weight_OI.shape, multiprocessors(device)) if served else None


def run_dense(
    product: Product, config: DenseConfig | None = None, beside: Callable[[torch.Tensor | None, DenseConfig], None] | None = None
) -> torch.Tensor:  # fmt: skip
    """Write `linear(x)`, gated or not, into `out`, or add it. The norm is computed before, by its own kernel.

    `beside` launches a kernel that runs beside this one, and may read `x` and all that is older at once. It has to end behind this one's end, and adds up the sums
    that it gets.
    """
    x_TI, weight_OI, bias_O, out_TO, _, gated, add = product.after_norm()
    assert isinstance(weight_OI, torch.Tensor)
    (tokens, inputs), outputs = x_TI.shape, weight_OI.shape[0]
    programs, total = multiprocessors(x_TI.device), blocks(inputs, STEP)
    gates = whole_gates(tokens, outputs, inputs, programs) if gated and bias_O is None else None
    config = config or gates or dense_config(tokens, outputs, inputs, programs)
    joint = config == gates
    done = joint or parts_of(config, total) == 1 and not gated
    sums = out_TO if done else new_sums(tokens, outputs, inputs, config, x_TI.device)
    stride = out_TO.stride(0) if done else sums.shape[1]
    gluon = _gluon()
    described = gluon.TensorDescriptor.from_tensor
    steps = blocks(outputs, config.rows) * total
    registers, average = config.registers
    gluon.dense_kernel[(blocks(steps, config.steps),)](
        described(weight_OI, [config.high // 2 if joint else ROWS, STEP], gluon.OPERANDS), described(x_TI, [config.tokens, STEP], gluon.OPERANDS),
        out_TO if bias_O is None else bias_O, sums, tokens, out_TO.shape[1] if joint else outputs, stride, steps, total, config.steps, BT=config.tokens,
        C=config.groups, W_STAGES=config.w_stages, X_STAGES=config.x_stages, DONE=done, ADD=add and done, BIAS=bias_O is not None and done, GATED=joint,
        HIGH=config.high, BY_TOKEN=0, REGS=registers, LATE=beside is not None, num_warps=4, maxnreg=average, **dependent(x_TI.device),
    )  # fmt: skip
    if beside is not None:
        beside(None if done else sums, config)
    elif not done:
        add_sums(sums, product, config)
    return out_TO


def run_parts(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor | None:
    """The sums of `linear(x)` one part after another, token by token, [P, T, O] float32, which whoever reads them adds up in their order. T are the tile's.

    None if this kernel doesn't compute the product, or not in parts of whole tiles that are equally many everywhere.
    """
    if not fits(x_TI, weight_OI):
        return None
    (tokens, inputs), outputs = x_TI.shape, weight_OI.shape[0]
    programs, total = multiprocessors(x_TI.device), blocks(inputs, STEP)
    config: DenseConfig | None = dense_config(tokens, outputs, inputs, programs)
    if config.steps < total and (total % config.steps or outputs % config.rows):
        config = _even_config(config.tokens, outputs, inputs, programs)
    if config is None or config.steps >= total:
        return None
    sums_PTO = torch.empty(total // config.steps, config.tokens, outputs, dtype=torch.float32, device=x_TI.device)
    gluon, (registers, average) = _gluon(), config.registers
    described, steps = gluon.TensorDescriptor.from_tensor, outputs // config.rows * total
    gluon.dense_kernel[(blocks(steps, config.steps),)](
        described(weight_OI, [ROWS, STEP], gluon.OPERANDS), described(x_TI, [config.tokens, STEP], gluon.OPERANDS),
        sums_PTO, sums_PTO, tokens, outputs, outputs, steps, total, config.steps, BT=config.tokens,
        C=config.groups, W_STAGES=config.w_stages, X_STAGES=config.x_stages, DONE=False, ADD=False, BIAS=False, GATED=False, HIGH=ROWS, BY_TOKEN=outputs,
        REGS=registers, LATE=False, num_warps=4, maxnreg=average, **dependent(x_TI.device),
    )  # fmt: skip
    return sums_PTO
