"""Attention whose kernels read page tables on the device: no gathered tables, no plan on the host, at home in graphs.

On a CUDA device the operations of `ops.paged_attention` are Triton kernels; elsewhere their torch twins, which serve
tests of everything around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pagerunner.attention.base import GraphShape, PlanInputs
from pagerunner.attention.capability import lacks
from pagerunner.batch import ForwardBatch, GroupBatch, LayerKV
from pagerunner.memory.specs import Spec
from pagerunner.ops.paged_attention import (
    MIN_SHARING_ROWS,
    HeadPrep,
    PagedKV,
    PagedPlan,
    TableRows,
    paged_attention,
    prepare_heads_,
    projected_attention,
    store_kv_,
)

MAX_HEAD_DIM = 256


class PagedBackend:
    """See the module. It has no state of its own: an instance may serve any number of groups."""

    name = "triton"
    reads_tables = True
    plans_on_host = False
    min_sharing_rows = MIN_SHARING_ROWS

    def unsupported(self, spec: Spec, device: str, dtype: torch.dtype) -> str | None:
        """Serves full, windowed and chunked attention in float32, float16 and bfloat16."""
        heads: Any = spec
        if spec.kind not in ("full", "window", "chunked") or not hasattr(spec, "num_kv_heads"):
            return f"it serves keys and values by head, not {type(spec).__name__}"
        if max(heads.head_dim, heads.value_dim) > MAX_HEAD_DIM:
            return f"its heads have at most {MAX_HEAD_DIM} elements, not {max(heads.head_dim, heads.value_dim)}"
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"it does not compute in {dtype}"
        return lacks(device)

    def new_state(self, shape: GraphShape | None) -> GraphShape | None:
        """What a plan is for; nothing outlives a step: what kernels share is computed by the first layer that runs."""
        return shape

    def plan(self, inputs: PlanInputs, state: GraphShape | None) -> PagedPlan:
        """Sizes of what queries see, and the bounds of the step."""
        rows, reach = inputs.rows, inputs.reach
        lens = tuple(inputs.query_lens)
        whole = state is None and lens == tuple(inputs.seq_lens) and rows.num_tokens == sum(lens)
        fresh = lens if whole and reach is None else ()
        size = 0 if reach is None else reach.size
        chunked = reach is not None and reach.chunked
        return PagedPlan(
            window=0 if chunked else size,
            chunk=size if chunked else 0,
            one_token=rows.one_token,
            usual_query_len=usual_query_len(lens) if lens else rows.max_query_len,
            fresh=fresh,
            sharing=state is None or state.sharing,
        )

    def forward(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        layer: LayerKV,
        group: GroupBatch,
        batch: ForwardBatch,
        scale: float,
        sinks_H: torch.Tensor | None = None,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """Write k and v, then attend; [T, H, size of a value head]. k and v are rounded in place to what pages hold."""
        pages = PagedKV(layer.k, layer.v, layer.scales, bool(layer.static))
        store_kv_(k_TKD, v_TKD, pages, group.write_entry, group.write_offset)
        first = _is_first(layer, batch)
        rows = _rows(group, batch)
        return paged_attention(q_THD, k_TKD, v_TKD, pages, rows, group.metadata, scale, sinks_H, softcap, first)

    def from_projection(
        self,
        qkv_TND: torch.Tensor,
        prep: HeadPrep,
        layer: LayerKV,
        group: GroupBatch,
        batch: ForwardBatch,
        scale: float,
        sinks_H: torch.Tensor | None = None,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """Norm, rotate and store the heads of a projection's output in one kernel, in place; then attend."""
        pages = PagedKV(layer.k, layer.v, layer.scales, bool(layer.static))
        first, rows, write = _is_first(layer, batch), _rows(group, batch), (group.write_entry, group.write_offset)
        return projected_attention(qkv_TND, prep, pages, *write, rows, group.metadata, scale, sinks_H, softcap, first)

    def sampled_from_projection(
        self,
        qkv_TND: torch.Tensor,
        prep: HeadPrep,
        layer: LayerKV,
        group: GroupBatch,
        batch: ForwardBatch,
        scale: float,
        sinks_H: torch.Tensor | None = None,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """As `from_projection`, but the attention of the sampled tokens alone, [S, H, size of a value head]: once all tokens
        are in the pages, each of these is like a row that generates.
        """
        if group.metadata.window or group.metadata.chunk:  # where not all tokens of the step need be in the pages
            out_THV = self.from_projection(qkv_TND, prep, layer, group, batch, scale, sinks_H, softcap)
            return out_THV.index_select(0, batch.logits_index)
        pages = PagedKV(layer.k, layer.v, layer.scales, bool(layer.static))
        prepare_heads_(qkv_TND, prep, pages, group.write_entry, group.write_offset)
        q_SHD, k_SKD, v_SKV = prep.split(qkv_TND.index_select(0, batch.logits_index))
        if not q_SHD.shape[0]:
            return q_SHD[..., : v_SKV.shape[-1]]
        rows = _rows(group, batch).of_tokens(batch.logits_index)
        plan = PagedPlan(one_token=True, usual_query_len=1)
        return paged_attention(q_SHD, k_SKD, v_SKV, pages, rows, plan, scale, sinks_H, softcap)


def usual_query_len(query_lens: Sequence[int]) -> int:
    """A length of which half of the tokens of rows with several are in rows that have no more; 1 without such rows."""
    lens = sorted(count for count in query_lens if count > 1)
    left = sum(lens) / 2
    for count in lens:
        left -= count
        if left <= 0:
            return count
    return 1


def _rows(group: GroupBatch, batch: ForwardBatch) -> TableRows:
    rows = batch.rows
    return TableRows(group.page_table, rows.slots_R, rows.query_start_R1, rows.seq_lens_R, rows.row_T, rows.positions_T)


def _is_first(layer: LayerKV, batch: ForwardBatch) -> bool:
    """Whether no layer before this one has its group and shape. A graph's replay begins with such a layer, so whatever
    it computes for the others is computed in every replay.
    """
    shape = layer.k.shape[1:]
    for other in batch.kv:
        if isinstance(other, LayerKV) and other.group == layer.group and other.k.shape[1:] == shape:
            return other is layer
    return True
