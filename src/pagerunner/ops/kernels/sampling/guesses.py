"""The kernel of ops/guesses.py: one program for each guess."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.batch import SlotState


@triton.jit(do_not_specialize=["X"])
def _take_guesses(guesses_GX, tokens_N, lengths_N, drafts_NK, X, K: tl.constexpr, PLACES: tl.constexpr):
    guess = guesses_GX + tl.program_id(0).to(tl.int64) * X
    slot = tl.load(guess)
    ahead = tl.load(lengths_N + slot) + 1 - tl.load(guess + 1)  # guessed tokens that have come
    inside = (ahead > 0) & (ahead <= X - 2)
    last = tl.load(guess + 1 + ahead, inside, -1)
    right = (ahead == 0) | (inside & (last == tl.load(tokens_N + slot)))
    place = tl.arange(0, PLACES)
    draft = tl.load(guess + 2 + ahead + place, right & (place < K) & (ahead + place < X - 2), -1)
    tl.store(drafts_NK + slot * K + place, draft, place < K)


def take_guesses(guesses_GX: torch.Tensor, state: SlotState) -> None:
    """See ops/guesses.py."""
    count, width = state.drafts.shape[1], guesses_GX.shape[1]
    places = triton.next_power_of_2(count)
    _take_guesses[(guesses_GX.shape[0],)](
        guesses_GX, state.tokens, state.lengths, state.drafts, width, K=count, PLACES=places, num_warps=1
    )
