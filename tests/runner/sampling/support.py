"""Helpers for the sampler's tests: requests in slots, and plain reference code that shares nothing with the sampler."""

from __future__ import annotations

import math

import torch

from pagerunner.runner.sampling import Sampled, SampledRows, Sampler
from pagerunner.runner.sampling.sampler import Masks
from pagerunner.types import EngineRequest, SamplingParams, SlotInit


def request(
    params: SamplingParams, *, prompt: list[int] | None = None, seed: int = 0, **fields: object
) -> EngineRequest:
    return EngineRequest(
        request_id="r", prompt_token_ids=prompt or [1, 2, 3], params=params, seed=seed, max_tokens=1000, **fields
    )


def fill(
    sampler: Sampler, slot: int, params: SamplingParams, output: list[int] | None = None, **fields: object
) -> None:
    sampler.init_slot(SlotInit(slot, request(params, **fields), output or []))


def write_settings(sampler: Sampler) -> None:
    """What the runner does in the step that admits requests."""
    settings = sampler.new_settings()
    if settings:
        sampler.write_settings(torch.tensor(list(settings.keys())), torch.tensor(list(settings.values())))


def sample(
    sampler: Sampler,
    logits: torch.Tensor,
    slots: list[int],
    positions: list[int],
    masks: Masks | None = None,
) -> Sampled:
    """One step; `positions` are the new tokens'."""
    write_settings(sampler)
    rows = SampledRows(slots, positions, torch.tensor(slots), torch.tensor(positions) - 1)
    return sampler.sample(logits, rows, masks)


def one_sampler(vocab_size: int, *params: SamplingParams, **fields: object) -> Sampler:
    """A sampler whose slot i holds params[i], seeded i."""
    sampler = Sampler(len(params), vocab_size, "cpu")
    for slot, each in enumerate(params):
        fill(sampler, slot, each, **{"seed": slot, **fields})
    return sampler


def draw_many(logits_V: torch.Tensor, params: SamplingParams, rows: int = 500, steps: int = 40) -> torch.Tensor:
    """How often each token comes out of rows * steps draws of different seeds and positions."""
    sampler = one_sampler(len(logits_V), *[params] * rows)
    counts = torch.zeros(len(logits_V), dtype=torch.int64)
    for step in range(steps):
        sampled = sample(sampler, logits_V.repeat(rows, 1), list(range(rows)), [3 + step] * rows)
        assert sampled.errors == {}
        counts += torch.bincount(sampled.token_ids, minlength=len(logits_V))
    return counts


def reference_probabilities(logits: list[float], params: SamplingParams) -> list[float]:
    """Temperature, min-p, top-k and top-p in plain Python floats, one token at a time."""
    weights = {token: math.exp(value / params.temperature) for token, value in enumerate(logits) if value > -math.inf}
    highest = max(weights.values())
    kept = {token: weight for token, weight in weights.items() if weight >= params.min_p * highest}
    if params.top_k:
        kept = dict(sorted(kept.items(), key=lambda item: -item[1])[: params.top_k])
    if params.top_p < 1:
        total, mass, nucleus = sum(kept.values()), 0.0, {}
        for token, weight in sorted(kept.items(), key=lambda item: -item[1]):
            if mass >= params.top_p * total:
                break
            nucleus[token] = weight
            mass += weight
        kept = nucleus
    total = sum(kept.values())
    return [kept.get(token, 0.0) / total for token in range(len(logits))]


def assert_follows(counts: torch.Tensor, expected: list[float]) -> None:
    """Chi-square at about five standard deviations; a token of probability 0 must never come."""
    draws = int(counts.sum())
    statistic, cells, rare_seen, rare_expected = 0.0, 0, 0.0, 0.0
    for seen, probability in zip(counts.tolist(), expected, strict=True):
        if probability == 0.0:
            assert seen == 0, "a token of probability 0 was drawn"
        elif probability * draws < 5:
            rare_seen, rare_expected = rare_seen + seen, rare_expected + probability * draws
        else:
            statistic += (seen - probability * draws) ** 2 / (probability * draws)
            cells += 1
    if rare_expected >= 5:
        statistic += (rare_seen - rare_expected) ** 2 / rare_expected
        cells += 1
    freedom = max(cells - 1, 1)
    assert statistic < freedom + 5 * math.sqrt(2 * freedom), (statistic, freedom)
