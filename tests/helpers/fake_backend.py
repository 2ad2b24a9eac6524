"""A backend for tests, and the shortest example of one: the operations of `ops.paged_attention`, and every call kept."""

from __future__ import annotations

import torch

from pagerunner.attention.base import GraphShape, PlanInputs
from pagerunner.attention.calls import AttentionCall, Projection
from pagerunner.attention.capability import HEADS, Capabilities
from pagerunner.ops.paged_attention import PagedPlan, paged_attention, prepare_heads_, store_kv_


class FakeBackend:
    """Serves keys and values by head. `planned` and `calls` are what it was given, in order.

    `projection`, `wanted` and `graphs` set the `capabilities` of these names. The backend can compute all of them.
    """

    name = "fake"

    def __init__(self, capabilities: Capabilities | None = None) -> None:
        self.capabilities = Capabilities(forms=HEADS) if capabilities is None else capabilities
        self.planned: list[PlanInputs] = []
        self.calls: list[AttentionCall] = []

    def new_state(self, shape: GraphShape | None) -> GraphShape | None:
        """What it is for."""
        return shape

    def plan(self, inputs: PlanInputs, state: GraphShape | None) -> PagedPlan:
        """What queries see."""
        self.planned.append(inputs)
        if inputs.reach is None:
            return PagedPlan()
        chunked = inputs.reach.chunked
        return PagedPlan(window=0 if chunked else inputs.reach.size, chunk=inputs.reach.size if chunked else 0)

    def run(self, call: AttentionCall) -> torch.Tensor:
        """See AttentionCall."""
        self.calls.append(call)
        inputs, pages, group, rows, scores, wanted, _ = call
        if isinstance(inputs, Projection):
            prepare_heads_(*inputs, pages, group.write)
            heads = inputs.prep.split(inputs.qkv_TND)
        else:
            store_kv_(inputs.k_TKD, inputs.v_TKV, pages, group.write)
            heads = inputs
        out_THV = paged_attention(*heads, pages, group.page_table, rows, group.plan, scores)
        return out_THV if wanted is None else out_THV.index_select(0, wanted)
