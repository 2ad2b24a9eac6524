"""A warm-up's numbers of tokens need every kernel of a mixture of experts that any other number of tokens needs."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.effort import by_days, share_of_the_day
from helpers.launches import compiled_for
from pagerunner.layers.module import Module
from pagerunner.layers.moe import Experts, ExpertSizes, Router, kernels_of
from pagerunner.ops import quantize as twins
from pagerunner.ops.activation import SILU
from pagerunner.ops.linear import Norm
from pagerunner.ops.moe import ExpertWeights, Shared, moe_experts, moe_experts_then
from pagerunner.ops.routing import Routing, norm_expert_logits, route
from pagerunner.ops.stored import Stored4, Stored8
from pagerunner.quant.ranked import SummedExperts
from pagerunner.runner.graphs import MIXED_SIZES
from pagerunner.runner.kernel_counts import more_counts

interpreter = pytest.importorskip("triton.runtime.interpreter")
MOST, FEATURES, INNER = 8192, 256, 256
USUAL = {*range(1, 17), 32, *MIXED_SIZES, 272, 275, MOST}
"""Numbers of tokens that a warm-up runs in any case."""
SIZES = {"Qwen3-30B": (128, 8), "gpt-oss-20b": (32, 4), "DeepSeek-V2-Lite": (64, 6), "Qwen3-Next": (512, 10)}


def weights(form: str, experts: int, outputs: int, inputs: int) -> Any:
    """All experts' matrices, which no kernel reads here."""
    if form == "bf16":
        return torch.empty(experts, outputs, inputs, dtype=torch.bfloat16)
    if form == "fp8":
        codes = torch.empty(experts, outputs, inputs, dtype=torch.float8_e4m3fn)
        return Stored8(codes, torch.empty(experts, outputs // 128, inputs // 128), (128, 128), "block")
    codes = torch.empty(experts, outputs, inputs // 2, dtype=torch.uint8)
    return Stored4(codes, torch.empty(experts, outputs, inputs // 32, dtype=torch.uint8), 32, "e2m1")


def mixture(experts: int, active: int) -> list[Module]:
    """The modules of a layer that decide which kernels a number of tokens needs."""
    router = Router(FEATURES, experts, torch.bfloat16, Routing(active))
    return [router, Experts(ExpertSizes(experts, FEATURES, INNER), torch.bfloat16)]


def _of_expert_0(matrices: Any) -> Any:
    """One expert's matrix in the same form."""
    if isinstance(matrices, torch.Tensor):
        return matrices[0]
    return matrices._replace(codes=matrices.codes[0], scales=matrices.scales[0])


def rounded(x_TI: torch.Tensor, dtype: torch.dtype, grouped: bool) -> twins.Quantized:
    """Memory as `quantize` gives it, without the arithmetic."""
    groups = -(-x_TI.shape[1] // twins.GROUP) if grouped else 1
    return twins.Quantized(torch.empty(x_TI.shape, dtype=dtype), torch.empty(groups, x_TI.shape[0]).t())


class Layer:
    """A router and its experts, whose kernels aren't run: it tells which ones would be."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, experts: int, active: int, form: str) -> None:
        self.routing, self.experts = Routing(active), experts
        self.weights = weights(form, experts, 2 * INNER, FEATURES), weights(form, experts, FEATURES, INNER)
        self.shared = Shared(*(_of_expert_0(one) for one in self.weights))
        self.x = torch.empty(MOST, FEATURES, dtype=torch.bfloat16)
        self.launches: set[Any] = set()
        monkeypatch.setattr(twins, "_quantized", rounded)
        monkeypatch.setattr("pagerunner.ops.kernels.moe.moe.add_shared_", lambda *args: None)
        monkeypatch.setattr(
            interpreter.InterpretedFunction,
            "run",
            lambda kernel, *args, **how: self.launches.add(compiled_for(kernel, args, how)),
        )

    def kernels(self, tokens: int) -> set[Any]:
        self.launches = set()
        norm = Norm(torch.empty(FEATURES, dtype=torch.bfloat16), 1e-6)
        weight = torch.empty(self.experts, FEATURES, dtype=torch.bfloat16)
        if tokens <= 16:
            norm_expert_logits.kernel(self.x[:tokens], norm, weight)
        routes = route.kernel(torch.empty(tokens, self.experts), self.routing)
        x, experts = self.x[:tokens], ExpertWeights(*self.weights, SILU)
        moe_experts.kernel(x, routes._replace(order_P=None, starts_E1=None), experts)
        moe_experts.kernel(x, routes, experts)
        moe_experts_then.kernel(x, routes, experts, x, self.shared)
        return self.launches


@pytest.mark.parametrize(("model", "form"), by_days(SIZES, ["bf16", "fp8", "mxfp4"]))
def test_no_number_of_tokens_needs_a_kernel_that_the_warm_up_has_not_met(monkeypatch, model, form):
    layer = Layer(monkeypatch, *SIZES[model], form)
    more = more_counts(kernels_of(mixture(*SIZES[model])), USUAL, MOST)
    assert len(more) <= 8  # one for each bound between two ways of products
    met = set().union(*(layer.kernels(tokens) for tokens in (*USUAL, *more)))
    assert len(met) > 3
    for tokens in share_of_the_day(MOST, 97):
        assert layer.kernels(tokens + 1) <= met, tokens + 1


def test_the_warm_up_meets_sums_of_ranks_that_add_up_pairs() -> None:
    comm = SimpleNamespace(
        size=2, takes_pairs=lambda tokens, features, dtype: 40 < tokens <= 50 and features == FEATURES
    )
    router, experts = mixture(128, 8)
    assert isinstance(experts, Experts)
    usual = kernels_of([router, experts])
    experts.method = SummedExperts(experts.method, comm)
    more = kernels_of([router, experts])
    assert len(more) == len(usual) + 1
    assert [more[1](tokens) for tokens in (40, 41, 50, 51)] == [False, True, True, False]


@pytest.mark.parametrize("model", SIZES)
def test_between_two_numbers_of_tokens_that_need_the_same_kernels_there_are_no_others(model):
    """`more_counts` finds the numbers by it."""
    found = kernels_of(mixture(*SIZES[model]))
    assert len(found) == 2  # of the router, and of the experts
    for kernels in found:
        answers = [answer for answer, _ in itertools.groupby(map(kernels, [*range(1, 513), *range(513, MOST, 17)]))]
        assert len(answers) == len(set(answers))
