"""The training script: its layers are those of transformers, and the shipped checkpoints are what its recipes say."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

import train_demo
from gated_delta import fast_layers, gated_delta
from pagerunner.demo import demo_names, demo_path
from windowed import new_model

SMALL: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}


@pytest.mark.parametrize("length", [1, 31, 32, 33, 200])
def test_the_recurrence_without_a_loop_is_the_one_with_it(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    query, key = torch.randn(2, 2, length, 3, 8, generator=generator)
    value = torch.randn(2, length, 3, 12, generator=generator)
    decay, rate = -torch.rand(2, length, 3, generator=generator), torch.rand(2, length, 3, generator=generator)
    want, _ = torch_recurrent_gated_delta_rule(
        query, key, value, g=decay, beta=rate, use_qk_l2norm_in_kernel=True, output_final_state=False
    )
    found, _ = gated_delta(query, key, value, g=decay, beta=rate)
    torch.testing.assert_close(found, want, atol=2e-6, rtol=0)


def test_fast_layers_have_the_gradients_of_transformers() -> None:
    torch.manual_seed(0)
    model = new_model(AutoConfig.for_model(**SMALL), dtype=torch.float32, attn_implementation="sdpa")
    ids = torch.randint(0, 64, (2, 75))

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        logits = model(input_ids=ids, attention_mask=train_demo.NO_PADDING, use_cache=False).logits
        train_demo.weighted_loss(logits, ids, torch.ones_like(ids), 1.0).backward()
        return [logits.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

    want = gradients()
    with fast_layers():
        found = gradients()
    for ours, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3)


def test_every_demo_has_a_recipe() -> None:
    assert set(demo_names()) <= set(train_demo.RECIPES)


@pytest.mark.parametrize("name", demo_names())
def test_a_checkpoint_is_what_its_recipe_says(name: str) -> None:
    recipe = train_demo.RECIPES[name]
    config = json.loads((demo_path(name) / "config.json").read_text())
    assert {field: config[field] for field in recipe.config} == recipe.config
    assert config["vocab_size"] == recipe.vocab_size
