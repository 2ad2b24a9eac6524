"""Mixtures by the CPU kernels: router, choice and experts against their twins, on any number of threads and beside any other tokens."""

from __future__ import annotations

import itertools

import pytest
import torch

from helpers.compiler import needs_compiler
from pagerunner.ops.activation import SILU, GatedActivation
from pagerunner.ops.moe import ExpertWeights, moe_experts
from pagerunner.ops.native import mixture
from pagerunner.ops.native.calls import record
from pagerunner.ops.panels import Layout, panel_width, put_rows
from pagerunner.ops.routing import Routes, Routing, counting_experts, expert_logits, route, touched_experts

pytestmark = needs_compiler
ACTIVATIONS = [SILU, GatedActivation("clamped_swiglu", 7.0), GatedActivation("limited_silu", 0.3)]
ROUTINGS = [
    Routing(3),
    Routing(2, normalise=True),
    Routing(2, "sigmoid", factor=2.5, groups=4, kept_groups=2),
    Routing(2, "sqrtsoftplus", normalise=True, groups=2, kept_groups=1),
    Routing(12),
]


def in_panels(matrices_EOI: torch.Tensor, sections: int) -> torch.Tensor:
    width = panel_width()
    assert width is not None
    layout = Layout(width, matrices_EOI.shape[1], sections)
    made = torch.full((len(matrices_EOI), layout.panels, matrices_EOI.shape[2], width), torch.nan)
    for panels_PIN, matrix_OI in zip(made, matrices_EOI, strict=True):
        put_rows(panels_PIN, layout, 0, matrix_OI)
    return made


@pytest.mark.parametrize(("tokens", "features", "experts"), [(0, 8, 4), (1, 5, 3), (3, 64, 8), (17, 301, 37)])
@pytest.mark.parametrize("bias", [False, True])
def test_logits_equal_their_twin(tokens: int, features: int, experts: int, bias: bool) -> None:
    x_TD, weight_ED = torch.randn(tokens, features + 3)[:, 1:-2], torch.randn(experts, features)
    bias_E = torch.randn(experts) if bias else None
    want = expert_logits.twin(x_TD, weight_ED, bias_E)
    torch.testing.assert_close(expert_logits(x_TD, weight_ED, bias_E), want, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 70])
def test_routes_equal_their_twin(routing: Routing, bias: bool, tokens: int) -> None:
    logits_TE, bias_E = 8 * torch.randn(tokens, 12), torch.randn(12) if bias else None
    got, want = route(logits_TE, routing, bias_E), route.twin(logits_TE, routing, bias_E)
    assert torch.equal(got.experts_TA.sort(-1).values, want.experts_TA.sort(-1).values)
    order = got.experts_TA.argsort(-1), want.experts_TA.argsort(-1)
    torch.testing.assert_close(got.weights_TA.gather(-1, order[0]), want.weights_TA.gather(-1, order[1]))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1.0])
def test_routes_of_odd_logits_name_experts(value: float) -> None:
    for routing in ROUTINGS:
        found = route(torch.full((3, 12), value), routing).experts_TA
        assert bool(((found >= 0) & (found < 12)).all())


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("bias", [False, True])
def test_no_token_goes_to_an_expert_twice(routing: Routing, bias: bool) -> None:
    """Experts that a router rules out with -inf are chosen only after all others, each of them once."""
    rows = [torch.full((12,), -torch.inf) for _ in range(5)]
    rows[1][7], rows[2][0], rows[3][[4, 11]], rows[4][5] = 1.0, -3.0, torch.tensor([2.0, 1.0]), torch.nan
    for logits_TE in (torch.stack(rows), torch.full((2, 12), torch.nan), torch.full((2, 12), torch.inf)):
        found = route(logits_TE, routing, torch.full((12,), -torch.inf) if bias else None).experts_TA
        assert all(len(set(chosen)) == routing.active for chosen in found.tolist())
    if not bias and routing.active > 1:
        chosen = route(torch.stack(rows), routing).experts_TA.tolist()
        assert 7 in chosen[1] and 0 in chosen[2] and 5 in chosen[4]


@pytest.mark.parametrize("tokens", [1, 64, 65])
def test_of_equal_logits_the_first_are_chosen_in_steps_of_any_size(tokens: int) -> None:
    """A prompt's token goes where it goes again in a decode step. A router of zeros makes them equal, and copied experts do."""
    logits_TE = torch.tensor([0.0, 2, 1, 2, 1, 1, 2, 1]).repeat(tokens, 1)
    assert route(logits_TE, Routing(5)).experts_TA.tolist() == [[1, 3, 6, 2, 4]] * tokens


def test_a_measurement_counts_experts_that_few_tokens_touch() -> None:
    device = torch.device("cpu")
    with counting_experts():
        before, logits_TE = touched_experts(device).clone(), torch.eye(3, 8)
        route(logits_TE, Routing(1))
        assert (touched_experts(device) - before).tolist() == [3, 1]
        recording, _ = record(torch.empty(1 << 16, dtype=torch.uint8), lambda: route(logits_TE, Routing(1)))
        again = recording.finish(2)
        again()
        again()
        assert (touched_experts(device) - before).tolist() == [9, 3]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("features", "inner"), [(32, 16), (37, 21), (100, 75)])
@pytest.mark.parametrize(("bias", "weigh", "residual"), list(itertools.product([False, True], repeat=3)))
def test_experts_equal_their_twin(
    activation: GatedActivation, features: int, inner: int, bias: bool, weigh: bool, residual: bool
) -> None:
    count = 6
    gate_up_EOI, down_EOI = torch.randn(count, 2 * inner, features), torch.randn(count, features, inner)
    biases = (torch.randn(count, 2 * inner), torch.randn(count, features)) if bias else (None, None)
    matrices = mixture.Matrices(in_panels(gate_up_EOI, 2), in_panels(down_EOI, 1), *biases)
    for tokens in (0, 1, 2, 7, 40, 64):
        x_TD = torch.randn(tokens, features + 1)[:, 1:]
        routes = route(torch.randn(tokens, count), Routing(3))
        held = [torch.ones(tokens, features + 2)[:, :-2] if residual else None for _ in range(2)]
        want = moe_experts.twin(
            x_TD,
            routes,
            ExpertWeights(gate_up_EOI, down_EOI, activation, *biases, weigh_inputs=weigh),
            residual_TD=held[0],
        )
        got = mixture.experts(x_TD, routes, matrices, inner, activation, weigh_inputs=weigh, residual_TD=held[1])
        torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3)


def test_a_token_is_the_same_beside_others_and_on_any_number_of_threads() -> None:
    gate_up_EOI, down_EOI = torch.randn(8, 2 * 300, 200), torch.randn(8, 200, 300)
    matrices = mixture.Matrices(in_panels(gate_up_EOI, 2), in_panels(down_EOI, 1), None, None)
    x_TD, weight_ED = torch.randn(33, 200), torch.randn(8, 200)

    def run(own_TD: torch.Tensor) -> torch.Tensor:
        routes = route(expert_logits(own_TD, weight_ED), Routing(2))
        return mixture.experts(own_TD, routes, matrices, 300, SILU, weigh_inputs=False, residual_TD=None)

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = run(x_TD)
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            assert torch.equal(run(x_TD), want)
            assert torch.equal(torch.cat([run(x_TD[:1]), run(x_TD[1:20]), run(x_TD[20:])]), want)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("residual", [False, True])
def test_padding_goes_to_no_expert(residual: bool) -> None:
    gate_up_EOI, down_EOI = torch.randn(6, 32, 24), torch.randn(6, 24, 16)
    matrices = mixture.Matrices(in_panels(gate_up_EOI, 2), in_panels(down_EOI, 1), None, None)
    for padding in ([1, 3, 4], [0, 1, 2, 3, 4]):
        x_TD, row_T = torch.randn(5, 24), torch.arange(5, dtype=torch.int32)
        row_T[padding] = -1
        routes = route.twin(torch.randn(5, 6), Routing(3), row_T=row_T)
        held = [torch.ones(5, 24) if residual else None for _ in range(2)]
        want = moe_experts.twin(
            x_TD, routes, ExpertWeights(gate_up_EOI, down_EOI, SILU, weigh_inputs=False), residual_TD=held[0]
        )
        got = mixture.experts(x_TD, routes, matrices, 16, SILU, weigh_inputs=False, residual_TD=held[1])
        torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("wrong", [-2, 4, 2**40])
def test_an_expert_that_is_not_there_is_refused(wrong: int) -> None:
    matrices = mixture.Matrices(in_panels(torch.randn(4, 32, 16), 2), in_panels(torch.randn(4, 16, 16), 1), None, None)
    x_TD, residual_TD = torch.randn(2, 16), torch.ones(2, 16)
    routes = Routes(torch.ones(2, 2), torch.tensor([[0, 1], [2, wrong]]))
    with pytest.raises(IndexError, match="an expert that isn't there"):
        mixture.experts(x_TD, routes, matrices, 16, SILU, weigh_inputs=False, residual_TD=residual_TD)
    assert torch.equal(residual_TD, torch.ones(2, 16))


def test_routes_that_do_not_fit_are_refused() -> None:
    few = Routing(3, groups=2, kept_groups=1)  # one group has 2 experts
    for routing in (Routing(5), Routing(0), Routing(1, groups=3), Routing(1, groups=2, kept_groups=3), few):
        with pytest.raises(ValueError, match="doesn't fit 4 experts"):
            mixture.route(torch.randn(1, 4), routing, None)
