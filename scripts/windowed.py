"""Qwen3.5 and Qwen3-Next with windowed layers, in plain transformers.

Their configs may name `sliding_attention` layers, as those of other Qwen models do, but the classes of transformers know
full attention and recurrence only. Here such layers are made as full attention, whose mask then hides what lies before
the window.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

WINDOW, FULL = "sliding_attention", "full_attention"
FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")


def new_model(config: Any, **options: Any) -> Any:
    """A freshly initialized model of a config; `options` are those of `from_config`."""
    kinds = _without_windows(config)
    return _with_windows(AutoModelForCausalLM.from_config(config, **options), kinds)


def load_model(path: Path | str, **options: Any) -> Any:
    """A checkpoint's model; `options` are those of `from_pretrained`."""
    config = AutoConfig.from_pretrained(path)
    kinds = _without_windows(config)
    return _with_windows(AutoModelForCausalLM.from_pretrained(path, config=config, **options), kinds)


def save_model(model: Any, path: Path | str) -> None:
    """`save_pretrained` with the layers named as they were."""
    if not hasattr(model, "layer_kinds"):
        model.save_pretrained(path)
        return
    made = model.config.layer_types
    model.config.layer_types = model.layer_kinds
    model.save_pretrained(path)
    model.config.layer_types = made


def layer_kinds(model: Any) -> list[str]:
    """The kind of each layer, windows among them; every layer is full attention where the config names none."""
    named = getattr(model, "layer_kinds", None) or getattr(model.config, "layer_types", None)
    return list(named or [FULL] * model.config.num_hidden_layers)


def _without_windows(config: Any) -> list[str] | None:
    kinds: list[str] | None = getattr(config, "layer_types", None)
    if config.model_type not in FAMILIES or kinds is None or WINDOW not in kinds:
        return None
    config.layer_types = [FULL if kind == WINDOW else kind for kind in kinds]
    return kinds


def _with_windows(model: Any, kinds: list[str] | None) -> Any:
    if kinds is None:
        return model
    model.layer_kinds = kinds
    for layer, kind in zip(model.model.layers, kinds, strict=True):
        if kind == WINDOW:
            layer.self_attn.register_forward_pre_hook(_narrow, with_kwargs=True)
    return model


def _narrow(attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Before a layer's attention: a token sees itself and the `sliding_window - 1` before it."""
    hidden: Tensor = kwargs["hidden_states"]
    config: Any = attention.config
    cache = kwargs.get("past_key_values")
    tokens = hidden.shape[1]
    before = 0 if cache is None else cache.get_seq_length(attention.layer_idx)
    keys = torch.arange(before + tokens, device=hidden.device)
    distance = keys[before:, None] - keys
    seen = (distance >= 0) & (distance < config.sliding_window)
    mask: Tensor | None = kwargs.get("attention_mask")
    if mask is None:
        floating = config._attn_implementation == "eager"
        mask = torch.zeros(1, 1, tokens, before + tokens, device=hidden.device) if floating else seen[None, None]
    if mask.dtype == torch.bool:
        mask = mask & seen
    else:
        mask = mask.to(hidden.dtype).masked_fill(~seen, torch.finfo(hidden.dtype).min)
    return args, kwargs | {"attention_mask": mask}
