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
vector size, I indexer key size, J indexer heads, W tokens that a slot is pooled from, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F

from pagerunner.attention.base import GraphShape, PlanInputs
from pagerunner.attention.calls import CompressedCall, IndexerQueries, LatentCall, Result, Tensors
from pagerunner.attention.capability import Capabilities
from pagerunner.attention.gathered import gathered_rows
from pagerunner.attention.kv_store import store_pages
from pagerunner.attention.mla import merge
from pagerunner.attention.torch_ref import Scratch, attend, take_sinks
from pagerunner.batch import GroupBatch, StatePages
from pagerunner.ops.paged_attention import Scores
from pagerunner.ops.pages import slot_layout, slot_rows, write_slots
from pagerunner.ops.state_rows import Span, StateRows, spans

BLOCK_QUERIES = 256  # bounds the scores that exist at once


@dataclass(frozen=True, slots=True)
class SlotPooling:
    """Slots' vectors before their norm, as a recurrence over the tokens' projections; see `attention.calls.Recurrence`.

    Each of `biases`, [r, C / 2], is one pooling: of the vectors and, where there is an indexer, of its keys. Inputs: the
    poolings' projections [T, C] float32, a value half and a gate half, and the positions [T]. States: for each pooling the
    inputs of the last W tokens. Outputs: at the last token of each slot the pooled values, poolings side by side;
    anything elsewhere. A value is the average over a slot's tokens, channel by channel, by the softmax of gate + bias.

    With `overlap` a slot is pooled from 2 r tokens: the first half of the values' channels is for the slot after the
    token's own, the second half for its own.
    """

    biases: tuple[torch.Tensor, ...]
    overlap: bool

    @property
    def ratio(self) -> int:
        """r."""
        return int(self.biases[0].shape[0])

    def step(self, inputs: Tensors, states: Tensors) -> tuple[torch.Tensor, Tensors]:
        """See Recurrence."""
        *projected, positions_B = inputs
        kept = tuple(torch.cat((s[:, 1:], x.unsqueeze(1)), 1) for x, s in zip(projected, states, strict=True))
        pooled = [self._pool(x, bias, positions_B) for x, bias in zip(kept, self.biases, strict=True)]
        return torch.cat(pooled, -1), kept

    def chunks(self, inputs: Tensors, states: Tensors) -> tuple[torch.Tensor, Tensors]:
        """See Recurrence."""
        *projected, positions_L = inputs
        last_N = ((positions_L + 1) % self.ratio == 0).nonzero().squeeze(-1)
        outputs, kept = [], []
        for x_LC, state_WC, bias in zip(projected, states, self.biases, strict=True):
            width = state_WC.shape[0]
            both_C = torch.cat((state_WC, x_LC))
            window_NW = last_N.unsqueeze(-1) + torch.arange(1, width + 1, device=last_N.device)
            pooled_ND = self._pool(both_C[window_NW], bias, positions_L[last_N])
            outputs.append(pooled_ND.new_zeros(x_LC.shape[0], pooled_ND.shape[-1]).index_copy_(0, last_N, pooled_ND))
            kept.append(both_C[-width:])
        return torch.cat(outputs, -1), tuple(kept)

    def rows(self, inputs: Tensors, memory: StatePages, rows: StateRows) -> torch.Tensor:
        """See Recurrence. Reads the device: which tokens complete slots, which states are saved, and what was accepted."""
        *projected, positions_T = inputs
        done_N = (((positions_T + 1) % self.ratio == 0) & (rows.step.row_T >= 0)).nonzero().squeeze(-1)
        found = list(spans(rows))
        keeps = [(row.row, row.certain, row.entry) for row in found]
        saves = [(row.row, upto, target) for row in found for upto, target in row.saves]
        history = _History.of(found, rows)
        outputs = []
        for at, (x_TC, state_EWC, bias) in enumerate(zip(projected, memory.states, self.biases, strict=True)):
            journal = memory.journal[at] if memory.journal else None
            windows = partial(history.windows, x_TC, state_EWC, journal)
            pooled_ND = self._pool(windows(done_N + 1, rows.step.row_T[done_N]), bias, positions_T[done_N])
            outputs.append(pooled_ND.new_zeros(x_TC.shape[0], pooled_ND.shape[-1]).index_copy_(0, done_N, pooled_ND))
            unit = state_EWC.stride(0) * state_EWC.element_size()
            targets = [*((row, upto, target // unit) for row, upto, target in saves), *keeps]
            rows_N, ends_N, entries_N = torch.tensor(targets, device=x_TC.device).T
            state_EWC[entries_N] = windows(ends_N, rows_N)  # all reads come before
            if journal is not None:
                for row in found:
                    journal[row.entry, : row.end - row.certain] = x_TC[row.certain : row.end]
        return torch.cat(outputs, -1)

    def _pool(self, x_NWC: torch.Tensor, bias: torch.Tensor, last_N: torch.Tensor) -> torch.Tensor:
        values, gates = x_NWC.chunk(2, -1)
        if not self.overlap:
            return (values * (gates + bias).softmax(1)).sum(1)
        ratio, half = self.ratio, bias.shape[-1] // 2
        first = (last_N < ratio)[:, None, None]  # the sequence's first slot has no slot before it
        before = (gates[:, :ratio, :half] + bias[:, :half]).masked_fill(first, float("-inf"))
        weights = torch.cat((before, gates[:, ratio:, half:] + bias[:, half:]), 1).softmax(1)
        return (torch.cat((values[:, :ratio, :half], values[:, ratio:, half:]), 1) * weights).sum(1)


@dataclass(frozen=True, slots=True)
class _History:
    """Where the last inputs before a token are: by row its first token, its accepted drafts, its page's table entry."""

    first_R: torch.Tensor
    replayed_R: torch.Tensor
    entry_R: torch.Tensor

    @classmethod
    def of(cls, found: Sequence[Span], rows: StateRows) -> _History:
        parts = torch.zeros(3, rows.step.num_rows, dtype=torch.int64)
        for row in found:
            parts[:, row.row] = torch.tensor((row.first, row.replayed, row.entry))
        return cls(*parts.to(rows.page_table.device))

    def windows(
        self,
        x_TC: torch.Tensor,
        state_EWC: torch.Tensor,
        journal_EKC: torch.Tensor | None,
        ends_N: torch.Tensor,
        rows_N: torch.Tensor,
    ) -> torch.Tensor:
        """The last W inputs before each of the tokens `ends`, of the rows `rows`: [N, W, C]."""
        width, rows_N = state_EWC.shape[1], rows_N.long()
        first_N1, replayed_N1, entry_N1 = (
            part[rows_N].unsqueeze(-1) for part in (self.first_R, self.replayed_R, self.entry_R)
        )
        tokens_NW = ends_N.unsqueeze(-1) + torch.arange(-width, 0, device=ends_N.device)
        past_NW = tokens_NW - first_N1 + replayed_N1  # counted from the state in the page
        found_NWC = state_EWC[entry_N1, (past_NW + width).clamp(0, width - 1)]
        if journal_EKC is not None:
            drafts_NWC = journal_EKC[entry_N1, past_NW.clamp(0, journal_EKC.shape[1] - 1)]
            found_NWC = torch.where((past_NW >= 0).unsqueeze(-1), drafts_NWC, found_NWC)
        return torch.where((tokens_NW >= first_N1).unsqueeze(-1), x_TC[tokens_NW.clamp(min=0)], found_NWC)


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
        write_slots(pages, slot_rows(group.write_entry, group.write_offset, layout), values_TKD, layout)


class CompressedBackend:
    """See the module. One instance serves one group: its calls must not overlap."""

    name = "torch_compressed"
    capabilities = Capabilities(forms=frozenset({"compressed", "chosen"}))

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
        if bool((lost_N := group.write_entry[done_N] < 0).any()):  # drafts may be further than the pages
            done_N, vectors_ND = done_N[~lost_N], vectors_ND[~lost_N]
            index_keys_NI = None if index_keys_NI is None else index_keys_NI[~lost_N]
        slots = replace(group, write_entry=group.write_entry[done_N], write_offset=group.write_offset[done_N] // ratio)
        if done_N.numel():
            store_pages(pages.latent.unsqueeze(2), pages.scales, 0, vectors_ND.unsqueeze(1), slots, _SlotWriter())
            if index_keys_NI is not None and pages.indexer is not None:
                keys = pages.indexer.unsqueeze(2)
                store_pages(keys, pages.scales, 1, index_keys_NI.unsqueeze(1), slots, _SlotWriter())
        if window is None:
            out_THD = torch.zeros_like(q_THD)
            lse_TH = q_THD.new_full(q_THD.shape[:2], float("-inf"), dtype=torch.float32)
        else:
            out_THD, lse_TH = window[0].clone(), window[1].clone()
        for row, (first, start, length) in enumerate(plan.rows):
            seen = max(start, ratio - 1)  # the first query that has a complete slot before it
            if seen >= length:
                continue
            places = plan.places(row, pages.latent.shape[1], ratio)
            vectors_SD = self._read(0, pages.latent, pages.scales, places, q_THD.dtype)
            keys_SI = None
            if chooser is not None and pages.indexer is not None and length // ratio > chooser.top_k:
                keys_SI = self._read(1, pages.indexer, pages.scales, places, q_THD.dtype)
            for at in range(seen, length, BLOCK_QUERIES):
                end = min(at + BLOCK_QUERIES, length)
                tokens = slice(first + at - start, first + end - start)
                allowed_QS = _allowed(at, end, ratio, chooser, keys_SI, tokens)
                found = _attend(q_THD[tokens], vectors_SD[: end // ratio], allowed_QS, scores.scale)
                out_THD[tokens], lse_TH[tokens] = merge((out_THD[tokens], lse_TH[tokens]), found)
        return out_THD, lse_TH

    def _read(
        self,
        which: int,
        pages_ESD: torch.Tensor,
        scales: torch.Tensor | None,
        places: tuple[torch.Tensor, torch.Tensor],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        pages = pages_ESD.unsqueeze(2)
        layout = slot_layout(pages)
        rows = slot_rows(*places, layout)
        scale_S1 = None if scales is None else scales[places[0], which]
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
