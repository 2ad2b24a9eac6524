"""Drafts that the host has guessed: of a text's guessed continuation, what follows the slot's last token.

The host knows a text up to the steps in flight. It guesses how the text goes on from there, and the device knows how far it has come meanwhile. Example:
the host knows 40 tokens and guesses 5 6 7 8 as those at positions 40 to 43. The step in flight has brought 5. The drafts of the next row are 6 7 8. Had it
brought 9, there would be none. Shape letters: G guesses, X integers of one, N slots, K drafts of a slot.
"""

from __future__ import annotations

import torch

from pagerunner.ops.batch import SlotState
from pagerunner.ops.dispatch import gpu_kernel


@gpu_kernel("sampling.guesses")
def take_guesses(guesses_GX: torch.Tensor, state: SlotState) -> None:
    """Write the drafts of the slots that `guesses_GX` names: int64, each a slot, the position of the first guessed token, and tokens, -1 behind the last.

    No slot may have two guesses.
    """
    slots_G, starts_G1, tokens_GX = guesses_GX[:, 0], guesses_GX[:, 1:2], guesses_GX[:, 2:]
    width, count = tokens_GX.shape[1], state.drafts.shape[1]
    ahead_G1 = state.lengths.index_select(0, slots_G)[:, None] + 1 - starts_G1  # guessed tokens that have come
    places_GK = ahead_G1 + torch.arange(count, device=ahead_G1.device)
    drafts_GK = tokens_GX.gather(1, places_GK.clamp(0, width - 1))
    last_G1 = tokens_GX.gather(1, (ahead_G1 - 1).clamp(0, width - 1))
    right_G1 = (ahead_G1 == 0) | (ahead_G1 > 0) & (ahead_G1 <= width) & (
        last_G1 == state.tokens.index_select(0, slots_G)[:, None]
    )
    state.drafts.index_copy_(0, slots_G, torch.where(right_G1 & (places_GK < width), drafts_GK, -1))
