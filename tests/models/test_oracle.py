"""Models against `transformers` in float32: the same greedy tokens, and log-probabilities within 1e-4.

The harness builds batches by hand over a pool whose free slots hold NaN, so these tests cover models and attention,
with every family, rope rule and shape, and no engine.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoints import FAMILIES, make_checkpoint
from helpers.effort import by_days
from helpers.forward import Harness, Sequence, check, load, prompts

transformers = pytest.importorskip("transformers")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama full heads": ("llama", {"num_key_value_heads": 4, "head_dim": None}),
    "llama one kv head": (
        "llama",
        {"num_key_value_heads": 1, "num_attention_heads": 3, "head_dim": 20, "hidden_size": 60},
    ),
    "llama biases, tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama odd sizes": ("llama", {"vocab_size": 1013, "head_dim": 20, "intermediate_size": 101, "hidden_size": 72}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "llama yarn, all fields": (
        "llama",
        {"rope_parameters": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.9}},
    ),
    "llama yarn, attention factor": (
        "llama",
        {"rope_parameters": {**YARN, "attention_factor": 1.3, "truncate": False}},
    ),
    "llama old fields": (
        "llama",
        {
            "rope_parameters": None,
            "rope_theta": 500000.0,
            "rope_scaling": {k: LLAMA3[k] for k in LLAMA3 if k != "rope_theta"},
        },
    ),
    "llama old type": (
        "llama",
        {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    "llama old theta": ("llama", {"rope_parameters": None, "rope_theta": 1e6}),
    "mistral": ("mistral", {"head_dim": 24, "sliding_window": 2048}),
    "mistral window": ("mistral", {"sliding_window": 20}),
    "qwen2 window": ("qwen2", {"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 1}),
    "qwen3 window": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 40,
            "max_window_layers": 0,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "sliding_window": 32, "max_window_layers": 2}),
    "qwen2 odd sizes": ("qwen2", {"vocab_size": 1013, "num_attention_heads": 6, "hidden_size": 120}),
    "qwen3": ("qwen3", {"head_dim": 20, "tie_word_embeddings": True}),
    "qwen3 bias, yarn": ("qwen3", {"attention_bias": True, "rope_parameters": YARN, "num_key_value_heads": 4}),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from a variant's name to its directory and reference model, each made once."""
    directory = tmp_path_factory.mktemp("models")

    @functools.cache
    def get(name: str) -> tuple[Path, Any]:
        family, overrides = VARIANTS[name]
        path = make_checkpoint(directory, family, tokenizer=False, seed=len(name), **overrides)
        return path, transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    return get


@pytest.mark.parametrize("name", VARIANTS)
@torch.inference_mode()
def test_every_variant(checkpoints: Any, name: str) -> None:
    path, reference = checkpoints(name)
    model, config = load(path)
    texts = prompts([1, 33, 150])
    harness = Harness(model, config, dtype=torch.float32, page_tokens=16, num_pages=40)
    for prompt, sequence in zip(texts, harness.generate(texts, 6, chunk=64), strict=True):
        check(reference, prompt, sequence)


@pytest.mark.parametrize(("name", "chunk", "page_tokens"), by_days(["llama", "qwen3"], [1, 7, 64, 10**9], [1, 16, 48]))
@torch.inference_mode()
def test_tokens_do_not_depend_on_chunks_and_pages(checkpoints: Any, name: str, chunk: int, page_tokens: int) -> None:
    path, reference = checkpoints(name)
    model, config = load(path)
    texts = prompts([40] if chunk == 1 else [5, 70, 17, 16, 1, 130])
    pages = sum(-(-(len(t) + 8) // page_tokens) for t in texts)
    harness = Harness(model, config, dtype=torch.float32, page_tokens=page_tokens, num_pages=pages, gap=page_tokens % 3)
    for prompt, sequence in zip(texts, harness.generate(texts, 8, chunk=chunk), strict=True):
        check(reference, prompt, sequence)


@torch.inference_mode()
def test_thirty_three_rows(checkpoints: Any) -> None:
    path, reference = checkpoints("qwen3")
    model, config = load(path)
    texts = prompts([1 + (i * 13) % 90 for i in range(33)])
    harness = Harness(model, config, dtype=torch.float32, page_tokens=16, num_pages=33 * 7)
    for prompt, sequence in zip(texts, harness.generate(texts, 4, chunk=200), strict=True):
        check(reference, prompt, sequence)


@torch.inference_mode()
def test_rows_share_pages_that_the_same_step_writes(checkpoints: Any) -> None:
    path, reference = checkpoints("llama")
    model, config = load(path)
    prefix, *tails = prompts([320, 9, 16, 1, 40, 3])
    harness = Harness(model, config, dtype=torch.float32, page_tokens=16, num_pages=60)
    first = Sequence(prefix + tails[0])
    first.pages = [harness.free.pop() for _ in range(21)]
    rest = [Sequence(prefix + tail, computed=320, pages=first.pages[:20]) for tail in tails[1:]]
    sequences = [first, *rest]
    texts = [list(s.tokens) for s in sequences]
    for _ in range(5):
        rows = harness.step([(s, len(s.tokens) - s.computed) for s in sequences])
        for sequence, row in zip(sequences, rows, strict=True):
            sequence.logprobs.append(row)
            sequence.tokens.append(int(row.argmax()))
    for text, sequence in zip(texts, sequences, strict=True):
        check(reference, text, sequence)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@torch.inference_mode()
def test_half_precision_is_as_close_to_float32_as_the_reference_is(tmp_path: Path, family: str, dtype: str) -> None:
    path = make_checkpoint(tmp_path, family, tokenizer=False, dtype=dtype)
    exact = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    rounded = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    model, config = load(path, dtype)
    assert config.dtype == dtype
    (text,) = prompts([90])
    harness = Harness(model, config, dtype=getattr(torch, dtype), page_tokens=16, num_pages=10)
    sequence = Sequence(text)
    rows = [harness.step([(sequence, count)])[0] for count in (50, 39, 1)]
    want, theirs = (m(torch.tensor([text])).logits[0].float().log_softmax(-1) for m in (exact, rounded))
    for row, position in zip(rows, (49, 88, 89), strict=True):
        error, reference_error = ((x - want[position]).abs().mean() for x in (row, theirs[position]))
        assert error < 2 * reference_error + 1e-3


@torch.inference_mode()
def test_a_half_precision_file_computes_exactly_in_float32(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama", tokenizer=False, dtype="bfloat16", shards=2)
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model, config = load(path, "float32")
    texts = prompts([30])
    harness = Harness(model, config, dtype=torch.float32, page_tokens=16, num_pages=5)
    check(reference, texts[0], harness.generate(texts, 5)[0])
