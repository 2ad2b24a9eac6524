"""The kernel of `kernels/indexer_gluon.py` run as Python: scores of rows of one token. `tests/gpu` runs it on a card."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from helpers.gluon_programs import Launched
from helpers.indexer_cases import Case, made
from pagerunner.batch import StepRows
from pagerunner.ops import fp8
from pagerunner.ops.indexer import choose_slots
from pagerunner.ops.kernels import indexer, indexer_gluon, indexer_one

ROWS = ((2000, 1), (0, 1), (18, 1), (700, 1), (19, 1), (1663, 1))  # around top_k, and one tile to six of a part


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("heads", [64, 5])
def test_scores(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, heads: int) -> None:
    """What is chosen by them is what the twin chooses."""
    codes = {"quantise": lambda x, scale, most, kind: (x / scale.where(scale > 0, 1)).to(kind)}
    codes["fitting_scale"] = lambda largest, most: fp8.fitting_scale(largest, dtype)
    found = Launched(indexer_gluon, "scores_kernel", _copied=lambda item: None, _sums=lambda *_: None, **codes)
    monkeypatch.setattr(indexer_one, "_gluon", lambda: SimpleNamespace(scores_kernel=found))
    monkeypatch.setattr(indexer_one, "has_gluon", lambda device: True)
    monkeypatch.setattr(indexer_one, "fp8_type", lambda kind: kind if kind == torch.float8_e4m3fn else None)
    monkeypatch.setattr(indexer, "takes_few", lambda *_: False)
    (q, *args), named = made(Case(ROWS, dtype=dtype, padding=2, size=128, heads=heads, slots=16))
    q = q.to(torch.float16)
    assert torch.equal(choose_slots.kernel(q, *args, **named), choose_slots.twin(q, *args, **named))
    assert found.programs


@pytest.mark.parametrize(("tokens", "width", "dtype", "by_gluon", "one"), [
    (64, 4096, torch.float8_e4m3fn, True, False), (33, 2049, torch.float8_e4m3fn, True, False), (32, 4096, torch.float8_e4m3fn, True, True),
    (65, 4096, torch.float8_e4m3fn, True, True), (64, 2048, torch.float8_e4m3fn, True, True), (64, 4096, torch.float8_e4m3fn, False, True),
    (64, 4096, torch.bfloat16, True, True), (64, 4097, torch.bfloat16, True, False),
])  # fmt: skip
def test_scores_of_many_keys_in_fp8_are_a_launch_of_their_own(
    tokens: int, width: int, dtype: torch.dtype, by_gluon: bool, one: bool
) -> None:
    rows = StepRows.of([1] * tokens, [width] * tokens, range(tokens))
    assert indexer.takes_few(rows, tokens, 64, width, dtype, by_gluon) == one
