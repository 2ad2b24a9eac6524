"""Faults of one place that speculation is prone to, planted: the comparison with and without drafts notices each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.test_drafts import DEFAULTS, outputs, texts, tokens
from helpers.families import MAKERS
from helpers.planted_drafts import PlantedDrafter, drafting, plant
from pagerunner import LLM
from pagerunner.errors import EngineDeadError
from pagerunner.ops.accept import accept
from pagerunner.runner import runner as runner_module
from pagerunner.runner.builder import BatchBuilder
from pagerunner.runner.sampling import sampler as sampler_module
from pagerunner.runner.staging import StagedStep


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, list[Any]]]:
    """By family: a checkpoint, and what it says without drafts."""
    made: dict[str, tuple[str, list[Any]]] = {}

    def of(family: str) -> tuple[str, list[Any]]:
        if family not in made:
            directory: Path = tmp_path_factory.mktemp(family)
            MAKERS[family](directory)
            path = str(next(found.parent for found in directory.rglob("config.json")))
            made[family] = path, outputs(LLM(path, **DEFAULTS))
        return made[family]

    return of


def differs(without: Callable[[str], tuple[str, list[Any]]], patched: pytest.MonkeyPatch, family: str) -> bool:
    path, expected = without(family)
    plant(patched, texts(expected), 0.6)
    patched.setattr(PlantedDrafter, "checks", False)
    try:
        return tokens(outputs(LLM(path, **DEFAULTS, **drafting(3)))) != tokens(expected)
    except (AssertionError, EngineDeadError):  # a request has met NaN in a page that nobody wrote
        return True


def _takes_the_first_wrong_draft(targets: torch.Tensor, slots: torch.Tensor, *more: Any) -> torch.Tensor:
    state = more[2]
    wrong = targets.clone()
    wrong[:, 0] = state.drafts[slots][:, 0].clamp(min=0)
    return accept(wrong, slots, *more)


def _goes_on_from_the_token_before(targets: torch.Tensor, slots: torch.Tensor, *more: Any) -> torch.Tensor:
    found, state = accept(targets, slots, *more), more[2]
    before = found.gather(1, (found >= 0).sum(1, keepdim=True).sub(2).clamp(min=0)).squeeze(1)
    state.tokens.index_copy_(0, slots % len(state.tokens), before)
    return found


def _is_one_place_further(targets: torch.Tensor, slots: torch.Tensor, *more: Any) -> torch.Tensor:
    found = accept(targets, slots, *more)
    more[2].lengths[slots % len(more[2].lengths)] += 1
    return found


def _is_one_place_back(targets: torch.Tensor, slots: torch.Tensor, *more: Any) -> torch.Tensor:
    found = accept(targets, slots, *more)
    more[2].lengths[slots % len(more[2].lengths)] -= 1
    return found


def _forgets_what_was_accepted(targets: torch.Tensor, slots: torch.Tensor, *more: Any) -> torch.Tensor:
    found = accept(targets, slots, *more)
    more[2].accepted.zero_()
    return found


def test_without_a_fault_nothing_differs(without: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not differs(without, monkeypatch, "qwen3")
    assert not differs(without, monkeypatch, "qwen3_next")


@pytest.mark.parametrize(
    ("fault", "family"),
    [
        (_takes_the_first_wrong_draft, "qwen3"),
        (_goes_on_from_the_token_before, "qwen3"),
        (_is_one_place_further, "qwen3"),
        (_is_one_place_back, "qwen3"),
        (_forgets_what_was_accepted, "qwen3_next"),
    ],
)
def test_a_fault_of_acceptance_is_noticed(
    without: Any, monkeypatch: pytest.MonkeyPatch, fault: Any, family: str
) -> None:
    monkeypatch.setattr(runner_module, "accept", fault)
    assert differs(without, monkeypatch, family)


def test_random_numbers_of_the_place_beside_are_noticed(without: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = BatchBuilder.sampled_positions

    def wrong(self: BatchBuilder, step: StagedStep) -> torch.Tensor:
        positions = right(self, step)
        return positions if step.width == 1 else positions - torch.arange(len(positions)) % step.width

    monkeypatch.setattr(BatchBuilder, "sampled_positions", wrong)
    assert differs(without, monkeypatch, "qwen3")


def test_penalties_that_forget_the_drafts_before_a_place_are_noticed(
    without: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = sampler_module.penalized
    monkeypatch.setattr(sampler_module, "penalized", lambda *given: right(*given[:4]))
    assert differs(without, monkeypatch, "qwen3")


def test_penalties_that_count_drafts_that_were_wrong_are_noticed(without: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = sampler_module.Sampler._remember

    def wrong(self: Any, layout: Any, found_S: torch.Tensor, width: int) -> None:
        right(self, layout, torch.where(found_S < 0, 7, found_S), width)

    monkeypatch.setattr(sampler_module.Sampler, "_remember", wrong)
    assert differs(without, monkeypatch, "qwen3")
