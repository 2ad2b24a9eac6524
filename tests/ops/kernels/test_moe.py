"""The grouped product of experts against its twin, in Triton's interpreter."""

from __future__ import annotations

import functools

import pytest
import torch

from pagerunner.ops.activation import clamped_swiglu, silu_and_mul
from pagerunner.ops.moe import moe_experts, route_softmax_topk


@pytest.mark.parametrize(("tokens", "experts", "active"), [(1, 3, 2), (5, 4, 1), (19, 3, 3), (40, 2, 2)])
@pytest.mark.parametrize("biases", [False, True])
def test_experts(tokens, experts, active, biases):
    torch.manual_seed(tokens)
    x, gate_up, down = torch.randn(tokens, 18), torch.randn(experts, 6, 18), torch.randn(experts, 18, 3)
    extra = (torch.randn(experts, 6), torch.randn(experts, 18)) if biases else (None, None)
    weights, chosen = route_softmax_topk(torch.randn(tokens, experts), active, normalise=True)
    activation = functools.partial(clamped_swiglu.twin, limit=2.0) if biases else silu_and_mul.twin
    got = moe_experts.kernel(x, weights, chosen, gate_up, down, activation, *extra)
    want = moe_experts.twin(x, weights, chosen, gate_up, down, activation, *extra)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_experts_that_nobody_chose_are_not_read_and_no_tokens_are_no_work():
    gate_up, down = torch.full((4, 2, 3), float("nan")), torch.full((4, 3, 1), float("nan"))
    gate_up[2], down[2] = 1.0, 1.0
    x, weights, chosen = torch.ones(3, 3), torch.ones(3, 1), torch.full((3, 1), 2)
    assert moe_experts.kernel(x, weights, chosen, gate_up, down, silu_and_mul.twin).isfinite().all()
    assert moe_experts.kernel(x[:0], weights[:0], chosen[:0], gate_up, down, silu_and_mul.twin).shape == (0, 3)


def test_a_token_is_the_same_alone_and_among_others():
    torch.manual_seed(0)
    x, gate_up, down = torch.randn(9, 16), torch.randn(5, 8, 16), torch.randn(5, 16, 4)
    weights, chosen = route_softmax_topk(torch.randn(9, 5), 3, normalise=False)
    every = moe_experts.kernel(x, weights, chosen, gate_up, down, silu_and_mul.twin)
    again = moe_experts.kernel(x, weights.flip(1), chosen.flip(1), gate_up, down, silu_and_mul.twin)
    assert torch.equal(every, again)
    alone = moe_experts.kernel(x[4:5], weights[4:5], chosen[4:5], gate_up, down, silu_and_mul.twin)
    assert torch.equal(every[4:5], alone)
