"""Experts in MXFP4 of many pairs: the order of inputs, and tiles. Gluon has no interpreter: test_compiled.py compiles the kernel, `tests/gpu` runs it."""

from __future__ import annotations

import pytest
import torch

from pagerunner.ops.activation import SILU
from pagerunner.ops.kernels.launch import blocks, padded
from pagerunner.ops.kernels.moe import moe, moe_lanes, moe_streams
from pagerunner.ops.kernels.moe.moe_joint import most_tiles
from pagerunner.ops.kernels.moe.moe_routing import order_pairs
from pagerunner.ops.kernels.moe.moe_streams import PART_ROWS, serves_streams
from pagerunner.ops.moe import ExpertWeights
from pagerunner.ops.routing import Routes, Routing, route
from pagerunner.ops.stored import Stored4

kernels = moe_streams._kernels()


def arranged(tokens, experts, columns, size):
    """A kernel's inputs and tiles, and what they are made from."""
    x = torch.randn(tokens, columns).bfloat16()
    routes = route.twin(torch.randn(tokens, experts) + 2 * torch.randn(experts), Routing(3))
    experts_TA = routes.experts_TA.int()
    routes = Routes(routes.weights_TA, experts_TA, *order_pairs(experts_TA, experts))
    pairs, wide = tokens * 3, blocks(columns, 128) * 128
    out = torch.full((pairs, wide), torch.nan, dtype=x.dtype)
    tiles = torch.zeros(most_tiles(pairs, experts, size) + 1, 4, dtype=torch.int32)
    kernels.arrange_kernel[(pairs + 1, blocks(wide, 256))](
        x, routes.order_P, routes.starts_E1, out, tiles, tiles[-1], x.stride(0), 3, K=columns, WIDE=wide, E=experts, BE=padded(experts),
        BM=size, LIFTED=63, BLOCK=256, PDL=False,
    )  # fmt: skip
    return x, routes, out, tiles


@pytest.mark.parametrize("columns", [352, 64, 256])
def test_inputs_have_the_order_in_which_lanes_hold_weights(columns):
    x, routes, out, _ = arranged(5, 4, columns, 32)
    order = [
        first + lane * 32 + half * 16 + word * 4 + second * 2 + odd
        for first in range(0, columns, 128)
        for half in range(2)
        for word in range(4)
        for odd in range(2)
        for lane in range(4)
        for second in range(2)
    ]
    wide = torch.nn.functional.pad(x.float(), (0, out.shape[1] - columns)) * 2.0**63
    assert torch.equal(out.float(), wide[routes.order_P.long() // 3][:, order])
    places = kernels.place_of.fn(torch.arange(out.shape[1]))
    assert places[torch.tensor(order)].tolist() == list(range(out.shape[1]))


@pytest.mark.parametrize(("tokens", "size"), [(1, 32), (40, 32), (90, 16)])
def test_tiles_are_all_pairs_of_their_experts(tokens, size):
    _, routes, _, tiles = arranged(tokens, 5, 64, size)
    starts = routes.starts_E1.tolist()
    want = [
        [expert, first, min(starts[expert + 1] - first, size)]
        for expert in range(5)
        for first in range(starts[expert], starts[expert + 1], size)
    ]
    assert tiles[: int(tiles[-1, 0]), :3].tolist() == want


def test_only_known_forms_in_one_piece_are_served(monkeypatch):
    codes, scales = torch.zeros(2, 256, 64, dtype=torch.uint8), torch.zeros(2, 256, 4, dtype=torch.uint8)
    whole, cut = Stored4(codes, scales, 32, "e2m1"), Stored4(codes[:, :, :32], scales[:, :, :2], 32, "e2m1")
    assert not serves_streams(whole)  # not on a card
    monkeypatch.setattr(moe_streams, "has_gluon", lambda device: True)
    assert serves_streams(whole) and not serves_streams(cut)
    int4 = Stored4(codes, torch.zeros(2, 256, 1, dtype=torch.bfloat16), 128, "int4")
    assert serves_streams(int4) and serves_streams(int4._replace(scales=scales.bfloat16(), group=32))
    assert not serves_streams(int4._replace(scales=int4.scales.half()))  # which bfloat16 doesn't hold
    assert not serves_streams(int4._replace(zeros=torch.zeros(2, 256, 1, dtype=torch.uint8)))
    assert not serves_streams(int4._replace(codes=codes[:, :, :48].contiguous()))  # 96 columns
    nvfp4 = Stored4(codes, torch.zeros(2, 256, 8).to(torch.float8_e4m3fn), 16, "e2m1", rows=torch.ones(2, 256))
    assert serves_streams(nvfp4) and not serves_streams(nvfp4._replace(numbers="int4"))


def test_experts_of_one_part_are_left_to_other_kernels(monkeypatch):
    """The compiler of Triton 3.6 fails where a place's part is always the first one. tests/helpers/compiled.py has the least that it compiles."""
    assert PART_ROWS == 64 * kernels.C.value
    monkeypatch.setattr(moe_streams, "has_gluon", lambda device: True)
    rows = [
        Stored4(torch.zeros(2, rows, 64, dtype=torch.uint8), torch.zeros(2, rows, 4, dtype=torch.uint8), 32, "e2m1")
        for rows in (192, 224)
    ]
    assert [serves_streams(weights) for weights in rows] == [False, True]


@pytest.mark.parametrize(
    ("each", "served"),
    [(14, "lanes"), (15, (32, 64)), (96, (32, 64)), (97, (128,)), (700, (128,)), (701, "unpacked")],
)
def test_pairs_of_an_expert_decide_which_kernel_serves(each, served, monkeypatch):
    """Inputs of a tile are copied 16 pairs at a time, so its widths are multiples of 16."""
    seen = []
    for name in ("lanes", "unpacked", "codes"):
        monkeypatch.setattr(moe, name + "_products", lambda *args, name=name, **own: seen.append(name))
    monkeypatch.setattr(moe, "streams_products", lambda *args, config, **own: seen.append(config.widths))
    for module in (moe_lanes, moe_streams):
        monkeypatch.setattr(module, "has_gluon", lambda device: True)
    gate_up, down = (
        Stored4(
            torch.zeros(4, outputs, 64, dtype=torch.uint8), torch.zeros(4, outputs, 4, dtype=torch.uint8), 32, "e2m1"
        )
        for outputs in (256, 224)
    )
    routes = Routes(
        torch.zeros(each, 4), torch.zeros(each, 4, dtype=torch.int32), torch.zeros(4 * each, dtype=torch.int32)
    )
    moe._products(torch.zeros(each, 128).bfloat16(), routes, ExpertWeights(gate_up, down, SILU))
    assert seen == [served]
