"""The kernel of guesses, in Triton's interpreter."""

from __future__ import annotations

import pytest

from helpers.guess_cases import check_guesses
from pagerunner.ops.guesses import take_guesses

pytest.importorskip("triton")


@pytest.mark.parametrize(("guesses", "width", "count"), [(1, 1, 1), (5, 4, 3), (17, 9, 8)])
def test_the_kernel_takes_what_the_twin_does(guesses: int, width: int, count: int) -> None:
    check_guesses(take_guesses.kernel, guesses, width, count)
