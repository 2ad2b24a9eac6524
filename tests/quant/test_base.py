"""Linears own a weight method, and use it for everything."""

from __future__ import annotations

import torch

from pagerunner.layers.linear import FusedLinear
from pagerunner.layers.norm import RMSNorm
from pagerunner.quant.base import WeightMethod


class Halves(WeightMethod):
    """A method with two tensors: the weight is their product."""

    def create(self, out_features: int, in_features: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {
            "weight": torch.empty(out_features, in_features, dtype=dtype, device="meta"),
            "scale": torch.empty(out_features, 1, dtype=torch.float32, device="meta"),
        }

    def apply(self, x_TI: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return x_TI @ (weights["weight"] * weights["scale"]).T


def test_another_method_brings_its_own_tensors_by_name_and_slice() -> None:
    linear = FusedLinear(4, {"a": 2, "b": 3}, torch.float32, method=Halves())
    linear.weights = {"weight": torch.ones(5, 4), "scale": torch.arange(5.0).unsqueeze(-1)}
    views = dict(linear.checkpoint("m.qkv."))
    assert sorted(views) == ["m.a.scale", "m.a.weight", "m.b.scale", "m.b.weight"]
    assert views["m.b.scale"].flatten().tolist() == [2, 3, 4]
    assert linear(torch.ones(1, 4)).tolist() == [[0, 4, 8, 12, 16]]


def test_another_method_works_behind_norms_and_into_the_residual_stream() -> None:
    linear, norm = FusedLinear(4, {"a": 2, "b": 2}, torch.float32, method=Halves()), RMSNorm(4, 1e-6, torch.float32)
    linear.weights = {"weight": torch.randn(4, 4), "scale": torch.rand(4, 1)}
    norm.weights = {"weight": torch.rand(4)}
    x = torch.randn(3, 4)
    applied = linear(norm(x))
    torch.testing.assert_close(linear.of_norm(x, norm), applied)
    gated = linear.method.apply_to_norm_silu(x, norm.parameters, linear.weights)
    torch.testing.assert_close(gated, torch.nn.functional.silu(applied[:, :2]) * applied[:, 2:])
    residual = torch.ones(3, 4)
    linear.add_(x, residual)
    torch.testing.assert_close(residual, linear(x) + 1)
