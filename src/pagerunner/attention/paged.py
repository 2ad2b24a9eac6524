"""Attention whose kernels read page tables on the device. It needs no gathered tables and no plan on the host, so it runs
in graphs.

On a CUDA device the operations of `ops.paged_attention` are Triton kernels; elsewhere their torch twins, which serve
tests of everything around them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch

from pagerunner.attention.base import GraphShape, PlanInputs
from pagerunner.attention.calls import AttentionCall, Projection
from pagerunner.attention.capability import FLOATS, HEADS, Capabilities
from pagerunner.ops import numerics
from pagerunner.ops.paged_attention import PagedPlan, paged_attention, prepare_heads_, projected_attention, store_kv_


class PagedOps(NamedTuple):
    """The operations of `ops.paged_attention` that a backend runs, by their names there."""

    store_kv_: Callable[..., None]
    prepare_heads_: Callable[..., None]
    paged_attention: Callable[..., torch.Tensor]
    projected_attention: Callable[..., torch.Tensor]


class PagedBackend:
    """See the module. It has no state of its own: an instance may serve any number of groups."""

    name = "triton"
    capabilities = Capabilities(
        forms=HEADS,
        compute_dtypes=FLOATS,
        max_head_dim=256,
        projection=True,
        wanted=True,
        graphs=True,
        min_sharing_rows=numerics.FAST.attention.sharing_rows,
        drafts=True,
        triton=True,
        invariant=True,
    )
    fixed = False
    """Whether plans are `fixed`, see PagedPlan."""
    ops: ClassVar[PagedOps] = PagedOps(store_kv_, prepare_heads_, paged_attention, projected_attention)

    def new_state(self, shape: GraphShape | None) -> GraphShape | None:
        """Only what a plan is for.

        Nothing outlives a step, because the first layer of each step computes what kernels share.
        """
        return shape

    def plan(self, inputs: PlanInputs, state: GraphShape | None) -> PagedPlan:
        """Sizes of what queries see, and the bounds of the step."""
        rows, reach = inputs.rows, inputs.reach
        lens = tuple(inputs.query_lens)
        whole = state is None and lens == tuple(inputs.seq_lens) and rows.num_tokens == sum(lens)
        fresh = lens if whole else ()
        known = len(lens) == len(inputs.seq_lens) > 0  # a graph has none, and a drafter's pass says new ones alone
        past = tuple(of - new for of, new in zip(inputs.seq_lens, lens, strict=True) if new > 1) if known else None
        size = 0 if reach is None else reach.size
        chunked = reach is not None and reach.chunked
        return PagedPlan(
            window=0 if chunked else size,
            chunk=size if chunked else 0,
            one_token=rows.one_token,
            usual_query_len=usual_query_len(lens) if lens else rows.max_query_len,
            fresh=fresh,
            past=past,
            sharing=state is None or state.sharing,
            fixed=self.fixed,
        )

    def run(self, call: AttentionCall) -> torch.Tensor:
        """See AttentionCall. k and v are rounded in place to what pages hold."""
        inputs, pages, group, rows, scores, wanted, _ = call
        table, plan, write = group.page_table, group.plan, group.write
        if wanted is not None:
            return self._wanted_alone(call, wanted)
        if isinstance(inputs, Projection):
            return self.ops.projected_attention(*inputs, pages, write, table, rows, plan, scores)
        self.ops.store_kv_(inputs.k_TKD, inputs.v_TKV, pages, write)
        return self.ops.paged_attention(*inputs, pages, table, rows, plan, scores)

    def _wanted_alone(self, call: AttentionCall, wanted_S: torch.Tensor) -> torch.Tensor:
        """Attention of the wanted tokens alone.

        Once all tokens are in pages, each wanted token is like a row that generates.
        """
        inputs, pages, group = call.inputs, call.pages, call.group
        if group.plan.window or group.plan.chunk:  # where not all tokens of the step need be in the pages
            out_THV = self.run(call._replace(wanted=None))
            return out_THV.index_select(0, wanted_S)
        if isinstance(inputs, Projection):
            self.ops.prepare_heads_(*inputs, pages, group.write)
            q_SHD, k_SKD, v_SKV = inputs.prep.split(inputs.qkv_TND.index_select(0, wanted_S))
        else:
            self.ops.store_kv_(inputs.k_TKD, inputs.v_TKV, pages, group.write)
            q_SHD, k_SKD, v_SKV = (x.index_select(0, wanted_S) for x in inputs)
        if not q_SHD.shape[0]:
            return q_SHD[..., : v_SKV.shape[-1]]
        rows, plan = call.rows.of_tokens(wanted_S), PagedPlan(one_token=True, usual_query_len=1, fixed=self.fixed)
        return self.ops.paged_attention(q_SHD, k_SKD, v_SKV, pages, group.page_table, rows, plan, call.scores)


def usual_query_len(query_lens: Sequence[int]) -> int:
    """The median row length, weighed by tokens, of the rows with several tokens; 1 if no row has several."""
    lens = sorted(count for count in query_lens if count > 1)
    left = sum(lens) / 2
    for count in lens:
        left -= count
        if left <= 0:
            return count
    return 1
