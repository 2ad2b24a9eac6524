"""What `batch_invariant` tries at an engine's start: a step that changes a token's bits is noticed."""

from __future__ import annotations

import pytest
import torch

from helpers.borders import set_borders
from pagerunner.errors import ConfigError
from pagerunner.ops.activation import SILU, silu_and_mul
from pagerunner.ops.linear import Norm, linear, linear_add_, norm_linear, norm_linear_silu
from pagerunner.ops.routing import Routing
from pagerunner.quant import fixed
from pagerunner.quant.base import Mixture

ROUTING = Routing(2, normalise=True)


@pytest.fixture
def mixture(monkeypatch: pytest.MonkeyPatch) -> tuple[Mixture, torch.Tensor]:
    """Four experts, and the matrix that chooses; numbers are small integers, so each order has the same sums."""
    monkeypatch.setattr(fixed, "_TRIED", (1, 3, 17))
    set_borders(monkeypatch, "experts", many=16)
    generator = torch.Generator().manual_seed(0)
    numbers = (torch.randint(-2, 3, shape, generator=generator).float() for shape in ((4, 16, 8), (4, 8, 8), (4, 8)))
    gate_up, down, router = numbers
    return Mixture({"weight": gate_up}, {"weight": down}, SILU), router


def test_a_mixture_whose_pairs_are_alone_passes(mixture: tuple[Mixture, torch.Tensor]) -> None:
    fixed.check_experts(*mixture, ROUTING)


@pytest.mark.parametrize("name", ["fixed_pairs", "expert_logits"])
def test_a_mixture_that_goes_by_the_step_is_refused(
    mixture: tuple[Mixture, torch.Tensor], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = getattr(fixed, name)

    def by_step(x_TD: torch.Tensor, *rest: object, **options: object) -> torch.Tensor:
        return op(x_TD, *rest, **options) * (1 + 2.0**-20 * (len(x_TD) == 3))

    monkeypatch.setattr(fixed, name, by_step)
    with pytest.raises(
        ConfigError, match=r"4 experts of 8 features is computed by other sums for 3 tokens than for 34"
    ):
        fixed.check_experts(*mixture, ROUTING)


def test_a_matrix_that_goes_by_the_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix_OI = torch.randint(-2, 3, (8, 16)).float()
    monkeypatch.setattr(torch, "randn", lambda *sizes, **_: torch.ones(*sizes))
    fixed.check_products([matrix_OI])
    product = fixed.F.linear
    monkeypatch.setattr(fixed.F, "linear", lambda x, w: product(x, w) + (len(x) == 7))
    with pytest.raises(ConfigError, match=r"matrix of \[8, 16\] by other sums for 7 tokens than for 257"):
        fixed.check_products([matrix_OI])


def test_no_operation_takes_a_kernel_by_the_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that others join goes one after another, through the one product."""
    method, weight_OI, x_TI = fixed.FixedOrder(), torch.randn(8, 6), torch.randn(3, 6)
    weights, norm = {"weight": weight_OI, "bias": torch.randn(8)}, Norm(torch.rand(6), 1e-6)
    for op in (norm_linear, norm_linear_silu, linear, linear_add_):
        monkeypatch.setattr(f"pagerunner.quant.base.{op.twin.__name__}", None)
    want = method.apply(x_TI, weights)
    torch.testing.assert_close(want, torch.nn.functional.linear(x_TI, weight_OI, weights["bias"]))
    assert torch.equal(method.apply_silu(x_TI, weights), silu_and_mul(want))
    normed = method.apply(norm(x_TI), weights)
    assert torch.equal(method.apply_to_norm(x_TI, norm, weights), normed)
    assert torch.equal(method.apply_to_norm_silu(x_TI, norm, weights), silu_and_mul(normed))
    assert not method.joins_norm(3, weight_OI.numel(), weights)
