"""Pages in another dtype than the model's: log-probabilities stay near those of float32 pages, whatever memory does.

The bounds are for tiny random models, whose logits are livelier than a trained model's.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_compressed import make_compressed_checkpoint
from helpers.checkpoints_hybrid import make_hybrid_checkpoint
from helpers.checkpoints_latent import make_latent_checkpoint
from helpers.checkpoints_window import make_window_checkpoint
from helpers.effort import by_days, effort, share_of_the_day
from helpers.once import made_once
from pagerunner import LLM, SamplingParams
from pagerunner.demo import demo_path
from pagerunner.eval.runner import evaluate
from pagerunner.eval.tasks import RECALL_DISTANCES

pytest.importorskip("transformers")

# kv_cache_dtype: bounds of the mean and of the largest difference of a prompt token's log-probability
BOUNDS = {
    "bfloat16": (0.01, 0.05),
    "float16": (0.001, 0.01),
    "fp8": (0.06, 0.5),
    "fp8_e4m3": (0.06, 0.5),
    "fp8_e5m2": (0.12, 1.0),
}
CONDITIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "budget-7": {"max_num_batched_tokens": 7},
    "page-48-poisoned": {"block_size": 48, "poison_fresh_pages": True},
    "page-1": {"block_size": 1, "num_gpu_blocks_override": 400, "max_model_len": 128},
    "tight-poisoned": {"num_gpu_blocks_override": 14, "max_model_len": 128, "poison_fresh_pages": True},
}
MAKERS: dict[str, Callable[[Path], Path]] = {
    "qwen3": lambda path: make_checkpoint(path, "qwen3"),
    "gemma-3": lambda path: make_window_checkpoint(path, "gemma3_text"),
    "gpt-oss": lambda path: make_window_checkpoint(path, "gpt_oss"),
    "qwen3-next": lambda path: make_hybrid_checkpoint(path, "qwen3_next_dense")[0],
    # without experts, whose choice jumps where two are about equally good
    "deepseek-v2-lite": lambda path: make_latent_checkpoint(path, "deepseek_v2", first_k_dense_replace=3)[0],
    "deepseek-v3.2": lambda path: make_latent_checkpoint(path, "deepseek_v32", first_k_dense_replace=3, index_topk=512)[
        0
    ],
    # without a choice of slots or experts, for the same reason
    "deepseek-v4": lambda path: make_compressed_checkpoint(path, index_topk=512, num_experts_per_tok=6)[0],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    return made_once(tmp_path_factory, MAKERS)


def logprobs(path: str, kv_cache_dtype: str, **conditions: Any) -> list[float]:
    """Of every prompt token but the first, and of what follows the prompts token by token."""
    ids = random.Random(3)
    prompts = [[ids.randrange(4, 500) for _ in range(length)] for length in (5, 40, 100, 17, 64)]
    if "num_gpu_blocks_override" not in conditions:
        conditions = {"max_model_len": 256, "kv_cache_memory_bytes": 8_000_000} | conditions
    llm = LLM(path, kv_cache_dtype=kv_cache_dtype, skip_tokenizer_init=True, **conditions)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [next(iter(entry.values())).logprob for output in outputs for entry in output.prompt_logprobs[1:]]


unconditional = functools.cache(logprobs)


def differences(found: list[float], expected: list[float]) -> tuple[float, float]:
    errors = [abs(a - b) for a, b in zip(found, expected, strict=True)]
    return sum(errors) / len(errors), max(errors)


@pytest.mark.days(2)
@pytest.mark.parametrize("family", MAKERS)
@pytest.mark.parametrize("kv_cache_dtype", BOUNDS)
def test_logprobs_stay_near_those_of_float32_pages(
    checkpoint: Callable[[str], str], family: str, kv_cache_dtype: str
) -> None:
    path = checkpoint(family)
    mean, largest = differences(unconditional(path, kv_cache_dtype), unconditional(path, "auto"))
    assert 0 < mean < BOUNDS[kv_cache_dtype][0] and largest < BOUNDS[kv_cache_dtype][1]


CACHES = [
    ("qwen3", "bfloat16"),
    ("qwen3", "fp8_e4m3"),
    ("qwen3", "fp8_e5m2"),
    ("gemma-3", "fp8_e4m3"),
    ("deepseek-v2-lite", "bfloat16"),
    ("deepseek-v2-lite", "fp8_e4m3"),
    ("deepseek-v2-lite", "fp8_e5m2"),
    ("deepseek-v3.2", "bfloat16"),
    ("deepseek-v3.2", "fp8_e4m3"),
    ("deepseek-v4", "bfloat16"),
    ("deepseek-v4", "fp8_e4m3"),
]


@pytest.mark.parametrize(
    ("family", "kv_cache_dtype", "condition"),
    [(*cache, condition) for cache, condition in by_days(CACHES, CONDITIONS)],
)
def test_logprobs_do_not_depend_on_the_memory(
    checkpoint: Callable[[str], str], family: str, kv_cache_dtype: str, condition: str
) -> None:
    path = checkpoint(family)
    found = logprobs(path, kv_cache_dtype, **CONDITIONS[condition])
    _, largest = differences(found, unconditional(path, kv_cache_dtype))
    assert largest < 0.02


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_latents_are_alike_in_the_backend_of_graphs(checkpoint: Callable[[str], str], kv_cache_dtype: str) -> None:
    path = checkpoint("deepseek-v2-lite")
    found = logprobs(path, kv_cache_dtype, attention_backend="triton")
    _, largest = differences(found, unconditional(path, kv_cache_dtype))
    assert largest < 0.02


HEALTHY = [("fp8", 64), ("fp8_e5m2", 512), ("fp8", 512), ("fp8_e5m2", 64)]


@pytest.mark.parametrize(("kv_cache_dtype", "distance"), [HEALTHY[i] for i in share_of_the_day(4, 4)])
def test_the_demo_model_stays_healthy(kv_cache_dtype: str, distance: int) -> None:
    path = str(demo_path())
    llm = LLM(path, kv_cache_dtype=kv_cache_dtype, num_gpu_blocks_override=1024, max_num_seqs=32, use_tqdm=False)
    report = evaluate(llm, count=effort(4, 12), distances=effort((distance,), RECALL_DISTANCES))
    assert all(score.correct == score.total for score in report.scores), report.text()
