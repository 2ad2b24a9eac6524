"""Kernels of drafts, on the device."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.test_drafts import DEFAULTS, outputs, texts, tokens
from helpers.draft_cases import check_accept, check_ngrams
from helpers.families import MAKERS
from helpers.planted_drafts import drafting, plant
from pagerunner import LLM
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
