"""Attention over keys and values expanded from latents. Twin: `pagerunner.ops.latent_attention.expanded_attention`."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.launch import padded
from pagerunner.ops.latent_attention import BLOCK_QUERIES, Pieces

TILE = (128, 64, 8, 3)  # queries, keys, warps, stages
NOTHING = tl.constexpr(-1e30)


@triton.jit(do_not_specialize=["more"])
def _attend(
    q, both, rope, pieces, blocks, out, lse, scale,
    q_token, q_head, both_key, both_head, rope_key, out_token, out_head, lse_token, more,
    N: tl.constexpr, P: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BP: tl.constexpr,
    BV: tl.constexpr, BQ: tl.constexpr, BS: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BQ queries of one head, a part of one of the BLOCK queries of a piece, over the piece's keys."""
    packed, head = tl.load(blocks + tl.program_id(0)), tl.program_id(1)
    piece = pieces + (packed >> 16) * 5
    first, queries = tl.load(piece).to(tl.int64), tl.load(piece + 1)
    first_key, keys, shift = tl.load(piece + 2).to(tl.int64), tl.load(piece + 3), tl.load(piece + 4)
    index = (packed & 0xFFFF) * BLOCK + tl.program_id(2) * BQ + tl.arange(0, BQ)
    real = index < queries
    n, p, v, s = tl.arange(0, BD), tl.arange(0, BP), tl.arange(0, BV), tl.arange(0, BS)
    token = first + index
    at = q + token[:, None] * q_token + head * q_head
    qn = tl.load(at + n[None, :], mask=real[:, None] & (n < N)[None, :], other=0.0)
    qp = tl.load(at + N + p[None, :], mask=real[:, None] & (p < P)[None, :], other=0.0)
    out_at = out + token[:, None] * out_token + head * out_head + v[None, :]
    lse_at = lse + token * lse_token + head
    begun = real & (more > 0)
    most = tl.load(lse_at, mask=begun, other=NOTHING) * 1.4426950408889634
    total = tl.where(begun, 1.0, 0.0)
    sums = tl.load(out_at, mask=begun[:, None] & (v < V)[None, :], other=0.0).to(tl.float32)
    last = tl.minimum((packed & 0xFFFF) * BLOCK + tl.program_id(2) * BQ + BQ, queries) + shift
    stop = tl.minimum(keys, last)
    both += first_key * both_key + head * both_head
    rope += first_key * rope_key
    for start in range(0, stop, BS):
        key = start + s
        live = key < stop
        kn = tl.load(both + key[:, None] * both_key + n[None, :], mask=live[:, None] & (n < N)[None, :], other=0.0)
        kp = tl.load(rope + key[:, None] * rope_key + p[None, :], mask=live[:, None] & (p < P)[None, :], other=0.0)
        kv = tl.load(both + key[:, None] * both_key + N + v[None, :], mask=live[:, None] & (v < V)[None, :], other=0.0)
        scores = tl.dot(qn, tl.trans(kn), input_precision=PRECISION)
        scores = tl.dot(qp, tl.trans(kp), scores, input_precision=PRECISION) * scale
        seen = live[None, :] & (key[None, :] <= index[:, None] + shift)
        scores = tl.where(seen, scores, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp2(scores - larger[:, None])
        shrink = tl.exp2(most - larger)
        total = total * shrink + tl.sum(weights, 1)
        sums = tl.dot(weights.to(kv.dtype), kv, sums * shrink[:, None], input_precision=PRECISION)
        most = larger
    some = tl.where(total > 0.0, total, 1.0)
    tl.store(out_at, (sums / some[:, None]).to(out.dtype.element_ty), mask=real[:, None] & (v < V)[None, :])
    tl.store(lse_at, (most + tl.log2(some)) / 1.4426950408889634, mask=real)


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
    """See the twin."""
    heads, rope, value_dim = q_THD.shape[1], rope_SP.shape[-1], out_THV.shape[-1]
    key_dim = q_THD.shape[-1] - rope
    sizes = [max(16, padded(size)) for size in (key_dim, rope, value_dim)]
    wide = q_THD.dtype == torch.float32
    block_q, block_s, warps, stages = (32, 16, 4, 1) if wide else TILE
    _attend[(pieces.blocks_B.shape[0], heads, BLOCK_QUERIES // block_q)](
        q_THD, expanded_SHU, rope_SP, pieces.pieces, pieces.blocks_B, out_THV, lse_TH, scale / math.log(2),
        *q_THD.stride()[:2], *expanded_SHU.stride()[:2], rope_SP.stride(0), *out_THV.stride()[:2], lse_TH.stride(0),
        int(more), key_dim, rope, value_dim, *sizes, block_q, block_s, BLOCK_QUERIES, "tf32x3" if wide else "tf32",
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
