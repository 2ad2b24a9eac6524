"""Paged attention on a CUDA device: which kernels a step needs. `kernels/paged/paged_sizes.py` has their tiles."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from pagerunner.batch import KVPages, StepRows, WritePlaces
from pagerunner.ops import numerics
from pagerunner.ops.fresh_rows import attend_fresh_rows
from pagerunner.ops.kernels.launch import blocks, dependent, multiprocessors, padded
from pagerunner.ops.kernels.linear.linear_wide import say_kernel
from pagerunner.ops.kernels.paged import paged_fixed, paged_prefill_wide
from pagerunner.ops.kernels.paged.paged_decode import decode_kernel
from pagerunner.ops.kernels.paged.paged_dense import Dense, heads_at_once
from pagerunner.ops.kernels.paged.paged_drafts import drafts_kernel
from pagerunner.ops.kernels.paged.paged_few import MOST_MERGED, few_kernel
from pagerunner.ops.kernels.paged.paged_few_drafts import few_drafts_kernel
from pagerunner.ops.kernels.paged.paged_heads import FP8_MAX, fp8_type, head_norm
from pagerunner.ops.kernels.paged.paged_parts import merge_kernel
from pagerunner.ops.kernels.paged.paged_prefill import prefill_kernel
from pagerunner.ops.kernels.paged.paged_schedule import schedule_kernel
from pagerunner.ops.kernels.paged.paged_shared import shared_kernel
from pagerunner.ops.kernels.paged.paged_sizes import (
    DraftTiles,
    Tiles,
    decode_tiles,
    draft_tiles,
    few_draft_tiles,
    few_tiles,
    merged_at_once,
    prefill_tiles,
    shared_tiles,
)
from pagerunner.ops.kernels.paged.paged_store import prepare_split_heads_
from pagerunner.ops.paged_attention import HeadPrep, PagedPlan, Scores

MOST_DRAFT_BYTES = 8192  # of queries in a program of such steps; more haven't registers
MOST_FEW_HEADS = 16  # for a head of keys; two warps haven't registers for more
_SCHEDULE_BLOCK = 256


def _borders() -> numerics.AttentionBorders:
    return numerics.FAST.attention


def wide_tiles(dim: int) -> Tiles:
    """Tiles of the kernel in Gluon."""
    return Tiles(paged_prefill_wide.SIZE, paged_prefill_wide.keys_of(dim), 12, 2)


@dataclass(slots=True)
class _Schedule:
    """What `schedule_kernel` computed for one step's layers of one shape."""

    info: torch.Tensor
    begin: torch.Tensor
    units: torch.Tensor
    parts: torch.Tensor
    counters: torch.Tensor
    shared: bool


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@functools.cache
def _has_cudnn() -> bool:
    return torch.backends.cudnn.is_available()  # kept, because it takes 0.4 ms and every layer asks


def _dot_dtype(q: torch.Tensor, pages: KVPages) -> torch.dtype:
    """The dtype in which decode multiplies. fp8 numbers are exact in float16 and cheap to convert."""
    if q.dtype == torch.float32:
        return torch.float32
    if fp8_type(pages.k.dtype) is not None:
        return torch.float16
    return q.dtype if pages.k.dtype == q.dtype else torch.float32


_TL_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class _Choices(NamedTuple):
    """What follows from the layers' shapes and dtypes, and from how many and how long the step's rows may be."""

    group: int
    group_padded: int
    padded: tuple[int, int]
    fp8: tl.dtype | None
    exact: bool
    dot: tl.dtype
    row_bytes: int
    decode: Tiles
    prefill: Tiles
    slices: int
    entry_tiles: int
    drafts: DraftTiles


def _choose(q: torch.Tensor, v: torch.Tensor, pages: KVPages, stride: int, plan: PagedPlan) -> _Choices:
    heads, dim = q.shape[1:]
    kv_heads, dim_v = v.shape[1:]
    fp8 = fp8_type(pages.k.dtype)
    dot = _dot_dtype(q, pages)
    exact = dot == torch.float32
    held = max(dot.itemsize if exact else 0, pages.k.dtype.itemsize)
    row_bytes = padded(max(dim, dim_v, 16)) * held
    least = 16 if fp8 is None else 32  # of fp8, tiles of even and of odd elements are multiplied
    group, group_padded = heads // kv_heads, padded(heads // kv_heads)
    units = q.shape[0] // max(stride, 1)
    small = units <= _borders().small_rows
    decode, columns = decode_tiles(row_bytes, group, fp8 is not None, small), kv_heads
    drafts = DraftTiles(decode, 1, 1)
    if stride:
        drafts = draft_tiles(row_bytes, group, stride, fp8 is not None, units)
        decode, columns = drafts.tiles, kv_heads * blocks(stride, drafts.tokens)
    slices = max(1, multiprocessors(q.device) * decode.programs // columns)
    if stride and units < _borders().few_rows:
        slices = min(slices, _borders().draft_parts * units)
    return _Choices(
        group=group,
        group_padded=group_padded,
        padded=(max(least, padded(dim)), max(least, padded(dim_v))),
        fp8=fp8,
        exact=exact,
        dot=_TL_DTYPES[dot],
        row_bytes=row_bytes,
        decode=decode,
        prefill=prefill_tiles(row_bytes, plan.usual_query_len, group_padded, exact, plan.window),
        slices=slices,
        # with fewer rows than slices, no slice has to go over to many of them
        entry_tiles=decode.entry if units > slices else 0,
        drafts=drafts,
    )


def _choices(q: torch.Tensor, v: torch.Tensor, pages: KVPages, stride: int, plan: PagedPlan) -> _Choices:
    """Made once a step for all layers that are alike."""
    key = q.dtype, pages.k.dtype, q.shape[1:], v.shape[1:]
    found = plan.scratch.get(key)
    if found is None:
        found = plan.scratch[key] = _choose(q, v, pages, stride, plan)
    return found


def _writes_pages(choices: _Choices, pages: KVPages) -> bool:
    """Whether the decode kernel can write the step's tokens. An fp8 page must lie in one tile."""
    if choices.fp8 is None:
        return pages.scales is None
    return pages.scales is not None and choices.decode.keys % pages.k.shape[1] == 0


class _Call:
    """One layer's launch."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pages: KVPages,
        table: torch.Tensor,
        rows: StepRows,
        plan: PagedPlan,
        scores: Scores,
        prep: HeadPrep | None = None,
        write: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self.prep, self.write = prep, write
        self.q, self.k, self.v, self.rows, self.plan = q, k, v, rows, plan
        self.table = table
        self.scale, self.softcap, self.sinks = scores
        self.tokens, self.heads, self.dim = q.shape
        self.kv_heads, self.dim_v = v.shape[1:]
        self.pages = pages
        self.page = pages.k.shape[1]
        self.stride = rows.stride
        self.units = rows.num_rows if self.stride else self.tokens
        choices = _choices(q, v, pages, self.stride, plan)
        self.group, self.group_padded, self.padded, self.fp8, self.exact, self.dot, self.row_bytes = choices[:7]
        self.decode, self.prefill, self.slices, self.entry_tiles, self.drafts = choices[7:]
        self.kp, self.vp = (x if self.fp8 is None else x.view(torch.uint8) for x in (pages.k, pages.v))
        self.reach = bool(plan.window or plan.chunk)
        self.sharing = shares(rows, plan)
        self.shared_split = rows.num_rows * self.heads
        self.shared = shared_tiles(self.row_bytes, rows.num_rows * self.group, self.exact)
        self.shared_splits = self._shared_splits()
        self.own = prep is not None or (self.reach and not self.stride)
        self.long = not (plan.one_token or self.stride)
        wide = wide_tiles(self.dim)
        self.prefill_parts, wide_parts = self._prefill_parts(self.prefill), self._prefill_parts(wide)
        self.wide = self._is_wide(wide_parts > 0)
        if self.wide:
            self.prefill, self.prefill_parts = wide, wide_parts
        few = few_draft_tiles(self.row_bytes) if self.stride else few_tiles(self.row_bytes, self.group, self.tokens)
        self.one_tile = 0 < plan.window <= few.keys
        short = self.one_tile or self.stride or are_few(self.tokens, self.kv_heads, self.group)
        self.few = short and prep is not None and self.fp8 is None and self.group <= MOST_FEW_HEADS
        if self.few:
            self.entry_tiles = 0
        # of a row in `few_kernel`; two warps, which more heads have, haven't registers to merge some of them first
        self.row_parts = max(_borders().row_parts // self.kv_heads if self.group <= 8 else 0, MOST_MERGED.value)
        self.grouped = not self.stride and self.units < _borders().few_rows and self.slices > MOST_MERGED.value
        self.tiles = few if self.few else self.decode
        self.out = q.new_empty(self.tokens, self.heads, self.dim_v)

    def schedule(self) -> _Schedule:
        rows, plan, device = self.rows, self.plan, self.q.device
        num_rows = rows.slots_R.shape[0]
        # one allocation; parts begin at multiples of 16 bytes
        counters = self.tokens * self.kv_heads  # of a unit's pieces by head, and of pieces that are merged together
        if self.few and not self.stride:
            counters += (self.few_slices() + self.tokens) * self.kv_heads
        elif self.grouped:
            counters += self.slices * self.kv_heads
        sizes = [6, self.tokens + 1, 4 * self.tokens, num_rows + 1, counters]
        sizes = [-(-size // 4) * 4 for size in sizes]
        parts = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
        schedule_kernel[(1,)](
            self.table, self.table.stride(0), rows.slots_R, rows.query_start_R1, rows.seq_lens_R,
            rows.row_T, rows.positions_T, *parts,
            self.units, num_rows, counters, plan.window, plan.chunk, _borders().shared_saving,
            self.shared_splits, self.entry_tiles, self.prefill_parts,
            PAGE=self.page, BN=self.tiles.keys, ALIGN=1 if self.few else self.tiles.keys, BT=self.prefill.rows // self.group,
            BNP=self.prefill.keys, OWN=self.own, SHARED=self.sharing, LONG=self.long, STRIDE=self.stride, BLOCK=_SCHEDULE_BLOCK, num_warps=4,
        )  # fmt: skip
        return _Schedule(*parts, self.sharing)

    def page_args(self) -> tuple[torch.Tensor | int, ...]:
        scales = self.kp if self.pages.scales is None else self.pages.scales
        kp, vp = self.kp, self.vp
        return kp, *kp.stride()[:3], vp, *vp.stride()[:3], scales, scales.stride(0)

    def projection_args(self) -> tuple[torch.Tensor | int, ...]:
        q, k, v, out = self.q, self.k, self.v, self.out
        return q, *q.stride()[:2], k, *k.stride()[:2], v, *v.stride()[:2], out, *out.stride()[:2]

    def head_args(self) -> tuple[torch.Tensor | int | float, ...]:
        prep, write = self.prep, self.write
        if prep is None or write is None:
            return (self.q, self.q, 0, self.q, self.q, 0.0, self.rows.slots_R, self.rows.slots_R)
        norms = (self.q, self.q) if prep.q_norm_D is None or prep.k_norm_D is None else (prep.q_norm_D, prep.k_norm_D)
        return (*prep.angles, prep.angles.cos_T1D.stride(0), *norms, prep.eps, *write)

    def _shared_splits(self) -> int:
        """Pieces of a shared prefix, so that there is work for every multiprocessor."""
        tiles = self.shared
        items = blocks(self.shared_split // self.kv_heads, tiles.rows) * self.kv_heads
        return min(max(multiprocessors(self.q.device) * tiles.programs // items, 1), _borders().shared_parts)

    def run_shared(self, schedule: _Schedule) -> tuple[torch.Tensor, torch.Tensor]:
        per_split = self.shared_split
        device, tiles, splits = self.q.device, self.shared, self.shared_splits
        acc = torch.empty(splits * per_split * self.dim_v, dtype=torch.float32, device=device)
        sums = torch.empty(splits * per_split * 2, dtype=torch.float32, device=device)
        programs = multiprocessors(device) * tiles.programs
        shared_kernel[(programs,)](
            self.q, self.q.stride(0), self.q.stride(1), *self.page_args(),
            self.table, self.table.stride(0), schedule.units, schedule.info, acc, sums, per_split,
            self.scale, self.softcap, programs, self.kv_heads, self.group, tiles.rows, self.dim, self.padded[0],
            self.dim_v, self.padded[1], self.page, tiles.keys, bool(self.softcap), self.fp8, self.dot,
            ASM=dependent(device)["PDL"], num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
        return acc, sums

    def run_decode(self, schedule: _Schedule, *, early: bool) -> None:
        device, tiles = self.q.device, self.decode
        launch = dependent(device)
        shared, shared_sums = self.run_shared(schedule) if schedule.shared else (self.out, self.out)
        slices = self.slices
        parts = slices * 2 * self.heads
        part = torch.empty(parts * (self.dim_v + 2), dtype=torch.float32, device=device)
        decode_kernel[(slices * self.kv_heads,)](
            *self.projection_args(), *self.page_args(), *self.head_args(), self.table, self.table.stride(0),
            self.table.shape[1], schedule.begin, schedule.units, self.tokens, self.entry_tiles,
            schedule.counters,
            part, part[parts * self.dim_v :], shared, shared_sums, schedule.info[2:], self.shared_split,
            self.out if self.sinks is None else self.sinks, self.scale, self.softcap,
            slices, self.kv_heads, self.group, tiles.rows, self.dim, self.padded[0], self.dim_v, self.padded[1],
            self.page, tiles.keys, self.reach, self.own, self.prep is not None,
            head_norm(self.prep), schedule.shared, self.sinks is not None,
            bool(self.softcap), self.fp8, self.dot, num_warps=tiles.warps, num_stages=tiles.stages,
            maxnreg=tiles.registers, EARLY=early and launch["PDL"],
            FP8_MAX=FP8_MAX.get(self.pages.k.dtype, 0.0), STATIC=self.pages.static,
            PAGE_P=padded(self.page), GROUPED=self.grouped, **launch,
        )  # fmt: skip

    def run_drafts(self, schedule: _Schedule, *, early: bool) -> None:
        rows, plan, (tiles, count, tokens) = self.rows, self.plan, self.drafts
        launch = dependent(self.q.device)
        columns = self.kv_heads * blocks(self.stride, tokens)
        parts = self.slices * 2 * columns * count * tiles.rows
        part = torch.empty(parts * (self.dim_v + 2), dtype=torch.float32, device=self.q.device)
        drafts_kernel[(self.slices * columns,)](
            self.q, *self.q.stride()[:2], self.out, *self.out.stride()[:2], *self.page_args(), rows.row_T, rows.positions_T,
            self.table, self.table.stride(0), self.table.shape[1], schedule.begin, schedule.units, self.units, self.entry_tiles,
            schedule.counters, part, part[parts * self.dim_v :], self.out if self.sinks is None else self.sinks,
            self.scale, self.softcap, plan.window, plan.chunk,
            self.slices, self.kv_heads, self.group, self.stride, tokens, tiles.rows, count, self.dim, self.padded[0],
            self.dim_v, self.padded[1], self.page, tiles.keys, self.reach, self.sinks is not None,
            bool(self.softcap), self.fp8, self.dot, num_warps=tiles.warps, num_stages=tiles.stages,
            maxnreg=tiles.registers, EARLY=early and launch["PDL"], **launch,
        )  # fmt: skip

    def few_slices(self) -> int:
        """Parts of a step in `few_kernel`, but for the last one of each row."""
        if self.one_tile:
            return 0
        programs = multiprocessors(self.q.device) * self.tiles.programs
        return max(1, min(programs // self.kv_heads, self.row_parts * self.tokens))

    def run_few(self, schedule: _Schedule, *, early: bool) -> None:
        prep, tiles, device = self.prep, self.tiles, self.q.device
        launch = dependent(device)
        slices = self.few_slices()
        parts = (slices + self.tokens) * self.heads
        part = torch.empty(parts * (self.dim + 2), dtype=torch.float32, device=device)
        group, half = self.group_padded, max(16, padded(self.dim // 2))
        units = _borders().few_rows if self.one_tile else max(_borders().few_rows, padded(self.tokens))
        given, count, apart = self.projection_args(), 1, 0
        if prep is not None and prep.parts_PTND is not None:
            count, apart = prep.parts_PTND.shape[0], prep.parts_PTND.stride(0)
            given = (*(x for heads in prep.split(prep.parts_PTND[0]) for x in (heads, *heads.stride()[:2])), *given[9:])
        few_kernel[((slices + self.tokens) * self.kv_heads,)](
            *given, apart, *self.page_args()[:8], *self.head_args(), self.table, self.table.stride(0),
            self.table.shape[1], schedule.begin, schedule.units, self.tokens, slices, schedule.counters,
            part, part[parts * self.dim :], self.out if self.sinks is None else self.sinks, self.scale, self.softcap,
            LEAST=1, UNITS=units, ONE_TILE=self.one_tile, K=self.kv_heads, G=self.group, M=tiles.rows, D=self.dim, HP=half, PAGE=self.page,
            BN=tiles.keys, RING=self.reach, NORM=head_norm(prep),
            SINKS=self.sinks is not None, SOFTCAP=bool(self.softcap), TO=self.dot, GP=group,
            AT_ONCE=merged_at_once(group, 2 * half), num_warps=tiles.warps, num_stages=tiles.stages,
            maxnreg=tiles.registers, PARTS=count, GROUPED=not self.one_tile and self.row_parts > MOST_MERGED.value,
            EARLY=early and launch["PDL"], **launch,
        )  # fmt: skip

    def run_few_drafts(self, schedule: _Schedule, *, early: bool) -> None:
        prep, tiles, device, plan = self.prep, self.tiles, self.q.device, self.plan
        launch, queries = dependent(device), self.group * self.stride
        count = min(blocks(queries, tiles.rows), max(MOST_DRAFT_BYTES // (tiles.rows * self.row_bytes), 1), 2)
        columns = self.kv_heads * blocks(queries, count * tiles.rows)
        slices = max(1, min(multiprocessors(device) * tiles.programs // columns, _borders().draft_parts * self.units))
        parts = (slices + self.units) * columns * count * tiles.rows
        part = torch.empty(parts * (self.dim + 2), dtype=torch.float32, device=device)
        half = max(16, padded(self.dim // 2))
        few_drafts_kernel[((slices + self.units) * columns,)](
            *self.projection_args(), *self.page_args()[:8], *self.head_args(), self.rows.row_T, self.rows.positions_T,
            self.table, self.table.stride(0), self.table.shape[1], schedule.begin, schedule.units, self.units, slices,
            schedule.counters, part, part[parts * self.dim :], self.out if self.sinks is None else self.sinks, self.scale,
            self.softcap, plan.window, plan.chunk,
            UNITS=_borders().few_rows, K=self.kv_heads, G=self.group, STRIDE=self.stride, M=tiles.rows, TILES=count,
            NEW=max(16, padded(self.stride)), D=self.dim, HP=half, PAGE=self.page, BN=tiles.keys, REACH=self.reach,
            NORM=head_norm(prep), SINKS=self.sinks is not None,
            SOFTCAP=bool(self.softcap), TO=self.dot, AT_ONCE=merged_at_once(tiles.rows, 2 * half),
            num_warps=tiles.warps, num_stages=tiles.stages, maxnreg=tiles.registers, EARLY=early and launch["PDL"], **launch,
        )  # fmt: skip

    def _prefill_parts(self, tiles: Tiles) -> int:
        """How many parts a step's blocks may have, so that all run at once; 0 if blocks occupy the device anyway, or see new tokens alone."""
        if not self.long or self.plan.fresh:
            return 0
        programs = multiprocessors(self.q.device) * tiles.programs
        few = 2 * blocks(self.tokens, tiles.rows // self.group) * self.kv_heads <= programs
        return max(programs // self.kv_heads, 1) if few else 0

    def _is_wide(self, divided: bool) -> bool:
        """Whether the kernel in Gluon serves: long rows, or some over many keys, whose blocks would be `divided`.

        Where pages are in fp8, the host has to know how much past there is: it is copied, a few heads at a time if there is much of it. These have to occupy the device; blocks
        are divided of all heads together. Of windows nothing is copied.
        """
        plan, reach = self.plan, self.plan.window or self.plan.chunk
        plain = self.long and not 0 < reach < _borders().wide_window
        least = _borders().divided_queries if divided else _borders().wide_queries
        if not (plain and plan.usual_query_len >= least):
            return False
        if self.pages.scales is not None and not plan.fresh:
            at_once = 0 if plan.past is None or reach else heads_at_once(plan.past, self.kv_heads, self.dim)
            if divided:
                if at_once < self.kv_heads or plan.usual_query_len * self.group < paged_prefill_wide.SIZE:
                    return False
            elif 2 * blocks(self.tokens * self.group, paged_prefill_wide.SIZE) * at_once <= multiprocessors(
                self.q.device
            ):
                return False
        past, of = not plan.fresh, "long rows of new tokens" if plan.fresh else "long rows with a past"
        wide = paged_prefill_wide.serves((self.q, self.k, self.v), self.pages, past=past)
        of_heads = self.q.device, self.heads, self.dim, self.q.dtype, self.pages.k.dtype
        say_kernel(of, "paged_prefill_gluon", wide, *of_heads)
        return wide

    def run_wide(self, schedule: _Schedule) -> None:
        heads, rows, plan = paged_prefill_wide.Heads(self.q, self.k, self.v, self.out), self.rows, self.plan
        step = rows.slots_R, rows.query_start_R1, rows.seq_lens_R
        given = heads, self.pages, self.table, step, schedule.parts, schedule.info[4:], self.scale
        divided = self.room_for_parts() if self.prefill_parts else None
        if plan.fresh or self.pages.scales is None:
            reach = plan.window, plan.chunk
            paged_prefill_wide.run(
                *given, past=not plan.fresh, divided=divided, sinks=self.sinks, reach=reach, softcap=self.softcap
            )
        else:
            assert plan.past is not None, "the kernel serves only where it is known"
            dense = plan.scratch.get(Dense)
            if dense is None:
                dense = plan.scratch[Dense] = Dense.of(plan.past, rows.slots_R.shape[0], self.q.device)
            at_once = heads_at_once(plan.past, self.kv_heads, self.dim)
            paged_prefill_wide.run_dense(*given, dense, at_once, divided, self.sinks, self.softcap)
        if divided is not None:
            self.merge_parts(schedule, *divided)

    def most_parts(self) -> int:
        """Of all rows' blocks."""
        of_blocks = blocks(self.tokens, self.prefill.rows // self.group)
        return max(of_blocks + min(self.rows.slots_R.shape[0], self.tokens // 2), self.prefill_parts)

    def room_for_parts(self) -> tuple[torch.Tensor, ...]:
        """Their values and sums."""
        places = self.most_parts() * self.kv_heads * self.prefill.rows
        room = torch.empty(places * (self.dim_v + 2), dtype=torch.float32, device=self.q.device)
        return room.split([places * self.dim_v, places * 2])

    def merge_parts(self, schedule: _Schedule, values: torch.Tensor, sums: torch.Tensor) -> None:
        rows, sinks = self.rows, self.out if self.sinks is None else self.sinks
        merge_kernel[(self.tokens * self.kv_heads,)](
            self.out, *self.out.stride()[:2], rows.row_T, rows.query_start_R1, schedule.parts, values, sums, sinks,
            self.kv_heads, self.group, self.group_padded, self.prefill.rows, self.dim_v, self.padded[1], self.sinks is not None,
            merged_at_once(self.group_padded, self.padded[1]), num_warps=4, **dependent(self.q.device),
        )  # fmt: skip

    def run_prefill(self, schedule: _Schedule) -> None:
        if self.wide:
            self.run_wide(schedule)
            return
        tiles, rows, plan = self.prefill, self.rows, self.plan
        parts, sinks = self.prefill_parts, self.out if self.sinks is None else self.sinks
        dot = torch.float32 if self.exact else self.q.dtype
        bulk = self._bulk_copies(dot)
        values, sums = self.room_for_parts() if parts else (self.out, self.out)
        prefill_kernel[(self.most_parts() * self.kv_heads,)](
            *self.projection_args(), *self.page_args(), *self._descriptors(bulk, tiles.keys), self.table, self.table.stride(0),
            self.table.shape[1], rows.slots_R, rows.query_start_R1, rows.seq_lens_R, schedule.parts, rows.slots_R.shape[0],
            values, sums, sinks, self.scale, self.softcap, plan.window, plan.chunk,
            self.kv_heads, self.group, tiles.rows, self.dim, self.padded[0], self.dim_v,
            self.padded[1], self.page, tiles.keys, self.reach, self.sinks is not None, bool(self.softcap), bulk,
            self.fp8, _TL_DTYPES[dot], _TL_DTYPES[dot] if self.fp8 is None else self.dot, parts > 0,
            dependent(self.q.device)["PDL"], num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
        if parts:
            self.merge_parts(schedule, values, sums)

    def _bulk_copies(self, dot: torch.dtype) -> bool:
        """Whether the copy engine can fetch tiles of the new tokens' keys and values."""
        if dot != self.k.dtype or self.padded != (self.dim, self.dim_v) or _capability(self.q.device) < (9, 0):
            return False
        return all(
            x.data_ptr() % 16 == 0 and x.stride(0) * x.itemsize % 16 == 0 and x.stride(1) == x.shape[2]
            for x in (self.k, self.v)
        )

    def _descriptors(self, bulk: bool, keys: int) -> tuple[Any, Any]:
        if not bulk:
            return self.k, self.v

        def describe(x: torch.Tensor) -> TensorDescriptor:
            columns = x.shape[1] * x.shape[2]
            return TensorDescriptor(x, [x.shape[0], columns], [x.stride(0), 1], [keys, x.shape[2]])

        return describe(self.k), describe(self.v)

    def library_serves(self) -> bool:
        """Whether cuDNN serves this step, which the kernel in Gluon doesn't, faster: it has long rows with nothing before them.

        cuDNN takes 50 ms to prepare itself for a new row length. That is worth it only for lengths that come again.
        """
        fresh = self.plan.fresh
        if not fresh or self.reach or any(count % _borders().library_queries for count in fresh) or not self.q.is_cuda:
            return False
        return (
            self.q.dtype in (torch.bfloat16, torch.float16)
            and self.sinks is None
            and not self.softcap
            and self.dim == self.dim_v
            and self.dim in (64, 128)
            and _capability(self.q.device) >= (9, 0)
            and _has_cudnn()
        )

    def run(self) -> torch.Tensor:
        if not self.wide and self.library_serves():
            return attend_fresh_rows(self.q, self.k, self.v, self.plan.fresh, self.scale)
        key = self.kv_heads, self.group, self.own, self.few, self.grouped, self.tiles, self.prefill, self.shared_splits, self.prefill_parts  # fmt: skip
        schedule = self.plan.scratch.get(key)
        # prefetching first tiles cost 2.5 us of 25 at 64 rows, and saved 2 us of 9 at one row
        early = schedule is not None and (self.few or self.units < _borders().few_rows)
        if schedule is None:
            schedule = self.plan.scratch[key] = self.schedule()
        if self.stride and self.few:
            self.run_few_drafts(schedule, early=early)
        elif self.stride:
            self.run_drafts(schedule, early=early)
        elif self.few:
            self.run_few(schedule, early=early)
        elif not self.long or min(self.plan.fresh, default=1) <= 1:  # with a past always, so that a warm-up compiles it
            self.run_decode(schedule, early=early and not schedule.shared)
        if self.long:
            self.run_prefill(schedule)
        return self.out


def are_few(rows: int, kv_heads: int, group: int) -> bool:
    """Whether so many rows have `few_kernel` whatever they see. More than 8 query heads weren't measured with more rows."""
    return rows < _borders().few_rows or (group <= 8 and rows * kv_heads <= _borders().few_units)


def takes_parts(first: torch.Tensor, prep: HeadPrep, pages: KVPages, rows: StepRows, plan: PagedPlan) -> bool:
    """See the twin: `few_kernel` alone does."""
    count, group = rows.slots_R.shape[0], prep.num_heads // prep.num_kv_heads
    few = plan.one_token and not plan.fixed and pages.scales is None
    return few and group <= MOST_FEW_HEADS and are_few(count, prep.num_kv_heads, group) and not shares(rows, plan)


def shares(rows: StepRows, plan: PagedPlan) -> bool:
    """Whether a step looks for pages that all of its rows share. Strided batches don't: their graphs are for rows that share none."""
    never = plan.window or plan.chunk or rows.stride
    return plan.sharing and not never and rows.slots_R.shape[0] >= _borders().sharing_rows


def paged_attention(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKV: torch.Tensor,
    pages: KVPages,
    table_SW: torch.Tensor,
    rows: StepRows,
    plan: PagedPlan,
    scores: Scores,
) -> torch.Tensor:
    """See the twin."""
    if plan.fixed:
        dot = _TL_DTYPES[_dot_dtype(q_THD, pages)]
        return paged_fixed.attend(q_THD, k_TKD, v_TKV, pages, table_SW, rows, plan, scores, dot)
    return _Call(q_THD, k_TKD, v_TKV, pages, table_SW, rows, plan, scores).run()


def projected_attention(
    qkv_TND: torch.Tensor,
    prep: HeadPrep,
    pages: KVPages,
    write: WritePlaces,
    table_SW: torch.Tensor,
    rows: StepRows,
    plan: PagedPlan,
    scores: Scores,
) -> torch.Tensor:
    """See the twin. A step can be one kernel if each row has one token and no shared pages are looked for.

    In that kernel every slice of a row prepares the row's queries. With fp8 pages one kernel is faster for any number of rows (64
    rows on an H200: 17.0 us, and 19.0 with two kernels). Otherwise one kernel is faster only while a launch costs as much as the
    work, as with few rows or with windows (64 rows: 21.8 us, and 20.4 with two kernels). A strided batch is one kernel if it has few rows.
    """
    q, k, v = prep.split(qkv_TND)
    if not takes_parts(q, prep, pages, rows, plan):
        prep = prep.whole(qkv_TND)
    if plan.fixed:
        prepare_split_heads_(q, k, v, prep, pages, write)
        return paged_attention(q, k, v, pages, table_SW, rows, plan, scores)
    choices, reach = _choices(q, v, pages, rows.stride, plan), bool(plan.window or plan.chunk)
    few = are_few(rows.slots_R.shape[0], prep.num_kv_heads, choices.group)
    cheap = pages.scales is not None or reach or few
    single = plan.one_token and cheap and not shares(rows, plan)
    if rows.stride and rows.num_rows < _borders().few_rows and pages.scales is None:
        single = choices.group <= MOST_FEW_HEADS
    if not (single and _writes_pages(choices, pages)):
        prepare_split_heads_(q, k, v, prep, pages, write)
        return _Call(q, k, v, pages, table_SW, rows, plan, scores).run()
    return _Call(q, k, v, pages, table_SW, rows, plan, scores, prep, write).run()
