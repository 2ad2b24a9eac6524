"""Attention over latents that an indexer has chosen (DeepSeek-V3.2), from pages, for any number of tokens a row.

Pages hold a slot's latent and its rotary part in one of two forms, see `Latents`.

Shape letters: T tokens, H heads, C latent size, P rotary elements, V value head size, E page table entries, S slots of a page, G blocks
of a latent that have one scale, K chosen slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from pagerunner.batch import LatentPages, StepRows, WritePlaces
from pagerunner.ops.dispatch import gpu_kernel
from pagerunner.ops.fp8 import exponents, fitting_scale, from_exponents, to_fp8
from pagerunner.ops.latent_attention import store_latent_
from pagerunner.ops.latent_heads import LatentPrep

BLOCK_TOKENS = 64  # of the twin, which bounds what it gathers


class Latents(NamedTuple):
    """Views of one layer's pages: latents [E, S, C], rotary parts [E, S, P], and the scales [E, S, G] of latents in fp8: in float32, or
    bytes that are exponents (`ops.fp8.exponents`).
    """

    latent_ESC: torch.Tensor
    rope_ESP: torch.Tensor
    scales_ESG: torch.Tensor | None = None

    def read(self, entries_N: torch.Tensor, offsets_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents and rotary parts of slots in float32."""
        rope_NP = self.rope_ESP[entries_N, offsets_N].float()
        if self.scales_ESG is None:
            return self.latent_ESC[entries_N, offsets_N].float(), rope_NP
        codes_NC = self.latent_ESC.view(torch.uint8)[entries_N, offsets_N].view(self.latent_ESC.dtype)
        scales_NG = self.scales_ESG[entries_N, offsets_N]
        scales_NG1 = (from_exponents(scales_NG) if scales_NG.dtype == torch.uint8 else scales_NG).unsqueeze(-1)
        return (codes_NC.float().unflatten(-1, (scales_NG1.shape[-2], -1)) * scales_NG1).flatten(-2), rope_NP

    def write(self, vectors_NL: torch.Tensor, entries_N: torch.Tensor, offsets_N: torch.Tensor) -> torch.Tensor:
        """Vectors to slots in fp8, those with an entry of at least 0. A scale is the smallest power of two that serves its block.

        Returns all vectors as slots hold them, in their own dtype.
        """
        assert self.scales_ESG is not None
        dtype, size = self.latent_ESC.dtype, self.latent_ESC.shape[-1]
        blocks_NGX = vectors_NL[:, :size].unflatten(-1, (self.scales_ESG.shape[-1], -1))
        scale_NG = fitting_scale(blocks_NGX.abs().amax(-1), dtype)
        codes_NGX, rope_NP = (
            to_fp8(blocks_NGX, scale_NG.unsqueeze(-1), dtype),
            vectors_NL[:, size:].to(self.rope_ESP.dtype),
        )
        there = (entries_N >= 0).nonzero().squeeze(-1)
        where = entries_N[there], offsets_N[there]
        self.latent_ESC.view(torch.uint8)[where] = codes_NGX.flatten(1).view(torch.uint8)[there]
        self.scales_ESG[where] = (exponents(scale_NG) if self.scales_ESG.dtype == torch.uint8 else scale_NG)[there]
        self.rope_ESP[where] = rope_NP[there]
        numbers_NC = (codes_NGX.float() * scale_NG.unsqueeze(-1)).flatten(1)
        return torch.cat((numbers_NC, rope_NP.float()), -1).to(vectors_NL.dtype)


def held_in_fp8(pages: LatentPages | None) -> tuple[Latents, ...]:
    """A layer's slots with scales of their own, and its indexer keys, if it has these; empty if there are no such scales."""
    if pages is None or pages.rope is None:
        return ()
    found = (Latents(pages.latent, pages.rope, pages.slot_scales),)
    if pages.indexer is None or pages.indexer_scales is None:
        return found
    return (*found, Latents(pages.indexer, pages.rope[..., :0], pages.indexer_scales.unsqueeze(-1)))


@gpu_kernel("latent.sparse_latents")
def store_slots_(
    vectors_TL: torch.Tensor,
    keys_TI: torch.Tensor,
    pages: Latents,
    keys_ESI: torch.Tensor,
    key_scales_ES: torch.Tensor,
    write: WritePlaces,
) -> None:
    """Write vectors and indexer keys in fp8 of all tokens that have a page (entry of at least 0), each with scales of its own.

    A scale is the smallest power of two that serves its block of a latent, or its key.
    """
    pages.write(vectors_TL, *write)
    keys = Latents(keys_ESI, pages.rope_ESP[..., :0], key_scales_ES.unsqueeze(-1))
    keys.write(keys_TI, *write)


@gpu_kernel("latent.sparse_latents")
def absorb_slots_(
    q_THD: torch.Tensor,
    vectors_TL: torch.Tensor,
    prep: LatentPrep,
    up_HNC: torch.Tensor,
    keys_TI: torch.Tensor,
    pages: Latents,
    keys_ESI: torch.Tensor,
    key_scales_ES: torch.Tensor | None,
    write: WritePlaces,
) -> torch.Tensor:
    """Raw vectors and indexer keys into pages, and raw queries prepared in place; the result is `q @ up` of their first N elements, [T, H, C].

    Without scales, pages have numbers. The vectors are undefined afterwards. The result's memory is one head after another.
    """
    prep.apply_(q_THD, vectors_TL)
    if key_scales_ES is None:
        for x, held in zip(
            (*vectors_TL.split([pages.latent_ESC.shape[-1], prep.rotary_dim], -1), keys_TI),
            (*pages[:2], keys_ESI),
            strict=True,
        ):
            store_latent_(x, held, write)
    else:
        store_slots_(vectors_TL, keys_TI, pages, keys_ESI, key_scales_ES, write)
    return torch.bmm(q_THD[..., : up_HNC.shape[1]].transpose(0, 1), up_HNC).transpose(0, 1)


@gpu_kernel("latent.sparse_latents")
def chosen_values(
    q_THC: torch.Tensor,
    q_THP: torch.Tensor,
    pages: Latents,
    table_SW: torch.Tensor,
    rows: StepRows,
    chosen_TK: torch.Tensor,
    scale: float,
    up_HVC: torch.Tensor,
    scratch: dict[Any, Any],
) -> torch.Tensor:
    """Attention of queries carried into the latent space over the slots `chosen` for each token, carried back to values, [T, H, V].

    `q_THP` are the rotary parts, `table_SW` the group's page table of all slots, `up_HVC` makes values of latents. `chosen` is ascending,
    with -1 behind what a token sees; padding gets zeros. `scratch` holds what the layers of one step share; it is empty at first.
    """
    out_THC, size = torch.zeros_like(q_THC), pages.latent_ESC.shape[1]
    q_THL = torch.cat((q_THC, q_THP), -1).float()
    there = (rows.row_T >= 0).nonzero().squeeze(-1)
    for tokens in there.split(BLOCK_TOKENS) if there.numel() else ():
        at_TK = chosen_TK[tokens].long()
        at_TK = at_TK[:, : int((at_TK >= 0).sum(1).max())]
        gone_TK = at_TK < 0
        at_TK = torch.where(gone_TK, at_TK[:, :1], at_TK)  # a slot that the token sees
        entries_TK = table_SW[rows.slots_R[rows.row_T[tokens].long()].long()].gather(1, at_TK // size)
        latent_TKC, rope_TKP = pages.read(entries_TK, at_TK % size)
        scores_THK = torch.einsum("thl,tkl->thk", q_THL[tokens], torch.cat((latent_TKC, rope_TKP), -1)) * scale
        weights_THK = scores_THK.masked_fill_(gone_TK.unsqueeze(1), float("-inf")).softmax(-1)
        out_THC[tokens] = torch.bmm(weights_THK, latent_TKC).to(out_THC.dtype)
    return torch.bmm(out_THC.transpose(0, 1), up_HVC.transpose(1, 2)).transpose(0, 1).contiguous()
