"""Grouped products, as far as they can be tested without a card. Gluon has no interpreter: test_compiled.py compiles the kernel, `tests/gpu` runs it."""

from __future__ import annotations

import pytest
import torch

from pagerunner.ops.kernels import moe
from pagerunner.ops.kernels.moe_piped import (
    COPY_REGISTERS,
    LAG,
    MULTIPLY_REGISTERS,
    ROWS,
    STAGES,
    row_blocks,
)
from pagerunner.ops.routing import Routes, Routing, route


@pytest.mark.parametrize(("tokens", "experts", "active"), [(300, 6, 3), (1, 5, 2), (700, 32, 4), (129, 3, 1)])
def test_blocks_of_rows_are_those_of_all_experts(tokens, experts, active):
    torch.manual_seed(0)
    routes = moe._ordered(route.kernel(torch.randn(tokens, experts), Routing(active)), experts)
    table, starts = row_blocks(routes)
    want, first = [], []
    pairs = routes.starts_E1.tolist()
    for expert in range(experts):
        begin, end = pairs[expert : expert + 2]
        first.append(len(want))
        want += [[expert, first[-1], begin, end]] * -(-(end - begin) // ROWS)
    assert starts.tolist() == [*first, len(want)] and len(want) <= len(table)
    assert table[: len(want)].tolist() == want


def test_blocks_of_rows_where_one_expert_has_all_pairs_and_others_none():
    starts = torch.tensor([0, 0, 1000, 1000], dtype=torch.int32)
    routes = Routes(
        torch.rand(1000, 1), torch.ones(1000, 1, dtype=torch.int32), torch.arange(1000, dtype=torch.int32), starts
    )
    table, first = row_blocks(routes)
    assert first.tolist() == [0, 0, 8, 8] and table[:8].tolist() == 8 * [[1, 0, 0, 1000]]


def test_registers_of_all_groups_are_those_that_a_program_has():
    assert 128 * (2 * MULTIPLY_REGISTERS + COPY_REGISTERS) <= 384 * 168 <= 65536
    assert 0 < LAG <= STAGES - 2
