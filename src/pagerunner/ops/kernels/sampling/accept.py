"""The kernel of ops/accept.py: one program for each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.accept import Chances
from pagerunner.ops.batch import SlotState
from pagerunner.ops.kernels.sampling.sample import uniform_of


@triton.jit(do_not_specialize=["slot_stride", "position_stride", "seed_stride"])
def _accept(
    targets_SW, slots_S, positions_S, ends_S, tokens_N, lengths_N, accepted_N, drafts_NK, rates_K, seeds_N, found_SW,
    slot_stride, position_stride, seed_stride, K: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, CHANCES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    slot = tl.load(slots_S + row * slot_stride).to(tl.int64)
    real = slot >= 0
    position = tl.load(positions_S + row * position_stride)
    has = tl.load(ends_S + row).to(tl.int64) - position
    target = tl.load(targets_SW + row * W + place, place < W, 0)
    draft = tl.load(drafts_NK + slot * K + place, real & (place < W - 1), -1)
    there = (draft >= 0) & (place < has - 1)
    if CHANCES:
        seed = tl.load(seeds_N + slot * seed_stride, real, 0)
        rate = tl.load(rates_K + place, place < W - 1, 0.0)
        taken = there & (uniform_of(seed, position + place + 1099511627776) < rate)
    else:
        taken = there & (draft == target)
    count = tl.min(tl.where(taken, BLOCK, place), 0)  # the last place of a block never holds a draft
    last = tl.sum(tl.where(place == count, target, 0), 0)
    before = tl.load(drafts_NK + slot * K + place - 1, real & (place > 0) & (place < W), -1)
    refused = (before >= 0) & (place < has)
    found = tl.where(place < count, draft, tl.where(place == count, last, tl.where(refused, -2, -1)))
    tl.store(found_SW + row * W + place, tl.where(real, found, -1), place < W)
    tl.store(tokens_N + slot, last, real)
    tl.store(lengths_N + slot, position + count + 1, real)
    tl.store(accepted_N + slot, count.to(tl.int32), real)


def accept(
    targets_SW: torch.Tensor,
    slots_S: torch.Tensor,
    positions_S: torch.Tensor,
    ends_S: torch.Tensor,
    state: SlotState,
    chances: Chances | None = None,
) -> torch.Tensor:
    """See ops/accept.py."""
    rows, width = targets_SW.shape
    targets_SW = targets_SW.contiguous()
    found_SW = torch.empty_like(targets_SW)
    rates_K, seeds_N = (targets_SW, targets_SW) if chances is None else chances
    _accept[(rows,)](
        targets_SW, slots_S, positions_S, ends_S, state.tokens, state.lengths, state.accepted, state.drafts, rates_K, seeds_N, found_SW,
        slots_S.stride(0), positions_S.stride(0), seeds_N.stride(0), K=state.drafts.shape[1], W=width, BLOCK=triton.next_power_of_2(width),
        CHANCES=chances is not None, num_warps=1,
    )  # fmt: skip
    return found_SW
