"""A tiny checkpoint of every registered family, as the oracle tests make them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_chunked import make_chunked_checkpoint
from helpers.checkpoints_compressed import HEAVY, SPARSE, make_compressed_checkpoint
from helpers.checkpoints_hybrid import make_hybrid_checkpoint, make_vision_checkpoint
from helpers.checkpoints_image import make_image_checkpoint
from helpers.checkpoints_latent import make_latent_checkpoint
from helpers.checkpoints_window import make_window_checkpoint


def _image_checkpoint(path: Path, family: str) -> Path:
    make_image_checkpoint(path, family, old_names=True)
    return path


def _kimi_checkpoint(path: Path) -> Path:
    return make_latent_checkpoint(path, "deepseek_v3", fields={"model_type": "kimi_k2"})[0]


MAKERS: dict[str, Callable[[Path], Any]] = {
    **{name: lambda path, name=name: make_checkpoint(path, name) for name in ("llama", "mistral", "qwen2", "qwen3")},
    "qwen3_next": lambda path: make_hybrid_checkpoint(path, "qwen3_next")[0],
    "qwen3_5_text": lambda path: make_hybrid_checkpoint(path, "qwen3_5")[0],
    "qwen3_5_moe_text": lambda path: make_hybrid_checkpoint(path, "qwen3_5_moe")[0],
    "qwen3_5": lambda path: make_vision_checkpoint(path, "qwen3_5")[0],
    "qwen3_5_moe": lambda path: make_vision_checkpoint(path, "qwen3_5_moe")[0],
    "bamba": lambda path: make_hybrid_checkpoint(path, "bamba")[0],
    "llama4_text": lambda path: make_chunked_checkpoint(path)[0],
    "llama4": lambda path: make_chunked_checkpoint(path, vision=True)[0],
    "deepseek_v2": lambda path: make_latent_checkpoint(path, "deepseek_v2")[0],
    # ratios that allow prefix hits of 128 tokens in pages of bytes
    "deepseek_v4": lambda path: make_compressed_checkpoint(path, compress_rates={SPARSE: 4, HEAVY: 8})[0],
    "deepseek_v32": lambda path: make_latent_checkpoint(path, "deepseek_v32")[0],
    "deepseek_v3": lambda path: make_latent_checkpoint(path, "deepseek_v3")[0],
    "kimi_k2": _kimi_checkpoint,
    **{
        name: lambda path, name=name: make_window_checkpoint(path, name)
        for name in ("gemma3_text", "gpt_oss", "qwen3_moe")
    },
    **{name: lambda path, name=name: _image_checkpoint(path, name) for name in ("gemma3", "mistral3", "kimi_k25")},
}
