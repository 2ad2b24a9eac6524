"""Paged attention in the latent space, split over the keys. Twins: `pagerunner.ops.latent_attention`.

All heads share a token's vector. So a block of heads takes part in one matrix product, and the tile of vectors that a program
holds serves both products. Products are transposed (keys by heads, latents by heads), because Hopper's matrix units want 64
rows and a model may have only 16 heads. A split computes its share of the keys from the sequence's length on the device. So one
launch serves every length.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from pagerunner.batch import StepRows
from pagerunner.ops.kernels.launch import blocks, multiprocessors, padded

MAX_SPLITS = 64
MIN_SPLIT = 128  # keys of a split, so that the merge stays cheap
MAX_HEADS = 64  # of a program
TILES = {16: (128, 8, 1), 32: (128, 8, 1), 64: (64, 8, 2)}  # keys, warps and stages, by heads
NOTHING = tl.constexpr(-1e30)  # a log-sum-exp of no keys, and a score that nothing reaches


@triton.jit
def _store(
    vectors, pages, entries, offsets, vector_stride, page_stride, slot_stride, L: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0)
    entry = tl.load(entries + token)
    if entry < 0:
        return
    at = tl.arange(0, BLOCK)
    value = tl.load(vectors + token.to(tl.int64) * vector_stride + at, mask=at < L)
    target = pages + entry * page_stride + tl.load(offsets + token) * slot_stride + at
    tl.store(target, value.to(pages.dtype.element_ty), mask=at < L)


def store_latent_(
    vectors_TL: torch.Tensor, pages_EXL: torch.Tensor, write_entry_T: torch.Tensor, write_offset_T: torch.Tensor
) -> None:
    """See the twin."""
    tokens, size = vectors_TL.shape
    strides = (vectors_TL.stride(0), pages_EXL.stride(0), pages_EXL.stride(1))
    block = padded(size)
    _store[(tokens,)](vectors_TL, pages_EXL, write_entry_T, write_offset_T, *strides, size, block, num_warps=2)


@triton.jit(do_not_specialize=["lse_split"])
def _attend(
    q_latent, q_rope, pages, out, lse, table, slots, row_T, positions,
    num_heads, scale, qc_token, qc_head, qp_token, qp_head, page_stride, slot_stride, table_stride,
    out_split, out_token, out_head, lse_split, lse_token,
    PAGE: tl.constexpr, C: tl.constexpr, P: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
    BH: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BH heads of one token over one split of its keys; the result is normalised."""
    token, split = tl.program_id(1), tl.program_id(2)
    heads = tl.program_id(0) * BH + tl.arange(0, BH)
    in_h = heads < num_heads
    c, p = tl.arange(0, BC), tl.arange(0, BP)
    row = tl.load(row_T + token)
    length = tl.where(row >= 0, tl.load(positions + token).to(tl.int32) + 1, 0)
    slot = tl.load(slots + tl.maximum(row, 0)).to(tl.int64)
    share = tl.cdiv(tl.cdiv(length, tl.num_programs(2)), BN) * BN
    first = split * share
    stop = tl.minimum(first + share, length)
    wide = token.to(tl.int64)
    qc = tl.load(
        q_latent + wide * qc_token + heads.to(tl.int64)[:, None] * qc_head + c[None, :],
        mask=in_h[:, None] & (c < C)[None, :], other=0.0,
    )  # fmt: skip
    qp = tl.load(
        q_rope + wide * qp_token + heads[:, None] * qp_head + p[None, :],
        mask=in_h[:, None] & (p < P)[None, :], other=0.0,
    )  # fmt: skip
    most = tl.full((BH,), NOTHING, dtype=tl.float32)
    total = tl.zeros((BH,), dtype=tl.float32)
    sums = tl.zeros((BC, BH), dtype=tl.float32)
    qc_t, qp_t = tl.trans(qc), tl.trans(qp)
    for at in range(first, stop, BN):
        key = at + tl.arange(0, BN)
        live = key < stop
        entry = tl.load(table + slot * table_stride + key // PAGE, mask=live, other=0)
        base = pages + (entry * page_stride + (key % PAGE) * slot_stride)[:, None]
        kc = tl.load(base + c[None, :], mask=live[:, None] & (c < C)[None, :], other=0.0).to(qc.dtype)
        kp = tl.load(base + C + p[None, :], mask=live[:, None] & (p < P)[None, :], other=0.0).to(qc.dtype)
        scores = tl.dot(kc, qc_t, input_precision=PRECISION)
        scores = tl.dot(kp, qp_t, scores, input_precision=PRECISION)
        scores = tl.where(live[:, None], scores * scale, NOTHING)
        larger = tl.maximum(most, tl.max(scores, 0))
        weights = tl.exp2(scores - larger[None, :])
        shrink = tl.exp2(most - larger)
        total = total * shrink + tl.sum(weights, 0)
        sums = tl.dot(tl.trans(kc), weights.to(kc.dtype), sums * shrink[None, :], input_precision=PRECISION)
        most = larger
    some = tl.where(total > 0.0, total, 1.0)
    target = out + split * out_split + wide * out_token + heads.to(tl.int64)[None, :] * out_head + c[:, None]
    tl.store(target, (sums / some[None, :]).to(out.dtype.element_ty), mask=in_h[None, :] & (c < C)[:, None])
    found = tl.where(total > 0.0, most + tl.log2(some), NOTHING)
    tl.store(lse + split * lse_split + token * lse_token + heads, found, mask=in_h)


@triton.jit(do_not_specialize=["num_splits", "lse_split"])
def _merge(
    parts, lse, out, num_splits, part_split, part_token, part_head, lse_split, lse_token, out_token, out_head,
    C: tl.constexpr, BC: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One head of one token: its splits' results, weighted by their log-sum-exps."""
    head, token = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    c, splits = tl.arange(0, BC), tl.arange(0, SPLITS)
    found = tl.load(lse + splits * lse_split + token * lse_token + head, mask=splits < num_splits, other=NOTHING)
    most = tl.max(found, 0)
    total = tl.sum(tl.exp2(found - most), 0)
    sums = tl.zeros((BC,), dtype=tl.float32)
    for split in range(num_splits):
        weight = tl.exp2(tl.load(lse + split * lse_split + token * lse_token + head) - most)
        part = parts + tl.cast(split, tl.int64) * part_split + token * part_token + head * part_head + c
        sums += weight * tl.load(part, mask=c < C, other=0.0)
    target = out + token * out_token + head * out_head + c
    tl.store(target, (sums / total).to(out.dtype.element_ty), mask=c < C)


def _splits(programs: int, rows: StepRows, device: torch.device) -> int:
    """Enough for about two programs a multiprocessor, as far as sequences may be long enough."""
    wanted = -(-2 * multiprocessors(device) // programs)
    return max(1, min(wanted, -(-rows.max_seq_len // MIN_SPLIT), MAX_SPLITS))


def latent_attention(
    q_THC: torch.Tensor,
    q_THP: torch.Tensor,
    pages_EXL: torch.Tensor,
    table_SW: torch.Tensor,
    rows: StepRows,
    scale: float,
) -> torch.Tensor:
    """See the twin. The result's memory is one head after another, as the product with up projections wants it."""
    tokens, heads, latent = q_THC.shape
    device, wide = q_THC.device, q_THC.dtype == torch.float32
    out_THC = torch.empty(heads, tokens, latent, dtype=q_THC.dtype, device=device).transpose(0, 1)
    block_h = min(MAX_HEADS, max(16, padded(heads)))
    if wide:
        block_h = 16
    block_n, warps, stages = (32, 8, 1) if wide else TILES[block_h]
    head_blocks = blocks(heads, block_h)
    splits = _splits(tokens * head_blocks, rows, device)
    lse = torch.empty(splits, tokens, heads, dtype=torch.float32, device=device)
    parts = out_THC[None]
    if splits > 1:
        parts = torch.empty(splits, heads, tokens, latent, dtype=torch.float32, device=device).transpose(1, 2)
    rope = q_THP.shape[-1]
    block_c, block_p = max(16, padded(latent)), max(16, padded(rope))
    _attend[(head_blocks, tokens, splits)](
        q_THC, q_THP, pages_EXL, parts, lse, table_SW, rows.slots_R, rows.row_T, rows.positions_T,
        heads, scale / math.log(2), *q_THC.stride()[:2], *q_THP.stride()[:2], *pages_EXL.stride()[:2],
        table_SW.stride(0), *parts.stride()[:3], *lse.stride()[:2],
        pages_EXL.shape[1], latent, rope, block_c, block_p, block_h, block_n, "tf32x3" if wide else "tf32",
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        _merge[(heads, tokens)](
            parts, lse, out_THC, splits, *parts.stride()[:3], *lse.stride()[:2], *out_THC.stride()[:2],
            latent, block_c, MAX_SPLITS, num_warps=2,
        )  # fmt: skip
    return out_THC
