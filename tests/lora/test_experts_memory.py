"""What a step with adapters of experts holds at once is what a plan counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.alive import Alive
from helpers.published import all_published
from pagerunner.config import EngineArgs
from pagerunner.engine.startup.resolve import resolve
from pagerunner.layers import moe
from pagerunner.layers.moe import Experts, ExpertSizes
from pagerunner.ops.lora import TILE, Adapters, Blocks, FusedExperts, WorkList
from pagerunner.ops.moe import Routes
from pagerunner.quant import base


def product_as_kernels_make_it(x: torch.Tensor, routes: Routes, weights_EOI: Any, bias_EO: Any) -> torch.Tensor:
    """What it holds beside its output: the inputs in the order of the pairs' experts."""
    x_PI = x.index_select(0, torch.zeros(routes.experts_TA.numel(), dtype=torch.int32))
    return x_PI.new_empty(len(x_PI), weights_EOI.shape[1])


@pytest.mark.parametrize(
    ("inner", "interleaved", "weigh_inputs"),
    [(64, False, False), (512, False, False), (512, True, False), (64, False, True)],
    ids=["wide stream", "wide experts", "gates beside ups", "weighed inputs"],
)
def test_pairs_of_experts_adapters(
    monkeypatch: pytest.MonkeyPatch, inner: int, interleaved: bool, weigh_inputs: bool
) -> None:
    tokens, active, number, features = 200, 2, 4, 256
    layer = Experts(ExpertSizes(number, features, inner), torch.float32, weigh_inputs=weigh_inputs)
    layer.interleaved = interleaved
    layer.activation = lambda gate_up_P2I: gate_up_P2I.new_empty(len(gate_up_P2I), inner)  # type: ignore[assignment]
    monkeypatch.setattr(base, "pair_products", product_as_kernels_make_it)
    monkeypatch.setattr(moe, "add_pairs_", lambda *_: None)
    places = torch.full((1, 3 * number, 1, 2), -1, dtype=torch.int64)
    none, nothing = Blocks(torch.zeros(TILE), places), WorkList(torch.empty(0, TILE), torch.empty(0))
    adapters = Adapters(torch.zeros(tokens, dtype=torch.int32), None, 1, none, nothing)
    x_TD, out_TD = torch.empty(2, tokens, features).unbind()
    routes = Routes(torch.rand(tokens, active), torch.randint(number, (tokens, active), dtype=torch.int32))
    with Alive() as alive:
        layer._add_adapted_(x_TD, routes, adapters, FusedExperts.of(0, *layer.sizes), out_TD)
    counted = layer.adapted_bytes(tokens * active)
    assert counted < alive.peak < 1.15 * counted, "the lists of pairs are little"


def test_they_are_part_of_a_gpus_plan(tmp_path: Path) -> None:
    """Of one that isn't here: a start measures them. Example: 2,048 tokens of Qwen3-30B-A3B."""
    model = str(all_published()["Qwen/Qwen3-30B-A3B"].place(tmp_path))
    tokens: dict[str, Any] = {"max_num_batched_tokens": 2048, "hf_overrides": {"num_hidden_layers": 2}}

    def rows(device: str, **options: Any) -> dict[str, int]:
        args = EngineArgs(model=model, device=device, **(tokens | options))  # type: ignore[arg-type]
        return dict(resolve(args, 80_000_000_000, plan_only=True).plan.other)

    without, alone = rows("cuda"), {"lora_target_modules": ["q_proj"], "block_size": 256}
    all_products = rows("cuda", enable_lora=True, block_size=256)
    assert all_products.keys() - without.keys() == {"tables of adapters", "experts' adapters in a step"}
    assert all_products["experts' adapters in a step"] == 2048 * 8 * (2 * 768 + 2048) * 2
    assert rows("cuda", enable_lora=True, **alone).keys() - without.keys() == {"tables of adapters"}
    assert "experts' adapters in a step" not in rows("cpu", enable_lora=True, block_size=256)
