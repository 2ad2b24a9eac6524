"""The logits of one of several ranks, which computes those of its own token ids only.

What all ranks need to agree on a token is gathered: keys of 8 bytes for greedy rows, weights and then tokens for rows that draw without
filters, and whole rows of logits where a request asks for more. Every rank takes a token from the same gathered bytes.

Shape letters: S rows, N rows that ask for more than their most likely token, O the rank's own token ids, V all token ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from pagerunner.dist.base import Comm
from pagerunner.ops.vocab_pick import DrawnRows, best_keys, own_draw, own_mass, tokens_of_keys


class DividedVocabulary:
    """See the module. `ids` are the token ids of each rank, one range behind another."""

    def __init__(self, comm: Comm, ids: Sequence[range]) -> None:
        self._comm, self._ids = comm, ids
        self._first = ids[comm.rank].start
        self._widest = max(map(len, ids))

    def whole(self, logits_NO: torch.Tensor) -> torch.Tensor:
        """The rows' logits of all token ids, [N, V]."""
        missing = self._widest - logits_NO.shape[1]
        parts_RNO = self._comm.all_gather(pad(logits_NO, (0, missing)) if missing else logits_NO)
        return torch.cat([part_NO[:, : len(ids)] for part_NO, ids in zip(parts_RNO, self._ids, strict=True)], 1)

    def best(self, logits_SO: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ops.sample.greedy`."""
        keys_SP = best_keys(logits_SO, self._first, self._widest)
        return tokens_of_keys(self._comm.all_gather(keys_SP), self._ids[-1].stop)

    def draw(self, logits_NO: torch.Tensor, rows: DrawnRows) -> torch.Tensor:
        """Tokens, int64 [N], of rows that draw without filters; see `ops.sample.sample`."""
        masses_N, own = own_mass(logits_NO, rows)
        masses_RN = self._comm.all_gather(masses_N)
        return self._comm.all_gather(own_draw(logits_NO, rows, masses_RN, own, self._comm.rank, self._first)).amax(0)
