"""What a model says that it takes of a checkpoint: every weight once, whatever the checkpoint's layout, and where it may be cut."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.families import MAKERS
from helpers.published import Published, all_published
from pagerunner.layers.module import CheckpointTensor
from pagerunner.models.checkpoint.loader import Model, build_model, materialize, weights_bytes
from pagerunner.models.configs.reader import read_model_config

# Every published model that is plain or small; a mixture's declarations are as many as its experts' matrices.
PUBLISHED = [x for x in all_published().values() if "expert" not in x.file.read_text() or x.bytes < 70e9]


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def elements(tensor: CheckpointTensor) -> int:
    return math.prod(tensor.sink.shape)


def held(model: Model) -> int:
    return sum(tensor.numel() for module in model.modules() for tensor in module.weights.values())


def check(model: Model) -> dict[str, CheckpointTensor]:
    """Names are told once; what a checkpoint must hold is as much as there is to fill, and what it may hold instead is too."""
    tensors = list(model.checkpoint())
    known = {tensor.name: tensor for tensor in tensors}
    assert len(known) == len(tensors)
    assert sum(elements(tensor) for tensor in tensors if not tensor.instead_of) == held(model)
    for tensor in tensors:
        if tensor.instead_of:
            alternative = [tensor, *(known[name] for name in tensor.beside)]
            assert sum(map(elements, alternative)) == sum(elements(known[name]) for name in tensor.instead_of)
            assert all(one.instead_of == tensor.instead_of for one in alternative)
            assert all(known[name].owner is tensor.owner for name in tensor.instead_of)
    return known


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda published: published.repository)
def test_published_models_declare_all_of_their_weights_and_even_cuts(published: Published) -> None:
    model = build_model(replace(read_model_config(published.file, quantised=True), format=None), "bfloat16")
    for name, tensor in check(model).items():
        if tensor.cut is not None:
            assert tensor.sink.shape[tensor.cut] % 2 == 0, name


@pytest.mark.parametrize("family", MAKERS)
@pytest.mark.parametrize("instead", [False, True], ids=["as asked", "instead"])
def test_every_element_of_every_weight_is_filled(tmp_path: Path, family: str, instead: bool) -> None:
    path = MAKERS[family](tmp_path)
    model = build_model(read_model_config(path), "float32")
    materialize(model, torch.zeros(weights_bytes(model), dtype=torch.uint8))
    tensors = check(model).values()
    replaced = {name for tensor in tensors if instead for name in tensor.instead_of}
    for tensor in tensors:
        if bool(tensor.instead_of) == instead or not (tensor.instead_of or tensor.name in replaced):
            dtype = torch.int64 if torch.int64 in tensor.sink.dtypes else torch.float32
            tensor.sink.put(torch.ones(tensor.sink.shape, dtype=dtype), copy)
    for module in model.modules():
        for name, weight in module.weights.items():
            assert bool((weight == 1).all()), (type(module), name)


def cuts(family: str, tmp_path: Path, inside: str) -> dict[str, int | None]:
    path = MAKERS[family](tmp_path)
    model = build_model(read_model_config(path), "float32")
    return {tensor.name.replace(inside, ""): tensor.cut for tensor in model.checkpoint() if inside in tensor.name}


def test_heads_and_inner_features_may_be_cut_and_what_all_devices_need_may_not(tmp_path: Path) -> None:
    assert cuts("qwen2", tmp_path, "model.layers.0.") == {
        "input_layernorm.weight": None,
        **{f"self_attn.{part}_proj.{kind}": 0 for part in "qkv" for kind in ("weight", "bias")},
        "self_attn.o_proj.weight": 1,
        "post_attention_layernorm.weight": None,
        "mlp.gate_proj.weight": 0,
        "mlp.up_proj.weight": 0,
        "mlp.down_proj.weight": 1,
    }


def test_latents_are_whole_on_every_device_and_heads_are_not(tmp_path: Path) -> None:
    assert cuts("deepseek_v3", tmp_path, "model.layers.0.self_attn.") == {
        "q_a_proj.weight": None,
        "kv_a_proj_with_mqa.weight": None,
        "q_a_layernorm.weight": None,
        "q_b_proj.weight": 0,
        "kv_a_layernorm.weight": None,
        "kv_b_proj.weight": 0,
        "o_proj.weight": 1,
    }


def test_parts_of_one_matrix_have_cuts_of_their_own(tmp_path: Path) -> None:
    found = cuts("deepseek_v2", tmp_path, "model.layers.0.self_attn.")
    assert (found["q_proj.weight"], found["kv_a_proj_with_mqa.weight"]) == (0, None)


def test_experts_are_cut_in_their_inner_features_and_routers_not_at_all(tmp_path: Path) -> None:
    found = cuts("qwen3_moe", tmp_path, "model.layers.1.mlp.")
    assert found["gate.weight"] is None
    assert (found["experts.0.gate_proj.weight"], found["experts.0.down_proj.weight"]) == (0, 1)
    assert (found["experts.gate_up_proj"], found["experts.down_proj"]) == (None, 2)


def test_the_vocabulary_is_cut_in_embedding_and_head(tmp_path: Path) -> None:
    path = MAKERS["qwen3"](tmp_path)
    known = {x.name: x.cut for x in build_model(read_model_config(path), "float32").checkpoint()}
    assert (known["model.embed_tokens.weight"], known["lm_head.weight"], known["model.norm.weight"]) == (0, 0, None)
