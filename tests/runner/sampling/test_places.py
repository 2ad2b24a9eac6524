"""Rows with drafts get the tokens, one by one, that they get without: whatever they ask for, and whichever drafts are right."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from pagerunner.ops.accept import accept
from pagerunner.ops.batch import SlotState
from pagerunner.runner.sampling import SampledRows, Sampler
from pagerunner.runner.sampling import sampler as sampler_module
from pagerunner.runner.sampling.layout import Layout, build_layout
from pagerunner.types import SamplingParams, TokenLogprobs
from runner.sampling.support import fill, write_settings

V, PROMPT, TOKENS, DRAFTS = 23, [1, 2, 3], 24, 3
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0, "top_p": 0.9, "min_p": 0.01},
    "penalised": {"temperature": 0.7, "presence_penalty": 1.0, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
    "repeated": {"temperature": 0.0, "repetition_penalty": 1.5},
    "biased": {"temperature": 1.0, "logit_bias": {4: 2.0, 5: -3.0}, "allowed_token_ids": [3, 4, 5, 6, 7, 8, 9]},
    "bad words": {"temperature": 0.5},
    "kept going": {"temperature": 1.0, "min_tokens": 9, "stop_token_ids": [4, 5, 6, 7]},
    "reported": {"temperature": 0.5, "logprobs": 3, "presence_penalty": 0.5},
}
BAD_WORDS = (
    *((first, second) for first in range(0, V, 2) for second in range(1, V, 2)),
    *((first, middle, last) for first in range(0, V, 3) for middle in range(V) for last in range(0, V, 4)),
    (7,),
)


def logits_after(text: list[int]) -> torch.Tensor:
    """What a model would say: it depends on the last three tokens, so that texts repeat."""
    return torch.randn(V, generator=torch.Generator().manual_seed(hash(tuple(text[-3:])) % 2**31)) * 2


def sampler_of(names: list[str], num_drafts: int = 0) -> Sampler:
    sampler = Sampler(len(names), V, "cpu", num_drafts=num_drafts)
    for slot, name in enumerate(names):
        more = {"bad_words_ids": BAD_WORDS} if name == "bad words" else {}
        params = SamplingParams(max_tokens=99, ignore_eos=True, **ASKED[name])
        fill(sampler, slot, params, seed=slot, prompt=PROMPT, **more)
    write_settings(sampler)
    return sampler


def test_layouts_of_many_rows_with_drafts_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 rows of 9 places are 36 layouts."""
    slots = list(range(256))
    sampler = sampler_of(["penalised"] * len(slots), num_drafts=8)
    built: list[int] = []

    def build(odd: list[int], *given: Any) -> Layout:
        built.append(len(odd))
        return build_layout(odd, *given)

    monkeypatch.setattr(sampler_module, "build_layout", build)
    width = 9
    places = [slot for slot in slots for _ in range(width)]
    drafts = torch.full((len(slots) + 1, 8), -1)
    rows = SampledRows(
        slots, [3] * 256, torch.tensor(places), torch.tensor([2] * 256 * width), width, [width] * 256, drafts
    )
    for _ in range(3):
        sampler.sample(torch.zeros(256 * width, V), rows)
    assert built == [256] * 9


def one_by_one(names: list[str]) -> list[tuple[list[int], list[TokenLogprobs | None]]]:
    sampler, texts = sampler_of(names), [list(PROMPT) for _ in names]
    reported: list[list[TokenLogprobs | None]] = [[] for _ in names]
    slots = list(range(len(names)))
    for _ in range(TOKENS):
        lengths = [len(text) for text in texts]
        rows = SampledRows(slots, lengths, torch.tensor(slots), torch.tensor(lengths) - 1)
        tokens, logprobs = sampler.sample(torch.stack(list(map(logits_after, texts))), rows).read()
        for text, own, token, logprob in zip(texts, reported, tokens, logprobs, strict=True):
            text.append(token)
            own.append(logprob)
    return [(text[len(PROMPT) :], own) for text, own in zip(texts, reported, strict=True)]


def with_drafts(
    names: list[str], wanted: list[list[int]], right: float, *, again: bool = False
) -> tuple[list[tuple[list[int], list[TokenLogprobs | None]]], int]:
    """Tokens and reports, and how many drafts were taken. `again`: a graph has sampled before."""
    rng, width = random.Random(7), 1 + DRAFTS
    sampler, texts, taken = sampler_of(names, DRAFTS), [list(PROMPT) for _ in names], 0
    state = SlotState.empty(len(names), "cpu", DRAFTS)
    reported: list[list[TokenLogprobs | None]] = [[] for _ in names]
    slots = list(range(len(names)))
    while min(map(len, texts)) < len(PROMPT) + TOKENS:
        logits, own_slots, positions, counts = [], [], [], []
        for slot, text in enumerate(texts):
            has = rng.randint(1, width)
            counts.append(has)
            follows = (wanted[slot] + [0] * 99)[len(text) - len(PROMPT) :]
            drafts = [one if rng.random() < right else (one + 1) % V for one in follows[:DRAFTS]]
            state.drafts[slot] = torch.tensor([-1 if rng.random() < 0.05 else one for one in drafts])
            seen = [max(one, 0) for one in state.drafts[slot].tolist()]
            logits += [logits_after([*text, *seen[:at]]) for at in range(width)]
            own_slots += [slot if at < has else -1 for at in range(width)]
            positions += [len(text) - 1 + at for at in range(width)]
        least = [len(text) - rng.randint(0, 2) for text in texts]  # what the host knows
        rows = SampledRows(slots, least, torch.tensor(own_slots), torch.tensor(positions), width, counts, state.drafts)
        starts = torch.tensor([len(text) - 1 for text in texts])

        def settle(tokens: torch.Tensor, starts: torch.Tensor = starts, has: list[int] = counts) -> torch.Tensor:
            targets = tokens.view(-1, width)
            return accept(targets, torch.tensor(slots), starts, starts + torch.tensor(has), state).view(-1)

        logits_MV, drawn = torch.stack(logits), None
        if again:
            tokens, best = sampler.pick(logits_MV, rows.slots_S, rows.positions_S)
            drawn = (tokens, best, settle(tokens))
        tokens, logprobs = sampler.sample(logits_MV, rows, None, drawn, settle).read()
        for slot, text in enumerate(texts):
            got = [place for place in rows.places(slot) if tokens[place] >= 0]
            taken += len(got) - 1
            text += [tokens[place] for place in got]
            reported[slot] += [logprobs[place] for place in got]
            assert int(state.lengths[slot]) == len(text) - 1 and int(state.tokens[slot]) == text[-1]
    return [(text[len(PROMPT) :], own) for text, own in zip(texts, reported, strict=True)], taken


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_tokens_and_reports_are_those_of_one_token_at_a_time(right: float, again: bool) -> None:
    names = list(ASKED)
    expected = one_by_one(names)
    found, taken = with_drafts(names, [tokens for tokens, _ in expected], right, again=again)
    for name, (tokens, reports), (got, got_reports) in zip(names, expected, found, strict=True):
        assert got[:TOKENS] == tokens, name
        for one, other in zip(reports, got_reports, strict=False):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert (one.token_id, one.rank, one.top_ids) == (other.token_id, other.rank, other.top_ids)
                assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
    assert (taken > 0) == (right > 0)


@pytest.mark.parametrize("name", ["penalised", "bad words"])
def test_what_a_row_asks_for_changes_its_tokens(name: str) -> None:
    """Else the test above would say little."""
    plain = {
        **ASKED[name],
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_tokens": 0,
    }
    expected, _ = one_by_one([name])[0]
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(ASKED, "plain", plain)
        assert one_by_one(["plain"])[0][0] != expected
