"""config.json readers: what they take, what they refuse, and that a refusal names the field."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import FAMILIES, make_config
from pagerunner.errors import CheckpointError, ConfigError, PagerunnerError
from pagerunner.memory.specs import FullKV
from pagerunner.models.configs.decoder import DecoderConfig
from pagerunner.models.configs.reader import ModelConfig, read_model_config


def write(path: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def read(path: Path, family: str, max_model_len: int | None = None, **overrides: Any) -> DecoderConfig:
    config = read_model_config(write(path, make_config(family, **overrides)), max_model_len)
    assert isinstance(config, DecoderConfig)
    return config


@pytest.mark.parametrize("family", FAMILIES)
def test_reads_every_family(tmp_path: Path, family: str) -> None:
    config = read(tmp_path, family)
    assert isinstance(config, ModelConfig)
    assert (config.family, config.num_layers, config.vocab_size, config.head_dim) == (family, 2, 512, 16)
    assert config.layer_specs("bfloat16") == (FullKV(2, 16, "bfloat16"),) * 2
    assert (config.qkv_bias, config.o_bias, config.qk_norm) == (family == "qwen2", False, family == "qwen3")


def test_planning_needs_no_torch(tmp_path: Path) -> None:
    path = write(tmp_path, make_config("qwen3"))
    code = (
        "import sys; from pagerunner.models.configs.reader import read_model_config;"
        f"read_model_config({str(path)!r}).layer_specs('float16'); assert 'torch' not in sys.modules"
    )
    source = str(Path(__file__).parents[2] / "src")
    subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {source!r}); {code}"], check=True)


def test_a_head_is_told_to_be_no_model(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"LlamaForCausalLMEagle3.*drafts tokens for another model.*--speculative-config"
    ):
        read(tmp_path, "llama", architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=64)


def test_takes_the_path_of_a_config_file(tmp_path: Path) -> None:
    write(tmp_path, make_config("llama"))
    assert read_model_config(tmp_path / "config.json").path == str(tmp_path)


def test_end_tokens_of_both_files_are_joined(tmp_path: Path) -> None:
    config = make_config("llama", eos_token_id=[7, 9])
    generation = {"eos_token_id": [9, 11], "temperature": 0.6, "top_p": 0.9, "max_new_tokens": 50, "do_sample": True}
    read = read_model_config(write(tmp_path, config, generation))
    assert read.eos_token_ids == (7, 9, 11)
    assert read.sampling_defaults == {"temperature": 0.6, "top_p": 0.9, "max_tokens": 50}
    unset = read_model_config(write(tmp_path, config, {"temperature": None, "do_sample": False}))
    assert unset.sampling_defaults == {"temperature": 0.0}


def test_old_and_new_rope_fields_mean_the_same(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = read(tmp_path, "llama", rope_parameters=None, rope_theta=5e5, rope_scaling={"type": "llama3", **scaling}).rope
    new = read(tmp_path, "llama", rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling}).rope
    assert old == new
    assert (new.theta, new.factor, new.original_length) == (5e5, 8.0, 64)


def kinds(config: Any) -> list[str]:
    return [spec.kind for spec in config.layer_specs("float32")]


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen2", {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 1}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 2048, "max_window_layers": 0}),
        ("qwen3", {"layer_types": ["full_attention"] * 2}),
        ("mistral", {"sliding_window": 2048}),
        ("llama", {"pretraining_tp": 1, "use_cache": True, "attention_dropout": 0.1, "is_decoder": False}),
        ("llama", {"some_future_field": None}),
    ],
)
def test_fields_without_effect_are_accepted(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    read(tmp_path, family, **overrides)


def test_a_window_that_the_length_never_reaches_is_none(tmp_path: Path) -> None:
    assert kinds(read(tmp_path, "mistral", max_model_len=128, sliding_window=128)) == ["full", "full"]
    assert kinds(read(tmp_path, "mistral", max_model_len=129, sliding_window=128)) == ["window", "window"]


@pytest.mark.parametrize(
    ("family", "overrides", "words"),
    [
        ("llama", {"model_type": "gpt_bigcode"}, ["model_type", "gpt_bigcode", "mistral, mistral3, qwen2, qwen3"]),
        ("llama", {"model_type": None}, ["model_type"]),
        ("llama", {"num_hidden_layers": 0}, ["num_hidden_layers", "at least 1", "0"]),
        ("llama", {"num_key_value_heads": 3}, ["num_attention_heads is 4", "num_key_value_heads=3"]),
        ("llama", {"head_dim": None, "hidden_size": 66}, ["hidden_size is 66", "num_attention_heads=4"]),
        ("llama", {"head_dim": 15}, ["head_dim is 15", "even"]),
        ("llama", {"hidden_size": "64"}, ["hidden_size", "'64'"]),
        ("llama", {"vocab_size": -1}, ["vocab_size", "-1"]),
        ("llama", {"vocab_size": None}, ["vocab_size is missing"]),
        ("llama", {"hidden_size": True}, ["hidden_size", "True"]),
        ("llama", {"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ("llama", {"attention_bias": "yes"}, ["attention_bias", "yes"]),
        ("llama", {"rms_norm_eps": 0}, ["rms_norm_eps", "0"]),
        ("llama", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping", "50.0"]),
        ("llama", {"is_encoder_decoder": True}, ["is_encoder_decoder", "True"]),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, ["quantization_config"]),
        ("llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ("llama", {"dtype": "float8"}, ["dtype", "float8"]),
        ("llama", {"eos_token_id": "</s>"}, ["eos_token_id", "</s>"]),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, ["rope_type", "longrope", "yarn"]),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2}, "rope_parameters": None}, ["type", "dynamic"]),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, ["rope_parameters: factor is missing"]),
        ("llama", {"rope_parameters": {"rope_type": "default", "factor": 2.0}}, ["factor"]),
        ("llama", {"rope_parameters": {"rope_type": "default", "mrope_section": [1]}}, ["mrope_section"]),
        ("llama", {"rope_parameters": [1]}, ["rope_parameters", "[1]"]),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2}}, ["rope_scaling", "rope_parameters"]),
        ("mistral", {"sliding_window": 0}, ["sliding_window", "0"]),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 1}, ["sliding_window", "0"]),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "use_sliding_window"]),
        ("qwen3", {"layer_types": ["full_attention"]}, ["layer_types", "2"]),
        ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, ["layer_types", "linear_attention"]),
    ],
)
def test_refusals_name_field_and_value(
    tmp_path: Path, family: str, overrides: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, family, **overrides)
    for word in words:
        assert word in str(caught.value)


def test_mistral_without_the_field_has_the_window_that_the_reference_gives_it(tmp_path: Path) -> None:
    config = make_config("mistral", max_position_embeddings=32768)
    del config["sliding_window"]
    specs = read_model_config(write(tmp_path, config)).layer_specs("float32")
    assert [spec.window for spec in specs] == [4096, 4096]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"model_type": "llama"', ["config.json", "not valid JSON"]),
        (b"[1, 2]", ["config.json", "object"]),
        (b"\xff\xfe{}", ["config.json", "UTF-8"]),
        (b"[" * 100_000, ["config.json", "not valid JSON"]),
    ],
)
def test_broken_files(tmp_path: Path, text: bytes, words: list[str]) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError) as caught:
        read_model_config(tmp_path)
    for word in words:
        assert word in str(caught.value)


def test_places_that_are_not_models(tmp_path: Path) -> None:
    (tmp_path / "file.bin").write_bytes(b"")
    places = {
        str(tmp_path): "has no config.json",
        str(tmp_path / "nothing"): "no model directory",
        str(tmp_path / "file.bin"): "is a file",
        "org/name": "Hugging Face Hub",
    }
    for place, words in places.items():
        with pytest.raises(PagerunnerError, match=words):
            read_model_config(place)
