"""Kernels that ranks need to gather logits of any number of rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from pagerunner.ops.peer_sums import PeerSums, Units, _unit


@pytest.mark.parametrize("own_ids", [151_936 // 2, 32_000 // 2])
def test_no_number_of_rows_needs_a_kernel_that_one_row_and_most_rows_do_not(own_ids: int) -> None:
    """A warm-up has steps of these. Example: log-probabilities of 8 rows, of which whole logits are gathered."""
    end, met = PeerSums(torch.zeros(2, dtype=torch.int64), 0), set()

    class Launched:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda *_, W, UNITS, **__: met.add((W, UNITS))

    end._kernels = SimpleNamespace(peer_units=Launched())
    found = []
    for rows in ((1, 40), range(2, 40)):
        met.clear()
        for count in rows:
            x = torch.empty(count, own_ids)
            end._run_units(Units(x, x, x, x, _unit(x)), {})
        found.append(set(met))
    assert found[1] <= found[0]
