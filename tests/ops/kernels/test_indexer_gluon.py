"""The kernel of `kernels/latent/indexer_gluon.py` run as Python: scores of rows of one token. `tests/gpu` runs it on a card."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.gluon_programs import Launched
from helpers.indexer_cases import Case, made
from pagerunner.ops import fp8
from pagerunner.ops.indexer import choose_slots
from pagerunner.ops.kernels.latent import indexer, indexer_gluon, indexer_one

ROWS = ((2000, 1), (0, 1), (18, 1), (700, 1), (19, 1), (1663, 1))  # around top_k, and one tile to six of a part


def launched(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, few: bool, **known: Any) -> Launched:
    codes = {"quantise": lambda x, scale, most, kind: (x / scale.where(scale > 0, 1)).to(kind)}
    codes["fitting_scale"] = lambda largest, most: fp8.fitting_scale(largest, dtype)
    found = Launched(indexer_gluon, "scores_kernel", _copied=lambda item: None, _sums=lambda *_: None, **codes, **known)
    monkeypatch.setattr(indexer_one, "_gluon", lambda: SimpleNamespace(scores_kernel=found))
    monkeypatch.setattr(indexer_one, "has_gluon", lambda device: True)
    monkeypatch.setattr(indexer_one, "fp8_type", lambda kind: kind if kind == torch.float8_e4m3fn else None)
    monkeypatch.setattr(indexer, "takes_few", lambda *_: few)
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("heads", [64, 5])
@pytest.mark.parametrize("few", [False, True])
def test_scores(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, heads: int, few: bool) -> None:
    """What is chosen by them is what the twin chooses, by a launch of its own or by the program that ends last. A second layer has what the first one has left."""
    found = launched(monkeypatch, dtype, few)
    (q, *args), named = made(Case(ROWS, dtype=dtype, padding=2, size=128, heads=heads, slots=16))
    q = q.to(torch.float16)
    for _ in range(2):
        assert torch.equal(choose_slots.kernel(q, *args, **named), choose_slots.twin(q, *args, **named))
    assert found.programs


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("programs", [4, 132])
def test_keys_of_this_step_are_read_when_they_have_been_stored(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, few: bool, programs: int
) -> None:
    """The launch before stores them. A program begins with older ones, and waits before it lets the next launch start."""
    case = Case(ROWS, dtype=dtype, padding=2, size=128, heads=5, slots=16)
    (q, weights, top_k, keys, table, rows, *args), named = made(case)
    own = table[rows.slots_R[:6].long()], torch.tensor([past for past, _ in ROWS])
    new = own[0].gather(1, own[1][:, None] // 16).squeeze(1), own[1] % 16
    read = named["scales_ES"] if dtype.itemsize == 1 else keys
    stored = read[new].clone()

    def show(PDL: bool) -> None:
        read[new] = stored

    def hide(PDL: bool) -> None:
        assert torch.equal(read[new], stored), "the next launch may start before this step's keys have been stored"
        read[new] = float("nan")

    monkeypatch.setattr(indexer, "multiprocessors", lambda device: programs)
    found = launched(monkeypatch, dtype, few, wait_turn=show, start_next=hide)
    given = q.to(torch.float16), weights, top_k, keys, table, rows, *args
    want = choose_slots.twin(*given, **named)
    read[new] = float("nan")
    assert torch.equal(choose_slots.kernel(*given, **named, beside=True), want)
    assert found.programs >= 8
