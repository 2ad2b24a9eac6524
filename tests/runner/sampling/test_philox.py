"""Philox4x32-10 against the known-answer vectors published with Random123, and the uniforms made of it."""

from __future__ import annotations

import pytest
import torch

from pagerunner.ops.philox import philox4x32, uniforms

# counter, key, result: the philox4x32 10 lines of Random123's kat_vectors.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


PINNED = [0.39904647231489565, 0.736633023410186, 0.3738243833635677, 0.4311373818027474, 0.9065935833749511]


def words(text: str) -> list[torch.Tensor]:
    return [torch.tensor([int(word, 16)]) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, result: str) -> None:
    got = philox4x32(tuple(words(counter)), tuple(words(key)))
    assert [f"{int(word):08x}" for word in got] == result.split()


def test_uniform_uses_the_published_words() -> None:
    first, second = 0x6627E8D5, 0xE169C58D
    expected = ((first >> 5) * 2**26 + (second >> 6)) / 2**53
    assert uniforms(torch.tensor([0]), torch.tensor([0])).item() == expected


def test_uniforms_are_these_in_every_version() -> None:
    """A seed gives the same numbers for ever: Philox4x32-10 of (position, 0) under the key seed, 53 bits of it."""
    seeds, positions = torch.tensor([0, 7, 7, -1, 2**62]), torch.tensor([0, 100, 101, 5, 2**33])
    assert uniforms(seeds, positions).tolist() == PINNED


def test_uniforms_are_in_range_even_and_independent_of_neighbours() -> None:
    seeds = torch.arange(-200, 200)[:, None]
    values = uniforms(seeds, torch.arange(100)[None, :])
    assert values.min() >= 0 and values.max() < 1
    counts = torch.histc(values.float().flatten(), bins=50, min=0, max=1)
    expected = values.numel() / 50
    assert ((counts - expected) ** 2 / expected).sum() < 49 + 5 * (2 * 49) ** 0.5
    for a, b in ((values[:, :-1], values[:, 1:]), (values[:-1], values[1:])):
        assert abs(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]) < 0.02


def test_all_64_bits_of_seed_and_position_count() -> None:
    seeds = torch.tensor([0, 1, 2**32, -1, 2**62])
    positions = torch.tensor([0, 1, 2**32])
    assert len(set(uniforms(seeds[:, None], positions[None, :]).flatten().tolist())) == 15
