"""The operations of `ops/paged_attention.py` by the CPU kernels: float32 queries, keys, values and pages."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch

from pagerunner.batch import KVPages, StepRows, WritePlaces
from pagerunner.ops.native.calls import ATTENTION, PREPARE, Operand, call, empty, made, memory_of, operand
from pagerunner.ops.paged_attention import HeadPrep, PagedPlan, Scores

_CALL = struct.Struct("17P19q4fi4x")  # Attention in native/attention.h
_NO_SCORES = Scores(0.0)
_NO_PLAN = PagedPlan()
_I32, _I64 = torch.int32, torch.int64


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
        operands, sizes = self._operands(), self._sizes()
        for kind in kinds:
            call(kind, _CALL, operands, *sizes)

    def _operands(self) -> tuple[Operand, ...]:
        """The C structure's tensors. Raises TypeError or ValueError for tensors that it doesn't describe."""
        q_THD, k_TKD, v_TKV = self.heads
        (tokens, num_heads, size), (kv_heads, value_size) = q_THD.shape, v_TKV.shape[1:]
        k_pages, v_pages, prep, rows = self.pages.k, self.pages.v, self.prep, self.rows
        entry_T, offset_T = self.write or (None, None)
        q_norm, k_norm, cos, sin = (None,) * 4 if prep is None else (prep.q_norm_D, prep.k_norm_D, *prep.angles)
        slots, starts, lengths = (None,) * 3 if rows is None else (rows.slots_R, rows.query_start_R1, rows.seq_lens_R)
        count = 0 if slots is None else slots.shape[0]
        return (
            operand("q", q_THD, dense=2),
            operand("k", k_TKD, tokens, kv_heads, size, dense=2),
            operand("v", v_TKV, tokens, kv_heads, value_size, dense=2),
            operand("pages of keys", k_pages, None, None, kv_heads, size, dense=2),
            operand("pages of values", v_pages, None, k_pages.shape[1], kv_heads, value_size, dense=2),
            Operand(0, None) if self.out_THV is None else made(self.out_THV),
            operand("the queries' norm", q_norm, size),
            operand("the keys' norm", k_norm, size),
            operand("cosines", cos, tokens, 1, size, dense=3),
            operand("sines", sin, tokens, 1, size, dense=3),
            operand("sinks", self.scores.sinks_H, num_heads),
            operand("write entries", entry_T, tokens, dtype=_I64),
            operand("write offsets", offset_T, tokens, dtype=_I64),
            operand("the page table", self.table_SW, dtype=_I64),
            operand("slots", slots, dtype=_I32),
            operand("query starts", starts, count + 1, dtype=_I32),
            operand("lengths", lengths, count, dtype=_I32),
        )

    def _sizes(self) -> tuple[float, ...]:
        """The C structure's numbers."""
        (q_THD, _, v_TKV), k_pages, v_pages, rows = self.heads, self.pages.k, self.pages.v, self.rows
        page_strides = k_pages.stride(0), v_pages.stride(0), k_pages.stride(1), v_pages.stride(1)
        table = (0, 1) if self.table_SW is None else (self.table_SW.stride(0), self.table_SW.shape[1])
        counts = (0, 0) if rows is None else (rows.slots_R.shape[0], rows.max_query_len)
        heads = q_THD.shape[1], v_TKV.shape[1], q_THD.shape[2], v_TKV.shape[2]
        norm = (0.0, 0.0) if self.prep is None else (self.prep.eps, float(self.prep.offset))
        return (
            *(x.stride(0) for x in self.heads), *page_strides, k_pages.shape[1], *table, q_THD.shape[0], *counts, *heads,
            self.plan.window, self.plan.chunk, *norm, self.scores.scale, self.scores.softcap,
            self.plan.fixed,
        )  # fmt: skip


def attention_memory(row_tokens: int, heads: int, kv_heads: int, head_dim: int, value_dim: int) -> int:
    """Bytes that attention works in, of rows of up to so many tokens."""
    nowhere, strides = (0,) * 17, (0,) * 10
    sizes = row_tokens, 1, row_tokens, heads, kv_heads, head_dim, value_dim, 0, 0
    return memory_of(ATTENTION, _CALL.pack(*nowhere, *strides, *sizes, 0.0, 0.0, 0.0, 0.0, 0))


def _dense(x_TND: torch.Tensor) -> torch.Tensor:
    """A view whose heads lie one behind another within a token, or a copy."""
    dense = x_TND.stride(2) == 1 and (x_TND.shape[1] == 1 or x_TND.stride(1) == x_TND.shape[2])
    return x_TND if dense else x_TND.contiguous()


def store_kv_(k_TKD: torch.Tensor, v_TKV: torch.Tensor, pages: KVPages, write: WritePlaces) -> None:
    """See `ops.paged_attention.store_kv_`."""
    heads = k_TKD[:, :0], _dense(k_TKD), _dense(v_TKV)
    _Inputs(heads, pages, write).run(PREPARE)


def prepare_heads_(qkv_TND: torch.Tensor, prep: HeadPrep, pages: KVPages, write: WritePlaces) -> None:
    """See `ops.paged_attention.prepare_heads_`."""
    _Inputs(prep.split(qkv_TND), pages, write, prep).run(PREPARE)


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
    write: WritePlaces,
    table_SW: torch.Tensor,
    rows: StepRows,
    plan: PagedPlan,
    scores: Scores,
) -> torch.Tensor:
    """See `ops.paged_attention.projected_attention`."""
    out_THV = empty(qkv_TND.shape[0], prep.num_heads, qkv_TND.shape[2])
    _Inputs(prep.split(qkv_TND), pages, write, prep, out_THV, table_SW, rows, plan, scores).run(PREPARE, ATTENTION)
    return out_THV
