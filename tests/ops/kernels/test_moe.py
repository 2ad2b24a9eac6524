"""The grouped products of experts against their twins, in Triton's interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch

from helpers.effort import by_days, share_of_the_day
from helpers.stored_cases import stored
from pagerunner.ops import numerics
from pagerunner.ops.activation import SILU, GatedActivation
from pagerunner.ops.kernels.moe import moe, moe_joint
from pagerunner.ops.kernels.moe.moe_codes import CodesConfig, CodesProduct, codes_products
from pagerunner.ops.kernels.moe.moe_joint import joins, joint_config, most_tiles, shared_rows
from pagerunner.ops.kernels.moe.moe_packed import PairsConfig, few_pairs, packs, pairs_products
from pagerunner.ops.moe import ExpertWeights, Shared, moe_experts, moe_experts_then, pair_products, pair_routes
from pagerunner.ops.pair_sums import add_pairs_
from pagerunner.ops.routing import TILE_PAIRS, Routes, Routing, own_experts, route
from pagerunner.ops.stored import Stored, Stored4

ACTIVATIONS = [SILU, GatedActivation("clamped_swiglu", 2.0), GatedActivation("limited_silu", 1.0)]


@pytest.mark.parametrize(
    ("sizes", "biases", "activation"),
    by_days([(1, 3, 2), (5, 4, 1), (19, 3, 3), (40, 2, 2), (16, 1, 1)], [False, True], ACTIVATIONS),
)
def test_experts(sizes, biases, activation):
    tokens, experts, active = sizes
    torch.manual_seed(tokens)
    x, gate_up, down = torch.randn(tokens, 18), torch.randn(experts, 6, 18), torch.randn(experts, 18, 3)
    extra = (torch.randn(experts, 6), torch.randn(experts, 18)) if biases else (None, None)
    routes = route.twin(torch.randn(tokens, experts), Routing(active, normalise=True))
    got = moe_experts.kernel(x, routes, ExpertWeights(gate_up, down, activation, *extra))
    want = moe_experts.twin(x, routes, ExpertWeights(gate_up, down, activation, *extra))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "form", by_days(["float32", "fp8 row", "fp8 block", "int4 bf16 128", "e2m1 e8m0 32"], [1, 7, 40])
)
def test_products_of_pairs(form):
    """Each pair with its own row, or with its token's, without an activation; a pair without an expert may get anything."""
    kind, tokens = form
    torch.manual_seed(tokens)
    weights = torch.randn(4, 256, 128) if kind == "float32" else stored(kind, 256, 128, experts=4)
    x, bias = torch.randn(3 * tokens, 128), torch.randn(4, 256)
    routes = route.twin(torch.randn(tokens, 4), Routing(3))
    routes = Routes(routes.weights_TA, routes.experts_TA.to(torch.int32))
    routes.experts_TA[tokens // 2 :: 2] = -1
    there = routes.experts_TA.flatten() >= 0
    ordered = pair_routes.kernel(*routes[:2], 4)
    for rows in (x, x[:tokens]):
        got, want = pair_products.kernel(rows, ordered, weights, bias), pair_products.twin(rows, routes, weights, bias)
        torch.testing.assert_close(got[there], want[there], atol=1e-3 * float(want.abs().max()), rtol=1e-3)


def test_inputs_are_weighted_and_the_sum_is_added_to_a_residual():
    torch.manual_seed(0)
    x, gate_up, down, residual = torch.randn(7, 18), torch.randn(4, 6, 18), torch.randn(4, 18, 3), torch.randn(7, 20)
    routes = route.twin(torch.randn(7, 4), Routing(2, "sigmoid"))
    got, want = residual.clone(), residual.clone()
    for op, out in ((moe_experts.kernel, got), (moe_experts.twin, want)):
        op(x, routes, ExpertWeights(gate_up, down, SILU, weigh_inputs=True), residual_TD=out[:, :18])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_experts_that_nobody_chose_are_not_read_and_no_tokens_are_no_work():
    gate_up, down = torch.full((4, 2, 3), float("nan")), torch.full((4, 3, 1), float("nan"))
    gate_up[2], down[2] = 1.0, 1.0
    x, routes = torch.ones(3, 3), Routes(torch.ones(3, 1), torch.full((3, 1), 2))
    assert moe_experts.kernel(x, routes, ExpertWeights(gate_up, down, SILU)).isfinite().all()
    none = Routes(routes.weights_TA[:0], routes.experts_TA[:0])
    assert moe_experts.kernel(x[:0], none, ExpertWeights(gate_up, down, SILU)).shape == (0, 3)


def test_a_token_is_the_same_alone_and_among_others():
    torch.manual_seed(0)
    x, gate_up, down = torch.randn(9, 16), torch.randn(5, 8, 16), torch.randn(5, 16, 4)
    weights, chosen, *_ = route.twin(torch.randn(9, 5), Routing(3))
    every = moe_experts.kernel(x, Routes(weights, chosen), ExpertWeights(gate_up, down, SILU))
    again = moe_experts.kernel(x, Routes(weights.flip(1), chosen.flip(1)), ExpertWeights(gate_up, down, SILU))
    assert torch.equal(every, again)
    some = moe_experts.kernel(x[4:6], Routes(weights[4:6], chosen[4:6]), ExpertWeights(gate_up, down, SILU))
    assert torch.equal(every[4:6], some)
    one = moe_experts.kernel(x[4:5], Routes(weights[4:5], chosen[4:5]), ExpertWeights(gate_up, down, SILU))
    torch.testing.assert_close(every[4:5], one)  # by kernels of its own, which sum in another order


FORMS = [
    "fp8 row", "int8 row", "fp8 block", "fp8 block 2x32", "e2m1 e8m0 32", "e2m1 e4m3 16 rows", "int4 bf16 128", "int4 f16 128 zeros",
    "int4 bf16 32", "int4 f16 64 zeros", "int4 f16 all zeros",
]  # fmt: skip


STORED = by_days(FORMS, [(1, 160, 96), (9, 256, 128), (40, 256, 256)])


@pytest.mark.parametrize(("form", "sizes"), [STORED[number] for number in share_of_the_day(len(STORED), 4)])
def test_stored_experts(form, sizes):
    tokens, features, inner = sizes
    if form.startswith("int4") and inner % 128:
        features, inner = 256, 128
    torch.manual_seed(tokens)
    gate_up, down = stored(form, 2 * inner, features, experts=3), stored(form, features, inner, experts=3)
    biases = torch.randn(3, 2 * inner), torch.randn(3, features)
    x, routes = torch.randn(tokens, features), route.twin(torch.randn(tokens, 3), Routing(2, normalise=True))
    for activation in (SILU, GatedActivation("clamped_swiglu", 2.0)):
        got = moe_experts.kernel(x, routes, ExpertWeights(gate_up, down, activation, *biases))
        want = moe_experts.twin(x, routes, ExpertWeights(gate_up, down, activation, *biases))
        torch.testing.assert_close(got, want, atol=1e-3 * float(want.abs().max()), rtol=1e-3)


@pytest.mark.parametrize("form", ["e2m1 e8m0 32", "e2m1 e4m3 16 rows", "int4 bf16 128", "int4 f16 128 zeros"])
def test_halves_of_a_step_may_be_one_product_or_two(form):
    torch.manual_seed(0)
    features, inner = (256, 128) if "128" in form else (160, 96)
    gate_up, down = stored(form, 2 * inner, features, experts=3), stored(form, features, inner, experts=3)
    assert isinstance(gate_up, Stored4)
    assert isinstance(down, Stored4)
    first = CodesProduct.of(gate_up, torch.randn(3, 2 * inner), torch.float32)
    second = CodesProduct.of(down, torch.randn(3, features), torch.float32)
    x, routes = torch.randn(20, features), route.kernel(torch.randn(20, 3), Routing(2, normalise=True))
    results = []
    for joint in (False, True):
        config = CodesConfig(16, 64, 4, 2, joint)
        results.append(codes_products(x, first, second, routes, SILU, weigh_inputs=False, configs=(config, config)))
    torch.testing.assert_close(*results, atol=1e-5 * float(results[0].abs().max()), rtol=1e-5)


BLOCKS = PairsConfig(64, 2, 1), PairsConfig(16, 2, 3)
PAIRS = [
    ("e2m1 e8m0 32", (1056, 32), 4, (PairsConfig(64, 1, 1), PairsConfig(256, 4, 4))),
    ("e2m1 e8m0 32", (32, 1056), 2, (PairsConfig(512, 1, 4), PairsConfig(32, 2, 1))),
    ("e2m1 e4m3 16 rows", (32, 32), 6, None),
    ("int4 bf16 128", (128, 128), 1, BLOCKS[:1] + (PairsConfig(32, 1, 4),)),
    ("int4 f16 128 zeros", (128, 128), 3, (PairsConfig(64, 1, 1), PairsConfig(64, 1, 2))),
    ("int4 f16 all zeros", (96, 64), 2, BLOCKS),
]


@pytest.mark.parametrize(
    ("form", "sizes", "active", "configs"), [PAIRS[number] for number in share_of_the_day(len(PAIRS), 3)]
)
def test_pairs_of_a_few_tokens_in_4_bits(form, sizes, active, configs):
    torch.manual_seed(active)
    features, inner = sizes
    gate_up, down = stored(form, 2 * inner, features, experts=7), stored(form, features, inner, experts=7)
    assert isinstance(gate_up, Stored4)
    assert isinstance(down, Stored4)
    assert packs(torch.float32, gate_up, down)
    biases = torch.randn(7, 2 * inner), torch.randn(7, features)
    for tokens, activation, weigh_inputs in ((1, SILU, True), (2, GatedActivation("clamped_swiglu", 2.0), False)):
        x, residual = torch.randn(tokens, features), torch.randn(tokens, features + 2)
        routes = route.twin(torch.randn(tokens, 7), Routing(active, normalise=True))
        got, want = residual.clone(), residual.clone()
        own = x, routes, ExpertWeights(gate_up, down, activation, *biases, weigh_inputs)
        pairs_products(*own, got[:, :features], add=True, configs=configs)
        moe_experts.twin(*own, want[:, :features])
        torch.testing.assert_close(got, want, atol=1e-4 * float(want.abs().max()), rtol=1e-4)


def test_padding_of_a_few_tokens_in_4_bits_reads_no_expert_of_its_own():
    """Experts that no true row chose hold what is not a number, and padding's residual stays as it was."""
    torch.manual_seed(0)
    gate_up, down = stored("int4 bf16 128", 256, 128, experts=7), stored("int4 bf16 128", 128, 128, experts=7)
    assert isinstance(gate_up, Stored4)
    assert isinstance(down, Stored4)
    chosen = torch.tensor([[3, 1], [5, 3], [-1, -1], [-1, -1]], dtype=torch.int32)
    weights = torch.tensor([[0.5, 0.5], [0.3, 0.7], [0.0, 0.0], [0.0, 0.0]])
    for matrix in (gate_up, down):
        matrix.scales[[0, 2, 4, 6]] = float("nan")
    x, residual = torch.randn(4, 128), torch.randn(4, 128)
    got, want = residual.clone(), residual.clone()
    own = x, Routes(weights, chosen), ExpertWeights(gate_up, down, SILU)
    pairs_products(*own, got, add=True, configs=(PairsConfig(64, 1, 1), PairsConfig(64, 1, 2)))
    moe_experts.twin(*own, want)
    assert torch.equal(got[2:], residual[2:])
    torch.testing.assert_close(got, want, atol=1e-4 * float(want.abs().max()), rtol=1e-4)


def test_few_tokens_in_4_bits_take_the_kernel_of_pairs(monkeypatch):
    gate_up, down = stored("e2m1 e8m0 32", 64, 64, experts=8), stored("e2m1 e8m0 32", 64, 32, experts=8)
    assert isinstance(gate_up, Stored4)
    assert isinstance(down, Stored4)
    seen = []
    monkeypatch.setattr("pagerunner.ops.kernels.moe.moe.pairs_products", lambda *args, **how: seen.append(len(args[0])))
    for tokens, active in ((1, 8), (2, 2), (4, 1), (3, 2), (5, 1)):
        routes = route.kernel(torch.randn(tokens, 8), Routing(active))
        moe_experts.kernel(torch.randn(tokens, 64), routes, ExpertWeights(gate_up, down, SILU))
    assert seen == [1, 2, 4]  # up to half a pair of an expert, and one token in any case
    assert not packs(torch.float32, *(stored("int4 bf16 32", 64, 64, experts=3),) * 2)
    assert not packs(torch.float32, gate_up, torch.zeros(3, 64, 32))


def test_gpt_oss_takes_the_kernel_of_pairs_up_to_four_tokens_and_qwen3_up_to_eight():
    assert [few_pairs(tokens, 32, 4 * tokens) for tokens in (0, 1, 4, 5)] == [False, True, True, False]
    assert [few_pairs(tokens, 128, 8 * tokens) for tokens in (0, 1, 8, 9)] == [False, True, True, False]


@pytest.mark.parametrize("active", [1, 3, 8])
@pytest.mark.parametrize("weigh_inputs", [False, True])
def test_one_token(active, weigh_inputs):
    torch.manual_seed(0)
    x, gate_up, down, residual = (
        torch.randn(1, 36),
        torch.randn(12, 20, 36),
        torch.randn(12, 36, 10),
        torch.randn(1, 36),
    )
    routes = route.kernel(torch.randn(1, 12) * 3, Routing(active, "sigmoid"))
    biases = torch.randn(12, 20), torch.randn(12, 36)
    got, want = residual.clone(), residual.clone()
    for op, out in ((moe_experts.kernel, got), (moe_experts.twin, want)):
        op(x, routes, ExpertWeights(gate_up, down, SILU, *biases, weigh_inputs=weigh_inputs), residual_TD=out)
    torch.testing.assert_close(got, want, atol=1e-4 * float(want.abs().max()), rtol=1e-4)
    alone = [op(x, routes, ExpertWeights(gate_up, down, SILU)) for op in (moe_experts.kernel, moe_experts.twin)]
    torch.testing.assert_close(*alone, atol=1e-4 * float(alone[1].abs().max()), rtol=1e-4)


@pytest.mark.days(3)
@pytest.mark.parametrize("form", ["float32", "fp8 row", "fp8 block"])
@pytest.mark.parametrize("wide", [256, 640])
def test_what_all_tokens_pass_is_part_of_both_kernels_of_one_token(form, wide, monkeypatch):
    """Its inner features may be fewer or more than an expert's, and no multiple of them."""
    torch.manual_seed(wide)
    features, inner, experts = 256, 384, 5

    def matrix(outputs: int, inputs: int, number: int | None = None) -> torch.Tensor | Stored:
        if form == "float32":
            return torch.randn(*([] if number is None else [number]), outputs, inputs) / 8
        return stored(form, outputs, inputs, experts=number)

    gate_up, down = matrix(2 * inner, features, experts), matrix(features, inner, experts)
    shared = Shared(matrix(2 * wide, features), matrix(features, wide))
    x, residual = torch.randn(1, features), torch.randn(1, features)
    routes = route.kernel(torch.randn(1, experts), Routing(3))
    seen = []
    monkeypatch.setattr("pagerunner.ops.kernels.moe.moe.add_shared_", lambda *args: seen.append(args))
    got, want = residual.clone(), residual.clone()
    assert (
        moe_experts_then.kernel(x, routes, ExpertWeights(gate_up, down, SILU), residual_TD=got, shared=shared) is None
    )
    moe_experts_then.twin(x, routes, ExpertWeights(gate_up, down, SILU), residual_TD=want, shared=shared)
    torch.testing.assert_close(got, want, atol=1e-4 * float(want.abs().max()), rtol=1e-4)
    assert not seen


SHARED = by_days(
    [*FORMS[:3], "int4 bf16 128", "float32"], [(6, 256, 256, 256), (21, 256, 256, 384), (70, 256, 256, 256)]
)


@pytest.mark.parametrize(("form", "sizes"), [SHARED[number] for number in share_of_the_day(len(SHARED), 2)])
def test_what_all_tokens_pass_is_computed_beside_their_experts(form, sizes, monkeypatch):
    """By one launch, which leaves its counts at 0; and the residual may be part of a wider tensor."""
    tokens, features, inner, wide = sizes
    most = 12 if form == "float32" else 18  # 24 pairs an expert, and 16 of codes
    experts, active = (9, 2) if tokens < 70 else (most, 4)
    torch.manual_seed(tokens)

    def matrix(outputs: int, inputs: int, number: int | None = None) -> torch.Tensor | Stored:
        if form == "float32":
            return torch.randn(*(() if number is None else (number,)), outputs, inputs)
        return stored(form, outputs, inputs, experts=number)

    gate_up, down = matrix(2 * inner, features, experts), matrix(features, inner, experts)
    shared = Shared(matrix(2 * wide, features), matrix(features, wide))
    x, residual = torch.randn(tokens, features), torch.randn(tokens, features + 16)
    routes = route.kernel(torch.randn(tokens, experts), Routing(active, normalise=True))
    seen = []
    monkeypatch.setattr("pagerunner.ops.kernels.moe.moe.add_shared_", lambda *args: seen.append(args))
    for activation, narrow in ((SILU, inner), (GatedActivation("limited_silu", 1.0), 0)):
        monkeypatch.setattr(
            "pagerunner.ops.kernels.moe.moe_joint.NARROW", narrow
        )  # tiles for experts of few inner features, and of more
        got, want = residual.clone(), residual.clone()
        own = x, routes, ExpertWeights(gate_up, down, activation)
        pairs = moe_experts_then.kernel(*own, residual_TD=got[:, :features], shared=shared)
        add_pairs_(got[:, :features], pairs)
        moe_experts_then.twin(*own, residual_TD=want[:, :features], shared=shared)
        torch.testing.assert_close(got, want, atol=1e-3 * float(want.abs().max()), rtol=1e-3)
    assert not seen
    assert not routes.tiles.counts.any()


@pytest.mark.parametrize("experts", [1, 2, 3, 8, 60, 128, 512])
def test_there_is_room_for_every_tile_and_its_counts(experts):
    """Two counts for each tile of pairs and of what all tokens pass, and places for 2 E tiles."""
    for active in {min(active, experts) for active in (1, 2, 4, 6, 10)}:
        own = numerics.FAST.experts
        for plain, most, sizes in (
            (False, own.few, (192, 768)),
            (True, own.few_plain, (192, 768)),
            (True, own.few_large, (14_336,)),
        ):
            for tokens, inner in itertools.product(range(2, most * experts // active + 1), sizes):
                config = joint_config(tokens * active, experts, inner, plain=plain)
                tiles = most_tiles(tokens * active, experts, config.pairs)
                assert 2 * (tiles + -(-tokens // shared_rows(tokens, config))) <= 8 * experts
                assert config.pairs != TILE_PAIRS or tiles <= 2 * experts


@pytest.mark.parametrize(("tokens", "tile"), [(45, 64), (75, 128)])
def test_large_experts_of_dozens_of_pairs_are_one_launch(tokens, tile, monkeypatch):
    """Not with what all tokens pass beside them, nor in 32 bits, nor small ones."""
    torch.manual_seed(tokens)
    x, gate_up, down = (torch.randn(*size).half() / 4 for size in ((tokens, 96), (3, 128, 96), (3, 96, 64)))
    routes = route.kernel(torch.randn(tokens, 3), Routing(2, normalise=True))
    seen, shared = [], Shared(gate_up[0], down[0])
    products, joint_of = moe._products, moe_joint.joint_config
    monkeypatch.setattr(moe, "_products", lambda *args: seen.append("two") or products(*args))
    monkeypatch.setattr(
        moe_joint,
        "joint_config",
        lambda *args, **own: seen.append(joint_of(*args, **own).pairs) or joint_of(*args, **own),
    )
    for large, dtype, beside, want in (
        (63, torch.float16, None, tile), (63, torch.float16, shared, "two"), (63, torch.float32, None, "two"), (64, torch.float16, None, "two"),
    ):  # fmt: skip
        for module in (moe, moe_joint):
            monkeypatch.setattr(module, "LARGE", large)
        own = x.to(dtype), routes, ExpertWeights(gate_up.to(dtype), down.to(dtype), SILU)
        if beside is not None:
            moe_experts_then.kernel(*own, residual_TD=torch.zeros(tokens, 96).to(dtype), shared=beside)
        else:
            exact = moe_experts.twin(x.float(), routes, ExpertWeights(gate_up.float(), down.float(), SILU))
            torch.testing.assert_close(
                moe_experts.kernel(*own).float(), exact, atol=3e-2 * float(exact.abs().max()), rtol=0
            )
        assert seen == [want]
        seen.clear()


def test_few_experts_have_narrow_tiles_where_they_are_narrow() -> None:
    """A rank's 32 whole experts with 33 to 64 tokens of 8 experts each, of which it has two; the 8 wide ones of Mixtral keep theirs."""
    wide = joint_config(96, 64, 768, plain=True)
    narrow = wide._replace(features=32, stages=4)
    for pairs, experts, inner, config in (
        *((pairs, 32, 768, wide) for pairs in (64, 129)),
        *((pairs, 32, 768, narrow) for pairs in (66, 128)),
        *((pairs, 8, 14_336, wide) for pairs in (18, 32)),
    ):
        assert joint_config(pairs, experts, inner, plain=True) == config


def test_what_all_tokens_pass_is_added_before_experts_where_it_is_stored_in_another_way():
    torch.manual_seed(0)
    x, residual = torch.randn(40, 128), torch.randn(40, 128)
    gate_up, down = stored("fp8 row", 512, 128, experts=5), stored("fp8 row", 128, 256, experts=5)
    plain = Shared(torch.randn(64, 128), torch.randn(128, 32))
    blocks = Shared(stored("fp8 block", 256, 128), stored("fp8 block", 128, 128))
    rows = Shared(stored("fp8 row", 64, 128), stored("fp8 row", 128, 32))
    assert [joins(one, gate_up, down, x.dtype) for one in (plain, blocks, rows)] == [False, False, True]
    for tokens, shared in ((40, plain), (40, blocks), (1, rows), (40, rows), (0, rows)):
        routes = route.kernel(torch.randn(tokens, 5), Routing(2))
        for active_routes in (routes, routes._replace(order_P=None, starts_E1=None, tiles=None)):
            got, want = residual[:tokens].clone(), residual[:tokens].clone()
            own = x[:tokens], active_routes, ExpertWeights(gate_up, down, SILU)
            pairs = moe_experts_then.kernel(*own, residual_TD=got, shared=shared)
            if pairs is not None:
                add_pairs_(got, pairs)
            moe_experts_then.twin(*own, residual_TD=want, shared=shared)
            torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)


OWN = by_days([*FORMS, "float32"], [1, 3, 24, 90])


@pytest.mark.parametrize(("form", "tokens"), [OWN[number] for number in share_of_the_day(len(OWN), 5)])
def test_ranks_with_some_of_the_experts_compute_those_alone(form, tokens):
    """Pairs of others are neither read nor computed; the first rank may have none of a token's experts."""
    torch.manual_seed(tokens)
    features, inner, experts = 256, 128, 5
    if form == "float32":
        matrices = torch.randn(experts, 2 * inner, features), torch.randn(experts, features, inner)
    else:
        matrices = tuple(stored(form, *shape, experts=experts) for shape in ((2 * inner, features), (features, inner)))
    biases = torch.randn(experts, 2 * inner), torch.randn(experts, features)
    x, total = torch.randn(tokens, features), torch.zeros(tokens, features)
    logits = torch.randn(tokens, experts)
    logits[0] = torch.arange(experts)
    routes, plain = (way(logits, Routing(2, normalise=True)) for way in (route.kernel, route.twin))
    for first, count in ((0, 2), (2, 3)):
        here = slice(first, first + count)
        own = own_experts.kernel(routes.experts_TA, routes, first, count, 2)
        want = own_experts.twin(plain.experts_TA, plain, first, count, 2)
        assert torch.equal(own.experts_TA.long(), want.experts_TA)
        torch.testing.assert_close(own.weights_TA, want.weights_TA)
        parts = [one[here].clone() if isinstance(one, torch.Tensor) else experts_of(one, here) for one in matrices]
        extra = [bias[here].clone() for bias in biases]
        got = moe_experts.kernel(x, own, ExpertWeights(*parts, SILU, *extra))
        torch.testing.assert_close(
            got,
            moe_experts.twin(x, want, ExpertWeights(*parts, SILU, *extra)),
            atol=1e-3 * float(x.abs().max()) * 50,
            rtol=1e-3,
        )
        total += got
        gathered = own_experts.kernel(routes.experts_TA, Routes(*routes[:2]), first, count, 2)  # of other teams' tokens
        torch.testing.assert_close(moe_experts.kernel(x, gathered, ExpertWeights(*parts, SILU, *extra)), got)
    whole = moe_experts.kernel(x, routes, ExpertWeights(*matrices, SILU, *biases))
    torch.testing.assert_close(total, whole, atol=1e-3 * float(whole.abs().max()), rtol=1e-3)


@pytest.mark.parametrize(("form", "tokens"), [("int4 bf16 32", 60), ("float32", 40)])
def test_kernels_are_chosen_by_a_ranks_share_of_the_pairs_and_have_room_for_all_of_them(form, tokens, monkeypatch):
    """Two of eight experts are here, so a quarter of the pairs is expected: 15 or 10 an expert, which one launch serves. It gets four times as many."""
    torch.manual_seed(tokens)
    shapes, ranks = ((64, 64), (64, 32)), 4
    if form == "float32":
        matrices = tuple(torch.randn(2, *shape) for shape in shapes)
    else:
        matrices = tuple(stored(form, *shape, experts=2) for shape in shapes)
    x, logits = torch.randn(tokens, 64), torch.randn(tokens, 8)
    logits[:, :2] += 50.0
    seen = []
    joint = moe.joint_products
    monkeypatch.setattr(
        moe, "joint_products", lambda *args, **how: seen.append(args[1].expected) or joint(*args, **how)
    )
    routes, plain = (way(logits, Routing(2, normalise=True)) for way in (route.kernel, route.twin))
    own = own_experts.kernel(routes.experts_TA, routes, 0, 2, ranks)
    assert own.tiles.counts.tolist() == [0] * (8 * 2 * ranks)
    want = moe_experts.twin(x, own_experts.twin(plain.experts_TA, plain, 0, 2, ranks), ExpertWeights(*matrices, SILU))
    got = moe_experts.kernel(x, own, ExpertWeights(*matrices, SILU))
    torch.testing.assert_close(got, want, atol=1e-3 * float(want.abs().max()), rtol=1e-3)
    assert seen == [tokens * 2 // ranks] and not own.tiles.counts.any()
    gathered = own_experts.kernel(routes.experts_TA, Routes(*routes[:2]), 0, 2, ranks)
    torch.testing.assert_close(moe_experts.kernel(x, gathered, ExpertWeights(*matrices, SILU)), got)
    assert seen == 2 * [tokens * 2 // ranks]
    for many in (tokens, 4 * tokens, 400):  # the warm-up compiles these
        kernels, few = (moe.moe_experts_kernels(many // n, 2, 2, ranks // n) for n in (1, ranks))
        assert kernels[2:4] + kernels[5:] == few[2:4] + few[5:]


def experts_of(weights: Stored, here: slice) -> Stored:
    parts = {name: one[here].clone() for name, one in weights._asdict().items() if isinstance(one, torch.Tensor)}
    return weights._replace(**parts)
