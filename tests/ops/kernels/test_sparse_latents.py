"""Attention over chosen latents: the kernels in Triton's interpreter against their twin."""

from __future__ import annotations

import pytest
import torch

from helpers.interpreter_floats import install
from helpers.sparse_cases import Case, made
from pagerunner.ops.sparse_latents import chosen_values

pytest.importorskip("triton")
install()
from pagerunner.ops.kernels import sparse_latents  # noqa: E402

ROWS = ((150, 1), (0, 1), (38, 1), (39, 1), (40, 1), (63, 1))  # around top_k


def check(case: Case, tolerance: float = 5e-5) -> None:
    for _ in range(2):
        given = made(case)
        want = chosen_values.twin(*given)
        found = chosen_values.kernel(*given)
        torch.testing.assert_close(found, want, atol=tolerance, rtol=tolerance)
        assert torch.equal(chosen_values.kernel(*given), found), "layers of a step share the parts' places"


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("heads", [3, 20])
def test_rows_of_one_token(monkeypatch: pytest.MonkeyPatch, splits: int, heads: int) -> None:
    """A token's slots are in one part or in several, of which some are empty; so are those of padding."""
    monkeypatch.setattr(sparse_latents, "split_count", lambda *_: splits)
    check(Case(ROWS, heads=heads, padding=2))


def test_half_precision() -> None:
    """Tiles as a card has them."""
    check(Case(((150, 1), (20, 2)), heads=20, top_k=100, dtype=torch.float16), 4e-3)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_latents_in_fp8(groups: int, dtype: torch.dtype) -> None:
    check(Case(ROWS, latent=32, groups=groups, dtype=dtype), 5e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("stride", [2, 4])
def test_rows_with_drafts(stride: int) -> None:
    check(Case(((7, 1), (31, 2), (62, 1), (0, 2)), stride=stride, padding=1, longest=200))


def test_prompts() -> None:
    check(Case(((30, 9), (0, 3), (61, 2), (7, 20))))


def test_parts() -> None:
    """About one program for each multiprocessor, of which the interpreter has 4."""
    tiles, cpu = sparse_latents.Tiles(16, 64, 4, 2, 1), torch.device("cpu")
    assert sparse_latents.split_count(1, 16, 2048, cpu, tiles) == 4
    assert sparse_latents.split_count(1, 64, 2048, cpu, tiles) == 1
    assert sparse_latents.split_count(1, 16, 100, cpu, tiles) == 1
    assert sparse_latents.split_count(3, 16, 2048, cpu, tiles._replace(programs=2)) == 2
