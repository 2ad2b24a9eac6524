"""Which drafts become tokens: as long as a draft is the token that the model has drawn at its place, the model's next token counts as well.

The model's token at each place is drawn as it would be without drafts, with the random number of that place. So tokens are the same with drafts and without,
whoever has guessed them. Shape letters: S rows, W places of a row (its last token and its drafts), N slots, K drafts of a slot.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagerunner.ops.batch import SlotState
from pagerunner.ops.dispatch import gpu_kernel
from pagerunner.ops.philox import uniforms

NOT_THERE, REFUSED = -1, -2
"""What stands in a place after a row's tokens: its draft wasn't there, or was there and wasn't taken."""
OTHER_NUMBERS = 1 << 40
"""Added to a position: the chance that a draft is taken and the draw of a token have different random numbers."""


class Chances(NamedTuple):
    """Drafts are taken by chance, whatever the model's tokens are, to measure what acceptance is worth.

    `rates_K` float64: the chance of each draft if those before it were taken. `seeds_N`: int64, by slot.
    """

    rates_K: torch.Tensor
    seeds_N: torch.Tensor


@gpu_kernel("sampling.accept")
def accept(
    targets_SW: torch.Tensor,
    slots_S: torch.Tensor,
    positions_S: torch.Tensor,
    ends_S: torch.Tensor,
    state: SlotState,
    chances: Chances | None = None,
) -> torch.Tensor:
    """The tokens that rows have got, int64 [S, W]: one and as many more as drafts were taken, then `NOT_THERE` or `REFUSED`.

    Slots go on from there: `state`'s tokens, lengths and accepted are set. That may be repeated with other targets, as nothing of it is read.

    Args:
        targets_SW: int64, the model's tokens. Those of places that a row doesn't have may be anything.
        slots_S: int64; a row of slot -1 is padding.
        positions_S: int64, of the rows' first places. These two may have any stride.
        ends_S: int, the position after the rows' last places. A row whose end is next to its position has no drafts.
        state: `drafts` are those that the rows have.
        chances: draw instead of comparing.
    """
    width = targets_SW.shape[1]
    own_S = slots_S % state.tokens.shape[0]
    places_D = torch.arange(width - 1, device=targets_SW.device)
    drafts_SD = state.drafts.index_select(0, own_S)[:, : width - 1]
    there_SD = (drafts_SD >= 0) & (places_D < (ends_S - positions_S)[:, None] - 1)
    if chances is None:
        taken_SD = there_SD & (drafts_SD == targets_SW[:, :-1])
    else:
        seeds_S1 = chances.seeds_N.index_select(0, slots_S.clamp(min=0))[:, None]
        drawn_SD = uniforms(seeds_S1, positions_S[:, None] + places_D + OTHER_NUMBERS)
        taken_SD = there_SD & (drawn_SD < chances.rates_K[: width - 1])
    taken_SD = taken_SD.to(torch.int64).cumprod(1)
    count_S = taken_SD.sum(1)
    last_S1 = targets_SW.gather(1, count_S[:, None])
    rest_SD = torch.where(there_SD, REFUSED, NOT_THERE)
    places_W = torch.arange(width, device=targets_SW.device)
    found_SW = torch.cat((torch.full_like(last_S1, NOT_THERE), rest_SD), 1)
    found_SW[:, :-1] = torch.where(taken_SD > 0, drafts_SD, found_SW[:, :-1])
    found_SW = torch.where(places_W == count_S[:, None], last_S1, found_SW)
    state.tokens.index_copy_(0, own_S, last_S1.squeeze(1))
    state.lengths.index_copy_(0, own_S, positions_S + count_S + 1)
    state.accepted.index_copy_(0, own_S, count_S.to(torch.int32))
    return found_SW.masked_fill_(slots_S[:, None] < 0, NOT_THERE)


def count_drafts(tokens: list[int]) -> tuple[int, int]:
    """Of one row of `accept`: how many drafts there were, and how many were taken."""
    taken = sum(token >= 0 for token in tokens) - 1
    return taken + tokens.count(REFUSED), taken
