"""Drafts from the text itself."""

from __future__ import annotations

import random

import pytest
import torch

from pagerunner.ops.ngram import draft_ngrams


def drafts_of(text: list[int], new: list[int], *, count: int = 3, least: int = 2, most: int = 3) -> list[int]:
    texts, drafts = torch.zeros(1, 64, dtype=torch.int32), torch.full((1, count), -9)
    texts[0, : len(text)] = torch.tensor(text)
    found = torch.tensor([[*new, -1, -2]])
    draft_ngrams(found, torch.tensor([0]), torch.tensor([len(text) - 1]), texts, drafts, count, least, most)
    assert texts[0, : len(text) + len(new)].tolist() == [*text, *new]
    return drafts[0].tolist()


@pytest.mark.parametrize(
    ("text", "new", "wanted"),
    [
        ([1, 2, 3, 4, 5, 1], [2], [3, 4, 5]),
        ([1, 2, 3, 4], [9], [-1, -1, -1]),
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1], [2], [3, 8, 1]),  # 7 1 2 stood before; so did 1 2, later
        ([1, 2, 3, 1, 2, 4, 6, 1], [2], [4, 6, 1]),  # of two the later one
        ([4, 5, 4, 5, 4], [5], [4, 5, 4]),  # a period of two goes on
        ([9, 6, 6, 6], [6], [6, 6, 6]),
        ([3], [3], [-1, -1, -1]),
    ],
)
def test_drafts_follow_the_longest_end_that_stood_before(text: list[int], new: list[int], wanted: list[int]) -> None:
    assert drafts_of(text, new) == wanted


def test_random_texts_have_the_drafts_that_a_search_by_hand_finds() -> None:
    rng = random.Random(4)
    for _ in range(200):
        text = [rng.randrange(3) for _ in range(rng.randint(2, 20))]
        wanted = [-1] * 3
        for length in range(min(4, len(text) - 1), 0, -1):
            ends = [at for at in range(length - 1, len(text) - 1) if text[at - length + 1 : at + 1] == text[-length:]]
            if ends:
                more = list(text)
                for at in range(ends[-1] + 1, ends[-1] + 4):
                    more.append(more[at])
                wanted = more[-3:]
                break
        assert drafts_of(text[:-1], text[-1:], least=1, most=4) == wanted
