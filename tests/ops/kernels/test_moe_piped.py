"""Grouped products, as far as they can be tested without a card. Gluon has no interpreter: test_compiled.py compiles the kernel, `tests/gpu` runs it."""

from __future__ import annotations

import pytest
import torch

from pagerunner.ops.activation import SILU, GatedActivation
from pagerunner.ops.kernels.moe import moe, moe_piped
from pagerunner.ops.kernels.moe.moe_piped import COPY_REGISTERS, LAG, MULTIPLY_REGISTERS, ROWS, STAGES, row_blocks
from pagerunner.ops.moe import ExpertWeights
from pagerunner.ops.quantize import Quantized
from pagerunner.ops.routing import Routes, Routing, route
from pagerunner.ops.stored import Stored8


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


def blocks(experts: int, outputs: int, inputs: int, block: tuple[int, int] = (128, 128)) -> Stored8:
    codes = torch.zeros(experts, outputs, inputs, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return Stored8(codes, torch.ones(experts, -(-outputs // block[0]), -(-inputs // block[1])), block, "block")


def test_numbers_of_8_bits_are_served_where_a_tile_has_two_scales_a_step(monkeypatch):
    x, served = torch.zeros(2, 256).bfloat16(), blocks(2, 512, 256)
    assert not moe_piped.serves(x, served)  # not on a card
    monkeypatch.setattr(moe_piped, "has_gluon", lambda device: True)
    assert moe_piped.serves(x, served)
    assert not moe_piped.serves(x, served._replace(activations="none"))  # whose inputs stay as they are
    assert not moe_piped.serves(x, served._replace(codes=served.codes.view(torch.int8)))
    assert not moe_piped.serves(x, blocks(2, 384, 256)) and not moe_piped.serves(x, blocks(2, 512, 192))
    assert not moe_piped.serves(x, blocks(2, 512, 256, (1, 128)))


@pytest.mark.parametrize(
    ("each", "activation", "piped"),
    [(25, SILU, True), (24, SILU, False), (25, GatedActivation("clamped_swiglu", 7.0), False)],
)
def test_many_pairs_of_blocks_are_rounded_and_multiplied_by_it(each, activation, piped, monkeypatch):
    seen = []

    def product(x, weights, bias, routes, *own, dtype, **more):
        seen.append((isinstance(x, Quantized) and x.scales.shape[1], dtype))
        return torch.zeros(routes.order_P.shape[0], weights.shape[2] if len(seen) == 1 else 256, dtype=dtype)

    monkeypatch.setattr(moe_piped, "has_gluon", lambda device: True)
    monkeypatch.setattr(moe, "piped_product", product)
    monkeypatch.setattr(moe, "many_product", lambda *own, **more: torch.zeros(4 * each, 256).bfloat16())
    experts = torch.arange(4, dtype=torch.int32).repeat(each, 1)
    routes = moe._ordered(Routes(torch.ones(each, 4), experts), 4)
    moe._products(
        torch.randn(each, 256).bfloat16(), routes, ExpertWeights(blocks(4, 512, 256), blocks(4, 256, 256), activation)
    )
    assert seen == ([(2, torch.bfloat16)] * 2 if piped else [])
