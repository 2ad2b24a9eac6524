"""Attention over compressed latents (DeepSeek-V4), and over latents that an indexer chooses (V3.2), in plain torch.

This is the reference with which faster backends are compared. A page of P tokens stores P / r vectors. Each vector stands for r
tokens and serves as key and value of every head. Without compression r is 1. Example: with r = 4 a page of 64 tokens has 16
slots.

A slot's vector is pooled from its tokens (`SlotPooling`) and written when the last of these is computed. The query at
position p sees the (p + 1) // r slots that are complete at p, or the best of these by an indexer. Another backend attends
to the query's window, and the two results are merged here by their log-sum-exps.

Everything is read from pages, also what this step has written. So results don't depend on how a prompt was divided. A slot that
isn't complete is never read.

Shape letters: T tokens of the step, Q queries of a block, N slots completed by the step, S slots of a row, H heads, D
vector size, I indexer key size, J indexer heads, C channels of a token's input.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from pagerunner.attention.base import GraphShape, PlanInputs
from pagerunner.attention.calls import CompressedCall, IndexerQueries, LatentCall, Result, Tensors
from pagerunner.attention.capability import Capabilities
from pagerunner.attention.gathered import gathered_rows
from pagerunner.attention.kv_store import store_pages
from pagerunner.attention.mla import merge
from pagerunner.attention.torch_ref import Scratch, attend, take_sinks
from pagerunner.batch import GroupBatch, LatentPages, StatePages, WritePlaces
from pagerunner.ops.indexer import rounded_queries
from pagerunner.ops.paged_attention import Scores
from pagerunner.ops.pages import slot_layout, slot_rows, write_slots
from pagerunner.ops.slot_pooling import Pooling, pool_slots
from pagerunner.ops.sparse_latents import held_in_fp8
from pagerunner.ops.state_rows import StateRows

BLOCK_QUERIES = 256  # bounds the scores that exist at once


@dataclass(frozen=True, slots=True)
class SlotPooling:
    """Slots' vectors before their norm, as a recurrence over the tokens' projections; see `ops.slot_pooling`.

    Each of `biases`, [r, C / 2], is one pooling: of the vectors and, where there is an indexer, of its keys. Inputs: the
    poolings' projections [T, C], a value half and a gate half. States: for each pooling the inputs of the last W tokens.
    """

    biases: tuple[torch.Tensor, ...]
    overlap: bool

    def rows(self, inputs: Tensors, memory: StatePages, rows: StateRows) -> torch.Tensor:
        """See Recurrence."""
        poolings = tuple(map(Pooling, inputs, self.biases))
        return pool_slots(rows.step.positions_T, poolings, memory, rows, self.overlap)


@dataclass(slots=True)
class CompressedPlan:
    """Rows as (first token, start, length). What depends on the ratio is made by the first layer that asks."""

    rows: list[tuple[int, int, int]]
    page_table_RP: torch.Tensor
    positions_T: torch.Tensor
    _done: list[torch.Tensor] = field(default_factory=list)
    _places: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def completed(self, ratio: int) -> torch.Tensor:
        """See CompletedSlots; a group has one ratio."""
        if not self._done:
            self._done.append(((self.positions_T + 1) % ratio == 0).nonzero().squeeze(-1))
        return self._done[0]

    def places(self, row: int, slots_per_page: int, ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Entries and offsets of a row's complete slots, [S] each."""
        found = self._places.get(row)
        if found is None:
            slots_S = torch.arange(self.rows[row][2] // ratio, device=self.page_table_RP.device)
            entries_S = self.page_table_RP[row].index_select(0, slots_S // slots_per_page)
            found = self._places[row] = (entries_S, slots_S % slots_per_page)
        return found


class _SlotWriter:
    """Every value given has a page."""

    def write(self, group: GroupBatch, pages: torch.Tensor, values_TKD: torch.Tensor) -> None:
        layout = slot_layout(pages)
        write_slots(pages, slot_rows(*group.write, layout), values_TKD, layout)


class CompressedBackend:
    """See the module. One instance serves one group: its calls must not overlap."""

    name = "torch_compressed"
    capabilities = Capabilities(forms=frozenset({"compressed", "chosen"}), slot_scales=frozenset({"compressed"}))

    def __init__(self) -> None:
        self._scratch = Scratch()

    def new_state(self, shape: GraphShape | None) -> None:
        """None: it is never captured, and keeps nothing of a step."""

    def plan(self, inputs: PlanInputs, state: None) -> CompressedPlan:
        """Note the rows."""
        rows, first = [], 0
        for queries, length in zip(inputs.query_lens, inputs.seq_lens, strict=True):
            rows.append((first, length - queries, length))
            first += queries
        return CompressedPlan(rows, gathered_rows(inputs)[0], inputs.rows.positions_T)

    def run(self, call: CompressedCall | LatentCall) -> torch.Tensor:
        """See CompressedCall; and LatentCall, with a chooser."""
        if isinstance(call, LatentCall):
            q_THL, scores, vectors = (
                call.up.absorb(call.q_THD),
                Scores(call.scale),
                (call.vectors_TL, call.index_keys_TI),
            )
            latent = CompressedCall(q_THL, None, *vectors, call.chooser, call.pages, call.group, call.rows, scores)
            return call.up.values(self._merged(latent)[0][..., : call.up.latent_dim])
        found = self._merged(call)
        return found[0] if call.scores.sinks_H is None else take_sinks(found, call.scores.sinks_H)

    def _merged(self, call: CompressedCall) -> Result:
        q_THD, window, vectors_ND, index_keys_NI, chooser, pages, group, _, scores = call
        plan: CompressedPlan = group.plan
        ratio = group.page_tokens // pages.latent.shape[1]
        done_N = plan.completed(ratio)
        if bool((lost_N := group.write.entry_T[done_N] < 0).any()):  # drafts may be further than the pages
            done_N, vectors_ND = done_N[~lost_N], vectors_ND[~lost_N]
            index_keys_NI = None if index_keys_NI is None else index_keys_NI[~lost_N]
        slots = replace(group, write=WritePlaces(group.write.entry_T[done_N], group.write.offset_T[done_N] // ratio))
        coded = held_in_fp8(pages)
        if done_N.numel() and coded:
            for held, vectors_NX in zip(coded, (vectors_ND, index_keys_NI), strict=False):
                assert vectors_NX is not None
                held.write(vectors_NX, *slots.write)
        elif done_N.numel():
            store_pages(pages.latent.unsqueeze(2), pages.scales, 0, vectors_ND.unsqueeze(1), slots, _SlotWriter())
            if index_keys_NI is not None and pages.indexer is not None:
                keys = pages.indexer.unsqueeze(2)
                store_pages(keys, pages.scales, 1, index_keys_NI.unsqueeze(1), slots, _SlotWriter())
        if window is None:
            out_THD = torch.zeros_like(q_THD)
            lse_TH = q_THD.new_full(q_THD.shape[:2], float("-inf"), dtype=torch.float32)
        else:
            out_THD, lse_TH = window[0].clone(), window[1].clone()
        if chooser is not None and pages.indexer is not None and pages.indexer_scales is not None:  # as keys are
            queries = rounded_queries(chooser.q_TJI, chooser.weights_TJ, pages.indexer.dtype)
            chooser = IndexerQueries(*queries, chooser.top_k)
        for row, (first, start, length) in enumerate(plan.rows):
            seen = max(start, ratio - 1)  # the first query that has a complete slot before it
            if seen >= length:
                continue
            places = plan.places(row, pages.latent.shape[1], ratio)
            vectors_SD = self._read(0, pages, places, q_THD.dtype)
            keys_SI = None
            if chooser is not None and pages.indexer is not None and length // ratio > chooser.top_k:
                keys_SI = self._read(1, pages, places, q_THD.dtype)
            for at in range(seen, length, BLOCK_QUERIES):
                end = min(at + BLOCK_QUERIES, length)
                tokens = slice(first + at - start, first + end - start)
                allowed_QS = _allowed(at, end, ratio, chooser, keys_SI, tokens)
                found = _attend(q_THD[tokens], vectors_SD[: end // ratio], allowed_QS, scores.scale)
                out_THD[tokens], lse_TH[tokens] = merge((out_THD[tokens], lse_TH[tokens]), found)
        return out_THD, lse_TH

    def _read(
        self, which: int, memory: LatentPages, places: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype
    ) -> torch.Tensor:
        """Slots' vectors (0) or indexer keys (1)."""
        if coded := held_in_fp8(memory):
            return torch.cat(coded[which].read(*places), -1).to(dtype)
        held = (memory.latent, memory.indexer)[which]
        assert held is not None
        pages = held.unsqueeze(2)
        layout = slot_layout(pages)
        rows = slot_rows(*places, layout)
        scale_S1 = None if memory.scales is None else memory.scales[places[0], which]
        return self._scratch.read(which, pages, rows, layout, dtype, scale_S1).squeeze(1)


def _allowed(
    at: int, end: int, ratio: int, chooser: IndexerQueries | None, keys_SI: torch.Tensor | None, tokens: slice
) -> torch.Tensor:
    """Which slots of its row each query in [at, end) sees, [Q, S].

    Of slots with equal scores the earlier ones are taken.
    """
    device = chooser.q_TJI.device if chooser is not None else None
    positions_Q1 = torch.arange(at, end, device=device).unsqueeze(-1)
    allowed_QS = torch.arange(end // ratio, device=device) < (positions_Q1 + 1) // ratio
    if chooser is None or keys_SI is None or allowed_QS.shape[1] <= chooser.top_k:
        return allowed_QS
    scores_JQS = F.relu(torch.matmul(chooser.q_TJI[tokens].transpose(0, 1).float(), keys_SI[: end // ratio].float().T))
    scores_QS = (scores_JQS * chooser.weights_TJ[tokens].float().T.unsqueeze(-1)).sum(0)
    order_QS = scores_QS.masked_fill(~allowed_QS, float("-inf")).sort(dim=-1, descending=True, stable=True).indices
    best_QS = torch.zeros_like(allowed_QS).scatter_(-1, order_QS[:, : chooser.top_k], True)
    return allowed_QS & best_QS


def _attend(q_QHD: torch.Tensor, vectors_SD: torch.Tensor, allowed_QS: torch.Tensor, scale: float) -> Result:
    mask = torch.zeros(allowed_QS.shape, dtype=q_QHD.dtype, device=q_QHD.device)
    mask.masked_fill_(~allowed_QS.to(mask.device), float("-inf"))
    k_1HSD = vectors_SD.expand(q_QHD.shape[1], -1, -1).unsqueeze(0)
    out, lse = attend(q_QHD.transpose(0, 1).unsqueeze(0), k_1HSD, k_1HSD, scale, mask=mask[None, None])
    return out.squeeze(0).transpose(0, 1), lse.squeeze(0).transpose(0, 1)
