"""Attention over paged keys and values, for backends whose kernels read the page tables on the device.

The torch twins here define what the kernels in `kernels/paged_*.py` compute: plain masked attention, a row at a time,
in float32. They synchronise with the device and are slow. No version reads a slot beyond a sequence's length, or a page
that isn't in the table.

Shape letters: T tokens of the step, R rows, H query heads, K key/value heads, D head size, V size of a value head,
E entries, S slots of the page table, W its columns, Q queries of a row, L keys of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from pagerunner.batch import KVPages, StepRows, WritePlaces
from pagerunner.ops.dispatch import gpu_kernel
from pagerunner.ops.fp8 import from_fp8, to_fp8
from pagerunner.ops.fp8_pages import grow_scales
from pagerunner.ops.norm import qk_norm_
from pagerunner.ops.pages import gather_slots, slot_layout, slot_rows, write_slots
from pagerunner.ops.rope import RopeAngles, rope_


class Scores(NamedTuple):
    """How the products of a query and the keys become weights: `c * tanh(product * scale / c)` with a `softcap` c (0: the scaled
    product itself), then softmax, in which a head's sink is one more score that stands for no value.
    """

    scale: float
    softcap: float = 0.0
    sinks_H: torch.Tensor | None = None


@dataclass(slots=True)
class PagedPlan:
    """What the layers of a step share.

    A query sees the last `window` keys (its own included), or the keys of its own chunk of `chunk` tokens, or all before it
    (both 0).

    - `one_token`: each row has one token, and token t belongs to row t.
    - `usual_query_len`: the median row length, weighed by tokens, of the rows with several tokens. Example: for rows of 1, 10, 20
      and 100 tokens it is 100. Where the host doesn't know the lengths, it is an upper bound.
    - `fresh`: the rows' lengths, where the host knows that no row has tokens from earlier steps; otherwise empty.
    - `past`: tokens before those of the step, at most, of each row with several; None where the host doesn't know.
    - `sharing`: all rows may begin with the same pages.
    - `fixed`: a token's sums are made in an order that nothing but its position decides (docs/batch-invariance.md).
    - `scratch`: what kernels compute in the first layer and the other layers read. Each step and each capture has a plan of its
      own, so that a graph computes `scratch` in each replay.
    """

    window: int = 0
    chunk: int = 0
    one_token: bool = False
    usual_query_len: int = 0
    fresh: tuple[int, ...] = ()
    past: tuple[int, ...] | None = None
    sharing: bool = True
    fixed: bool = False
    scratch: dict[Any, Any] = field(default_factory=dict)

    def oldest(self, position: int) -> int:
        """The first position that the query at `position` sees."""
        if self.chunk:
            return position // self.chunk * self.chunk
        return max(position - self.window + 1, 0) if self.window else 0


WIDE_HEADS = range(64, 257, 16)
"""Sizes of heads that have a kernel for long rows on Hopper, which reads a past in fp8 pages from a copy."""


class HeadPrep(NamedTuple):
    """What is done to the heads of a projection's output [T, N, D] before attention: norms of queries and keys (None:
    none), then rotary positions in halves. Heads are queries, then keys, then values.

    `offset`: the norms' weights count from 1.
    `parts`: the output is only room yet. It is what these float32 sums, which may be of more tokens, add up to in their order.
    """

    num_heads: int
    num_kv_heads: int
    angles: RopeAngles
    q_norm_D: torch.Tensor | None = None
    k_norm_D: torch.Tensor | None = None
    eps: float = 0.0
    parts_PTND: torch.Tensor | None = None
    offset: bool = False

    def whole(self, qkv_TND: torch.Tensor) -> HeadPrep:
        """What is left to do once parts are added up, which it does."""
        if self.parts_PTND is None:
            return self
        total_TND, *others = self.parts_PTND[:, : qkv_TND.shape[0]]
        for part_TND in others:
            total_TND = total_TND + part_TND
        qkv_TND.copy_(total_TND)
        return self._replace(parts_PTND=None)

    def split(self, qkv_TND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of queries, keys and values."""
        v_first = self.num_heads + self.num_kv_heads
        return qkv_TND[:, : self.num_heads], qkv_TND[:, self.num_heads : v_first], qkv_TND[:, v_first:]

    def apply_(self, qkv_TND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Norm and rotate the heads in place, and return their views."""
        self.whole(qkv_TND)
        qk_TND = qkv_TND[:, : self.num_heads + self.num_kv_heads]
        if self.q_norm_D is not None and self.k_norm_D is not None:
            qk_norm_(qk_TND, self.q_norm_D, self.k_norm_D, self.num_heads, self.eps, self.offset)
        rope_(qk_TND, self.angles)
        return self.split(qkv_TND)


@gpu_kernel("paged.paged_store")
def store_kv_(k_TKD: torch.Tensor, v_TKV: torch.Tensor, pages: KVPages, write: WritePlaces) -> None:
    """Write keys and values of all tokens that have a page (entry of at least 0), and round both in place to what pages hold.

    So a token's own step sees what later steps see.

    The scale of an fp8 page grows, by powers of two, when one of its tokens needs a larger one; what the page held is
    then converted. The tokens of one page are adjacent in T.
    """
    for values, view, which in ((k_TKD, pages.k, 0), (v_TKV, pages.v, 1)):
        if pages.scales is not None:
            values.copy_(_store_scaled(view, pages, which, values, write))
            continue
        stored_T = (write.entry_T >= 0).nonzero().squeeze(-1)
        layout = slot_layout(view)
        rows = slot_rows(write.entry_T[stored_T], write.offset_T[stored_T], layout)
        write_slots(view, rows, values[stored_T], layout)
        if view.dtype != values.dtype:
            values.copy_(values.to(view.dtype))


def _store_scaled(
    view: torch.Tensor, pages: KVPages, which: int, values_TKD: torch.Tensor, write: WritePlaces
) -> torch.Tensor:
    scales = pages.scales
    if scales is None:
        raise TypeError("pages without scales have nothing to scale by")
    if pages.static:
        scale_TK = scales[:1, which].expand(values_TKD.shape[0], -1)
    else:
        scale_TK = grow_scales(view, scales, which, values_TKD, write.entry_T)
    stored_T = write.entry_T >= 0
    quantised_TKD = to_fp8(values_TKD, scale_TK.unsqueeze(-1), view.dtype)
    raw = view.view(torch.uint8)
    layout = slot_layout(raw)
    rows = slot_rows(write.entry_T[stored_T], write.offset_T[stored_T], layout)
    write_slots(raw, rows, quantised_TKD.view(torch.uint8)[stored_T], layout)
    return from_fp8(quantised_TKD, scale_TK.unsqueeze(-1), values_TKD.dtype)


@gpu_kernel("paged.paged_store")
def prepare_heads_(qkv_TND: torch.Tensor, prep: HeadPrep, pages: KVPages, write: WritePlaces) -> None:
    """Norm and rotate the heads of a projection's output in place, then `store_kv_` its keys and values."""
    store_kv_.twin(*prep.apply_(qkv_TND)[1:], pages, write)


@gpu_kernel("paged.paged_attention")
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
    """Causal attention of every token over its sequence, [T, H, V], after `store_kv_`. Padding tokens give zeros.

    A row's past is in its pages, which the group's table of all slots gives. A row's tokens of this step are in k and v. Tokens
    that later steps read are in pages too. In a strided batch all tokens are, and kernels need not read k and v.
    """
    out_THV = q_THD.new_zeros(q_THD.shape[0], q_THD.shape[1], v_TKV.shape[2])
    slots, starts, lengths = (x.tolist() for x in (rows.slots_R, rows.query_start_R1, rows.seq_lens_R))
    for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        first, last = starts[row], starts[row + 1]
        if rows.stride:
            last = first + int((rows.row_T[first:last] >= 0).sum())
        if length == 0 or first == last:
            continue
        start = length - (last - first)
        oldest = plan.oldest(start)
        past = torch.arange(oldest, start, device=q_THD.device)
        k_LKD = torch.cat((_read(pages, 0, past, slot, table_SW), k_TKD[first:last].float()))
        v_LKV = torch.cat((_read(pages, 1, past, slot, table_SW), v_TKV[first:last].float()))
        queries_Q1 = torch.arange(start, length, device=q_THD.device).unsqueeze(-1)
        keys_L = torch.arange(oldest, length, device=q_THD.device)
        seen_QL = keys_L <= queries_Q1
        if plan.chunk:
            seen_QL &= keys_L >= queries_Q1 // plan.chunk * plan.chunk
        elif plan.window:
            seen_QL &= keys_L > queries_Q1 - plan.window
        out_THV[first:last] = _attend(q_THD[first:last], k_LKD, v_LKV, seen_QL, scores)
    return out_THV


@gpu_kernel("paged.paged_attention")
def takes_parts(first: torch.Tensor, prep: HeadPrep, pages: KVPages, rows: StepRows, plan: PagedPlan) -> bool:
    """Whether `projected_attention` of a step adds up parts of a projection in its own kernel. `first` is any tensor of the device."""
    return False


@gpu_kernel("paged.paged_attention")
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
    """`prepare_heads_`, then `paged_attention`. The contents of `qkv` are undefined afterwards."""
    prepare_heads_.twin(qkv_TND, prep, pages, write)
    return paged_attention.twin(*prep.split(qkv_TND), pages, table_SW, rows, plan, scores)


def _read(pages: KVPages, which: int, positions_L: torch.Tensor, slot: int, table_SW: torch.Tensor) -> torch.Tensor:
    view = pages.v if which else pages.k
    size = view.shape[1]
    entries_L = table_SW[slot, positions_L // size % table_SW.shape[1]]
    raw = view.view(torch.uint8) if pages.scales is not None else view
    layout = slot_layout(raw)
    slots = slot_rows(entries_L, positions_L % size, layout)
    out = torch.empty(slots.numel(), layout.unit, dtype=raw.dtype, device=raw.device)
    held_LKD = gather_slots(raw, slots, layout, raw.dtype, out).view(view.dtype).float()
    return held_LKD if pages.scales is None else held_LKD * pages.scales[entries_L, which].unsqueeze(-1)


def _attend(
    q_QHD: torch.Tensor, k_LKD: torch.Tensor, v_LKV: torch.Tensor, seen_QL: torch.Tensor, scores: Scores
) -> torch.Tensor:
    scale, softcap, sinks_H = scores
    group = q_QHD.shape[1] // k_LKD.shape[1]
    k_HDL = k_LKD.repeat_interleave(group, 1).permute(1, 2, 0)
    v_HLV = v_LKV.repeat_interleave(group, 1).transpose(0, 1)
    scores_HQL = torch.matmul(q_QHD.float().transpose(0, 1), k_HDL) * scale
    if softcap:
        scores_HQL = torch.tanh(scores_HQL / softcap) * softcap
    scores_HQL = scores_HQL.masked_fill(~seen_QL, float("-inf"))
    if sinks_H is not None:
        sinks_HQ1 = sinks_H.float().view(-1, 1, 1).expand(-1, q_QHD.shape[0], 1)
        scores_HQL = torch.cat((scores_HQL, sinks_HQ1), -1)
    weights_HQL = scores_HQL.softmax(-1)[..., : k_LKD.shape[0]]
    return torch.matmul(weights_HQL, v_HLV).transpose(0, 1).to(q_QHD.dtype)
