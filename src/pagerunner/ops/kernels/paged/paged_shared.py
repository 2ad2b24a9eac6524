"""Attention of all rows to the pages with which all rows begin. These pages are read once for all rows.

`kernels.paged_decode` merges the result. Scores are in units of log2. Shape letters: U units (a row's token), K
key/value heads, G query heads per key/value head (M: as rows of a tile), V size of a value head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagerunner.ops.kernels.paged.paged_tiles import (
    LOG2E,
    LOWEST,
    attend_fp8,
    halves,
    joined,
    load_tile,
    online,
    softcapped,
    tile_scales,
)


@triton.jit(do_not_specialize=["shared_split"])
def shared_kernel(
    q_ptr, q_st, q_sh, kp_ptr, kp_se, kp_ss, kp_sh, vp_ptr, vp_se, vp_ss, vp_sh, scales_ptr, scales_se,
    table_ptr, table_st, unit_ptr, info_ptr, shared_ptr, shared_sums_ptr, shared_split, scale, softcap,
    PROGRAMS: tl.constexpr, K: tl.constexpr, G: tl.constexpr, BM: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr, SOFTCAP: tl.constexpr,
    FP8: tl.constexpr, TO: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Attention of all rows' units, their queries packed by key/value head into tiles, to the tokens that all rows share.

    `info` holds four numbers: these units, shared tokens, splits of the shared tokens, and the table slot to read these tokens from. A
    split leaves `shared_split` sums, unit after unit. Units of padding come last and leave no sums.
    """
    shared = tl.load(info_ptr + 1)
    if shared > 0:
        units = tl.minimum(tl.load(info_ptr), shared_split // (K * G))
        splits = tl.load(info_ptr + 2)
        slot = tl.load(info_ptr + 3)
        row_table = table_ptr + tl.cast(slot, tl.int64) * table_st
        per = tl.cdiv(tl.cdiv(shared, BN), splits) * BN
        m = tl.arange(0, BM)
        d = tl.arange(0, DP)
        dv = tl.arange(0, DVP)
        n = tl.arange(0, BN)
        items = tl.cdiv(units * G, BM) * K * splits
        for item in range(tl.program_id(0), items, PROGRAMS):
            head = item % K
            split = item // K % splits
            row = item // (K * splits) * BM + m
            there = row < units * G
            token = tl.load(unit_ptr + row // G * 4, mask=there, other=0).to(tl.int64)
            q_head = head * G + row % G
            q_at = q_ptr + (token * q_st + q_head * q_sh)[:, None] + d[None, :]
            q = tl.load(q_at, mask=there[:, None] & (d < D)[None, :], other=0.0).to(TO)
            highest = tl.full([BM], LOWEST, tl.float32)
            total = tl.zeros([BM], tl.float32)
            acc = tl.zeros([BM, DVP], tl.float32)
            stop = tl.minimum(shared, (split + 1) * per)
            if FP8 is not None:
                q_even, q_odd = halves(q)
                even, odd = halves(acc)
            for start in range(split * per, stop, BN):
                at = start + n
                mask = at < stop
                entry = tl.load(row_table + at // PAGE, mask=mask, other=0)
                k_offsets, v_offsets = entry * kp_se + at % PAGE * kp_ss, entry * vp_se + at % PAGE * vp_ss
                if FP8 is None:
                    k = load_tile(kp_ptr + head * kp_sh, k_offsets, mask, D, DP, FP8, TO)
                    v = load_tile(vp_ptr + head * vp_sh, v_offsets, mask, DV, DVP, FP8, TO)
                    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
                    if SOFTCAP:
                        scores = softcapped(scores, softcap)
                    scores = tl.where(mask[None, :], scores * LOG2E, float("-inf"))
                    weights, highest, total, shrink = online(scores, 1.0, highest, total, 1)
                    acc = tl.dot(weights.to(TO), v, acc * shrink[:, None], input_precision="ieee")
                else:
                    k_scale, exponent, share = tile_scales(
                        scales_ptr + head, scales_se, row_table, 1, start, 0, stop, K, PAGE, BN, False, ASM
                    )
                    highest, total, even, odd = attend_fp8(
                        q_even, q_odd, highest, total, even, odd, kp_ptr + head * kp_sh, k_offsets,
                        vp_ptr + head * vp_sh, v_offsets, k_scale, exponent, share, mask, mask[None, :], scale, softcap,
                        D, DP, DV, DVP, SOFTCAP, FP8, TO, ASM,
                    )  # fmt: skip
            if FP8 is not None:
                acc = joined(even, odd)
            place = split * shared_split + row // G * (K * G) + q_head
            tl.store(shared_sums_ptr + place * 2, highest, mask=there)
            tl.store(shared_sums_ptr + place * 2 + 1, total, mask=there)
            tl.store(shared_ptr + place[:, None] * DV + dv[None, :], acc, mask=there[:, None] & (dv < DV)[None, :])
