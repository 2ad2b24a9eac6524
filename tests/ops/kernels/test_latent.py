"""The kernels of latent attention in Triton's interpreter, under the backend that calls them."""

from __future__ import annotations

import pytest
import torch

from helpers.latent_cases import Case, RowCase, run
from pagerunner.attention import paged_mla
from pagerunner.attention.paged_mla import PagedLatentBackend

pytest.importorskip("triton")
ROWS = (RowCase(37, 1), RowCase(0, 9), RowCase(20, 5, 1), RowCase(200, 1))


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("store_latent_", "latent_attention", "expanded_attention"):
        monkeypatch.setattr(paged_mla, name, getattr(paged_mla, name).kernel)


# Each value, and each of heads and dtypes in a graph and outside; tests/gpu has the cross product.
@pytest.mark.parametrize(
    ("dtype", "heads", "in_graph"),
    [(torch.float32, 3, False), (torch.float32, 20, True), (torch.float16, 3, True), (torch.float16, 20, False)],
)
def test_queries_in_the_latent_space(dtype: torch.dtype, heads: int, in_graph: bool) -> None:
    case = Case(ROWS, heads=heads, gap=4, dtype=dtype, compute=torch.float32, in_graph=in_graph, padding=2 * in_graph)
    got, want = run(case, PagedLatentBackend())
    torch.testing.assert_close(got, want, atol=5e-5, rtol=5e-5)


def test_keys_are_split_over_programs() -> None:
    case = Case((RowCase(300, 1), RowCase(5, 1), RowCase(140, 1)), in_graph=True, padding=1)
    got, want = run(case, PagedLatentBackend())
    torch.testing.assert_close(got, want, atol=5e-5, rtol=5e-5)


def test_half_precision() -> None:
    got, want = run(Case(ROWS, dtype=torch.float16, compute=torch.float16), PagedLatentBackend())
    assert (got - want).norm() < 2e-3 * want.norm()


@pytest.mark.parametrize("limit", [2**25, 22 * 30])
def test_expanded_keys(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(paged_mla, "MAX_EXPANDED_ELEMENTS", limit)
    monkeypatch.setattr(paged_mla, "MAX_SHORT_QUERIES", 4)
    case = Case((RowCase(40, 37), RowCase(3, 1), RowCase(0, 5), RowCase(0, 40)), page_tokens=3)
    got, want = run(case, PagedLatentBackend())
    torch.testing.assert_close(got, want, atol=5e-5, rtol=5e-5)
