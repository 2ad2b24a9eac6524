"""The operations of `ops/paged_attention.py` by the CPU kernels: float32 queries, keys, values and pages."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch

from pagerunner.batch import KVPages, StepRows
from pagerunner.ops.native.calls import ATTENTION, PREPARE, address, call, empty, memory_of, sized
from pagerunner.ops.paged_attention import HeadPrep, PagedPlan, Scores

_CALL = struct.Struct("17P19q3f4x")  # Attention in native/attention.h
_NO_SCORES = Scores(0.0)
_NO_PLAN = PagedPlan()
_F32, _I32, _I64 = torch.float32, torch.int32, torch.int64


class _Inputs(NamedTuple):
    """What a command reads and writes; None: what it doesn't look at."""

    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    pages: KVPages
    write: tuple[torch.Tensor, torch.Tensor] | None = None
    prep: HeadPrep | None = None
    out_THV: torch.Tensor | None = None
    table_SW: torch.Tensor | None = None
    rows: StepRows | None = None
    plan: PagedPlan = _NO_PLAN
    scores: Scores = _NO_SCORES

    def run(self, *kinds: int) -> None:
        """Run commands of these kinds on it, one after another."""
        packed = self._packed()
        prep, rows = self.prep, self.rows
        tensors = (
            *self.heads,
            self.pages.k,
            self.pages.v,
            *(self.write or ()),
            self.out_THV,
            self.table_SW,
            self.scores.sinks_H,
            *(() if prep is None else (prep.q_norm_D, prep.k_norm_D, *prep.angles)),
            *(() if rows is None else (rows.slots_R, rows.query_start_R1, rows.seq_lens_R)),
        )
        for kind in kinds:
            call(kind, packed, tensors)

    def _packed(self) -> bytes:
        """The C structure. Raises TypeError or ValueError for tensors that it doesn't describe."""
        q_THD, k_TKD, v_TKV = self.heads
        (tokens, num_heads, size), (kv_heads, value_size) = q_THD.shape, v_TKV.shape[1:]
        k_pages, v_pages = self.pages.k, self.pages.v
        sized("k", k_TKD, tokens, kv_heads, size)
        sized("v", v_TKV, tokens, kv_heads, value_size)
        sized("pages of keys", k_pages, None, None, kv_heads, size)
        sized("pages of values", v_pages, None, k_pages.shape[1], kv_heads, value_size)
        table, rows = self.table_SW, self.rows
        return _CALL.pack(
            address("q", q_THD, _F32, 2),
            address("k", k_TKD, _F32, 2),
            address("v", v_TKV, _F32, 2),
            address("pages of keys", k_pages, _F32, 2),
            address("pages of values", v_pages, _F32, 2),
            0 if self.out_THV is None else self.out_THV.data_ptr(),
            *self._prep_addresses(tokens, size),
            _optional("sinks", self.scores.sinks_H, _F32, num_heads),
            *self._write_addresses(tokens),
            0 if table is None else address("the page table", table, _I64, 1),
            *_row_addresses(rows),
            q_THD.stride(0),
            k_TKD.stride(0),
            v_TKV.stride(0),
            k_pages.stride(0),
            v_pages.stride(0),
            k_pages.stride(1),
            v_pages.stride(1),
            k_pages.shape[1],
            0 if table is None else table.stride(0),
            1 if table is None else table.shape[1],
            tokens,
            0 if rows is None else rows.slots_R.shape[0],
            0 if rows is None else rows.max_query_len,
            num_heads,
            kv_heads,
            size,
            value_size,
            self.plan.window,
            self.plan.chunk,
            0.0 if self.prep is None else self.prep.eps,
            self.scores.scale,
            self.scores.softcap,
        )

    def _prep_addresses(self, tokens: int, size: int) -> tuple[int, int, int, int]:
        if self.prep is None:
            return 0, 0, 0, 0
        cos_T1D, sin_T1D = self.prep.angles
        sized("cosines", cos_T1D, tokens, 1, size)
        sized("sines", sin_T1D, tokens, 1, size)
        return (
            _optional("the queries' norm", self.prep.q_norm_D, _F32, size),
            _optional("the keys' norm", self.prep.k_norm_D, _F32, size),
            address("cosines", cos_T1D, _F32, 3),
            address("sines", sin_T1D, _F32, 3),
        )

    def _write_addresses(self, tokens: int) -> tuple[int, int]:
        if self.write is None:
            return 0, 0
        entry_T, offset_T = self.write
        return _optional("write entries", entry_T, _I64, tokens), _optional("write offsets", offset_T, _I64, tokens)


def _optional(name: str, x: torch.Tensor | None, dtype: torch.dtype, size: int) -> int:
    if x is None:
        return 0
    sized(name, x, size)
    return address(name, x, dtype, 1)


def _row_addresses(rows: StepRows | None) -> tuple[int, int, int]:
    if rows is None:
        return 0, 0, 0
    count = rows.slots_R.shape[0]
    return (
        address("slots", rows.slots_R, _I32, 1),
        _optional("query starts", rows.query_start_R1, _I32, count + 1),
        _optional("lengths", rows.seq_lens_R, _I32, count),
    )


def attention_memory(row_tokens: int, heads: int, kv_heads: int, head_dim: int, value_dim: int) -> int:
    """Bytes that attention works in, of rows of up to so many tokens."""
    nowhere, strides = (0,) * 17, (0,) * 10
    sizes = row_tokens, 1, row_tokens, heads, kv_heads, head_dim, value_dim, 0, 0
    return memory_of(ATTENTION, _CALL.pack(*nowhere, *strides, *sizes, 0.0, 0.0, 0.0))


def _dense(x_TND: torch.Tensor) -> torch.Tensor:
    """A view whose heads lie one behind another within a token, or a copy."""
    dense = x_TND.stride(2) == 1 and (x_TND.shape[1] == 1 or x_TND.stride(1) == x_TND.shape[2])
    return x_TND if dense else x_TND.contiguous()


def store_kv_(
    k_TKD: torch.Tensor,
    v_TKV: torch.Tensor,
    pages: KVPages,
    write_entry_T: torch.Tensor,
    write_offset_T: torch.Tensor,
) -> None:
    """See `ops.paged_attention.store_kv_`."""
    heads = k_TKD[:, :0], _dense(k_TKD), _dense(v_TKV)
    _Inputs(heads, pages, (write_entry_T, write_offset_T)).run(PREPARE)


def prepare_heads_(
    qkv_TND: torch.Tensor,
    prep: HeadPrep,
    pages: KVPages,
    write_entry_T: torch.Tensor,
    write_offset_T: torch.Tensor,
) -> None:
    """See `ops.paged_attention.prepare_heads_`."""
    _Inputs(prep.split(qkv_TND), pages, (write_entry_T, write_offset_T), prep).run(PREPARE)


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
    """See `ops.paged_attention.paged_attention`."""
    heads = _dense(q_THD), _dense(k_TKD), _dense(v_TKV)
    out_THV = empty(*q_THD.shape[:2], v_TKV.shape[2])
    _Inputs(heads, pages, None, None, out_THV, table_SW, rows, plan, scores).run(ATTENTION)
    return out_THV


def projected_attention(
    qkv_TND: torch.Tensor,
    prep: HeadPrep,
    pages: KVPages,
    write_entry_T: torch.Tensor,
    write_offset_T: torch.Tensor,
    table_SW: torch.Tensor,
    rows: StepRows,
    plan: PagedPlan,
    scores: Scores,
) -> torch.Tensor:
    """See `ops.paged_attention.projected_attention`."""
    out_THV = empty(qkv_TND.shape[0], prep.num_heads, qkv_TND.shape[2])
    write = write_entry_T, write_offset_T
    _Inputs(prep.split(qkv_TND), pages, write, prep, out_THV, table_SW, rows, plan, scores).run(PREPARE, ATTENTION)
    return out_THV
