"""Kernels of drafts, on the device."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pytest

from engine.test_drafts import DEFAULTS, outputs, texts, tokens
from helpers.checkpoints_hybrid import make_hybrid_checkpoint
from helpers.device import collect, counted_graphs, device_llm
from helpers.draft_cases import check_accept, check_ngrams
from helpers.families import MAKERS
from helpers.planted_drafts import drafting, plant
from pagerunner import LLM, ConfigError, SamplingParams
from pagerunner.demo import demo_path
from pagerunner.ops.accept import accept
from pagerunner.ops.ngram import draft_ngrams


@pytest.mark.parametrize("by_chance", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 2), (7, 4), (256, 8)])
def test_the_kernel_accepts_what_the_twin_does(rows: int, width: int, by_chance: bool) -> None:
    check_accept(accept, rows, width, by_chance=by_chance, device="cuda")


@pytest.mark.parametrize(
    ("rows", "width", "length", "tokens", "count", "least", "most"),
    [(1, 1, 3, 2, 3, 1, 2), (64, 4, 900, 3, 5, 2, 5), (8, 8, 9000, 2, 7, 3, 12), (256, 3, 30, 2, 0, 1, 5)],
)
def test_the_kernel_drafts_what_the_twin_does(
    rows: int, width: int, length: int, tokens: int, count: int, least: int, most: int
) -> None:
    check_ngrams(
        draft_ngrams, rows, width, length=length, tokens=tokens, count=count, least=least, most=most, device="cuda"
    )


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_tokens_are_those_without_drafts(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In graphs at a stride, beside prompts, and where requests ask for more."""
    MAKERS[family](tmp_path)
    path = str(next(found.parent for found in tmp_path.rglob("config.json")))
    how = {**DEFAULTS, "dtype": "float32"}
    expected = outputs(LLM(path, **how))
    plant(monkeypatch, texts(expected), 0.7)
    llm = LLM(path, **how, **drafting(3))
    assert tokens(outputs(llm)) == tokens(expected)
    counts = llm.stats().spec
    assert counts is not None and counts.num_accepted_tokens > 50


TEXTS = [
    "Once upon a time there was a little dog",
    "Tom had a red ball.",
    "Lily went to the park with her",
    "One day, a",
]


@pytest.mark.parametrize(
    ("model", "drafts"), [("demo", {"method": "eagle3", "model": "demo-eagle3"}), ("demo-hybrid", {"method": "mtp"})]
)
def test_trained_drafters_are_right_as_often_as_on_a_cpu(
    model: str, drafts: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Tokens are right whatever is drafted, so the counts alone show drafts that go to other rows, or come from other rows' states."""
    drafts = drafts | {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 32, 3]]}
    how: dict[str, Any] = {
        "dtype": "float32", "max_num_seqs": 32, "max_model_len": 256, "kv_cache_memory_bytes": 2**27, "max_in_flight": 2,
    }  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)

    def drafted(llm: LLM) -> tuple[list[list[int]], list[float]]:
        """The tokens, and the mean number of them that a step makes of a row: of 1, 3 and 32 rows."""
        made, lengths, before = [], [], None
        for rows in (1, 3, 32):
            prompts = [TEXTS[row % 4] + " and then" * (row // 4) for row in range(rows)]
            made += [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]
            counts = llm.stats().spec
            assert counts is not None
            lengths.append(counts.since(before).mean_acceptance_length)
            before = counts
        return made, lengths

    expected, often = drafted(
        LLM(str(demo_path(model)), device="cpu", use_tqdm=False, speculative_config=drafts, **how)
    )
    assert min(often) > 2
    for eager in (False, True):
        with counted_graphs() as graphs:
            llm = device_llm(demo_path(model), enforce_eager=eager, speculative_config=drafts, **how)
            made, found = drafted(llm)
        assert any(key.drafts == 3 for key in graphs.replays) != eager
        assert made == expected
        assert found == pytest.approx(often, rel=0.01)
        assert "compiled after the start" not in caplog.text
        del llm
        collect()


def test_a_backend_in_plain_torch_says_that_it_takes_no_drafts(tmp_path: Path) -> None:
    """It plans from lists of lengths, which the host doesn't know while drafts are under way."""
    MAKERS["qwen3"](tmp_path)
    path = str(next(found.parent for found in tmp_path.rglob("config.json")))
    with pytest.raises(ConfigError, match="'torch_ref'.* doesn't take rows with drafts on a GPU"):
        LLM(path, **{**DEFAULTS, "dtype": "float32", "attention_backend": "torch_ref"}, **drafting(3))


def greedy(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    """24 tokens of each, with the two best ones' log-probabilities."""
    params = SamplingParams(temperature=0, seed=1, max_tokens=24, ignore_eos=True, detokenize=False, logprobs=2)
    found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    assert [output.error for output in found] == [None] * len(prompts)
    return found


def differing(found: list[Any], expected: list[Any], tie: float) -> int:
    """In how many texts tokens differ, where the best two are nearer than `tie`; log-probabilities before are the same up to it."""
    ties = 0
    for one, other in zip(found, expected, strict=True):
        got, want = one.outputs[0], other.outputs[0]
        pairs = list(zip(got.token_ids, want.token_ids, strict=True))
        same = next((at for at, (first, second) in enumerate(pairs) if first != second), len(pairs))
        for at in range(same):
            token = want.token_ids[at]
            assert got.logprobs[at][token].logprob == pytest.approx(want.logprobs[at][token].logprob, abs=tie)
        if same < len(pairs):
            best, second = sorted((entry.logprob for entry in want.logprobs[same].values()), reverse=True)[:2]
            assert best - second < tie, f"token {same} of {pairs} leads by {best - second:.2g}"
            ties += 1
    return ties


@pytest.mark.parametrize("pages", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3_next_dense", "bamba"])
def test_recurrent_states_with_drafts_give_the_tokens_of_those_without(
    family: str, pages: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1, 8 and 64 rows, and of second turns that go on from states that were saved among drafts.

    Prompts are computed whole, as a state of bfloat16 is rounded wherever a step ends.
    """
    path = make_hybrid_checkpoint(tmp_path, family)[0]
    rng = random.Random(5)
    turns = [[[rng.randrange(4, 400) for _ in range(48 + row % 14)] for row in range(rows)] for rows in (1, 8, 64)]
    how = {
        **DEFAULTS, "dtype": "float32", "kv_cache_dtype": pages, "max_num_seqs": 64, "max_num_batched_tokens": 4096, "kv_cache_memory_bytes": 2**26,
    }  # fmt: skip
    plain = device_llm(path, **how)
    expected = [greedy(plain, prompts) for prompts in turns]
    for first in expected[1:]:
        turns.append([[*one.prompt_token_ids, *one.outputs[0].token_ids, 7, 8, 9] for one in first])
        expected.append(greedy(plain, turns[-1]))
    known = {
        (*one.prompt_token_ids, 1): [*one.prompt_token_ids, *one.outputs[0].token_ids]
        for run in expected
        for one in run
    }
    del plain
    tie, ties = {"float32": 2e-4, "bfloat16": 4e-2}[pages], 0
    for count in (1, 3, 7):
        plant(monkeypatch, known, 0.7)
        with counted_graphs() as graphs:
            llm = device_llm(path, **how, **drafting(count))
            found = [greedy(llm, prompts) for prompts in turns]
        for got, want in zip(found, expected, strict=True):
            ties += differing(got, want, tie)
        assert any(key.drafts == count for key in graphs.replays), "steps with drafts ran in graphs"
        counts = llm.stats().spec
        assert counts is not None and counts.num_accepted_tokens > 500
        assert {one.num_cached_tokens for one in found[-1]} == {64}, "each goes on from a state saved among drafts"
        del llm
    if ties:
        warnings.warn(f"{family}, {pages}: {ties} texts go on otherwise after a tie", stacklevel=1)
    assert ties <= {"float32": 2, "bfloat16": 12}[pages]
