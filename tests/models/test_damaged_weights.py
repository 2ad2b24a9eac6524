"""Tensors of quantised checkpoints that can't be right, in files that are otherwise whole: an error names each; and forms for rare sizes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.checkpoints import make_checkpoint
from helpers.compiler import needs_compiler
from helpers.effort import by_days
from helpers.families import MAKERS
from helpers.quantise import CONFIGS, PACKED, quantise
from pagerunner.config import Dtype
from pagerunner.errors import CheckpointError, ConfigError
from pagerunner.layers.moe import Experts
from pagerunner.models.checkpoint.loader import Model, build_model, load_weights, materialize, weights_bytes
from pagerunner.models.checkpoint.panels import store_in_panels
from pagerunner.models.checkpoint.weight_copy import copy_now
from pagerunner.models.configs.reader import read_model_config
from pagerunner.quant.dequantized import DequantizedExperts
from pagerunner.quant.formats import Format, Names, Scheme
from pagerunner.quant.pack_sinks import SlicesSink
from pagerunner.quant.sinks import evidence, is_damage
from pagerunner.quant.stored import StoredExperts

E4M3 = torch.float8_e4m3fn


def loaded(
    path: Path, *, keep: bool = False, quantization: str | None = None, panels: bool = False, dtype: Dtype = "float32"
) -> Model:
    model = build_model(read_model_config(path, quantization=quantization), dtype, keep_forms=keep)
    assert not panels or store_in_panels(model)
    materialize(model, torch.zeros(weights_bytes(model), dtype=torch.uint8))
    load_weights(model, path)
    return model


def rewritten(path: Path, changes: dict[str, torch.Tensor | None]) -> None:
    file = path / "model.safetensors"
    held = load_file(file) | changes
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, file)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kind", ["fp8 tensor", "fp8 block"])
def test_codes_that_are_no_numbers_are_an_error_that_names_the_tensor(tmp_path: Path, kind: str, keep: bool) -> None:
    path = make_checkpoint(tmp_path, "llama", tokenizer=False)
    quantise(path, kind)
    loaded(path, keep=keep)
    name = "model.layers.1.mlp.down_proj.weight"
    codes = load_file(path / "model.safetensors")[name]
    codes.view(torch.uint8)[-1, -1] = 255
    rewritten(path, {name: codes})
    with pytest.raises(CheckpointError, match=rf"model.safetensors: {name} holds codes that are no numbers"):
        loaded(path, keep=keep)


@pytest.mark.parametrize(("code", "bad"), [(0x7F, True), (0xFF, True), (0x7E, False), (0xFE, False), (0x80, False)])
def test_two_codes_are_no_numbers(code: int, bad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagerunner.quant.sinks._PIECE", 8)
    codes = torch.zeros(5, 6, dtype=torch.uint8)
    codes[3, 2] = code
    found = evidence(codes.view(E4M3))
    assert found is not None and is_damage(found) is bad
    assert evidence(codes) is None and evidence(codes[:0].view(E4M3)) is None
    sink = SlicesSink((5, 6), (E4M3,), lambda number, part: None, torch.device("cpu"))
    flag = sink.put(codes.view(E4M3), copy_now)
    assert flag is not None and is_damage(flag) is bad


@pytest.mark.parametrize("shape", [(), (3,), (5, 6), (2, 3, 4)])
def test_large_tensors_are_looked_at_in_pieces(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagerunner.quant.sinks._FLOATS_PIECE", 8)
    for value, bad in ((1.0, False), (float("inf"), True), (float("nan"), True)):
        numbers = torch.zeros(shape, dtype=torch.bfloat16)
        numbers.view(-1)[-1] = value
        shown = evidence(numbers)
        assert shown is not None and is_damage(shown) is bad


FLOATS = {
    "a matrix": ("model.layers.1.mlp.down_proj.weight", (3, 5)),
    "a part of a fused matrix": ("model.layers.0.self_attn.k_proj.weight", (31, 63)),
    "the embedding": ("model.embed_tokens.weight", (0, 0)),
    "a norm": ("model.norm.weight", (63,)),
}


@pytest.mark.parametrize("panels", [False, pytest.param(True, marks=needs_compiler)])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("what", FLOATS)
def test_weights_that_are_not_finite_are_an_error_that_names_tensor_value_and_place(
    tmp_path: Path, what: str, value: float, panels: bool
) -> None:
    path, (name, place) = make_checkpoint(tmp_path, "llama", tokenizer=False), FLOATS[what]
    for dtype in (torch.float32, torch.bfloat16):
        numbers = load_file(path / "model.safetensors")[name].to(dtype)
        numbers[place] = value
        rewritten(path, {name: numbers})
        with pytest.raises(CheckpointError, match=re.escape(f"safetensors: {name} holds {value:g} at {list(place)};")):
            loaded(path, panels=panels)


@pytest.mark.parametrize("panels", [False, pytest.param(True, marks=needs_compiler)])
@pytest.mark.parametrize("stacked", [False, True])
def test_experts_that_are_not_finite_are_named(tmp_path: Path, stacked: bool, panels: bool) -> None:
    path = MAKERS["llama4" if stacked else "qwen3_moe"](tmp_path)
    held = load_file(path / "model.safetensors")
    name = next(name for name in held if re.search(r"experts\.(gate_up_proj|1\.down_proj\.weight)$", name))
    held[name].view(-1)[-1] = float("nan")
    rewritten(path, {name: held[name]})
    with pytest.raises(CheckpointError, match=re.escape(name) + " holds nan at"):
        loaded(path, panels=panels)


def test_weights_that_are_rounded_while_loading_must_be_finite_too(tmp_path: Path) -> None:
    path, name = make_checkpoint(tmp_path, "llama", tokenizer=False), "model.layers.1.mlp.down_proj.weight"
    numbers = load_file(path / "model.safetensors")[name]
    numbers[7, 2] = float("nan")
    rewritten(path, {name: numbers})
    with pytest.raises(CheckpointError, match=rf"{name} holds nan at \[7, 2\]"):
        loaded(path, quantization="fp8", keep=True)


def test_weights_that_the_dtype_can_not_hold_say_which_holds_them(tmp_path: Path) -> None:
    path, name = make_checkpoint(tmp_path, "llama", tokenizer=False), "model.layers.1.mlp.down_proj.weight"
    numbers = load_file(path / "model.safetensors")[name].bfloat16()
    numbers[7, 2] = -98304
    rewritten(path, {name: numbers})
    loaded(path, dtype="bfloat16")
    with pytest.raises(
        CheckpointError, match=rf'{name} holds 98304, more than float16 can hold \(65504\); dtype="bfloat16"'
    ):
        loaded(path, dtype="float16")


def test_weights_that_bfloat16_can_not_hold_are_said_to_fit_float32(tmp_path: Path) -> None:
    path, name = make_checkpoint(tmp_path, "llama", tokenizer=False), "model.layers.1.mlp.down_proj.weight"
    numbers = load_file(path / "model.safetensors")[name]
    numbers[7, 2] = 3.4e38  # float32 ends at 3.403e38, bfloat16 at 3.390e38
    rewritten(path, {name: numbers})
    loaded(path, dtype="float32")
    for dtype in ("bfloat16", "float16"):
        with pytest.raises(
            CheckpointError, match=rf'holds 3.4e\+38, more than {dtype} can hold \(.*\); dtype="float32" holds it'
        ):
            loaded(path, dtype=dtype)


def grown(scales: torch.Tensor) -> torch.Tensor:
    """The scales, of which the last is so large that its largest codes stand for more than 65,504, and no more than 1e6."""
    scales = scales.clone()
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        scales.view(torch.uint8).view(-1)[-1] = 127 + 14
    else:
        scales.view(-1)[-1] = 15000
    return scales


@pytest.mark.days(3)
@pytest.mark.parametrize(("kind", "keep"), by_days([*CONFIGS, *PACKED], [False, True]))
def test_scales_whose_numbers_the_dtype_can_not_hold_are_named_in_every_format(
    tmp_path: Path, kind: str, keep: bool
) -> None:
    path = make_checkpoint(tmp_path, "llama", tokenizer=False, hidden_size=64, intermediate_size=64)
    quantise(path, kind)
    held = load_file(path / "model.safetensors")
    scales = {name: tensor for name, tensor in held.items() if re.search("layers.1.mlp.down_proj.*scale", name)}
    whole = next((name for name in scales if name.endswith(("weight_scale_2", "weight_global_scale"))), None)
    name = whole or next(name for name in scales if "input" not in name)
    if whole:  # with scales of groups in e4m3 beside it
        scale = torch.full_like(scales[name], 0.01 if name.endswith("global_scale") else 100.0)
    elif scales[name].dim() == 0 or kind.startswith(("fp8", "fbgemm", "modelopt", "compressed")):
        scale = scales[name].clone()
        scale.view(-1)[-1] = 1000.0
    else:
        scale = grown(scales[name])
    rewritten(path, {name: scale})
    loaded(path, keep=keep, dtype="bfloat16")
    words = rf"{re.escape(name)} holds .* at .*, which (multiplies|divides) numbers up to \d+: [\d.e+]+ is more than float16 can hold"
    with pytest.raises(CheckpointError, match=words + r' \(65504\); dtype="bfloat16" holds it'):
        loaded(path, keep=keep, dtype="float16")


@pytest.mark.parametrize("keep", [False, True])
def test_experts_scales_are_looked_at_with_their_codes_too(tmp_path: Path, keep: bool) -> None:
    path = MAKERS["gpt_oss"](tmp_path)
    quantise(path, "mxfp4")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    scales = load_file(path / "model.safetensors")[name]
    rewritten(path, {name: grown(scales)})
    loaded(path, keep=keep, dtype="bfloat16")
    with pytest.raises(CheckpointError, match=rf"{name} holds 16384 at .*: 98304 is more than float16 can hold"):
        loaded(path, keep=keep, dtype="float16")
    scales.view(-1)[-1] = 254  # 2 ** 127, and codes go up to 6
    rewritten(path, {name: scales})
    with pytest.raises(
        CheckpointError, match=rf"{name} holds 1.70141e\+38 .* than float32 can hold .*The file is damaged"
    ):
        loaded(path, keep=keep)


@pytest.mark.days(3)
@pytest.mark.parametrize("quantization", ["fp8", "fp8_per_block", "int8_per_channel_weight_only"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_weights_that_are_rounded_while_loading_must_fit_the_models_dtype(
    tmp_path: Path, family: str, quantization: str
) -> None:
    path = MAKERS[family](tmp_path)
    name = f"model.layers.1.mlp.{'experts.down_proj' if family == 'gpt_oss' else 'down_proj.weight'}"
    numbers = load_file(path / "model.safetensors")[name].bfloat16()
    numbers.view(-1)[-1] = -98304
    rewritten(path, {name: numbers})
    loaded(path, quantization=quantization, keep=True, dtype="bfloat16")
    with pytest.raises(
        CheckpointError, match=rf'{name} holds 98304, more than float16 can hold .65504.; dtype="bfloat16"'
    ):
        loaded(path, quantization=quantization, keep=True, dtype="float16")


def test_a_missing_tensor_says_who_asks_for_it(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama", tokenizer=False)
    quantise(path, "fp8 block")
    file, good = path / "config.json", (path / "config.json").read_text()
    layers = json.loads(good)["num_hidden_layers"]
    file.write_text(json.dumps({**json.loads(good), "num_hidden_layers": layers + 1}))
    with pytest.raises(
        CheckpointError, match=rf"config.json asks for. No file has a tensor of layer {layers}; is num_hidden"
    ):
        loaded(path)
    file.write_text(good)
    rewritten(path, {"model.layers.0.mlp.up_proj.weight_scale_inv": None})
    with pytest.raises(CheckpointError, match=r"up_proj.weight_scale_inv that quantization_config \(fp8\) asks for"):
        loaded(path)
    rewritten(path, {"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(3, 2), "model.norm.weight": None})
    with pytest.raises(CheckpointError, match=r"lacks the tensor model.norm.weight that the config asks for"):
        loaded(path)


def test_a_tensor_under_two_names_is_an_error_that_names_both(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama", tokenizer=False)
    rewritten(path, {"norm.weight": torch.ones(64)})
    with pytest.raises(CheckpointError, match=r"holds norm.weight, and it holds model.norm.weight: the same tensor"):
        loaded(path)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, E4M3])
@pytest.mark.parametrize("said", [None, {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}])
def test_packed_weights_that_no_config_speaks_of_say_where_it_would(
    tmp_path: Path, said: dict[str, Any] | None, dtype: torch.dtype
) -> None:
    path = make_checkpoint(tmp_path, "llama", tokenizer=False)
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": said}))
    name = "model.layers.0.mlp.down_proj.weight"
    rewritten(path, {name: torch.zeros(64, 48, dtype=torch.uint8).to(dtype), f"{name}_scale": torch.ones(64, 6)})
    words = rf"{name} has dtype {str(dtype)[6:]}, as quantised weights have; the config asks for floats.* quant_algo or config_groups"
    with pytest.raises(CheckpointError, match=words):
        loaded(path)


def test_what_rounding_while_loading_asks_for_is_said_so(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama", tokenizer=False)
    rewritten(path, {"model.layers.0.mlp.up_proj.weight": torch.zeros(3, 3)})
    with pytest.raises(CheckpointError, match=r"quantization \(rounding while loading\) asks for"):
        loaded(path, quantization="fp8")


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 7}, r"layers.0.self_attn.q_proj can't be stored as quantization_config "
         r"\(gptq\) says: it has 64 input features, which groups of 7 \(group_size\) don't divide"),
        ({"quant_method": "awq", "bits": 4, "group_size": 100}, "groups of 100 .group_size. don't divide"),
    ],
)  # fmt: skip
def test_groups_that_do_not_divide_are_named_before_anything_is_loaded(
    tmp_path: Path, said: dict[str, Any], words: str, keep: bool
) -> None:
    path = make_checkpoint(tmp_path, "llama", tokenizer=False)
    (path / "model.safetensors").unlink()
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": said}))
    with pytest.raises(ConfigError, match=words):
        build_model(read_model_config(path), "float32", keep_forms=keep)


@pytest.mark.parametrize(("group", "kept"), [(16, True), (32, True), (64, True), (96, False), (192, True)])
def test_experts_in_groups_that_no_kernel_reads_are_unpacked_while_they_are_loaded(
    tmp_path: Path, group: int, kept: bool
) -> None:
    config = read_model_config(MAKERS["qwen3_moe"](tmp_path))
    sizes = {"hidden_size": 192, "moe_intermediate_size": 192, "expert_size": 192}
    wide = replace(config, **{name: size for name, size in sizes.items() if hasattr(config, name)})
    scheme, experts = Scheme("int4", "group", (1, group), layout="compressed"), Names("module", ("re:.*experts",))
    wide = replace(wide, format=Format("compressed-tensors", ((experts, scheme),), Names("module")))
    model = build_model(wide, "bfloat16", keep_forms=True, of_files=False)
    methods = [module.method for module in model.modules() if isinstance(module, Experts)]
    assert {type(method) for method in methods} == {StoredExperts if kept else DequantizedExperts}
