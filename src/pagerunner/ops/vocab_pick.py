"""Tokens from logits that lie divided among ranks: each has those of its own token ids, a range, in the order of the ranks.

Greedy rows: each rank makes a key of its best token. Keys are gathered, 8 bytes a row, and the largest one wins. Rows that draw without
filters: each rank weighs its tokens, where the best token of all ranks weighs 1. The weights are gathered. A row's uniform falls into one
rank's span, and this rank draws the token. The token is the one that `ops/sample.py` takes from the whole row, up to the rounding of sums.

Shape letters: S rows, N rows that draw, R ranks, O a rank's own token ids, P parts of these.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagerunner.ops.dispatch import gpu_kernel
from pagerunner.ops.philox import uniforms
from pagerunner.ops.sample import SEED, TEMPERATURE, SlotSettings, first_above, greedy, invert

_LOW = 0xFFFFFFFF


class DrawnRows(NamedTuple):
    """Rows that draw: the largest logits of all ranks, float32, and slots and positions as `ops.sample.sample` has them."""

    best_N: torch.Tensor
    slots_N: torch.Tensor
    positions_N: torch.Tensor
    settings: SlotSettings


@gpu_kernel("sampling.vocab_pick")
def best_keys(logits_SO: torch.Tensor, first_id: int, widest: int) -> torch.Tensor:
    """A key of the best token of each row and part, int64 [S, P]; the largest key is that of the token which `greedy` takes.

    `first_id` is the token id of the first column, `widest` the largest number of ids that a rank has. The upper half of a key has the
    order of the logits, with NaN as the largest and both zeros as one. The lower half is the complement of the id.
    """
    tokens_S, best_S = greedy(logits_SO)
    bits_S = best_S.masked_fill(best_S == 0.0, 0.0).view(torch.int32)
    order_S = torch.where(bits_S < 0, bits_S ^ 0x7FFFFFFF, bits_S).masked_fill_(best_S.isnan(), 0x7FFFFFFF)
    return ((order_S.long() << 32) + (_LOW - first_id) - tokens_S)[:, None]


@gpu_kernel("sampling.vocab_pick")
def tokens_of_keys(keys_RSP: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best tokens, int64 [S], and their logits, float32 [S], as `greedy` says. Ids are in range, whatever the keys are."""
    key_S = keys_RSP.amax(dim=(0, 2))
    order_S = (key_S >> 32).to(torch.int32)
    best_S = torch.where(order_S < 0, order_S ^ 0x7FFFFFFF, order_S).view(torch.float32)
    return (_LOW - (key_S & _LOW)).clamp_(max=vocab_size - 1), best_S


def best_tokens(logits_SV: torch.Tensor) -> torch.Tensor:
    """The most likely token of each row, int64 [S], of whole rows. A row's parts are read by several programs, where torch has one."""
    vocab_size = logits_SV.shape[1]
    return tokens_of_keys(best_keys(logits_SV, 0, vocab_size)[None], vocab_size)[0]


@gpu_kernel("sampling.vocab_pick")
def own_mass(logits_NO: torch.Tensor, rows: DrawnRows) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The weight of this rank's tokens, float64 [N], and what `own_draw` takes of it."""
    temperature_N1 = rows.settings.scales[:, TEMPERATURE].index_select(0, rows.slots_N)[:, None]
    weights_NO = ((logits_NO.float() - rows.best_N[:, None]) / temperature_N1).exp_().nan_to_num_(0.0, 0.0)
    return weights_NO.sum(dim=-1, dtype=torch.float64), (weights_NO,)


@gpu_kernel("sampling.vocab_pick")
def own_draw(
    logits_NO: torch.Tensor,
    rows: DrawnRows,
    masses_RN: torch.Tensor,
    own: tuple[torch.Tensor, ...],
    rank: int,
    first_id: int,
) -> torch.Tensor:
    """The token ids, int64 [N], of rows whose uniform falls among this rank's tokens; 0 for others.

    `masses` and `own` are what all ranks, and this one, have from `own_mass`. Without a finite best logit an id means nothing.
    """
    uniform_N = uniforms(rows.settings.words[:, SEED][rows.slots_N], rows.positions_N + 1)
    running_NR = masses_RN.T.cumsum(dim=-1)
    owner_N1, left_N1 = first_above(running_NR, uniform_N[:, None] * running_NR[:, -1:])
    mass_N = masses_RN.T.gather(1, owner_N1).squeeze(-1)
    inside_N = (left_N1.squeeze(-1) / mass_N).clamp_(0.0, 1.0).nan_to_num_(0.0)
    tokens_N = invert(own[0], inside_N) + first_id
    return tokens_N.masked_fill_((owner_N1.squeeze(-1) != rank) | ~rows.best_N.isfinite(), 0)
