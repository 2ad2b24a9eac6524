"""Mixtures of experts on a card, against their twins."""

from __future__ import annotations

import pytest
import torch

from pagerunner.ops.activation import SILU, GatedActivation
from pagerunner.ops.moe import moe_experts
from pagerunner.ops.routing import Routes, Routing, expert_logits, route
from pagerunner.ops.stored import Stored4, pack4

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda")


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Within what the dtype's rounding explains, by the norm of the difference."""
    limit = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}[got.dtype]
    assert (got.float() - want.float()).norm() <= limit * want.float().norm()


@pytest.mark.parametrize(
    ("routing", "experts", "bias"),
    [
        (Routing(8, normalise=True), 128, False),
        (Routing(10, normalise=True), 512, False),
        (Routing(6), 64, False),
        (Routing(8, "sigmoid", normalise=True, factor=2.5, groups=8, kept_groups=4), 256, True),
        (Routing(6, factor=16.0, groups=8, kept_groups=3), 160, False),
        (Routing(6, "sqrtsoftplus", normalise=True, factor=1.5), 256, True),
        (Routing(1, "sigmoid"), 16, False),
    ],
)
@pytest.mark.parametrize("tokens", [1, 3, 16, 64, 65, 1000])
def test_routes(routing, experts, bias, tokens):
    logits, biases = random(tokens, experts), random(experts) if bias else None
    got, want = route(logits, routing, biases), route.twin(logits, routing, biases)
    assert torch.equal(got.experts_TA.long(), want.experts_TA)
    torch.testing.assert_close(got.weights_TA, want.weights_TA, atol=1e-6, rtol=1e-4)
    assert torch.equal(got.order_P.long(), want.experts_TA.flatten().argsort(stable=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 7, 64, 300])
def test_logits(tokens, dtype):
    x, weight, bias = random(tokens, 2880).to(dtype), random(32, 2880).to(dtype), random(32).to(dtype)
    got, want = expert_logits(x, weight, bias), x.double() @ weight.double().T + bias.double()
    assert got.dtype == torch.float32
    assert (got - want).norm() <= 1e-5 * want.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, 64, 1500])
@pytest.mark.parametrize("activation", [SILU, GatedActivation("clamped_swiglu", 1.0)])
@pytest.mark.parametrize(("features", "inner"), [(512, 256), (576, 352)])
def test_experts(tokens, dtype, activation, features, inner):
    x, gate_up = random(tokens, features).to(dtype), (random(48, 2 * inner, features) * 0.05).to(dtype)
    down, residual = (random(48, features, inner) * 0.05).to(dtype), random(tokens, features).to(dtype)
    biases = random(48, 2 * inner).to(dtype), random(48, features).to(dtype)
    routes = route(random(tokens, 48), Routing(8, normalise=True))
    got, want = residual.clone(), residual.clone()
    moe_experts(x, routes, gate_up, down, activation, *biases, residual_TD=got)
    moe_experts.twin(x, routes, gate_up, down, activation, *biases, residual_TD=want)
    close(got - residual, want - residual)


def nibbles(form: str, outputs: int, inputs: int) -> Stored4:
    """Random 4-bit matrices of 24 experts, whose numbers are about as large as weights are."""
    codes = pack4(torch.randint(0, 16, (24, outputs, inputs), dtype=torch.uint8, device="cuda"))
    group = {"mxfp4": 32, "nvfp4": 16, "int4 f16 64 zeros": 64, "int4 f16 all": inputs}.get(form, 32)
    shape = 24, outputs, inputs // group
    if form == "mxfp4":
        return Stored4(codes, torch.randint(118, 123, shape, dtype=torch.uint8, device="cuda"), group, "e2m1")
    scales = torch.rand(shape, device="cuda") * 0.02 + 0.001
    if form == "nvfp4":
        rows = torch.rand(24, outputs, device="cuda") * 0.02
        return Stored4(codes, (scales * 50).to(torch.float8_e4m3fn), group, "e2m1", rows=rows)
    zeros = torch.randint(0, 16, shape, dtype=torch.uint8, device="cuda") if "zeros" in form else None
    return Stored4(codes, scales.to(torch.float16 if "f16" in form else torch.bfloat16), group, "int4", zeros)


@pytest.mark.parametrize(
    "form", ["mxfp4", "nvfp4", "int4 bf16 32", "int4 bf16 32 zeros", "int4 f16 64 zeros", "int4 f16 all"]
)
@pytest.mark.parametrize("tokens", [1, 2, 60, 130, 500])
@pytest.mark.parametrize("activation", [SILU, GatedActivation("clamped_swiglu", 1.0)])
def test_experts_of_4_bits(form, tokens, activation):
    features, inner = (576, 320) if "64" in form else (608, 352)
    gate_up, down = nibbles(form, 2 * inner, features), nibbles(form, features, inner)
    x, residual = random(tokens, features).bfloat16(), random(tokens, features).bfloat16()
    biases = random(24, 2 * inner).bfloat16(), random(24, features).bfloat16()
    routes = route(random(tokens, 24), Routing(4, normalise=True))
    got, want = residual.clone(), residual.clone()
    moe_experts(x, routes, gate_up, down, activation, *biases, residual_TD=got)
    moe_experts.twin(x, routes, gate_up, down, activation, *biases, residual_TD=want)
    close(got - residual, want - residual)


def test_experts_in_a_graph_follow_the_routing():
    x, gate_up, down = random(9, 256), random(16, 256, 256) * 0.05, random(16, 256, 128) * 0.05
    logits, routing = random(9, 16), Routing(4, normalise=True)
    moe_experts(x, route(logits, routing), gate_up, down, SILU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe_experts(x, route(logits, routing), gate_up, down, SILU)
    logits.copy_(random(9, 16))
    graph.replay()
    close(out, moe_experts.twin(x, route.twin(logits, routing), gate_up, down, SILU))


def test_a_token_is_the_same_alone_and_among_others():
    x, gate_up, down = random(40, 256).bfloat16(), random(16, 256, 256).bfloat16(), random(16, 256, 128).bfloat16()
    routes = route(random(40, 16), Routing(4))
    every = moe_experts(x, routes, gate_up, down, SILU)
    some = Routes(routes.weights_TA[8:24], routes.experts_TA[8:24])
    assert torch.equal(every[8:24], moe_experts(x[8:24], some, gate_up, down, SILU))
