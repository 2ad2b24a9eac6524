"""Packs a float checkpoint's matrices to fp8 or int8, as the formats' descriptions say, and says by plain loops what the packed ones mean."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

MATRIX = re.compile(r"(?!.*weights_proj).*(_proj|_proj_with_mqa|wq_b|wk)\.weight$")
CHANNELS = ("compressed-tensors channel", "compressed-tensors int8")
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
    "modelopt tensor": {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "producer": {"name": "modelopt", "version": "0.29.0"},
        "ignore": ["lm_head", "*router*"],
    },
}


def quantise(path: Path, kind: str) -> dict[str, torch.Tensor]:
    """Rewrite a single-file checkpoint in the format CONFIGS[kind]. The weights that it then stands for, by name, float32."""
    file = path / "model.safetensors"
    packed: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, weight in load_file(file).items():
        if not MATRIX.match(name) or weight.dim() != 2:
            packed[name] = meant[name] = weight
            continue
        codes, scales = _codes(weight.float(), kind)
        packed[name], meant[name] = codes, unpacked(codes, scales, _block(kind, weight))
        base = name.removesuffix(".weight")
        if kind == "fp8 block":
            packed[f"{base}.weight_scale_inv"] = scales
        elif kind in CHANNELS:
            packed[f"{base}.weight_scale"] = scales.bfloat16()  # the values are powers of two
        else:
            packed[f"{base}.weight_scale"] = scales.reshape(() if kind == "fp8 tensor" else (1,))
            packed[f"{base}.input_scale"] = torch.tensor(0.5)
    save_file(packed, file)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": CONFIGS[kind]}))
    return meant


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
