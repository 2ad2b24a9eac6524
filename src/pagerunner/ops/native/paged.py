"""The operations of `ops/paged_attention.py` by the CPU kernels: float32 queries, keys, values and pages."""

from __future__ import annotations

import struct

import torch

from pagerunner.batch import KVPages, StepRows
from pagerunner.ops.native.library import Library, loaded
from pagerunner.ops.paged_attention import HeadPrep, PagedPlan, Scores

_CALL = struct.Struct("17P15q3f")  # Attention in native/attention.h
_NO_SCORES = Scores(0.0)
_NO_PLAN = PagedPlan()


def _kernels() -> Library:
    found = loaded()
    assert found is not None, "the backend serves machines with CPU kernels alone"
    return found


def _at(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _call(
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    pages: KVPages,
    *,
    prep: HeadPrep | None = None,
    write: tuple[torch.Tensor, torch.Tensor] | None = None,
    out_THV: torch.Tensor | None = None,
    table_SW: torch.Tensor | None = None,
    rows: StepRows | None = None,
    plan: PagedPlan = _NO_PLAN,
    scores: Scores = _NO_SCORES,
) -> bytes:
    q_THD, k_TKD, v_TKV = heads
    (tokens, num_heads, size), (kv_heads, value_size) = q_THD.shape, v_TKV.shape[1:]
    write_entry_T, write_offset_T = (None, None) if write is None else write
    return _CALL.pack(
        q_THD.data_ptr(),
        k_TKD.data_ptr(),
        v_TKV.data_ptr(),
        pages.k.data_ptr(),
        pages.v.data_ptr(),
        _at(out_THV),
        0 if prep is None else _at(prep.q_norm_D),
        0 if prep is None else _at(prep.k_norm_D),
        0 if prep is None else prep.angles.cos_T1D.data_ptr(),
        0 if prep is None else prep.angles.sin_T1D.data_ptr(),
        _at(scores.sinks_H),
        _at(write_entry_T),
        _at(write_offset_T),
        _at(table_SW),
        0 if rows is None else rows.slots_R.data_ptr(),
        0 if rows is None else rows.query_start_R1.data_ptr(),
        0 if rows is None else rows.seq_lens_R.data_ptr(),
        q_THD.stride(0),
        k_TKD.stride(0),
        v_TKV.stride(0),
        pages.k.stride(0),
        pages.v.stride(0),
        pages.k.shape[1],
        1 if table_SW is None else table_SW.stride(0),
        tokens,
        0 if rows is None else rows.slots_R.shape[0],
        num_heads,
        kv_heads,
        size,
        value_size,
        plan.window,
        plan.chunk,
        0.0 if prep is None else prep.eps,
        scores.scale,
        scores.softcap,
    )


def _dense(x_TND: torch.Tensor) -> torch.Tensor:
    """A view whose heads lie one behind another within a token, or a copy."""
    return x_TND if x_TND.stride(2) == 1 and x_TND.stride(1) == x_TND.shape[2] else x_TND.contiguous()


def store_kv_(
    k_TKD: torch.Tensor,
    v_TKV: torch.Tensor,
    pages: KVPages,
    write_entry_T: torch.Tensor,
    write_offset_T: torch.Tensor,
) -> None:
    """See `ops.paged_attention.store_kv_`."""
    heads = k_TKD[:, :0], _dense(k_TKD), _dense(v_TKV)
    _kernels().prepare(_call(heads, pages, write=(write_entry_T, write_offset_T)))


def prepare_heads_(
    qkv_TND: torch.Tensor,
    prep: HeadPrep,
    pages: KVPages,
    write_entry_T: torch.Tensor,
    write_offset_T: torch.Tensor,
) -> None:
    """See `ops.paged_attention.prepare_heads_`."""
    call = _call(prep.split(qkv_TND), pages, prep=prep, write=(write_entry_T, write_offset_T))
    _kernels().prepare(call)


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
    out_THV = q_THD.new_empty(*q_THD.shape[:2], v_TKV.shape[2])
    kernels = _kernels()
    kernels.attention(_call(heads, pages, out_THV=out_THV, table_SW=table_SW, rows=rows, plan=plan, scores=scores))
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
    heads = prep.split(qkv_TND)
    out_THV = qkv_TND.new_empty(qkv_TND.shape[0], prep.num_heads, qkv_TND.shape[2])
    write = write_entry_T, write_offset_T
    call = _call(
        heads, pages, prep=prep, write=write, out_THV=out_THV, table_SW=table_SW, rows=rows, plan=plan, scores=scores
    )
    kernels = _kernels()
    kernels.prepare(call)
    kernels.attention(call)
    return out_THV
