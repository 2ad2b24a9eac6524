"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) in plain torch, over pages that hold one vector per token.

A token's vector is its compressed latent followed by the rotary part of the key, which all heads share. Each head's key
is `up_key @ latent` with the rotary part behind it, its value `up_value @ latent`. There are two exact ways to attend:

* absorbed: queries are carried into the latent space (`q @ up_key`). There the vectors in the pages are the keys and values
  of one shared head. The result is carried back (`up_value @ out`). No key is ever expanded.
* plain: the keys and values of every head are expanded from the latents. Expanding a slot costs as much as carrying a
  query there and back, and a (query, slot) pair then costs fewer multiplications.

Short rows use the absorbed way. A long chunk attends to its own tokens in the plain way, and to its past in the way that
multiplies less. `torch_plan` divides a step into parts. The parts' results are merged by their log-sum-exps, in value
space. Only slots that were written are read.

Shape letters: T tokens of the step, B rows of one call, Q queries of a row, S key slots, H heads, D query head size
(N without rotary positions, then R rotary ones), C latent size, L vector size (C + R), V value head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pagerunner.attention.base import GraphShape, PlanInputs
from pagerunner.attention.calls import LatentCall, Result, UpProjection
from pagerunner.attention.capability import Capabilities
from pagerunner.attention.gathered import gathered_rows
from pagerunner.attention.kv_store import store_pages
from pagerunner.attention.torch_plan import NewPart, PaddedPart, Part, SharedPart, Slots, make_plan
from pagerunner.attention.torch_ref import Scratch, TorchPlan, attend, put_together, take
from pagerunner.ops.pages import slot_layout

MAX_EXPANDED_ELEMENTS = 2**25  # bounds the memory of expanded keys and values


class LatentBackend:
    """See the module. One instance serves one engine: its calls must not overlap."""

    name = "torch_mla"
    capabilities = Capabilities(forms=frozenset({"latent"}))

    def __init__(self) -> None:
        self._scratch = Scratch()

    def new_state(self, shape: GraphShape | None) -> None:
        """None: it is never captured, and keeps nothing of a step."""

    def plan(self, inputs: PlanInputs, state: None) -> TorchPlan:
        """Divide the step into calls."""
        table_RP, _ = gathered_rows(inputs)
        parts = make_plan(inputs.query_lens, inputs.seq_lens, table_RP, inputs.page_tokens)
        return TorchPlan(parts, unstored=inputs.unstored)

    def run(self, call: LatentCall) -> torch.Tensor:
        """See LatentCall."""
        q_THD, vectors_TL, up, memory, group, _, scale, *_ = call
        plan: TorchPlan = group.plan
        pages = memory.latent.unsqueeze(2)
        vectors_TL = store_pages(pages, memory.scales, 0, vectors_TL.unsqueeze(1), group, plan).squeeze(1)
        one = _Call(q_THD, vectors_TL, up, pages, memory.scales, scale, self._scratch)
        return put_together(plan.parts, one.run, q_THD, up.value_dim)[0]


def merge(first: Result, second: Result) -> Result:
    """Attention over two sets of slots as if they were one; results [T, H, V] with log-sum-exps [T, H]."""
    weight = torch.sigmoid(second[1] - first[1]).unsqueeze(-1).to(first[0].dtype)
    return torch.lerp(first[0], second[0], weight), torch.logaddexp(first[1], second[1])


@dataclass(frozen=True, slots=True)
class _Call:
    """One layer's inputs. Every method returns the part's own results [tokens, H, V] and log-sum-exps [tokens, H]."""

    q_THD: torch.Tensor
    vectors_TL: torch.Tensor
    up: UpProjection
    pages: torch.Tensor
    scales: torch.Tensor | None
    scale: float
    scratch: Scratch

    def run(self, part: Part) -> Result:
        if isinstance(part, PaddedPart):
            return self._padded(part)
        if isinstance(part, SharedPart):
            return self._shared(part)
        assert isinstance(part, NewPart), "latents have no windows"
        return self._new(part)

    def _padded(self, part: PaddedPart) -> Result:
        heads = self.up.num_heads
        k_B1SL = self._gather(part.slots, 0, None).view(part.rows, 1, -1, self.vectors_TL.shape[-1])
        q_THL = self.up.absorb(take(self.q_THD, part.tokens))
        q_BHQL = q_THL.view(part.rows, part.queries, heads, -1).transpose(1, 2)
        q_B1qL = q_BHQL.reshape(part.rows, 1, heads * part.queries, -1)
        out, lse = attend(q_B1qL, k_B1SL, k_B1SL, self.scale, mask=part.mask(heads, q_THL.dtype))
        out = out.view(part.rows, heads, part.queries, -1).transpose(1, 2).flatten(0, 1)
        lse = lse.view(part.rows, heads, part.queries).transpose(1, 2).flatten(0, 1)
        if part.kept is not None:
            out, lse = out.index_select(0, part.kept), lse.index_select(0, part.kept)
        return self.up.values(out[..., : self.up.latent_dim]), lse

    def _shared(self, part: SharedPart) -> Result:
        q_THD = take(self.q_THD, part.tokens)
        if self.up.absorbs(q_THD.shape[0]):
            k_11SL = self._gather(part.slots, 0, None)[None, None]
            q_11qL = self.up.absorb(q_THD).flatten(0, 1)[None, None]
            out, lse = attend(q_11qL, k_11SL, k_11SL, self.scale)
            out = out.view(*q_THD.shape[:2], -1)
            return self.up.values(out[..., : self.up.latent_dim]), lse.view(q_THD.shape[:2])
        slots = part.slots.entries_N.numel()
        step = max(1, MAX_EXPANDED_ELEMENTS // (self.up.num_heads * (q_THD.shape[-1] + self.up.value_dim)))
        result: Result | None = None
        for first in range(0, slots, step):
            found = self._plain(q_THD.unsqueeze(0), self._gather(part.slots, first, first + step).unsqueeze(0), False)
            result = found if result is None else merge(result, found)
        assert result is not None, "a shared part has slots"
        return result

    def _new(self, part: NewPart) -> Result:
        shape = (part.rows, part.queries)
        q_BQHD, vectors_BQL = self.q_THD[part.tokens].unflatten(0, shape), self.vectors_TL[part.tokens]
        return self._plain(q_BQHD, vectors_BQL.unflatten(0, shape), True)

    def _plain(self, q_BQHD: torch.Tensor, vectors_BSL: torch.Tensor, causal: bool) -> Result:
        k_SHD, v_SHV = self.up.expand(vectors_BSL.flatten(0, 1))
        size = max(k_SHD.shape[-1], v_SHV.shape[-1])  # the kernel wants one size for queries, keys and values
        shape = vectors_BSL.shape[:2]
        k_BHSd, v_BHSd = (F.pad(x, (0, size - x.shape[-1])).unflatten(0, shape).transpose(1, 2) for x in (k_SHD, v_SHV))
        q_BHQd = F.pad(q_BQHD, (0, size - q_BQHD.shape[-1])).transpose(1, 2)
        out, lse = attend(q_BHQd, k_BHSd, v_BHSd, self.scale, causal=causal)
        return out[..., : self.up.value_dim].transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)

    def _gather(self, slots: Slots, first: int, end: int | None) -> torch.Tensor:
        """The vectors of `slots[first:end]`, [S, L]."""
        layout = slot_layout(self.pages)
        rows = slots.rows(layout).view(-1, layout.rows_per_token)[first:end].flatten()
        scale_S1 = None if self.scales is None else self.scales[slots.entries_N[first:end], 0]
        return self.scratch.read(0, self.pages, rows, layout, self.q_THD.dtype, scale_S1).squeeze(1)
