"""Which slab size wastes least: a search over sizes that hold a whole number of some group's pages.

Pure arithmetic over page sizes and page counts; the planner turns the answer into a `MemoryPlan`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

MOST_PAGES = 32  # the most of the largest pages that a slab holds
_EXHAUSTIVE = 1_024  # up to so many sizes are all tried; of more, only sizes near a multiple of another group's page
_CLOSE_LOOK = 64  # the best sizes, and the smallest, are compared by what they hold

SlabCut = tuple[int, int]  # slab bytes, number of slabs


def cut_one_group(page_bytes: int, pages: int) -> SlabCut:
    """8 to 64 pages a slab, which gives long runs of adjacent pages, if such a number divides `pages`; otherwise one slab.

    No page is lost either way.
    """
    count = next((count for count in range(64, 7, -1) if pages % count == 0), max(pages, 1))
    return page_bytes * count, pages // count


def cut_groups(
    page_sizes: Sequence[int],
    *,
    budget_bytes: int,
    exact_pages: int | None,
    slabs_needed: Callable[[int], int],
    longest: Callable[[SlabCut], int],
) -> SlabCut:
    """The cut of several groups' memory that loses least and holds the wanted request.

    A cut's loss is a sum of three shares of the memory: the worst group's slab remainder, half a slab for each group (the half
    that is empty on average), and what the budget has left over. `exact_pages` asks for exactly that many of the largest pages,
    whatever their bytes. `slabs_needed(slab_bytes)` are the slabs of the wanted request. If the request fits in no cut, the cut
    with the greatest `longest` length is taken.
    """
    cuts = list(_cuts(page_sizes, budget_bytes, exact_pages))
    ranked = sorted(cuts, key=lambda cut: _loss(cut, page_sizes, budget_bytes, exact_pages is not None))
    # The same sizes whatever is wanted, so that the longest length and a given length agree.
    near = [*ranked[:_CLOSE_LOOK], *sorted(ranked[_CLOSE_LOOK:])[:_CLOSE_LOOK]]
    for cut in near:
        if slabs_needed(cut[0]) <= cut[1]:
            return cut
    return max(near, key=longest)


def _cuts(page_sizes: Sequence[int], budget_bytes: int, exact_pages: int | None) -> Iterator[SlabCut]:
    largest = max(page_sizes)
    for slab in _sizes(page_sizes):
        held = slab // largest
        if exact_pages is None:
            yield slab, budget_bytes // slab
        elif exact_pages % held == 0:
            yield slab, exact_pages // held


def _sizes(page_sizes: Sequence[int]) -> list[int]:
    """Slab sizes worth trying: whole numbers of one group's pages that hold at least one of each group's."""
    largest = max(page_sizes)
    most = MOST_PAGES * largest
    distinct = sorted(set(page_sizes), reverse=True)
    if sum(most // size for size in distinct) <= _EXHAUSTIVE:
        return sorted({count * size for size in distinct for count in range(-(-largest // size), most // size + 1)})
    sizes: set[int] = set()
    for other in distinct:
        for count in range(-(-largest // other), most // other + 1, max(1, most // other // _EXHAUSTIVE)):
            end = count * other
            sizes.add(end)
            sizes.update(-(-end // size) * size for size in distinct if size > other)
    for count in range(1, MOST_PAGES + 1):
        sizes.update(-(-count * largest // size) * size for size in distinct)
    return sorted(sizes)


def _loss(cut: SlabCut, page_sizes: Sequence[int], budget_bytes: int, exact: bool) -> float:
    slab, count = cut
    if not count:
        return 2.0
    total = slab * count if exact else budget_bytes
    remainder = max(slab % size for size in page_sizes) / slab
    return remainder + len(page_sizes) * slab / 2 / total + (total - slab * count) / total
