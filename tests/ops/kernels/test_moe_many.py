"""The experts' products of many tokens against their twins, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from helpers.borders import set_borders
from helpers.stored_cases import dequantized
from pagerunner.ops.activation import SILU, GatedActivation
from pagerunner.ops.kernels.moe import moe, moe_many, moe_unpacked
from pagerunner.ops.kernels.moe.moe_many import ManyConfig, many_product
from pagerunner.ops.moe import ExpertWeights, fixed_pairs, moe_experts
from pagerunner.ops.quantize import quantize
from pagerunner.ops.routing import Routes, Routing, route
from pagerunner.ops.stored import Stored4, Stored8, dense, pack4


@pytest.mark.parametrize("activation", [SILU, GatedActivation("clamped_swiglu", 2.0)])
@pytest.mark.parametrize(("tokens", "features", "inner"), [(9, 128, 192), (150, 64, 64)])
def test_dense_halves(activation, tokens, features, inner, monkeypatch):
    set_borders(monkeypatch, "experts", few_plain=1)
    torch.manual_seed(tokens)
    gate_up, down = torch.randn(5, 2 * inner, features).half() / 8, torch.randn(5, features, inner).half() / 8
    biases = torch.randn(5, 2 * inner).half(), torch.randn(5, features).half()
    x, residual = torch.randn(tokens, features).half(), torch.randn(tokens, features).half()
    routes = route.twin(torch.randn(tokens, 5) + torch.tensor([3.0, 0, 0, 0, -9]), Routing(2, normalise=True))
    got, want = residual.clone(), residual.clone()
    for op, out in ((moe_experts.kernel, got), (moe_experts.twin, want)):
        op(x, routes, ExpertWeights(gate_up, down, activation, *biases), residual_TD=out)
    assert (got - want).float().norm() < 3e-3 * want.float().norm()


@pytest.mark.parametrize("activation", [None, SILU, GatedActivation("clamped_swiglu", 2.0)])
def test_the_last_tile_of_an_expert_may_be_half_as_high(activation):
    torch.manual_seed(0)
    experts_TA = torch.tensor(
        [[0, 1]] * 64 + [[0, 2]] * 65 + [[0, 4]] * 9, dtype=torch.int32
    )  # 138, 64, 65, none and 9
    routes = moe._ordered(Routes(torch.rand(138, 2), experts_TA), 5)
    x = torch.randn(138 if activation else 276, 64).half()
    weights = torch.randn(5, 64, 64).half() / 8
    own = x, weights, None, routes, activation
    got, want = (
        many_product(*own, weigh=True, config=ManyConfig(pairs, 32, 64, 4, 3, 1)).float() for pairs in (128, 16)
    )
    assert (got - want).norm() < 1e-3 * want.norm()


@pytest.mark.parametrize("block", [(1, 256), (128, 128), (1, 128)])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("first", "outputs"), [(False, 192), (True, 192), (True, 256)])
def test_rounded_inputs(block, grouped, first, outputs):
    """Of 192 gates and ups a tile's ups have two scales in a step, of 256 they have one."""
    torch.manual_seed(0)
    experts, tokens, inputs = 3, 20, 256
    codes = torch.randn(experts, outputs, inputs).to(torch.float8_e4m3fn)
    scales = torch.rand(experts, -(-outputs // block[0]), -(-inputs // block[1]))
    stored = Stored8(codes, scales, block, "token")
    routes = route.kernel(torch.randn(tokens, experts), Routing(2))
    x = quantize.twin(torch.randn(tokens if first else 2 * tokens, inputs), torch.float8_e4m3fn, grouped=grouped)
    activation = SILU if first else None
    config = ManyConfig(16, 32, 128, 4, 3, 1)
    got = many_product(x, stored, None, routes, activation, weigh=not first, dtype=torch.float32, config=config)
    wide = dequantized(x)
    full = (
        scales.repeat_interleave(block[0], 1)[:, :outputs].repeat_interleave(block[1], 2)[:, :, :inputs] * codes.float()
    )
    expert_P = routes.experts_TA.flatten()[routes.order_P]
    rows = wide[routes.order_P // 2] if first else wide
    want = torch.einsum("pi,poi->po", rows, full[expert_P])
    if first:
        want = SILU(want)
    else:
        want = (want * routes.weights_TA.flatten()[routes.order_P].unsqueeze(1))[routes.order_P.argsort()]
    torch.testing.assert_close(got, want, atol=1e-3 * float(want.abs().max()), rtol=1e-3)


def test_matrices_of_8_bits_round_their_inputs_where_they_say_so(monkeypatch):
    set_borders(monkeypatch, "experts", few=1)
    torch.manual_seed(0)
    x, routes = torch.randn(40, 128).half(), route.twin(torch.randn(40, 3), Routing(2, normalise=True))
    gate_up = Stored8(torch.randn(3, 256, 128).to(torch.float8_e4m3fn), torch.rand(3, 256, 1) / 8, (1, 128), "token")
    down = Stored8(torch.randn(3, 128, 128).to(torch.float8_e4m3fn), torch.rand(3, 128, 1) / 8, (1, 128), "token")
    want = moe_experts.twin(x.float(), routes, ExpertWeights(gate_up, down, SILU))
    plain = [weights._replace(activations="none") for weights in (gate_up, down)]
    exact, rounded = (
        moe_experts.kernel(x, routes, ExpertWeights(*own, SILU)).float() for own in (plain, (gate_up, down))
    )
    assert (exact - want).norm() < 3e-3 * want.norm()
    assert 3e-3 * want.norm() < (rounded - want).norm() < 6e-2 * want.norm()


@pytest.mark.parametrize("blocks", [False, True])
def test_stored_matrices_are_unpacked_some_experts_at_a_time(blocks, monkeypatch):
    set_borders(monkeypatch, "experts", few=1)
    set_borders(monkeypatch, "experts", unpacked=2)
    monkeypatch.setattr(moe_unpacked, "EXPERTS_BYTES", 0)
    torch.manual_seed(0)
    x, routes = torch.randn(30, 128).half(), route.twin(torch.randn(30, 6), Routing(3, normalise=True))
    block = (64, 128) if blocks else (1, 128)
    gate_up, down = (
        Stored8(torch.randn(6, outputs, 128).to(torch.float8_e4m3fn), torch.rand(6, outputs // block[0], 1) / 8, block)
        for outputs in (256, 128)
    )
    biases = torch.randn(6, 256).half(), torch.randn(6, 128).half()
    got = moe_experts.kernel(x, routes, ExpertWeights(gate_up, down, SILU, *biases)).float()
    want = moe_experts.twin(x.float(), routes, ExpertWeights(gate_up, down, SILU, *(bias.float() for bias in biases)))
    assert (got - want).norm() < 3e-3 * want.norm()
    if blocks:
        return
    codes = pack4(torch.randint(0, 16, (6, 256, 128), dtype=torch.uint8))
    gate_up = Stored4(codes, torch.randint(120, 126, (6, 256, 4), dtype=torch.uint8), 32, "e2m1")
    got = moe_experts.kernel(x, routes, ExpertWeights(gate_up, down, GatedActivation("clamped_swiglu", 2.0))).float()
    want = moe_experts.twin(x.float(), routes, ExpertWeights(gate_up, down, GatedActivation("clamped_swiglu", 2.0)))
    assert (got - want).norm() < 3e-3 * want.norm()


def test_two_rooms_for_unpacked_experts_take_turns(monkeypatch):
    monkeypatch.setattr(moe_unpacked, "EXPERTS_BYTES", 8 * 64 * 64 * 2)
    torch.manual_seed(0)
    codes = pack4(torch.randint(0, 16, (10, 64, 64), dtype=torch.uint8))
    weights = Stored4(codes, torch.randint(120, 126, (10, 64, 2), dtype=torch.uint8), 32, "e2m1")
    assert moe_unpacked.experts_at_once(weights, 2, moe_unpacked.EXPERTS_BYTES) == (4, 2)
    x, bias = torch.randn(30, 64).half(), torch.randn(10, 64).half()
    routes = route.kernel(torch.randn(30, 10), Routing(3))
    got = moe_unpacked.unpacked_products(x, [moe_unpacked.UnpackedProduct(weights, bias, False, SILU)], routes)
    want = many_product(x, dense(weights, torch.float16), bias, routes, SILU, weigh=False)
    assert torch.equal(got, want)


@pytest.mark.parametrize("biases", [False, True])
def test_both_products_are_unpacked_in_two_lanes(biases, monkeypatch):
    set_borders(monkeypatch, "experts", codes=0)
    set_borders(monkeypatch, "experts", unpacked=2)
    monkeypatch.setattr(moe_unpacked, "EXPERTS_BYTES", 8 * 128 * 64 * 2)
    torch.manual_seed(0)
    gate_up, down = (in_4_bits(18, outputs, 64) for outputs in (128, 64))
    parts = moe_unpacked._parts((gate_up, down), 2)
    assert [(part.product, part.lane, part.some.start, part.some.stop) for part in parts] == [
        (0, 0, 0, 1), (0, 1, 1, 5), (0, 0, 5, 9), (0, 1, 9, 13), (0, 0, 13, 17), (0, 1, 17, 18), (1, 0, 0, 8), (1, 1, 8, 16), (1, 0, 16, 18),
    ]  # fmt: skip
    own = (torch.randn(18, 128).half(), torch.randn(18, 64).half()) if biases else ()
    x, routes = torch.randn(40, 64).half(), route.twin(torch.randn(40, 18), Routing(3, normalise=True))
    got = moe_experts.kernel(x, routes, ExpertWeights(gate_up, down, SILU, *own)).float()
    want = moe_experts.twin(x.float(), routes, ExpertWeights(gate_up, down, SILU, *(bias.float() for bias in own)))
    assert (got - want).norm() < 3e-3 * want.norm()


def test_matrices_of_4_bits_and_of_8_share_rooms_that_hold_the_larger(monkeypatch):
    set_borders(monkeypatch, "experts", codes=0)
    set_borders(monkeypatch, "experts", unpacked=2)
    monkeypatch.setattr(moe_unpacked, "EXPERTS_BYTES", 8 * 128 * 64 * 2)
    torch.manual_seed(0)
    gate_up = in_4_bits(10, 128, 64)
    down = Stored8(torch.randn(10, 64, 64).to(torch.float8_e4m3fn), torch.rand(10, 64, 1) / 8, (1, 64))
    assert moe_unpacked.rooms_of((gate_up, down), 2, moe_unpacked.EXPERTS_BYTES) == (2, 10 * 64 * 64)
    x, routes = torch.randn(40, 64).half(), route.twin(torch.randn(40, 10), Routing(3, normalise=True))
    got = moe_experts.kernel(x, routes, ExpertWeights(gate_up, down, SILU)).float()
    want = moe_experts.twin(x.float(), routes, ExpertWeights(gate_up, down, SILU))
    assert (got - want).norm() < 3e-3 * want.norm()


def in_4_bits(experts: int, outputs: int, inputs: int) -> Stored4:
    codes = pack4(torch.randint(0, 16, (experts, outputs, inputs), dtype=torch.uint8))
    return Stored4(codes, torch.randint(120, 124, (experts, outputs, inputs // 32), dtype=torch.uint8), 32, "e2m1")


def test_lanes_beside_different_streams_and_on_different_devices_have_streams_of_their_own(monkeypatch):
    class Stream:
        def __init__(self, device):
            self.device, self.cuda_stream = device, id(self)

    mains = {torch.device("cuda", index): [Stream(index), Stream(index)] for index in range(2)}
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    found = []
    for capturing in (0, 1, 0):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, capturing=capturing: mains[device][capturing])
        found += [moe_unpacked._streams(device, 2)[1] for device in mains]
    assert [stream.device.index for stream in found] == [0, 1] * 3
    assert len(set(found)) == 4 and found[:2] == found[4:]


@pytest.mark.parametrize(("dtype", "features"), [(torch.float16, 64), (torch.float32, 48)])
@pytest.mark.parametrize("activation", [SILU, GatedActivation("clamped_swiglu", 2.0)])
def test_a_token_has_the_same_bits_in_every_step(dtype, features, activation):
    """One token, some, and so many that an expert's pairs are several tiles; with padding, and with weights of inputs."""
    torch.manual_seed(3)
    gate_up, down = torch.randn(5, 128, features).to(dtype) / 8, torch.randn(5, features, 64).to(dtype) / 8
    biases = torch.randn(5, 128).to(dtype), torch.randn(5, features).to(dtype)
    x, router = torch.randn(300, features).to(dtype), torch.randn(5, features).to(dtype)
    logits = x.float() @ router.float().T
    for weigh_inputs in (False, True):
        whole = None
        for tokens in (300, 130, 17, 3, 1):
            rows = torch.where(torch.arange(tokens) % 7 == 6, -1, 1).int()
            routes = route.kernel(logits[:tokens], Routing(2, normalise=True), row_T=rows, fixed=True)
            own = gate_up, down, activation, *biases
            got = fixed_pairs.kernel(x[:tokens], routes, ExpertWeights(*own, weigh_inputs=weigh_inputs))
            there = (routes.experts_TA >= 0).flatten()
            if whole is None:
                whole = routes, got
                want = fixed_pairs.twin(x, routes, ExpertWeights(*own, weigh_inputs=weigh_inputs))
                assert (got - want)[there].float().norm() < 3e-3 * want[there].float().norm()
            assert torch.equal(routes.weights_TA, whole[0].weights_TA[:tokens])
            assert torch.equal(routes.experts_TA, whole[0].experts_TA[:tokens])
            assert torch.equal(got[there], whole[1][: 2 * tokens][there])


@pytest.mark.parametrize(
    ("block", "outputs", "activation", "small"),
    [
        ((128, 128), 256, SILU, True),
        ((128, 128), 192, None, True),
        ((128, 128), 192, SILU, False),
        ((128, 128), 256, GatedActivation("clamped_swiglu", 7.0), False),
        ((1, 128), 256, SILU, False),
    ],
)
def test_tiles_with_one_scale_a_step_are_small(block, outputs, activation, small, monkeypatch):
    """Ups of 192 begin within a block, and gates and ups in turns are 256 rows of a tile."""
    seen, config = [], moe_many.many_config
    monkeypatch.setattr(
        moe_many, "many_config", lambda *own: seen.append(config(*own)) or ManyConfig(16, 32, 128, 4, 3, 1)
    )
    routes = route.kernel(torch.randn(9, 3), Routing(2))
    x = quantize.twin(torch.randn(9 if activation else 18, 128), torch.float8_e4m3fn, grouped=True)
    stored = Stored8(
        torch.randn(3, outputs, 128).to(torch.float8_e4m3fn), torch.rand(3, -(-outputs // block[0]), 1), block, "block"
    )
    many_product(x, stored, None, routes, activation, weigh=False, dtype=torch.bfloat16)
    assert (seen[0].warps == 8) == small
