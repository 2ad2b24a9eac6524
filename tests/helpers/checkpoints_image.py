"""Small random checkpoints of models of text and images, as `transformers` saves them and as their makers name tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from helpers.checkpoints import BOS_ID, EOS_ID, write_tokenizer
from helpers.checkpoints_latent import _COMMON, _OWN
from helpers.checkpoints_window import _randomise

_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
FAMILIES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3Config",
        "Gemma3ForConditionalGeneration",
        {
            "num_hidden_layers": 6,
            "sliding_window": 20,
            "query_pre_attn_scalar": 24,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {**_VISION, "vision_use_head": False},
    ),
    "mistral3": (
        "Mistral3Config",
        "Mistral3ForConditionalGeneration",
        {"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": None, "rope_theta": 1e6},
        {**_VISION, "model_type": "pixtral", "head_dim": 16},
    ),
    "kimi_k25": (
        "Kimi_K25Config",
        "Kimi_K25ForConditionalGeneration",
        {**_COMMON, **_OWN["deepseek_v3"], "model_type": "deepseek_v3", "head_dim": _COMMON["qk_rope_head_dim"]},
        {name: size for name, size in _VISION.items() if name != "image_size"},
    ),
}
_OLD_NAMES = (
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    ("model.", ""),
)


def make_image_checkpoint(path: Path, family: str, *, old_names: bool, seed: int = 0, **text: Any) -> torch.nn.Module:
    """Write a model directory, and return the whole reference model.

    `old_names`: tensors are called as the makers' files call them, `language_model.model.` and `vision_tower.`; otherwise
    as transformers' classes do, `model.language_model.` and `model.vision_tower.`.
    """
    import transformers

    config_class, model_class, own, vision = FAMILIES[family]
    config = getattr(transformers, config_class)(
        text_config={**_TEXT, **own, **text}, vision_config=vision, image_token_index=500
    )
    model = getattr(transformers, model_class)(config).eval()
    _randomise(model, seed)
    model.save_pretrained(path)
    names = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        names.pop("lm_head.weight", None)
    if old_names:
        names = {_old_name(name): tensor for name, tensor in names.items()}
    for file in path.glob("model*.safetensors*"):
        file.unlink()
    save_file(names, path / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(path, _TEXT["vocab_size"], add_bos=False)
    return model


def tensor_names(path: Path) -> set[str]:
    """What the checkpoint's file holds."""
    return set(load_file(path / "model.safetensors"))


def publish(path: Path, *, drop: tuple[str, ...]) -> None:
    """Rewrite config.json as makers do: with torch_dtype, and without the fields `drop` of text_config."""
    values = json.loads((path / "config.json").read_text())
    values["torch_dtype"] = values.pop("dtype", "float32")
    for name in (*drop, "dtype"):
        values["text_config"].pop(name, None)
    (path / "config.json").write_text(json.dumps(values))


def _old_name(name: str) -> str:
    for new, old in _OLD_NAMES:
        if name.startswith(new):
            return old + name[len(new) :]
    return name
