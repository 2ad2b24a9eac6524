"""Log-probabilities as the host reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagerunner.types import TokenLogprobs

NUM_REPORTED = 2  # tensors that `ops.logprobs.gather_logprobs` returns


def to_token_logprobs(tokens: Sequence[int], lists: Sequence[list[Any]], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """`gather_logprobs` as read on the host, one value per row; row i keeps `num_top[i]` alternatives."""
    found = []
    for token, words, logprobs, count in zip(tokens, *lists, num_top, strict=True):
        rank, logprob, ids, values = words[0], logprobs[0], words[1 : count + 1], logprobs[1 : count + 1]
        if rank == 1 and ids and ids[0] != token:
            # Tokens tie for the first place, and top-k chose another one than the sampler: show the chosen token first.
            place = ids.index(token) if token in ids else len(ids) - 1
            ids.insert(0, ids.pop(place))
            ids[0] = token
            values.insert(0, values.pop(place))
            values[0] = logprob
        found.append(TokenLogprobs(token, logprob, rank, ids, values))
    return found
