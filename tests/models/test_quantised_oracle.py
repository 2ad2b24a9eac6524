"""Checkpoints in every quantised format: they stand for what plain loops make of them, in every form, with transformers as the oracle."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import packers
from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_chunked import make_chunked_checkpoint
from helpers.checkpoints_hybrid import make_hybrid_checkpoint
from helpers.checkpoints_image import make_image_checkpoint
from helpers.checkpoints_latent import make_latent_checkpoint
from helpers.checkpoints_window import make_window_checkpoint
from helpers.deepseek_v4 import make_published_checkpoint
from helpers.effort import by_days
from helpers.engine_oracle import check, engine, prompt, run, tokens_of
from helpers.families import MAKERS
from helpers.once import made_once
from helpers.quantise import BLOCK, CONFIGS, PACKED, quantise
from pagerunner.config import EngineArgs
from pagerunner.engine.startup.resolve import resolve
from pagerunner.engine.startup.weights import in_fewer_bits
from pagerunner.errors import CheckpointError, ConfigError
from pagerunner.layers.linear import Linear
from pagerunner.layers.moe import Experts
from pagerunner.models.checkpoint.forms import Held, summary
from pagerunner.models.checkpoint.loader import Model, build_model, load_weights, materialize, weights_bytes
from pagerunner.models.configs.reader import read_model_config
from pagerunner.quant.base import UnquantizedExperts
from pagerunner.quant.dequantized import Dequantized, DequantizedExperts
from pagerunner.quant.stored import Beside
from pagerunner.quant.w8 import W8

transformers = pytest.importorskip("transformers")


def loaded(path: Path, dtype: str = "float32", *, keep: bool = False) -> Model:
    model = build_model(read_model_config(path), dtype, keep_forms=keep)  # type: ignore[arg-type]
    materialize(model, torch.full((weights_bytes(model),), 255, dtype=torch.uint8))
    load_weights(model, path)
    return model


def weights(model: Model) -> list[torch.Tensor]:
    return [tensor for module in model.modules() for tensor in module.weights.values()]


def plain_copy(path: Path, folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """The checkpoint without quantisation, holding `tensors`."""
    folder.mkdir()
    config = json.loads((path / "config.json").read_text())
    config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def _small(make: Callable[..., Any], *names: str, **sizes: Any) -> Callable[[Path], Path]:
    """A maker of a checkpoint in whose sizes the groups of packed formats fit."""

    def made(folder: Path) -> Path:
        found = make(folder, *names, **sizes)
        return found if isinstance(found, Path) else found[0]

    return made


_EXPERTS = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
_LATENT = {"hidden_size": 64, "moe_intermediate_size": 32, "kv_lora_rank": 32}
FAMILIES: dict[str, Callable[[Path], Path]] = {
    **{name: _small(make_checkpoint, name, tokenizer=False) for name in ("llama", "mistral", "qwen2", "qwen3")},
    "qwen3_moe": _small(make_window_checkpoint, "qwen3_moe", tokenizer=False, moe_intermediate_size=32),
    "gemma3_text": _small(make_window_checkpoint, "gemma3_text", tokenizer=False),
    "qwen3_next": _small(make_hybrid_checkpoint, "qwen3_next", hidden_size=64, linear_value_head_dim=16, **_EXPERTS),
    "qwen3_5": _small(make_hybrid_checkpoint, "qwen3_5", hidden_size=64, linear_value_head_dim=16),
    "qwen3_5_moe": _small(make_hybrid_checkpoint, "qwen3_5_moe", hidden_size=64, linear_value_head_dim=16, **_EXPERTS),
    "bamba": _small(make_hybrid_checkpoint, "bamba", hidden_size=64, num_attention_heads=4),
    "llama4": _small(make_chunked_checkpoint, hidden_size=64, intermediate_size=32, intermediate_size_mlp=64),
    "deepseek_v2": _small(make_latent_checkpoint, "deepseek_v2", **_LATENT),
    "deepseek_v3": _small(make_latent_checkpoint, "deepseek_v3", q_lora_rank=32, **_LATENT),
    "deepseek_v32": _small(make_latent_checkpoint, "deepseek_v32", q_lora_rank=32, **_LATENT),
}


def _image(folder: Path) -> Path:
    """Text and images; the text model's tensors are called language_model.model."""
    make_image_checkpoint(folder / "mistral3", "mistral3", old_names=True)
    return folder / "mistral3"


CASES = [
    *by_days([*CONFIGS, *PACKED], FAMILIES),
    *((kind, "gpt_oss") for kind in ("mxfp4", "int4")),
    *((kind, "mistral3") for kind in ("fp8 block", "awq")),
    ("mxfp4 compressed", "llama4"),
]
MAKE = {**FAMILIES, "gpt_oss": _small(make_window_checkpoint, "gpt_oss", tokenizer=False), "mistral3": _image}


Packed = Callable[[Path, str, str], tuple[Path, dict[str, torch.Tensor]]]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    """A family's checkpoint in a format, in a folder of the test's, and the weights that it stands for. Each is made once."""
    made = made_once(tmp_path_factory, MAKE)

    @functools.cache
    def once(family: str, kind: str) -> tuple[Path, dict[str, torch.Tensor]]:
        path = shutil.copytree(made(family), tmp_path_factory.mktemp("packed") / "packed")
        return path, quantise(path, kind)

    def copied(tmp_path: Path, family: str, kind: str) -> tuple[Path, dict[str, torch.Tensor]]:
        path, meant = once(family, kind)
        return shutil.copytree(path, tmp_path / "packed"), dict(meant)

    return copied


def matrices(model: Model) -> list[torch.Tensor]:
    """Every weight, unpacked if it is kept in fewer bits."""
    found = []
    for module in model.modules():
        if isinstance(module, Linear):
            found += [module.dense_OI, *([module.weights["bias"]] if module.has_bias else [])]
        elif isinstance(module, Experts):
            for matrix in ("gate_up", "down"):
                own = {name.removeprefix(f"{matrix}."): t for name, t in module.weights.items() if matrix in name}
                bias = own.pop("bias", None)
                rows = [{name: tensor[i] for name, tensor in own.items()} for i in range(module.sizes.experts)]
                found += [torch.stack([module.method.linear.dense(row) for row in rows])]
                found += [] if bias is None else [bias]
        else:
            found += module.weights.values()
    return found


@pytest.mark.days(3)
@pytest.mark.parametrize(("kind", "family"), CASES)
def test_weights_are_exactly_what_the_packed_ones_stand_for(
    tmp_path: Path, packed: Packed, family: str, kind: str
) -> None:
    path, meant = packed(tmp_path, family, kind)
    want = loaded(plain_copy(path, tmp_path / "plain", meant))
    unpacked, kept = loaded(path), loaded(path, keep=True)
    methods = [module.method for module in unpacked.modules() if isinstance(module, Linear | Experts)]
    assert any(isinstance(method, Dequantized | DequantizedExperts) for method in methods)
    assert weights_bytes(unpacked) == weights_bytes(want)
    assert weights_bytes(kept) < weights_bytes(want) or kind == "gptq int8 zeros"  # which no kernel takes
    for found in (unpacked, kept):
        for left, right in zip(matrices(found), matrices(want), strict=True):
            assert torch.equal(left, right)


@pytest.mark.days(3)
@pytest.mark.parametrize(("kind", "family"), [*by_days([*CONFIGS, *PACKED], FAMILIES), ("mxfp4", "gpt_oss")])
def test_tokens_are_those_of_transformers(
    tmp_path: Path, packed: Packed, family: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where weights stay packed, as they do on a GPU. In float32, Qwen3.5's own rounding takes most of the tolerance."""
    path, meant = packed(tmp_path, family, kind)
    plain = plain_copy(path, tmp_path / "plain", meant)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float64 if family == "qwen3_5" else torch.float32, attn_implementation="eager"
    ).eval()
    prompts = [prompt(1, 20), prompt(2, 50)]
    check(reference, run(engine(path), prompts))
    monkeypatch.setattr("pagerunner.engine.worker.build.build_model", functools.partial(build_model, keep_forms=True))
    check(reference, run(engine(path), prompts[:1]))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kind", ["fp8 block", "gptq zeros permuted", "awq", "nvfp4"])
def test_weights_can_be_loaded_again_in_place_as_waking_from_sleep_does(tmp_path: Path, kind: str, keep: bool) -> None:
    path = make_checkpoint(tmp_path, "llama", tokenizer=False)
    quantise(path, kind)
    model = loaded(path, keep=keep)
    before = [tensor.clone() for tensor in weights(model)]
    for tensor in weights(model):
        tensor.view(torch.uint8).fill_(255)
    load_weights(model, path)
    pairs = zip(before, weights(model), strict=True)
    assert all(torch.equal(left.view(torch.uint8), right.view(torch.uint8)) for left, right in pairs)


@pytest.mark.parametrize(
    ("kind", "said", "words"),
    [
        ("awq", "gptq", ["qweight has shape", "quantization_config (gptq)"]),
        ("gptq", "awq", ["qweight has shape", "quantization_config (awq)"]),
        ("int4", "awq", ["weight_packed is not part", "quantization_config (awq)"]),
        ("fp8 block", "nvfp4", ["weight has shape", "quantization_config (modelopt)"]),
        ("int4", "int8 packed", ["weight_packed has shape", "quantization_config (compressed-tensors)"]),
        ("mxfp4 compressed", "nvfp4 compressed", ["weight_scale has", "quantization_config (compressed-tensors)"]),
    ],
)
def test_a_file_in_another_format_than_the_config_says_is_an_error_that_names_both(
    tmp_path: Path, kind: str, said: str, words: list[str]
) -> None:
    path = make_checkpoint(tmp_path, "llama", tokenizer=False)
    quantise(path, kind)
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": PACKED[said][0]}))
    with pytest.raises(CheckpointError) as caught:
        loaded(path)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.days(3)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("other", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "suffix"), [("awq", "scales"), ("gptq", "scales"), ("int4", "weight_scale")])
def test_scales_of_several_dtypes_keep_their_values(
    tmp_path: Path, kind: str, suffix: str, other: torch.dtype, keep: bool
) -> None:
    path = make_checkpoint(tmp_path, "llama", tokenizer=False)
    quantise(path, kind)
    file = path / "model.safetensors"
    held = load_file(file)
    name = f"model.layers.0.mlp.down_proj.{suffix}"
    assert held[name].dtype == torch.float16
    save_file({**held, name: held[name].to(other)}, file)
    mixed = matrices(loaded(path, keep=keep))
    scales = {key: (held[key].to(other) if key == name else held[key]).float() for key in held if key.endswith(suffix)}
    save_file({**held, **scales}, file)
    for left, right in zip(mixed, matrices(loaded(path, keep=keep)), strict=True):
        assert torch.equal(left, right)


def test_the_models_dtype_is_rounded_to_once(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama", tokenizer=False)
    quantise(path, "fp8 block")
    exact, rounded = loaded(path), loaded(path, "bfloat16")
    assert all(torch.equal(x.bfloat16(), y) for x, y in zip(weights(exact), weights(rounded), strict=True))


def rewrite(path: Path, name: str, tensor: torch.Tensor | None) -> str:
    """What is said of a packed llama with another tensor, or none, under `name`."""
    file = path / "model.safetensors"
    changed = {**load_file(file), name: tensor}
    save_file({key: value for key, value in changed.items() if value is not None}, file)
    with pytest.raises(CheckpointError) as caught:
        loaded(path)
    return str(caught.value)


def test_what_contradicts_the_format_is_named(tmp_path: Path) -> None:
    def packed() -> Path:
        path = make_checkpoint(tmp_path, "llama", tokenizer=False)
        quantise(path, "fp8 block")
        return path

    base = "model.layers.1.self_attn.k_proj"
    scale = f"{base}.weight_scale_inv"
    assert scale in rewrite(packed(), scale, None)
    plain = rewrite(packed(), f"{base}.weight", torch.zeros(32, 64, dtype=torch.bfloat16))
    assert f"{base}.weight has dtype bfloat16; quantization_config (fp8) asks for float8_e4m3fn" in plain
    codes = rewrite(packed(), f"{base}.weight", torch.zeros(32, 64, dtype=torch.uint8))
    assert "dtype uint8" in codes
    assert "[1, 2]" in rewrite(packed(), scale, torch.ones(2, 2)) and "[2, 2]" in rewrite(
        packed(), scale, torch.ones(2, 2)
    )
    unasked = "model.layers.1.self_attn.k_proj.weight_scale"
    assert unasked in rewrite(packed(), unasked, torch.ones(()))


@pytest.mark.parametrize("keep", [False, True])
def test_scales_of_whole_matrices_are_read_by_transformers_names_too(tmp_path: Path, keep: bool) -> None:
    path = make_checkpoint(tmp_path, "llama", tokenizer=False)
    meant = quantise(path, "fp8 tensor")
    names = {".weight_scale": ".weight_scale_inv", ".input_scale": ".activation_scale"}
    held = {
        next((name.removesuffix(ours) + theirs for ours, theirs in names.items() if name.endswith(ours)), name): tensor
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    assert sum(name.endswith(tuple(names.values())) for name in held) == 2 * 14
    save_file(held, path / "model.safetensors")
    want = loaded(plain_copy(path, tmp_path / "plain", meant))
    for left, right in zip(matrices(loaded(path, keep=keep)), matrices(want), strict=True):
        assert torch.equal(left, right)


def test_experts_of_one_layer_are_stored_in_one_way(tmp_path: Path) -> None:
    path = MAKERS["qwen3_moe"](tmp_path)
    (path / "model.safetensors").unlink()
    file = path / "config.json"
    config = json.loads(file.read_text())
    listed = {**CONFIGS["fp8 block"], "modules_to_not_convert": ["model.layers.1.mlp.experts.2"]}
    file.write_text(json.dumps({**config, "quantization_config": listed}))
    with pytest.raises(ConfigError, match="model.layers.1.mlp.experts.0.gate_proj: .* different ways"):
        build_model(read_model_config(path), "float32")


def test_ignored_modules_stay_as_they_are(tmp_path: Path) -> None:
    path = MAKERS["qwen3_moe"](tmp_path)
    (path / "model.safetensors").unlink()
    file = path / "config.json"
    config = json.loads(file.read_text())
    listed = {
        **CONFIGS["fp8 block"],
        "modules_to_not_convert": ["model.layers.1.mlp.experts", "model.layers.0.self_attn.k_proj"],
    }
    file.write_text(json.dumps({**config, "quantization_config": listed}))
    model = build_model(read_model_config(path), "float32")
    dtypes = {tensor.name: tensor.sink.dtypes[0] for tensor in model.checkpoint()}
    assert dtypes["model.layers.0.self_attn.k_proj.weight"] == dtypes["model.layers.1.mlp.experts.0.up_proj.weight"]
    assert dtypes["model.layers.0.self_attn.k_proj.weight"] == dtypes["lm_head.weight"] == torch.float32
    assert dtypes["model.layers.0.self_attn.q_proj.weight"] == torch.float8_e4m3fn
    kept = [type(m.method) is UnquantizedExperts for m in model.modules() if isinstance(m, Experts)]
    assert kept.count(True) == 1 and kept.count(False) >= 1


def test_transformers_reads_gpt_oss_as_published_and_has_the_same_tokens(tmp_path: Path) -> None:
    path = MAKE["gpt_oss"](tmp_path)
    quantise(path, "mxfp4")
    read = transformers.Mxfp4Config(dequantize=True)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        path, quantization_config=read, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    assert reference.model.layers[0].mlp.experts.gate_up_proj.dim() == 3
    check(reference.float(), run(engine(path), [prompt(1, 20), prompt(2, 50)]))


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_transformers_reads_fp8_blocks_as_published_and_has_the_same_tokens(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 96, "intermediate_size": 192, "head_dim": 24}  # its blocks divide them
    path = make_checkpoint(tmp_path, family, tokenizer=False, num_attention_heads=4, num_key_value_heads=4, **sizes)
    quantise(path, "fp8 block")
    asks = "transformers.quantizers.quantizer_finegrained_fp8.FineGrainedFP8HfQuantizer.validate_environment"
    monkeypatch.setattr(asks, lambda *_, **__: None)  # for a package that a CPU doesn't need
    read = transformers.FineGrainedFP8Config(
        weight_block_size=BLOCK, modules_to_not_convert=["lm_head"], dequantize=True
    )
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, quantization_config=read, dtype=torch.float32)
    check(reference.eval(), run(engine(path), [prompt(1, 20), prompt(2, 50)]))


@pytest.mark.parametrize("expert_dtype", ["fp4", "fp8"])
def test_a_published_deepseek_v4_has_the_tokens_of_transformers(
    tmp_path: Path, expert_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, reference = make_published_checkpoint(tmp_path, expert_dtype=expert_dtype)
    dtypes = {tensor.dtype for tensor in load_file(path / "model.safetensors").values()}
    assert torch.float8_e8m0fnu in dtypes and (torch.int8 in dtypes) is (expert_dtype == "fp4")
    prompts = [prompt(1, 20), prompt(2, 50)]
    check(reference, run(engine(path), prompts))
    monkeypatch.setattr("pagerunner.engine.worker.build.build_model", functools.partial(build_model, keep_forms=True))
    check(reference, run(engine(path), prompts[:1]))


def test_nvidias_deepseek_v4_has_experts_in_nvfp4_beside_its_makers_fp8(tmp_path: Path) -> None:
    path, _ = make_published_checkpoint(tmp_path)
    file, tensors = path / "config.json", path / "model.safetensors"
    config, held = json.loads(file.read_text()), load_file(tensors)
    named = {f"layers.{i}.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16} for i in range(99)}
    said = {
        "quant_algo": "MIXED_PRECISION",
        "moe_quant_algo": "NVFP4",
        "quantized_layers": named,
        "ignore": ["*.attn.*"],
    }
    file.write_text(json.dumps({**config, "quantization_config": {**config["quantization_config"], **said}}))
    packed = {name: tensor for name, tensor in held.items() if ".ffn.experts." not in name}
    meant, pack = dict(packed), functools.cache(lambda *shape: packers.nvfp4(torch.randn(shape)))
    for name, codes in held.items():
        if ".ffn.experts." in name and name.endswith(".weight"):
            own, floats = pack(codes.shape[0], 2 * codes.shape[1])
            packed |= {f"{name.removesuffix('.weight')}.{suffix}": tensor.clone() for suffix, tensor in own.items()}
            meant[name] = floats.clone()
    save_file(packed, tensors)
    found = matrices(loaded(path))
    save_file(meant, tensors)
    assert all(torch.equal(left, right) for left, right in zip(found, matrices(loaded(path)), strict=True))


@pytest.mark.parametrize("keep", [False, True])
def test_a_matrix_that_the_file_holds_in_floats_is_one_though_no_list_names_it(
    tmp_path: Path, packed: Packed, keep: bool
) -> None:
    path, meant = packed(tmp_path, "qwen3_next", "fp8 block")
    assert (
        "model.layers.0.linear_attn.in_proj_ba"
        not in json.loads((path / "config.json").read_text())["quantization_config"]
    )
    want = loaded(plain_copy(path, tmp_path / "plain", meant))
    for left, right in zip(matrices(loaded(path, keep=keep)), matrices(want), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("keep", [False, True])
def test_a_gate_that_the_file_holds_in_fp8_is_unpacked_though_formats_leave_gates_alone(
    tmp_path: Path, packed: Packed, keep: bool
) -> None:
    path, meant = packed(tmp_path, "qwen3_next", "fp8 block")
    held = load_file(path / "model.safetensors")
    for name in [name for name in held if name.endswith("shared_expert_gate.weight")]:
        codes, scale = held[name].to(torch.float8_e4m3fn), torch.full((1, -(-held[name].shape[1] // 48)), 0.5)
        held |= {name: codes, f"{name}_scale_inv": scale.squeeze()}  # a writer that leaves out dimensions of 1
        meant[name] = codes.float() * 0.5
    save_file(held, path / "model.safetensors")
    want = loaded(plain_copy(path, tmp_path / "plain", meant))
    for left, right in zip(matrices(loaded(path, keep=keep)), matrices(want), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kind", ["fp8 tensor", "int4"])
def test_experts_that_the_file_holds_together_in_floats_are_floats(tmp_path: Path, kind: str, keep: bool) -> None:
    folder = tmp_path / "packed"
    folder.mkdir()
    path = MAKERS["gpt_oss"](folder)
    meant = quantise(path, kind)
    want = loaded(plain_copy(path, tmp_path / "plain", meant))
    for left, right in zip(matrices(loaded(path, keep=keep)), matrices(want), strict=True):
        assert torch.equal(left, right)


def test_what_fewer_bits_would_take_is_the_same_with_files_and_without(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama", tokenizer=False)
    model = read_model_config(path)
    size = weights_bytes(build_model(model, "float32"))
    found = dict(in_fewer_bits(model, "float32", size))
    (path / "model.safetensors").unlink()
    assert found and found == dict(in_fewer_bits(model, "float32", size))


def test_the_dtype_of_scales_is_the_files_and_fp8_has_no_say_in_it() -> None:
    said = {
        "model.layers.0.a.weight": "F8_E4M3",
        "model.layers.0.a.weight_scale": "F32",
        "language_model.model.layers.0.b.weight_packed": "I32",
        "language_model.model.layers.0.b.weight_scale": "F16",
        "model.layers.0.c.weight": "BF16",
        "model.layers.0.c.bias": "BF16",
        "model.layers.0.d.weight": "BF16",
        "model.layers.0.d.weight_scale": "F32",
    }
    quantised = frozenset({"layers.0.a", "layers.0.b"})
    assert Held.of(said, torch.bfloat16) == Held(frozenset({"layers.0.c"}), torch.float16, quantised)
    assert Held.of({}, torch.bfloat16) == Held(frozenset(), torch.bfloat16)


@pytest.mark.parametrize("keep", [False, True])
def test_one_layer_may_have_8_bits_here_4_bits_there_and_floats_elsewhere(tmp_path: Path, keep: bool) -> None:
    path = make_checkpoint(tmp_path, "qwen2", tokenizer=False)
    file = path / "model.safetensors"
    packed, meant = {}, {}
    for name, weight in load_file(file).items():
        module = name.removesuffix(".weight")
        own = {name: weight}
        if module.endswith(("q_proj", "gate_proj", "down_proj")):
            own, meant[name] = packers.compressed(weight)
        elif module.endswith("k_proj"):
            own, meant[name] = packers.compressed(weight, bits=8, group=0)
        packed |= own if name in own else {f"{module}.{suffix}": tensor for suffix, tensor in own.items()}
        meant.setdefault(name, weight)
    save_file(packed, file)
    weights4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    weights8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
    said = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*o_proj", "re:.*v_proj", "re:.*up_proj"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights4},
            "group_1": {"targets": ["re:.*k_proj"], "weights": weights8},
        },
    }
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    found, want = loaded(path, keep=keep), loaded(plain_copy(path, tmp_path / "plain", meant))
    for left, right in zip(matrices(found), matrices(want), strict=True):
        assert torch.equal(left, right)
    x = torch.randn(3, 64)
    pairs = zip(found.modules(), want.modules(), strict=True)
    linears = [(a, b) for a, b in pairs if isinstance(a, Linear) and a.in_features == 64]
    for left, right in linears:
        torch.testing.assert_close(left(x), right(x))
    assert any(isinstance(left.method, Beside) for left, _ in linears) is keep


def _fp8(weight: torch.Tensor) -> packers.Packed:
    """Model Optimizer, FP8."""
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.5)}, codes.float() * scale


@pytest.mark.parametrize("keep", [False, True])
def test_model_optimizer_names_modules_of_mixed_precision_and_the_output_weights_may_be_among_them(
    tmp_path: Path, keep: bool
) -> None:
    path = make_checkpoint(tmp_path, "qwen3", tokenizer=False, tie_word_embeddings=False)
    file = path / "model.safetensors"
    packed, meant, named = {}, {}, {}
    for name, weight in load_file(file).items():
        module = name.removesuffix(".weight")
        own, meant[name] = {"weight": weight}, weight
        if module.endswith(("q_proj", "k_proj", "v_proj")):
            own, meant[name] = _fp8(weight)
            named[module] = {"quant_algo": "FP8"}
        elif module.endswith(("_proj", "lm_head")):
            own, meant[name] = packers.nvfp4(weight)
            named[module] = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
        packed |= {f"{module}.{suffix}": tensor for suffix, tensor in own.items()}
    assert "lm_head" in named
    save_file(packed, file)
    said = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": named, "ignore": ["mtp*"]}
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    found, plain = loaded(path, keep=keep), plain_copy(path, tmp_path / "plain", meant)
    for left, right in zip(matrices(found), matrices(loaded(plain)), strict=True):
        assert torch.equal(left, right)
    check(transformers.AutoModelForCausalLM.from_pretrained(plain).eval(), run(engine(path), [prompt(1, 9)]))


@pytest.mark.parametrize("keep", [False, True])
def test_gptq_says_that_the_output_weights_are_quantised_too(tmp_path: Path, keep: bool) -> None:
    path = make_checkpoint(tmp_path, "qwen3", tokenizer=False, tie_word_embeddings=False)
    file = path / "model.safetensors"
    packed, meant = {}, {}
    for name, weight in load_file(file).items():
        own, meant[name] = {"weight": weight}, weight
        if name.endswith(("_proj.weight", "lm_head.weight")):
            own, meant[name] = packers.gptq(weight)
        packed |= {f"{name.removesuffix('.weight')}.{suffix}": tensor for suffix, tensor in own.items()}
    save_file(packed, file)
    said = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": packers.GROUP,
        "desc_act": False,
        "sym": True,
        "lm_head": True,
    }
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    found, plain = loaded(path, keep=keep), plain_copy(path, tmp_path / "plain", meant)
    for left, right in zip(matrices(found), matrices(loaded(plain)), strict=True):
        assert torch.equal(left, right)
    check(transformers.AutoModelForCausalLM.from_pretrained(plain).eval(), run(engine(path), [prompt(1, 9)]))
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": {**said, "lm_head": False}}))
    tensors_decide = matrices(loaded(path, keep=keep))
    assert all(torch.equal(left, right) for left, right in zip(matrices(found), tensors_decide, strict=True))


def test_a_plan_counts_what_is_loaded_packed_on_a_gpu_and_unpacked_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(tmp_path, "llama")
    quantise(path, "fp8 block")
    monkeypatch.setattr("pagerunner.engine.startup.resolve.resolve_device", lambda asked: asked)
    sizes = {"max_model_len": 128, "kv_cache_memory_bytes": 2**22}
    on_cpu = resolve(EngineArgs(model=str(path), device="cpu", **sizes)).plan
    assert on_cpu.other[0] == (
        "weights (fp8, unpacked to float32)",
        weights_bytes(build_model(read_model_config(path), "float32")),
    )
    assert re.fullmatch(
        r"\d+ linear layers unpacked, 1 as they were",
        summary(build_model(read_model_config(path), "float32").modules()),
    )
    on_gpu = resolve(EngineArgs(model=str(path), device="cuda", **sizes), 2**30, plan_only=True).plan
    model = build_model(read_model_config(path), "float32", keep_forms=True)
    assert on_gpu.other[0] == ("weights (fp8, as stored)", weights_bytes(model))
    largest = max(m.out_features * m.in_features for m in model.modules() if isinstance(m, Linear) and not m.plain)
    assert on_gpu.other[-1] == ("weights of a product, unpacked", 4 * largest)  # blocks of 48 are never rounded against
    assert any(type(getattr(module, "method", None)) is W8 for module in model.modules())
    assert re.fullmatch(r"\d+ linear layers in few bits, 1 as they were", summary(model.modules()))


def test_scales_may_lie_in_another_file_than_the_numbers_and_sleep_reads_both_again(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3")
    quantise(path, "fp8 block")
    whole = path / "model.safetensors"
    places = {}
    for number in (0, 1):
        part = {name: tensor for name, tensor in load_file(whole).items() if ("scale" in name) == bool(number)}
        save_file(part, path / f"model-{number}.safetensors")
        places |= dict.fromkeys(part, f"model-{number}.safetensors")
    before = tokens_of(engine(path), [prompt(3, 30)])
    whole.unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    llm = engine(path, enable_sleep_mode=True)
    assert tokens_of(llm, [prompt(3, 30)]) == before
    llm.sleep(2)
    llm.wake_up()
    assert tokens_of(llm, [prompt(3, 30)]) == before
