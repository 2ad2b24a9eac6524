"""Suffix decoding's drafts: those of a model that reads all texts, and the same in C."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.effort import effort
from pagerunner.config import SpeculativeConfig
from pagerunner.ops.native.library import library
from pagerunner.ops.native.suffix import NativeSuffixIndex, new_index
from pagerunner.sched.suffix import LENGTHS, MOST_PLACES, Bounds, SuffixDrafter, SuffixIndex

CONFIG = SpeculativeConfig(method="suffix", num_speculative_tokens=24)
BOUNDS = Bounds(24, 1.0, 0.1)


def begun(drafter: SuffixDrafter, tokens: Sequence[int]) -> SuffixIndex:
    text = drafter.begin(len(tokens))
    text.extend(tokens)
    return text


def model(text: Sequence[int], tail: Sequence[int], most: int, above: float, bounds: Bounds) -> tuple[float, list[int]]:
    """What an index of `text` should say, from the texts alone. `tail` may be the text itself."""
    tokens: list[int] = []
    for least in LENGTHS:
        if min(len(tail), bounds.longest) < least:
            continue
        ends = [
            end
            for end in range(len(text), least - 1, -1)
            if list(text[end - least : end]) == list(tail[-least:]) and -1 not in tail[-least:]
        ]
        ends = [end for end in ends[: MOST_PLACES + 1] if end < len(text)]
        if not ends:
            continue
        found = []
        for end in ends:
            length = 0
            while length < min(end, len(tail), bounds.longest) and text[end - 1 - length] == tail[-1 - length] != -1:
                length += 1
            found.append((length, end))
        found = sorted(found, reverse=True)[:MOST_PLACES]
        for length in sorted({length for length, _ in found}, reverse=True):
            ends = [end for own, end in found if own >= length]
            score, draft, chance = 0.0, list[int](), 1.0
            while len(draft) < min(most, int(bounds.factor * length)):
                votes = Counter(text[end + len(draft)] for end in ends if end + len(draft) < len(text))
                if not votes:
                    break
                token, count = votes.most_common(1)[0]
                chance *= count / len(ends)
                if token == -1 or chance < bounds.least:
                    break
                ends = [end for end in ends if end + len(draft) < len(text) and text[end + len(draft)] == token]
                draft.append(token)
                score += chance
            if score > above:
                above, tokens = score, draft
        break
    return above, tokens


def indexes() -> list[Callable[[int], SuffixIndex]]:
    assert library() is not None, "this machine has a C compiler"
    return [SuffixIndex, new_index()]


@pytest.mark.parametrize("make", indexes())
@settings(max_examples=effort(60, 600), deadline=None)
@given(
    tokens=st.lists(st.integers(0, 4), max_size=60),
    most=st.integers(1, 12),
    bounds=st.builds(Bounds, st.integers(2, 24), st.sampled_from((0.5, 1.0, 3.0)), st.sampled_from((0.0, 0.1, 0.6))),
)
def test_a_text_is_continued_as_it_went_on_before(
    make: Callable[[int], SuffixIndex], tokens: list[int], most: int, bounds: Bounds
) -> None:
    index = make(1 << 12)
    half = len(tokens) // 2
    index.extend(tokens[:half])
    for token in tokens[half:]:
        index.extend([token])
    best, draft = model(tokens, tokens, most, 0.0, bounds)
    assert index.draft(None, most, bounds) == draft
    if make is SuffixIndex:
        assert index.best(index, most, 0.0, bounds) == (best, draft)


@pytest.mark.parametrize("make", indexes())
@settings(max_examples=effort(40, 400), deadline=None)
@given(
    answers=st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=20), max_size=6),
    text=st.lists(st.integers(0, 4), max_size=20),
    kept=st.integers(1, 4),
)
def test_answers_are_looked_up_too_and_the_oldest_are_forgotten(
    make: Callable[[int], SuffixIndex], answers: list[list[int]], text: list[int], kept: int
) -> None:
    config = SpeculativeConfig(method="suffix", num_speculative_tokens=24, suffix_decoding_max_cached_requests=kept)
    drafter = SuffixDrafter(config, make, tokens=1 << 12)
    for answer in answers:
        drafter.keep(answer)
    joined = [token for answer in answers[-kept:] for token in (-1, *answer)]
    own = begun(drafter, text)
    best, tokens = model(text, text, 6, 0.0, BOUNDS)
    assert drafter.draft(own, 6, alone=True) == tokens
    other, others = model(joined, text, 6, best, BOUNDS)
    assert drafter.draft(own, 6) == (others if other > best else tokens)
    assert drafter.draft(own, 0) == []


def phrases(rng: random.Random, count: int) -> list[int]:
    """A text that repeats itself."""
    known = [[rng.randrange(200) for _ in range(rng.randint(3, 30))] for _ in range(8)]
    found: list[int] = []
    while len(found) < count:
        found += rng.choice(known) if rng.random() < 0.7 else [rng.randrange(200)]
    return found[:count]


@pytest.mark.parametrize("make", indexes())
def test_a_ring_forgets_what_it_writes_over(make: Callable[[int], SuffixIndex]) -> None:
    rng = random.Random(3)
    index, text = make(1 << 9), phrases(rng, 2000)
    drafted = 0
    for at in range(0, 2000, 7):
        index.extend(text[at : at + 7])
        known = text[max(at + 7 - (1 << 9), 0) : at + 7]
        draft = index.draft(None, 8, BOUNDS)
        assert draft == model(known, known, 8, 0.0, BOUNDS)[1]
        drafted += len(draft)
    assert drafted > 500


def test_c_says_what_python_says() -> None:
    rng = random.Random(5)
    ours, theirs = (SuffixDrafter(CONFIG, make, tokens=1 << 8) for make in indexes())
    for _ in range(30):
        answer = phrases(rng, rng.randrange(2, 300))
        text = phrases(rng, rng.randrange(100))
        pair = begun(ours, text), begun(theirs, text)
        assert isinstance(pair[1], NativeSuffixIndex)
        for _ in range(20):
            more = phrases(rng, rng.randrange(1, 9))
            for one in pair:
                one.extend(more)
            assert ours.draft(pair[0], 24) == theirs.draft(pair[1], 24)
        ours.keep(answer)
        theirs.keep(answer)
    for drafter in (ours, theirs):
        drafter._answers.end = 2**31 - 200  # as after as many tokens
        drafter.keep(phrases(random.Random(6), 250))
        assert drafter._answers.end < 300
    assert ours.draft(pair[0], 24) == theirs.draft(pair[1], 24)


def test_what_is_drafted() -> None:
    config = SpeculativeConfig(method="suffix", num_speculative_tokens=24, suffix_decoding_min_token_prob=0.5)
    drafter = SuffixDrafter(config)
    text = begun(drafter, [9, 1, 2, 3, 4, 5, 6, 9, 1, 2, 3, 4, 5, 7, 9, 1, 2, 3, 4, 5, 6, 8, 1, 2, 3, 4])
    assert drafter.draft(text, 8) == [5, 6], "5 has always followed, 6 in two of three times, 8 and 9 once"
    assert drafter.draft(text, 1) == [5]
    salted = begun(drafter, [50, 51, 52])
    drafter.keep([50, 51, 52, 53, 54, 55])
    assert drafter.draft(salted, 8) == [53, 54, 55] and drafter.draft(salted, 8, alone=True) == []
    assert text.num_bytes == 256 * 40 and not text.is_full
    longer = begun(drafter, range(1_000))
    longer.extend(range(1_048))
    assert longer.num_bytes == 2_048 * 40 and longer.is_full
