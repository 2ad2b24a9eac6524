"""Sums of a token's experts, and what is computed of them, against the twins, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from helpers import interpreter_floats
from helpers.stored_cases import stored
from pagerunner.dist.base import RankSums
from pagerunner.dist.null import NullComm
from pagerunner.ops.activation import SILU
from pagerunner.ops.linear import Norm, linear
from pagerunner.ops.moe import moe_experts_then
from pagerunner.ops.pair_sums import PairSums, add_pairs_, add_pairs_norm_, add_pairs_norm_linear_
from pagerunner.ops.routing import Routing, route
from pagerunner.ops.stored import Stored8
from pagerunner.quant.base import Mixture, UnquantizedExperts
from pagerunner.quant.ranked import SummedExperts

interpreter_floats.install()


def pairs_of(tokens: int, active: int, features: int, dtype: torch.dtype = torch.float32) -> PairSums:
    torch.manual_seed(tokens)
    experts_TA = torch.stack([torch.randperm(11)[:active] for _ in range(tokens)]).to(torch.int32)
    return PairSums(torch.randn(tokens * active, features).to(dtype), experts_TA)


def wide(tokens: int, features: int) -> torch.Tensor:
    """A residual whose rows aren't beside each other."""
    return torch.randn(tokens, features + 3)[:, :features]


@pytest.mark.parametrize(("tokens", "active", "features"), [(1, 1, 40), (3, 6, 200), (2, 10, 129)])
@pytest.mark.parametrize("offset", [False, True])
def test_sums_and_their_norm(tokens, active, features, offset):
    pairs, residual = pairs_of(tokens, active, features), wide(tokens, features)
    norm = Norm(torch.randn(features), 1e-6, offset)
    got, want, alone = residual.clone(), residual.clone(), residual.clone()
    torch.testing.assert_close(
        add_pairs_norm_.kernel(got, pairs, norm), add_pairs_norm_.twin(want, pairs, norm), atol=1e-5, rtol=1e-5
    )
    add_pairs_.kernel(alone, pairs)
    by_hand = residual + pairs.out_PD.view(tokens, active, features).sum(1)
    for one in (got, want, alone):
        torch.testing.assert_close(one, by_hand, atol=1e-5, rtol=1e-5)


def test_a_sum_is_made_in_the_order_of_the_experts_numbers():
    """Whatever the order of a token's pairs: 1e8 + 1 - 1e8 would be 0 in float32, and 1e8 - 1e8 + 1 is 1."""
    outputs, experts = torch.tensor([1e8, 1.0, -1e8]), torch.tensor([2, 9, 5], dtype=torch.int32)
    for order in ([0, 1, 2], [1, 2, 0], [2, 0, 1]):
        pairs = PairSums(outputs[order].unsqueeze(1).repeat(1, 16), experts[order].unsqueeze(0))
        for run in (add_pairs_.kernel, add_pairs_.twin):
            residual = torch.zeros(1, 16)
            run(residual, pairs)
            assert residual.tolist() == [[1.0] * 16], (order, run)


def test_pairs_without_an_expert_are_not_read():
    pairs = pairs_of(4, 3, 20)
    pairs.experts_TA[1] = -1
    pairs.experts_TA[2, 1] = -1
    pairs.out_PD[3:6] = float("nan")
    pairs.out_PD[7] = float("nan")
    residual = wide(4, 20)
    for run in (add_pairs_.kernel, add_pairs_.twin):
        got = residual.clone()
        run(got, pairs)
        assert torch.equal(got[1], residual[1])
        torch.testing.assert_close(got[2], residual[2] + pairs.out_PD[6] + pairs.out_PD[8])
        torch.testing.assert_close(got[3], residual[3] + pairs.out_PD[9:].sum(0))


@pytest.mark.parametrize(("form", "activations"), [("fp8 row", "token"), ("int8 row", "token"), ("fp8 block", "block")])
def test_numbers_of_8_bits_come_from_the_same_launch(form, activations):
    """As the sum, the norm and the rounding one after another give them, in a model of bfloat16."""
    weight = stored(form, 128, 320)
    assert isinstance(weight, Stored8)
    weight = weight._replace(activations=activations)
    pairs, residual = pairs_of(18, 3, 320, torch.bfloat16), wide(18, 320).bfloat16()
    norm, got, want = Norm(torch.rand(320).bfloat16(), 1e-6), residual.clone(), residual.clone()
    out = add_pairs_norm_linear_.kernel(got, pairs, norm, weight)
    assert torch.equal(out, linear.kernel(add_pairs_norm_.kernel(want, pairs, norm), weight))
    assert torch.equal(got, want)


def test_a_product_that_rounds_nothing_gets_the_norm():
    weight, norm = stored("fp8 row", 128, 320)._replace(activations="token"), Norm(torch.rand(320), 1e-6)
    for tokens, own in ((2, weight), (18, weight), (2, torch.randn(16, 320))):
        pairs, residual = pairs_of(tokens, 3, 320), wide(tokens, 320)
        got, want = residual.clone(), residual.clone()
        out = add_pairs_norm_linear_.kernel(got, pairs, norm, own)
        wanted = add_pairs_norm_linear_.twin(want, pairs, norm, own)
        torch.testing.assert_close(out, wanted, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_no_tokens_are_no_work():
    pairs = PairSums(torch.empty(0, 8), torch.empty(0, 2, dtype=torch.int32))
    norm = Norm(torch.ones(8), 1e-6)
    for op in (add_pairs_norm_.kernel, add_pairs_norm_.twin):
        assert op(torch.empty(0, 8), pairs, norm).shape == (0, 8)


class Parts(NullComm):
    """Takes what isn't added up yet, as two ranks' own kernels do."""

    size = 2

    def takes_parts(self, tokens: int, features: int, dtype: torch.dtype) -> bool:
        return tokens > 3


@pytest.mark.parametrize("kernels", [False, True])
def test_outputs_of_experts_are_left_to_the_sum_of_ranks(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pairs, or added up where no pairs are left: a rank's sum is of the same kind in any case."""
    if kernels:
        monkeypatch.setattr("pagerunner.quant.base.moe_experts_then", moe_experts_then.kernel)
    torch.manual_seed(0)
    method = UnquantizedExperts()
    mixture = Mixture({"weight": torch.randn(6, 32, 64)}, {"weight": torch.randn(6, 64, 16)}, SILU)
    for tokens in (3, 5):
        x, residual = torch.randn(tokens, 64), torch.randn(tokens, 64)
        routes = (route.kernel if kernels else route.twin)(torch.randn(tokens, 6), Routing(2))
        sums = SummedExperts(method, Parts()).apply_then(x, routes, mixture, residual)
        assert isinstance(sums, RankSums)
        assert (sums.experts is not None, sums.part.dim()) == (
            kernels and tokens > 3,
            3 if tokens > 3 and not kernels else 2,
        )
        want, got = residual + method.apply(x, routes, mixture), residual.clone()
        normed = sums.add_norm_(got, Norm(torch.ones(64), 1e-6))
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(normed, Norm(torch.ones(64), 1e-6)(want), atol=1e-4, rtol=1e-4)
        sums.add_(other := residual.clone())
        assert torch.equal(other, got)
