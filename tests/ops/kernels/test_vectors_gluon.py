"""The kernel of `kernels/vectors_gluon.py` run as Python: which keys a program reads, and what it makes of them. `tests/gpu` runs it on a card."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

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


def launched(monkeypatch: pytest.MonkeyPatch, parts: int, **known: Any) -> Launched:
    plain = Launched(vectors_gluon, "vectors_kernel", _back=turned, **known)
    monkeypatch.setattr(kernels, "_gluon", lambda: SimpleNamespace(vectors_kernel=plain))
    monkeypatch.setattr(kernels, "has_gluon", lambda device: True)
    monkeypatch.setattr(kernels, "_parts", lambda *_: parts)
    return plain


def given(case: Case) -> tuple[Any, ...]:
    (q, window, *others), _ = inputs(case)
    held = window.pages if case.block else window.pages.contiguous()
    return q, window._replace(pages=held), *others


@pytest.mark.days(4)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_the_twins_results(monkeypatch: pytest.MonkeyPatch, name: str, parts: int) -> None:
    torch.manual_seed(3)
    arguments, plain = given(CASES[name]), launched(monkeypatch, parts)
    want, got = vectors_attention.twin(*arguments), kernels.vectors_attention(*arguments)
    assert plain.programs == arguments[0].shape[0] * parts
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_no_number_stays_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a query whose keys are divided among programs."""
    arguments, plain = given(replace(FULL, rows=((63, 1), (9, 1)), ratio=0)), launched(monkeypatch, 2)
    arguments[0][0] = float("nan")
    got = kernels.vectors_attention(*arguments)
    assert plain.programs == 4 and got[0].isnan().all() and got[1].isfinite().all()


@pytest.mark.parametrize("parts", [1, 3])
def test_what_is_chosen_is_read_in_its_turn(monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    """A kernel that begins early finds other numbers until then: of a row whose window has two tiles or more, and of a short one."""
    case = replace(FULL, rows=((400, 1), (90, 1)), window=150, top_k=60)
    q, window, slots, *others = given(case)
    right = slots.chosen_TK.clone()
    launched(
        monkeypatch,
        parts,
        start_next=lambda PDL: slots.chosen_TK.copy_(torch.where(right >= 0, (right + 7) % 20, right)),
        wait_turn=lambda PDL: slots.chosen_TK.copy_(right),
    )
    want = vectors_attention.twin(q, window, slots, *others)
    got = kernels.vectors_attention(q, window, slots._replace(early=True), *others)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("heads", [16, 32, 80])
def test_a_tile_with_fewer_heads(monkeypatch: pytest.MonkeyPatch, heads: int) -> None:
    """What a rank of several has, and a second block that isn't full."""
    torch.manual_seed(3)
    case = replace(FULL, rows=((200, 1), (3, 1)), heads=heads, top_k=40)
    for parts in (1, 3):
        arguments, plain = given(case), launched(monkeypatch, parts)
        want, got = vectors_attention.twin(*arguments), kernels.vectors_attention(*arguments)
        assert plain.programs == 2 * parts * -(-heads // 64)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("heads", "rows", "by_gluon"), [(32, ((0, 3),), True), (16, ((0, 3),), False), (16, ((5, 1), (9, 1)), True), (16, ((5, 1),) * 3, False)])  # fmt: skip
def test_few_heads_of_many_tokens_go_by_the_other_kernel(
    monkeypatch: pytest.MonkeyPatch, heads: int, rows: Any, by_gluon: bool
) -> None:
    """Prompts, and as many tokens as there are. Kernels that aren't there are asked for and nothing else."""
    monkeypatch.setattr(kernels, "MANY_TOKENS", 3)
    arguments, asked = given(replace(FULL, rows=rows, heads=heads, ratio=0)), []
    launched(monkeypatch, 1)
    for name in ("_launch_gluon", "_attend_kernel"):
        monkeypatch.setattr(kernels, name, Asked(name, asked))
    kernels.vectors_attention(*arguments)
    assert asked == ["_launch_gluon" if by_gluon else "_attend_kernel"]


class Asked(dict):  # type: ignore[type-arg]
    """Notes that it is called, as a function or with a grid."""

    def __init__(self, name: str, asked: list[str]) -> None:
        self.name, self.asked = name, asked

    def __call__(self, *_: Any, **__: Any) -> None:
        self.asked.append(self.name)

    def __getitem__(self, grid: Any) -> Asked:
        return self


def test_what_does_not_fit_goes_by_the_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that begin 8 bytes into a line, few heads, elements of other numbers, float32, and slots in fp8."""
    monkeypatch.setattr(kernels, "has_gluon", lambda device: True)
    (q, window, slots, *_), _ = inputs(FULL)
    assert not kernels.by_gluon(q, window, slots)
    q, window, slots, *_ = given(FULL)
    assert kernels.by_gluon(q, window, slots) and kernels.by_gluon(q, window, None)
    for change in ({"heads": 8}, {"size": 256}, {"dtype": torch.float32}, {"block": 56}):
        q, window, slots, *_ = given(replace(FULL, **change))
        assert not kernels.by_gluon(q, window, slots), change
