"""Small random checkpoints in Hugging Face layout: config.json, safetensors and a real byte-level BPE tokenizer.

Written without `transformers`, so that tests which only need a model directory don't pay for its import.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SPECIAL_TOKENS = ("<|endoftext|>", "<|begin|>", "<|im_start|>", "<|im_end|>")
EOS_ID, BOS_ID = 0, 1
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_TEXT = (
    "The quick brown fox jumps over the lazy dog. Every page of memory belongs to one request at a time.",
    "Once upon a time there was a small engine that read long books and never forgot what it had seen.",
    "What is the capital of France? The capital of France is Paris. 12 + 30 = 42, and 7 * 6 = 42 as well.",
    "def main():\n    print('hello, world')\n    return {'answer': [1, 2, 3]}\n",
    "Grüße aus Köln, 日本語のテキスト, emoji 🙂🚀 and some more words to merge, merge, merge.",
)


def make_config(family: str, **overrides: Any) -> dict[str, Any]:
    """The config.json of a tiny model of `family`; `overrides` replace or add fields, and None deletes one."""
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "dtype": "float32",
    }
    if family == "mistral":
        config["sliding_window"] = None
    if family == "qwen2":
        del config["head_dim"]
    config.update(overrides)
    deleted = [name for name, value in overrides.items() if value is None and name != "sliding_window"]
    return {name: value for name, value in config.items() if name not in deleted}


def make_weights(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint that `config` describes, float32, seeded, scaled so that logits are lively."""
    generator = torch.Generator().manual_seed(seed)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim", hidden // heads)
    inner, family = config["intermediate_size"], config["model_type"]
    qkv_bias = family == "qwen2" or config.get("attention_bias", False)
    o_bias = family != "qwen2" and config.get("attention_bias", False)
    mlp_bias = config.get("mlp_bias", False)
    weights: dict[str, torch.Tensor] = {}

    def norm(name: str, size: int) -> None:
        weights[f"{name}.weight"] = 1 + 0.2 * torch.randn(size, generator=generator)

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        weights[f"{name}.weight"] = torch.randn(rows, columns, generator=generator) / columns**0.5
        if bias:
            weights[f"{name}.bias"] = 0.3 * torch.randn(rows, generator=generator)

    weights["model.embed_tokens.weight"] = 0.3 * torch.randn(config["vocab_size"], hidden, generator=generator)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        norm(f"{prefix}.input_layernorm", hidden)
        linear(f"{prefix}.self_attn.q_proj", heads * head_dim, hidden, qkv_bias)
        linear(f"{prefix}.self_attn.k_proj", kv_heads * head_dim, hidden, qkv_bias)
        linear(f"{prefix}.self_attn.v_proj", kv_heads * head_dim, hidden, qkv_bias)
        linear(f"{prefix}.self_attn.o_proj", hidden, heads * head_dim, o_bias)
        if family == "qwen3":
            norm(f"{prefix}.self_attn.q_norm", head_dim)
            norm(f"{prefix}.self_attn.k_norm", head_dim)
        norm(f"{prefix}.post_attention_layernorm", hidden)
        linear(f"{prefix}.mlp.gate_proj", inner, hidden, mlp_bias)
        linear(f"{prefix}.mlp.up_proj", inner, hidden, mlp_bias)
        linear(f"{prefix}.mlp.down_proj", hidden, inner, mlp_bias)
    norm("model.norm", hidden)
    if not config.get("tie_word_embeddings", False):
        linear("lm_head", config["vocab_size"], hidden, False)
    return weights


@functools.cache
def _tokenizer_json(vocab_size: int, add_bos: bool) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    if add_bos:
        bos = SPECIAL_TOKENS[BOS_ID]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, BOS_ID)]
        )
    else:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return str(tokenizer.to_str())


def write_tokenizer(path: Path, vocab_size: int, *, add_bos: bool, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Write tokenizer.json and tokenizer_config.json; `vocab_size` must be at least 260 (the bytes and 4 specials)."""
    if vocab_size < 256 + len(SPECIAL_TOKENS):
        raise ValueError(f"a byte-level tokenizer needs a vocabulary of at least 260, got {vocab_size}")
    (path / "tokenizer.json").write_text(_tokenizer_json(vocab_size, add_bos), encoding="utf-8")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS_ID] if add_bos else None,
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def write_safetensors(path: Path, weights: dict[str, torch.Tensor], shards: int = 1) -> None:
    """Write `weights` as model.safetensors, or as `shards` files with an index."""
    if shards == 1:
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(weights)
    index: dict[str, str] = {}
    size = -(-len(names) // shards)
    for number, first in enumerate(range(0, len(names), size)):
        chunk = names[first : first + size]
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        save_file({name: weights[name] for name in chunk}, path / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(chunk, file))
    total = sum(tensor.nbytes for tensor in weights.values())
    body = {"metadata": {"total_size": total}, "weight_map": index}
    (path / "model.safetensors.index.json").write_text(json.dumps(body), encoding="utf-8")


def make_checkpoint(
    tmp_path: Path,
    family: str,
    *,
    seed: int = 0,
    shards: int = 1,
    tokenizer: bool | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
    generation_config: dict[str, Any] | None = None,
    **overrides: Any,
) -> Path:
    """Make a checkpoint directory under `tmp_path` and return its path.

    `family` is one of FAMILIES; `overrides` are config.json fields (None deletes one; `dtype` is also the dtype of the
    file's tensors). A tokenizer is written when the vocabulary has room for one, unless `tokenizer` is False. Llama
    and Mistral tokenizers put a begin token before the text, the Qwen ones don't.
    """
    path = Path(tmp_path) / f"{family}-{len(list(Path(tmp_path).iterdir()))}"
    path.mkdir(parents=True)
    config = make_config(family, **overrides)
    (path / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")
    weights = {name: tensor.to(dtype) for name, tensor in make_weights(config, seed).items()}
    write_safetensors(path, weights, shards)
    if tokenizer or (tokenizer is None and config["vocab_size"] >= 256 + len(SPECIAL_TOKENS)):
        add_bos = family in ("llama", "mistral")
        write_tokenizer(path, config["vocab_size"], add_bos=add_bos, chat_template=chat_template)
    if generation_config is not None:
        (path / "generation_config.json").write_text(json.dumps(generation_config), encoding="utf-8")
    return path
