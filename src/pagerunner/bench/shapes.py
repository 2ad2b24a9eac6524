"""Shapes of models for measurements with random weights. Torch-free.

A file in `bench/configs/` is the config.json of one shape. What it doesn't say is as in `write_config`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_CONFIGS = Path(__file__).parent / "configs"
_NAMES = (
    "tiny",
    "small",
    "qwen3-0.6b",
    "qwen3-8b",
    "qwen3-30b-a3b",
    "gpt-oss-20b",
    "deepseek-v2-lite",
    "deepseek-v3.2",
    "deepseek-v4-flash-8e",
)
SHAPES: dict[str, dict[str, Any]] = {
    name: json.loads((_CONFIGS / f"{name}.json").read_text(encoding="utf-8")) for name in _NAMES
}
_INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
QUANTIZED: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4}},
        "ignore": ["lm_head"],
    },
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "modelopt_fp4": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    },
    "mxfp4": {"quant_method": "mxfp4"},
}
"""What `quantization` makes of a shape: the quantization_config of a checkpoint in that format, 4 bits in each of them."""
