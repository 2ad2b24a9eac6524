"""Attention over pages of latents (see `attention.mla`), for backends whose kernels read page tables on the device.

The torch twins here define what the kernels of the same names compute: plain masked attention in float32, a row at a
time. They synchronise with the device and are slow. No version reads a slot beyond what a query sees.

Shape letters: T tokens, R rows, H heads, N query and key size without rotary positions, P rotary elements, C latent
size, L vector size (C + P), V value head size, E page table entries, S keys, B blocks of queries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from pagerunner.batch import StepRows, WritePlaces
from pagerunner.ops.dispatch import gpu_kernel
from pagerunner.ops.fp8 import from_fp8, to_fp8
from pagerunner.ops.fp8_pages import grow_scales


class Pieces(NamedTuple):
    """Which queries meet which keys: rows of queries, each against a range of its keys; blocks of them for kernels.

    `pieces` [.., 5] int32: first query token, number of queries, first key in S, number of keys, and `shift`: query i sees
    keys up to i + shift of the piece. `blocks_B` int32: piece * 2^16 + number of the block of `BLOCK_QUERIES` queries.
    """

    pieces: torch.Tensor
    blocks_B: torch.Tensor


BLOCK_QUERIES = 128


@gpu_kernel("latent.latent_store")
def store_latent_(
    vectors_TL: torch.Tensor, pages_EXL: torch.Tensor, write: WritePlaces, scales_E: torch.Tensor | None = None
) -> None:
    """Write the vectors of all tokens that have a page (entry of at least 0) to slot `write.offset` of it.

    fp8 pages have `scales`, which grow; see `ops.fp8_pages`. A page's tokens must be one after another.
    """
    tokens = (write.entry_T >= 0).nonzero().squeeze(-1)
    if scales_E is not None:
        scales_E11 = scales_E[:, None, None]
        scale_T1 = grow_scales(pages_EXL.unsqueeze(2), scales_E11, 0, vectors_TL.unsqueeze(1), write.entry_T)
        codes_TL = to_fp8(vectors_TL, scale_T1, pages_EXL.dtype).view(torch.uint8)
        pages_EXL.view(torch.uint8)[write.entry_T[tokens], write.offset_T[tokens]] = codes_TL[tokens]
        return
    pages_EXL[write.entry_T[tokens], write.offset_T[tokens]] = vectors_TL[tokens].to(pages_EXL.dtype)


def read_latent(
    pages_EXL: torch.Tensor,
    entries_S: torch.Tensor,
    offsets_S: torch.Tensor,
    dtype: torch.dtype,
    scales_E: torch.Tensor | None,
) -> torch.Tensor:
    """The vectors of slots in `dtype`, [S, L]. `scales` are those of fp8 pages."""
    if scales_E is None:
        return pages_EXL[entries_S, offsets_S].to(dtype)
    held_SL = pages_EXL.view(torch.uint8)[entries_S, offsets_S].view(pages_EXL.dtype)
    return from_fp8(held_SL, scales_E[entries_S].unsqueeze(-1), dtype)


@gpu_kernel("latent.latent_decode")
def latent_values(
    q_THC: torch.Tensor,
    q_THP: torch.Tensor,
    pages_EXL: torch.Tensor,
    table_SW: torch.Tensor,
    rows: StepRows,
    scale: float,
    up_HVC: torch.Tensor,
    scratch: dict[Any, Any],
    scales_E: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of queries carried into the latent space over every slot up to their own, carried back to values, [T, H, V].

    `q_THP` are the rotary parts, `table_SW` the group's page table of all slots, `up_HVC` makes values of latents. `scratch` holds
    what the layers of one step share; it is empty at first. `scales` are those of fp8 pages. Padding gets zeros.
    """
    out_THC = _latents(q_THC, q_THP, pages_EXL, table_SW, rows, scale, scales_E)
    return torch.bmm(out_THC.transpose(0, 1), up_HVC.transpose(1, 2)).transpose(0, 1).contiguous()


def _latents(
    q_THC: torch.Tensor,
    q_THP: torch.Tensor,
    pages_EXL: torch.Tensor,
    table_SW: torch.Tensor,
    rows: StepRows,
    scale: float,
    scales_E: torch.Tensor | None = None,
) -> torch.Tensor:
    """Weighted latents [T, H, C] in q's dtype, zeros for padding."""
    out_THC = torch.zeros_like(q_THC)
    size, latent = pages_EXL.shape[1], q_THC.shape[-1]
    q_THL = torch.cat((q_THC, q_THP), -1).float()
    row_T = rows.row_T.long()
    for row in row_T[row_T >= 0].unique().tolist():
        tokens = (row_T == row).nonzero().squeeze(-1)
        ends_T1 = rows.positions_T[tokens].unsqueeze(-1)
        at_S = torch.arange(int(ends_T1.max()) + 1, device=q_THC.device)
        entries_S = table_SW[rows.slots_R[row].long()][at_S // size]
        keys_SL = read_latent(pages_EXL, entries_S, at_S % size, q_THC.dtype, scales_E).float()
        scores_HTS = torch.einsum("thl,sl->hts", q_THL[tokens], keys_SL) * scale
        weights_HTS = scores_HTS.masked_fill(at_S > ends_T1, float("-inf")).softmax(-1)
        out_THC[tokens] = torch.einsum("hts,sc->thc", weights_HTS, keys_SL[:, :latent]).to(out_THC.dtype)
    return out_THC


@gpu_kernel("latent.expanded_attention")
def expanded_attention(
    q_THD: torch.Tensor,
    expanded_SHU: torch.Tensor,
    rope_SP: torch.Tensor,
    pieces: Pieces,
    scale: float,
    out_THV: torch.Tensor,
    lse_TH: torch.Tensor,
    more: bool,
) -> None:
    """Attention of queries (N elements, then P rotary ones) over expanded keys and values (N + V elements of each head).

    Fills `out` and `lse` (log-sum-exp of the scores, float32) of the pieces' tokens. With `more`, `out` and `lse` already hold
    the result over other keys, and these keys are merged with it.
    """
    key_dim = q_THD.shape[-1] - rope_SP.shape[-1]
    for first, queries, first_key, keys, shift in pieces.pieces.tolist():
        q_THd = q_THD[first : first + queries].float()
        both_SHU, rope = (
            expanded_SHU[first_key : first_key + keys].float(),
            rope_SP[first_key : first_key + keys].float(),
        )
        scores_HTS = torch.einsum("thn,shn->hts", q_THd[..., :key_dim], both_SHU[..., :key_dim])
        scores_HTS = (scores_HTS + torch.einsum("thp,sp->hts", q_THd[..., key_dim:], rope)) * scale
        last_T1 = torch.arange(queries, device=q_THD.device).unsqueeze(-1) + shift
        scores_HTS.masked_fill_(torch.arange(keys, device=q_THD.device) > last_T1, float("-inf"))
        found_TH = scores_HTS.logsumexp(-1).T
        values_SHV = both_SHU[..., key_dim:]
        part = slice(first, first + queries)
        total_TH = torch.logaddexp(lse_TH[part], found_TH) if more else found_TH
        weights_HTS = (scores_HTS - total_TH.T.unsqueeze(-1)).exp()
        out = torch.einsum("hts,shv->thv", weights_HTS, values_SHV)
        if more:
            out += out_THV[part].float() * (lse_TH[part] - total_TH).exp().unsqueeze(-1)
        out_THV[part], lse_TH[part] = out.to(out_THV.dtype), total_TH
