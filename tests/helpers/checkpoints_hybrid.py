"""Small random checkpoints of the families with recurrent layers, written by transformers.

Weights that its initialisation makes constant or tiny are made lively, so that a wrong formula changes tokens.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

import windowed
from helpers.checkpoints import write_tokenizer

_GATED_DELTA: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "max_position_embeddings": 2048,
}
_DENSE = {"intermediate_size": 64}
_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
_BAMBA: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "attn_layer_indices": [2],
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 10,
    "mamba_chunk_size": 16,  # transformers computes whole ones, and the usual one of 256 tokens is most of its time
    "max_position_embeddings": 2048,
}
# Three kinds of memory in one model; the window is longer than a page and shorter than most prompts.
_WINDOWED: dict[str, Any] = {
    "layer_types": ["linear_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "use_sliding_window": True,
    "sliding_window": 20,
}
HYBRID_FAMILIES = ("qwen3_next", "qwen3_next_dense", "qwen3_5", "qwen3_5_moe", "bamba", "qwen3_5_windowed")


def make_hybrid_model(family: str, *, seed: int = 0, vocab_size: int = 512, **overrides: Any) -> Any:
    """A random float32 model of transformers; `family` is one of HYBRID_FAMILIES, `overrides` are config fields."""
    import transformers

    configs: dict[str, tuple[str, str, dict[str, Any]]] = {
        "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", _GATED_DELTA | _EXPERTS | _DENSE),
        "qwen3_next_dense": ("Qwen3NextConfig", "Qwen3NextForCausalLM", _GATED_DELTA | _DENSE | {"num_experts": 0}),
        "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _GATED_DELTA | _DENSE),
        "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", _GATED_DELTA | _EXPERTS),
        "bamba": ("BambaConfig", "BambaForCausalLM", _BAMBA),
        "qwen3_5_windowed": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _GATED_DELTA | _DENSE | _WINDOWED),
    }
    config_name, model_name, fields = configs[family]
    fields = {"vocab_size": vocab_size, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None} | fields
    torch.manual_seed(seed)
    config = getattr(transformers, config_name)(**(fields | overrides))
    make = getattr(transformers, model_name)
    return _lively(windowed.new_model(config) if "windowed" in family else make(config), seed)


def _lively(model: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    rand = functools.partial(torch.randn, generator=generator)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            last = name.split(".")[-2:]
            if last[-1] == "A_log":
                weight.copy_(torch.rand(weight.shape, generator=generator) * 3 - 2)
            elif last[-1] in ("dt_bias", "D", "bias"):
                weight.copy_(0.5 * rand(weight.shape) + (1 if last[-1] == "D" else 0))
            elif last[0] == "conv1d":
                weight.copy_(0.5 * rand(weight.shape))
            elif weight.dim() == 1:
                weight.add_(0.2 * rand(weight.shape))
            elif last[0] == "embed_tokens":
                weight.copy_(0.3 * rand(weight.shape))
            else:
                weight.copy_(rand(weight.shape) / weight.shape[-1] ** 0.5)
    return model.eval()


def make_hybrid_checkpoint(directory: Path, family: str, **options: Any) -> tuple[Path, Any]:
    """Write the model of `make_hybrid_model` under `directory`; its path and the model."""
    model = make_hybrid_model(family, **options)
    path = directory / f"{family}-{len(list(directory.iterdir()))}"
    windowed.save_model(model, path)
    (path / "generation_config.json").unlink(missing_ok=True)
    return path, model


def make_hybrid_directory(directory: Path, family: str, **options: Any) -> Path:
    """Write the model of `make_hybrid_model` and a tokenizer under `directory`; its path."""
    path, model = make_hybrid_checkpoint(directory, family, **options)
    write_tokenizer(path, model.config.vocab_size, add_bos=False)
    return path


def make_vision_checkpoint(directory: Path, family: str) -> tuple[Path, Any]:
    """Write a model of text and images whose text part is of `family`, qwen3_5 or qwen3_5_moe; its path and the model."""
    import transformers

    name = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[family]
    text = _GATED_DELTA | (_DENSE if family == "qwen3_5" else _EXPERTS) | {"vocab_size": 512, "eos_token_id": 0}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 48}
    config = getattr(transformers, f"{name}Config")(
        text_config=text | {"model_type": f"{family}_text"}, vision_config=vision | {"num_position_embeddings": 16}
    )
    model = _lively(getattr(transformers, f"{name}ForConditionalGeneration")(config), 0)
    path = directory / f"{family}-vision"
    model.save_pretrained(path)
    (path / "generation_config.json").unlink(missing_ok=True)
    return path, model
