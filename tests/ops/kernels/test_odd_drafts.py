"""Kernels of steps with drafts at sizes between their tiles, with the tiles that they have on a device: 31 drafts, 65 rows, groups of 5 and of 64 heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.attention_cases import Case, plain
from helpers.drafted_states import compare_drafts, drafted_step, layers
from helpers.effort import by_days
from helpers.interpreter_floats import install
from helpers.latent_cases import Case as LatentCase
from helpers.latent_cases import RowCase, run
from pagerunner.attention import paged_mla
from pagerunner.attention.base import Reach
from pagerunner.attention.paged_mla import PagedLatentBackend

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the interpreter runs on machines without a GPU", allow_module_level=True)
install()

from helpers.paged_kernels import check_drafts, check_projected_drafts  # noqa: E402

E4M3 = torch.float8_e4m3fn
LONGEST = (plain(70, 32),)
MANY = tuple(plain(i % 40, 1 + i % 2) for i in range(65))
SIZES = [
    (LONGEST, 32, {"group": 5, "head_dim": 80, "page_tokens": 3}),
    (LONGEST, 32, {"group": 16, "head_dim": 64, "page_tokens": 16, "reach": Reach(20)}),
    (MANY, 2, {"group": 1, "head_dim": 96, "page_tokens": 4}),
    ((plain(20, 9), plain(0, 1)), 9, {"group": 64, "head_dim": 64, "page_tokens": 16}),
    ((plain(33, 17), plain(5, 3)), 17, {"group": 1, "head_dim": 256, "page_tokens": 48}),
]


@pytest.mark.days(3)
@pytest.mark.parametrize(("sizes", "kv_dtype"), by_days(SIZES, [torch.float32, E4M3]))
@pytest.mark.parametrize("check", [check_drafts, check_projected_drafts])
def test_attention(check: Any, sizes: tuple[Any, int, dict[str, Any]], kv_dtype: torch.dtype) -> None:
    rows, stride, more = sizes
    rounded = {"rtol": 0.13} if kv_dtype == E4M3 and check is check_projected_drafts else {}
    check(Case(rows, kv_heads=2, kv_dtype=kv_dtype, padding=1, **more), stride, "cpu", **rounded)


@pytest.mark.parametrize(("heads", "dtype"), by_days([1, 5, 20], [torch.float32, E4M3]))
def test_latents(monkeypatch: pytest.MonkeyPatch, heads: int, dtype: torch.dtype) -> None:
    """More tokens of a page than are stored at once."""
    for name in ("store_latent_", "absorb_latent_heads_", "latent_values"):
        monkeypatch.setattr(paged_mla, name, getattr(paged_mla, name).kernel)
    rows = (RowCase(45, 32), RowCase(0, 1), RowCase(3, 20))
    case = LatentCase(rows, page_tokens=64, heads=heads, dtype=dtype, stride=32, padding=1, in_graph=True, raw=True)
    got, want = run(case, PagedLatentBackend())
    torch.testing.assert_close(got, want, atol=5e-5, rtol=5e-5)


@pytest.mark.days(2)
@pytest.mark.parametrize(("rows", "drafts", "strided"), [(1, 31, True), (2, 31, False), (65, 2, True)])
@pytest.mark.parametrize("kind", ["gated delta", "mamba2"])
def test_recurrences(kind: str, rows: int, drafts: int, strided: bool) -> None:
    step = drafted_step(rows, drafts, strided=strided)
    compare_drafts(*layers("float32", 2)[kind], step, torch.float32, "cpu", 2e-4)
