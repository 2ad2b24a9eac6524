"""The fixed workloads and model shapes of the CPU comparison, torch-free.

Lengths are drawn once from a fixed seed and never change. Token ids depend on `salt`, so that every repetition has
fresh prompts and no prefix cache serves one repetition from another.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from pagerunner.errors import ConfigError

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "intermediate_size": 768,
        "vocab_size": 4096,
    },
    "small": {
        "hidden_size": 768,
        "num_hidden_layers": 16,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 2304,
        "vocab_size": 32000,
    },
}
WORKLOADS: dict[str, str] = {
    "W1": "one request, 128 tokens in, 128 out",
    "W2": "32 requests, 16 to 256 tokens in, 32 to 128 out",
    "W3": "32 requests that share a prefix of 512 tokens, 16 of their own, 16 out, submitted at once",
}
_FIRST_ID = 300  # Ids below this are special tokens in some tokenizers.


@dataclass(frozen=True)
class BenchRequest:
    """A prompt of token ids and the number of tokens to generate."""

    prompt_token_ids: list[int]
    output_len: int


def workload(name: str, vocab_size: int, salt: int = 0) -> list[BenchRequest]:
    """The requests of W1, W2 or W3.

    Raises:
        ConfigError: the name is unknown, or the vocabulary is too small to draw from.
    """
    if name not in WORKLOADS:
        raise ConfigError(f"unknown workload {name!r}; there are {', '.join(WORKLOADS)}.")
    ids = _Ids(vocab_size, salt)
    if name == "W1":
        return [BenchRequest(ids.draw(128), 128)]
    if name == "W2":
        lengths = random.Random(0)
        sizes = [(lengths.randint(16, 256), lengths.randint(32, 128)) for _ in range(32)]
        return [BenchRequest(ids.draw(prompt), output) for prompt, output in sizes]
    prefix = ids.draw(512)
    return [BenchRequest(prefix + ids.draw(16), 16) for _ in range(32)]


def uniform_workload(count: int, input_len: int, output_len: int, vocab_size: int, salt: int = 0) -> list[BenchRequest]:
    """`count` requests of equal lengths with random ids."""
    ids = _Ids(vocab_size, salt)
    return [BenchRequest(ids.draw(input_len), output_len) for _ in range(count)]


class _Ids:
    def __init__(self, vocab_size: int, salt: int) -> None:
        if vocab_size <= _FIRST_ID:
            raise ConfigError(f"benchmarks draw token ids from {_FIRST_ID} up; the vocabulary has only {vocab_size}.")
        self._vocab_size = vocab_size
        self._random = random.Random(1000 + salt)

    def draw(self, count: int) -> list[int]:
        return [self._random.randrange(_FIRST_ID, self._vocab_size) for _ in range(count)]


def write_model(shape: str, directory: Path) -> Path:
    """Write the `config.json` of a Qwen3 model of this shape, for `load_format="dummy"`; returns `directory`.

    Raises:
        ConfigError: the shape is unknown.
    """
    if shape not in SHAPES:
        raise ConfigError(f"unknown shape {shape!r}; there are {', '.join(SHAPES)}.")
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **SHAPES[shape],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return directory
