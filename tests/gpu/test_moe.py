"""Mixtures of experts on a card, against their twins."""

from __future__ import annotations

import pytest
import torch

from helpers.stored_cases import stored
from pagerunner.ops.activation import SILU, GatedActivation
from pagerunner.ops.linear import Norm, linear
from pagerunner.ops.moe import ExpertWeights, Shared, moe_experts, moe_experts_then
from pagerunner.ops.pair_sums import PairSums, add_pairs_, add_pairs_norm_, add_pairs_norm_linear_
from pagerunner.ops.routing import Routes, Routing, expert_logits, norm_expert_logits, route
from pagerunner.ops.stored import Stored

moe_unpacked = pytest.importorskip("pagerunner.ops.kernels.moe.moe_unpacked")
moe_piped = pytest.importorskip("pagerunner.ops.kernels.moe.moe_piped")
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
    clear = is_clear(logits, routing, biases)
    assert (~clear).sum() <= 2
    assert torch.equal(got.experts_TA.long()[clear], want.experts_TA[clear])
    torch.testing.assert_close(got.weights_TA[clear], want.weights_TA[clear], atol=1e-6, rtol=1e-4)
    assert torch.equal(got.order_P.long(), got.experts_TA.flatten().argsort(stable=True))


def is_clear(logits, routing, biases):
    """Which tokens choose the same experts where logits change by a rounding. Two scores of the others are nearly equal."""
    chosen = [route.twin(logits * (1 + 1e-6 * random(*logits.shape)), routing, biases).experts_TA for _ in range(8)]
    return torch.stack([(one == chosen[0]).all(1) for one in chosen]).all(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 7, 64, 300])
def test_logits(tokens, dtype):
    x, weight, bias = random(tokens, 2880).to(dtype), random(32, 2880).to(dtype), random(32).to(dtype)
    got, want = expert_logits(x, weight, bias), x.double() @ weight.double().T + bias.double()
    assert got.dtype == torch.float32
    assert (got - want).norm() <= 1e-5 * want.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [2, 17, 64, 160, 256, 257])
@pytest.mark.parametrize(("features", "experts"), [(2048, 128), (2880, 32), (576, 60)])
def test_logits_behind_norm_and_addition(tokens, dtype, features, experts):
    x, weight, bias = random(tokens, features).to(dtype), random(experts, features).to(dtype), random(experts).to(dtype)
    norm = Norm(random(features).to(dtype), 1e-6)
    for other in (None, random(tokens, features + 8).to(dtype)[:, 8:]):
        got, want = (op(x.clone(), norm, weight, bias, other) for op in (norm_expert_logits, norm_expert_logits.twin))
        assert torch.equal(got[0], want[0])
        close(got[1], want[1])
        assert (got[2] - want[2]).norm() <= (1e-5 if dtype == torch.float32 else 1e-2) * want[2].norm()


@pytest.mark.parametrize("tokens", [3, 16, 64, 96, 300])
@pytest.mark.parametrize(("experts", "active"), [(128, 8), (32, 4), (512, 10)])
def test_padding_goes_nowhere(tokens, experts, active):
    """A padded batch reads the experts of its true rows alone, and these get what they get without padding."""
    own = tokens * 2 // 3
    row = torch.arange(tokens, dtype=torch.int32, device="cuda")
    row[own:] = -1
    logits, routing = random(tokens, experts), Routing(active, normalise=True)
    got, want = route(logits, routing, None, None, row), route(logits[:own], routing)
    assert torch.equal(got.starts_E1, want.starts_E1)
    assert torch.equal(got.order_P[: own * active], want.order_P)
    assert torch.equal(got.experts_TA[:own], want.experts_TA)
    assert (got.experts_TA[own:] == -1).all()
    gate_up, down = (random(experts, 2 * 64, 256) * 0.05).bfloat16(), (random(experts, 256, 64) * 0.05).bfloat16()
    unread = torch.isin(torch.arange(experts, device="cuda"), want.experts_TA, invert=True)
    gate_up[unread], down[unread] = float("nan"), float("nan")
    x = random(tokens, 256).bfloat16()
    alone = moe_experts(x[:own].clone(), want, ExpertWeights(gate_up, down, SILU))
    padded = moe_experts(x, got, ExpertWeights(gate_up, down, SILU))
    close(padded[:own], alone)
    assert (padded[own:] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [2, 64, 1000])
@pytest.mark.parametrize(("features", "active"), [(2048, 8), (2880, 4), (7168, 10)])
def test_sums_of_pairs(tokens, dtype, features, active):
    routes = route(random(tokens, 64), Routing(active))
    routes.experts_TA[tokens // 2] = -1
    pairs = PairSums(random(tokens * active, features).to(dtype), routes.experts_TA)
    norm, x = Norm(random(features).to(dtype), 1e-6), random(tokens, features).to(dtype)
    got, want, alone = x.clone(), x.clone(), x.clone()
    close(add_pairs_norm_(got, pairs, norm), add_pairs_norm_.twin(want, pairs, norm))
    add_pairs_(alone, pairs)
    assert torch.equal(got, want)
    assert torch.equal(got, alone)


@pytest.mark.parametrize(("form", "activations"), [("fp8 row", "token"), ("int8 row", "token"), ("fp8 block", "block")])
@pytest.mark.parametrize("tokens", [5, 64, 300])
def test_sums_of_pairs_are_rounded_in_the_same_launch(tokens, form, activations):
    weight = stored(form, 1024, 2048, device="cuda")._replace(activations=activations)
    pairs = PairSums(random(tokens * 8, 2048).bfloat16(), route(random(tokens, 64), Routing(8)).experts_TA)
    norm, x = Norm(random(2048).bfloat16(), 1e-6), random(tokens, 2048).bfloat16()
    got, want = x.clone(), x.clone()
    out = add_pairs_norm_linear_(got, pairs, norm, weight)
    assert torch.equal(out, linear(add_pairs_norm_(want, pairs, norm), weight))
    assert torch.equal(got, want)


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
    moe_experts(x, routes, ExpertWeights(gate_up, down, activation, *biases), residual_TD=got)
    moe_experts.twin(x, routes, ExpertWeights(gate_up, down, activation, *biases), residual_TD=want)
    close(got - residual, want - residual)


FORMS = [
    "fp8 row", "int8 row", "fp8 block", "e2m1 e8m0 32", "e2m1 e4m3 16 rows", "int4 bf16 32", "int4 bf16 32 zeros", "int4 f16 64 zeros",
    "int4 bf16 128", "int4 f16 128", "int4 f16 all",
]  # fmt: skip
CLAMPED = GatedActivation("clamped_swiglu", 1.0)


def mixture(form: str) -> tuple[Stored, Stored]:
    """Both matrices of 24 experts. Where the groups allow it, input features aren't multiples of a step."""
    wide = {"64": (576, 320), "128": (640, 384)}
    features, inner = next((sizes for group, sizes in wide.items() if group in form.split()), (608, 352))
    gate_up, down = ((2 * inner, features), (features, inner))
    return stored(form, *gate_up, experts=24, device="cuda"), stored(form, *down, experts=24, device="cuda")


def exact(x: torch.Tensor, routes: Routes, gate_up: Stored, down: Stored, activation: GatedActivation, *biases):
    """The sum of a token's experts in float32."""
    return moe_experts.twin(
        x.float(), routes, ExpertWeights(gate_up, down, activation, *(bias.float() for bias in biases))
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 2, 5, 64, 130, 500, 1500])
@pytest.mark.parametrize("activation", [SILU, CLAMPED])
def test_stored_experts(form, tokens, activation):
    gate_up, down = mixture(form)
    features = down.shape[1]
    biases = random(24, gate_up.shape[1]).bfloat16(), random(24, features).bfloat16()
    x, residual = random(tokens, features).bfloat16(), random(tokens, features).bfloat16()
    routes = route(random(tokens, 24), Routing(4, normalise=True))
    want, got = exact(x, routes, gate_up, down, activation, *biases), residual.clone()
    moe_experts(x, routes, ExpertWeights(gate_up, down, activation, *biases), residual_TD=got)
    close(got - residual, want)


@pytest.mark.parametrize("tokens", [3, 8, 17, 48, 64, 100, 160, 250, 900])
@pytest.mark.parametrize(("features", "inner"), [(2880, 2880), (2048, 768), (576, 192), (704, 448), (160, 64)])
@pytest.mark.parametrize("activation", [SILU, CLAMPED])
@pytest.mark.parametrize("weigh_inputs", [False, True])
def test_experts_in_mxfp4_of_any_size(tokens, features, inner, activation, weigh_inputs):
    form = "e2m1 e8m0 32"
    gate_up = stored(form, 2 * inner, features, experts=32, device="cuda")
    down = stored(form, features, inner, experts=32, device="cuda")
    biases = random(32, 2 * inner).bfloat16(), random(32, features).bfloat16()
    x, residual = random(tokens, features).bfloat16(), random(tokens, features).bfloat16()
    routes = route(random(tokens, 32), Routing(4, normalise=True))
    own = ExpertWeights(gate_up, down, activation, *biases, weigh_inputs)
    exactly = own._replace(gate_up_bias_E2I=biases[0].float(), down_bias_ED=biases[1].float())
    want, got = moe_experts.twin(x.float(), routes, exactly), residual.clone()
    moe_experts(x, routes, own, residual_TD=got)
    close(got - residual, want)


@pytest.mark.parametrize(("form", "activations"), [("fp8 row", "token"), ("int8 row", "token"), ("fp8 block", "block")])
@pytest.mark.parametrize("tokens", [1, 64, 1500])
def test_many_tokens_are_rounded_as_8_bit_experts_ask(form, activations, tokens):
    gate_up, down = (
        stored(form, *sizes, experts=24, device="cuda")._replace(activations=activations)
        for sizes in ((768, 640), (640, 384))
    )
    x, routes = random(tokens, 640).bfloat16(), route(random(tokens, 24), Routing(4, normalise=True))
    got = moe_experts(x, routes, ExpertWeights(gate_up, down, SILU)).float()
    want = exact(x, routes, gate_up, down, SILU)
    assert (got - want).norm() < 6e-2 * want.norm()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 9])
def test_stored_experts_in_a_graph_follow_the_routing(form, tokens):
    gate_up, down = mixture(form)
    x, logits, routing = random(tokens, down.shape[1]).bfloat16(), random(tokens, 24), Routing(4, normalise=True)
    moe_experts(x, route(logits, routing), ExpertWeights(gate_up, down, SILU))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe_experts(x, route(logits, routing), ExpertWeights(gate_up, down, SILU))
    for _ in range(3):
        logits.copy_(random(tokens, 24))
        graph.replay()
        close(out, exact(x, route.twin(logits, routing), gate_up, down, SILU))


def of_whole_blocks(form: str) -> tuple[Stored, Stored]:
    """Both matrices of 24 experts, in sizes that are unpacked before products of many tokens."""
    return stored(form, 768, 640, experts=24, device="cuda"), stored(form, 640, 384, experts=24, device="cuda")


@pytest.mark.parametrize("form", ["e2m1 e8m0 32", "int4 f16 128"])
def test_experts_are_unpacked_beside_the_products_of_those_before(form, monkeypatch):
    gate_up, down = of_whole_blocks(form)
    routes = [route(random(2200, 24), Routing(8, normalise=True)) for _ in range(4)]
    x = random(2200, down.shape[1]).bfloat16()
    want = layers(x, routes, gate_up, down, wait=False)  # all experts at once
    monkeypatch.setattr(moe_unpacked, "EXPERTS_BYTES", 8 * gate_up.shape[1] * gate_up.shape[2] * 2)
    assert moe_unpacked.experts_at_once(gate_up, 2, moe_unpacked.EXPERTS_BYTES) == (4, 2)
    for _ in range(10):
        assert torch.equal(layers(x, routes, gate_up, down, wait=False), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = layers(x, routes, gate_up, down, wait=False)
    for _ in range(10):
        graph.replay()
        assert torch.equal(got, want)


def test_an_interrupt_between_products_leaves_streams_in_order(monkeypatch):
    gate_up, down = of_whole_blocks("e2m1 e8m0 32")
    routes, x = [route(random(2200, 24), Routing(8, normalise=True))], random(2200, down.shape[1]).bfloat16()
    want, product, calls = layers(x, routes, gate_up, down, wait=False), moe_unpacked.many_product, []
    monkeypatch.setattr(moe_unpacked, "EXPERTS_BYTES", 8 * gate_up.shape[1] * gate_up.shape[2] * 2)

    def interrupted(*args, **own):
        calls.append(torch.cuda.current_stream())
        if len(calls) == 3:
            raise KeyboardInterrupt
        return product(*args, **own)

    stream = torch.cuda.current_stream()
    with monkeypatch.context() as only, pytest.raises(KeyboardInterrupt):
        only.setattr(moe_unpacked, "many_product", interrupted)
        layers(x, routes, gate_up, down, wait=False)
    assert calls[0] == calls[2] == stream != calls[1] and torch.cuda.current_stream() == stream
    assert torch.equal(layers(x, routes, gate_up, down, wait=False), want)


@pytest.mark.parametrize(
    ("dtype", "features", "inner", "activation", "weigh_inputs"),
    [
        (torch.bfloat16, 256, 64, SILU, False),
        (torch.float16, 320, 192, CLAMPED, False),
        (torch.bfloat16, 576, 320, GatedActivation("limited_silu", 2.0), True),
        (torch.bfloat16, 2880, 704, CLAMPED, False),
        (torch.float16, 256, 64, SILU, True),
    ],
)
def test_piped_products(dtype, features, inner, activation, weigh_inputs, monkeypatch):
    """In Gluon. Of seven experts one has no pair and one has few."""
    if not moe_piped.has_gluon(torch.device("cuda", 0)):
        pytest.skip("another version of Triton, or another card")
    own = (random(7, 2 * inner, features) / features**0.5, random(7, features, inner) / inner**0.5)
    gate_up, down = (weights.to(dtype) for weights in own)
    biases = random(7, 2 * inner).to(dtype), random(7, features).to(dtype)
    chances = torch.tensor([0.0, 0.0, -20.0, 0.0, 2.0, -5.0, 1.0], device="cuda")
    for tokens, given in ((1333, biases), (700, ())):
        x, routes = random(tokens, features).to(dtype), route(random(tokens, 7) + chances, Routing(2, normalise=True))
        exact_given = (bias.float() for bias in given)
        want = moe_experts.twin(
            x.float(),
            routes,
            ExpertWeights(gate_up.float(), down.float(), activation, *exact_given, weigh_inputs=weigh_inputs),
        )
        own = ExpertWeights(gate_up, down, activation, *given, weigh_inputs=weigh_inputs)
        got = moe_experts(x, routes, own)
        close(got, want)
        with monkeypatch.context() as only:
            only.setattr(moe_piped, "has_gluon", lambda device: False)
            close(got, moe_experts(x, routes, own))
        for _ in range(5):
            assert torch.equal(moe_experts(x, routes, own), got)


@pytest.mark.parametrize(
    ("features", "inner", "weigh_inputs"), [(256, 128, False), (512, 384, True), (2048, 768, False)]
)
def test_piped_products_of_blocks(features, inner, weigh_inputs, monkeypatch):
    """Of 8 bits, in Gluon. Of seven experts one has no pair and one has few."""
    if not moe_piped.has_gluon(torch.device("cuda", 0)):
        pytest.skip("another version of Triton, or another card")
    gate_up, down = (
        stored("fp8 block", *sizes, experts=7, device="cuda")._replace(activations="block")
        for sizes in ((2 * inner, features), (features, inner))
    )
    biases = random(7, 2 * inner).bfloat16(), random(7, features).bfloat16()
    chances = torch.tensor([0.0, 0.0, -20.0, 0.0, 2.0, -5.0, 1.0], device="cuda")
    for tokens, given in ((1333, biases), (700, (None, None))):
        x = random(tokens, features).bfloat16()
        routes = route(random(tokens, 7) + chances, Routing(2, normalise=True))
        own = ExpertWeights(gate_up, down, SILU, *given, weigh_inputs=weigh_inputs)
        got = moe_experts(x, routes, own)
        with monkeypatch.context() as only:
            only.setattr(moe_piped, "has_gluon", lambda device: False)
            close(got, moe_experts(x, routes, own))
        for _ in range(5):
            assert torch.equal(moe_experts(x, routes, own), got)


def layers(x: torch.Tensor, routes: list[Routes], gate_up: Stored, down: Stored, *, wait: bool) -> torch.Tensor:
    """Mixtures that each need the one before, and nothing between them."""
    stream = x.clone()
    for own in routes:
        moe_experts(stream, own, ExpertWeights(gate_up, down, CLAMPED), residual_TD=stream)
        if wait:
            torch.cuda.synchronize()
    return stream


@pytest.mark.parametrize("form", ["fp8 row", "fp8 block", "e2m1 e8m0 32", "int4 bf16 32", "int4 f16 128"])
@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_a_chain_of_dependent_launches_keeps_its_order(form, tokens):
    gate_up, down = mixture(form)
    x = random(tokens, down.shape[1]).bfloat16()
    routes = [route(random(tokens, 24), Routing(4, normalise=True)) for _ in range(10)]
    want = layers(x, routes, gate_up, down, wait=True)
    assert want.isfinite().all() and not torch.equal(want, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers(x, routes, gate_up, down, wait=False)
    for _ in range(20):
        graph.replay()
        assert torch.equal(out, want)


def test_experts_in_a_graph_follow_the_routing():
    x, gate_up, down = random(9, 256), random(16, 256, 256) * 0.05, random(16, 256, 128) * 0.05
    logits, routing = random(9, 16), Routing(4, normalise=True)
    moe_experts(x, route(logits, routing), ExpertWeights(gate_up, down, SILU))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe_experts(x, route(logits, routing), ExpertWeights(gate_up, down, SILU))
    logits.copy_(random(9, 16))
    graph.replay()
    close(out, moe_experts.twin(x, route.twin(logits, routing), ExpertWeights(gate_up, down, SILU)))


def test_a_token_is_the_same_alone_and_among_others():
    x, gate_up, down = random(40, 256).bfloat16(), random(16, 256, 256).bfloat16(), random(16, 256, 128).bfloat16()
    routes = route(random(40, 16), Routing(4))
    every = moe_experts(x, routes, ExpertWeights(gate_up, down, SILU))
    some = Routes(routes.weights_TA[8:24], routes.experts_TA[8:24])
    assert torch.equal(every[8:24], moe_experts(x[8:24], some, ExpertWeights(gate_up, down, SILU)))


@pytest.mark.parametrize("form", ["bf16", "fp8 row", "fp8 block", "int8 row", "int4 f16 128"])
@pytest.mark.parametrize("tokens", [1, 3, 17, 48, 90, 200])
def test_what_all_tokens_pass_is_computed_beside_their_experts(form, tokens):
    """Ten layers in a row, as a graph that is replayed: whoever reads what a program writes must have waited for it."""
    features, inner, wide, experts = 768, 384, 640, 24

    def matrix(outputs: int, inputs: int, number: int | None = None) -> torch.Tensor | Stored:
        if form != "bf16":
            return stored(form, outputs, inputs, experts=number, device="cuda")
        return (random(*(() if number is None else (number,)), outputs, inputs) * 0.05).bfloat16()

    gate_up, down = matrix(2 * inner, features, experts), matrix(features, inner, experts)
    shared = Shared(matrix(2 * wide, features), matrix(features, wide))
    x = random(tokens, features).bfloat16()
    routes = [route(random(tokens, experts), Routing(4, normalise=True)) for _ in range(10)]
    own, norm = (gate_up, down, SILU), Norm(torch.ones(features, device="cuda").bfloat16(), 1e-6)

    def run(wait: bool) -> torch.Tensor:
        stream = x.clone()
        for one in routes:
            normed = norm(stream)
            pairs = moe_experts_then(normed, one, ExpertWeights(*own), residual_TD=stream, shared=shared)
            if pairs is not None:
                add_pairs_(stream, pairs)
            if wait:
                torch.cuda.synchronize()
        return stream

    normed, got, want = norm(x), x.clone(), x.float()
    pairs = moe_experts_then(normed, routes[0], ExpertWeights(*own), residual_TD=got, shared=shared)
    if pairs is not None:
        add_pairs_(got, pairs)
    exactly = (gate_up.float(), down.float(), SILU) if form == "bf16" else own
    also = Shared(*(one.float() for one in shared)) if form == "bf16" else shared
    moe_experts_then.twin(normed.float(), routes[0], ExpertWeights(*exactly), residual_TD=want, shared=also)
    assert (got.float() - want).norm() <= 1e-2 * want.norm()
    want = run(wait=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(wait=False)
    for _ in range(20):
        graph.replay()
        assert torch.equal(out, want)
    assert all(
        (one.tiles is None) == (tokens == 1) for one in routes
    )  # a single token's experts are read from its routes
    assert not any(one.tiles.counts.any() for one in routes if one.tiles)
