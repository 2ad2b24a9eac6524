"""What `batch_invariant` tries at an engine's start: a step that changes a token's bits is noticed."""

from __future__ import annotations

import pytest
import torch

from helpers.borders import set_borders
from pagerunner.errors import ConfigError
from pagerunner.ops.activation import SILU
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
