"""RanksLoader: the loaders of several ranks as one. An adapter is there if all ranks have their part of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from pagerunner.engine.core.adapters import IN_VAIN
from pagerunner.engine.worker import orders
from pagerunner.types.lora import AdapterEnd, AdapterFill


class Ended(Protocol):
    """What all ranks have ended: by number of the work, each rank's end. With nothing, it waits for up to so many seconds. Raises why ranks are gone."""

    def __call__(self, seconds: float, /) -> Mapping[int, Mapping[int, AdapterEnd]]:
        """See above."""


class RanksLoader:
    """A Loader. Each rank reads an adapter whole, and keeps its own part.

    Orders go the way of plans, so all ranks begin a fill behind the same step, and forget the same copies.
    """

    def __init__(self, send: Callable[[orders.OfAdapters], None], ended: Ended, who: Callable[[int], str]) -> None:
        """`who` names a rank."""
        self._send, self._ended, self._who = send, ended, who
        self._under_way = 0
        self._seen: dict[str, Counter[int]] = {}  # by digest and rank, reads that have ended since the last `forget`

    def read(self, number: int, path: str) -> None:
        """See Loader."""
        self._under_way += 1
        self._send(orders.ReadAdapter(number, path))

    def fill(self, fill: AdapterFill) -> None:
        """See Loader."""
        self._under_way += 1
        self._send(orders.FillAdapter(fill))

    def forget(self, digest: str) -> None:
        """See Loader."""
        self._send(orders.ForgetAdapter(digest, dict(self._seen.pop(digest, ()))))

    def drain(self) -> None:
        """See Loader."""
        self._send(orders.DrainAdapters())

    def ended(self, seconds: float) -> list[AdapterEnd]:
        """See Loader."""
        if not self._under_way:
            return []
        found: list[AdapterEnd] = []
        for of_ranks in self._ended(seconds).values():
            self._under_way -= 1
            for rank, end in of_ranks.items():
                if end.digest:
                    self._seen.setdefault(end.digest, Counter())[rank] += 1
            found += self._together(of_ranks)
        return found

    def _together(self, of_ranks: Mapping[int, AdapterEnd]) -> list[AdapterEnd]:
        """The end of all, and of copies that some ranks have in vain."""
        first, digests = of_ranks[0], {end.digest for end in of_ranks.values() if end.digest}
        errors = {rank: end.error for rank, end in of_ranks.items() if end.error}
        if not errors and len(digests) <= 1:  # none of a fill
            return [msgspec.structs.replace(first, num_pages=max(end.num_pages for end in of_ranks.values()))]
        if not errors:
            other = min(rank for rank, end in of_ranks.items() if end.digest != first.digest)
            said = f"{self._who(other)} has read another content than rank 0: all ranks must find the same files under the adapter's path."
        elif len(errors) == len(of_ranks) and len(set(errors.values())) == 1:
            said = first.error
        else:
            rank = min(errors)
            said = f"{self._who(rank)}: {errors[rank]}"
        vain = [AdapterEnd(IN_VAIN, digest) for digest in sorted(digests)]
        return [AdapterEnd(first.number, error=said, missing=all(end.missing for end in of_ranks.values())), *vain]
