"""Mixtures of experts and models with windows against `transformers` in float32, without an engine.

As `test_oracle.py`: the same greedy tokens, log-probabilities within 1e-4, and NaN in every slot that nobody wrote.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoints_window import make_window_checkpoint
from helpers.effort import by_days
from helpers.forward import Harness, Sequence, check, load, prompts

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
    "qwen3 moe, window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 20}),
    "gemma 3": ("gemma3_text", {}),
    "gemma 3, every rope, soft caps, own output weights": (
        "gemma3_text",
        {
            "layer_types": ["full_attention", "sliding_attention"],
            "num_hidden_layers": 2,
            "sliding_window": 33,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            },
            "final_logit_softcapping": 3.0,
            "attn_logit_softcapping": 1.5,
            "tie_word_embeddings": False,
            "head_dim": 24,
        },
    ),
    "gemma 3, one window, smaller than a page": (
        "gemma3_text",
        {"sliding_window": 3, "layer_types": ["sliding_attention"] * 3, "attention_bias": True},
    ),
    "gpt-oss": ("gpt_oss", {}),
    "gpt-oss, full attention first, other rope, tied": (
        "gpt_oss",
        {
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "sliding_window": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "num_experts_per_tok": 1,
            "tie_word_embeddings": True,
        },
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


@pytest.mark.parametrize("name", VARIANTS)
@torch.inference_mode()
def test_every_variant(checkpoints: Any, name: str) -> None:
    path, reference = checkpoints(name)
    model, config = load(path)
    texts = prompts([1, 33, 150])
    harness = Harness(model, config, dtype=torch.float32, page_tokens=16, num_pages=40)
    for prompt, sequence in zip(texts, harness.generate(texts, 6, chunk=64), strict=True):
        check(reference, prompt, sequence)


@pytest.mark.days(2)
@pytest.mark.parametrize(
    ("name", "chunk", "page_tokens"), by_days(["qwen3 moe", "gemma 3", "gpt-oss"], [1, 7, 64, 10**9], [1, 16, 48])
)
@torch.inference_mode()
def test_tokens_do_not_depend_on_chunks_and_pages(checkpoints: Any, name: str, chunk: int, page_tokens: int) -> None:
    path, reference = checkpoints(name)
    model, config = load(path)
    texts = prompts([40] if chunk == 1 else [5, 70, 17, 16, 1, 130])
    pages = sum(-(-(len(t) + 8) // page_tokens) for t in texts)
    harness = Harness(model, config, dtype=torch.float32, page_tokens=page_tokens, num_pages=pages, gap=page_tokens % 3)
    for prompt, sequence in zip(texts, harness.generate(texts, 8, chunk=chunk), strict=True):
        check(reference, prompt, sequence)


@pytest.mark.parametrize("name", ["gemma 3", "gpt-oss"])
@torch.inference_mode()
def test_a_row_longer_than_a_band(checkpoints: Any, name: str) -> None:
    path, reference = checkpoints(name)
    model, config = load(path)
    texts = prompts([600, 40])
    harness = Harness(model, config, dtype=torch.float32, page_tokens=16, num_pages=50)
    for prompt, sequence in zip(texts, harness.generate(texts, 3, chunk=400), strict=True):
        check(reference, prompt, sequence)


@pytest.mark.parametrize("name", ["qwen3_moe", "gemma3_text", "gpt_oss"])
@torch.inference_mode()
def test_bfloat16_is_as_close_to_float32_as_the_reference_is(tmp_path: Path, name: str) -> None:
    path = make_window_checkpoint(tmp_path, name, tokenizer=False, dtype="bfloat16")
    exact = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **EAGER)
    rounded = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, **EAGER)
    model, config = load(path, "bfloat16")
    (text,) = prompts([90])
    harness = Harness(model, config, dtype=torch.bfloat16, page_tokens=16, num_pages=10)
    sequence = Sequence(text)
    rows = torch.cat([harness.step([(sequence, count)]) for count in (50, *[1] * 40)])
    want, theirs = (m(torch.tensor([text])).logits[0, 49:].float().log_softmax(-1) for m in (exact, rounded))
    error, reference_error = ((x - want).abs().mean() for x in (rows, theirs))
    assert error < 1.5 * reference_error + 1e-3
