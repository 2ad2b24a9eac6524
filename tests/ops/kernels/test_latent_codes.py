"""The kernel of `kernels/latent/latent_codes_gluon.py` run as Python, its groups of warps as threads. `tests/gpu` runs it on a card."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from helpers.gluon_groups import Groups
from helpers.sparse_cases import Case, made
from pagerunner.ops.kernels.latent import latent_codes_gluon, latent_decode, latent_wide, sparse_latents
from pagerunner.ops.sparse_latents import chosen_values

SIZES = Case((), top_k=200, heads=5, latent=512, rope=64, value=16, dtype=torch.bfloat16, longest=1100, groups=4)
Rows = tuple[tuple[int, int], ...]
MANY = tuple((length, 1) for length in (2, 70, 129, 9, 300, 63, 64, 4, 500, 0, 1, 1000))
ROWS, DRAFTS = ((300, 1), (5, 1), (63, 1), (64, 1), (500, 1)), ((200, 3), (40, 1), (250, 4))


def pairs_of_codes(words: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Words of two numbers, from words of four codes, first and third, second and fourth: a code's bits are a number that is 2^120 times too small."""
    codes = words.contiguous().view(torch.float8_e4m3fn).unflatten(-1, (-1, 4)).double() * 2.0**-120
    numbers = codes * (factors & 0xFFFF).to(torch.int16).view(torch.bfloat16).unsqueeze(-1)
    return mixed(numbers.bfloat16()).view(torch.int32).unbind(-1)


def mixed(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.unflatten(-1, (-1, 2, 2)).transpose(-1, -2).flatten(-3)


def twice(factors: torch.Tensor) -> torch.Tensor:
    bits = (factors * 2.0**60).bfloat16().view(torch.int16).int() & 0xFFFF
    return bits | (bits << 16)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Groups:
    found = Groups(latent_codes_gluon, "codes_kernel", pairs_of_codes=pairs_of_codes, mixed=mixed, _twice=twice)
    monkeypatch.setattr(
        latent_wide, "_codes", lambda: SimpleNamespace(codes_kernel=found, ADDERS=latent_codes_gluon.ADDERS)
    )
    monkeypatch.setattr(latent_wide, "has_gluon", lambda device: True)
    few = latent_decode.ValuesConfig(
        16, 2, 2, 4
    )  # the interpreter has no products of bfloat16, which more tokens would take
    monkeypatch.setattr(latent_decode, "values_config", lambda *_: few)
    return found


@pytest.mark.parametrize(
    ("slices", "heads", "rows", "stride", "size"),
    [
        (3, 5, ROWS, 0, 1.0),
        (2, 5, MANY, 0, 1.0),
        (3, 5, MANY, 0, 1.0),
        (20, 16, ROWS, 0, 2.0**-12),
        (7, 5, DRAFTS, 4, 2.0**10),
    ],
)
def test_chosen_slots(
    monkeypatch: pytest.MonkeyPatch, launched: Groups, slices: int, heads: int, rows: Rows, stride: int, size: float
) -> None:
    """A unit is a token, with drafts too. Scales that are much less or more than 1 are no matter."""
    monkeypatch.setattr(latent_wide, "slice_count", lambda *_: slices)
    case = replace(SIZES, rows=rows, heads=heads, stride=stride, padding=1 if stride else 2, size=size)
    q_THC, *given = made(case)
    q_THC = (q_THC / size).to(q_THC.dtype)
    want, found = chosen_values.twin(q_THC, *given), sparse_latents.chosen_values(q_THC, *given)
    assert launched.programs == slices
    assert (found - want).abs().max() < 0.02 * want.abs().max()


def test_slots_whose_parts_lie_elsewhere_go_by_the_other_kernel(launched: Groups) -> None:
    """A slot is found once for all its parts."""
    q_THC, q_THP, held, *_ = made(replace(SIZES, rows=ROWS))
    assert latent_wide.serves(q_THC, q_THP, held)
    assert not latent_wide.serves(q_THC, q_THP, held._replace(rope_ESP=held.rope_ESP.clone()))
    assert not latent_wide.serves(q_THC, q_THP, held._replace(scales_ESG=held.scales_ESG.clone()))
