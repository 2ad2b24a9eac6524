"""Small random checkpoints of Llama-4, whose attention stays in chunks in most layers, written by transformers.

Weights that its initialisation makes constant or tiny are made lively, so that a wrong formula changes tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 24,
    "intermediate_size_mlp": 40,
    "num_local_experts": 5,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 20,
    "floor_scale": 10,
    "attn_scale": 0.4,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
_VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
_IMAGES = {"image_size": 28, "patch_size": 14, "projector_input_dim": 16, "projector_output_dim": 16}


def make_chunked_checkpoint(
    directory: Path, *, seed: int = 0, vision: bool = False, **overrides: Any
) -> tuple[Path, Any]:
    """Write a random float32 model of text, or of text and images, under `directory`; its path and its text model.

    `overrides` are fields of the text model's config.
    """
    import transformers

    torch.manual_seed(seed)
    fields = _SIZES | overrides
    if vision:
        images = _VISION | _IMAGES | {"vision_output_dim": 16}
        config = transformers.Llama4Config(text_config=fields, vision_config=images)
        model = transformers.Llama4ForConditionalGeneration(config)
        text = model.language_model
    else:
        model = text = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**fields))
    text.config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in text.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() == 1:
                weight.add_(0.2 * noise)
            elif "embed_tokens" in name:
                weight.copy_(0.3 * noise)
            else:
                weight.copy_(noise / weight.shape[-2 if weight.dim() == 3 else -1] ** 0.5)
    path = directory / f"llama4-{len(list(directory.iterdir()))}"
    model.eval().save_pretrained(path)
    (path / "generation_config.json").unlink(missing_ok=True)
    return path, text.eval()
