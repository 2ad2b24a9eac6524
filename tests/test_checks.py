"""The least and the largest token id of short and of long lists, whatever they hold."""

from __future__ import annotations

import pytest

from pagerunner.types.checks import extremes


@pytest.mark.parametrize("count", [0, 1, 255, 256, 1000])
def test_of_token_ids(count: int) -> None:
    ids = [(index * 7919) % 100_003 + 3 for index in range(count)]
    assert extremes(ids) == (min(ids, default=0), max(ids, default=0))
    assert extremes(tuple(ids)) == extremes(dict.fromkeys(ids)) == extremes(ids)


@pytest.mark.parametrize("odd", [-1, 2**32 - 1, 2**32, 2**63, -(2**70), True, 3.5])
@pytest.mark.parametrize("count", [10, 300])
def test_of_what_no_token_id_is(odd: int, count: int) -> None:
    ids = [*range(5, count), odd]
    assert extremes(ids) == (min(ids), max(ids))
