"""Paged attention's kernels against their twins, in Triton's interpreter: tiny steps, and tiles small enough to need many."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.attention_cases import Case, make_batch, make_step, plain
from helpers.borders import set_borders
from helpers.effort import TEST_DAY, by_days, effort
from helpers.interpreter_floats import install
from helpers.launches import compiled_for
from pagerunner.attention.base import Reach
from pagerunner.attention.paged import PagedBackend

tl = pytest.importorskip("triton.language")
if torch.cuda.is_available():
    pytest.skip("tests/gpu runs these on the device", allow_module_level=True)
install()

from helpers.paged_kernels import (  # noqa: E402
    check_attention,
    check_drafts,
    check_projected,
    check_projected_drafts,
    check_store,
)
from pagerunner.ops.kernels.paged import paged_attention as kernels  # noqa: E402
from pagerunner.ops.kernels.paged import paged_decode, paged_few, paged_sizes  # noqa: E402
from pagerunner.ops.paged_attention import Scores, paged_attention, store_kv_  # noqa: E402

ONE = (plain(3, 1), plain(0, 1), plain(70, 1), plain(20, 1))
MIXED = (plain(3, 1), plain(0, 5), plain(40, 9), plain(20, 1))
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SLICES = {"many slices": (4, 0), "few slices": (1, 2)}


def cases_and_slices(*cases: Case) -> pytest.MarkDecorator:
    """Many slices or few, from case to case and from day to day by turns; `make test-thorough` runs both for each."""
    names = list(SLICES)
    chosen = [
        pytest.param(case, SLICES[name], id=f"case{number}-{name}")
        for number, case in enumerate(cases)
        for name in effort([names[(number + TEST_DAY) % 2]], names)
    ]
    return pytest.mark.parametrize(("case", "small_tiles"), chosen, indirect=["small_tiles"])


@pytest.fixture(autouse=True)
def small_tiles(request, monkeypatch):
    """Rows of several tiles, cut by slices, and blocks of few queries; or slices of several rows."""
    slices = getattr(request, "param", (4, 0))
    for module in (kernels, paged_sizes):  # drafts' tiles are those of rows of one token
        monkeypatch.setattr(module, "decode_tiles", lambda *_: kernels.Tiles(16, 16, 4, 5, *slices))
    monkeypatch.setattr(kernels, "few_tiles", lambda *_: kernels.Tiles(8, 16, 4, 3, slices[0]))
    monkeypatch.setattr(kernels, "prefill_tiles", lambda *_: kernels.Tiles(16, 16, 4, 2))
    monkeypatch.setattr(kernels, "shared_tiles", lambda *_: kernels.Tiles(16, 16, 4, 2))


@cases_and_slices(
    Case(ONE, 4, 2, 3, 8),
    Case(ONE, 3, 1, 1, 6, padding=2, spare_columns=2, sinks=True, softcap=1.5, head_dim_v=20),
    Case(ONE, 4, 2, 2, 8, kv_dtype=torch.float16),
    Case(ONE, 48, 1, 2, 32, kv_dtype=E4M3),
    Case(ONE, 4, 1, 2, 8, reach=Reach(6)),
    Case(ONE, 1, 1, 2, 8, reach=Reach(1), padding=1),
    Case(ONE, 1, 1, 2, 8, reach=Reach(4, chunked=True)),
    Case(ONE, 4, 1, 2, 8, kv_dtype=E5M2, reach=Reach(30)),
)
def test_steps_of_one_token_a_row(case: Case) -> None:
    check_attention(case, "cpu")


@cases_and_slices(
    Case(MIXED, 4, 2, 3, 8),
    Case(MIXED, 3, 1, 3, 6, padding=3, sinks=True, softcap=2.0, head_dim_v=20),
    Case(MIXED, 4, 1, 2, 8, kv_dtype=E4M3),
    Case(MIXED, 4, 1, 2, 8, reach=Reach(6)),
    Case((plain(6, 9), *MIXED), 4, 1, 2, 8, reach=Reach(4, chunked=True)),
)
def test_steps_with_several_tokens_a_row(case: Case) -> None:
    check_attention(case, "cpu")


LONG = (plain(110, 9), plain(0, 3), plain(20, 1), plain(50, 18), plain(70, 2))


LONG_CASES = [
    Case(LONG, 4, 2, 3, 8),
    Case(LONG, 3, 1, 3, 6, padding=3, sinks=True, softcap=2.0, head_dim_v=20),
    Case(LONG, 4, 1, 2, 8, kv_dtype=E4M3),
    Case(LONG, 4, 1, 2, 8, reach=Reach(60)),
    Case(LONG, 4, 1, 2, 8, reach=Reach(32, chunked=True), sinks=True),
]


def parts_of_rows(monkeypatch: pytest.MonkeyPatch, case: Case, multiprocessors: int, programs: int) -> list[int]:
    """How many parts each row's blocks have, with tiles of 16 rows and 16 keys."""
    monkeypatch.setattr(kernels, "prefill_tiles", lambda *_: kernels.Tiles(16, 16, 4, 2, programs))
    monkeypatch.setattr(kernels, "multiprocessors", lambda _: multiprocessors)
    of_rows = []
    merge = kernels.merge_kernel

    class Spy:
        def __getitem__(self, grid):
            def launch(*args, **options):
                of_rows.append(args[5].diff()[: len(case.rows)].tolist())
                return merge[grid](*args, **options)

            return launch

    monkeypatch.setattr(kernels, "merge_kernel", Spy())
    check_attention(case, "cpu")
    return of_rows[0]


@pytest.mark.parametrize(("multiprocessors", "parts"), [(4, 4), (5, 4), (6, 6), (9, 8)])
def test_parts_are_as_many_as_run_at_once(monkeypatch: pytest.MonkeyPatch, multiprocessors: int, parts: int) -> None:
    """Two blocks of 32 tiles: with room for 4, each has 2 parts of 16 tiles. With room for 5, 3 parts each would be too many."""
    assert parts_of_rows(monkeypatch, Case((plain(496, 16),), 4, 1, 2, 8), multiprocessors, 1) == [parts]


@pytest.mark.days(3)
@pytest.mark.parametrize(("case", "programs"), by_days(LONG_CASES, [2, 20]))
def test_keys_of_few_blocks_are_divided(monkeypatch: pytest.MonkeyPatch, case: Case, programs: int) -> None:
    """Into parts of several tiles, and of as few as there may be. A part may have keys of the past, new tokens, or both."""
    of_rows = parts_of_rows(monkeypatch, case, 20, programs)
    queries = 16 // case.group
    assert sum(of_rows) > sum(-(-row.queries // queries) for row in LONG if row.queries > 1), (
        "no more parts than blocks"
    )
    assert of_rows[2] == 0, "a row of one token has no blocks"


def test_layers_of_other_groups_have_a_schedule_of_their_own() -> None:
    """A tile of 16 has 5 queries of groups of 3, and 4 of groups of 4: fewer blocks, though heads of keys are as many."""
    case = Case(MIXED, 4, 2, 4, 8)
    step = make_step(case, "cpu")
    batch = make_batch(step, case, PagedBackend())
    store_kv_.twin(step.k, step.v, step.layer, step.write)
    scores, group = Scores(step.scale, 0.0, None), batch.groups[0]
    for heads in (3, 4):
        q = step.q.unflatten(1, (2, 4))[:, :, :heads].flatten(1, 2)
        args = (q, step.k, step.v, step.layer, group.page_table, batch.rows, group.plan, scores)
        torch.testing.assert_close(paged_attention.kernel(*args), paged_attention.twin(*args), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("group", "blocks"), [(4, 5), (5, 6), (3, 4), (7, 9)])
def test_a_tile_has_as_many_queries_as_fit(monkeypatch: pytest.MonkeyPatch, group: int, blocks: int) -> None:
    """Also where query heads of a head of keys aren't a power of two. Example: 40 query heads and 8 of keys; a tile of 16 has 3 queries of 5 heads."""
    of_rows, prefill = [], kernels.prefill_kernel

    class Spy:
        def __getitem__(self, grid):
            def launch(*args, **options):
                of_rows.append(args[30][:2].tolist())
                return prefill[grid](*args, **options)

            return launch

    monkeypatch.setattr(kernels, "prefill_kernel", Spy())
    check_attention(Case((plain(0, 17),), 4, 2, group, 8), "cpu")
    assert of_rows[0] == [0, blocks]


@pytest.mark.parametrize(("rows", "divided"), [(LONG[:1], True), ((plain(0, 9),), False), ((plain(30, 90),), False)])
def test_whose_keys_are_divided(monkeypatch: pytest.MonkeyPatch, rows: tuple, divided: bool) -> None:
    """Not those of rows with nothing before them, nor of as many blocks as the device has programs."""
    monkeypatch.setattr(kernels, "multiprocessors", lambda _: 20)
    monkeypatch.setattr(kernels, "merge_kernel", {})
    if divided:
        with pytest.raises(KeyError):
            check_attention(Case(rows, 4, 2, 3, 8), "cpu")
        return
    check_attention(Case(rows, 4, 2, 3, 8), "cpu")


# a row of its own first token, of fewer tokens than the stride, across the border of a page, of a tile, and of a window or chunk
DRAFTS = (plain(70, 4), plain(0, 1), plain(14, 4), plain(0, 3), plain(29, 2))


@cases_and_slices(
    Case(DRAFTS, 4, 2, 3, 8, padding=2),
    Case(DRAFTS, 3, 1, 1, 6, padding=1, spare_columns=2, sinks=True, softcap=1.5, head_dim_v=20),
    Case(DRAFTS, 4, 2, 2, 8, kv_dtype=torch.float16),
    Case(DRAFTS, 48, 1, 2, 32, kv_dtype=E4M3, sinks=True),
    Case(DRAFTS, 4, 1, 5, 8, reach=Reach(6), padding=1),
    Case(DRAFTS, 1, 1, 2, 8, reach=Reach(3)),
    Case(DRAFTS, 1, 1, 2, 8, reach=Reach(16, chunked=True), sinks=True),
    Case(DRAFTS, 4, 1, 2, 8, kv_dtype=E5M2, reach=Reach(30), softcap=1.5, padding=1),
)
def test_strided_batches(case: Case) -> None:
    check_drafts(case, 4, "cpu")


MANY = (plain(40, 3), plain(6, 8), plain(17, 1))


@pytest.mark.parametrize(
    ("group", "stride", "kv_dtype", "count", "blocks"),
    [
        (1, 8, torch.float32, 1, 1),
        (4, 8, torch.float32, 2, 1),
        (8, 8, torch.float32, 4, 1),
        (20, 8, torch.float32, 4, 3),
        (3, 8, E4M3, 1, 1),
        (16, 8, E5M2, 1, 2),
    ],
)
def test_tiles_and_blocks_of_queries(
    monkeypatch: pytest.MonkeyPatch, group: int, stride: int, kv_dtype: torch.dtype, count: int, blocks: int
) -> None:
    set_borders(monkeypatch, "attention", few_rows=1)
    tiles = kernels.draft_tiles(64, group, stride, kv_dtype != torch.float32, 4)
    assert (tiles.count, -(-stride // tiles.tokens)) == (count, blocks)
    check_drafts(Case(MANY, 4, 1, group, 8, kv_dtype=kv_dtype, padding=1), stride, "cpu")


WHOLE, CUT = DRAFTS, (plain(76, 4),)


@pytest.mark.parametrize(("rows", "kv_heads"), [(WHOLE, 4), (CUT, 1)], ids=["whole", "cut"])
@pytest.mark.parametrize(("kv_dtype", "group"), [(torch.float32, 3), (torch.float16, 8)])
def test_drafts_get_what_rows_of_one_token_get(
    monkeypatch: pytest.MonkeyPatch, rows: tuple, kv_heads: int, kv_dtype: torch.dtype, group: int
) -> None:
    """Rows that lie in one slice, and a row of five tiles in four slices."""
    tiles, draft_tiles = kernels.Tiles(16, 16, 4, 5, 1, 0), kernels.draft_tiles
    set_borders(monkeypatch, "attention", few_rows=1)
    monkeypatch.setattr(kernels, "decode_tiles", lambda *_: tiles)
    monkeypatch.setattr(kernels, "draft_tiles", lambda *of: draft_tiles(*of)._replace(tiles=tiles))
    check_drafts(Case(rows, 4, kv_heads, group, 8, kv_dtype=kv_dtype, sinks=True), 4, "cpu", equal=True)


@cases_and_slices(
    Case(DRAFTS, 4, 2, 3, 8, padding=1),
    Case(DRAFTS, 4, 2, 3, 8, kv_dtype=torch.float16),
    Case(DRAFTS, 4, 1, 2, 8, kv_dtype=E4M3, padding=1),
    Case(DRAFTS, 4, 1, 2, 8, reach=Reach(6)),
)
@pytest.mark.parametrize("few_rows", [16, 1], ids=["few rows", "many rows"])
def test_strided_batches_from_the_projection_on(monkeypatch: pytest.MonkeyPatch, case: Case, few_rows: int) -> None:
    set_borders(monkeypatch, "attention", few_rows=few_rows)
    check_projected_drafts(case, 4, "cpu", rtol=0.13 if case.kv_dtype == E4M3 else 2e-5)


FEW_DRAFTS = [
    Case((plain(300, 4), plain(0, 1), plain(16, 3), plain(15, 2)), 16, 1, 3, 20, padding=1),
    Case((plain(200, 4), plain(7, 2)), 1, 3, 8, 64, sinks=True, reach=Reach(40)),
    Case(
        (plain(62, 4), plain(63, 1), plain(64, 4), plain(0, 3)),
        4,
        1,
        4,
        8,
        sinks=True,
        softcap=1.5,
        reach=Reach(64, chunked=True),
    ),
    Case(tuple(plain(5 * i, 1 + i % 4) for i in range(14)), 16, 2, 1, 8, kv_dtype=torch.float16, padding=1),
    Case((plain(500, 4),), 16, 1, 5, 8, lead=3, reach=Reach(2)),
]


@pytest.mark.parametrize(("case", "programs"), by_days(FEW_DRAFTS, [1, 16]))
def test_few_drafted_rows(monkeypatch: pytest.MonkeyPatch, case: Case, programs: int) -> None:
    """Rows of one part, of several with a tile each, and of several with many tiles each; one tile of queries or two."""
    monkeypatch.setattr(kernels, "few_draft_tiles", lambda _: kernels.Tiles(16, 16, 4, 3, programs))
    monkeypatch.setattr(kernels._Call, "run_drafts", lambda *_, **__: 1 / 0)
    check_projected_drafts(case, 4, "cpu")


@pytest.mark.parametrize(
    ("group", "stride", "unused"), [(4, 8, "run_drafts"), (11, 5, "run_drafts"), (17, 2, "run_few_drafts")]
)
def test_few_drafted_rows_of_many_queries(
    monkeypatch: pytest.MonkeyPatch, group: int, stride: int, unused: str
) -> None:
    """Two tiles of queries, two blocks of them, and more heads than registers hold."""
    monkeypatch.setattr(kernels._Call, unused, lambda *_, **__: 1 / 0)
    check_projected_drafts(Case((plain(40, stride), plain(0, 2)), 16, 1, group, 8, padding=1), stride, "cpu")


SHARING = (plain(70, 1), plain(70, 1, 33), plain(70, 3, 33), plain(66, 1, 33), plain(90, 1, 35))


@cases_and_slices(
    Case(SHARING, 2, 2, 2, 8, padding=2, spare_columns=3),
    Case(SHARING, 2, 2, 2, 8, kv_dtype=E4M3, padding=2, spare_columns=3),
)
def test_a_prefix_that_all_rows_share(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    set_borders(monkeypatch, "attention", sharing_rows=2)
    set_borders(monkeypatch, "attention", shared_saving=1)
    used = []
    original = kernels._Call.run_shared

    def spy(self, schedule):
        used.append(schedule.info.tolist())
        parts, sums = original(self, schedule)
        assert sums.numel() == 2 * self.shared_splits * len(self.rows.slots_R) * self.heads, "not by tokens"
        return parts, sums

    monkeypatch.setattr(kernels._Call, "run_shared", spy)
    check_attention(case, "cpu")
    assert used[0][1] == 64  # of the 66 tokens, whole blocks of 16 pages
    check_attention(Case((plain(70, 1), plain(70, 1)), 2, 1, 2, 8), "cpu")
    assert used[-1][1] == 0


def test_a_prefix_in_any_number_of_parts_has_one_schedule_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows have fewer parts of what they share. The kernel stores that number, and isn't compiled again for 1 or for multiples of 16."""
    set_borders(monkeypatch, "attention", sharing_rows=2)
    launched, run = [], type(kernels.schedule_kernel).run

    def noting(kernel, *args, **how):
        if kernel.fn.__name__ == "schedule_kernel":
            launched.append(compiled_for(kernel, args, how))
        return run(kernel, *args, **how)

    monkeypatch.setattr(type(kernels.schedule_kernel), "run", noting)
    parts = set()
    splits = kernels._Call._shared_splits
    monkeypatch.setattr(kernels._Call, "_shared_splits", lambda self: parts.add(splits(self)) or splits(self))
    for multiprocessors in (1, 2, 8, 132):
        monkeypatch.setattr(kernels, "multiprocessors", lambda _, count=multiprocessors: count)
        check_attention(Case(SHARING[:2], 2, 1, 2, 8), "cpu")
    assert len(parts) > 2 and len(set(launched)) == 1, (parts, set(launched))


def test_rows_known_to_share_nothing_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even those that do: what all share is then read like the rest."""
    set_borders(monkeypatch, "attention", sharing_rows=2)
    set_borders(monkeypatch, "attention", shared_saving=1)
    monkeypatch.setattr(kernels._Call, "run_shared", lambda *_: 1 / 0)
    plan = PagedBackend.plan
    monkeypatch.setattr(PagedBackend, "plan", lambda *args: replace(plan(*args), sharing=False))
    case = Case((plain(70, 1), plain(70, 1, 33), plain(66, 1, 33)), 2, 1, 2, 8, padding=1)
    check_attention(case, "cpu")
    check_projected(case, "cpu")


@cases_and_slices(
    Case(ONE, 4, 2, 3, 8),
    Case(ONE, 4, 2, 3, 8, kv_dtype=torch.float16, padding=2, sinks=True, softcap=1.5),
    Case(ONE, 4, 1, 2, 8, reach=Reach(6)),
    Case(MIXED, 4, 2, 3, 8),
)
@pytest.mark.parametrize("few_rows", [16, 1], ids=["few rows", "many rows"])
def test_from_the_projection_on(monkeypatch: pytest.MonkeyPatch, case: Case, few_rows: int) -> None:
    set_borders(monkeypatch, "attention", few_rows=few_rows)
    set_borders(monkeypatch, "attention", few_units=0)
    check_projected(case, "cpu")


FEW = [
    Case(
        (plain(300, 1), plain(0, 1), plain(16, 1)), 16, 1, 3, 20, padding=1
    ),  # a row of more parts than are merged at once
    Case((plain(300, 1), plain(7, 1)), 1, 3, 1, 64, sinks=True, reach=Reach(40)),
    Case(
        (plain(100, 1), plain(63, 1), plain(64, 1)),
        48,
        1,
        16,
        8,
        sinks=True,
        softcap=1.5,
        reach=Reach(64, chunked=True),
    ),
    Case(tuple(plain(5 * i, 1) for i in range(15)), 16, 2, 2, 8),
    Case((plain(500, 1),), 16, 1, 5, 8, lead=3),
]


@pytest.mark.parametrize(("case", "programs"), by_days(FEW, [1, 16]))
def test_few_rows(monkeypatch: pytest.MonkeyPatch, case: Case, programs: int) -> None:
    """Rows of one part, of several with a tile each, and of several with many tiles each."""
    monkeypatch.setattr(kernels, "few_tiles", lambda *_: kernels.Tiles(16, 16, 4, 3, programs))
    monkeypatch.setattr(kernels._Call, "run_decode", lambda *_, **__: 1 / 0)
    check_projected(case, "cpu", parts=0 if programs == 1 else 3)


@pytest.mark.parametrize("case", [FEW[0], FEW[4], Case((plain(500, 1), plain(300, 1)), 16, 2, 2, 8, sinks=True)])
def test_many_parts_of_few_rows_are_merged_some_at_a_time(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """Rows with parts of a tile each, of which the last program of each four merges four, and the last of all what these have left."""
    monkeypatch.setattr(kernels, "few_tiles", lambda *_: kernels.Tiles(16, 16, 4, 3, 16))
    for module in kernels, paged_few:
        monkeypatch.setattr(module, "MOST_MERGED", tl.constexpr(6))
    monkeypatch.setattr(paged_few, "MERGED", tl.constexpr(4))
    merge, counts = paged_few._merge_some, []

    def spy(part, sums, first, count, *others):
        counts.append(int(count.handle.data[0]))
        merge(part, sums, first, count, *others)

    monkeypatch.setattr(paged_few, "_merge_some", spy)
    check_projected(case, "cpu")
    assert counts.count(4) >= 5 * case.kv_heads


@pytest.mark.parametrize(
    "case", [Case((plain(500, 1), plain(300, 1), plain(0, 1)), 16, 1, 3, 32, kv_dtype=E4M3), FEW[4]]
)
def test_many_slices_of_few_rows_are_merged_some_at_a_time(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """The same in `decode_kernel`, which has rows in fp8 pages and those of more query heads."""
    monkeypatch.setattr(kernels, "decode_tiles", lambda *_: kernels.Tiles(16, 16, 4, 5, 16))
    monkeypatch.setattr(kernels, "MOST_FEW_HEADS", 2)
    for module in kernels, paged_decode:
        monkeypatch.setattr(module, "MOST_MERGED", tl.constexpr(6))
    monkeypatch.setattr(paged_decode, "MERGED", tl.constexpr(4))
    merge, some = paged_decode.merged_parts, []

    def spy(*given):
        some.append(len(given))
        return merge(*given)

    monkeypatch.setattr(paged_decode, "merged_parts", spy)
    check_attention(case, "cpu")
    if case.kv_dtype == E4M3:
        check_projected(case, "cpu", atol=2e-5, rtol=2e-5)
    assert some.count(11) >= 7 and 12 in some, "by fours, then what these have left"


@pytest.mark.parametrize(("group", "unused"), [(16, "run_decode"), (17, "run_few")])
def test_few_rows_of_many_heads(monkeypatch: pytest.MonkeyPatch, group: int, unused: str) -> None:
    """Two warps have registers for 16 query heads of a head of keys."""
    monkeypatch.setattr(kernels, "few_tiles", lambda *_: kernels.Tiles(16, 16, 2, 3, 4))
    monkeypatch.setattr(kernels, "decode_tiles", lambda *_: kernels.Tiles(32, 16, 4, 5, 4))
    monkeypatch.setattr(kernels._Call, unused, lambda *_, **__: 1 / 0)
    check_projected(Case((plain(150, 1), plain(0, 1)), 16, 2, group, 8, padding=1), "cpu")


@pytest.mark.days(2)
@pytest.mark.parametrize(
    ("rows", "kv_heads", "group", "sharing", "unused"),
    [
        (17, 3, 8, False, "run_decode"),
        (64, 1, 2, False, "run_decode"),
        (65, 4, 2, False, "run_few"),
        (16, 1, 9, False, "run_few"),
        (16, 1, 2, True, "run_few"),
    ],
)
def test_more_rows_of_few_heads(
    monkeypatch: pytest.MonkeyPatch, rows: int, kv_heads: int, group: int, sharing: bool, unused: str
) -> None:
    """Rows of one part and of many, and padding, where nobody looks for pages that all rows share."""
    monkeypatch.setattr(kernels._Call, unused, lambda *_, **__: 1 / 0)
    plan = PagedBackend.plan
    monkeypatch.setattr(PagedBackend, "plan", lambda *args: replace(plan(*args), sharing=sharing))
    starts = [260, 0, 16, 15, 17, *[7 * i % 50 for i in range(rows)]][: rows - 1]
    check_projected(Case(tuple(plain(start, 1) for start in starts), 16, kv_heads, group, 8, padding=1), "cpu")


WINDOWED = (plain(3, 1), plain(0, 1), plain(70, 1), plain(16, 1), plain(17, 1), plain(15, 1), plain(200, 1))


@pytest.mark.parametrize(
    ("window", "unused"), [(16, "run_decode"), (1, "run_decode"), (17, "run_few")], ids=["a tile", "none", "more"]
)
def test_windows_of_many_rows(monkeypatch: pytest.MonkeyPatch, window: int, unused: str) -> None:
    """Rows that see no more keys than a tile has are one part each, however many they are."""
    set_borders(monkeypatch, "attention", few_rows=1)
    set_borders(monkeypatch, "attention", few_units=0)
    monkeypatch.setattr(kernels._Call, unused, lambda *_, **__: 1 / 0)
    check_projected(Case(WINDOWED, 16, 2, 3, 8, padding=3, sinks=True, reach=Reach(window)), "cpu")


FP8_WINDOW = Case(ONE, 4, 1, 2, 8, kv_dtype=E4M3, reach=Reach(6))
FP8_SINKS = Case(ONE, 16, 3, 1, 6, kv_dtype=E5M2, sinks=True, softcap=1.5)


# Every loudness, every kind of scales and every case at least once; tests/gpu has the cross product.
@pytest.mark.parametrize(
    ("case", "alone", "loud", "static"),
    [
        (Case(ONE, 4, 2, 3, 8, kv_dtype=E4M3, padding=1), True, 1.0, False),
        (Case(ONE, 4, 2, 3, 8, kv_dtype=E4M3, padding=1), True, 500.0, True),
        (FP8_SINKS, True, 500.0, False),
        (FP8_SINKS, True, 1e-4, True),
        (FP8_WINDOW, True, 1e-4, False),
        (FP8_WINDOW, True, 500.0, False),
        (FP8_WINDOW, True, 1.0, True),
        (Case(ONE, 48, 1, 2, 8, kv_dtype=E4M3), False, 500.0, False),  # a page may lie in several tiles
        (Case(ONE, 48, 1, 2, 8, kv_dtype=E4M3), False, 1.0, True),
    ],
)
def test_fp8_from_the_projection_on(monkeypatch, case: Case, alone: bool, loud: float, static: bool) -> None:
    prepared = []
    plain_prepare = kernels.prepare_split_heads_
    monkeypatch.setattr(kernels, "prepare_split_heads_", lambda *args: prepared.append(1) or plain_prepare(*args))
    step = 0.13 if case.kv_dtype == E4M3 else 0.26  # of the format; a sum in another order may fall on either side
    check_projected(case, "cpu", rtol=2e-5 if loud == 1.0 else step, atol=2e-5, loud=loud, static=static)
    assert bool(prepared) != alone


STORED = (plain(3, 9), plain(0, 5), plain(20, 1))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float16, E4M3, E5M2])
def test_stored_as_the_twin_stores(kv_dtype: torch.dtype, fused: bool) -> None:
    check_store(Case(STORED, 4, 2, 3, 8, kv_dtype=kv_dtype, gap=4), "cpu", fused=fused)


@pytest.mark.parametrize("kv_dtype", [torch.float16, E4M3])
@pytest.mark.parametrize("static", [False, True])
def test_stored_one_token_a_row(kv_dtype: torch.dtype, static: bool) -> None:
    case = Case((plain(3, 1), plain(0, 1), plain(20, 1), plain(7, 1)), 4, 2, 3, 8, kv_dtype=kv_dtype, gap=4)
    check_store(case, "cpu", fused=True, static=static and kv_dtype == E4M3)


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2])
def test_stored_where_pages_are_not_a_power_of_two(kv_dtype: torch.dtype) -> None:
    check_store(
        Case((plain(3, 29), plain(0, 5), plain(20, 13)), 12, 3, 1, 6, kv_dtype=kv_dtype, gap=4), "cpu", fused=False
    )


def test_stored_where_a_page_is(fused: bool = True) -> None:
    check_store(Case(STORED, 4, 3, 2, 6, kv_dtype=E4M3, reach=Reach(4)), "cpu", fused=fused, norm=False)


def test_scales_that_are_the_layers_own_stay() -> None:
    check_store(Case(STORED, 4, 3, 2, 6, kv_dtype=E4M3), "cpu", fused=False, static=True)
