"""Config fields that nobody knows: unset ones are passed over and logged once, others are errors that say how to allow them."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import make_checkpoint, make_config
from helpers.published import all_published
from pagerunner import LLM
from pagerunner.errors import CheckpointError, ConfigError
from pagerunner.models.checkpoint.kv_scales import place_of
from pagerunner.models.checkpoint.loader import checkpoint_files
from pagerunner.models.configs.fields import Fields
from pagerunner.models.configs.reader import read_model_config


def write(path: Path, **fields: Any) -> Path:
    (path / "config.json").write_text(json.dumps({**make_config("qwen2"), **fields}))
    return path


def test_unset_ones_are_passed_over_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, use_mrope=False, some_list=[], some_object={}, some_text="", some_null=None)
    with caplog.at_level(logging.INFO):
        read_model_config(path)
        read_model_config(path)
    [line] = [record.getMessage() for record in caplog.records if "unknown fields" in record.getMessage()]
    for shown in ("use_mrope=False", "some_list=[]", "some_object={}", "some_text=''"):
        assert shown in line
    assert "some_null" not in line


@pytest.mark.parametrize("value", [True, 0, 0.0, 1, "x", [0], {"a": None}])
def test_set_ones_are_errors_that_say_how_to_pass_them_over(tmp_path: Path, value: Any) -> None:
    path = write(tmp_path, some_switch=value)
    with pytest.raises(ConfigError) as caught:
        read_model_config(path)
    said = str(caught.value)
    assert f"some_switch is {value!r}" in said
    [advice] = re.findall(r"--hf-overrides '(.*?)'", said)
    assert read_model_config(path, hf_overrides=advice).num_layers == 2
    assert read_model_config(path, hf_overrides=json.loads(advice)).num_layers == 2


def test_the_advice_names_the_object_that_the_field_is_in(tmp_path: Path) -> None:
    path = write(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "bend": 2})
    with pytest.raises(ConfigError) as caught:
        read_model_config(path)
    assert """--hf-overrides '{"rope_parameters": {"bend": null}}'""" in str(caught.value)
    read_model_config(path, hf_overrides={"rope_parameters": {"bend": None}})


def test_a_field_that_means_something_when_false_is_not_passed_over(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is_causal is False"):
        read_model_config(write(tmp_path, is_causal=False))


def test_overrides_change_known_fields_too(tmp_path: Path) -> None:
    path = write(tmp_path)
    changed = read_model_config(
        path, hf_overrides={"max_position_embeddings": 64, "rope_parameters": {"rope_theta": 5}}
    )
    assert changed.max_position_embeddings == 64
    assert changed.rope.theta == 5  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("{", ["hf_overrides", "not valid JSON"]),
        ("[1]", ["hf_overrides", "object"]),
        ({"nothing_like_it": None}, ["hf_overrides", "nothing_like_it", "no such field"]),
        ({"nothing_like_it": 3}, ["nothing_like_it is 3", "does not know"]),
    ],
)
def test_bad_overrides(tmp_path: Path, overrides: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_model_config(write(tmp_path), hf_overrides=overrides)
    assert all(word in str(caught.value) for word in words)


def test_an_engine_takes_overrides(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "some_switch": True}))
    options: dict[str, Any] = {"kv_cache_memory_bytes": 8_000_000, "max_model_len": 64, "use_tqdm": False}
    with pytest.raises(ConfigError, match="some_switch"):
        LLM(str(path), **options)
    LLM(str(path), hf_overrides={"some_switch": None}, **options)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("vocab_size", 10**30, r"vocab_size must be at most 2147483647, got 10{30}"),
        ("q_lora_rank", 2**63, "q_lora_rank must be at most 2147483647"),
        ("head_dim", 2**40, "head_dim must be at most 2147483647"),
        ("rope_theta", 10**400, "rope_theta must be a finite number, got 10{79}\\."),
        ("num_hidden_layers", 10**7, "num_hidden_layers must be at most 10000, got 10000000"),
    ],
)
def test_sizes_that_no_model_has_are_named(tmp_path: Path, field: str, value: Any, said: str) -> None:
    family = "deepseek-ai/DeepSeek-V3" if field == "q_lora_rank" else "Qwen/Qwen3-8B"
    config = json.loads(all_published()[family].file.read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(ConfigError, match=said):
        read_model_config(tmp_path)


def test_numbers_and_names_of_thousands_of_characters_are_told(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3", tokenizer=False)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x" * 5_000}}))
    with pytest.raises(CheckpointError, match="a is in 'x+, which is not a plain file name"):
        checkpoint_files(path)
    assert place_of(f"model.layers.{'1' * 5_000}.self_attn.k_scale") is None
    (path / "config.json").write_text('{"model_type": "qwen3", "hidden_size": ' + "1" * 5_000 + "}")
    with pytest.raises(CheckpointError, match="config.json is not valid JSON: .*digits"):
        read_model_config(path)


def test_which_cache_and_kernels_transformers_takes_changes_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, cache_implementation="hybrid", use_mamba_kernels=True)
    said = {"quant_method": "gptq", "bits": 4, "group_size": 32, "act_group_aware": True, "hyb_act": True}
    read_model_config(path)
    assert read_model_config(write(tmp_path, quantization_config=said)).format is not None


def test_a_list_with_another_number_of_layers_says_how_many_there_are() -> None:
    fields = Fields({"layer_types": ["full_attention"] * 24, "odd": ["sliding_attention"] * 24}, "config.json")
    with pytest.raises(ConfigError) as caught:
        fields.names("layer_types", ("full_attention",), 1)
    said = "config.json: layer_types must be a list of 1 names, one for each of num_hidden_layers, got 24 of them: ['full_attention', "
    assert str(caught.value).startswith(said) and str(caught.value).endswith("'full_attention', ....")
    with pytest.raises(ConfigError, match=r"odd is \['sliding_attention', .*'sliding_attention', \.\.\., a field"):
        fields.finish()
