"""Products that are joined with a norm, a gate or an addition are those operations one after another, in every form.

A method that wraps a form and has `apply` alone, as one for adapters would, takes the second way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from helpers.compiler import needs_compiler
from helpers.quantise import CONFIGS, PACKED
from pagerunner.layers.linear import FusedLinear, Linear
from pagerunner.layers.norm import OffsetRMSNorm, RMSNorm
from pagerunner.models.checkpoint.forms import Forms, Held
from pagerunner.models.checkpoint.loader import materialize, weights_bytes
from pagerunner.models.checkpoint.panels import store_in_panels
from pagerunner.models.configs.quantization import asked_format, read_format
from pagerunner.quant.base import WeightMethod
from pagerunner.quant.sinks import Sink

FEATURES, INNER = 96, 64


class Alone(WeightMethod):
    """A form of which only the product is used; `seen` are its inputs."""

    def __init__(self, form: WeightMethod) -> None:
        self.form = form
        self.seen: list[torch.Tensor] = []

    def create(self, out_features: int, in_features: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return self.form.create(out_features, in_features, dtype)

    def sinks(self, weights: Mapping[str, torch.Tensor], rows: slice) -> dict[str, Sink]:
        return self.form.sinks(weights, rows)

    def dense(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.form.dense(weights)

    def apply(self, x_TI: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        self.seen.append(x_TI)
        return self.form.apply(x_TI, weights)


def stored(layer: Linear, kind: str) -> Linear:
    """The layer in a format, with random weights."""
    model: Any = layer
    if kind == "panels":
        assert store_in_panels(model) == 1
    elif kind != "floats":
        said = (
            asked_format("fp8", None, kind)
            if kind == "online"
            else read_format({**CONFIGS, **{k: c for k, (c, _) in PACKED.items()}}[kind], kind)
        )
        assert said is not None
        Forms(said, torch.float32, Held(frozenset(), torch.float16), True).store(layer.sources("mlp."))
    materialize(model, torch.zeros(weights_bytes(model), dtype=torch.uint8))
    layer.randomize(torch.Generator().manual_seed(0))
    return layer


KINDS = ["floats", pytest.param("panels", marks=needs_compiler), "online", *CONFIGS, *PACKED]


@pytest.mark.parametrize("kind", KINDS)
def test_joined_products_are_the_operations_one_after_another(kind: str) -> None:
    torch.manual_seed(0)
    up = stored(FusedLinear(FEATURES, {"gate_proj": INNER, "up_proj": INNER}, torch.float32, bias=True), kind)
    down = stored(Linear(INNER, FEATURES, torch.float32, bias=True), kind)
    for norm in (RMSNorm(FEATURES, 1e-6, torch.float32), OffsetRMSNorm(FEATURES, 1e-6, torch.float32)):
        norm.weights = {"weight": torch.rand(FEATURES)}
        for tokens in (1, 40):
            x = 30 * torch.randn(tokens, FEATURES)
            joined = computed(up, down, x, norm)
            forms = up.method, down.method
            up.method, down.method = alone = Alone(up.method), Alone(down.method)
            found = computed(up, down, x, norm)
            up.method, down.method = forms
            for left, right in zip(joined, found, strict=True):
                torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)
            normed, before_gate = norm(x), joined[0]
            assert all(torch.equal(seen, normed) for seen in alone[0].seen) and len(alone[0].seen) == 2
            torch.testing.assert_close(
                alone[1].seen[1],
                torch.nn.functional.silu(before_gate[:, :INNER]) * before_gate[:, INNER:],
                rtol=1e-4,
                atol=1e-4,
            )


def computed(up: Linear, down: Linear, x: torch.Tensor, norm: RMSNorm) -> list[torch.Tensor]:
    gate_up, inner = up.of_norm(x, norm), up.silu_of_norm(x, norm)
    added, gated = x.clone(), x.clone()
    down.add_(inner, added)
    down.add_silu_(gate_up, gated)
    return [gate_up, inner, added, gated]
