"""Attention in plain torch: the CPU backend, and the twin that GPU backends are compared with.

Exact under every condition that the scheduler can make: chunks with a past, rows that share pages with rows of the same
step, and page slots that hold NaN because nothing was written there. `torch_plan` says how a step is divided. Shape
letters: T tokens of the step, B rows of one call, Q queries of a row, L key slots, H query heads, K key/value heads,
G query heads per key/value head, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pagerunner.attention.base import GraphShape, PlanInputs
from pagerunner.attention.calls import AttentionCall, Heads, Result
from pagerunner.attention.capability import HEADS, WINDOW_VECTORS, Capabilities
from pagerunner.attention.gathered import gathered_rows
from pagerunner.attention.kv_store import store
from pagerunner.attention.torch_plan import BandPart, NewPart, PaddedPart, Part, SharedPart, Slots, Tokens, make_plan
from pagerunner.batch import GroupBatch, KVPages
from pagerunner.ops.pages import SlotLayout, gather_slots, slot_layout, slot_rows, write_slots
from pagerunner.ops.sparse_latents import held_in_fp8


class TorchPlan:
    """What a step's layers share: how it is divided, and (once a layer has asked) the rows its tokens go to.

    `unstored` says that some tokens may have no page.
    """

    __slots__ = ("_stored", "_write_rows", "parts", "unstored")

    def __init__(self, parts: tuple[Part, ...], *, unstored: bool) -> None:
        self.parts = parts
        self.unstored = unstored
        self._write_rows: dict[SlotLayout, torch.Tensor] = {}
        self._stored: torch.Tensor | None = None

    def write(self, group: GroupBatch, pages: torch.Tensor, values_TKD: torch.Tensor) -> None:
        """Store the values of every token that has a page."""
        layout = slot_layout(pages)
        rows = self._write_rows.get(layout)
        if self.unstored and self._stored is None:
            self._stored = (group.write.entry_T >= 0).nonzero().squeeze(-1)
        stored = self._stored
        some = stored is not None and stored.numel() < values_TKD.shape[0]
        if rows is None:
            entries, offsets = group.write
            if some:
                entries, offsets = entries[stored], offsets[stored]
            rows = self._write_rows[layout] = slot_rows(entries, offsets, layout)
        write_slots(pages, rows, values_TKD[stored] if some else values_TKD, layout)


class Scratch:
    """Memory that one call gathers keys (0) and values (1) into, reused by every layer and step.

    Fresh memory of this size comes from the system page by page, which costs as much as the gather itself. Slots in another
    dtype are converted into memory of this object too, so `scratch_bytes` counts all that reading pages takes.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return sum(held.nbytes for held in self._held.values())

    def take(self, which: int, rows: int, unit: int, like: torch.Tensor) -> torch.Tensor:
        """Memory of [rows, unit] elements on the device of `like`, and in its dtype."""
        key = (which, like.dtype, like.device)
        held = self._held.get(key)
        if held is None or held.numel() < rows * unit:
            del held
            self._held.pop(key, None)  # before the larger one is allocated
            with torch.inference_mode(False):
                held = self._held[key] = torch.empty(rows * unit, dtype=like.dtype, device=like.device)
        return held[: rows * unit].view(rows, unit)

    def read(
        self,
        which: int,
        pages: torch.Tensor,
        rows: torch.Tensor,
        layout: SlotLayout,
        dtype: torch.dtype,
        scale_NK: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The slots at `rows` of `pages` [entries, slots, K, D], [N, K, D] in `dtype`. fp8 numbers are multiplied by their scales."""
        if scale_NK is None:
            space = self.take(which, rows.numel(), layout.unit, pages)
            held_NKD = gather_slots(pages, rows, layout, pages.dtype, space)
            return held_NKD if pages.dtype == dtype else self._like(which, held_NKD, dtype).copy_(held_NKD)
        raw = pages.view(torch.uint8)
        space = self.take(which, rows.numel(), layout.unit, raw)
        held_NKD = gather_slots(raw, rows, layout, torch.uint8, space).view(pages.dtype)
        wide_NKD = self._like(which if dtype == torch.float32 else 0, held_NKD, torch.float32).copy_(held_NKD)
        wide_NKD.mul_(scale_NK.unsqueeze(-1))
        return wide_NKD if dtype == torch.float32 else self._like(which, held_NKD, dtype).copy_(wide_NKD)

    def _like(self, which: int, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        key_like = torch.empty(0, dtype=dtype, device=x.device)
        return self.take(which, x.shape[0], x.shape[1] * x.shape[2], key_like).view(x.shape)


class TorchBackend:
    """See the module. One instance serves one engine: its calls must not overlap."""

    name = "torch_ref"
    capabilities = Capabilities(forms=HEADS | {WINDOW_VECTORS}, slot_scales=frozenset({WINDOW_VECTORS}))

    def __init__(self) -> None:
        self._scratch = Scratch()

    def new_state(self, shape: GraphShape | None) -> None:
        """None: it is never captured, and keeps nothing of a step."""

    def plan(self, inputs: PlanInputs, state: None) -> TorchPlan:
        """Divide the step into calls."""
        table_RP, first_pages = gathered_rows(inputs)
        parts = make_plan(inputs.query_lens, inputs.seq_lens, table_RP, inputs.page_tokens, inputs.reach, first_pages)
        return TorchPlan(parts, unstored=inputs.unstored or inputs.reach is not None)

    def run(self, call: AttentionCall) -> torch.Tensor:
        """See AttentionCall."""
        inputs, sinks_H, lse_TH = call.inputs, call.scores.sinks_H, call.lse_TH
        assert isinstance(inputs, Heads), "it takes heads, not projections"
        found = self._attend(inputs, call, keep_lse=sinks_H is not None or lse_TH is not None)
        if lse_TH is not None:
            lse_TH.copy_(found[1])
        return found[0] if sinks_H is None else take_sinks(found, sinks_H)

    def _attend(self, heads: Heads, call: AttentionCall, *, keep_lse: bool) -> Result:
        """Attention without sinks, [T, H, V], and with `keep_lse` the log-sum-exp [T, H]."""
        q_THD, k_TKD, v_TKV = heads
        pages, group = call.pages, call.group
        plan: TorchPlan = group.plan
        k_TKD = store(pages, 0, k_TKD, group, plan)
        v_TKV = k_TKD if pages.v is pages.k else store(pages, 1, v_TKV, group, plan)
        one = _Call(q_THD, k_TKD, v_TKV, pages, call.scores.scale, call.scores.softcap, self._scratch)
        return put_together(plan.parts, one.run, q_THD, v_TKV.shape[2], keep_lse=keep_lse)


def put_together(
    parts: Sequence[Part], run: Callable[[Part], Result], q_THD: torch.Tensor, value_dim: int, *, keep_lse: bool = False
) -> Result:
    """A step's attention of its parts, each of which `run` computes: [T, H, V], and with `keep_lse` the log-sum-exp [T, H]."""
    if len(parts) == 1:
        return run(parts[0])
    out_THV = q_THD.new_empty((*q_THD.shape[:2], value_dim))
    lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)
    for part in parts:
        _store(part, *run(part), out_THV, lse_TH, keep_lse=keep_lse)
    return out_THV, lse_TH


def take_sinks(found: Result, sinks_H: torch.Tensor) -> torch.Tensor:
    """Attention [T, H, D] with log-sum-exp [T, H], after each head's sink has taken its share of the weight."""
    out_THD, lse_TH = found
    return out_THD * torch.sigmoid(lse_TH - sinks_H).unsqueeze(-1).to(out_THD.dtype)


def take(x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """What `x` [T, ..] has of these tokens."""
    return x[tokens] if isinstance(tokens, slice) else x.index_select(0, tokens)


def _put(x: torch.Tensor, tokens: Tokens, values: torch.Tensor) -> None:
    if isinstance(tokens, slice):
        x[tokens] = values
    else:
        x.index_copy_(0, tokens, values)


def _store(
    part: Part, out: torch.Tensor, lse: torch.Tensor, out_THD: torch.Tensor, lse_TH: torch.Tensor, *, keep_lse: bool
) -> None:
    """Put a part's result in its place.

    A result that is there already (see `SharedPart`) is merged with it by weight.
    """
    keep_lse = keep_lse or part.more
    targets = part.targets if isinstance(part, PaddedPart) else part.tokens
    if isinstance(part, SharedPart):
        old_lse = take(lse_TH, targets)
        weight = torch.sigmoid(lse - old_lse).unsqueeze(-1).to(out.dtype)
        out = torch.lerp(take(out_THD, targets), out, weight)
        lse = torch.logaddexp(old_lse, lse) if keep_lse else lse
    _put(out_THD, targets, out)
    if keep_lse:
        _put(lse_TH, targets, lse)


@dataclass(frozen=True, slots=True)
class _Call:
    """One layer's inputs. `run` gives a part's own attention, [its tokens, H, D], and its log-sum-exp, [its tokens, H]."""

    q_THD: torch.Tensor
    k_TKD: torch.Tensor
    v_TKD: torch.Tensor
    pages: KVPages
    scale: float
    softcap: float
    scratch: Scratch

    def run(self, part: Part) -> Result:
        if isinstance(part, PaddedPart):
            return self._padded(part)
        if isinstance(part, SharedPart):
            q_TKGD = self._heads(take(self.q_THD, part.tokens))
            return self._grouped(q_TKGD, self._keys(part.slots), self._values(part.slots))
        if isinstance(part, BandPart):
            return self._band(part)
        return self._new(part)

    def _gather(self, slots: Slots, pages: torch.Tensor, which: int) -> torch.Tensor:
        if coded := held_in_fp8(self.pages.coded):
            return torch.cat(coded[0].read(slots.entries_N, slots.offsets_N), -1).to(self.q_THD.dtype).unsqueeze(1)
        layout = slot_layout(pages)
        rows = slots.rows(layout)
        scales = self.pages.scales
        scale_NK = None if scales is None else scales[slots.entries_N, which]
        return self.scratch.read(which, pages, rows, layout, self.q_THD.dtype, scale_NK)

    def _keys(self, slots: Slots) -> torch.Tensor:
        return self._gather(slots, self.pages.k, 0)

    def _values(self, slots: Slots) -> torch.Tensor:
        return self._keys(slots) if self.pages.v is self.pages.k else self._gather(slots, self.pages.v, 1)

    def _heads(self, q_THD: torch.Tensor) -> torch.Tensor:
        """Query heads by the key/value head that they share, [T, K, G, D]."""
        num_kv_heads = self.pages.k.shape[2]
        return q_THD.view(q_THD.shape[0], num_kv_heads, -1, q_THD.shape[2])

    def _grouped(
        self,
        q_TKGD: torch.Tensor,
        k_LKD: torch.Tensor,
        v_LKD: torch.Tensor,
        mask: torch.Tensor | None = None,
        causal: bool = False,
    ) -> Result:
        """One row. Key/value heads stand in the batch dimension, so that the query heads of a group share them without
        a copy.
        """
        tokens, num_kv_heads, group, _ = q_TKGD.shape
        k_KGLD, v_KGLD = (x.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1) for x in (k_LKD, v_LKD))
        out, lse = attend(
            q_TKGD.permute(1, 2, 0, 3), k_KGLD, v_KGLD, self.scale, mask=mask, causal=causal, softcap=self.softcap
        )
        heads = num_kv_heads * group
        return out.permute(2, 0, 1, 3).reshape(tokens, heads, -1), lse.permute(2, 0, 1).reshape(tokens, heads)

    def _band(self, part: BandPart) -> Result:
        k_LKD, v_LKD = self.k_TKD[part.keys], self.v_TKD[part.keys]
        if part.slots is not None:
            k_LKD = torch.cat((self._keys(part.slots), k_LKD))
            v_LKD = torch.cat((self._values(part.slots), v_LKD))
        q_TKGD = self._heads(self.q_THD[part.tokens])
        return self._grouped(q_TKGD, k_LKD, v_LKD, part.mask(q_TKGD.dtype))

    def _padded(self, part: PaddedPart) -> Result:
        q_THD = self.q_THD
        num_heads, head_dim = q_THD.shape[1:]
        num_kv_heads = self.pages.k.shape[2]
        group, rows, queries = num_heads // num_kv_heads, part.rows, part.queries
        k_BKLD = self._keys(part.slots).view(rows, -1, num_kv_heads, head_dim).transpose(1, 2)
        v_BKLD = self._values(part.slots).view(rows, -1, num_kv_heads, self.v_TKD.shape[2]).transpose(1, 2)
        q_BQKGD = take(q_THD, part.tokens).view(rows, queries, num_kv_heads, group, head_dim)
        q_BKgD = q_BQKGD.permute(0, 2, 3, 1, 4).reshape(rows, num_kv_heads, group * queries, head_dim)
        mask = part.mask(group, q_THD.dtype)
        out, lse = attend(q_BKgD, k_BKLD, v_BKLD, self.scale, mask=mask, softcap=self.softcap)
        out = out.view(rows, num_kv_heads, group, queries, -1).permute(0, 3, 1, 2, 4)
        lse = lse.view(rows, num_kv_heads, group, queries).permute(0, 3, 1, 2)
        out, lse = out.reshape(rows * queries, num_heads, -1), lse.reshape(-1, num_heads)
        if part.kept is None:
            return out, lse
        return out.index_select(0, part.kept), lse.index_select(0, part.kept)

    def _new(self, part: NewPart) -> Result:
        q_THD, k_TKD, v_TKD = (x[part.tokens] for x in (self.q_THD, self.k_TKD, self.v_TKD))
        if part.rows == 1:
            return self._grouped(self._heads(q_THD), k_TKD, v_TKD, causal=True)
        num_heads = q_THD.shape[1]
        group = num_heads // k_TKD.shape[1]

        def by_head(x: torch.Tensor, copies: int) -> torch.Tensor:
            x_BQK1D = x.view(part.rows, part.queries, -1, 1, x.shape[-1])
            x_BQHD = x_BQK1D.expand(-1, -1, -1, copies, -1).reshape(part.rows, part.queries, num_heads, -1)
            return x_BQHD.transpose(1, 2)

        q, k, v = by_head(q_THD, 1), by_head(k_TKD, group), by_head(v_TKD, group)
        out, lse = attend(q, k, v, self.scale, causal=True, softcap=self.softcap)
        return out.transpose(1, 2).reshape(len(q_THD), num_heads, -1), lse.transpose(1, 2).reshape(-1, num_heads)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    softcap: float = 0.0,
) -> Result:
    """Softmax attention with its log-sum-exp. q is [B, K, Q, D], k and v [B, K, L, D], the mask is added to scores.

    On CPU it is torch's own flash kernel, called directly because the public function doesn't return the log-sum-exp;
    it knows no soft cap, and no value heads that differ in size from key heads.
    """
    if q.device.type == "cpu" and not softcap and k.shape[-1] == v.shape[-1]:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        result: Result = flash(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
        return result
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    out = torch.matmul(scores.softmax(-1), v.float()).to(q.dtype)
    return out, torch.logsumexp(scores, -1)
