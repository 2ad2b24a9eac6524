"""The logits of one of several ranks, which computes those of its own token ids only.

What all ranks need to agree on a token is gathered: keys of 8 bytes for greedy rows, weights and then tokens for rows that draw without
filters. Rows that draw with filters are shared out: a rank gets the whole logits of its rows, and draws for these alone. Where a request asks for
more, whole rows of logits are gathered. Every rank takes a token from the same gathered bytes.

Shape letters: R ranks, S rows, N rows that ask for more than their most likely token, M of a rank's share of these, O the rank's own token ids, V
all token ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from pagerunner.dist.base import Comm
from pagerunner.ops.sample import sample
from pagerunner.ops.vocab_pick import DrawnRows, best_keys, own_draw, own_mass, tokens_of_keys

ROWS_AT_ONCE = 64
"""Rows of which a rank has the whole logits at once."""


class DividedVocabulary:
    """See the module. `ids` are the token ids of each rank, one range behind another."""

    def __init__(self, comm: Comm, ids: Sequence[range]) -> None:
        self._comm, self._ids = comm, ids
        self._first = ids[comm.rank].start
        self._widest = max(map(len, ids))

    def whole(self, logits_NO: torch.Tensor) -> torch.Tensor:
        """The rows' logits of all token ids, [N, V]."""
        return self._joined(self._comm.all_gather(self._padded(logits_NO, len(logits_NO))))

    def best(self, logits_SO: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ops.sample.greedy`."""
        keys_SP = best_keys(logits_SO, self._first, self._widest)
        return tokens_of_keys(self._comm.all_gather(keys_SP), self._ids[-1].stop)

    def draw(self, logits_NO: torch.Tensor, rows: DrawnRows) -> torch.Tensor:
        """Tokens, int64 [N], of rows that draw without filters; see `ops.sample.sample`."""
        masses_N, own = own_mass(logits_NO, rows)
        masses_RN = self._comm.all_gather(masses_N)
        return self._comm.all_gather(own_draw(logits_NO, rows, masses_RN, own, self._comm.rank, self._first)).amax(0)

    def draw_filtered(self, logits_NO: torch.Tensor, rows: DrawnRows) -> torch.Tensor:
        """As `draw`, of rows with top-k, top-p or min-p."""
        at_once = ROWS_AT_ONCE * self._comm.size
        some = (slice(first, first + at_once) for first in range(0, len(logits_NO), at_once))
        return torch.cat(
            [self._draw_shares(logits_NO[own], rows.slots_N[own], rows.positions_N[own], rows) for own in some]
        )

    def _draw_shares(
        self, logits_NO: torch.Tensor, slots_N: torch.Tensor, positions_N: torch.Tensor, rows: DrawnRows
    ) -> torch.Tensor:
        count, size = len(logits_NO), self._comm.size
        share = -(-count // size)
        sent_RMO = self._padded(logits_NO, share * size).unflatten(0, (size, share))
        logits_MV = self._joined(self._comm.all_to_all(sent_RMO))
        none = (0, share * size - count)  # rows of slot -1 are padding
        own_2M = torch.stack((pad(slots_N, none, value=-1), pad(positions_N, none))).unflatten(1, (size, share))[
            :, self._comm.rank
        ]
        tokens_M, _ = sample(logits_MV, own_2M[0], own_2M[1], rows.settings)
        return self._comm.all_gather(tokens_M).view(-1)[:count]

    def _padded(self, logits_NO: torch.Tensor, rows: int) -> torch.Tensor:
        """As many rows as that, as wide as those of the rank with most token ids."""
        missing = (0, self._widest - logits_NO.shape[1], 0, rows - len(logits_NO))
        return pad(logits_NO, missing) if any(missing) else logits_NO

    def _joined(self, parts_RNO: torch.Tensor) -> torch.Tensor:
        """Rows of all token ids, from what each rank has of them."""
        return torch.cat([part_NO[:, : len(ids)] for part_NO, ids in zip(parts_RNO, self._ids, strict=True)], 1)
