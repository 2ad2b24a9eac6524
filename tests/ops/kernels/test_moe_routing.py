"""The choice of experts and the order of pairs against the twin, in Triton's interpreter."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from helpers.borders import set_borders
from pagerunner.ops.kernels.moe import moe_logits, moe_routing
from pagerunner.ops.kernels.moe.moe_logits import LogitsConfig, logits_config, run_logits
from pagerunner.ops.linear import Norm
from pagerunner.ops.routing import (
    TILE_PAIRS,
    Here,
    Routes,
    Routing,
    counting_experts,
    expert_logits,
    norm_expert_logits,
    own_experts,
    route,
    touched_experts,
)

ROUTINGS = [
    (Routing(1), False),
    (Routing(3, normalise=True), False),
    (Routing(2, "sigmoid"), False),
    (Routing(4, "sigmoid", normalise=True, factor=2.5, groups=3, kept_groups=2), True),
    (Routing(2, "sqrtsoftplus", normalise=True, factor=1.5), True),
    (Routing(3, factor=16.0, groups=4, kept_groups=1), False),
    (Routing(12), False),
]


def check(got: Routes, want: Routes, experts: int) -> None:
    """The same routes, and each expert's pairs in their own order behind those of smaller experts."""
    torch.testing.assert_close(got.weights_TA, want.weights_TA, atol=1e-6, rtol=1e-5)
    assert torch.equal(got.experts_TA.long(), want.experts_TA)
    flat = want.experts_TA.flatten()
    assert torch.equal(got.order_P.long(), flat.argsort(stable=True))
    assert torch.equal(got.starts_E1.long(), torch.searchsorted(flat.sort().values, torch.arange(experts + 1)))
    if got.tiles is None:
        assert got.experts_TA.shape[0] <= 1, "only one token's experts need no tiles"
    else:
        check_tiles(got, experts, experts)


def check_tiles(got: Routes, experts: int, room: int) -> None:
    """Every pair is in one tile, whose pairs are all of one expert; and there are zeros to count in."""
    starts = got.starts_E1.tolist()
    tiles = [
        [e, first, end]
        for e, (start, end) in enumerate(itertools.pairwise(starts))
        for first in range(start, end, TILE_PAIRS)
    ]
    if len(tiles) <= 2 * room:
        assert got.tiles.places[:, : len(tiles)].T.tolist() == tiles
        assert (got.tiles.places[0, len(tiles) :] == experts).all()
    assert got.tiles.counts.tolist() == [0] * (8 * room)


@pytest.mark.parametrize(("routing", "bias"), ROUTINGS)
@pytest.mark.parametrize("tokens", [1, 5, 63])
@pytest.mark.parametrize("at_once", [True, False])
def test_routes(routing, bias, tokens, at_once, monkeypatch):
    if not at_once:
        monkeypatch.setattr(moe_routing, "_MOST_AT_ONCE", 15 if tokens < 8 else 64)
        monkeypatch.setattr(moe_routing, "_FEWEST", 16 if tokens < 8 else 64)
    torch.manual_seed(tokens)
    logits, biases = torch.randn(tokens, 12) * 3, torch.randn(12) if bias else None
    check(route.kernel(logits, routing, biases), route.twin(logits, routing, biases), 12)


@pytest.mark.parametrize("routing", [Routing(3, "sigmoid", normalise=True, factor=1.5), Routing(3)])
def test_given_experts_are_weighted_even_if_they_are_the_same(routing):
    logits, chosen = torch.randn(7, 5), torch.randint(0, 5, (7, 3))
    chosen[2] = 4
    check(route.kernel(logits, routing, None, chosen), route.twin(logits, routing, None, chosen), 5)
    row_T = torch.tensor([0, 1, 1, -1, 2, -1, -1])  # padding has no experts, whatever its ids name
    got = route.kernel(logits, routing, None, chosen, row_T.int())
    want = route.twin(logits, routing, None, chosen, row_T.int())
    torch.testing.assert_close(got.weights_TA, want.weights_TA, atol=1e-6, rtol=1e-5)
    assert torch.equal(got.experts_TA, want.experts_TA) and (want.experts_TA < 0).sum() == 9
    pairs = [(want.experts_TA.flatten() == expert).nonzero().squeeze(1) for expert in range(5)]
    assert torch.equal(got.order_P[:12].long(), torch.cat(pairs))
    assert got.starts_E1.tolist() == [0, *itertools.accumulate(map(len, pairs))]


@pytest.mark.parametrize("filler", [0.0, float("nan"), float("-inf"), float("inf")])
def test_every_pair_is_placed_whatever_the_logits_are(filler):
    """Numbers that a broken model computes must not send a product to places that nobody wrote."""
    routes = route.kernel(torch.full((6, 5), filler), Routing(3, normalise=True, groups=1))
    assert sorted(routes.order_P.tolist()) == list(range(18))
    assert routes.starts_E1[0] == 0 and routes.starts_E1[-1] == 18 and (routes.starts_E1.diff() >= 0).all()
    assert all(len(set(row)) == 3 and 0 <= min(row) and max(row) < 5 for row in routes.experts_TA.tolist())


def test_no_tokens_have_no_pairs():
    routes = route.kernel(torch.empty(0, 5), Routing(2))
    assert routes.experts_TA.shape == (0, 2) and routes.starts_E1.tolist() == [0] * 6


@pytest.mark.parametrize("tokens", [0, 1, 3, 17])
def test_logits(tokens):
    x, weight, bias = torch.randn(tokens, 40), torch.randn(5, 40), torch.randn(5)
    close = functools.partial(torch.testing.assert_close, atol=1e-4, rtol=1e-4)
    close(expert_logits.kernel(x, weight, bias), expert_logits.twin(x, weight, bias))
    for offset in (False, True):
        norm = Norm(torch.randn(40), 1e-6, offset)
        for other in (None, torch.randn(tokens, 40)):
            got, want = (
                op(x.clone(), norm, weight, bias, other) for op in (norm_expert_logits.kernel, norm_expert_logits.twin)
            )
            for one, wanted in zip(got, want, strict=True):
                close(one, wanted)


def test_fixed_logits_have_no_bias_in_their_product(monkeypatch):
    """In float32 torch gives a product with a bias to another library, whose sums depend on the number of tokens."""
    x, weight, bias = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)
    want, product = expert_logits.twin(x, weight, bias), moe_logits.F.linear
    monkeypatch.setattr(moe_logits.F, "linear", lambda x, weight: product(x, weight))
    torch.testing.assert_close(expert_logits.kernel(x, weight, bias, fixed=True), want)


def test_borders_of_a_test_are_no_later_tests_borders(monkeypatch):
    usual = logits_config(9, 64, 8, torch.float32)
    with monkeypatch.context() as other:
        set_borders(other, "router", few_tokens=4, few_logits=16)
        assert logits_config(9, 64, 8, torch.float32) is None
    assert usual == logits_config(9, 64, 8, torch.float32) is not None


PROGRAMS = [LogitsConfig(1, 4, 4), LogitsConfig(4, 2, 8), LogitsConfig(16, 16, 2, True), LogitsConfig(8, 32, 4, True)]


@pytest.mark.parametrize(("tokens", "experts", "features"), [(17, 5, 40), (20, 24, 200), (33, 16, 130)])
@pytest.mark.parametrize("config", PROGRAMS)
def test_logits_of_many_tokens(tokens, experts, features, config):
    """One launch adds to the stream, norms and scores; the stream as it was stays whole while others read it."""
    torch.manual_seed(tokens)
    wide, weight, bias = torch.randn(tokens, features + 5), torch.randn(experts, features), torch.randn(experts)
    x, others = wide[:, :features], torch.randn(tokens, features + 2)[:, 2:]
    for offset, other, own in ((False, None, None), (True, others, bias), (False, others, bias)):
        norm, before = Norm(torch.randn(features), 1e-6, offset), x.clone()
        got = run_logits(x, norm, weight, own, other, program=config)
        assert torch.equal(x, before)
        for one, wanted in zip(got, norm_expert_logits.twin(x.clone(), norm, weight, own, other), strict=True):
            torch.testing.assert_close(one, wanted, atol=1e-4, rtol=1e-4)


LAUNCHES = [
    (torch.bfloat16, 2048, 128, [(17, False), (32, False), (33, True), (128, True), (129, None)]),
    (torch.bfloat16, 2880, 32, [(17, False), (128, False), (129, None)]),
    (torch.bfloat16, 7168, 256, [(16, False), (17, None)]),
    (torch.float32, 2048, 64, [(16, False), (64, False), (65, None)]),
]


@pytest.mark.parametrize(("dtype", "features", "experts", "wanted"), LAUNCHES)
def test_the_norm_is_part_of_the_logits_kernel_up_to_128_tokens(dtype, features, experts, wanted):
    """A program has one token where there are few logits, and a tile where matrix units serve; otherwise cuBLAS multiplies."""
    for tokens, tile in wanted:
        program = logits_config(tokens, features, experts, dtype)
        assert (None if program is None else program.tile) is tile, tokens


@pytest.mark.parametrize("at_once", [True, False])
def test_padding_goes_nowhere(at_once, monkeypatch):
    """Its experts are none, its weights are 0, and nobody's pairs are its pairs."""
    if not at_once:
        monkeypatch.setattr(moe_routing, "_MOST_AT_ONCE", 64)
        monkeypatch.setattr(moe_routing, "_FEWEST", 64)
    logits, routing = torch.randn(13, 6), Routing(2, normalise=True)
    row = torch.tensor([0, 0, 1, 2, 3, 3, 3, -1, -1, -1, -1, -1, -1], dtype=torch.int32)
    got, want = (op(logits, routing, None, None, row) for op in (route.kernel, route.twin))
    alone = route.twin(logits[:7], routing)
    for one in (got, want):
        torch.testing.assert_close(one.weights_TA, torch.cat([alone.weights_TA, torch.zeros(6, 2)]))
        assert torch.equal(one.experts_TA.long(), torch.cat([alone.experts_TA, torch.full((6, 2), -1)]))
    flat = alone.experts_TA.flatten()
    assert torch.equal(got.order_P[:14].long(), flat.argsort(stable=True))
    assert torch.equal(got.starts_E1.long(), torch.searchsorted(flat.sort().values, torch.arange(7)))
    order, starts, tiles = moe_routing.order_pairs(got.experts_TA, 6)
    assert torch.equal(order[:14], got.order_P[:14])
    assert torch.equal(starts, got.starts_E1)
    check_tiles(got, 6, 6)
    check_tiles(got._replace(tiles=tiles), 6, 6)
    check_tiles(got._replace(tiles=moe_routing.order_pairs(got.experts_TA, 6, 3)[2]), 6, 18)


def test_experts_that_were_read_are_counted():
    """By the kernels that choose at once, in blocks, or weigh given experts; and by the twin. Only for who asks."""
    logits = torch.tensor([9.0, 8.0, -9.0, 0.0, 0.0]).repeat(40, 1) + torch.randn(40, 5)
    meter = touched_experts(logits.device)

    def counted(run) -> list[int]:
        before = meter.clone()
        run()
        assert torch.equal(meter, before)
        with counting_experts():
            run()
        return (meter - before).tolist()

    routing, few = Routing(2), logits[:3]
    wanted = [len(route.twin(few, routing).experts_TA.unique()), 1]
    assert counted(lambda: route.kernel(few, routing)) == wanted == counted(lambda: route.twin(few, routing))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe_routing, "_MOST_AT_ONCE", 64)
        patch.setattr(moe_routing, "_FEWEST", 64)
        all_wanted = [len(route.twin(logits, routing).experts_TA.unique()), 1]
        assert counted(lambda: route.kernel(logits, routing)) == all_wanted
    chosen = torch.tensor([[4, 4], [0, 4], [4, 0]])
    assert counted(lambda: route.kernel(few, routing, None, chosen)) == [2, 1]


@pytest.mark.parametrize("tokens", [1, 7, 60, 300])
def test_a_ranks_experts_have_their_range_of_the_order_and_tiles(tokens):
    logits, row = torch.randn(tokens, 12), torch.arange(tokens).where(torch.arange(tokens) % 5 != 3, -1).int()
    routes = route.kernel(logits, Routing(3), row_T=row)
    for first, count in ((0, 5), (5, 7)):
        alone = route.kernel(logits, Routing(3), row_T=row, here=Here(first, count, 2))
        twin = route.twin(logits, Routing(3), row_T=row, here=Here(first, count, 2))
        assert torch.equal(alone.experts_TA.long(), twin.experts_TA) and alone.ranks == twin.ranks == 2
        torch.testing.assert_close(alone.weights_TA, twin.weights_TA)
        own = own_experts.kernel(routes.experts_TA, routes, first, count, 2)
        chosen = own_experts.twin(routes.experts_TA.long(), routes, first, count, 2).experts_TA
        assert torch.equal(own.experts_TA.long(), chosen)
        assert torch.equal(own.weights_TA, routes.weights_TA.masked_fill(chosen < 0, 0.0))
        for got, expert in itertools.product((own, alone), range(count)):
            pairs = got.order_P[got.starts_E1[expert] : got.starts_E1[expert + 1]]
            assert torch.equal(pairs.long(), (chosen.flatten() == expert).nonzero().squeeze(1))
        for got in (own, alone):
            assert (got.tiles is None) == (tokens == 1)
            if got.tiles is not None:
                check_tiles(got, count, 2 * count)
