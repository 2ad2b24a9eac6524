"""Kernels that ranks need to gather logits of any number of rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from pagerunner.ops.linear import Norm
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
            end._run_units(Units(x, x, x, x, _unit(x)), {"NORM": 0})
        found.append(set(met))
    assert found[1] <= found[0]


def test_a_program_with_one_token_has_no_rounds_for_more() -> None:
    """A norm's units are tokens. Example: 64 of 4,096 on three ranks, a program each."""
    end, met = PeerSums(torch.zeros(3, dtype=torch.int64), 0), list[int]()

    class Launched:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda *_, UNITS, **__: met.append(UNITS)

    end._kernels = SimpleNamespace(peer_units=Launched())
    for tokens in (64, 512, 8192):
        x = torch.empty(tokens, 4096, dtype=torch.bfloat16)
        end.add_norm_(x, x, Norm(torch.empty(4096, dtype=torch.bfloat16), 1e-6))
    assert met == [1, 2, 4]
