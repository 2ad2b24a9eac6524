"""DeepSeek-V3.2 with drafts, by the backend that GPUs have and in graphs: tokens are those of the reference without drafts.

Prompts end around as many tokens as an indexer chooses, so a row's drafts lie on both sides of that border.
"""

from __future__ import annotations

from typing import Any

import pytest

from helpers.checkpoints_drafters import make_module
from helpers.device import as_on_cuda, counted_graphs
from helpers.engine_oracle import prompt
from helpers.planted_drafts import PlantedDrafter, drafting, plant
from pagerunner import LLM, SamplingParams

pytest.importorskip("transformers")

TOP_K = 17
PROMPTS = [prompt(length, length) for length in (1, TOP_K - 9, TOP_K - 4, TOP_K - 1, TOP_K, TOP_K + 1, 70)]
LIMITS: dict[str, Any] = {
    "device": "cpu",
    "skip_tokenizer_init": True,
    "poison_fresh_pages": True,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "kv_cache_memory_bytes": 2**23,
}
MTP = {"method": "mtp", "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 4, 3]]}


def params(number: int) -> SamplingParams:
    """Every other row is greedy."""
    return SamplingParams(temperature=0.8 * (number % 2), seed=number, max_tokens=20, ignore_eos=True, detokenize=False)


def drawn(path: str, **options: Any) -> tuple[list[list[int]], LLM]:
    """The prompts' tokens, twice: the second time prefixes are found."""
    llm, asked = LLM(path, **LIMITS | options), [params(number) for number in range(len(PROMPTS))]
    found = []
    for _ in range(2):
        outputs = llm.generate([{"prompt_token_ids": text} for text in PROMPTS], asked, use_tqdm=False)
        assert not any(output.error for output in outputs)
        found += [list(output.outputs[0].token_ids) for output in outputs]
    return found, llm


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_module(tmp_path_factory.mktemp("module"), "deepseek_v32"))


@pytest.fixture(scope="module", params=["auto", "fp8"])
def pages(path: str, request: pytest.FixtureRequest) -> tuple[str, list[list[int]]]:
    """A dtype of pages, and tokens of the reference."""
    return request.param, drawn(path, kv_cache_dtype=request.param)[0]


@pytest.mark.days(5)
@pytest.mark.parametrize("in_flight", [1, 2])
def test_the_models_own_module(path: str, pages: tuple[str, list[list[int]]], in_flight: int) -> None:
    dtype, expected = pages
    with as_on_cuda(), counted_graphs() as graphs:
        found, llm = drawn(path, kv_cache_dtype=dtype, max_in_flight=in_flight, speculative_config=MTP)
    assert found == expected
    counts = llm.stats().spec
    assert counts is not None and counts.num_draft_tokens > counts.num_accepted_tokens > 20
    assert sum(key.drafts == 3 for key in graphs.replays) > 5, "the backend of GPUs takes rows with drafts"


@pytest.mark.days(5)
@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
def test_drafts_of_any_quality(
    path: str, pages: tuple[str, list[list[int]]], right: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, expected = pages
    texts = {
        (*text, number): [*text, *made] for number, (text, made) in enumerate(zip(PROMPTS, expected, strict=False))
    }
    plant(monkeypatch, texts, right)
    with as_on_cuda(), counted_graphs() as graphs:
        found, llm = drawn(path, kv_cache_dtype=dtype, **drafting(3))
    assert found == expected
    counts = llm.stats().spec
    assert counts is not None and PlantedDrafter.made > 100
    assert (counts.num_accepted_tokens > 0) == (right > 0)
    assert any(key.drafts == 3 for key in graphs.replays)
