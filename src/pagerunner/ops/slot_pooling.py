"""Slots that stand for several tokens (DeepSeek-V4): pooled from their tokens' projections, normed, rotated and stored.

A slot of r tokens is complete with the token at position p if r divides p + 1. Its vector is the average of its tokens' values, channel
by channel, by the softmax of their gates, to which a bias by place is added. With `overlap` it is pooled from 2 r tokens: the first half of
the channels is for the slot after the token's own, the second half for its own.

The state keeps the inputs of the last W tokens in a ring: that of position p is at p % W. A token writes its own place and moves nothing.
Example: with r = 128 and 1,024 channels a step of one token writes 4 KiB of a state of 512 KiB.

Shape letters: T tokens of the step, N tokens that are asked for, E page table entries, W tokens that a slot is pooled from, K drafts of a
journal, C channels of a token's input, D elements of a slot's vector, X of all poolings' vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from pagerunner.batch import StatePages, WritePlaces
from pagerunner.ops.dispatch import gpu_kernel
from pagerunner.ops.indexer_heads import hadamard
from pagerunner.ops.latent_attention import store_latent_
from pagerunner.ops.linear import Norm
from pagerunner.ops.rope import RopeAngles, rope_pairs_
from pagerunner.ops.sparse_latents import Latents
from pagerunner.ops.state_rows import Span, StateRows, spans


class Pooling(NamedTuple):
    """One pooling of a step's tokens: their values and gates side by side [T, C], and the bias of gates by place [r, C / 2]."""

    x_TC: torch.Tensor
    bias: torch.Tensor


@gpu_kernel("latent.slot_pooling")
def pool_slots(
    positions_T: torch.Tensor, poolings: Sequence[Pooling], memory: StatePages, rows: StateRows, overlap: bool
) -> torch.Tensor:
    """Vectors of the slots that each token completes, poolings side by side [T, X] float32; anything where it completes none.

    States and journals are those of each pooling. States are brought up to the step's last certain token, and saved on the way.
    """
    step, ratio = rows.step, poolings[0].bias.shape[0]
    done_N = (((positions_T + 1) % ratio == 0) & (step.row_T >= 0)).nonzero().squeeze(-1)
    found = list(spans(rows))
    outputs = []
    for at, (x_TC, bias) in enumerate(poolings):
        ring = _Ring.of(found, rows, x_TC, memory.states[at], memory.journal[at] if memory.journal else None)
        width = memory.states[at].shape[1]
        last_N1 = positions_T[done_N].unsqueeze(-1)
        window_NWC = ring.inputs(last_N1 + torch.arange(1 - width, 1, device=last_N1.device), step.row_T[done_N])
        pooled_ND = _pooled(window_NWC, bias, last_N1.squeeze(-1), overlap)
        outputs.append(pooled_ND.new_zeros(x_TC.shape[0], pooled_ND.shape[-1]).index_copy_(0, done_N, pooled_ND))
        ring.write(found)
    return torch.cat(outputs, -1)


def _pooled(x_NWC: torch.Tensor, bias: torch.Tensor, last_N: torch.Tensor, overlap: bool) -> torch.Tensor:
    values, gates = x_NWC.chunk(2, -1)
    if not overlap:
        return (values * (gates + bias).softmax(1)).sum(1)
    ratio, half = bias.shape[0], bias.shape[1] // 2
    first = (last_N < ratio)[:, None, None]  # the sequence's first slot has no slot before it
    before = (gates[:, :ratio, :half] + bias[:, :half]).masked_fill(first, float("-inf"))
    weights = torch.cat((before, gates[:, ratio:, half:] + bias[:, half:]), 1).softmax(1)
    return (torch.cat((values[:, :ratio, :half], values[:, ratio:, half:]), 1) * weights).sum(1)


class _Ring(NamedTuple):
    """A pooling's inputs by position: the step's, before them accepted drafts in the journal, before these the state.

    By row: its first token, the position of that, the first position behind the state, and its page's table entry.
    """

    x_TC: torch.Tensor
    state_EWC: torch.Tensor
    journal_EKC: torch.Tensor | None
    rows_4R: torch.Tensor

    @classmethod
    def of(
        cls,
        found: Sequence[Span],
        rows: StateRows,
        x_TC: torch.Tensor,
        state: torch.Tensor,
        journal: torch.Tensor | None,
    ) -> _Ring:
        parts = torch.zeros(4, rows.step.num_rows, dtype=torch.int64, device=x_TC.device)
        for row in found:
            start = int(rows.step.positions_T[row.first])
            own = torch.tensor((row.first, start, start - row.replayed, row.entry))
            parts[:, row.row] = own.to(x_TC.device)
        return cls(x_TC.float(), state, journal, parts)

    def inputs(self, position_NW: torch.Tensor, rows_N: torch.Tensor) -> torch.Tensor:
        """[N, W, C]."""
        first, start, base, entry = self.rows_4R[:, rows_N.long()].unsqueeze(-1)
        found_NWC = self.state_EWC[entry, position_NW % self.state_EWC.shape[1]]
        if self.journal_EKC is not None:
            at_NW = (position_NW - base).clamp(0, self.journal_EKC.shape[1] - 1)
            found_NWC = torch.where((position_NW >= base).unsqueeze(-1), self.journal_EKC[entry, at_NW], found_NWC)
        token_NW = (first + position_NW - start).clamp(0, self.x_TC.shape[0] - 1)
        return torch.where((position_NW >= start).unsqueeze(-1), self.x_TC[token_NW], found_NWC)

    def write(self, found: Sequence[Span]) -> None:
        """The states before the tokens that are asked for, and before that which isn't certain; then the drafts."""
        unit, width = self.state_EWC.stride(0) * self.state_EWC.element_size(), self.state_EWC.shape[1]
        targets = [(row.row, upto, target // unit) for row in found for upto, target in row.saves]
        targets += [(row.row, row.certain, row.entry) for row in found]
        rows_N, upto_N, entries_N = torch.tensor(targets, dtype=torch.int64, device=self.x_TC.device).view(-1, 3).T
        first, start, *_ = self.rows_4R[:, rows_N]
        last_N1 = (start + upto_N - first - 1).unsqueeze(-1)
        place_W = torch.arange(width, device=last_N1.device)
        self.state_EWC[entries_N] = self.inputs(last_N1 - (last_N1 - place_W) % width, rows_N)  # all reads come before
        for row in found:
            if self.journal_EKC is not None:
                self.journal_EKC[row.entry, : row.end - row.certain] = self.x_TC[row.certain : row.end]


@gpu_kernel("latent.slot_pooling")
def store_slots_(
    pooled_TX: torch.Tensor,
    norms: Sequence[Norm],
    pages: Sequence[torch.Tensor | Latents],
    angles: RopeAngles,
    positions_T: torch.Tensor,
    write: WritePlaces,
    ratio: int,
    mixed: bool = False,
) -> None:
    """Norm and rotate what was pooled, and store it in `pages` [E, slots of a page, D] of each pooling: slots that have a page.

    Pages of numbers in fp8 with scales of their own are `Latents`, those of indexer keys without a rotary part.

    `angles` are those of the first token of the slot that each token would complete. `write.offset` counts tokens. `mixed`: those of the
    second pooling, which are indexer keys, are multiplied by a Hadamard matrix (`ops.indexer_heads`).
    """
    slots = WritePlaces(torch.where((positions_T + 1) % ratio == 0, write.entry_T, -1), write.offset_T // ratio)
    sizes = [norm.weight_I.shape[0] for norm in norms]
    for number, (pooled_TD, norm, page) in enumerate(zip(pooled_TX.split(sizes, -1), norms, pages, strict=True)):
        vectors_TD = finish_slots(pooled_TD, norm, angles)
        if mixed and number:
            vectors_TD = hadamard(vectors_TD)
        if isinstance(page, Latents):
            page.write(vectors_TD, *slots)
        else:
            store_latent_.twin(vectors_TD, page, slots)


def finish_slots(pooled_ND: torch.Tensor, norm: Norm, angles: RopeAngles) -> torch.Tensor:
    """Slots' vectors of what was pooled, in the norm's dtype."""
    vectors_ND = norm(pooled_ND.to(norm.weight_I.dtype))
    rope_pairs_(vectors_ND[:, None, -angles.cos_T1D.shape[-1] :], angles)
    return vectors_ND
