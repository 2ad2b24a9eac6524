"""What a model says that it takes of a checkpoint: every weight once, whatever the checkpoint's layout, and where it may be cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.declared import check
from helpers.families import MAKERS
from pagerunner.models.checkpoint.loader import build_model, materialize, weights_bytes
from pagerunner.models.configs.reader import read_model_config


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


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


def cuts(family: str, tmp_path: Path, inside: str) -> dict[str, Any]:
    """By a tensor's name: None, or the dimension that is cut and by which features, and how many of its elements belong to each."""
    path = MAKERS[family](tmp_path)
    model = build_model(read_model_config(path), "float32")
    found: dict[str, Any] = {}
    for tensor in model.checkpoint():
        if inside in tensor.name:
            cut = tensor.cut
            sections = () if cut is None else tuple((section.features.name, section.width) for section in cut.sections)
            found[tensor.name.replace(inside, "")] = None if cut is None else (cut.dimension, *sections)
    return found


def test_heads_and_inner_features_may_be_cut_and_what_all_devices_need_may_not(tmp_path: Path) -> None:
    shared = {f"self_attn.{part}_proj.{kind}": (0, ("kv_heads", 16)) for part in "kv" for kind in ("weight", "bias")}
    assert cuts("qwen2", tmp_path, "model.layers.0.") == {
        "input_layernorm.weight": None,
        "self_attn.q_proj.weight": (0, ("heads", 16)),
        "self_attn.q_proj.bias": (0, ("heads", 16)),
        **shared,
        "self_attn.o_proj.weight": (1, ("heads", 16)),
        "post_attention_layernorm.weight": None,
        "mlp.gate_proj.weight": (0, ("inner", 1)),
        "mlp.up_proj.weight": (0, ("inner", 1)),
        "mlp.down_proj.weight": (1, ("inner", 1)),
    }


def test_latents_are_whole_on_every_device_and_heads_are_not(tmp_path: Path) -> None:
    found = cuts("deepseek_v3", tmp_path, "model.layers.0.self_attn.")
    whole = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight", "q_a_layernorm.weight", "kv_a_layernorm.weight")
    assert [name for name, cut in found.items() if cut is None] == sorted(whole, key=list(found).index)
    divided = {name: (cut[0], cut[1][0]) for name, cut in found.items() if cut is not None}
    assert divided == {
        "q_b_proj.weight": (0, "heads"),
        "kv_b_proj.weight": (0, "heads"),
        "o_proj.weight": (1, "heads"),
    }


def test_parts_of_one_matrix_have_cuts_of_their_own(tmp_path: Path) -> None:
    found = cuts("deepseek_v2", tmp_path, "model.layers.0.self_attn.")
    assert found["q_proj.weight"][0] == 0 and found["kv_a_proj_with_mqa.weight"] is None


def test_experts_are_cut_in_their_inner_features_and_routers_not_at_all(tmp_path: Path) -> None:
    found, inner = cuts("qwen3_moe", tmp_path, "model.layers.1.mlp."), ("inner", 1)
    assert found["gate.weight"] is None
    assert (found["experts.0.gate_proj.weight"], found["experts.0.down_proj.weight"]) == ((0, inner), (1, inner))
    assert (found["experts.gate_up_proj"], found["experts.down_proj"]) == ((1, inner, inner), (2, inner))


def test_gates_and_ups_that_alternate_are_cut_in_pairs_and_sinks_with_their_heads(tmp_path: Path) -> None:
    found = cuts("gpt_oss", tmp_path, "model.layers.0.")
    assert found["mlp.experts.gate_up_proj"] == (2, ("inner", 2))
    assert found["mlp.experts.gate_up_proj_bias"] == (1, ("inner", 2))
    assert found["mlp.experts.down_proj_bias"] is None
    assert found["self_attn.sinks"] == (0, ("heads", 1))


def test_recurrent_layers_are_cut_by_heads_and_their_channels_in_sections(tmp_path: Path) -> None:
    """Channels are queries, keys and values one behind another; Mamba-2's are heads', then two of each group."""
    found = cuts("qwen3_next", tmp_path, "model.layers.0.linear_attn.")
    sections = [name for name, _ in found["conv1d.weight"][1:]]
    assert sections == ["key_heads"] * 3 and found["norm.weight"] is None
    assert found["A_log"][1] == found["dt_bias"][1] and found["in_proj_ba.weight"][1][1] == 2 * found["A_log"][1][1]
    assert (found["in_proj_qkvz.weight"][0], found["out_proj.weight"][0]) == (0, 1)
    (tmp_path / "other").mkdir()
    found = cuts("bamba", tmp_path / "other", "model.layers.0.mamba.")
    heads, groups = "mamba_heads", "mamba_groups"
    assert [name for name, _ in found["in_proj.weight"][1:]] == [heads, heads, groups, groups, heads]
    assert [name for name, _ in found["conv1d.weight"][1:]] == [heads, groups, groups]
    assert found["conv1d.weight"] == found["conv1d.bias"]
    assert [found[name] for name in ("A_log", "D", "dt_bias")] == [(0, (heads, 1))] * 3
    assert found["norm.weight"] == (0, found["in_proj.weight"][1]) and found["out_proj.weight"][0] == 1


def test_the_vocabulary_is_cut_in_embedding_and_head(tmp_path: Path) -> None:
    found = cuts("qwen3", tmp_path, "")
    ids = (0, ("vocabulary", 1))
    assert (found["model.embed_tokens.weight"], found["lm_head.weight"], found["model.norm.weight"]) == (ids, ids, None)


def test_biases_of_products_over_divided_inputs_are_added_once(tmp_path: Path) -> None:
    path = MAKERS["gpt_oss"](tmp_path)
    model = build_model(read_model_config(path), "float32")
    once = {tensor.name.partition(".layers.0.")[2] for tensor in model.checkpoint() if tensor.once}
    assert once - {""} == {"self_attn.o_proj.bias", "mlp.experts.down_proj_bias"}
