"""The kernel of guesses, on the device."""

from __future__ import annotations

import pytest

from helpers.guess_cases import check_guesses
from pagerunner.ops.guesses import take_guesses


@pytest.mark.parametrize(("guesses", "width", "count"), [(1, 1, 1), (64, 12, 7), (256, 72, 24)])
def test_the_kernel_takes_what_the_twin_does(guesses: int, width: int, count: int) -> None:
    check_guesses(take_guesses, guesses, width, count, device="cuda")
