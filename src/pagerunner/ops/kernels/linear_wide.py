"""Products of 17 to 256 tokens with int4 (`ops/stored.py`) on Hopper.

`kernels/linear_tiles.py` computes the same with plain Triton, on any device and of any form. This kernel, `kernels/linear_gluon.py`, is written in Gluon,
Triton's language with layouts that the program chooses: copies and computations have warps of their own, and conversions run beside products. A layer's
four products were 1.1 to 1.35 times as fast (docs/performance/stored-weights.md).

**Conversion.** A nibble n in the lowest bits of a bfloat16 is the number n * 2 ** -133. One operation makes two weights:
n * 2 ** -133 times s * 2 ** 70, less 8 s * 2 ** -63. That is (n - 8) s * 2 ** -63, rounded once, as 8 s is a bfloat16. Sums are multiplied by 2 ** 63.
Scales may be as large as 2 ** 57. With scales below 2 ** -63 weights lose bits, at most 2 ** -70 each. With zero points, n - z comes first, exactly. In float16, which has no such room, n is 1024 + n at first, and n - z is
multiplied by s.

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

from pagerunner.ops.kernels.launch import blocks, dependent, multiprocessors, shared_memory
from pagerunner.ops.kernels.linear_parts import Product, halves
from pagerunner.ops.kernels.linear_sums import add_parts
from pagerunner.ops.stored import Stored, Stored4

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
LEAST_STAGES = 2
"""So many steps must be in shared memory at a time, as a group's round takes two."""
SMALL_WEIGHTS, SMALL_TOKENS = 1 << 24, range(33, 129)
"""With so few weights and these numbers of tokens, `linear_tiles.py` was as fast or faster."""


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


@functools.cache
def has_gluon(device: torch.device) -> bool:
    """Whether this device and this version of Triton run the kernel."""
    if (
        device.type != "cuda"
        or os.environ.get("TRITON_INTERPRET") == "1"
        or not triton.__version__.startswith(VERSIONS)
    ):
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def say_kernel(
    of: str,
    kernel: str,
    gluon: bool,
    device: torch.device,
    heads: int,
    size: int,
    dtype: torch.dtype,
    pages: torch.dtype,
) -> None:
    """Log, once for all layers that are alike, whether `kernel` in Gluon or Triton's own computes attention, and why."""
    found = f"{heads} heads of {size} in {dtype}, pages in {pages}"
    if gluon:
        logger.info("attention to %s: %s in Gluon (%s)", of, kernel, found)
    elif has_gluon(device):
        logger.info("attention to %s: Triton's kernel (%s in Gluon doesn't take %s)", of, kernel, found)
    else:
        here = f"{torch.cuda.get_device_name(device) if device.type == 'cuda' else device.type} and Triton {triton.__version__}"
        logger.info(
            "attention to %s: Triton's kernel (%s in Gluon needs Hopper and Triton %s, here are %s)",
            of,
            kernel,
            VERSIONS[0].rstrip("."),
            here,
        )


def reads(dtype: torch.dtype, weight_OI: Stored) -> bool:
    """Whether the kernel reads this matrix for activations of this dtype: int4 with scales of that dtype, of 128 columns or a multiple."""
    if not isinstance(weight_OI, Stored4) or weight_OI.numbers != "int4" or weight_OI.rows is not None:
        return False
    inputs = weight_OI.shape[1]
    groups = weight_OI.group % STEP == 0 or weight_OI.group >= inputs
    whole = (
        weight_OI.codes.is_contiguous() and weight_OI.codes.data_ptr() % 16 == 0 and weight_OI.scales.is_contiguous()
    )
    return groups and whole and dtype in (torch.bfloat16, torch.float16) and weight_OI.scales.dtype == dtype


def serves(tokens: int, dtype: torch.dtype, weight_OI: Stored, device: torch.device) -> bool:
    """Whether the kernel computes products of so many tokens."""
    outputs, inputs = weight_OI.shape
    if not 0 < tokens <= MAX_TOKENS or (outputs * inputs <= SMALL_WEIGHTS and tokens in SMALL_TOKENS):
        return False
    return reads(dtype, weight_OI) and has_gluon(device)


def wide_config(tokens: int, weight_OI: Stored, device: torch.device) -> WideConfig:
    """The tile, by measurement (docs/performance/stored-weights.md), and as many parts as fill the multiprocessors with programs.

    A part's scales lie in shared memory. There are more parts where two steps would have no room beside them: int4 with zero points of 28,672
    columns, as 192 tokens of Mistral-Large meet them.
    """
    assert isinstance(weight_OI, Stored4)
    features, inputs = weight_OI.shape
    size = next((size for size in (32, 64, 96, 128, 160, 192) if tokens <= size), 128)
    config = WideConfig(size, 3 if features >= 16384 else 2, 1)
    tiles = blocks(tokens, size) * blocks(features, config.features)
    parts = max(1, min(multiprocessors(device) // tiles, blocks(inputs, STEP) // PART_STEPS))
    zeros, room = weight_OI.zeros is not None, shared_memory(device)
    while stages_of(config, steps_of(inputs, parts), zeros, room) < LEAST_STAGES:  # scales take the room
        parts += 1
    return config._replace(parts=parts)


@functools.cache
def _kernel() -> Any:
    """The kernel's module. It isn't imported with Triton versions that may not have what it names."""
    return importlib.import_module("pagerunner.ops.kernels.linear_gluon")


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


def stages_of(config: WideConfig, steps: int, zeros: bool, room: int) -> int:
    """How many steps are in shared memory at a time, of so many in a part, where a program has so many bytes; perhaps fewer than are needed."""
    per_step = 256 * config.tokens + 64 * config.features
    scales = room_of(steps) * config.features * (4 if zeros else 2)
    return min((room - scales - 16 * 1024) // per_step, 8)


def run_wide(product: Product, config: WideConfig) -> None:
    """Write `linear(x)` into `out`, or add it. `x` is in the order that `linear_tiles.in_order` makes for pairs."""
    x_TI, weight_OI, bias_O, out_TO, _, _, add = product
    assert isinstance(weight_OI, Stored4)
    tokens = x_TI.shape[0]
    features, inputs = weight_OI.shape
    steps = steps_of(inputs, config.parts)
    parts = blocks(blocks(inputs, STEP), steps)
    done, zeros = parts == 1, weight_OI.zeros
    sums_PTO = out_TO if done else torch.empty(parts, tokens, features, dtype=torch.float32, device=x_TI.device)
    of_inputs, of_codes, descriptor = _layouts()
    high, more = halves(config.tokens)
    _kernel().wide_kernel[(blocks(tokens, config.tokens) * blocks(features, config.features), parts)](
        descriptor.from_tensor(x_TI, [high, 64], of_inputs), descriptor.from_tensor(x_TI, [more or 8, 64], of_inputs),
        descriptor.from_tensor(weight_OI.codes, [64, 64], of_codes), weight_OI.scales, weight_OI.scales if zeros is None else zeros,
        out_TO if bias_O is None else bias_O, sums_PTO, tokens, features, weight_OI.scales.shape[1], sums_PTO.stride(-2),
        blocks(inputs, STEP), steps, G=weight_OI.group, BT=high, MORE=more, C=config.groups,
        STAGES=stages_of(config, steps, zeros is not None, shared_memory(x_TI.device)), ROOM=room_of(steps), ZEROS=zeros is not None, DONE=done, ADD=add and done, BIAS=done and bias_O is not None, num_warps=4,
        **dependent(x_TI.device),
    )  # fmt: skip
    if not done:
        add_parts(sums_PTO, bias_O, out_TO, add=add)
