"""The kernel of `kernels/vectors_gluon.py` run as Python: which keys a program reads, and what it makes of them. `tests/gpu` runs it on a card."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from helpers.gluon_programs import Launched
from helpers.vectors_cases import Case, inputs
from pagerunner.ops.kernels import vectors_attention as kernels
from pagerunner.ops.kernels import vectors_gluon
from pagerunner.ops.rope import RopeAngles, rope_pairs_
from pagerunner.ops.vectors_attention import vectors_attention

DECODE, PREFILL = ((300, 1), (3, 1), (0, 1), (63, 1), (129, 1)), ((0, 70), (37, 1), (101, 33))
FULL = Case(DECODE, window=20, heads=64, size=512, dtype=torch.bfloat16)
CASES = {
    "decode, chosen": replace(FULL, top_k=40),
    "decode, all": FULL,
    "decode, window": replace(FULL, ratio=0, window=128),
    "prefill, chosen": replace(FULL, rows=PREFILL, top_k=9, padding=2),
    "prefill, heavy": replace(FULL, rows=PREFILL, ratio=32),
    "drafts": replace(FULL, rows=((0, 3), (40, 4), (18, 1)), stride=4, padding=4, top_k=5),
}


def turned(x, cos, sin, D, P):
    own = [part.load().float().expand(len(x), 1, P) for part in (cos + torch.arange(P), sin + torch.arange(P))]
    rope_pairs_(x[:, None, -P:], RopeAngles(own[0].contiguous(), -own[1].contiguous()))
    return x


@pytest.mark.days(4)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_the_twins_results(monkeypatch: pytest.MonkeyPatch, name: str, parts: int) -> None:
    torch.manual_seed(3)
    (q, window, *others), _ = inputs(CASES[name])
    arguments = (q, window._replace(pages=window.pages.contiguous()), *others)
    launched = Launched(vectors_gluon, "vectors_kernel", _back=turned)
    monkeypatch.setattr(kernels, "_gluon", lambda: SimpleNamespace(vectors_kernel=launched))
    monkeypatch.setattr(kernels, "has_gluon", lambda device: True)
    monkeypatch.setattr(kernels, "_parts", lambda *_: parts)
    want, got = vectors_attention.twin(*arguments), kernels.vectors_attention(*arguments)
    assert launched.programs == arguments[0].shape[0] * parts
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_no_number_stays_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a query whose keys are divided among programs."""
    (q, window, *others), _ = inputs(replace(FULL, rows=((63, 1), (9, 1)), ratio=0))
    q[0] = float("nan")
    launched = Launched(vectors_gluon, "vectors_kernel", _back=turned)
    monkeypatch.setattr(kernels, "_gluon", lambda: SimpleNamespace(vectors_kernel=launched))
    monkeypatch.setattr(kernels, "has_gluon", lambda device: True)
    monkeypatch.setattr(kernels, "_parts", lambda *_: 2)
    got = kernels.vectors_attention(q, window._replace(pages=window.pages.contiguous()), *others)
    assert launched.programs == 4 and got[0].isnan().all() and got[1].isfinite().all()


def test_what_does_not_fit_goes_by_the_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that begin 8 bytes into a line, heads or elements of other numbers, float32, and slots in fp8."""
    monkeypatch.setattr(kernels, "has_gluon", lambda device: True)
    (q, window, slots, *_), _ = inputs(FULL)
    assert not kernels.by_gluon(q, window, slots)
    window = window._replace(pages=window.pages.contiguous())
    assert kernels.by_gluon(q, window, slots) and kernels.by_gluon(q, window, None)
    for change in ({"heads": 48}, {"size": 256}, {"dtype": torch.float32}, {"block": 56}):
        (q, window, slots, *_), _ = inputs(replace(FULL, **change))
        own = window if change.get("block") else window._replace(pages=window.pages.contiguous())
        assert not kernels.by_gluon(q, own, slots), change
