"""Small random checkpoints of the families with latent attention, written by transformers.

Weights that its initialisation makes constant or tiny are made lively, so that a wrong formula changes tokens.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch

from helpers.checkpoints import write_tokenizer

LATENT_FAMILIES = ("deepseek_v2", "deepseek_v3", "deepseek_v32")
_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
_OWN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"q_lora_rank": None, "n_shared_experts": 2},
    "deepseek_v3": {
        "q_lora_rank": 20,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "num_nextn_predict_layers": 0,
    },
    "deepseek_v32": {
        "q_lora_rank": 20,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "index_n_heads": 16,  # few make scores of exactly 0, whose order is nobody's business
        "index_head_dim": 12,
        "index_topk": 17,
    },
}


def make_latent_model(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A random float32 model of transformers; `family` is one of LATENT_FAMILIES, `overrides` are config fields."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = CONFIG_MAPPING[family](**(_COMMON | _OWN[family] | overrides))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    rand = functools.partial(torch.randn, generator=generator)
    with torch.no_grad():
        for name, weight in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                weight.copy_(0.2 * rand(weight.shape))
            elif "rotary_emb" in name:
                continue
            elif weight.dim() == 1:
                weight.add_(0.2 * rand(weight.shape))
            elif "embed_tokens" in name:
                weight.copy_(0.3 * rand(weight.shape))
            else:
                weight.copy_(rand(weight.shape) / weight.shape[-1] ** 0.5)
    return model.eval()


def make_latent_checkpoint(
    directory: Path, family: str, *, tokenizer: bool = False, fields: dict[str, Any] | None = None, **options: Any
) -> tuple[Path, Any]:
    """Write the model of `make_latent_model` under `directory`; its path and the model.

    `fields` replace fields of the written config.json, as older files have them.
    """
    model = make_latent_model(family, **options)
    path = directory / f"{family}-{len(list(directory.iterdir()))}"
    model.save_pretrained(path)
    (path / "generation_config.json").unlink(missing_ok=True)
    if fields:
        config = json.loads((path / "config.json").read_text()) | fields
        (path / "config.json").write_text(json.dumps({name: x for name, x in config.items() if x is not None}))
    if tokenizer:
        write_tokenizer(path, model.config.vocab_size, add_bos=False)
    return path, model
