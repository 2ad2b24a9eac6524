"""Penalties of rows, gathered or in place, with drafts before them."""

from __future__ import annotations

import pytest

from helpers.penalty_cases import check_penalties
from pagerunner.ops.penalties import penalized


@pytest.mark.parametrize("run", [penalized.twin, penalized.kernel])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(("vocab", "gathered"), [(37, True), (2500, True), (2500, False)])
def test_penalties(run, drafts, vocab, gathered):
    check_penalties(run, vocab, drafts, gathered=gathered)
