"""Products of some to 256 tokens with stored matrices (`ops/stored.py`) on Hopper, whose codes are converted in registers.

`kernels/linear/linear_tiles.py` computes the same with plain Triton, on any device and of any form. This kernel, `kernels/linear/linear_gluon.py`, is written in Gluon,
Triton's language with layouts that the program chooses: copies and computations have warps of their own, and conversions run beside products. A layer's
four products were 1.1 to 1.45 times as fast (docs/performance/stored-weights.md).

**Conversion.** A nibble n in the lowest bits of a bfloat16 is the number n * 2 ** -133. One operation makes two weights:
n * 2 ** -133 times s * 2 ** 70, less 8 s * 2 ** -63. That is (n - 8) s * 2 ** -63, rounded once, as 8 s is a bfloat16. Sums are multiplied by 2 ** 63.
Scales may be as large as 2 ** 57. With scales below 2 ** -63 weights lose bits, at most 2 ** -70 each. With zero points, n - z comes first, exactly. In float16, which has no such room, n is 1024 + n at first, and n - z is
multiplied by s.

e2m1's bits in place are 2 ** -126 of the number, and scales are multiplied by 2 ** 64 before (`codes.scaled_e2m1`). Codes of 8 bits are multiplied by their scales in
float32, and rounded once. Scales of whole rows multiply sums instead.

**Scales.** Those of 128 columns or more are brought to shared memory before the first step, those of fewer are read a round ahead by the threads that need them.

Gluon is experimental, so only those versions of Triton are used that were measured (`VERSIONS`). With any other, `linear_tiles.py` serves.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from typing import Any, NamedTuple

import torch
import triton

from pagerunner.ops.kernels.codes import form_of
from pagerunner.ops.kernels.launch import blocks, dependent, multiprocessors, shared_memory
from pagerunner.ops.kernels.linear.linear_parts import Product, halves
from pagerunner.ops.kernels.linear.linear_sums import add_parts
from pagerunner.ops.stored import Stored, Stored4, Stored8

logger = logging.getLogger(__name__)
VERSIONS = ("3.6.",)
"""How versions of Triton begin whose Gluon was measured here."""
MAX_TOKENS = 256
STEP = 128
"""Input features of a step."""
SCALES = 32
"""The scales of a multiple of so many steps have room. So matrices of many sizes have one kernel."""
PART_STEPS = 4
"""A part of the input features has so many steps or more."""
LEAST_STAGES, MOST_STAGES = 2, 12
"""So many steps must be in shared memory at a time, as a group's round takes two; and at most."""
WHOLE_ROWS = 1 << 30
"""Columns that share a scale, where all of a row do: matrices of many sizes have one kernel."""
MOST_OF_THREE = 160
"""Of so many tokens and 8 bits, three groups have three steps in shared memory."""
SIZES = 16, 32, 64, 80, 96, 128, 144, 160, 192
"""Tokens of a tile, for up to so many; more have tiles of 128."""
ROUND, LAUNCH = {2: 2.2, 3: 3.0}, 0.7
"""How long a round of tiles with so many groups takes, and a launch more with sums of parts: 1 is about 14 microseconds of 5,120 columns and 72 tokens."""
SMALL_WEIGHTS, SMALL_TOKENS = 1 << 24, range(33, 129)
"""With fewer weights and these numbers of tokens, `linear_tiles.py` was as fast or faster."""


class WideConfig(NamedTuple):
    """Tokens of a tile, groups of four warps, each of which computes 64 output features, and parts of the input features.

    A number of tokens that isn't a power of two is the sum of two: 160 = 128 + 32.
    """

    tokens: int
    groups: int
    parts: int

    @property
    def features(self) -> int:
        """Output features of a tile."""
        return 64 * self.groups

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread: those of a group that multiplies, by tokens, and those that the kernel starts with.

        Others are for the kernels beside: while one that prepares inputs still runs, the next product's programs start and bring codes.
        """
        most = min(240 if self.groups == 2 else 160, 96 + self.tokens // 2)
        return most, blocks(most * self.groups + 24, 8 * (self.groups + 1)) * 8


@functools.cache
def has_gluon(device: torch.device) -> bool:
    """Whether this device and this version of Triton run the kernel."""
    measured = triton.__version__.startswith(VERSIONS) and os.environ.get("TRITON_INTERPRET") != "1"
    if device.type != "cuda" or not measured:
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def say_kernel(
    of: str, kernel: str, gluon: bool, device: torch.device, heads: int, size: int, dtype: torch.dtype, pages: torch.dtype
) -> None:  # fmt: skip
    """Log, once for all layers that are alike, whether `kernel` in Gluon or Triton's own computes attention, and why."""
    found = f"{heads} heads of {size} in {dtype}, pages in {pages}"
    if gluon:
        logger.info("attention to %s: %s in Gluon (%s)", of, kernel, found)
    elif has_gluon(device):
        logger.info("attention to %s: Triton's kernel (%s in Gluon doesn't take %s)", of, kernel, found)
    else:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        said = "attention to %s: Triton's kernel (%s in Gluon needs Hopper and Triton %s, here are %s and Triton %s)"
        logger.info(said, of, kernel, VERSIONS[0].rstrip("."), name, triton.__version__)


def reads(dtype: torch.dtype, weight_OI: Stored) -> bool:
    """Whether the kernel reads this matrix for activations of this dtype.

    8 bits, and int4 with scales of that dtype: scales of 32 columns, 64, a multiple of 128, or whole rows. MXFP4 and NVFP4 in bfloat16.
    """
    inputs, scales = weight_OI.shape[1], weight_OI.scales
    if dtype not in (torch.bfloat16, torch.float16) or weight_OI.codes.data_ptr() % 16 or scales.data_ptr() % 2:
        return False
    if not weight_OI.codes.is_contiguous() or not scales.is_contiguous():
        return False
    if isinstance(weight_OI, Stored4) and weight_OI.numbers == "e2m1":
        form = (scales.dtype, weight_OI.group) in ((torch.uint8, 32), (torch.float8_e4m3fn, 16))
        return form and dtype == torch.bfloat16
    across = weight_OI.block[1] if isinstance(weight_OI, Stored8) else weight_OI.group
    if across % STEP and across < inputs and across not in (32, 64):
        return False
    return inputs % 16 == 0 if isinstance(weight_OI, Stored8) else scales.dtype == dtype and weight_OI.rows is None


def serves(tokens: int, dtype: torch.dtype, weight_OI: Stored, device: torch.device) -> bool:
    """Whether the kernel computes products of so many tokens."""
    outputs, inputs = weight_OI.shape
    if not 0 < tokens <= MAX_TOKENS or (outputs * inputs < SMALL_WEIGHTS and tokens in SMALL_TOKENS):
        return False
    return reads(dtype, weight_OI) and has_gluon(device)


def _sizes(tokens: int, weight_OI: Stored) -> tuple[int, int, bool]:
    """Tokens of a tile, how many tiles have them, and whether tiles may have three groups."""
    size = next((size for size in SIZES if tokens <= size), 128)
    wide = weight_OI.shape[0] >= 16384 and (isinstance(weight_OI, Stored4) or size <= MOST_OF_THREE)
    return size, blocks(tokens, size), wide


def _rounds(features: int, groups: int, places: int) -> float:
    """How long tiles with so many groups take where as many programs as `places` run at a time."""
    return blocks(blocks(features, 64 * groups), places) * ROUND[groups]


def wide_config(tokens: int, weight_OI: Stored, device: torch.device) -> WideConfig:
    """The tile, by measurement (docs/performance/stored-weights.md), and as many parts as fill the multiprocessors with programs.

    A part's scales lie in shared memory. There are more parts where two steps would have no room beside them: int4 with zero points of 28,672
    columns, as 192 tokens of Mistral-Large meet them.
    """
    (features, inputs), (size, columns, wide), places = (
        weight_OI.shape,
        _sizes(tokens, weight_OI),
        multiprocessors(device),
    )
    three, two = (_rounds(features, groups, places) for groups in (3, 2))
    config = WideConfig(size, 3 if wide and (columns > 1 or three <= max(two, ROUND[3])) else 2, 1)
    tiles = columns * blocks(features, config.features)
    parts = max(1, min(places // tiles, blocks(inputs, STEP) // PART_STEPS))
    room = shared_memory(device)
    while stages_of(config, steps_of(inputs, parts), weight_OI, room) < LEAST_STAGES:  # scales take the room
        parts += 1
    return config._replace(parts=parts)


@functools.lru_cache(4096)
def _first_features(features: int, steps: int, places: int, wide: bool) -> int:
    """See `pieces`."""
    found = []
    for groups in (3, 2) if wide else (2,):
        found.append((_rounds(features, groups, places), features))
        first = blocks(features, 64 * groups) // places * places * 64 * groups
        if 0 < first < features:
            left = blocks(features - first, 128)
            parts = max(1, min(places // left, steps // PART_STEPS))
            after = blocks(left * parts, places) * ROUND[2] / parts
            found.append((_rounds(first, groups, places) + after + LAUNCH, first))
    return min(found)[1]


def pieces(tokens: int, weight_OI: Stored, device: torch.device) -> list[slice]:
    """Output features that are multiplied by a launch each: all, or those of whole rounds of tiles and then the rest.

    The rest's programs divide the input features, so all multiprocessors have some. Example: of 51,200 output features 264 tiles of 192 are two rounds of 132, and
    512 features are left. Without a launch of their own, they would be a third round.
    """
    (features, inputs), (_, columns, wide) = weight_OI.shape, _sizes(tokens, weight_OI)
    first = features if columns > 1 else _first_features(features, blocks(inputs, STEP), multiprocessors(device), wide)
    if first == features or (isinstance(weight_OI, Stored8) and first % weight_OI.block[0]):
        return [slice(0, features)]
    return [slice(0, first), slice(first, features)]


@functools.cache
def _kernel() -> Any:
    """The kernel's module. It isn't imported with Triton versions that may not have what it names."""
    return importlib.import_module("pagerunner.ops.kernels.linear.linear_gluon")


@functools.cache
def _layouts() -> tuple[Any, Any, Any]:
    """Of inputs and of codes in shared memory; and what describes a tensor to the copy engine."""
    layouts = importlib.import_module("triton.experimental.gluon.language._layouts")
    descriptors = importlib.import_module("triton.experimental.gluon.nvidia.hopper")
    return layouts.NVMMASharedLayout(128, 16, 2), layouts.NVMMASharedLayout(64, 8, 2), descriptors.TensorDescriptor


def steps_of(inputs: int, parts: int) -> int:
    """Steps of a part, an even number, if there are at most so many parts."""
    return 2 * blocks(blocks(blocks(inputs, STEP), parts), 2)


def room_of(steps: int) -> int:
    """Of how many steps the scales have room, if a part has so many."""
    return SCALES * blocks(steps, SCALES)


def scale_bytes(weight_OI: Stored) -> int:
    """Bytes of shared memory that a step's scales and zero points of a row take. Those of less than a step, or of sums, are read where they are multiplied."""
    if isinstance(weight_OI, Stored8) or weight_OI.numbers == "e2m1" or weight_OI.group < min(STEP, weight_OI.shape[1]):
        return 0
    return 2 if weight_OI.zeros is None else 4


def stages_of(config: WideConfig, steps: int, weight_OI: Stored, room: int) -> int:
    """How many steps are in shared memory at a time, of so many in a part, where a program has so many bytes; perhaps fewer than are needed."""
    per_step = 256 * config.tokens + (STEP if isinstance(weight_OI, Stored8) else STEP // 2) * config.features
    return min((room - room_of(steps) * config.features * scale_bytes(weight_OI) - 16 * 1024) // per_step, MOST_STAGES)


def run_wide(product: Product, config: WideConfig) -> None:
    """Write `linear(x)` into `out`, or add it. `x` is in the order that `linear_tiles.in_order` makes, of 4 bits for pairs."""
    x_TI, weight_OI, bias_O, out_TO, _, _, add = product
    assert not isinstance(weight_OI, torch.Tensor)
    tokens, (features, inputs) = x_TI.shape[0], weight_OI.shape
    steps, held = steps_of(inputs, config.parts), scale_bytes(weight_OI)
    parts = blocks(blocks(inputs, STEP), steps)
    done = parts == 1
    sums_PTO = out_TO if done else torch.empty(parts, tokens, features, dtype=torch.float32, device=x_TI.device)
    codes, scales = weight_OI.codes.view(torch.uint8), weight_OI.scales
    if isinstance(weight_OI, Stored8):
        (high, across), zeros = weight_OI.block, None
        factors = scales if high == 1 and across >= inputs else None
        across = 0 if factors is not None else WHOLE_ROWS if across >= inputs else across
    else:
        high, across, zeros, factors = 1, weight_OI.group, weight_OI.zeros, weight_OI.rows
        across = max(across, STEP) if held else across
    of_inputs, of_codes, descriptor = _layouts()
    first, more = halves(config.tokens)
    registers, average = config.registers
    _kernel().wide_kernel[(blocks(tokens, config.tokens) * blocks(features, config.features), parts)](
        descriptor.from_tensor(x_TI, [first, 64], of_inputs), descriptor.from_tensor(x_TI, [more or 8, 64], of_inputs),
        descriptor.from_tensor(codes, [64, 64], of_codes), scales, scales if zeros is None else zeros, scales if factors is None else factors,
        out_TO if bias_O is None else bias_O, sums_PTO, tokens, features, scales.shape[1], sums_PTO.stride(-2), blocks(inputs, STEP), steps,
        G=across, BO=high, BT=first, MORE=more, C=config.groups,
        STAGES=stages_of(config, steps, weight_OI, shared_memory(x_TI.device)), ROOM=room_of(steps) if held else 1, FORM=form_of(weight_OI), ZEROS=zeros is not None,
        FACTORS=factors is not None, DONE=done, ADD=add and done, BIAS=done and bias_O is not None, REGS=registers, num_warps=4, maxnreg=average, **dependent(x_TI.device),
    )  # fmt: skip
    if not done:
        add_parts(sums_PTO, bias_O, out_TO, add=add)
