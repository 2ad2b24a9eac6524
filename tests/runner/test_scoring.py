"""Prompts are scored by the steps that compute them, over any number of steps, and no longer."""

from __future__ import annotations

import pytest
import torch

from pagerunner.runner.scoring import PromptScorer
from pagerunner.runner.staging import Staging
from pagerunner.types import EngineRequest, SamplingParams, SlotInit, StepRow

V = 50


def scored(prompt: list[int], slot: int = 3, output: list[int] | None = None) -> PromptScorer:
    params = SamplingParams(prompt_logprobs=3)
    scorer = PromptScorer()
    request = EngineRequest(request_id="r", prompt_token_ids=prompt, params=params, seed=0, max_tokens=9)
    scorer.init_slot(SlotInit(slot, request, output or []))
    return scorer


def test_every_token_but_the_first_is_scored_once() -> None:
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(V, (700,), generator=generator).tolist()
    hidden = torch.randn(700, V, generator=generator) * 2
    scorer, staging, found = scored(prompt), Staging("cpu", 2), []
    for start, count in ((0, 600), (600, 1), (601, 99)):
        rows = [StepRow(1, 40, 1, [], True), StepRow(3, start, count, prompt[start : start + count], start > 600)]
        step = staging.stage(rows, {}, [], [])
        assert scorer.rows(step) == [1]
        states = torch.cat((torch.zeros(1, V), hidden[start : start + count]))
        found += scorer.score(states, step, [1], lambda rows: rows)[1].read()
    step = staging.stage([StepRow(3, 700, 1, [], True)], {}, [], [])
    assert scorer.rows(step) == [] and len(found) == 699
    expected = torch.log_softmax(hidden.double(), dim=-1)
    for place in (0, 255, 256, 599, 600, 698):
        order, token = expected[place].argsort(descending=True).tolist(), prompt[place + 1]
        assert (found[place].token_id, found[place].rank) == (token, order.index(token) + 1)
        assert found[place].top_ids == order[:3]
        assert found[place].logprob == pytest.approx(expected[place, token].item(), abs=1e-5)


def test_prompts_without_a_token_to_score_and_requests_that_come_back() -> None:
    staging = Staging("cpu", 2)
    one = staging.stage([StepRow(3, 0, 1, [7], True)], {}, [], [])
    assert scored([7]).rows(one) == [] and not scored([7])._requests, "or every step would look for it"
    assert scored([7, 8]).rows(one) == [0]
    assert scored([7, 8], output=[9]).rows(one) == [], "its prompt was scored before it generated"
