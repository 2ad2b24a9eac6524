"""Copies of one step: divided so that order doesn't matter within a launch, in little time."""

from __future__ import annotations

import random
import time

import pytest

from pagerunner.runner.copy_launches import Copy, copy_launches


def meet(first: int, first_size: int, second: int, second_size: int) -> bool:
    return first < second + second_size and second < first + first_size


def depends(new: Copy, old: Copy) -> bool:
    source, target, size = new
    old_source, old_target, old_size = old
    return (
        meet(source, size, old_target, old_size)
        or meet(target, size, old_source, old_size)
        or meet(target, size, old_target, old_size)
    )


def by_pairs(copies: list[Copy]) -> list[list[Copy]]:
    launches: list[list[Copy]] = []
    for copy in copies:
        if not launches or any(depends(copy, old) for old in launches[-1]):
            launches.append([])
        launches[-1].append(copy)
    return launches


@pytest.mark.parametrize("seed", range(40))
def test_the_same_launches_as_by_comparing_all_pairs(seed: int) -> None:
    generator = random.Random(seed)
    places, sizes = generator.choice([(40, (1, 3)), (400, (1, 5, 17)), (5000, (8,))])
    copies = [
        (generator.randrange(places), generator.randrange(places), generator.choice(sizes))
        for _ in range(generator.randrange(1, 120))
    ]
    assert copy_launches(copies) == by_pairs(copies)


def test_chains_and_reused_pages_are_in_order() -> None:
    assert copy_launches([]) == []
    assert copy_launches([(0, 10, 5), (20, 30, 5), (0, 40, 5)]) == [[(0, 10, 5), (20, 30, 5), (0, 40, 5)]]
    assert copy_launches([(0, 10, 5), (10, 20, 5)]) == [[(0, 10, 5)], [(10, 20, 5)]]
    assert copy_launches([(0, 10, 5), (20, 4, 5)]) == [[(0, 10, 5)], [(20, 4, 5)]]
    assert copy_launches([(0, 10, 5), (20, 5, 5)]) == [[(0, 10, 5), (20, 5, 5)]]


def test_twenty_thousand_copies_take_well_under_a_second() -> None:
    """Compared in pairs, 4,000 took 8.5 s."""
    copies = [((2 * i) << 20, (2 * i + 1) << 20, 1 << 20) for i in range(20_000)]
    random.Random(0).shuffle(copies)
    start = time.process_time()
    assert len(copy_launches(copies)) == 1
    assert time.process_time() - start < 1.0
