"""Experts against each token's experts written out one by one."""

from __future__ import annotations

import pytest
import torch

from pagerunner.ops.activation import clamped_swiglu, silu_and_mul
from pagerunner.ops.moe import moe_experts, route_softmax_topk, route_topk_softmax


@pytest.mark.parametrize("tokens", [1, 2, 40])
@pytest.mark.parametrize("biases", [False, True])
def test_a_token_gets_the_weighted_sum_of_its_experts(tokens: int, biases: bool) -> None:
    torch.manual_seed(tokens)
    x, gate_up, down = torch.randn(tokens, 8), torch.randn(5, 6, 8), torch.randn(5, 8, 3)
    gate_up_bias, down_bias = (torch.randn(5, 6), torch.randn(5, 8)) if biases else (None, None)
    weights, experts = route_softmax_topk(torch.randn(tokens, 5), 2, normalise=True)
    got = moe_experts(x, weights, experts, gate_up, down, silu_and_mul, gate_up_bias, down_bias)
    for t in range(tokens):
        want = torch.zeros(8)
        for weight, e in zip(weights[t], experts[t].tolist(), strict=True):
            inner = silu_and_mul(gate_up[e] @ x[t] + (gate_up_bias[e] if gate_up_bias is not None else 0))
            want += weight * (down[e] @ inner + (down_bias[e] if down_bias is not None else 0))
        torch.testing.assert_close(got[t], want, atol=1e-5, rtol=1e-5)


def test_experts_that_nobody_chose_are_not_read() -> None:
    gate_up, down = torch.full((4, 2, 3), float("nan")), torch.full((4, 3, 1), float("nan"))
    gate_up[2], down[2] = 1.0, 1.0
    out = moe_experts(torch.ones(3, 3), torch.ones(3, 1), torch.full((3, 1), 2), gate_up, down, silu_and_mul)
    assert out.isfinite().all()


def test_routers() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
    weights, experts = route_softmax_topk(logits, 2, normalise=False)
    assert experts.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, logits.softmax(-1)[:, [1, 2]])
    normalised, _ = route_softmax_topk(logits, 2, normalise=True)
    torch.testing.assert_close(normalised, route_topk_softmax(logits, 2)[0])


def test_the_clamped_activation() -> None:
    gate, up = torch.tensor([9.0, -9.0, 1.0]), torch.tensor([9.0, -9.0, 0.5])
    got = clamped_swiglu(torch.stack((gate, up), -1).flatten(), limit=7.0)
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    torch.testing.assert_close(got, gate * torch.sigmoid(1.702 * gate) * (up + 1))
