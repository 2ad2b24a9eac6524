"""Which numbers of tokens a warm-up adds, so that every kernel is met."""

from __future__ import annotations

import random

from pagerunner.runner.kernel_counts import more_counts


def behind(*lasts: int):
    """Kernels that change behind these numbers of tokens."""
    return lambda tokens: sum(tokens > last for last in lasts)


def test_numbers_that_are_met_are_not_added():
    assert more_counts([behind(16, 1024, 2048), behind(1536)], [1, 272, 8192], 8192) == [2048]
    assert more_counts([behind(16)], [1, 272], 8192) == []
    assert more_counts([], [1], 8192) == []
    assert more_counts([lambda tokens: 0], [], 8192) == [8192]


def test_one_number_serves_all_that_it_can():
    kernels = [behind(16, 1024, 2048), behind(1536, 4096), behind(1000, 1600)]
    assert more_counts(kernels, [1, 8192], 8192) == [1024, 2048]
    assert more_counts([behind(3, 6)], [1, 9], 9) == [6]
    assert more_counts([behind(3, 60)], [1], 9) == [9]


def test_every_kernel_is_met_by_no_more_numbers_than_there_are_kernels():
    draw = random.Random(5)
    for _ in range(50):
        kernels = [behind(*draw.sample(range(1, 300), draw.randint(0, 4))) for _ in range(3)]
        met = set(draw.sample(range(1, 301), 2))
        more = more_counts(kernels, met, 300)
        assert not met & set(more) and len(more) <= 15
        for one in kernels:
            assert {one(tokens) for tokens in range(1, 301)} == {one(tokens) for tokens in met | set(more)}
