"""Slots chosen by an indexer: the kernels in Triton's interpreter against their twin, to the slot."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.effort import effort
from helpers.indexer_cases import SCORES, Case, check_best, made
from helpers.interpreter_floats import install
from helpers.launches import compiled_for
from pagerunner.batch import StepRows
from pagerunner.ops.indexer import choose_slots, is_choice

pytest.importorskip("triton")
install()
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402

from pagerunner.ops.kernels.latent import indexer  # noqa: E402


@pytest.fixture(autouse=True)
def few_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the 256 parts that a card has, all but four have no slot here, and each takes its time."""
    if "test_rows_of_one_token" not in request.node.name:
        monkeypatch.setattr(indexer, "MOST_PARTS", 4)


def check(case: Case) -> torch.Tensor:
    args, named = made(case)
    want = choose_slots.twin(*args, **named)
    found = choose_slots.kernel(*args, **named)
    assert found.dtype == torch.int32 and torch.equal(found, want)
    return want


ROWS = ((150, 1), (0, 1), (18, 1), (19, 1), (20, 1), (43, 1))  # around top_k


@pytest.mark.days(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_rows_of_one_token(dtype: torch.dtype) -> None:
    chosen = check(Case(ROWS, dtype=dtype, padding=2, size=32, heads=20))
    assert (chosen >= 0).sum(1).tolist() == [20, 1, 19, 20, 20, 20, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("most", [0, 3])
def test_scores_and_choice_are_one_launch(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, most: int) -> None:
    """A row's slots are divided among programs, of which some have none. The one that ends last chooses, and the next layer finds its counter at 0."""
    monkeypatch.setattr(indexer, "FEW_KEYS", 16)
    monkeypatch.setattr(indexer, "multiprocessors", lambda device: 16)
    monkeypatch.setattr(indexer, "run_scores", None)
    (*args, scratch), named = made(Case((*ROWS, (300, 1)), dtype=dtype, most=most, padding=2, longest=400))
    for _ in range(2):
        found = choose_slots.kernel(*args, scratch, **named)
        assert torch.equal(found, choose_slots.twin(*args, {}, **named))
        assert not scratch["counter", found.shape[0]].any()


def test_so_many_rows_that_few_parts_fill_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 128 slots then, in more parts where a row has more slots than a part takes."""
    for name, number in (("FULL", 16), ("FEW_TOKENS", 3), ("PART", 128)):
        monkeypatch.setattr(indexer, name, number)
    sizes = []
    run = indexer.score_sizes
    monkeypatch.setattr(indexer, "score_sizes", lambda *given: sizes.append(run(*given)) or sizes[-1])
    for longest in (256, 500):
        check(Case((*ROWS, (240, 1)), dtype=torch.float16, padding=1, longest=longest))
    assert [(one.parts, one.keys, one.warps) for one in sizes] == [(2, 128, 4), (4, 128, 4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("ratio", [1, 4])
def test_rows_of_several_tokens(dtype: torch.dtype, ratio: int) -> None:
    """Blocks of tokens in which one row ends and others begin."""
    check(Case(((30, 9), (0, 3), (61, 2), (200, 1), (7, 90)), top_k=9, ratio=ratio, dtype=dtype))


@pytest.mark.parametrize("stride", [2, 3, 4, 7])
def test_rows_with_drafts(stride: int) -> None:
    rows = tuple((start, 1 + start % stride) for start in (7, 31, 62, 0, 95))
    check(Case(rows, top_k=13, stride=stride, padding=1, dtype=torch.float8_e4m3fn))


@pytest.mark.parametrize("most", [0, 3])
def test_several_chunks(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Equal scores, everywhere or now and then, in chunks whose best are chosen from again; a graph's bound is far away."""
    for name in ("SLICE", "CHUNK"):
        monkeypatch.setattr(indexer, name, 32)
    rows = ((150, 1), (0, 1), (18, 2), (31, 1), (32, 1), (33, 1), (299, 3))
    check(Case(rows, top_k=20, most=most, longest=500))
    check(Case(rows, top_k=40, most=most, longest=500, ratio=2))


@pytest.mark.parametrize("kind", SCORES)
def test_best_of_given_scores(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Rows of one program and of many, warps that have bounds of their own, and so many equal scores that all are searched again and again."""
    for name in ("SLICE", "CHUNK"):
        monkeypatch.setattr(indexer, name, 512)
    check_best(kind, [100, 200, 201, 511, 512, 513, 1025, 2047, 4300, 5000], 200)


def test_scores_in_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer, "BLOCK_SCORES", 512)
    check(Case(((30, 9), (0, 3), (61, 2), (7, 20)), top_k=9))
    check(Case(((30, 3), (0, 2), (61, 1)), top_k=9, stride=3))


def test_no_row_may_see_more_than_are_chosen() -> None:
    args, named = made(Case(ROWS, top_k=200))
    assert torch.equal(choose_slots.kernel(*args, **named), choose_slots.twin(*args, **named))
    assert choose_slots.kernel(*args, **named) is args[-1]["all slots"], "layers share them"
    assert not is_choice(args[5], args[6], args[2]), "attention may not begin early: nothing was launched before it"


def test_kernels_are_not_made_for_each_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts below `top_k` slots one serves all; above it there is one for each power of two, and those are as `choose_slots_kernels` says."""
    launched: set[Any] = set()
    note = lambda kernel, *args, **how: launched.add(compiled_for(kernel, args, how))  # noqa: E731
    monkeypatch.setattr(InterpretedFunction, "run", note)
    q, weights, keys, table = torch.zeros(2, 4, 32), torch.zeros(2, 4), torch.zeros(3, 16, 32), torch.zeros(1, 9).long()

    def kernels(lengths: Iterable[int], top_k: int, ratio: int) -> int:
        launched.clear()
        for length in lengths:
            rows = StepRows.of([2], [length], [0])
            choose_slots.kernel(q, weights, top_k, keys, table, rows, ratio, {})
        return len({launch for launch in launched if launch[0] != "_scores_kernel"})

    assert kernels(range(273, 2049, 7), 512, 4) == kernels(range(273, 2049, 7), 2048, 1) == 1
    assert kernels(range(2052, 32_768, 512), 512, 4) == 4  # of 1,024, 2,048, 4,096 and 8,192 slots
    long = range(8192, 163_841, 8192)
    assert kernels(long, 2048, 1) == 1 + 3  # 8,192 slots, and more
    assert len({choose_slots.kernels_for(length, 2048, 1) for length in long}) == 2


def test_slices_grow_with_rows() -> None:
    assert [indexer.best_size(width, 2_048) for width in (100, 2_049, 8_192, 8_193)] == [2_048, 4_096, 8_192, 4_096]
    assert indexer.slice_size(1_000_000) == 8_192


@settings(max_examples=effort(5, 100), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(1, 6)), min_size=1, max_size=6),
    st.integers(1, 40),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 5),
)
def test_any_step(rows: list[tuple[int, int]], top_k: int, ratio: int, heads: int) -> None:
    case = Case(tuple(rows), top_k=top_k, ratio=ratio, heads=heads)
    check(case)
    if all(new <= 4 for _, new in rows):
        check(replace(case, stride=4))
