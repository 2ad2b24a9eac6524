"""quantization_config, writer by writer, as published files have it; every field is known, or an error that names it."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import make_checkpoint
from helpers.published import config_files
from pagerunner.errors import ConfigError
from pagerunner.models.configs.fields import log_once
from pagerunner.models.configs.quantization import asked_format, read_format, with_hf_quant_config
from pagerunner.models.configs.reader import read_model_config
from pagerunner.quant.formats import Scheme

LAYER = "model.layers.3.mlp.down_proj"


def compressed(
    layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    named = {"quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed"}
    return {**named, "ignore": ["lm_head"], "config_groups": {"group_0": group}, "kv_cache_scheme": None, **more}


TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True, "observer": None}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True, "actorder": None}
CASES: dict[str, tuple[dict[str, Any], Scheme]] = {
    "fp8 tensor": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        Scheme("fp8", "tensor", rounding="static"),
    ),
    "Qwen3-FP8": (
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
        },
        Scheme("fp8", "block", (128, 128), rounding="block"),
    ),
    "DeepSeek-V3.1": (
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "scale_fmt": "ue8m0",
        },
        Scheme("fp8", "block", (128, 128), rounding="block"),
    ),
    "fp8 channel": (
        compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel", "observer": "minmax"}, TOKENS),
        Scheme("fp8", "channel", rounding="token"),
    ),
    "int8": (
        compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, {**TOKENS, "type": "int"}),
        Scheme("int8", "channel", rounding="token"),
    ),
    "packed int8": (
        compressed("pack-quantized", {**INT4, "num_bits": 8, "strategy": "channel", "group_size": None}),
        Scheme("int8", "channel", layout="compressed"),
    ),
    "int4": (compressed("pack-quantized", INT4), Scheme("int4", "group", (1, 128), layout="compressed")),
    "int4 with zeros, permuted": (
        compressed("pack-quantized", {**INT4, "symmetric": False, "actorder": "group", "group_size": 32}),
        Scheme("int4", "group", (1, 32), zeros=True, permuted=True, layout="compressed"),
    ),
    "NVFP4 of compressed-tensors": (
        compressed(
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
        ),
        Scheme("fp4", "group", (1, 16), layout="compressed nvfp4"),
    ),
    "MXFP4 of compressed-tensors": (
        compressed("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
        Scheme("fp4", "group", (1, 32), layout="mxfp4"),
    ),
    "modelopt FP8": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "producer": {"name": "modelopt"}},
        Scheme("fp8", "tensor", rounding="static"),
    ),
    "modelopt NVFP4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]},
        Scheme("fp4", "group", (1, 16), layout="nvfp4", rounding="static"),
    ),
    "AWQ": (
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 128,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": ["lm_head"],
        },
        Scheme("int4", "group", (1, 128), zeros=True, layout="awq"),
    ),
    "old AWQ": (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True, "modules_to_not_convert": ["lm_head"]},
        Scheme("int4", "group", (1, 64), zeros=True, layout="awq"),
    ),
    "GPTQ": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "damp_percent": 0.01,
         "modules_to_not_convert": ["lm_head"]},
        Scheme("int4", "group", (1, 128), zero_offset=1, layout="gptq"),
    ),
    "GPTQ, permuted, second version": (
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": True, "sym": False, "checkpoint_format": "gptq_v2",
         "modules_to_not_convert": ["lm_head"]},
        Scheme("int8", "group", (1, 32), zeros=True, permuted=True, layout="gptq"),
    ),
    "Llama-3.1-405B-FP8": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["model.layers.0.self_attn.q_proj", "lm_head"]},
        Scheme("fp8", "channel", rounding="token"),
    ),
    "AutoRound in GPTQ's words": (
        {"quant_method": "auto-round", "bits": 4, "data_type": "int", "group_size": 128, "sym": True, "iters": 0,
         "autoround_version": "0.12.3", "block_name_to_quantize": "model.language_model.layers",
         "packing_format": "auto_round:auto_gptq",
         "extra_config": {"model.language_model.layers.0.linear_attn.in_proj_b": {"bits": 16, "data_type": "fp"}}},
        Scheme("int4", "group", (1, 128), zero_offset=1, layout="gptq"),
    ),
    "AutoRound in AWQ's words": (
        {"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": False, "packing_format": "auto_round:auto_awq"},
        Scheme("int4", "group", (1, 64), zeros=True, layout="awq"),
    ),
    "GPTQ by whole columns": (
        {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": True, "modules_to_not_convert": ["lm_head"]},
        Scheme("int4", "channel", zero_offset=1, layout="gptq"),
    ),
    "gpt-oss": (
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
        Scheme("fp4", "group", (1, 32), layout="gpt-oss"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_writers_say_how_matrices_are_stored(case: str) -> None:
    values, want = CASES[case]
    found = read_format(values, "config.json")
    assert found.writer == values["quant_method"] and found.scheme(LAYER) == want
    assert found.scheme("lm_head") is None or case == "DeepSeek-V3.1"


@pytest.mark.parametrize(
    ("layout", "weights", "named"),
    [
        ("float-quantized", {"type": "float", "strategy": "group", "group_size": 128}, "strategy is 'group'.*float-quantized"),
        ("float-quantized", {"type": "float", "group_size": 128}, "strategy is 'group'"),
        ("int-quantized", {"strategy": "channel", "symmetric": False}, "symmetric is false.*Use another repository"),
        ("pack-quantized", {"strategy": "tensor"}, "strategy is 'tensor', which pack-quantized"),
    ],
)  # fmt: skip
def test_what_there_is_no_form_for_is_an_error_that_says_what_to_use(
    layout: str, weights: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        read_format(compressed(layout, {"num_bits": 8, "type": "int", **weights}), "config.json")


@pytest.mark.parametrize("case", CASES)
def test_an_unknown_field_is_an_error_that_names_it(case: str) -> None:
    with pytest.raises(ConfigError, match="new_field is 'x'"):
        read_format({**CASES[case][0], "new_field": "x"}, "config.json")


@pytest.mark.parametrize(
    ("case", "change", "named"),
    [
        ("fp8 tensor", {"activation_scheme": "odd"}, "activation_scheme is 'odd'"),
        ("Qwen3-FP8", {"fmt": "e5m2"}, "fmt is 'e5m2'"),
        ("Qwen3-FP8", {"weight_block_size": [128]}, "weight_block_size must be two whole numbers"),
        ("Qwen3-FP8", {"weight_block_size": [2**63, 128]}, "weight_block_size must be two whole numbers"),
        ("Qwen3-FP8", {"activation_scheme": "static"}, "beside a weight_block_size"),
        ("Qwen3-FP8", {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list"),
        (
            "AutoRound in GPTQ's words",
            {"packing_format": "auto_round:fp8"},
            "packing_format is 'auto_round:fp8'.* Use such",
        ),
        ("AutoRound in GPTQ's words", {"data_type": "mx_fp"}, "data_type is 'mx_fp'"),
        ("AutoRound in GPTQ's words", {"bits": 2}, "bits is 2"),
        ("AutoRound in GPTQ's words", {"act_bits": 8}, "act_bits is 8"),
        ("AutoRound in GPTQ's words", {"extra_config": {"a": {"act_bits": 8}}}, "extra_config.a: act_bits is 8"),
        ("AutoRound in AWQ's words", {"bits": 8}, "bits is 8"),
        ("AutoRound in AWQ's words", {"block_name_to_quantize": 3}, "block_name_to_quantize must be names"),
        ("fp8 channel", {"format": "dense"}, "format is 'dense'"),
        ("fp8 channel", {"config_groups": {}}, "config_groups must be an object with at least one group"),
        ("fp8 channel", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ("modelopt FP8", {"quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'"),
        ("AWQ", {"version": "gemv"}, "version is 'gemv'"),
        ("AWQ", {"bits": 3}, "bits is 3"),
        ("GPTQ", {"bits": 3}, "bits is 3"),
        ("GPTQ", {"dynamic": {"+:.*": {"bits": 3}}}, r"dynamic.\+:\.\*: bits is 3"),
        ("GPTQ", {"dynamic": {"+:.*": {"odd": 1}}}, r"dynamic.\+:\.\*: odd is 1"),
        ("GPTQ", {"dynamic": ["-:.*"]}, "dynamic must be an object"),
        ("GPTQ", {"dynamic": {1: {}}}, "dynamic must be an object of patterns"),
        ("GPTQ", {"dynamic": {"-:[": {}}}, r"dynamic has 're:\['.*unterminated character set"),
        (
            "GPTQ",
            {"dynamic": {"+:.*q_proj": None}},
            r"dynamic has '\+:\.\*q_proj', which must be an object of settings, got None",
        ),
        *(
            ("GPTQ", {field: name}, f"{field} must be names of modules and not patterns")
            for field, name in (("block_name_to_quantize", "model.layers, re:("), ("to_quant_block_names", [["re:.*"]]))
        ),
        ("AutoRound in GPTQ's words", {"block_name_to_quantize": "re:("}, "must be names of modules and not patterns"),
        ("int4", {"ignore": ["lm_head", "re:("]}, r"ignore has 're:\(', which is no pattern .*missing \)"),
        ("AutoRound in GPTQ's words", {"extra_config": {"(": {"bits": 16}}}, r"extra_config has 're:\('"),
        ("modelopt NVFP4", {"group_size": 32}, "group_size is 32"),
    ],
)
def test_values_that_are_not_known_are_named(case: str, change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_format({**CASES[case][0], **change}, "config.json")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_bits": 3}, "num_bits is 3"),
        ({"strategy": "odd"}, "strategy is 'odd'"),
        ({"group_size": 0}, "group_size must be a whole number above 0"),
        ({"actorder": "odd"}, "actorder is 'odd'"),
        ({"dynamic": True}, "dynamic is true"),
        ({"extra": 1}, "extra is 1"),
    ],
)
def test_values_of_weights_that_are_not_known_are_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_format(compressed("pack-quantized", {**INT4, **change}), "config.json")


@pytest.mark.parametrize(
    ("method", "hint"), [("gguf", "llama.cpp"), ("bitsandbytes", "bfloat16"), ("torchao", "pickled")]
)
def test_formats_that_are_never_read_say_what_to_use_instead(method: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        read_format({"quant_method": method}, "config.json")


@pytest.mark.parametrize(
    ("case", "entries", "module", "kept"),
    [
        ("Qwen3-FP8", ["model.layers.3.mlp"], LAYER, True),
        ("Qwen3-FP8", ["model.layers.3.mlp.down"], LAYER, False),  # a part of a name is not a module
        ("Qwen3-FP8", ["down_proj"], LAYER, False),
        ("AWQ", ["down_proj"], LAYER, True),
        ("gpt-oss", ["model.layers.*.mlp"], LAYER, True),
        ("gpt-oss", ["model.layers.*.mlp"], "model.layers.13.mlp.experts.gate_up_proj", True),
        ("modelopt FP8", ["*mlp*"], LAYER, True),
        ("modelopt FP8", ["mlp"], LAYER, False),
        ("fp8 channel", ["re:.*down_proj"], LAYER, True),
        ("fp8 channel", ["language_model.model.layers.3.mlp.down_proj"], LAYER, True),
        ("fp8 channel", [LAYER], "model.language_model.layers.3.mlp.down_proj", True),
        ("fp8 channel", ["model.layers.3.self_attn.qkv_proj"], "model.layers.3.self_attn.k_proj", True),
        ("fp8 channel", ["model.layers.3.mlp.gate_up_proj"], "model.layers.3.mlp.up_proj", True),
        ("fp8 channel", ["model.layers.3.mlp.gate_up_proj"], LAYER, False),
        ("fp8 channel", ["model.layers.3.linear_attn.in_proj_b"], "model.layers.3.linear_attn.in_proj_ba", True),
        ("fp8 channel", ["re:down_proj"], LAYER, False),  # patterns begin at the name's start
    ],
)
def test_each_writers_list_is_matched_by_its_own_rule(case: str, entries: list[str], module: str, kept: bool) -> None:
    field = "modules_to_not_convert" if "modules_to_not_convert" in CASES[case][0] else "ignore"
    found = read_format({**CASES[case][0], field: entries}, "config.json")
    assert (found.scheme(module) is None) is kept


@pytest.mark.parametrize(
    ("case", "entries", "apart"),
    [
        ("Qwen3-FP8", ["lm_head", "model.layers.1.self_attn.k_proj", "model.layers.1.mlp.gate"], False),
        ("Qwen3-FP8", ["model.layers.1.mlp.experts.7"], True),
        ("Qwen3-FP8", ["model.layers.1.mlp.experts"], False),
        ("Qwen3-FP8", ["model.layers.*.mlp.experts.3"], True),
        ("fp8 channel", [r"re:.*experts\.\d+\.up_proj", "re:.*self_attn.*"], False),
        ("fp8 channel", [r"re:.*experts\..\.up_proj"], False),  # numbers of one digit
        ("fp8 channel", [r"re:.*\.1[0-7]\.up_proj"], True),
        ("modelopt FP8", ["model.layers.1.mlp.experts.1*"], True),
        ("modelopt FP8", ["model.layers.2.mlp.experts.1*", "*router*"], False),
        ("modelopt FP8", ["*.experts.1?.*"], True),
        ("AWQ", ["mlp.gate", "experts.12."], True),
    ],
)
def test_experts_are_told_apart_only_where_a_list_can_do_so(case: str, entries: list[str], apart: bool) -> None:
    field = "modules_to_not_convert" if "modules_to_not_convert" in CASES[case][0] else "ignore"
    found = read_format({**CASES[case][0], field: entries}, "config.json")
    experts = "model.layers.1.mlp.experts"
    assert found.tells_apart(experts) is apart
    kept = {n: found.scheme(f"{experts}.{n}.up_proj") is None for n in range(128)}
    by_digits = [{kept[n] for n in kept if len(str(n)) == digits} for digits in (1, 2, 3)]
    assert apart or all(len(ways) == 1 for ways in by_digits)


def test_a_pattern_in_a_group_is_checked_and_hostile_ones_take_no_time() -> None:
    values = compressed("pack-quantized", INT4, ignore=["re:(([a-z0-9._]+)+)+!", "re:(.*)*v_proj"])
    group = {**values["config_groups"]["group_0"], "targets": ["re:*"]}
    with pytest.raises(ConfigError, match=r"config_groups.group_0: targets has 're:\*', .*nothing to repeat"):
        read_format({**values, "config_groups": {"group_0": group}}, "config.json")
    started = time.process_time()
    found = read_format(values, "config.json")
    assert found.scheme(LAYER) is not None and found.scheme("model.layers.0.self_attn.v_proj") is None
    assert time.process_time() - started < 2


def test_long_lists_are_cheap_to_ask() -> None:
    listed = [
        f"model.layers.{i}.linear_attn.{part}"
        for i in range(48)
        for part in ("in_proj_a", "in_proj_b", "conv1d", "norm")
    ]
    found = read_format({**CASES["Qwen3-FP8"][0], "modules_to_not_convert": listed}, "config.json")
    started = time.process_time()
    assert all(found.scheme(f"model.layers.{i % 48}.mlp.experts.{i}.up_proj") is not None for i in range(50_000))
    assert time.process_time() - started < 5  # all entries tried one by one take minutes
    assert found.scheme("model.layers.47.linear_attn.conv1d") is None


def test_groups_by_name_come_before_the_class_of_all_linears() -> None:
    values = compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"})
    own = {"targets": ["re:.*down_proj"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    values["config_groups"]["group_1"] = own
    found = read_format(values, "config.json")
    assert found.scheme(LAYER) == Scheme("fp8", "channel")
    assert found.scheme("model.layers.3.mlp.up_proj") == Scheme("fp8", "tensor")


def test_gptq_has_settings_by_module() -> None:
    values = {**CASES["GPTQ"][0], "dynamic": {r"-:.*\.up_proj": {}, r"+:.*\.down_proj": {"bits": 8, "group_size": 64}}}
    found = read_format(values, "config.json")
    assert found.scheme(LAYER) == Scheme("int8", "group", (1, 64), zero_offset=1, layout="gptq")
    assert found.scheme("model.layers.3.mlp.up_proj") is None
    assert found.scheme("model.layers.3.mlp.gate_proj") == CASES["GPTQ"][1]


def test_of_gptqs_patterns_the_first_that_matches_a_module_decides() -> None:
    """As GPTQModel's `dynamic_get` has it."""
    eight, none = {r"+:.*layers\.3\..*down_proj": {"bits": 8}}, {r"-:.*down_proj": {}}
    first, last = (
        read_format({**CASES["GPTQ"][0], "dynamic": given}, "config.json")
        for given in ({**eight, **none}, {**none, **eight})
    )
    assert first.scheme(LAYER) == Scheme("int8", "group", (1, 128), zero_offset=1, layout="gptq")
    assert first.scheme(LAYER.replace("3", "4")) is None
    assert last.scheme(LAYER) is None and last.scheme_unless_listed(LAYER) is not None
    assert (
        last.scheme("model.layers.3.mlp.gate_proj") == first.scheme("model.layers.3.mlp.gate_proj") == CASES["GPTQ"][1]
    )


@pytest.mark.parametrize("order", ["group", "dynamic", True])
@pytest.mark.parametrize(
    ("layout", "weights"),
    [
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}),
        ("pack-quantized", {**INT4, "strategy": "channel", "group_size": None}),
    ],
)
def test_an_order_of_input_features_without_groups_is_refused(layout: str, weights: dict[str, Any], order: Any) -> None:
    with pytest.raises(ConfigError, match=f"actorder is {order!r} beside the strategy '{weights['strategy']}'"):
        read_format(compressed(layout, {**weights, "actorder": order}), "config.json")
    assert read_format(compressed(layout, {**weights, "actorder": "weight"}), "config.json").scheme(LAYER) is not None


def test_autoround_has_settings_by_module_and_leaves_what_is_outside_its_blocks() -> None:
    values = {
        **CASES["AutoRound in GPTQ's words"][0],
        "block_name_to_quantize": ["model.layers", "model.vision_tower.blocks"],
        "extra_config": {
            "model.layers.3.mlp.down_proj": {"bits": 8, "group_size": 64, "act_bits": 16},
            "model.layers.3.mlp.up_proj": {"bits": 16, "data_type": "fp"},
            r".*experts\..*": {"sym": False},
        },
    }
    found = read_format(values, "config.json")
    assert found.scheme(LAYER) == Scheme("int8", "group", (1, 64), zero_offset=1, layout="gptq")
    assert found.scheme("model.layers.3.mlp.up_proj") is None and found.scheme("lm_head") is None
    assert found.scheme("model.merger.proj") is None
    uneven = found.scheme("model.layers.3.mlp.experts.7.up_proj")
    assert uneven == Scheme("int4", "group", (1, 128), zeros=True, zero_offset=1, layout="gptq")
    assert read_format({**values, "quant_lm_head": True}, "config.json").scheme("lm_head") is not None


def test_mixed_precision_of_model_optimizer_says_each_modules_format() -> None:
    layers = {LAYER: {"quant_algo": "NVFP4", "group_size": 16}, "model.layers.3.mlp.experts": {"quant_algo": "FP8"}}
    said = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    found = read_format(said, "config.json")
    assert found.scheme(LAYER) == Scheme("fp4", "group", (1, 16), layout="nvfp4", rounding="static") and found.names(
        LAYER
    )
    assert found.scheme("model.layers.3.mlp.experts.7.up_proj") == Scheme("fp8", "tensor", rounding="static")
    assert found.scheme("lm_head") is None and not found.names("lm_head")
    for wrong, message in (
        ({}, "quantized_layers must be an object"),
        ({LAYER: 4}, f"quantized_layers has {LAYER}, which must be"),
        ({LAYER: {"quant_algo": "INT8"}}, "quant_algo is 'INT8'"),
        ({LAYER: {"quant_algo": "NVFP4", "group_size": 32}}, "group_size is 32"),
        ({LAYER: {"quant_algo": "FP8", "twist": 2}}, "twist is 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_format({**said, "quantized_layers": wrong}, "config.json")


@pytest.mark.parametrize("file", sorted(config_files()), ids=lambda file: file.stem)
def test_what_published_files_say_is_read(file: Path) -> None:
    values = json.loads(file.read_text()).get("quantization_config")
    if values is not None:
        mlp = "model.layers.3.mlp.experts.0.down_proj" if "expert" in file.read_text() else LAYER
        assert read_format(values, file.name).scheme(mlp) is not None


def test_older_model_optimizers_say_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama", tokenizer=False)
    named = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    file = path / "hf_quant_config.json"
    file.write_text(json.dumps({"producer": {"name": "modelopt", "version": "0.23.0"}, "quantization": named}))
    found = read_model_config(path).format
    assert found is not None and found.scheme(LAYER) == Scheme("fp8", "tensor", rounding="static")
    file.write_text(json.dumps({"quantization": {**named, "quant_algo": "NVFP4"}}))
    found = read_model_config(path).format
    assert found is not None and found.scheme(LAYER) == Scheme(
        "fp4", "group", (1, 16), layout="nvfp4", rounding="static"
    )
    file.write_text(json.dumps({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}))
    assert read_model_config(path).quantization is None
    with pytest.raises(ConfigError, match="quantization must be an object"):
        with_hf_quant_config({}, "hf_quant_config.json")


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("numbers", [{"num_bits": 4}, {"num_bits": 8, "type": "int"}, {"num_bits": 8, "type": "float"}])
def test_numbers_that_pages_can_not_follow_are_told_of_with_and_without_quantised_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, weights: bool, numbers: dict[str, Any]
) -> None:
    log_once.cache_clear()
    path = make_checkpoint(tmp_path, "llama", tokenizer=False)
    said = compressed("pack-quantized", INT4) if weights else {"quant_method": "compressed-tensors"}
    give(path, {**said, "kv_cache_scheme": numbers})
    found = read_model_config(path)
    assert (found.format is not None) is (found.quantization is not None) is weights
    told = [record.message for record in caplog.records if "kv_cache_scheme" in record.message]
    assert len(told) == (numbers.get("type") != "float")
    assert all("they hold what kv_cache_dtype says" in line for line in told)


def test_keys_and_values_alone_may_be_said_in_model_optimizers_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log_once.cache_clear()
    path = make_checkpoint(tmp_path, "llama", tokenizer=False)
    give(path, {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "NVFP4"})
    assert read_model_config(path).format is None
    assert "kv_cache_quant_algo is 'NVFP4', which pages can't follow" in caplog.text
    give(path, {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8", "odd": 3})
    with pytest.raises(ConfigError, match="odd is 3"):
        read_model_config(path)


@pytest.mark.parametrize("value", [3, "gptq", []])
@pytest.mark.parametrize("allowed", [True, False])
def test_a_quantization_config_that_is_no_object_is_told_with_its_value(
    tmp_path: Path, value: Any, allowed: bool
) -> None:
    path = make_checkpoint(tmp_path, "llama", tokenizer=False)
    give(path, value)
    with pytest.raises(ConfigError, match=re.escape(f"quantization_config must be an object, got {value!r}.")):
        read_model_config(path, quantised=allowed)


@pytest.mark.parametrize("value", [{}, {"quant_method": None}])
def test_a_writer_that_is_missing_is_told_in_one_sentence(tmp_path: Path, value: Any) -> None:
    path = make_checkpoint(tmp_path, "llama", tokenizer=False)
    give(path, value)
    with pytest.raises(ConfigError, match="quant_method is missing; known are fp8, "):
        read_model_config(path)


def give(path: Path, quantization: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": quantization}))


def test_two_places_that_say_different_things_are_an_error_that_names_both(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama", tokenizer=False)
    file, second = path / "config.json", path / "hf_quant_config.json"
    plain = json.loads(file.read_text())
    said = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    file.write_text(json.dumps({**plain, "quantization_config": said}))
    second.write_text(json.dumps({"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head", "proj_out"]}}))
    assert read_model_config(path).format is not None
    second.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4", "group_size": 16}}))
    with pytest.raises(
        ConfigError, match="config.json: quantization_config says quant_algo 'FP8', and hf_quant_config.json .*'NVFP4'"
    ):
        read_model_config(path)
    second.unlink()
    file.write_text(json.dumps({**plain, "quantization_config": said, "compression_config": CASES["int4"][0]}))
    with pytest.raises(ConfigError, match="compression_config says something else than quantization_config"):
        read_model_config(path)


def test_the_order_of_input_features_has_two_names() -> None:
    for name in ("group", "dynamic"):
        found = read_format(compressed("pack-quantized", {**INT4, "actorder": name}), "config.json").scheme(LAYER)
        assert found is not None and found.permuted
    for name in ("weight", "static", None):
        found = read_format(compressed("pack-quantized", {**INT4, "actorder": name}), "config.json").scheme(LAYER)
        assert found is not None and not found.permuted


@pytest.mark.parametrize(
    ("name", "rounding"),
    [("fp8", "token"), ("fp8_per_channel", "token"), ("fp8_per_block", "block"), ("int8_per_channel_weight_only", "")],
)
def test_weights_that_are_rounded_while_loading_go_with_rounded_activations_unless_their_name_says_otherwise(
    name, rounding
):
    made = asked_format(name, None, "config.json")
    assert made is not None and [scheme.rounding for _, scheme in made.schemes] == [rounding]


@pytest.mark.parametrize("inputs", [{"num_bits": 16}, {"num_bits": 4}, {"type": "int"}])
def test_activations_are_rounded_to_what_weights_of_8_bits_are(inputs: dict[str, Any]) -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    read_format(compressed("float-quantized", weights, TOKENS), "config.json")
    with pytest.raises(ConfigError, match="input_activations: num_bits is .*; beside weights of 8 bits and type float"):
        read_format(compressed("float-quantized", weights, {**TOKENS, **inputs}), "config.json")
