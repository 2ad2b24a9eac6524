"""Which steps' prefill `kernels/paged/paged_prefill_gluon.py` computes, and its launch. fp8 pages are converted first: see `kernels/paged/paged_dense.py`."""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import torch

from pagerunner.batch import KVPages
from pagerunner.ops.kernels.launch import dependent, multiprocessors
from pagerunner.ops.kernels.linear.linear_wide import has_gluon
from pagerunner.ops.kernels.paged.paged_dense import Dense, room_for_tiles
from pagerunner.ops.paged_attention import WIDE_HEADS

SIZE = 128
"""Rows of a block."""
"""Elements of a head: lanes copy 16 bytes each, and Triton knows of multiples of 16 elements that they may."""


def keys_of(dim: int) -> int:
    """Keys of a tile: with heads of `dim` elements, as many as there is room for."""
    return SIZE if dim <= SIZE else SIZE // 2


@functools.cache
def _gluon() -> Any:
    """The kernel's module. It isn't imported with Triton versions that may not have what it names."""
    return importlib.import_module("pagerunner.ops.kernels.paged.paged_prefill_gluon")


class Heads(NamedTuple):
    """A step's queries [T, H, D], keys and values [T, K, D], and where results go [T, H, D]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor


def serves(heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor], pages: KVPages, *, past: bool) -> bool:
    """Whether the kernel computes attention of such queries, keys and values, and to pages if rows have a `past`."""
    q, k, v = heads
    group, dim = q.shape[1] // k.shape[1], q.shape[2]
    fit = q.dtype in (torch.bfloat16, torch.float16) and dim in WIDE_HEADS and v.shape[2] == dim and has_gluon(q.device)
    even = all(x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0 and x.stride()[1:] == (dim, 1) for x in heads)
    return fit and even and group <= 64 and (not past or _reads(pages, q.dtype, dim))


def _reads(pages: KVPages, dtype: torch.dtype, dim: int) -> bool:
    """Whether a page's tokens are rows of one table of all pages, which the copy engine reads."""
    if pages.scales is not None:  # what is read are copies
        return pages.k.shape[3] == pages.v.shape[3] == dim
    if pages.k.shape[1] % 16:
        return False
    return all(
        x.dtype == dtype
        and x.data_ptr() % 16 == 0
        and x.stride(0) % x.stride(1) == 0
        and x.stride(1) % 8 == 0
        and x.stride()[2:] == (dim, 1)
        for x in (pages.k, pages.v)
    )


def _rows(x: torch.Tensor) -> Any:
    """Boxes of a tile's tokens and 64 elements."""
    gluon = _gluon()
    layout = gluon.PANEL.value
    box = [keys_of(x.shape[2]), 64]
    return gluon.TensorDescriptor(x, [x.shape[0], x.shape[1] * x.shape[2]], [x.stride(0), 1], box, layout)


def _page_rows(x: torch.Tensor) -> Any:
    gluon = _gluon()
    page, row = x.shape[1], x.stride(1)
    count = (x.shape[0] - 1) * (x.stride(0) // row) + page
    box = [min(page & -page, keys_of(x.shape[3])), 64]
    return gluon.TensorDescriptor(x, [count, x.shape[2] * x.shape[3]], [row, 1], box, gluon.PANEL.value)


def run(
    heads: Heads,
    pages: KVPages,
    table: torch.Tensor,
    rows: tuple[torch.Tensor, ...],
    parts: torch.Tensor,
    taken: torch.Tensor,
    scale: float,
    *,
    past: bool,
    divided: tuple[torch.Tensor, torch.Tensor] | None = None,
    sinks: torch.Tensor | None = None,
    reach: tuple[int, int] = (0, 0),
    softcap: float = 0.0,
) -> None:
    """Launch the kernel. `rows`: slots, starts and lengths of the rows; `parts`: prefix sums of their blocks of 128 // group queries; `taken`: two zeros.

    `divided`: `parts` are those of blocks, and leave their values and sums there. `sinks` [H] count in the weights of blocks that are whole.
    `reach`: keys of a window, or of a chunk.
    """
    q, k, v, out = heads
    gluon, group = _gluon(), q.shape[1] // k.shape[1]
    new = _rows(k), _rows(v)
    queries = results = new[0]
    if group & (group - 1) == 0:
        box, layout = [64 // group, group, 64], gluon.QUERIES.value
        queries, results = (gluon.TensorDescriptor(x, [*x.shape], [*x.stride()], box, layout) for x in (q, out))
    old = (_page_rows(pages.k), _page_rows(pages.v)) if past else new
    page_rows = (pages.k.stride(0) // pages.k.stride(1), pages.v.stride(0) // pages.v.stride(1)) if past else (1, 1)
    gluon.gluon_prefill_kernel[(multiprocessors(q.device),)](
        queries, q, q.stride(0), q.stride(1), *new, *old, results, out, out.stride(0), out.stride(1), table, table.stride(0), *rows, parts, taken, *(divided or (out, out)), out if sinks is None else sinks, rows[0].shape[0], *page_rows, table.shape[-1], *reach, scale, softcap,
        K=k.shape[1], G=group, D=q.shape[2], PAGE=pages.k.shape[1] if past else SIZE, PAGED=past, DIVIDED=divided is not None, SINKS=sinks is not None, SOFTCAP=softcap > 0, REACH=any(reach), num_warps=4, **dependent(q.device),
    )  # fmt: skip


def run_dense(
    heads: Heads, pages: KVPages, table: torch.Tensor, rows: tuple[torch.Tensor, ...], parts: torch.Tensor, taken: torch.Tensor, scale: float,
    dense: Dense, at_once: int, divided: tuple[torch.Tensor, torch.Tensor] | None = None, sinks: torch.Tensor | None = None, softcap: float = 0.0,
) -> None:  # fmt: skip
    """As `run`, of a past in fp8 pages: so many heads of keys after one another, all together if blocks are `divided`."""
    kv_heads = heads.k.shape[1]
    group = heads.q.shape[1] // kv_heads
    room = room_for_tiles(heads.q.dtype, heads.q.device)
    for first in range(0, kv_heads, at_once):
        own = slice(first, min(first + at_once, kv_heads))
        queries = slice(own.start * group, own.stop * group)
        some = Heads(heads.q[:, queries], heads.k[:, own], heads.v[:, own], heads.out[:, queries])
        copied = dense.copy(pages, table, rows, own, room)
        of_some = None if sinks is None else sinks[queries]
        step = dense.tiles, (dense.first_R, *rows[1:]), parts, taken, scale
        run(some, copied, *step, past=True, divided=divided, sinks=of_some, softcap=softcap)
