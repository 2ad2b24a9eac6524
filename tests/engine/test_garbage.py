"""Rarer garbage collections while an engine runs, and none of that left behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.checkpoints import make_checkpoint
from pagerunner import LLM, SamplingParams
from pagerunner.engine.core import garbage
from pagerunner.engine.core.garbage import OLD, YOUNG, seldom_collected, set_apart
from pagerunner.types import RequestUpdate

USUAL = (700, 10, 10)


@pytest.fixture(autouse=True)
def usual_thresholds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And nobody else in this process, such as another test's server, who wants others."""
    monkeypatch.setattr(garbage, "_seldom", garbage._Seldom())
    before = gc.get_threshold()
    gc.set_threshold(*USUAL)
    yield
    gc.set_threshold(*before)
    if not gc.get_freeze_count():  # what tests/conftest.py has set apart
        gc.collect()
        gc.freeze()


class Knot:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.knot = self


def test_collections_are_rarer_inside_and_as_before_afterwards() -> None:
    with seldom_collected():
        assert gc.get_threshold() == (YOUNG, 10, OLD)
        assert gc.isenabled()
    assert gc.get_threshold() == USUAL


def test_the_last_of_several_restores_the_thresholds() -> None:
    first, second = seldom_collected(), seldom_collected()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)  # threads end in any order
    assert gc.get_threshold() == (YOUNG, 10, OLD)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == USUAL


def test_an_error_restores_the_thresholds() -> None:
    with pytest.raises(KeyError), seldom_collected():
        raise KeyError
    assert gc.get_threshold() == USUAL


@pytest.mark.parametrize("own", [(0, 10, 10), (50_000, 20, 500)])
def test_what_a_process_has_chosen_is_respected(own: tuple[int, int, int]) -> None:
    gc.set_threshold(*own)
    with seldom_collected():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own


def test_a_choice_made_inside_stays() -> None:
    with seldom_collected():
        gc.set_threshold(5_000, 5, 5)
    assert gc.get_threshold() == (5_000, 5, 5)


def test_what_is_set_apart_is_passed_over_until_the_end() -> None:
    knot = Knot()
    old = weakref.ref(knot)
    with set_apart():
        del knot
        new = weakref.ref(Knot())
        gc.collect()
        assert old() is not None
        assert new() is None
    gc.collect()
    assert old() is None
    assert gc.get_freeze_count() == 0


def test_garbage_is_collected_before_anything_is_set_apart() -> None:
    old = weakref.ref(Knot())
    with set_apart():
        assert old() is None


def test_generating_collects_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(make_checkpoint(tmp_path, "qwen3")), max_model_len=64)
    step, seen = llm._core.step, []

    def watched() -> list[RequestUpdate]:
        seen.append(gc.get_threshold())
        return step()

    monkeypatch.setattr(llm._core, "step", watched)
    llm.generate({"prompt_token_ids": [5, 6]}, SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert set(seen) == {(YOUNG, 10, OLD)}
    assert gc.get_threshold() == USUAL


def test_what_was_made_before_is_passed_over_inside_and_collected_afterwards() -> None:
    gc.unfreeze()
    gc.disable()
    try:
        old = weakref.ref(Knot())
        with seldom_collected():
            new = weakref.ref(Knot())
            gc.collect()
            assert old() is not None and new() is None, "garbage of inside is collected"
        assert not gc.get_freeze_count()
        gc.collect()
        assert old() is None
    finally:
        gc.enable()


def test_what_the_users_program_has_set_apart_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a million objects each count takes 0.1 s, and a call of `generate` may be as short."""
    gc.freeze()
    count, counts = gc.get_freeze_count, list[int]()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counts.append(count()) or counts[-1])
    for _ in range(3):
        with seldom_collected():
            pass
    assert len(counts) == 1 and counts[0]


def test_what_the_users_program_has_set_apart_stays_so() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    with seldom_collected():
        pass
    assert gc.get_freeze_count() > count - 1000, "some of it may be freed"
