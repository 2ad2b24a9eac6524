"""Mixtures of experts and models with windows against `transformers` in float32, without an engine.

As `test_oracle.py`: the same greedy tokens, log-probabilities within 1e-4, and NaN in every slot that nobody wrote.
"""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoints_window import make_window_checkpoint
from helpers.forward import Harness, Sequence, load

transformers = pytest.importorskip("transformers")

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3 moe": ("qwen3_moe", {}),
    "qwen3 moe, some layers dense, tied": (
        "qwen3_moe",
        {"num_hidden_layers": 4, "mlp_only_layers": [1], "decoder_sparse_step": 2, "tie_word_embeddings": True},
    ),
    "qwen3 moe, one of many, weights as they are": (
        "qwen3_moe",
        {"num_experts": 33, "num_experts_per_tok": 1, "norm_topk_prob": False, "attention_bias": True},
    ),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from a variant's name to its directory and reference model, each made once."""
    directory = tmp_path_factory.mktemp("models")

    @functools.cache
    def get(name: str) -> tuple[Path, Any]:
        family, overrides = VARIANTS[name]
        path = make_window_checkpoint(directory, family, tokenizer=False, seed=len(name), **overrides)
        return path, transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **EAGER)

    return get


EAGER = {"attn_implementation": "eager"}


@torch.inference_mode()
def check(reference: Any, prompt: list[int], sequence: Sequence, **options: Any) -> None:
    """The generated tokens are the reference's greedy choice at every step, with its log-probabilities."""
    assert sequence.tokens[: len(prompt)] == prompt
    logits = reference(torch.tensor([sequence.tokens[:-1]]), **options).logits[0, len(prompt) - 1 :]
    want = logits.float().log_softmax(-1)
    assert want.argmax(-1).tolist() == sequence.tokens[len(prompt) :]
    torch.testing.assert_close(torch.stack(sequence.logprobs), want, atol=1e-4, rtol=0)


def prompts(lengths: list[int], vocab: int = 512) -> list[list[int]]:
    ids = random.Random(sum(lengths))
    return [[ids.randrange(vocab) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("name", VARIANTS)
@torch.inference_mode()
def test_every_variant(checkpoints: Any, name: str) -> None:
    path, reference = checkpoints(name)
    model, config = load(path)
    texts = prompts([1, 33, 150])
    harness = Harness(model, config, dtype=torch.float32, page_tokens=16, num_pages=40)
    for prompt, sequence in zip(texts, harness.generate(texts, 6, chunk=64), strict=True):
        check(reference, prompt, sequence)


@pytest.mark.parametrize("page_tokens", [1, 16, 48])
@pytest.mark.parametrize("chunk", [1, 7, 64, 10**9])
@pytest.mark.parametrize("name", ["qwen3 moe"])
@torch.inference_mode()
def test_tokens_do_not_depend_on_chunks_and_pages(checkpoints: Any, name: str, chunk: int, page_tokens: int) -> None:
    path, reference = checkpoints(name)
    model, config = load(path)
    texts = prompts([40] if chunk == 1 else [5, 70, 17, 16, 1, 130])
    pages = sum(-(-(len(t) + 8) // page_tokens) for t in texts)
    harness = Harness(model, config, dtype=torch.float32, page_tokens=page_tokens, num_pages=pages, gap=page_tokens % 3)
    for prompt, sequence in zip(texts, harness.generate(texts, 8, chunk=chunk), strict=True):
        check(reference, prompt, sequence)
