"""Launches the kernel of `kernels/moe/moe_gluon.py`: experts' products of many tokens with dense halves, or with e4m3 in blocks, on Hopper.

Gluon is experimental, so only those versions of Triton are used that were measured (`has_gluon`). With any other, `kernels/moe/moe_many.py` serves.
Shape letters as in `ops/moe.py`.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from pagerunner.ops.activation import GatedActivation
from pagerunner.ops.kernels.launch import dependent, multiprocessors, padded, start_next, wait_turn
from pagerunner.ops.kernels.linear.linear_wide import has_gluon
from pagerunner.ops.kernels.moe.moe_many import fits, fits_dense
from pagerunner.ops.kernels.moe.moe_tiles import kind_of
from pagerunner.ops.quantize import Quantized
from pagerunner.ops.routing import Routes
from pagerunner.ops.stored import Stored, Stored8

ROWS = 128
"""Pairs of a tile."""
BLOCK = 128
"""Rows and columns of weights of 8 bits that share a scale."""


class RowBlocks(NamedTuple):
    """Blocks of ROWS pairs of an expert, in expert order.

    `table_B4` has for each block its expert, the first block of that expert, and where the expert's pairs begin and end. `starts_E1` is each
    expert's first block.
    """

    table_B4: torch.Tensor
    starts_E1: torch.Tensor


STAGES = 4
"""Steps of a tile that are in shared memory."""
LAG = 1
"""How many steps later a gather is announced; at most STAGES - 2, as with more of them copies and products wait for each other."""
MULTIPLY_REGISTERS, COPY_REGISTERS = 216, 72
"""Of a thread of a group that multiplies, and of the group that copies."""


@triton.jit
def _blocks_kernel(
    starts_ptr, table_ptr, block_starts_ptr, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, PDL: tl.constexpr
):
    """All experts in one program; a round of the loop is one block of each."""
    wait_turn(PDL)
    start_next(PDL)
    experts = tl.arange(0, BE)
    starts = tl.load(starts_ptr + experts, mask=experts < E, other=0)
    ends = tl.load(starts_ptr + 1 + experts, mask=experts < E, other=0)
    high = (ends - starts + BM - 1) // BM
    before = tl.cumsum(high, 0) - high
    tl.store(block_starts_ptr + experts, before, mask=experts < E)
    tl.store(block_starts_ptr + E, tl.sum(high, 0))
    for block in range(tl.max(high, 0)):
        place = table_ptr + (before + block) * 4
        mask = block < high
        tl.store(place, experts, mask=mask)
        tl.store(place + 1, before, mask=mask)
        tl.store(place + 2, starts, mask=mask)
        tl.store(place + 3, ends, mask=mask)


def row_blocks(routes: Routes) -> RowBlocks:
    """The blocks of all experts."""
    assert routes.order_P is not None and routes.starts_E1 is not None, "the pairs have no order"
    experts = routes.starts_E1.shape[0] - 1
    most = routes.order_P.shape[0] // ROWS + experts
    found = RowBlocks(routes.starts_E1.new_empty(most, 4), torch.empty_like(routes.starts_E1))
    device = found.table_B4.device
    _blocks_kernel[(1,)](
        routes.starts_E1, *found, E=experts, BE=padded(experts), BM=ROWS, num_warps=4, **dependent(device)
    )
    return found


@functools.cache
def _kernel() -> Any:
    """The kernel's module. It isn't imported with Triton versions that may not have what it names."""
    return importlib.import_module("pagerunner.ops.kernels.moe.moe_gluon")


@functools.cache
def _layouts(bits: int) -> tuple[Any, Any]:
    """Of numbers of so many bits in shared memory; and what describes a tensor to the copy engine."""
    layouts = importlib.import_module("triton.experimental.gluon.language._layouts")
    descriptors = importlib.import_module("triton.experimental.gluon.nvidia.hopper")
    return layouts.NVMMASharedLayout(128, bits, 2), descriptors.TensorDescriptor


def serves(x: torch.Tensor, weights: torch.Tensor | Stored) -> bool:
    """Whether the kernel serves these weights here: dense ones, or e4m3 with scales of blocks, whose inputs may be rounded."""
    if x.numel() >= 2**31 or not has_gluon(x.device):
        return False
    if isinstance(weights, Stored8):
        blocks_of_all = weights.block == (BLOCK, BLOCK) and weights.shape[1] % (2 * BLOCK) == 0
        return blocks_of_all and weights.activations == "block" and fits(x, weights)
    if not isinstance(weights, torch.Tensor) or not weights.is_contiguous() or weights.dtype != x.dtype:
        return False
    return fits_dense(x, weights.shape[2])


def piped_product(
    x: torch.Tensor | Quantized,
    weights: torch.Tensor | Stored8,
    bias_EO: torch.Tensor | None,
    routes: Routes,
    row_blocks: RowBlocks,
    activation: GatedActivation | None,
    *,
    weigh: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """As `many_product`."""
    assert routes.order_P is not None, "the pairs have no order"
    experts, outputs, inputs = weights.shape
    features = outputs if activation is None else outputs // 2
    pairs, active = routes.order_P.shape[0], routes.experts_TA.shape[1]
    numbers, codes, scales, x_scales = x, weights, routes.weights_TA, routes.weights_TA
    if isinstance(x, Quantized) and isinstance(weights, Stored8):
        numbers, codes, scales, x_scales = x.codes, weights.codes, weights.scales, x.scales
    assert isinstance(numbers, torch.Tensor) and isinstance(codes, torch.Tensor), (
        "inputs aren't rounded as the weights are"
    )
    out = torch.empty(pairs, features, dtype=dtype, device=codes.device)
    layout, descriptor = _layouts(8 * codes.itemsize)
    box, step = 128 if activation is not None and not activation.alternating else 256, 128 // codes.itemsize
    programs = multiprocessors(codes.device)
    _kernel().many_kernel[(programs,)](
        numbers, descriptor.from_tensor(numbers, [64, step], layout), descriptor.from_tensor(codes.view(-1, inputs), [box, step], layout),
        x_scales, scales, routes.weights_TA if bias_EO is None else bias_EO, routes.weights_TA, routes.order_P, *row_blocks, out, active, programs,
        0.0 if activation is None else activation.limit, x_scales.stride(1), E=experts, N=features, K=inputs, BOX=box, STAGES=STAGES, LAG=LAG,
        BIAS=bias_EO is not None, GATED=activation is not None, KIND=kind_of(activation), WEIGH=weigh, REGS=MULTIPLY_REGISTERS,
        COPY_REGS=COPY_REGISTERS, num_warps=4, **dependent(codes.device),
    )  # fmt: skip
    return out
