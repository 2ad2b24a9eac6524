"""Small random checkpoints of DeepSeek-V4, whose memory is windows, compressed latents and state, written by transformers.

Weights that its initialisation makes constant or tiny are made lively, so that a wrong formula changes tokens.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

SPARSE, HEAVY, WINDOW = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"
_SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "layer_types": [WINDOW, SPARSE, HEAVY, SPARSE],
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "compress_rates": {SPARSE: 4, HEAVY: 32},
    "sliding_window": 20,
    "num_attention_heads": 4,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 20,
    "o_groups": 2,
    "o_lora_rank": 10,
    "index_n_heads": 16,  # few make scores of exactly 0, whose order is nobody's business
    "index_head_dim": 12,
    "index_topk": 7,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "swiglu_limit": 1.5,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}


def make_compressed_model(*, seed: int = 0, **overrides: Any) -> Any:
    """A random float32 model of transformers; `overrides` are config fields."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.manual_seed(seed)
    config = DeepseekV4Config(**(_SIZES | overrides))
    config._attn_implementation = "eager"
    model = DeepseekV4ForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    rand = functools.partial(torch.randn, generator=generator)
    with torch.no_grad():
        for name, weight in (*model.named_parameters(), *model.named_buffers()):
            if "rotary_emb" in name:
                continue
            if name.endswith("tid2eid"):
                picks = torch.rand(weight.shape[0], config.n_routed_experts, generator=generator).topk(weight.shape[1])
                weight.copy_(picks.indices)
            elif name.endswith("e_score_correction_bias"):
                weight.copy_(0.2 * rand(weight.shape))
            elif name.endswith(("sinks", "base", "position_bias")):
                weight.copy_(rand(weight.shape))
            elif weight.dim() == 1:
                weight.add_(0.2 * rand(weight.shape))
            elif "embed_tokens" in name:
                weight.copy_(0.3 * rand(weight.shape))
            else:
                weight.copy_(rand(weight.shape) / weight.shape[-1] ** 0.5)
    return model.eval()


def make_compressed_checkpoint(directory: Path, **options: Any) -> tuple[Path, Any]:
    """Write the model of `make_compressed_model` under `directory`; its path and the model."""
    model = make_compressed_model(**options)
    path = directory / f"deepseek_v4-{len(list(directory.iterdir()))}"
    model.save_pretrained(path)
    (path / "generation_config.json").unlink(missing_ok=True)
    return path, model
