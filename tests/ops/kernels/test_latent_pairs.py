"""The kernel of `kernels/latent/latent_pairs_gluon.py` run as Python, its groups of warps as threads. `tests/gpu` runs it on a card."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.gluon_groups import Described, Groups
from helpers.interpreter_floats import install
from helpers.sparse_cases import Case, made
from pagerunner.ops.kernels.latent import latent_decode, latent_pairs_gluon, latent_wide
from pagerunner.ops.latent_attention import latent_values

install()
SIZES = Case((), top_k=1100, heads=5, latent=512, rope=64, value=16, dtype=torch.bfloat16, longest=1100)
Rows = tuple[tuple[int, int], ...]
ROWS, DRAFTS = ((300, 1), (5, 1), (63, 1), (64, 1), (500, 1)), ((200, 3), (40, 1), (250, 4))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Groups:
    found = Groups(latent_pairs_gluon, "pairs_kernel")

    def describe(tensor, shape, strides, block, layout):
        return Described(tensor, shape, strides, block)

    monkeypatch.setattr(latent_pairs_gluon, "pairs_kernel", found)
    monkeypatch.setattr(latent_pairs_gluon, "TensorDescriptor", describe)
    monkeypatch.setattr(latent_wide, "has_gluon", lambda device: True)
    monkeypatch.setattr(latent_wide, "LEAST_UNITS", 1)
    few = latent_decode.ValuesConfig(
        16, 2, 2, 4
    )  # the interpreter has no products of bfloat16, which more tokens would take
    monkeypatch.setattr(latent_decode, "values_config", lambda *_: few)
    return found


@pytest.mark.parametrize(
    ("slices", "heads", "rows", "stride", "page"),
    [(5, 40, ROWS, 0, 16), (9, 80, ROWS, 0, 128), (3, 64, DRAFTS, 4, 64), (2, 17, ROWS, 0, 32)],
)
def test_rows(
    monkeypatch: pytest.MonkeyPatch, launched: Groups, slices: int, heads: int, rows: Rows, stride: int, page: int
) -> None:
    """Slices of odd and even numbers of tiles. What lies beyond a row is no number."""
    monkeypatch.setattr(latent_wide, "slice_count", lambda *_: slices)
    q_THC, q_THP, held, table, step, _, scale, up, _ = made(
        replace(SIZES, rows=rows, heads=heads, stride=stride, slots=page, padding=1 if stride else 2)
    )
    pages = torch.cat((held.latent_ESC, held.rope_ESP), -1)
    want = latent_values.twin(q_THC, q_THP, pages, table, step, scale, up, {})
    found = latent_decode.latent_values(q_THC, q_THP, pages, table, step, scale, up, {})
    assert launched.programs == slices * -(-heads * max(stride, 1) // 64)
    there = step.row_T >= 0
    assert (found - want)[there].abs().max() < 0.02 * want[there].abs().max()


def test_what_it_serves() -> None:
    """Pages of 16, 32 or whole tiles, not of codes; more than 16 queries; drafts only of whole blocks of heads."""
    q_THC, q_THP, held, *_ = made(replace(SIZES, rows=ROWS, heads=40, slots=64))
    assert latent_wide._takes_pairs(q_THC, q_THP, held, 40)
    assert not latent_wide._takes_pairs(q_THC, q_THP, held, 160)
    assert not latent_wide._takes_pairs(q_THC[:, :16], q_THP[:, :16], held, 16)
    q_THC, q_THP, held, *_ = made(replace(SIZES, rows=ROWS, heads=40, slots=8))
    assert not latent_wide._takes_pairs(q_THC, q_THP, held, 40)
    q_THC, q_THP, held, *_ = made(replace(SIZES, rows=ROWS, heads=40, slots=64, groups=4))
    assert not latent_wide._takes_pairs(q_THC, q_THP, held, 40)
