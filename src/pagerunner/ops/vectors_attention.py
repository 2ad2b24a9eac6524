"""Attention to vectors that are key and value of every head (DeepSeek-V4): a window of tokens and, beside it, slots, in one pass.

The query at position p sees the last `size` tokens and the (p + 1) // r slots that are complete, or those of them that an indexer has chosen. All
are one softmax, in which each head's sink takes a share. Values have the rotary positions of keys, so the result is turned back.

The twins define what the kernels of the same names compute, a row at a time in float32. They synchronise with the device and are slow.

Shape letters: T tokens of the step, H heads, D elements of a vector, E page table entries, X tokens of a page, S slots of a page, W columns of a
page table, K slots that are chosen at most, N keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from pagerunner.batch import StepRows, WritePlaces
from pagerunner.ops.dispatch import gpu_kernel
from pagerunner.ops.indexer import choose_slots, is_choice
from pagerunner.ops.latent_attention import store_latent_
from pagerunner.ops.linear import Norm
from pagerunner.ops.norm import rms_norm
from pagerunner.ops.rope import RopeAngles, rope_pairs_
from pagerunner.ops.sparse_latents import Latents


class Window(NamedTuple):
    """The last `size` tokens: the step's own vectors, and the pages of earlier ones with the group's page table of all slots.

    Pages [E, X, D], or in fp8 with scales of their own where slots are.
    """

    vectors_TD: torch.Tensor
    pages: torch.Tensor | Latents
    table_SW: torch.Tensor
    size: int


class Choice(NamedTuple):
    """By what an indexer chooses slots, whose pages its keys are in; see `choose_slots`."""

    q_TJI: torch.Tensor
    weights_TJ: torch.Tensor
    top_k: int
    pages_ESI: torch.Tensor
    scales_ES: torch.Tensor | None
    scratch: dict[Any, Any]


class Slots(NamedTuple):
    """What stands for `ratio` tokens each: vectors [E, S, D], or in fp8 with scales of their own.

    `chosen` (int32) [T, K] are the numbers of those that a query sees, -1 behind them, or by what they are to be chosen; None: all. `early`: `choose_slots` has just
    launched what chooses them, so all else is there when a kernel may start.
    """

    pages: torch.Tensor | Latents
    table_SW: torch.Tensor
    ratio: int
    chosen: torch.Tensor | Choice | None
    early: bool = False

    def choose(self, rows: StepRows) -> Slots:
        """These with what is chosen."""
        if not isinstance(self.chosen, Choice):
            return self
        *by, scales_ES, scratch = self.chosen
        chosen_TK = choose_slots(*by, self.table_SW, rows, self.ratio, scratch, scales_ES)
        return self._replace(chosen=chosen_TK, early=is_choice(rows, self.ratio, self.chosen.top_k))


@gpu_kernel("latent.vectors_attention")
def prepare_vectors_(
    q_THD: torch.Tensor,
    vectors_TD: torch.Tensor,
    norm: Norm,
    angles: RopeAngles,
    pages: torch.Tensor | Latents,
    write: WritePlaces,
) -> None:
    """Norm and rotate queries (each head by itself, without a weight) and vectors in place, and store the vectors that have a page.

    Vectors are rounded as pages hold them.
    """
    rotary = angles.cos_T1D.shape[-1]
    q_THD.copy_(rms_norm(q_THD, torch.ones_like(q_THD[0, 0]), norm.eps))
    vectors_TD.copy_(norm(vectors_TD))
    rope_pairs_(q_THD[..., -rotary:], angles)
    rope_pairs_(vectors_TD[:, None, -rotary:], angles)
    if isinstance(pages, Latents):
        vectors_TD.copy_(pages.write(vectors_TD, *write))
    else:
        vectors_TD.copy_(vectors_TD.to(pages.dtype))
        store_latent_.twin(vectors_TD, pages, write)


@gpu_kernel("latent.vectors_attention")
def vectors_attention(
    q_THD: torch.Tensor,
    window: Window,
    slots: Slots | None,
    rows: StepRows,
    scale: float,
    sinks_H: torch.Tensor,
    angles: RopeAngles,
) -> torch.Tensor:
    """[T, H, D], zeros for padding. The step's slots are in pages; of its tokens those that have a page."""
    out_THD = torch.zeros_like(q_THD)
    slots = slots and slots.choose(rows)
    row_T = rows.row_T.long()
    for row in row_T[row_T >= 0].unique().tolist():
        tokens = (row_T == row).nonzero().squeeze(-1)
        first, at_T1 = int(tokens[0]), rows.positions_T[tokens].unsqueeze(-1)
        start, end, slot = int(at_T1[0]), int(at_T1[-1]) + 1, rows.slots_R[row].long()
        at_N = torch.arange(max(0, start - window.size + 1), end, device=q_THD.device)
        held, new = at_N[at_N < start], at_N[at_N >= start] - start + first
        keys = [_read(window.pages, window.table_SW[slot], held), window.vectors_TD[new]]
        seen = [(at_N <= at_T1) & (at_N > at_T1 - window.size)]
        if slots is not None:
            number_N = torch.arange(end // slots.ratio, device=q_THD.device)
            keys.append(_read(slots.pages, slots.table_SW[slot], number_N))
            complete_TN = number_N < (at_T1 + 1) // slots.ratio
            if isinstance(slots.chosen, torch.Tensor):
                complete_TN = complete_TN & (slots.chosen[tokens].unsqueeze(-1) == number_N).any(1)
            seen.append(complete_TN)
        keys_ND = torch.cat([part.float() for part in keys])
        scores_HTN = torch.einsum("thd,nd->htn", q_THD[tokens].float(), keys_ND) * scale
        scores_HTN = scores_HTN.masked_fill(~torch.cat(seen, -1), float("-inf"))
        sinks_HT1 = sinks_H.float()[:, None, None].expand(-1, len(tokens), 1)
        weights_HTN = torch.cat((scores_HTN, sinks_HT1), -1).softmax(-1)[..., :-1]
        out_THD[tokens] = torch.einsum("htn,nd->thd", weights_HTN, keys_ND).to(out_THD.dtype)
    rope_pairs_(out_THD[..., -angles.cos_T1D.shape[-1] :], RopeAngles(angles.cos_T1D, -angles.sin_T1D))
    return out_THD


def _read(pages: torch.Tensor | Latents, table_W: torch.Tensor, number_N: torch.Tensor) -> torch.Tensor:
    """Vectors by their number in the sequence. The table's columns are used again and again."""
    size = (pages.latent_ESC if isinstance(pages, Latents) else pages).shape[1]
    where = table_W[number_N // size % len(table_W)], number_N % size
    return torch.cat(pages.read(*where), -1) if isinstance(pages, Latents) else pages[where]
