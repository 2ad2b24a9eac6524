"""Attention in a fixed order of sums, in Triton's interpreter: right, and the same bits however a sequence is divided into steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from helpers.attention_cases import Case, check_sampled, plain, run
from helpers.interpreter_floats import install
from pagerunner.attention.base import Reach
from pagerunner.attention.paged import PagedBackend, PagedOps
from pagerunner.batch import KVPages, StepRows
from pagerunner.ops.numerics import Fixed
from pagerunner.ops.paged_attention import (
    PagedPlan,
    Scores,
    paged_attention,
    prepare_heads_,
    projected_attention,
    store_kv_,
)

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the interpreter runs on machines without a GPU", allow_module_level=True)
install()

from pagerunner.ops.kernels.paged import paged_fixed  # noqa: E402

ONE = (plain(3, 1), plain(0, 1), plain(70, 1), plain(20, 1))
MIXED = (plain(3, 1), plain(0, 5), plain(40, 9), plain(20, 1), plain(63, 20))


class FixedKernels(PagedBackend):
    """The backend as it is on a CUDA device, in an engine with `batch_invariant`."""

    fixed = True

    def __init__(self) -> None:
        self.ops = PagedOps(*(op.kernel for op in (store_kv_, prepare_heads_, paged_attention, projected_attention)))  # type: ignore[misc]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several pieces, each of two tiles, and tiles of several tokens."""
    monkeypatch.setattr(paged_fixed, "FIXED", Fixed(piece=32, query_rows=16, keys=16, exact_rows=16, exact_keys=16))


CASES = [
    Case(ONE, 4, 2, 3, 8),
    Case(ONE, 3, 1, 1, 6, padding=2, spare_columns=2, sinks=True, softcap=1.5, head_dim_v=20),
    Case(ONE, 4, 1, 2, 8, reach=Reach(6)),
    Case(MIXED, 4, 2, 3, 8, padding=3),
    Case(MIXED, 3, 1, 2, 6, sinks=True, softcap=2.0, head_dim_v=20),
    Case(MIXED, 4, 1, 2, 8, reach=Reach(18)),
    Case((plain(6, 40), *MIXED), 4, 1, 2, 8, reach=Reach(4, chunked=True), kv_dtype=torch.float16),
]


@pytest.mark.days(3)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("splits", [1, 3])
def test_it_is_attention(monkeypatch: pytest.MonkeyPatch, case: Case, splits: int) -> None:
    monkeypatch.setattr(paged_fixed, "multiprocessors", lambda _: splits * 64)
    found, want = run(case, FixedKernels())
    torch.testing.assert_close(found, want, atol=2e-3 if case.kv_dtype == torch.float16 else 1e-5, rtol=1e-4)


def test_wanted_tokens_alone() -> None:
    check_sampled(Case(MIXED, 4, 2, 3, 8), [0, 4, 14, 20], FixedKernels(), atol=0.0, rtol=0.0)


def _attend(
    order: list[tuple[int, int, int]], one_token: bool, splits: int, reach: int, dtype: torch.dtype, dim: int = 16
) -> dict[tuple[int, int], torch.Tensor]:
    """Attention of rows (sequence, first token, tokens) in one step, by sequence and token. All keys of both sequences are in pages.

    A `reach` is a window, with which there are sinks and a softcap, or, negative, a chunk of so many tokens.
    """
    generator = torch.Generator().manual_seed(7)
    length, heads, kv_heads, page = 100, 4, 2, 4
    q, k, v = (torch.randn(2, length, n, dim, generator=generator).to(dtype) for n in (heads, kv_heads, kv_heads))
    pages = KVPages(0, *(x.flatten(0, 1).unflatten(0, (-1, page)) for x in (k, v)))
    table = torch.arange(2 * length // page).view(2, -1)
    rows = StepRows.of(
        [count for _, _, count in order], [first + count for _, first, count in order], [s for s, _, _ in order]
    )
    rows = replace(rows, one_token=one_token)
    places = [(s, first + i) for s, first, count in order for i in range(count)]
    new = [torch.stack([x[s, at] for s, at in places]) for x in (q, k, v)]
    plan = PagedPlan(window=max(reach, 0), chunk=max(-reach, 0), one_token=one_token, fixed=True)
    scores = Scores(0.25, 3.0, torch.tensor([0.5, -1.0, 2.0, 0.0])) if reach > 0 else Scores(0.25)
    dot = paged_fixed.tl.float32 if dtype == torch.float32 else paged_fixed.tl.float16
    out = paged_fixed.attend(*new, pages, table, rows, plan, scores, dot, splits)
    return dict(zip(places, out, strict=True))


@pytest.mark.days(3)
@pytest.mark.parametrize("reach", [0, 21, -24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_step_changes_no_bit(reach: int, dtype: torch.dtype) -> None:
    """Whole prompts; chunks beside another sequence; each token for itself; pieces by one program, and by several."""
    attend: Callable[..., dict[tuple[int, int], torch.Tensor]] = lambda *order, one=False, splits=1: _attend(  # noqa: E731
        list(order), one, splits, reach, dtype
    )
    whole = attend((0, 0, 100), splits=1)
    others = [
        attend((0, 0, 100), splits=3),
        attend((0, 7, 12), (1, 50, 33), splits=2),
        attend((1, 0, 31), (0, 37, 1), (0, 38, 62)),
        attend((0, 99, 1), (1, 12, 1), (0, 64, 1), one=True, splits=4),
        attend((1, 99, 1), (0, 31, 1), (0, 32, 1), one=True),
    ]
    seen = 0
    for step in others:
        for place, out in step.items():
            if place[0] == 0:
                assert torch.equal(out, whole[place]), place
                seen += 1
    assert seen == 100 + 12 + 63 + 2 + 2


def test_pieces_of_every_step_take_the_same_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of the most rows of one token that are divided, so that a start's warm-up takes it. A step for which it is too small isn't divided."""
    kernel, noted = paged_fixed.fixed_kernel, []
    values = kernel.arg_names.index("values_ptr")

    class Noted:
        def __getitem__(self, grid):
            return lambda *given, **how: noted.append((given[values].numel(), grid[1])) or kernel[grid](*given, **how)

    monkeypatch.setattr(paged_fixed, "multiprocessors", lambda _: 8)
    monkeypatch.setattr(paged_fixed, "fixed_kernel", Noted())
    whole = _attend([(0, 0, 100)], False, 1, 0, torch.float16)
    noted.clear()
    most_rows = [(0, 99, 1), (0, 70, 1), (0, 40, 1), (0, 10, 1)]
    for order, one in (
        ([(0, 99, 1)], True),
        (most_rows, True),
        ([(0, 90, 4)], False),
        ([(0, 40, 8)], False),
        ([(0, 88, 12)], False),
    ):
        for place, out in _attend(order, one, 0, 0, torch.float16).items():
            assert torch.equal(out, whole[place]), (order, place)
    room = 4 * 4 * 4 * 16  # rows, heads, pieces of 100 tokens, elements
    assert noted == [(room, 4), (room, 2), (room, 3), (room, 2), (0, 1)]


@pytest.mark.parametrize("dim", [128, 256])
def test_a_program_has_as_many_warps_as_its_tiles_say(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 4 warps, prompts of heads of 256 have no room for both results in registers."""
    kernel, noted = paged_fixed.fixed_kernel, []

    class Noted:
        def __getitem__(self, grid):
            return lambda *given, num_warps, **how: noted.append(num_warps) or kernel[grid](*given, **how)

    monkeypatch.setattr(paged_fixed, "fixed_kernel", Noted())
    _attend([(0, 0, 3)], False, 1, 0, torch.float16, dim)
    assert noted == [paged_fixed.fixed_tiles(2, 2 * dim, False, False).warps]
