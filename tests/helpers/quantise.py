"""Packs a float checkpoint's matrices in any format, as the formats' descriptions say, and says by plain loops what the packed ones mean."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from helpers import packers

MATRIX = re.compile(
    r"(?!.*(weights_proj|vision|multi_modal)).*(_proj|_proj_with_mqa|wq_b|wk|in_proj_qkvz?|in_proj_z)\.weight$"
)
CHANNELS = ("compressed-tensors channel", "compressed-tensors int8", "fbgemm")
BLOCK = (32, 48)  # divides few sizes of the small models, as 128 divides few of published ones
CONFIGS: dict[str, dict[str, Any]] = {
    "fp8 tensor": {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    "fp8 block": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
        "modules_to_not_convert": ["lm_head"],
    },
    "compressed-tensors channel": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*router"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
                "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
                "output_activations": None,
            }
        },
    },
    "compressed-tensors int8": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
                "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
            }
        },
    },
    "fbgemm": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
    "modelopt tensor": {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "producer": {"name": "modelopt", "version": "0.29.0"},
        "ignore": ["lm_head", "*router*"],
    },
}


FP4 = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": packers.GROUP, "symmetric": True}


def _compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


def _gptq(**fields: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": packers.GROUP, "desc_act": False, "sym": True, **fields}


_ROUND = {"quant_method": "auto-round", "bits": 4, "data_type": "int", "group_size": packers.GROUP, "sym": True}
PACKED: dict[str, tuple[dict[str, Any], packers.Packer]] = {
    "int4": (_compressed("pack-quantized", INT4), packers.compressed),
    "int4 zeros permuted": (
        _compressed("pack-quantized", {**INT4, "symmetric": False, "actorder": "group"}),
        partial(packers.compressed, zeros=True, permuted=True),
    ),
    "int8 packed": (
        _compressed("pack-quantized", {**INT4, "num_bits": 8, "strategy": "channel", "group_size": None}),
        partial(packers.compressed, bits=8, group=0),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": packers.GROUP, "zero_point": True, "version": "gemm"},
        packers.awq,
    ),
    "old awq": ({"quant_method": "awq", "w_bit": 4, "q_group_size": packers.GROUP, "zero_point": True}, packers.awq),
    "gptq": (_gptq(), packers.gptq),
    "gptq zeros permuted": (_gptq(sym=False, desc_act=True), partial(packers.gptq, zeros=True, permuted=True)),
    "gptq v2": (_gptq(sym=False, checkpoint_format="gptq_v2"), partial(packers.gptq, zeros=True, version=2)),
    "gptq column": (_gptq(group_size=-1), partial(packers.gptq, group=0)),
    "gptq int8": (_gptq(bits=8), partial(packers.gptq, bits=8)),
    "gptq int8 zeros": (_gptq(bits=8, sym=False), partial(packers.gptq, bits=8, zeros=True)),
    "auto-round": ({**_ROUND, "packing_format": "auto_round:auto_gptq"}, packers.gptq),
    "auto-round awq": ({**_ROUND, "sym": False, "packing_format": "auto_round:auto_awq"}, packers.awq),
    "mxfp4 compressed": (
        _compressed("mxfp4-pack-quantized", {**FP4, "strategy": "group", "group_size": 32}),
        packers.mxfp4,
    ),
    "nvfp4 compressed": (
        _compressed("nvfp4-pack-quantized", {**FP4, "strategy": "tensor_group", "group_size": 16}),
        packers.nvfp4_compressed,
    ),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, packers.nvfp4),
}
"""Packed formats: quantization_config without the modules that stay as they are, and what packs a matrix."""
IGNORE = {"awq": "modules_to_not_convert", "gptq": "modules_to_not_convert", "modelopt": "exclude_modules"}


def quantise(path: Path, kind: str) -> dict[str, torch.Tensor]:
    """Rewrite a single-file checkpoint in the format CONFIGS[kind] or PACKED[kind], or gpt-oss's ("mxfp4").

    The weights that it then stands for, by name, float32.
    """
    file = path / "model.safetensors"
    config = json.loads((path / "config.json").read_text())
    held = _separate(load_file(file)) if config["model_type"].startswith("llama4") else load_file(file)
    tensors, meant, said = packed(held, kind)
    save_file(tensors, file)
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    return _together(meant) if config["model_type"].startswith("llama4") else meant


def _separate(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Llama 4's experts one by one, as its quantised checkpoints have them; float ones have them together and transposed."""
    found: dict[str, torch.Tensor] = {}
    for name, weight in held.items():
        base, _, matrix = name.rpartition(".")
        if not base.endswith(".experts"):
            found[name] = weight
            continue
        for expert, whole in enumerate(weight.transpose(1, 2).contiguous()):
            parts = zip(("gate_proj", "up_proj"), whole.chunk(2), strict=True)
            own = dict(parts) if matrix == "gate_up_proj" else {"down_proj": whole}
            found |= {f"{base}.{expert}.{part}.weight": tensor.clone() for part, tensor in own.items()}
    return found


def _together(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The reverse of `_separate`."""
    found: dict[str, torch.Tensor] = {}
    bases = {name.partition(".experts.")[0] + ".experts" for name in held if ".experts." in name}
    for base in sorted(bases):
        count = sum(name.startswith(base) and name.endswith(".down_proj.weight") for name in held)

        def stack(part: str, base: str = base, count: int = count) -> torch.Tensor:
            return torch.stack([held[f"{base}.{expert}.{part}.weight"].T for expert in range(count)])

        found[f"{base}.gate_up_proj"] = torch.cat([stack("gate_proj"), stack("up_proj")], 2)
        found[f"{base}.down_proj"] = stack("down_proj").contiguous()
    return found | {name: weight for name, weight in held.items() if ".experts." not in name}


Packed = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]]


def packed(held: dict[str, torch.Tensor], kind: str) -> Packed:
    """Tensors in the format, the weights that they stand for, and the quantization_config."""
    if kind == "mxfp4":
        return _pack_experts(held)
    return _pack(held, kind) if kind in PACKED else (*_pack8(held, kind), CONFIGS[kind])


def _pack(held: dict[str, torch.Tensor], kind: str) -> Packed:
    """Matrices whose sizes suit the packed formats are packed, and the others listed."""
    config, pack = PACKED[kind]
    packed: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    kept = ["lm_head"]
    for name, weight in held.items():
        base = name.removesuffix(".weight")
        if MATRIX.match(name) and weight.dim() == 2 and not weight.shape[1] % packers.GROUP and not weight.shape[0] % 8:
            own, meant[name] = pack(weight)
            packed |= {f"{base}.{suffix}": tensor for suffix, tensor in own.items()}
            continue
        packed[name] = meant[name] = weight
        if weight.dim() >= 2:
            kept.append(base)
    if config["quant_method"] == "auto-round":
        return packed, meant, {**config, "extra_config": {name: {"bits": 16, "data_type": "fp"} for name in kept}}
    return packed, meant, {**config, IGNORE.get(config["quant_method"], "ignore"): kept}


def _pack_experts(held: dict[str, torch.Tensor]) -> Packed:
    """gpt-oss: all experts' matrices, which a float checkpoint holds transposed."""
    packed, meant = {}, dict(held)
    for name, weight in held.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed[name] = weight
            continue
        packed[f"{name}_blocks"], packed[f"{name}_scales"], found = packers.gpt_oss(weight.transpose(1, 2))
        meant[name] = found.transpose(1, 2).contiguous()
    listed = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return packed, meant, {"quant_method": "mxfp4", "modules_to_not_convert": listed}


def _pack8(held: dict[str, torch.Tensor], kind: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    packed: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, weight in held.items():
        if not MATRIX.match(name) or weight.dim() != 2:
            packed[name] = meant[name] = weight
            continue
        codes, scales = _codes(weight.float(), kind)
        packed[name], meant[name] = codes, unpacked(codes, scales, _block(kind, weight))
        base = name.removesuffix(".weight")
        if kind == "fp8 block":
            packed[f"{base}.weight_scale_inv"] = scales
        elif kind in CHANNELS:
            dtype = torch.float32 if kind == "fbgemm" else torch.bfloat16  # the values are powers of two
            packed[f"{base}.weight_scale"] = scales.to(dtype)
        else:
            packed[f"{base}.weight_scale"] = scales.reshape(() if kind == "fp8 tensor" else (1,))
            packed[f"{base}.input_scale"] = torch.tensor(0.5)
    return packed, meant


def _block(kind: str, weight: torch.Tensor) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    rows, columns = weight.shape
    if kind in CHANNELS:
        return 1, columns
    return BLOCK if kind == "fp8 block" else (rows, columns)


def _codes(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 or int8 codes, and a float32 scale for each block; channels' are powers of two."""
    high, wide = _block(kind, weight)
    rows, columns = weight.shape
    dtype, largest = (torch.int8, 127) if kind == "compressed-tensors int8" else (torch.float8_e4m3fn, 448)
    codes = torch.empty(weight.shape, dtype=dtype)
    scales = torch.empty(-(-rows // high), -(-columns // wide))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
            scale = weight[place].abs().max() / largest
            if kind in CHANNELS:
                scale = 2 ** scale.log2().ceil()
            number = weight[place] / scale
            codes[place] = number.round().to(dtype) if dtype == torch.int8 else number.to(dtype)
            scales[i, j] = scale
    return codes, scales


def unpacked(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Each code times its block's scale, float32."""
    found = torch.empty(codes.shape)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            found[place] = codes[place].float() * scales[i, j]
    return found
