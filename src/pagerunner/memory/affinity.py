"""What it is worth that an engine was sent the beginning of a prompt before: it has probably kept those pages."""

from __future__ import annotations

from collections.abc import Sequence

UNITS_OF_A_REQUEST = 32
"""So many units of 16 tokens that needn't be computed count as much as a request that runs."""
MOST_UNITS = 512
"""Units of a prompt that are looked at: beyond 8,192 tokens one that has nothing to do is better than a prefix."""
MOST_SENT = 65_536
"""Units that are remembered of each engine, 1 Mi tokens: some 10 MB."""


class SentUnits:
    """Hashes of the units that an engine was sent last."""

    def __init__(self) -> None:
        self._hashes: dict[bytes, None] = {}  # the latest last

    def __len__(self) -> int:
        return len(self._hashes)

    def leading(self, hashes: Sequence[bytes]) -> int:
        """How many leading units of a prompt are among them."""
        return next((index for index, one in enumerate(hashes) if one not in self._hashes), len(hashes))

    def add(self, hashes: Sequence[bytes]) -> None:
        """A prompt is sent. Of too many units the oldest are forgotten."""
        for one in reversed(hashes):  # a prompt's end is forgotten before its beginning
            self._hashes.pop(one, None)
            self._hashes[one] = None
        while len(self._hashes) > MOST_SENT:
            del self._hashes[next(iter(self._hashes))]

    def clear(self) -> None:
        """The engine has forgotten its pages."""
        self._hashes.clear()
