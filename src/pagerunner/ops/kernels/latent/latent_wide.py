"""Attention in the latent space with tiles of 64 queries and 64 vectors on Hopper: where it serves, and how it is launched.

The kernel is `kernels/latent/latent_gluon.py`. It computes what `_slices_kernel` of `kernels/latent/latent_decode.py` and `_chosen_kernel` of
`kernels/latent/sparse_latents.py` compute, at DeepSeek's sizes in half precision.
"""

from __future__ import annotations

import functools
import importlib
import math
from typing import Any

import torch

from pagerunner.batch import StepRows
from pagerunner.ops.kernels.latent.latent_slices import Partial, Schedule, Tiles
from pagerunner.ops.kernels.launch import blocks, dependent, multiprocessors
from pagerunner.ops.kernels.linear.linear_wide import has_gluon
from pagerunner.ops.sparse_latents import Latents

GROUPS = 4  # blocks of a latent in fp8 that have a scale each
SIZES = (512, 64)  # of a latent and of a rotary part
LEAST_UNITS = 16  # of a step that decodes; fewer don't occupy the device


@functools.cache
def _gluon() -> Any:
    """The module in Gluon. It isn't imported with Triton versions that may not have what it names."""
    return importlib.import_module("pagerunner.ops.kernels.latent.latent_gluon")


@functools.cache
def _codes() -> Any:
    return importlib.import_module("pagerunner.ops.kernels.latent.latent_codes_gluon")


@functools.cache
def _pairs() -> Any:
    return importlib.import_module("pagerunner.ops.kernels.latent.latent_pairs_gluon")


def wide_tiles(queries: int) -> Tiles:
    """For units of so many queries. Up to 16 are a product's second operand, whose tiles may have so few; more are its first, which has 64."""
    return Tiles(16 if queries <= 16 else 64, 64, 8, 2, 1, 2)


def slice_count(units: int, queries: int, device: torch.device) -> int:
    """Slices of a step: as many as the device has programs at once, or a few fewer if that is one for each unit, which then leaves no parts."""
    programs = max(1, multiprocessors(device) // blocks(queries, wide_tiles(queries).heads))
    return units if programs * 0.9 <= units <= programs else programs


def serves(q_THC: torch.Tensor, q_THP: torch.Tensor, pages: Latents) -> bool:
    """Whether the kernel computes this. Copies bring 16 bytes each."""
    codes, rope, scales = pages
    sizes, dtype = (q_THC.shape[-1], q_THP.shape[-1]), q_THC.dtype
    if sizes != SIZES or dtype.itemsize != 2 or rope.dtype != dtype:
        return False
    if scales is None:
        held, few = codes.dtype == dtype, ()
    else:
        e4m3 = codes.dtype == torch.float8_e4m3fn and dtype == torch.bfloat16
        held, few = (
            e4m3 and scales.shape[-1] == GROUPS and _strides(codes) == _strides(rope) == _strides(scales),
            (scales,),
        )
    return held and all(map(_aligned, (codes, rope, *few))) and has_gluon(q_THC.device)


def _aligned(x: torch.Tensor) -> bool:
    return x.data_ptr() % 16 == 0 and all(step * x.element_size() % 16 == 0 for step in x.stride()[:2])


def _strides(x: torch.Tensor) -> list[int]:
    """From a page and from a slot to the next one, in units of 16 bytes."""
    return [step * x.element_size() // 16 for step in x.stride()[:2]]


def _slots(x: torch.Tensor) -> Any:
    """A table of the slots of all pages, in boxes of a tile's slots, or of a page's, and 64 numbers."""
    pairs, (slots, numbers), row = _pairs(), x.shape[1:], x.stride(1)
    count = (x.shape[0] - 1) * (x.stride(0) // row) + slots
    return pairs.TensorDescriptor(x, [count, numbers], [row, 1], [min(slots, 64), 64], pairs.PANEL.value)


def _queries(x: torch.Tensor) -> Any:
    pairs = _pairs()
    return pairs.TensorDescriptor(x, [*x.shape], [*x.stride()], [1, 64, 64], pairs.QUERIES.value)


def _takes_pairs(q_THC: torch.Tensor, q_THP: torch.Tensor, pages: Latents, queries: int) -> bool:
    """Whether `kernels/latent/latent_pairs_gluon.py` serves units of so many queries, all of whose keys they see."""
    heads, (codes, rope, scales) = q_THC.shape[1], pages
    if queries <= 16 or scales is not None or not (heads == queries or heads % 64 == 0):
        return False
    tiled = all(
        (x.shape[1] % 64 == 0 or x.shape[1] in (16, 32)) and x.stride(0) % x.stride(1) == 0 for x in (codes, rope)
    )
    return tiled and _aligned(q_THC) and _aligned(q_THP)


def run_wide(
    q_THC: torch.Tensor,
    q_THP: torch.Tensor,
    pages: Latents,
    table_SW: torch.Tensor,
    rows: StepRows,
    scale: float,
    schedule: Schedule,
    stride: int,
    chosen_TK: torch.Tensor | None = None,
    early: bool = False,
) -> Partial:
    """Launch `slices_kernel` for units of `stride` tokens. `chosen_TK`: a unit is a token then, and sees these slots alone. `early`: only they are of the launch before."""
    (tokens, heads, latent), rope, device = q_THC.shape, q_THP.shape[-1], q_THC.device
    queries, slices = heads * stride, schedule.slice.shape[0] // 2 - 1
    whole_THC = torch.empty(heads, tokens, latent, dtype=q_THC.dtype, device=device).transpose(0, 1)
    parts = torch.empty(slices, 2, queries, latent, dtype=torch.float32, device=device)
    found = torch.empty(slices, 2, queries, dtype=torch.float32, device=device)
    codes, turned, scales = pages
    if chosen_TK is None and _takes_pairs(q_THC, q_THP, pages, queries):
        _pairs().pairs_kernel[(slices, blocks(queries, 64))](
            _queries(q_THC), _queries(q_THP), _slots(codes), _slots(turned), whole_THC, parts, found, schedule.unit, schedule.slice, rows.row_T,
            rows.positions_T, table_SW, heads, scale / math.log(2), table_SW.stride(0), *(x.stride(0) // x.stride(1) for x in (codes, turned)),
            *whole_THC.stride()[:2], PAGE=codes.shape[1], STRIDE=stride, num_warps=4, **dependent(device),
        )  # fmt: skip
        return Partial(whole_THC, parts, found)
    tiles, base = wide_tiles(queries), scale / math.log(2)
    grid, strides, out = (
        (slices, blocks(queries, tiles.heads)),
        (*q_THC.stride()[:2], *q_THP.stride()[:2]),
        whole_THC.stride()[:2],
    )
    if scales is not None and queries <= 16:
        assert chosen_TK is not None and stride == 1
        _codes().codes_kernel[grid](
            q_THC, q_THP, codes.view(torch.uint8), turned, scales, chosen_TK, whole_THC, parts, found, schedule.unit, schedule.slice, table_SW, heads, base,
            *strides, *_strides(codes), table_SW.stride(0), chosen_TK.stride(0), *out, int(early), PAGE=codes.shape[1], C=latent, num_warps=_codes().ADDERS.value,
            **dependent(device),
        )  # fmt: skip
        return Partial(whole_THC, parts, found)
    held, factors = (codes, codes) if scales is None else (codes.view(torch.uint8), scales)
    _gluon().slices_kernel[grid](
        q_THC, q_THP, held, turned, factors, schedule.unit if chosen_TK is None else chosen_TK, whole_THC, parts, found, schedule.unit, schedule.slice,
        rows.row_T, rows.positions_T, table_SW, heads, base, *strides, *_strides(held), *_strides(turned), *_strides(factors), table_SW.stride(0),
        0 if chosen_TK is None else chosen_TK.stride(0), *out, PAGE=codes.shape[1], C=latent, P=rope, G=0 if scales is None else GROUPS,
        CHOSEN=chosen_TK is not None, STRIDE=stride, H=tiles.heads, num_warps=tiles.warps, **dependent(device),
    )  # fmt: skip
    return Partial(whole_THC, parts, found)
