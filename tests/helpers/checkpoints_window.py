"""Small random checkpoints of mixtures of experts and of models with windows, as `transformers` itself saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from helpers.checkpoints import BOS_ID, EOS_ID, write_tokenizer

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}
WINDOW_FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True},
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {"num_hidden_layers": 3, "sliding_window": 20, "sliding_window_pattern": 3, "query_pre_attn_scalar": 24},
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {"num_hidden_layers": 3, "sliding_window": 20, "num_local_experts": 6, "num_experts_per_tok": 3},
    ),
}


def _randomise(model: torch.nn.Module, seed: int) -> None:
    """Lively weights: norms around what leaves their input alone, matrices that keep their input's size."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in sorted(model.named_parameters()):
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm" in name:
            tensor.data.copy_(tensor + 0.2 * noise)
        elif name.endswith(("bias", "sinks")):
            tensor.data.copy_(0.5 * noise)
        elif "embed_tokens" in name:
            tensor.data.copy_(0.3 * noise)
        else:
            inputs = tensor.shape[1] if "gate_up_proj" in name and tensor.shape[1] == 64 else tensor.shape[-1]
            tensor.data.copy_(noise / inputs**0.5)


def make_window_checkpoint(
    tmp_path: Path, family: str, *, seed: int = 0, tokenizer: bool = True, dtype: str = "float32", **overrides: Any
) -> Path:
    """Make a checkpoint directory under `tmp_path` and return its path; `overrides` are arguments of the config."""
    import transformers

    config_name, model_name, sizes = WINDOW_FAMILIES[family]
    path = Path(tmp_path) / f"{family}-{len(list(Path(tmp_path).iterdir()))}"
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**_SIZES | sizes | overrides))
    _randomise(model, seed)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    (path / "generation_config.json").unlink()
    assert json.loads((path / "config.json").read_text())["model_type"] == family
    if tokenizer:
        write_tokenizer(path, model.config.vocab_size, add_bos=False)
    return path
