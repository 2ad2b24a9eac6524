"""No page is read before it is written: every family, in another dtype of pages on each day, with NaN in whatever is handed out.

Pages are few and short, so that most of them have had another owner; prompts come in pieces, hit each other's prefixes and
some are preempted. `tests/engine/test_kv_dtypes.py` has the bounds of what the dtypes cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from helpers.effort import by_days
from helpers.families import MAKERS
from helpers.once import made_once
from pagerunner import LLM, SamplingParams
from pagerunner.config import KV_DTYPE_BYTES
from pagerunner.memory.specs import FullKV, LatentKV, RecurrentState
from pagerunner.models.registry import FAMILIES

pytest.importorskip("transformers")

HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe", "bamba", "deepseek_v4")
SAME_MEMORY = (
    "qwen3_5",
    "qwen3_5_moe",
    "llama4",
    "gemma3",
    "mistral3",
    "kimi_k2",
    "kimi_k25",
)  # other names for tensors of another family
KINDS = [family for family in MAKERS if family not in SAME_MEMORY]
PREFIX = [(5 * i) % 490 + 4 for i in range(150)]
PROMPTS = [
    PREFIX[: (0, 150, 8, 40, 140)[i % 5]] + [(11 * i + 3 * j) % 490 + 4 for j in range(4 + 9 * (i % 5))]
    for i in range(9)
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    return made_once(tmp_path_factory, MAKERS)


def run(path: str, kv_cache_dtype: str, rounds: Any = (PROMPTS[:5], PROMPTS), **options: Any) -> list[Any]:
    limits = {"max_model_len": 200, "max_num_seqs": 4, "max_num_batched_tokens": 48, "kv_cache_memory_bytes": 400_000}
    llm = LLM(path, kv_cache_dtype=kv_cache_dtype, skip_tokenizer_init=True, **(limits | options))
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=0, ignore_eos=True, detokenize=False)
    outputs: list[Any] = []
    for prompts in rounds:
        outputs += llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    assert llm.stats().prefix_hits_total or len(rounds) == 1
    return outputs


def results(outputs: list[Any]) -> list[list[tuple[int, float]]]:
    for output in outputs:
        assert output.error is None, output.error
    found = [
        [(token, entry[token].logprob) for token, entry in zip(one.token_ids, one.logprobs, strict=True)]
        for one in (output.outputs[0] for output in outputs)
    ]
    assert all(math.isfinite(logprob) for row in found for _, logprob in row)
    return found


def test_every_family_is_here() -> None:
    assert set(MAKERS) == set(FAMILIES)


@pytest.mark.days(3)
@pytest.mark.parametrize(("family", "kv_cache_dtype"), by_days(KINDS, KV_DTYPE_BYTES))
def test_poison_changes_nothing(checkpoint: Callable[[str], str], family: str, kv_cache_dtype: str) -> None:
    path = checkpoint(family)
    assert results(run(path, kv_cache_dtype, poison_fresh_pages=True)) == results(run(path, kv_cache_dtype))


SLOT_SCALES = ("deepseek_v32", "deepseek_v4")  # slots each come with their own scales
PAGE_SCALES = [family for family in KINDS if family not in SLOT_SCALES]
ZEROED = by_days(PAGE_SCALES, [dtype for dtype in KV_DTYPE_BYTES if dtype.startswith("fp8")])
ZEROED += [(family, "float32") for family in HYBRIDS if family in KINDS]


@pytest.mark.days(3)
@pytest.mark.parametrize(("family", "kv_cache_dtype"), ZEROED)
def test_without_zeroing_it_is_noticed(
    checkpoint: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, family: str, kv_cache_dtype: str
) -> None:
    for spec in (RecurrentState,) if kv_cache_dtype == "float32" else (FullKV, LatentKV):
        monkeypatch.setattr(spec, "zero_fresh", property(lambda self: False))
    outputs = run(checkpoint(family), kv_cache_dtype, rounds=(PROMPTS[:5],), poison_fresh_pages=True)
    assert all(output.error is not None and "NaN" in output.error for output in outputs)
