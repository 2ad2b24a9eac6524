"""How many drafts rows get in a step. Each is a token more to compute, which pays only if it is often right and the step has room."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol


class DraftLength(Protocol):
    """Chooses before each plan."""

    @property
    def most(self) -> int:
        """The most that `choose` returns."""

    def choose(self, rows: int, keys: int) -> int:
        """Drafts for each of `rows` that generate, whose sequences have `keys` tokens together."""


class FixedLength:
    """The same number for every plan; 0 is an engine without drafts."""

    def __init__(self, most: int) -> None:
        self.most = most

    def choose(self, rows: int, keys: int) -> int:
        """See DraftLength."""
        return self.most


class LengthByRows:
    """A number for each range of rows: vLLM's num_speculative_tokens_per_batch_size."""

    def __init__(self, numbers: Sequence[tuple[int, int]]) -> None:
        """`numbers` are (rows, drafts) in ascending order: from so many rows on, each row has so many drafts."""
        self._firsts = [first for first, _ in numbers]
        self._drafts = [drafts for _, drafts in numbers]
        self.most = max(self._drafts)

    def choose(self, rows: int, keys: int) -> int:
        """See DraftLength."""
        return self._drafts[max(bisect_right(self._firsts, rows) - 1, 0)]
