"""Multi-head latent attention whose kernels read page tables on the device, so it runs in graphs. See `attention.mla`.

In graphs, and for short rows of eager steps, every token is a query in the latent space over its row's pages. Its own step's
vectors are in these pages too. For long rows of eager steps, keys and values of all heads are expanded from the pages, a
bounded number at a time. A (query, key) pair then takes a third of the multiplications.

Shape letters: T tokens of the step, H heads, D query head size (N without rotary positions, then P rotary ones), C
latent size, L vector size (C + P), V value head size, S keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from pagerunner.attention.base import GraphShape, PlanInputs
from pagerunner.attention.calls import LatentCall, UpProjection
from pagerunner.attention.capability import FLOATS, Capabilities
from pagerunner.batch import LatentPages, StepRows
from pagerunner.ops import numerics
from pagerunner.ops.async_copy import to_device
from pagerunner.ops.latent_attention import (
    BLOCK_QUERIES,
    Pieces,
    expanded_attention,
    latent_values,
    read_latent,
    store_latent_,
)
from pagerunner.ops.latent_heads import absorb_latent_heads_, prepare_latent_heads_
from pagerunner.ops.latent_prefill import fresh_attention, library_serves

MAX_EXPANDED_ELEMENTS = 2**27  # bounds the memory of expanded keys and values
SHARED_MEMORY = 184_320, 131_072
"""Bytes of Triton's largest program, in half precision and in float32. Gluon's are for Hopper, which has 227 KiB."""


@dataclass(frozen=True, slots=True)
class ExpandedCall:
    """Keys of long rows that are expanded together: their entries and slots [S], and the queries that look at them."""

    entries_S: torch.Tensor
    offsets_S: torch.Tensor
    pieces: Pieces
    more: bool


@dataclass(frozen=True, slots=True)
class Division:
    """`short_T`: the tokens that are queries in the latent space, each of them a row of `short`, whose layers share `scratch`."""

    short_T: torch.Tensor
    short: StepRows
    calls: tuple[ExpandedCall, ...]
    scratch: dict[Any, Any] = field(default_factory=dict)


@dataclass(slots=True)
class LatentPlan:
    """How an eager step is divided. The first layer that asks makes the division. `scratch` is what the layers' kernels share.

    `fresh`: the rows' lengths, where the host knows that no row has tokens from earlier steps; otherwise empty.
    """

    inputs: PlanInputs | None
    fresh: tuple[int, ...] = ()
    scratch: dict[Any, Any] = field(default_factory=dict)
    _made: dict[int, Division] = field(default_factory=dict)

    def divide(self, elements: int) -> Division | None:
        """`elements` are those of a key and a value of all heads. None: all tokens are queries in the latent space."""
        if self.inputs is None or max(self.inputs.query_lens) <= numerics.FAST.attention.short_latent_queries:
            return None
        step = max(1, MAX_EXPANDED_ELEMENTS // elements)
        if step not in self._made:
            self._made[step] = _divide(self.inputs, step)
        return self._made[step]


@dataclass(frozen=True, slots=True)
class _Piece:
    row: int
    first_token: int
    queries: int
    start: int
    first_key: int
    keys: int


def _divide(inputs: PlanInputs, step: int) -> Division:
    """At most `step` keys a call.

    Only the first piece of a call may continue a row of the call before, and is then its only piece.
    """
    device = inputs.page_table.device
    short: list[int] = []
    calls: list[list[_Piece]] = []
    room, token = 0, 0
    for row, (queries, length) in enumerate(zip(inputs.query_lens, inputs.seq_lens, strict=True)):
        if queries <= numerics.FAST.attention.short_latent_queries:
            short += range(token, token + queries)
        else:
            for first in range(0, length, step):
                keys = min(step, length - first)
                if keys > room or first:
                    calls.append([])
                    room = step
                calls[-1].append(_Piece(row, token, queries, length - queries, first, keys))
                room = 0 if first else room - keys
        token += queries
    short_T = to_device(short, torch.int64, device)
    return Division(short_T, inputs.rows.of_tokens(short_T), tuple(_call(pieces, inputs) for pieces in calls))


def _call(pieces: Sequence[_Piece], inputs: PlanInputs) -> ExpandedCall:
    device = inputs.page_table.device
    position_S = np.concatenate([np.arange(p.first_key, p.first_key + p.keys) for p in pieces])
    slot_S = np.repeat([inputs.slots[p.row] for p in pieces], [p.keys for p in pieces])
    at_S = to_device(position_S, torch.int64, device)
    entries_S = inputs.page_table[to_device(slot_S, torch.int64, device), at_S // inputs.page_tokens]
    ends = np.cumsum([p.keys for p in pieces])
    table = [
        (p.first_token, p.queries, end - p.keys, p.keys, p.start - p.first_key)
        for p, end in zip(pieces, ends.tolist(), strict=True)
    ]
    blocks = [
        (index << 16) + block for index, p in enumerate(pieces) for block in range(-(-p.queries // BLOCK_QUERIES))
    ]
    blocks.sort(key=lambda packed: -(packed & 0xFFFF))  # pieces with most keys come first
    tensors = (to_device(x, torch.int32, device) for x in (table, blocks))
    return ExpandedCall(entries_S, at_S % inputs.page_tokens, Pieces(*tensors), more=pieces[0].first_key > 0)


class PagedLatentBackend:
    """See the module. It has no state of its own: an instance may serve any number of groups."""

    name = "paged_mla"
    capabilities = Capabilities(
        forms=frozenset({"latent"}),
        compute_dtypes=FLOATS,
        page_dtypes=frozenset({"float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2"}),
        projection=True,
        graphs=True,
        drafts=True,
        triton=True,
        shared_memory=SHARED_MEMORY,
    )

    def new_state(self, shape: GraphShape | None) -> GraphShape | None:
        """Only whether a step runs in a graph matters."""
        return shape

    def plan(self, inputs: PlanInputs, state: GraphShape | None) -> LatentPlan:
        """A graph's steps aren't divided, because only the device knows their rows."""
        if state is not None:
            return LatentPlan(None)
        lens = tuple(inputs.query_lens)
        fresh = lens == tuple(inputs.seq_lens) and inputs.rows.num_tokens == sum(lens)
        return LatentPlan(inputs, lens if fresh else ())

    def run(self, call: LatentCall) -> torch.Tensor:
        """See LatentCall."""
        q_THD, vectors_TL, up, memory, group, rows, scale, prep, *_ = call
        pages, scales_E, table = memory.latent, _vector_scales(memory), group.page_table
        plan: LatentPlan = group.plan
        write = pages, group.write, scales_E
        division = plan.divide(up.weight.shape[0])
        if division is None:
            if prep is None:
                store_latent_(vectors_TL, *write)
                q_THC = absorb(q_THD, up)
            else:
                q_THC = absorb_latent_heads_(q_THD, vectors_TL, prep, up.keys_HNC, *write, most_of_page=rows.stride)
            q_THP = q_THD[..., up.key_dim :]
            return latent_values(q_THC, q_THP, pages, table, rows, scale, up.values_HVC, plan.scratch, scales_E)
        if prep is None:
            store_latent_(vectors_TL, *write)
        else:
            prepare_latent_heads_(q_THD, vectors_TL, prep, *write)
        if pages.dtype == q_THD.dtype and library_serves(q_THD, up.value_dim, plan.fresh):
            return fresh_attention(q_THD, vectors_TL, up.keys_HNC, up.values_HVC, plan.fresh, scale)
        return _divided(call, division)


def _divided(call: LatentCall, division: Division) -> torch.Tensor:
    """Attention once all vectors are in pages: of long rows over expanded keys, of short ones in the latent space."""
    q_THD, up, pages, scale = call.q_THD, call.up, call.pages.latent, call.scale
    scales_E = _vector_scales(call.pages)
    out_THV = q_THD.new_empty(q_THD.shape[0], up.num_heads, up.value_dim)
    lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)
    for part in division.calls:
        vectors_SL = read_latent(pages, part.entries_S, part.offsets_S, q_THD.dtype, scales_E)
        both_SHU = F.linear(vectors_SL[:, : up.latent_dim], up.weight).unflatten(-1, (up.num_heads, -1))
        rope_SP = vectors_SL[:, up.latent_dim :]
        expanded_attention(q_THD, both_SHU, rope_SP, part.pieces, scale, out_THV, lse_TH, part.more)
    short_T = division.short_T
    if short_T.numel():
        q_SHD, table = q_THD[short_T], call.group.page_table
        q_SHP = q_SHD[..., up.key_dim :]
        out_THV[short_T] = latent_values(
            absorb(q_SHD, up), q_SHP, pages, table, division.short, scale, up.values_HVC, division.scratch, scales_E
        )
    return out_THV


def _vector_scales(memory: LatentPages) -> torch.Tensor | None:
    """What fp8 vectors of pages stand for is multiplied by, [num_entries]."""
    return None if memory.scales is None else memory.scales[:, 0, 0]


def absorb(q_THD: torch.Tensor, up: UpProjection) -> torch.Tensor:
    """Queries without their rotary parts in the latent space, [T, H, C]; in memory one head after another."""
    return torch.bmm(q_THD[..., : up.key_dim].transpose(0, 1), up.keys_HNC).transpose(0, 1)


def to_values(latent_THC: torch.Tensor, up: UpProjection) -> torch.Tensor:
    """Weighted latents as values, [T, H, V], contiguous."""
    out_THV = latent_THC.new_empty(*latent_THC.shape[:2], up.value_dim)
    torch.bmm(latent_THC.transpose(0, 1), up.values_HVC.transpose(1, 2), out=out_THV.transpose(0, 1))
    return out_THV
