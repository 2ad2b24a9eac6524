"""PEFT directories for tests: written by hand for any matrices of a tiny model, with and without `peft`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

PREFIX = "base_model.model."


def write_adapter(path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """A directory with a config and these tensors, whose names begin behind the usual prefix."""
    path.mkdir(parents=True, exist_ok=True)
    whole = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **config}
    (path / "adapter_config.json").write_text(json.dumps(whole), encoding="utf-8")
    save_file(
        {f"{PREFIX}{name}": tensor.contiguous() for name, tensor in tensors.items()}, path / "adapter_model.safetensors"
    )
    return path


def pair(name: str, outputs: int, inputs: int, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Both tensors of a matrix's adapter."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{name}.lora_A.weight": torch.randn(rank, inputs, generator=generator),
        f"{name}.lora_B.weight": torch.randn(outputs, rank, generator=generator),
    }


def fused_deltas(model: Any, adapter: str = "default") -> dict[str, torch.Tensor]:
    """By parameter, what a PEFT model adds to it."""
    found = {}
    for name, module in model.base_model.model.named_modules():
        if hasattr(module, "parameter_name"):
            plain = name.replace(".base_layer", "")
            found[f"{plain}.{module.parameter_name}"] = module.get_delta_weight(adapter).detach()
        elif hasattr(module, "get_delta_weight") and adapter in getattr(module, "lora_A", {}):
            found[name] = module.get_delta_weight(adapter).detach()
    return found


def trained(model: Any, seed: int = 1) -> None:
    """Give every A and B of a PEFT model random values."""
    generator = torch.Generator().manual_seed(seed)
    fill: Callable[[torch.Tensor], object] = lambda tensor: tensor.data.normal_(0.0, 0.1, generator=generator)  # noqa: E731
    for name, tensor in model.named_parameters():
        if "lora_" in name:
            fill(tensor)
