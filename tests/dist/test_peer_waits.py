"""Ranks in processes of their own wait for each other in our kernels: see `helpers/waiting_ranks.py`."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from helpers.effort import share_of_the_day
from helpers.patience import patient
from helpers.programs import run_python

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="is for Triton's interpreter")
MORE = [(3, 5, 8)[number] for number in share_of_the_day(3, 3)]
"""Numbers of ranks that add up by bare words, beside two."""


@pytest.fixture(scope="module")
def found() -> list[Any]:
    """Of words, of numbers with flags, and of bare words: what each rank got wrong, and the rounds that its programs counted."""
    code = "from helpers import waiting_ranks; waiting_ranks.main()"
    seconds = patient(30)
    done = run_python(code, [str(seconds), json.dumps(MORE)], dict(os.environ), timeout=2 * seconds + 30)
    assert done.returncode == 0, done.stderr
    result: list[Any] = json.loads(done.stdout)
    return result


def test_a_word_is_taken_when_it_is_of_the_round(found: list[Any]) -> None:
    """Rounds are counted in 32 bits, and -1 is followed by 2: a room that nobody has written is zero, and halves of a room take turns."""
    (wrong, counted), (others_wrong, others) = found[0]
    assert (wrong, others_wrong) == (0, 0)
    assert counted == others and min(counted[0]) >= 2
    assert counted[0][0] == 12, "-1, 2, 3, and so on: each round is in the half that the one before wasn't in"


def test_numbers_are_taken_behind_their_flag(found: list[Any]) -> None:
    """Around the round whose number has another sign."""
    (wrong, counted), (others_wrong, others) = found[1]
    assert (wrong, others_wrong) == (0, 0)
    assert counted == others and counted[0][0] < 0 < counted[0][1]


def test_a_bare_word_is_taken_when_it_is_there(found: list[Any]) -> None:
    """Once or in two rounds, of two ranks and of more. Numbers that are none are sent as others that are none, as the room's zeros mean that nothing has come."""
    assert [len(ranks) for ranks in found[2:]] == [2, *MORE], found
    for ranks in found[2:]:
        assert [wrong for wrong, _ in ranks] == [0] * len(ranks)
        counted = ranks[0][1]
        assert all(others == counted for _, others in ranks) and counted[0][0] < 0 < counted[0][1]
