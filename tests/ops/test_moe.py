"""Experts against each token's experts written out one by one, and routing by its definition."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pagerunner.ops.activation import SILU, GatedActivation, clamped_swiglu, silu_and_mul
from pagerunner.ops.moe import ExpertWeights, moe_experts
from pagerunner.ops.routing import Routes, Routing, expert_logits, route, touched_experts
from pagerunner.ops.stored import Stored8


@pytest.mark.parametrize("tokens", [1, 2, 40])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("weigh_inputs", [False, True])
def test_a_token_gets_the_weighted_sum_of_its_experts(tokens: int, biases: bool, weigh_inputs: bool) -> None:
    torch.manual_seed(tokens)
    x, gate_up, down = torch.randn(tokens, 8), torch.randn(5, 6, 8), torch.randn(5, 8, 3)
    gate_up_bias, down_bias = (torch.randn(5, 6), torch.randn(5, 8)) if biases else (None, None)
    routes = route(torch.randn(tokens, 5), Routing(2, normalise=True))
    residual = torch.randn(tokens, 8)
    experts = ExpertWeights(gate_up, down, SILU, gate_up_bias, down_bias, weigh_inputs)
    got, added = moe_experts(x, routes, experts), residual.clone()
    assert moe_experts(x, routes, experts, added) is added
    torch.testing.assert_close(added, residual + got)
    for t in range(tokens):
        want = torch.zeros(8)
        for weight, e in zip(routes.weights_TA[t], routes.experts_TA[t].tolist(), strict=True):
            before, after = (weight, 1.0) if weigh_inputs else (1.0, weight)
            inner = silu_and_mul(gate_up[e] @ (x[t] * before) + (gate_up_bias[e] if gate_up_bias is not None else 0))
            want += after * (down[e] @ inner + (down_bias[e] if down_bias is not None else 0))
        torch.testing.assert_close(got[t], want, atol=1e-5, rtol=1e-5)


def test_stored_experts_are_what_they_stand_for() -> None:
    torch.manual_seed(0)
    codes = torch.randn(3, 6, 8).to(torch.float8_e4m3fn)
    stored = Stored8(codes, torch.rand(3, 6, 1), (1, 8))
    x, down, routes = torch.randn(4, 8), torch.randn(3, 8, 3), route(torch.randn(4, 3), Routing(2))
    want = moe_experts(x, routes, ExpertWeights(codes.float() * stored.scales, down, SILU))
    torch.testing.assert_close(moe_experts(x, routes, ExpertWeights(stored, down, SILU)), want)


def test_experts_that_nobody_chose_are_not_read() -> None:
    gate_up, down = torch.full((4, 2, 3), float("nan")), torch.full((4, 3, 1), float("nan"))
    gate_up[2], down[2] = 1.0, 1.0
    routes = Routes(torch.ones(3, 1), torch.full((3, 1), 2))
    assert moe_experts(torch.ones(3, 3), routes, ExpertWeights(gate_up, down, SILU)).isfinite().all()


def test_softmax_routing() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
    routes = route(logits, Routing(2, factor=3.0))
    assert routes.experts_TA.tolist() == [[1, 2]]
    torch.testing.assert_close(routes.weights_TA, 3 * logits.softmax(-1)[:, [1, 2]])
    normalised = route(logits, Routing(2, normalise=True)).weights_TA
    torch.testing.assert_close(normalised, logits[:, [1, 2]].softmax(-1))


def test_a_bias_counts_for_the_choice_alone() -> None:
    logits, bias = torch.tensor([[0.0, 1.0, 2.0, -1.0]]), torch.tensor([0.0, 0.0, -9.0, 9.0])
    for kind, score in (("sigmoid", torch.sigmoid), ("sqrtsoftplus", lambda x: F.softplus(x).sqrt())):
        routes = route(logits, Routing(2, kind), bias)
        assert routes.experts_TA.tolist() == [[3, 1]]
        torch.testing.assert_close(routes.weights_TA, score(logits[:, [3, 1]]))
        normalised = route(logits, Routing(2, kind, normalise=True, factor=2.5), bias).weights_TA
        torch.testing.assert_close(normalised.sum(), torch.tensor(2.5))


def test_groups_count_with_their_best_expert_or_with_their_two_best_ones() -> None:
    logits = torch.tensor([[5.0, -9.0, 4.0, 3.0, 0.0, 1.0]])
    routing = Routing(2, groups=3, kept_groups=1)
    assert route(logits, routing).experts_TA.tolist() == [[0, 1]]
    assert route(logits, routing._replace(scores="sigmoid"), torch.zeros(6)).experts_TA.tolist() == [[2, 3]]


def test_experts_that_are_given_are_only_weighted() -> None:
    logits, chosen = torch.randn(2, 4), torch.tensor([[3, 0], [1, 1]])
    routes = route(logits, Routing(2, "sigmoid"), None, chosen)
    assert routes.experts_TA is chosen
    torch.testing.assert_close(routes.weights_TA, logits.sigmoid().gather(1, chosen))


def test_logits_are_float32() -> None:
    x, weight, bias = torch.randn(2, 8).bfloat16(), torch.randn(3, 8).bfloat16(), torch.randn(3).bfloat16()
    want = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(expert_logits(x, weight, bias).double(), want, atol=1e-5, rtol=1e-5)


def test_the_clamped_activation() -> None:
    gate, up = torch.tensor([9.0, -9.0, 1.0]), torch.tensor([9.0, -9.0, 0.5])
    got = clamped_swiglu(torch.stack((gate, up), -1).flatten(), limit=7.0)
    torch.testing.assert_close(GatedActivation("clamped_swiglu", 7.0)(torch.stack((gate, up), -1).flatten()), got)
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    torch.testing.assert_close(got, gate * torch.sigmoid(1.702 * gate) * (up + 1))


def test_experts_are_counted_in_inference_mode_and_outside_of_it():
    touched_experts.cache_clear()
    with torch.inference_mode():
        touched_experts(torch.device("cpu")).add_(1)
    assert touched_experts(torch.device("cpu")).add_(1).tolist() == [2, 2]
