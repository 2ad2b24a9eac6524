"""What the quantization_config of published checkpoints says, writer by writer: the facts of real files, and what is made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import packers
from helpers.checkpoints import make_checkpoint
from helpers.quantise import quantise
from pagerunner.errors import ConfigError
from pagerunner.models.checkpoint.loader import build_model, load_weights, materialize, weights_bytes
from pagerunner.models.configs.quantization import read_format
from pagerunner.models.configs.reader import read_model_config
from pagerunner.quant.formats import Scheme

ATTENTION, DOWN, HEAD = "model.layers.3.self_attn.q_proj", "model.layers.3.mlp.down_proj", "lm_head"
EXPERT, SHARED = "model.layers.3.mlp.experts.7.up_proj", "model.layers.3.mlp.shared_experts.down_proj"
LINEAR = "model.language_model.layers.3.linear_attn.out_proj"

FP8_TENSOR = Scheme("fp8", "tensor", rounding="static")
FP8_CHANNEL = Scheme("fp8", "channel", rounding="token")
FP8_BLOCK = Scheme("fp8", "block", (128, 128), rounding="block")
NVFP4, NVFP4_WEIGHTS = (
    Scheme("fp4", "group", (1, 16), layout="nvfp4", rounding=rounding) for rounding in ("static", "")
)
CT_INT4 = Scheme("int4", "group", (1, 128), layout="compressed")
GPTQ = Scheme("int4", "group", (1, 128), zero_offset=1, layout="gptq")
AWQ = Scheme("int4", "group", (1, 128), zeros=True, layout="awq")


def arguments(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    """What compressed-tensors writes of weights or activations, all fields of it."""
    usual = {"actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": bits, "observer": "minmax",
             "observer_kwargs": {}, "strategy": strategy, "symmetric": True, "type": kind}  # fmt: skip
    return {**usual, **more}


def group(weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"input_activations": inputs, "output_activations": None, "targets": ["Linear"], "weights": weights, **more}


def compressed(layout: str, *groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    config_groups = {f"group_{number}": one for number, one in enumerate(groups)}
    usual = {"format": layout, "global_compression_ratio": None, "ignore": ["lm_head"], "kv_cache_scheme": None,
             "quant_method": "compressed-tensors", "quantization_status": "compressed"}  # fmt: skip
    return {**usual, "config_groups": config_groups, **more}


def optimizer(bits: int, *, inputs: bool = True, **more: Any) -> dict[str, Any]:
    """A group as Model Optimizer writes it."""
    numbers = {"dynamic": False, "num_bits": bits, "type": "float", **({"group_size": 16} if bits == 4 else {})}
    return {"group_0": {**({"input_activations": numbers} if inputs else {}), "weights": numbers, **more}}


TOKENS = arguments(8, "float", "token", dynamic=True, observer=None)
FILES: dict[str, tuple[dict[str, Any], dict[str, Scheme | None]]] = {
    "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic": (
        compressed("float-quantized", group(arguments(8, "float", "channel"), TOKENS), version="0.8.1",
                   sparsity_config={"format": "dense", "global_sparsity": 0.1, "sparsity_structure": "unstructured"}),
        {ATTENTION: FP8_CHANNEL, HEAD: None},
    ),
    "neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8": (
        compressed("naive-quantized", group(arguments(8, "float", "tensor"), arguments(8, "float", "tensor"))),
        {ATTENTION: FP8_TENSOR, HEAD: None},
    ),
    "neuralmagic/Mistral-7B-Instruct-v0.3-FP8": (
        {"activation_scheme": "static", "ignored_layers": ["lm_head"], "kv_cache_scheme": "static", "quant_method": "fp8"},
        {ATTENTION: FP8_TENSOR, HEAD: None},
    ),
    "RedHatAI/Meta-Llama-3.1-70B-Instruct-quantized.w8a8": (
        compressed("int-quantized", group(arguments(8, "int", "channel", observer="mse"), {**TOKENS, "type": "int"})),
        {DOWN: Scheme("int8", "channel", rounding="token"), HEAD: None},
    ),
    "activations with zero points, static": (
        compressed("int-quantized", group(arguments(8, "int", "channel"), arguments(8, "int", "tensor", symmetric=False))),
        {DOWN: Scheme("int8", "channel", unused=("input_scale", "input_zero_point"))},
    ),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w8a16": (
        compressed("pack-quantized", group(arguments(8, "int", "channel"))),
        {DOWN: Scheme("int8", "channel", layout="compressed")},
    ),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16": (
        compressed("pack-quantized", group(arguments(4, "int", "group", group_size=128, actorder="weight", observer="mse"))),
        {DOWN: CT_INT4, HEAD: None},
    ),
    "RedHatAI/Llama-4-Scout-17B-16E-Instruct-quantized.w4a16": (
        compressed("pack-quantized", group(arguments(4, "int", "group", group_size=128, actorder="weight")),
                   ignore=["re:.*lm_head", "re:.*self_attn", "re:.*router", "re:.*vision_model", "re:.*multi_modal_projector",
                           "Llama4TextAttention"]),
        {"language_model.model.layers.3.feed_forward.experts.7.up_proj": CT_INT4, ATTENTION: None, HEAD: None},
    ),
    "a gemma-3 repack after quantisation-aware training": (
        compressed("pack-quantized", group(arguments(4, "int", None, group_size=32)),  # type: ignore[arg-type]
                   ignore=["re:.*lm_head.*", "re:.*embed_tokens.*", "re:vision_tower.*", "re:multi_modal_projector.*"]),
        {"language_model.model.layers.3.mlp.up_proj": Scheme("int4", "group", (1, 32), layout="compressed"), HEAD: None},
    ),
    "moonshotai/Kimi-K2-Thinking": (
        compressed("pack-quantized", group(arguments(4, "int", "group", group_size=32)),
                   ignore=["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]),
        {EXPERT: Scheme("int4", "group", (1, 32), layout="compressed"), SHARED: None, ATTENTION: None, DOWN: None, HEAD: None},
    ),
    "unsloth/Llama-3.3-70B-Instruct-FP8-Block": (
        compressed("float-quantized", group(arguments(8, "float", "block", block_structure="128x128"),
                                            arguments(8, "float", "group", group_size=128, dynamic=True, observer=None))),
        {DOWN: Scheme("fp8", "block", (128, 128), rounding="group"), HEAD: None},
    ),
    "unsloth, NVFP4 and fp8 by module": (
        compressed("mixed-precision",
                   group(arguments(8, "float", "channel"), TOKENS, format="float-quantized",
                         targets=[r"re:.*self_attn\.(q|k|v|o)_proj$", r"re:.*layers\.(56|57)\.mlp\..*_proj$", "lm_head"]),
                   group(arguments(4, "float", "tensor_group", group_size=16, actorder="static", scale_dtype="torch.float8_e4m3fn"),
                         arguments(4, "float", "tensor_group", group_size=16, dynamic="local", observer="static_minmax"),
                         format="nvfp4-pack-quantized", targets=[r"re:.*mlp\.(gate|up|down)_proj$"]),
                   ignore=[], kv_cache_scheme=arguments(8, "float", "tensor"), version="0.17.2.a20260716"),
        {ATTENTION: FP8_CHANNEL, "model.layers.57.mlp.up_proj": FP8_CHANNEL, HEAD: FP8_CHANNEL, LINEAR: None,
         DOWN: Scheme("fp4", "group", (1, 16), layout="compressed nvfp4", rounding="static")},
    ),
    "mistralai/Ministral-3-3B-Instruct-2512": (
        {"activation_scheme": "static", "dequantize": False, "quant_method": "fp8", "weight_block_size": None,
         "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"]},
        {DOWN: FP8_TENSOR, "model.vision_tower.transformer.layers.1.attention.q_proj": None, HEAD: None},
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct-FP8": (
        {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
         "modules_to_not_convert": ["lm_head", "model.embed_tokens", "model.layers.3.mlp.gate", "model.layers.3.mlp.shared_expert_gate",
                                    "model.layers.2.linear_attn.conv1d", "model.layers.2.linear_attn.in_proj_ba", "mtp.fc"]},
        {EXPERT: FP8_BLOCK, "model.layers.3.mlp.gate": None, "model.layers.2.linear_attn.in_proj_qkvz": FP8_BLOCK, HEAD: None},
    ),
    "Qwen/Qwen3-32B-FP8-Static-PerTensor": (  # without a quant_method
        {"config_groups": optimizer(8), "ignore": ["lm_head"], "quant_algo": "FP8", "kv_cache_scheme": "FP8",
         "producer": {"name": "modelopt", "version": "0.31.0"}},
        {DOWN: FP8_TENSOR, HEAD: None},
    ),
    "nvidia/Llama-3.3-70B-Instruct-FP4": (
        {"config_groups": optimizer(4, targets=["Linear"]), "ignore": ["lm_head"], "quant_algo": "NVFP4", "quant_method": "modelopt",
         "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}, "producer": {"name": "modelopt", "version": "0.29.0"}},
        {DOWN: NVFP4, HEAD: None},
    ),
    "weights alone in NVFP4": (
        {"config_groups": optimizer(4, inputs=False, targets=["Linear"]), "ignore": [], "quant_algo": "W4A16_NVFP4",
         "quant_method": "modelopt"},
        {DOWN: NVFP4_WEIGHTS},
    ),
    "fp8 of Model Optimizer by channel": (
        {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "exclude_modules": ["lm_head"], "quant_method": "modelopt"},
        {DOWN: FP8_CHANNEL, HEAD: None},
    ),
    "fp8 of Model Optimizer by block, weights alone": (
        {"quant_algo": "fp8_pb_wo", "group_size": 128, "exclude_modules": ["lm_head"], "quant_method": "modelopt"},
        {DOWN: Scheme("fp8", "block", (128, 128)), HEAD: None},
    ),
    "nvidia/Qwen3.6-35B-A3B-NVFP4": (
        {"config_groups": {**optimizer(8, targets=[LINEAR]),
                           "group_1": optimizer(4, inputs=False, targets=["model.language_model.layers.3.mlp.experts"])["group_0"]},
         "quantized_layers": {LINEAR: {"quant_algo": "FP8"},
                              "model.language_model.layers.3.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16}},
         "ignore": ["mtp*", "mtp.layers.0*"], "quant_algo": "MIXED_PRECISION", "quant_method": "modelopt",
         "producer": {"name": "modelopt", "version": "0.45.0"}},
        {LINEAR: FP8_TENSOR, EXPERT: NVFP4_WEIGHTS, ATTENTION: None, HEAD: None},
    ),
    "nvidia/DeepSeek-V4-Flash-NVFP4": (
        {"activation_scheme": "dynamic", "config_groups": optimizer(4, targets=["Linear"]), "fmt": "e4m3", "group_size": 16,
         "ignore": ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"], "kv_cache_quant_algo": None, "moe_quant_algo": "NVFP4",
         "producer": {"name": "modelopt", "version": "dsv4-nvfp4-experts"}, "quant_algo": "MIXED_PRECISION", "quant_method": "fp8",
         "quantized_layers": {f"layers.{i}.ffn.experts": {"group_size": 16, "quant_algo": "NVFP4"} for i in range(43)},
         "scale_fmt": "ue8m0", "weight_block_size": [128, 128]},
        {"layers.3.ffn.experts.7.w1": NVFP4, "layers.3.ffn.shared_experts.w1": FP8_BLOCK, "layers.3.attn.wkv": FP8_BLOCK},
    ),
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8": (
        {"bits": 8, "damp_percent": 0.01, "desc_act": False, "group_size": 128, "model_file_base_name": "model",
         "model_name_or_path": None, "quant_method": "gptq", "static_groups": False, "sym": True, "true_sequential": True},
        {DOWN: Scheme("int8", "group", (1, 128), zero_offset=1, layout="gptq"), HEAD: None},
    ),
    "hugging-quants/Meta-Llama-3.1-8B-Instruct-GPTQ-INT4": (
        {"batch_size": 1, "bits": 4, "block_name_to_quantize": None, "cache_block_outputs": True, "damp_percent": 0.1, "dataset": None,
         "desc_act": False, "exllama_config": {"version": 1}, "group_size": 128, "max_input_length": None, "model_seqlen": None,
         "module_name_preceding_first_block": None, "modules_in_block_to_quantize": None, "pad_token_id": None, "quant_method": "gptq",
         "sym": True, "tokenizer": None, "true_sequential": True, "use_cuda_fp16": False, "use_exllama": True},
        {DOWN: GPTQ, HEAD: None},
    ),
    "GPTQ of some modules, as Qwen1.5-MoE's": (
        {"bits": 4, "group_size": 128, "desc_act": False, "damp_percent": 0.01, "quant_method": "gptq", "exllama_config": {"version": 2},
         "modules_in_block_to_quantize": [["self_attn.k_proj", "self_attn.q_proj"],
                                          [f"mlp.experts.{expert}.up_proj" for expert in range(60)]]},
        {ATTENTION: GPTQ, EXPERT: GPTQ, "model.layers.3.mlp.shared_expert.up_proj": None, DOWN: None},
    ),
    "ModelCloud, GPTQModel 2": (
        {"bits": 4, "checkpoint_format": "gptq", "desc_act": True, "dynamic": None, "group_size": 32, "hyb_act": False, "lm_head": False,
         "meta": {"damp_auto_increment": 0.0025, "damp_percent": 0.1, "mse": 0.0, "quantizer": ["gptqmodel:2.2.0"],
                  "static_groups": False, "true_sequential": True, "uri": "https://github.com/modelcloud/gptqmodel"},
         "pack_dtype": "int32", "quant_method": "gptq", "sym": True},
        {DOWN: Scheme("int4", "group", (1, 32), permuted=True, zero_offset=1, layout="gptq"), HEAD: None},
    ),
    "GPTQModel 6": (
        {"bits": 4, "dynamic": {r"-:.*\.shared_expert_gate": {}, r"+:.*\.q_proj": {"bits": 8}}, "group_size": 128, "desc_act": False,
         "lm_head": False, "method": "gptq", "quant_method": "gptq", "format": "gptq", "checkpoint_format": "gptq",
         "pack_dtype": "int32", "sym": True, "meta": {"act_group_aware": True, "moe": {"routing": {"class": "ExpertsRoutingBypass"}}}},
        {DOWN: GPTQ, ATTENTION: Scheme("int8", "group", (1, 128), zero_offset=1, layout="gptq"),
         "model.layers.3.mlp.shared_expert_gate": None, HEAD: None},
    ),
    "AutoRound's export to GPTQ": (
        {"autoround_version": "0.13.0", "bits": 4, "damp_percent": 0.01, "data_type": "int", "desc_act": False, "group_size": 128,
         "enable_quanted_input": False, "iters": 0, "lm_head": False, "provider": "auto-round", "quant_method": "gptq", "sym": True,
         "static_attention_granularity": "tensor", "static_kv_granularity": "tensor", "true_sequential": False,
         "dynamic": {r"-:.*model\.layers\.0\.linear_attn\.in_proj_b.*": {}},
         "modules_in_block_to_quantize": [["linear_attn.out_proj", "mlp.down_proj"]], "block_name_to_quantize": "model.language_model.layers"},
        {DOWN: GPTQ, LINEAR: GPTQ, "model.language_model.layers.0.linear_attn.in_proj_b": None, HEAD: None},
    ),
    "AutoRound's export to AWQ": (
        {"autoround_version": "0.12.3", "bits": 4, "data_type": "int", "group_size": 128, "iters": 0, "sym": True, "zero_point": False,
         "modules_to_not_convert": ["lm_head", "mlp.gate"], "provider": "auto-round", "quant_method": "awq", "version": "gemm"},
        {DOWN: AWQ, "model.layers.3.mlp.gate": None, HEAD: None},
    ),
    "Qwen/Qwen3-8B-AWQ": (
        {"backend": "autoawq", "bits": 4, "do_fuse": False, "exllama_config": None, "fuse_max_seq_len": None, "group_size": 128,
         "modules_to_fuse": None, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm", "zero_point": True},
        {DOWN: AWQ},
    ),
    "GPTQModel's AWQ": (
        {"bits": 4, "group_size": 128, "desc_act": False, "lm_head": False, "method": "awq", "quant_method": "awq", "format": "gemm",
         "checkpoint_format": "gemm", "version": "gemm", "zero_point": True, "pack_dtype": "int32",
         "dynamic": {r"-:.*mlp\.gate$": {}}, "meta": {"quantizer": ["gptqmodel:5.4.0"]}},
        {DOWN: AWQ, "model.layers.3.mlp.gate": None},
    ),
    "Intel/Qwen3-30B-A3B-Instruct-2507-int4-mixed-AutoRound": (
        {"autoround_version": "0.6.1", "batch_size": 4, "bits": 4, "data_type": "int", "dataset": "NeelNanda/pile-10k",
         "extra_config": {ATTENTION: {"bits": 8}, "model.layers.3.mlp.gate": {"bits": 16}}, "group_size": 128, "iters": 1000,
         "low_gpu_mem_usage": True, "nsamples": 512, "packing_format": "auto_round:auto_gptq", "quant_method": "auto-round", "sym": True},
        {EXPERT: GPTQ, ATTENTION: Scheme("int8", "group", (1, 128), zero_offset=1, layout="gptq"), "model.layers.3.mlp.gate": None},
    ),
    "AutoRound without calibration": (
        {"autoround_version": "0.14.2", "bits": 4, "data_type": "int", "group_size": 128, "iters": 0, "model_free": True, "sym": True,
         "packing_format": "auto_round:auto_gptq", "quant_method": "auto-round",
         "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}, "model.language_model.layers.0.input_layernorm": {"bits": 16}}},
        {DOWN: GPTQ, HEAD: None},
    ),
    "AutoRound with zero points": (
        {"autoround_version": "0.14.2", "bits": 4, "data_type": "int", "group_size": 128, "sym": False, "packing_format": "auto_round",
         "quant_method": "auto-round"},
        {DOWN: Scheme("int4", "group", (1, 128), zeros=True, layout="gptq")},
    ),
    "an old AutoRound": (
        {"autoround_version": "0.4.0.dev", "backend": "auto_round:gptq:exllamav2", "bits": 4, "data_type": "int", "group_size": 128,
         "packing_format": "auto_round:auto_gptq:exllamav2", "quant_method": "intel/auto-round", "sym": True,
         "to_quant_block_names": [["model.layers.3"]]},
        {DOWN: GPTQ, HEAD: None},
    ),
    "AutoRound in MXFP4": (
        {"act_bits": 4, "act_data_type": "mx_fp", "act_dynamic": True, "act_group_size": 32, "act_sym": True, "autoround_version": "0.12.3",
         "bits": 4, "data_type": "mx_fp", "group_size": 32, "iters": 0, "packing_format": "auto_round:llm_compressor",
         "quant_method": "auto-round", "sym": True},
        {DOWN: Scheme("fp4", "group", (1, 32), layout="mxfp4", rounding="group")},
    ),
    "AutoRound in NVFP4": (
        {"act_bits": 4, "act_data_type": "nv_fp4_with_static_gs", "act_group_size": 16, "bits": 4, "data_type": "nv_fp", "group_size": 16,
         "packing_format": "auto_round:llm_compressor", "quant_method": "auto-round", "sym": True},
        {DOWN: Scheme("fp4", "group", (1, 16), layout="compressed nvfp4", rounding="group")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_what_a_published_file_says_is_read(name: str) -> None:
    said, want = FILES[name]
    found = read_format(said, "config.json")
    assert {module: found.scheme(module) for module in want} == want


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "Its weights are quantised while"),
        ({"quant_method": "quark", "export": {}}, "'quark'; known are .*Quark.*; use a repository of the model in fp8, AWQ"),
        ({"quant_method": "exl3", "bits": 3.0}, "'exl3'; known are .* Use a repository of the model in fp8, AWQ"),
        ({"group_size": 64, "bits": 4}, "quant_method is missing, as in files of MLX.*; use a repository"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "quant_algo is 'W4A16_AWQ'.* Use NVIDIA's FP8 or NVFP4"),
        (compressed("marlin-24", group(arguments(4, "int", "group", group_size=128))), "format is 'marlin-24'.* Use another"),
        (compressed("pack-quantized", group(arguments(3, "int", "channel"))), "num_bits is 3.* Use another repository"),
        (compressed("float-quantized", group(arguments(8, "float", "tensor")), sparsity_config={"format": "sparse-24-bitmask"}),
         "sparsity_config is .* Use another repository"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', another order of words"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq", "format": "gptq_v2"}, "are 'gptq' and 'gptq_v2'; one of"),
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"}, "pack_dtype is 'int16'"),
        ({"quant_method": "gptq", "bits": 2}, "bits is 2; GPTQ is read with 4 or 8. Use such a repository"),
        ({"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": [[3]]}, "modules_in_block_to_quantize must be lists"),
        *(({"quant_method": method, "bits": 4, "group_size": 0}, "group_size is 0; it must") for method in ("gptq", "awq", "auto-round")),
        ({"quant_method": "fp8", "quant_algo": "NVFP4"}, "quant_algo is 'NVFP4'; beside another quant_method"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv_fast"}, "version is 'gemv_fast', another order of words than gemm. Use"),
        ({"quant_method": "awq", "bits": 4, "desc_act": True}, "desc_act is true"),
        ({"quant_method": "awq", "bits": 4, "dynamic": {"+:.*q_proj": {"bits": 8}}}, "dynamic has settings for '.:.*q_proj'"),
        ({"quant_method": "auto-round", "bits": 4, "sym": False}, "packing_format is missing beside sym false"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:fp8_static", "bits": 8}, "is 'auto_round:fp8_static'; .* Use such"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "data_type": "mx_fp", "bits": 8, "group_size": 32},
         "data_type is 'mx_fp' with 8 bits in groups of 32"),
    ],
)  # fmt: skip
def test_what_is_not_read_says_why_and_what_to_use(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_format(said, "config.json")


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            "nvidia/Llama-3.3-70B-Instruct-FP4",
            {"config_groups": optimizer(8)},
            "config_groups.group_0: weights says 8 bits",
        ),
        (
            "nvidia/Llama-3.3-70B-Instruct-FP4",
            {"config_groups": optimizer(4, has_zero_point=True)},
            "has_zero_point is true",
        ),
        (
            "nvidia/Llama-3.3-70B-Instruct-FP4",
            {"config_groups": optimizer(4, pre_quant_scale=True)},
            "pre_quant_scale is True",
        ),
        (
            "nvidia/Llama-3.3-70B-Instruct-FP4",
            {"config_groups": {"group_0": {"targets": ["Linear"]}}},
            "weights is missing",
        ),
        ("nvidia/Llama-3.3-70B-Instruct-FP4", {"config_groups": {"group_0": 4}}, "group_0, which must be an object"),
        (
            "nvidia/Llama-3.3-70B-Instruct-FP4",
            {"config_groups": {"group_0": {"weights": {"num_bits": 4, "odd": 3}}}},
            "weights: odd is 3",
        ),
        ("Qwen/Qwen3-32B-FP8-Static-PerTensor", {"config_groups": optimizer(4)}, "weights says 4 bits .* groups of 16"),
        ("nvidia/Qwen3.6-35B-A3B-NVFP4", {"config_groups": optimizer(8, targets=[DOWN])}, "weights says 8 bits"),
        ("nvidia/DeepSeek-V4-Flash-NVFP4", {"moe_quant_algo": "FP8"}, "moe_quant_algo is 'FP8', and quantized_layers"),
        ("nvidia/DeepSeek-V4-Flash-NVFP4", {"config_groups": optimizer(8)}, "weights says 8 bits"),
    ],
)
def test_what_model_optimizer_says_twice_must_agree(name: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_format({**FILES[name][0], **change}, "config.json")


@pytest.mark.parametrize(
    ("name", "second", "words"),
    [
        ("Qwen/Qwen3-32B-FP8-Static-PerTensor", {"quant_algo": "FP8", "exclude_modules": []}, ""),
        ("Qwen/Qwen3-32B-FP8-Static-PerTensor", {"quant_algo": "NVFP4"}, "says quant_algo 'FP8', and .* says 'NVFP4'"),
        ("neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8", {"quant_algo": "FP8"}, ""),
        ("neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8", {"quant_algo": "NVFP4"}, "different things of all modules"),
        ("neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8", {"quant_algo": None, "kv_cache_quant_algo": "FP8"}, ""),
        ("nvidia/Qwen3.6-35B-A3B-NVFP4",
         {"quant_algo": "MIXED_PRECISION", "quantized_layers": {LINEAR: {"quant_algo": "FP8"}}}, ""),
        ("nvidia/Qwen3.6-35B-A3B-NVFP4",
         {"quant_algo": "MIXED_PRECISION", "quantized_layers": {LINEAR: {"quant_algo": "NVFP4"}}}, f"different things of {LINEAR}"),
    ],
)  # fmt: skip
def test_a_second_file_must_agree_with_the_config(
    tmp_path: Path, name: str, second: dict[str, Any], words: str
) -> None:
    path = make_checkpoint(tmp_path, "llama", tokenizer=False)
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": FILES[name][0]}))
    (path / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": second}))
    if not words:
        assert read_model_config(path).format is not None
        return
    with pytest.raises(ConfigError, match=words):
        read_model_config(path)


ROUND = {
    "quant_method": "auto-round",
    "autoround_version": "0.14.2",
    "bits": 4,
    "data_type": "int",
    "group_size": packers.GROUP,
    "iters": 0,
}
SAME: dict[str, tuple[str, dict[str, Any]]] = {
    "AutoRound's zero points are as they are": ("gptq v2", {**ROUND, "sym": False, "packing_format": "auto_round"}),
    "AutoRound's export to GPTQ": (
        "gptq",
        {**FILES["AutoRound's export to GPTQ"][0], "group_size": packers.GROUP, "modules_in_block_to_quantize": None, "dynamic": {}},
    ),
    # "mlp.gate" is also a part of the name mlp.gate_proj, whose tensors say otherwise
    "AutoRound's symmetric export to AWQ": ("awq", {**FILES["AutoRound's export to AWQ"][0], "group_size": packers.GROUP}),
    "AutoRound in MXFP4": ("mxfp4 compressed", FILES["AutoRound in MXFP4"][0]),
    "AutoRound in NVFP4": ("nvfp4 compressed", FILES["AutoRound in NVFP4"][0]),
    "GPTQModel": ("gptq", {**FILES["GPTQModel 6"][0], "group_size": packers.GROUP, "dynamic": None}),
    "Model Optimizer without a quant_method": ("fp8 tensor", FILES["Qwen/Qwen3-32B-FP8-Static-PerTensor"][0]),
}  # fmt: skip


def weights(path: Path) -> list[torch.Tensor]:
    model = build_model(read_model_config(path), "float32")
    materialize(model, torch.zeros(weights_bytes(model), dtype=torch.uint8))
    load_weights(model, path)
    return [tensor for module in model.modules() for tensor in module.weights.values()]


@pytest.mark.parametrize("name", SAME)
def test_the_same_tensors_are_the_same_weights_by_another_writers_word(tmp_path: Path, name: str) -> None:
    kind, said = SAME[name]
    path = make_checkpoint(tmp_path, "llama", tokenizer=False)
    quantise(path, kind)
    want, file = weights(path), path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": said}))
    assert all(torch.equal(left, right) for left, right in zip(weights(path), want, strict=True))


@pytest.mark.parametrize(
    ("algorithm", "part", "change", "words"),
    [
        ("FP8", "weights", {"symmetric": False}, "weights: symmetric is false"),
        ("FP8", "weights", {"strategy": "group", "group_size": 7}, "weights says 8 bits .* groups of 7"),
        ("FP8", "weights", {"strategy": "channel"}, "weights: strategy is 'channel', and quant_algo says tensor"),
        ("FP8", "weights", {"dynamic": True}, "weights: dynamic is true"),
        ("FP8", "input_activations", {"type": "int"}, "input_activations says 8 bits of type 'int'"),
        ("FP8", "input_activations", {"num_bits": 4}, "input_activations says 4 bits"),
        ("FP8", "input_activations", {"strategy": "banana"}, "input_activations: strategy is 'banana'"),
        ("FP8", "input_activations", {"symmetric": False}, "input_activations: symmetric is false"),
        ("FP8_PER_CHANNEL_PER_TOKEN", "weights", {"strategy": "tensor"}, "quant_algo says channel"),
        ("FP8_PER_CHANNEL_PER_TOKEN", "input_activations", {"strategy": "tensor"}, "strategy is 'tensor'"),
    ],
)
def test_every_field_of_model_optimizers_groups_is_compared(
    algorithm: str, part: str, change: dict[str, Any], words: str
) -> None:
    rows = algorithm != "FP8"
    group: dict[str, Any] = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel" if rows else "tensor", "symmetric": True},
        "input_activations": {
            "num_bits": 8,
            "type": "float",
            "strategy": "token" if rows else "tensor",
            "dynamic": rows,
        },
    }
    said = {"quant_method": "modelopt", "quant_algo": algorithm, "config_groups": {"group_0": group}}
    assert read_format(said, "config.json").scheme(DOWN) is not None
    group[part] |= change
    with pytest.raises(ConfigError, match=words):
        read_format(said, "config.json")
