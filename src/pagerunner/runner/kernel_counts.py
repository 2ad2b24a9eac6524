"""Numbers of tokens that a warm-up has to run, so that every kernel is compiled before the first request."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

KernelsOf = Callable[[int], Hashable]
"""Says which kernels a number of tokens needs: something that is equal for two numbers if these need the same kernels. Between two such
numbers there are no others. Example: `lambda tokens: tokens <= 16`."""


def more_counts(kernels: Sequence[KernelsOf], met: Iterable[int], most: int) -> list[int]:
    """The fewest numbers of tokens up to `most` that must be run besides those that are `met`, for all kernels of all `kernels`.

    Example: kernels that change behind 16, 1024 and 2048 tokens, and others that change behind 1536. With 1, 272 and 8192 met, there are
    1025 to 2048 left of the first ones, and nothing of the second ones. The answer is [2048].
    """
    found = sorted(met)
    for last, first in sorted({(last, first) for one in kernels for first, last in _runs(one, most)}):
        place = bisect_left(found, first)
        if place == len(found) or found[place] > last:
            found.insert(place, last)
    return sorted(set(found) - set(met))


def _runs(kernels: KernelsOf, most: int) -> Iterator[tuple[int, int]]:
    """First and last of all numbers up to `most` that need the same kernels."""
    first = 1
    while first <= most:
        own = kernels(first)
        last = first - 1 + bisect_left(range(first, most + 1), True, key=lambda tokens: kernels(tokens) != own)  # noqa: B023
        yield first, last
        first = last + 1
