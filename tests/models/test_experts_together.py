"""Llama 4 with all experts' packed matrices in one tensor, as Model Optimizer and transformers write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import packers
from helpers.checkpoints_chunked import make_chunked_checkpoint
from helpers.quantise import unpacked
from pagerunner.errors import CheckpointError
from pagerunner.layers.moe import Experts
from pagerunner.models.checkpoint.loader import Model, build_model, load_weights, materialize, weights_bytes
from pagerunner.models.configs.reader import read_model_config

_NVIDIA = {
    "quant_method": "modelopt",
    "exclude_modules": ["*self_attn*", "*router*", "*shared_expert*", "*mlp*", "*lm_head"],
}
SAID: dict[str, dict[str, Any]] = {
    "modelopt FP8": {**_NVIDIA, "quant_algo": "FP8"},
    "modelopt NVFP4": {**_NVIDIA, "quant_algo": "NVFP4", "group_size": 16},
    "fbgemm_fp8": {"quant_method": "fbgemm_fp8", "modules_to_not_convert": []},
}


def pack(kind: str, name: str, weight_EIO: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What a file holds, and what it means, [E, I, O]."""
    experts, inputs, outputs = weight_EIO.shape
    if kind == "modelopt NVFP4":  # one scale for all experts: pack them one below another
        held, found = packers.nvfp4(weight_EIO.transpose(1, 2).reshape(-1, inputs))

        def back(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.reshape(experts, outputs, -1).transpose(1, 2).contiguous()

        return {
            name: back(held["weight"]),
            f"{name}_weight_scale": back(held["weight_scale"].view(torch.uint8)).view(torch.float8_e4m3fn),
            f"{name}_weight_scale_2": held["weight_scale_2"],
            f"{name}_input_scale": held["input_scale"],
        }, back(found)
    if kind == "modelopt FP8":
        scale = weight_EIO.abs().max() / 448
        codes = (weight_EIO / scale).to(torch.float8_e4m3fn)
        return {
            name: codes,
            f"{name}_weight_scale": scale,
            f"{name}_input_scale": torch.tensor(0.5),
        }, codes.float() * scale
    scales_EO = weight_EIO.abs().amax(1) / 448
    codes = (weight_EIO / scales_EO[:, None]).to(torch.float8_e4m3fn)
    meant = [unpacked(one.T, scale[:, None], (1, inputs)).T for one, scale in zip(codes, scales_EO, strict=True)]
    shape = (experts, 1, outputs) if "gate_up" in name else (experts, outputs, 1)
    return {name: codes, f"{name}_scale": scales_EO.reshape(shape)}, torch.stack(meant)


def quantised(path: Path, kind: str) -> dict[str, torch.Tensor]:
    """Rewrite the experts of a checkpoint in floats; what they then mean."""
    file = path / "model.safetensors"
    held, meant = {}, {}
    for name, weight in load_file(file).items():
        own = {name: weight}
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            own, meant[name] = pack(kind, name, weight)
        held |= own
    save_file(held, file)
    said = dict(SAID[kind])
    if kind == "fbgemm_fp8":
        said["modules_to_not_convert"] = [n.removesuffix(".weight") for n in held if n.endswith("_proj.weight")] + [
            "lm_head"
        ]
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    return meant


def loaded(path: Path, *, keep: bool) -> Model:
    model = build_model(read_model_config(path), "float32", keep_forms=keep)
    materialize(model, torch.full((weights_bytes(model),), 255, dtype=torch.uint8))
    load_weights(model, path)
    return model


def made(tmp_path: Path, kind: str) -> tuple[Path, dict[str, torch.Tensor]]:
    path, _ = make_chunked_checkpoint(tmp_path, hidden_size=64, intermediate_size=32, intermediate_size_mlp=64)
    return path, quantised(path, kind)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kind", SAID)
def test_experts_together_are_exactly_what_the_packed_ones_stand_for(tmp_path: Path, kind: str, keep: bool) -> None:
    path, meant = made(tmp_path, kind)
    experts = [module for module in loaded(path, keep=keep).modules() if isinstance(module, Experts)]
    found = []
    for module in experts:
        for matrix in ("gate_up", "down"):
            own = {n.removeprefix(f"{matrix}."): t for n, t in module.weights.items() if n.startswith(f"{matrix}.")}
            single = [{name: tensor[i] for name, tensor in own.items()} for i in range(module.sizes.experts)]
            found.append(torch.stack([module.method.linear.dense(one).T for one in single]))
    want = [
        meant[name]
        for name in sorted(meant, key=lambda name: (int(name.split(".layers.")[1].split(".")[0]), "down" in name))
    ]
    assert len(found) == len(want) >= 2
    assert all(torch.equal(left, right) for left, right in zip(found, want, strict=True))


@pytest.mark.parametrize("kind", SAID)
def test_a_scale_that_is_left_out_is_named_and_a_scale_of_activations_may_be(tmp_path: Path, kind: str) -> None:
    path, _ = made(tmp_path, kind)
    file = path / "model.safetensors"
    held = load_file(file)
    scales = [name for name in held if name.endswith("_scale") and "experts" in name]
    for name in [scales[0], *[name for name in scales if name.endswith("_input_scale")][:1]]:
        save_file({other: tensor for other, tensor in held.items() if other != name}, file)
        if name.endswith("_input_scale"):
            loaded(path, keep=True)
            continue
        with pytest.raises(CheckpointError, match=f"lacks the tensor {name}"):
            loaded(path, keep=True)
