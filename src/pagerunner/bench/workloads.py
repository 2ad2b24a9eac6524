"""The fixed workloads and model shapes of the comparisons, on CPUs (W1 to W3) and on GPUs (the others). Torch-free.

Lengths are drawn once from a fixed seed and never change. Token ids depend on `salt`, so that every repetition has
fresh prompts and no prefix cache serves one repetition from another. With salt 0, ids and lengths of the GPU workloads
are those that other engines were measured with; mixed256 is nano-vllm's public benchmark.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagerunner.bench.shapes import QUANTIZED, SHAPES
from pagerunner.errors import ConfigError

WORKLOADS: dict[str, str] = {
    "W1": "one request, 128 tokens in, 128 out",
    "W2": "32 requests, 16 to 256 tokens in, 32 to 128 out",
    "W3": "32 requests that share a prefix of 512 tokens, 16 of their own, 16 out, submitted at once",
    "mixed256": "256 requests, 100 to 1024 tokens in, 100 to 1024 out",
    "decode1": "one request, 128 tokens in, 512 out",
    "decode64": "64 requests, 128 tokens in, 256 out",
    "prefill8k": "8 requests, 8192 tokens in, 1 out",
    "prefix2k": "256 requests that share a prefix of 2048 tokens, 32 of their own, 64 out",
}
_LARGEST_ID = 10_000  # of the GPU workloads
_FIRST_ID = 300  # Ids below this are special tokens in some tokenizers.


@dataclass(frozen=True)
class BenchRequest:
    """A prompt of token ids and the number of tokens to generate."""

    prompt_token_ids: list[int]
    output_len: int


def workload(name: str, vocab_size: int, salt: int = 0) -> list[BenchRequest]:
    """The requests of the workload `name`.

    Raises:
        ConfigError: the name is unknown, or the vocabulary is too small to draw from.
    """
    if name not in WORKLOADS:
        raise ConfigError(f"unknown workload {name!r}; there are {', '.join(WORKLOADS)}.")
    if name in _DRAWN:
        if vocab_size <= _LARGEST_ID:
            raise ConfigError(f"{name} draws token ids up to {_LARGEST_ID}; the vocabulary has only {vocab_size}.")
        seed, make = _DRAWN[name]
        return make(_Draw(seed, salt))
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


class _Draw:
    """One stream of numbers for lengths and ids. With a salt the ids are replaced, and the lengths stay."""

    def __init__(self, seed: int, salt: int) -> None:
        self._random = random.Random(seed)
        self._fresh = random.Random(f"{seed}/{salt}") if salt else None

    def length(self, least: int, most: int) -> int:
        return self._random.randint(least, most)

    def ids(self, count: int) -> list[int]:
        drawn = [self._random.randint(0, _LARGEST_ID) for _ in range(count)]
        return drawn if self._fresh is None else [self._fresh.randint(0, _LARGEST_ID) for _ in range(count)]


def _mixed(draw: _Draw) -> list[BenchRequest]:
    requests = []
    for _ in range(256):
        prompt = draw.ids(draw.length(100, 1024))
        requests.append(BenchRequest(prompt, draw.length(100, 1024)))
    return requests


def _equal(count: int, prompt: int, output: int) -> Callable[[_Draw], list[BenchRequest]]:
    return lambda draw: [BenchRequest(draw.ids(prompt), output) for _ in range(count)]


def _shared(draw: _Draw) -> list[BenchRequest]:
    prefix = draw.ids(2048)
    return [BenchRequest(prefix + draw.ids(32), 64) for _ in range(256)]


_DRAWN: dict[str, tuple[int, Callable[[_Draw], list[BenchRequest]]]] = {  # by name: seed, and what is drawn
    "mixed256": (0, _mixed),
    "decode1": (1, _equal(1, 128, 512)),
    "prefix2k": (2, _shared),
    "prefill8k": (4, _equal(8, 8192, 1)),
    "decode64": (5, _equal(64, 128, 256)),
}


class _Ids:
    def __init__(self, vocab_size: int, salt: int) -> None:
        if vocab_size <= _FIRST_ID:
            raise ConfigError(f"benchmarks draw token ids from {_FIRST_ID} up; the vocabulary has only {vocab_size}.")
        self._vocab_size = vocab_size
        self._random = random.Random(1000 + salt)

    def draw(self, count: int) -> list[int]:
        return [self._random.randrange(_FIRST_ID, self._vocab_size) for _ in range(count)]


def write_model(shape: str, directory: Path, quantization: str | None = None) -> Path:
    """Write the `config.json` of a model of this shape, for `load_format="dummy"`; returns `directory`.

    `quantization` is one of QUANTIZED, the format of the checkpoint that it would have; any other leaves weights in floats.

    Raises:
        ConfigError: the shape is unknown.
    """
    if shape not in SHAPES:
        raise ConfigError(f"unknown shape {shape!r}; there are {', '.join(SHAPES)}.")
    said = {} if quantization not in QUANTIZED else {"quantization_config": QUANTIZED[quantization]}
    return write_config(directory, **SHAPES[shape], **said)


def write_config(directory: Path, **fields: Any) -> Path:
    """Write the `config.json` of a model with these fields; returns `directory`. Without a model_type it is a Qwen3 model."""
    config = (
        fields
        if "model_type" in fields
        else {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "max_position_embeddings": 4096,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
            **fields,
        }
    )
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return directory
