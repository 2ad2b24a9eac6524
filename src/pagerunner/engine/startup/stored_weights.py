"""What quantised weights take as they are stored, from a config alone.

Sizes per weight: mxfp4 has 4 bits and a byte of scale for 32 weights (OCP Microscaling Formats 1.0). fp8 has a byte, and a
float32 scale for each block of `weight_block_size`, or for the whole matrix. awq, gptq and their kind have `bits`, and a
16-bit scale and a zero of `bits` for each `group_size` weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagerunner.config import DTYPE_BYTES
from pagerunner.layers.module import CheckpointTensor
from pagerunner.layers.moe import Experts
from pagerunner.models.checkpoint.loader import Model, checkpoint_files
from pagerunner.models.configs.base import ModelConfig


def stored_bytes(model: Model, config: ModelConfig, plain_bytes: int) -> tuple[int, str]:
    """Bytes of the weights that `config.quantization` describes, and how they are named: " (mxfp4, as stored)".

    They are counted from the checkpoint's files if those are there, else from the format. A format that isn't known counts as
    `plain_bytes`, and its name says so.
    """
    quantization = config.quantization or {}
    method = str(quantization.get("quant_method", "quantised"))
    directory = Path(config.path)
    if any(directory.glob("model*.safetensors")):
        return sum(file.stat().st_size for file in checkpoint_files(directory)), f" ({method}, as stored)"
    per_weight = _bytes_per_weight(quantization)
    if per_weight is None:
        return plain_bytes, f" ({method}: size unknown, counted in {config.dtype})"
    kept = [_pattern(name) for name in quantization.get("modules_to_not_convert") or ()]
    plain = DTYPE_BYTES[config.dtype]
    total = 0.0
    for tensor in model.checkpoint():
        if tensor.instead_of:
            continue
        packed = _is_packed(tensor, method) and not any(pattern.match(tensor.name) for pattern in kept)
        total += math.prod(tensor.sink.shape) * (per_weight if packed else plain)
    return round(total), f" ({method}, as stored)"


def _is_packed(tensor: CheckpointTensor, method: str) -> bool:
    """Whether tools quantise this tensor: a projection's matrix; for mxfp4 those of experts alone."""
    name, dimensions = tensor.name, len(tensor.sink.shape)
    if method == "mxfp4":
        return isinstance(tensor.owner, Experts) and dimensions == 3
    return dimensions >= 2 and "_proj" in name and not name.endswith("bias")


def _bytes_per_weight(quantization: Mapping[str, Any]) -> float | None:
    method = quantization.get("quant_method")
    if method == "mxfp4":
        return 0.5 + 1 / 32
    if method == "fp8":
        rows, columns = quantization.get("weight_block_size") or (1 << 20, 1 << 20)
        return 1 + 4 / (rows * columns)
    bits, group = quantization.get("bits"), quantization.get("group_size")
    if method in ("awq", "gptq") and isinstance(bits, int) and isinstance(group, int) and group > 0:
        return bits / 8 + (2 + bits / 8) / group
    return None


def _pattern(name: str) -> re.Pattern[str]:
    """Of a module's name, in which * stands for a layer's number: the names of its tensors."""
    return re.compile(re.escape(name).replace(r"\*", r"\d+") + r"(\.|$)")
