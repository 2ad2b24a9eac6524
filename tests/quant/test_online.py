"""Weights in floats that are rounded to 8 bits while they are loaded: what they come to, and that no copy in floats is made."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_latent import make_latent_checkpoint
from helpers.checkpoints_window import make_window_checkpoint
from helpers.engine_oracle import check, engine, prompt, run
from pagerunner.errors import ConfigError
from pagerunner.layers.linear import Linear
from pagerunner.models.checkpoint.loader import build_model, dummy_weights, load_weights, materialize, weights_bytes
from pagerunner.models.configs.reader import read_model_config
from pagerunner.quant import online
from pagerunner.quant.formats import Format, Names, Scheme
from pagerunner.quant.online import Online

SCHEMES = {
    "channel": Scheme("fp8", "channel"),
    "block": Scheme("fp8", "block", (32, 48)),
    "int8": Scheme("int8", "channel"),
}


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def rounded(weight: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """What rounding block by block comes to, float32."""
    high, wide = scheme.block if scheme.scales == "block" else (1, weight.shape[1])
    found = torch.empty(weight.shape)
    for i in range(0, weight.shape[0], high):
        for j in range(0, weight.shape[1], wide):
            piece = weight[i : i + high, j : j + wide].float()
            scale = piece.abs().max() / (127 if scheme.number == "int8" else 448)
            scale = scale if scale > 0 else torch.tensor(1.0)
            numbers = (piece / scale).round() if scheme.number == "int8" else (piece / scale).to(torch.float8_e4m3fn)
            found[i : i + high, j : j + wide] = numbers.float() * scale
    return found


def form(scheme: Scheme, starts: tuple[int, ...] = ()) -> Online:
    return Online(Format("online", (), Names("module")), scheme, torch.float32, starts)


def empty(method: Online, *sizes: int) -> dict[str, torch.Tensor]:
    *experts, outputs, inputs = sizes
    made = method.create(outputs, inputs, torch.float32)
    return {name: torch.empty(*experts, *tensor.shape, dtype=tensor.dtype) for name, tensor in made.items()}


@pytest.mark.parametrize("kind", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("piece", [1 << 24, 4000])
def test_each_row_or_block_is_rounded_to_its_largest_number(
    monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype, piece: int
) -> None:
    monkeypatch.setattr(online, "_PIECE", piece)
    method = form(SCHEMES[kind], (0, 96))
    weights = empty(method, 200, 160)
    whole = torch.randn(200, 160).to(dtype)
    whole[5] = 0
    for rows in (slice(0, 96), slice(96, 200)):
        source = whole[rows]
        (sink,) = method.sinks(weights, rows).values()
        assert sink.takes(tuple(source.shape)) and dtype in sink.dtypes and torch.float8_e4m3fn not in sink.dtypes
        sink.put(source, copy)
        assert torch.equal(method.dense(weights)[rows], rounded(source, SCHEMES[kind]))


@pytest.mark.parametrize("kind", ["channel", "int8"])
@pytest.mark.parametrize("transposed", [False, True])
def test_experts_are_rounded_one_after_another(kind: str, transposed: bool) -> None:
    method, source = form(SCHEMES[kind]), torch.randn(3, 24, 40)
    weights = empty(method, 3, 24, 40)
    (sink,) = method.stacked(weights, transposed=transposed).values()
    held = source.transpose(1, 2).contiguous() if transposed else source
    assert sink.shape == tuple(held.shape)
    sink.put(held, copy)
    for expert in range(3):
        own = {name: tensor[expert] for name, tensor in weights.items()}
        assert torch.equal(method.dense(own), rounded(source[expert], SCHEMES[kind]))


MAKERS: dict[str, Any] = {
    "qwen3": lambda path: make_checkpoint(path, "qwen3", tokenizer=False),
    "qwen3_moe": lambda path: make_window_checkpoint(path, "qwen3_moe", tokenizer=False),
    "gpt_oss": lambda path: make_window_checkpoint(path, "gpt_oss", tokenizer=False),
    "deepseek_v3": lambda path: make_latent_checkpoint(path, "deepseek_v3")[0],
}


def meant(path: Path, folder: Path) -> Path:
    """The checkpoint with every matrix rounded that a product reads, as floats."""
    folder.mkdir()
    (folder / "config.json").write_text((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    for name, weight in tensors.items():
        if "kv_b_proj" in name or not name.endswith(("_proj.weight", "_proj", "_mqa.weight")):
            continue
        matrices = weight.transpose(1, 2) if weight.dim() == 3 else weight.unsqueeze(0)
        found = torch.stack([rounded(matrix, SCHEMES["channel"]) for matrix in matrices])
        tensors[name] = (found.transpose(1, 2) if weight.dim() == 3 else found[0]).contiguous()
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("family", MAKERS)
def test_tokens_are_those_of_transformers_with_rounded_weights(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "floats"
    folder.mkdir()
    path = MAKERS[family](folder)
    plain = meant(path, tmp_path / "rounded")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    check(reference, run(engine(path, quantization="fp8"), [prompt(1, 20), prompt(2, 50)]))
    monkeypatch.setattr("pagerunner.engine.worker.build.build_model", functools.partial(build_model, keep_forms=True))
    check(reference, run(engine(path, quantization="fp8_per_channel"), [prompt(1, 20)]))


def test_the_model_is_never_held_in_floats(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3", tokenizer=False)
    model = build_model(read_model_config(path, quantization="fp8"), "bfloat16", keep_forms=True)
    plain = build_model(read_model_config(path), "bfloat16")
    linears = [module for module in model.modules() if isinstance(module, Linear) and not module.plain]
    assert linears and all("weight" in linear.weights and linear.weights["weight"].itemsize == 1 for linear in linears)
    assert weights_bytes(model) < 0.8 * weights_bytes(plain)
    materialize(model, torch.zeros(weights_bytes(model), dtype=torch.uint8))
    staged: list[torch.Tensor] = []

    def watched(target: torch.Tensor, source: torch.Tensor) -> None:
        staged.append(target)
        target.copy_(source)

    largest = max(tensor.numel() for tensor in load_file(path / "model.safetensors").values())
    load_weights(model, path, copy=watched)
    assert max(target.numel() for target in staged) <= largest  # one tensor at a time, as it came
    before = [tensor.clone() for module in model.modules() for tensor in module.weights.values()]
    load_weights(model, path)  # as waking from sleep level 2 does
    after = [tensor for module in model.modules() for tensor in module.weights.values()]
    assert all(
        torch.equal(left.view(torch.uint8), right.view(torch.uint8)) for left, right in zip(before, after, strict=True)
    )


@pytest.mark.parametrize("name", ["fp8", "fp8_per_block", "int8_per_channel_weight_only"])
def test_dummy_weights_have_the_form_that_is_asked_for(tmp_path: Path, name: str) -> None:
    path = make_checkpoint(tmp_path, "qwen3", tokenizer=False)
    model = build_model(read_model_config(path, quantization=name), "float32", keep_forms=True)
    materialize(model, torch.zeros(weights_bytes(model), dtype=torch.uint8))
    dummy_weights(model)
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    assert all(0.015 < float(linear.dense_OI.std()) < 0.025 for linear in linears)


@pytest.mark.parametrize(
    ("name", "activations"),
    [
        ("fp8", "token"),
        ("fp8_per_tensor", "token"),
        ("fp8_per_block", "block"),
        ("int8_per_channel_weight_only", "none"),
    ],
)
def test_activations_are_rounded_as_vllms_names_say(tmp_path: Path, name: str, activations: str) -> None:
    path = make_checkpoint(tmp_path, "qwen3", tokenizer=False)
    model = build_model(read_model_config(path, quantization=name), "bfloat16", keep_forms=True)
    linears = [module for module in model.modules() if isinstance(module, Linear) and not module.plain]
    found = {linear.method.stored(linear.weights).activations for linear in linears}  # type: ignore[attr-defined]
    assert found == {activations}


def quantised(path: Path, said: dict[str, Any]) -> Path:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": said}))
    return path


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}


@pytest.mark.parametrize("name", ["gptq", "gptq_marlin", "auto_gptq", "none", None])
def test_a_name_that_agrees_with_the_checkpoint_changes_nothing(tmp_path: Path, name: str | None) -> None:
    path = quantised(make_checkpoint(tmp_path, "llama", tokenizer=False), GPTQ)
    assert read_model_config(path, quantization=name).format == read_model_config(path).format


@pytest.mark.parametrize(
    ("said", "name", "words"),
    [
        (GPTQ, "awq_marlin", ["'awq_marlin'", "'gptq'"]),
        (GPTQ, "fp8", ["'fp8'", "'gptq'"]),
        (GPTQ, "fp8_per_channel", ["'fp8_per_channel'", "'gptq'"]),
        (GPTQ, "gguf", ["gguf", "safetensors"]),
        (None, "bitsandbytes", ["bfloat16"]),
        (None, "awq", ["'awq'", "no quantization_config", "'fp8'"]),
        (None, "fp9", ["'fp9' is not known", "fp8_per_block"]),
    ],
)
def test_names_that_contradict_the_checkpoint_are_told_with_what_it_says(
    tmp_path: Path, said: dict[str, Any] | None, name: str, words: list[str]
) -> None:
    path = make_checkpoint(tmp_path, "llama", tokenizer=False)
    path = path if said is None else quantised(path, said)
    with pytest.raises(ConfigError) as caught:
        read_model_config(path, quantization=name)
    assert all(word in str(caught.value) for word in words)
