"""The digest of weights: every byte counts."""

from __future__ import annotations

import pytest
import torch

from pagerunner.models.checkpoint import digest


def of(tensors: dict[str, torch.Tensor]) -> str:
    return digest.weights_digest(tensors.items())


@pytest.fixture
def model(monkeypatch) -> dict[str, torch.Tensor]:
    monkeypatch.setattr(digest, "_WORDS", 64)
    torch.manual_seed(1)
    return {
        "large": torch.randn(100, 31).bfloat16(),
        "scales": torch.randint(256, (31,), dtype=torch.uint8),
        "norm": torch.ones(64),
    }


def test_every_bit_counts(model):
    before = of(model)
    assert before == of(model) and len(before) == 32
    found = {before}
    for tensor in model.values():
        raw = tensor.view(-1).view(torch.uint8)
        for place in (0, 1, len(raw) // 2, len(raw) - 2, len(raw) - 1):
            for bit in (1, 128):
                raw[place] ^= bit
                found.add(of(model))
                raw[place] ^= bit
    assert len(found) == 1 + 3 * 5 * 2
    assert of(model) == before


def test_changes_that_add_up_to_nothing_count(model):
    """Two signs turned, two numbers exchanged, all numbers of a row moved by one place: sums without random factors wouldn't show these."""
    before = of(model)
    large = model["large"]
    kept = large.clone()
    for change in (
        lambda: large.__setitem__((0, [3, 7]), -large[0, [3, 7]]),
        lambda: large.__setitem__((0, [3, 8]), large[0, [8, 3]]),
        lambda: large.__setitem__(slice(None), large.roll(1, 0)),
    ):
        change()
        assert of(model) != before
        large.copy_(kept)


def test_names_dtypes_and_shapes_count(model):
    large = model["large"]
    others = [
        model,
        {"other": large},
        {"large": large.view(torch.int16)},
        {"large": large.view(31, 100)},
        {"large": large},
    ]
    assert len({of(one) for one in others}) == len(others)


def test_the_digest_is_the_same_in_every_process():
    """A disk's pages are found again after a restart."""
    assert of({"ones": torch.ones(3, dtype=torch.float32)}) == "24e267b0c427a24bd6e2192fc80d04d9"
