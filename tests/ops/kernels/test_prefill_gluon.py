"""The kernel of `kernels/paged/paged_prefill_gluon.py` run as Python, its groups of warps as threads. `tests/gpu` runs it on a card."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.attention_cases import Case, plain
from helpers.borders import set_borders
from helpers.gluon_groups import Described, Groups
from helpers.interpreter_floats import install
from helpers.paged_kernels import check_attention
from pagerunner.attention.base import Reach
from pagerunner.attention.paged import PagedBackend
from pagerunner.batch import KVPages
from pagerunner.ops.kernels.paged import paged_attention, paged_dense, paged_prefill_gluon, paged_prefill_wide
from pagerunner.ops.kernels.paged.paged_prefill_wide import Heads, run, serves

install()
Rows = tuple[tuple[int, int], ...]
F16, E4M3 = torch.float16, torch.float8_e4m3fn


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Groups:
    found = Groups(paged_prefill_gluon, "gluon_prefill_kernel")

    def describe(tensor, shape, strides, block, layout):
        return Described(tensor, shape, strides, block)

    monkeypatch.setattr(paged_prefill_gluon, "gluon_prefill_kernel", found)
    monkeypatch.setattr(paged_prefill_gluon, "TensorDescriptor", describe)
    monkeypatch.setattr(paged_prefill_wide, "has_gluon", lambda device: True)
    return found


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: int, scale: float) -> torch.Tensor:
    """Of a row's new queries [T, H, D] to all its keys [L, K, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).float() for x in (k, v))
    scores = torch.einsum("thd,lhd->htl", q.float(), k) * scale
    seen = torch.arange(len(k))[None, :] <= torch.arange(len(q))[:, None] + past
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("htl,lhd->thd", weights, v)


def merge(
    values: torch.Tensor,
    sums: torch.Tensor,
    parts: torch.Tensor,
    each: int,
    starts: torch.Tensor,
    group: int,
    out: torch.Tensor,
) -> None:
    """Rows whose blocks have `each` parts: what these left, as one result."""
    places = 128 // group * group
    for row in range(len(starts) - 1):
        for block in range(int(parts[row + 1] - parts[row]) // each):
            own = slice(int(parts[row]) + block * each, int(parts[row]) + block * each + each)
            weights = torch.exp2(sums[own, :, :, 0] - sums[own, :, :, 0].amax(0))
            total = (weights * sums[own, :, :, 1]).sum(0)
            merged = ((weights[..., None] * values[own]).sum(0) / total[..., None])[:, :places]  # [K, M, D]
            tokens = range(int(starts[row]) + block * (128 // group), int(starts[row + 1]))[: 128 // group]
            merged = merged.view(merged.shape[0], -1, group, merged.shape[2]).permute(1, 0, 2, 3).flatten(1, 2)
            out[list(tokens)] = merged[: len(tokens)].to(out.dtype)


@pytest.mark.parametrize(
    ("rows", "programs", "group", "page", "dim", "each"),
    [
        (((0, 130), (0, 1), (0, 300), (0, 64)), 3, 4, 16, 128, 1),
        (((0, 40), (100, 70), (128, 33), (300, 2), (1, 129)), 2, 2, 16, 128, 1),
        (((260, 17), (0, 200)), 1, 8, 32, 128, 1),
        (((0, 290), (130, 150), (1, 40)), 2, 5, 16, 128, 1),
        (((128, 21), (0, 129)), 1, 7, 16, 128, 1),
        (((5, 3),), 2, 1, 64, 128, 1),
        (((0, 40), (100, 70), (300, 2), (1, 129)), 2, 2, 16, 128, 2),
        (((128, 21), (0, 129)), 1, 7, 16, 128, 5),
        (((900, 40),), 2, 4, 64, 128, 3),
        (((0, 40), (100, 70), (128, 133), (1, 129)), 2, 4, 16, 64, 1),
        (((0, 40), (130, 90)), 1, 7, 16, 64, 3),
        (((0, 150), (130, 140)), 2, 1, 16, 96, 1),
        (((0, 40), (100, 90)), 1, 3, 16, 80, 1),
        (((0, 40), (100, 70), (1, 129)), 2, 4, 16, 256, 1),
        (((0, 150), (130, 140)), 1, 1, 32, 256, 1),
        (((260, 90), (0, 3)), 2, 3, 128, 256, 3),
        (((0, 40), (130, 90)), 1, 8, 64, 192, 1),
        (((300, 20), (0, 40)), 1, 4, 256, 64, 1),
        (((310, 20), (0, 40)), 1, 4, 48, 128, 1),
    ],
)
def test_rows(
    monkeypatch: pytest.MonkeyPatch,
    launched: Groups,
    rows: Rows,
    programs: int,
    group: int,
    page: int,
    dim: int,
    each: int,
) -> None:
    """Rows of past and new tokens. What belongs to no row is no number: other tokens of pages, and those of a row that another kernel computes."""
    monkeypatch.setattr(paged_prefill_wide, "multiprocessors", lambda device: programs)
    torch.manual_seed(len(rows))
    kv_heads, tokens, past = 2, sum(new for _, new in rows), any(old for old, _ in rows)
    q, k, v = (torch.randn(tokens, heads, dim).bfloat16() for heads in (group * kv_heads, kv_heads, kv_heads))
    lengths = [old + new for old, new in rows]
    most = max(-(-length // page) for length in lengths)
    count = most * len(rows) + 1
    places = torch.randperm(count - 1) + 1
    table = torch.full((len(rows), most + 2), -1, dtype=torch.int64)
    room = torch.full((2, count, page, 3 * kv_heads, dim), float("nan")).bfloat16()
    pages = KVPages(0, *room[:, :, :, :kv_heads])
    want, first = [], 0
    for row, (old, new) in enumerate(rows):
        own = places[row * most : row * most + -(-lengths[row] // page)]
        table[row, : len(own)] = own
        keys, values = (torch.randn(old, kv_heads, dim).bfloat16() for _ in range(2))
        for at in range(old):
            pages.k[own[at // page], at % page], pages.v[own[at // page], at % page] = keys[at], values[at]
        new_rows = slice(first, first + new)
        if new == 1:
            q[new_rows], k[new_rows], v[new_rows] = (float("nan"),) * 3
        whole = torch.cat([keys, k[new_rows]]), torch.cat([values, v[new_rows]])
        want.append(attention(q[new_rows], *whole, old, 0.1))
        first += new
    starts = torch.tensor([0, *(sum(new for _, new in rows[: i + 1]) for i in range(len(rows)))], dtype=torch.int32)
    queries = 128 // group
    blocks = [-(-new // queries) * each if new > 1 else 0 for _, new in rows]
    parts = torch.tensor([0, *(sum(blocks[: i + 1]) for i in range(len(rows)))], dtype=torch.int32)
    slots = torch.arange(len(rows), dtype=torch.int32)
    out = torch.zeros_like(q)
    heads, taken = Heads(q, k, v, out), torch.zeros(2, dtype=torch.int32)
    left = [torch.full((sum(blocks), kv_heads, 128, size), float("nan")) for size in (dim, 2)]
    assert serves(heads[:3], pages, past=past)
    run(
        heads,
        pages,
        table,
        (slots, starts, torch.tensor(lengths, dtype=torch.int32)),
        parts,
        taken,
        0.1,
        past=past,
        divided=tuple(left) if each > 1 else None,
    )
    if each > 1:
        merge(*left, parts, each, starts, group, out)
    assert launched.programs == programs and not taken.any()
    for row, (_, new) in enumerate(rows):
        own = out[starts[row] : starts[row + 1]].float()
        if new > 1:
            torch.testing.assert_close(own, want[row], atol=0.03, rtol=0.03)
        else:
            assert not own.any(), "rows of one token are another kernel's"


FRESH, PAST = (plain(0, 150), plain(0, 1), plain(0, 33)), (plain(40, 90), plain(3, 1), plain(130, 20))


@pytest.mark.parametrize(
    ("case", "programs"),
    [
        (Case(FRESH, 16, 1, 4, 128, dtype=F16, kv_dtype=F16), 8),
        (Case(PAST, 16, 1, 4, 128, dtype=F16, kv_dtype=F16, padding=3, lead=16), 8),
        (Case(FRESH, 16, 1, 4, 128, dtype=F16, kv_dtype=E4M3), 8),  # new tokens are not in fp8
        (Case(PAST, 16, 1, 4, 128, dtype=F16, kv_dtype=E4M3, padding=3), 8),
        (
            Case(
                (plain(300, 40), plain(5, 60), plain(0, 31)),
                64,
                2,
                2,
                128,
                dtype=F16,
                kv_dtype=torch.float8_e5m2,
            ),
            8,
        ),
        (Case(PAST, 16, 1, 3, 128, dtype=F16, kv_dtype=F16, padding=3, lead=16), 8),
        (Case((plain(700, 40), plain(3, 1)), 16, 1, 4, 128, dtype=F16, kv_dtype=F16, lead=16), 8),
        (Case((plain(600, 33), plain(9, 8)), 16, 1, 5, 64, dtype=F16, kv_dtype=F16, lead=16), 8),
        (Case((plain(700, 40), plain(3, 1)), 16, 1, 4, 128, dtype=F16, kv_dtype=E4M3, lead=16), 8),
        (Case((plain(700, 26), plain(3, 1)), 16, 1, 4, 128, dtype=F16, kv_dtype=E4M3, lead=16), 0),
        (Case(FRESH, 16, 2, 1, 128, dtype=F16, kv_dtype=F16, lead=16), 8),
        (Case(PAST, 16, 1, 4, 64, dtype=F16, kv_dtype=F16, lead=16), 8),
        (Case(FRESH, 16, 1, 4, 56, dtype=F16, kv_dtype=F16), 0),
        (Case(PAST, 16, 1, 4, 64, dtype=F16, kv_dtype=E4M3, lead=16), 8),
        (Case(PAST, 16, 1, 3, 96, dtype=F16, kv_dtype=E4M3, lead=16), 8),
        (Case(PAST, 32, 1, 2, 256, dtype=F16, kv_dtype=E4M3, lead=16), 8),
        (Case(FRESH, 16, 1, 4, 128, dtype=F16, kv_dtype=F16, reach=Reach(50)), 8),
        (Case(FRESH, 16, 1, 4, 128, dtype=F16, kv_dtype=F16, reach=Reach(39)), 0),
        (
            Case(
                (plain(400, 90), plain(3, 1), plain(130, 20), plain(0, 200)),
                16,
                1,
                3,
                128,
                dtype=F16,
                kv_dtype=F16,
                reach=Reach(200),
                lead=16,
            ),
            8,
        ),
        (Case((plain(460, 33), plain(9, 40)), 16, 1, 4, 128, dtype=F16, kv_dtype=F16, reach=Reach(300), lead=16), 8),
        (Case((plain(260, 133), plain(0, 150)), 32, 1, 1, 256, dtype=F16, kv_dtype=F16, reach=Reach(100), lead=16), 8),
        (
            Case(
                (plain(260, 133), plain(0, 150)), 16, 1, 4, 64, dtype=F16, kv_dtype=F16, reach=Reach(96, True), lead=16
            ),
            8,
        ),
        (Case(FRESH, 16, 1, 4, 128, dtype=F16, kv_dtype=E4M3, reach=Reach(50)), 8),
        (Case(PAST, 16, 1, 4, 128, dtype=F16, kv_dtype=E4M3, reach=Reach(50)), 0),
        (Case(PAST, 16, 1, 2, 256, dtype=F16, kv_dtype=F16, reach=Reach(90), softcap=2.0, lead=16), 8),
        (Case(PAST, 16, 1, 4, 64, dtype=F16, kv_dtype=E4M3, softcap=0.7, lead=16), 8),
        (Case(FRESH, 16, 1, 4, 128, dtype=F16, kv_dtype=F16, sinks=True), 8),
        (Case((plain(700, 40), plain(3, 90)), 16, 1, 8, 64, dtype=F16, kv_dtype=F16, sinks=True, lead=16), 8),
        (Case((plain(600, 33), plain(9, 8)), 16, 1, 4, 256, dtype=F16, kv_dtype=F16, lead=16), 8),
        (Case(PAST[1:], 16, 1, 4, 128, dtype=F16, kv_dtype=F16, lead=16), 0),  # rows too short
        (Case(PAST, 16, 1, 4, 128, dtype=F16, kv_dtype=F16, lead=4), 0),
    ],
    ids=[
        "fresh",
        "past",
        "fresh fp8",
        "past fp8",
        "past e5m2",
        "group of three",
        "divided",
        "divided and whole",
        "divided fp8",
        "fewer tokens, divided fp8",
        "no group",
        "heads of 64",
        "small heads",
        "heads of 64 in fp8",
        "heads of 96 in fp8",
        "heads of 256 in fp8",
        "window",
        "small window",
        "window and a past",
        "window, divided",
        "window of heads of 256",
        "chunks",
        "window in fp8",
        "window and a past in fp8",
        "soft cap and a window",
        "soft cap in fp8",
        "sinks",
        "sinks and a past",
        "heads of 256, divided and whole",
        "short",
        "uneven",
    ],
)
def test_steps_that_it_serves(monkeypatch: pytest.MonkeyPatch, launched: Groups, case: Case, programs: int) -> None:
    """Four programs each of two layers, by the step's schedule, beside rows that decode. All other steps have Triton's kernel."""
    set_borders(monkeypatch, "attention", wide_queries=30)
    set_borders(monkeypatch, "attention", divided_queries=25, wide_window=40)
    check_attention(case, "cpu", atol=3e-2, rtol=3e-2)
    assert launched.programs == programs


def test_new_rows_of_several_tokens_alone(monkeypatch: pytest.MonkeyPatch, launched: Groups) -> None:
    """Nothing is launched for rows of one token where there is none, nor padding. With a past it is, so that a warm-up compiles it."""
    set_borders(monkeypatch, "attention", wide_queries=30)
    decodes, run_decode = [], paged_attention._Call.run_decode
    monkeypatch.setattr(
        paged_attention._Call, "run_decode", lambda *args, **kept: decodes.append(0) or run_decode(*args, **kept)
    )
    for rows, padding, count in ((FRESH[::2], 0, 0), (FRESH, 0, 2), (FRESH[::2], 1, 2), (PAST[::2], 0, 2)):
        case = Case(rows, 16, 1, 4, 128, dtype=F16, kv_dtype=F16, lead=16, padding=padding)
        check_attention(case, "cpu", atol=3e-2, rtol=3e-2)
        assert len(decodes) == count
        decodes.clear()


def test_fp8_pages_of_one_head_after_another(monkeypatch: pytest.MonkeyPatch, launched: Groups) -> None:
    """Where there isn't room for the past of all heads. Where there isn't for one, or the host doesn't know the past, Triton's kernel reads pages."""
    set_borders(monkeypatch, "attention", wide_queries=30)
    case = Case(PAST, 16, 2, 4, 128, dtype=F16, kv_dtype=E4M3, padding=3)
    for tiles, programs in ((4, 16), (2, 0)):  # rows of 40 and 130 tokens have three
        monkeypatch.setattr(paged_dense, "MOST_ELEMENTS", tiles * 2 * 128 * 128)
        check_attention(case, "cpu", atol=3e-2, rtol=3e-2)
        assert launched.programs == programs
        launched.programs = 0
    plan = PagedBackend.plan
    monkeypatch.setattr(PagedBackend, "plan", lambda *args: replace(plan(*args), past=None))
    check_attention(case, "cpu", atol=3e-2, rtol=3e-2)
    assert launched.programs == 0


def test_fp8_pages_take_the_same_room_whatever_the_past_is(monkeypatch: pytest.MonkeyPatch, launched: Groups) -> None:
    """Once a layer. So a step of the warm-up has taken what any other one takes."""
    set_borders(monkeypatch, "attention", wide_queries=30)
    monkeypatch.setattr(paged_dense, "MOST_ELEMENTS", 4 * 2 * 128 * 128)
    rooms, make = [], paged_dense.room_for_tiles
    monkeypatch.setattr(paged_prefill_wide, "room_for_tiles", lambda *given: rooms.append(make(*given)) or rooms[-1])
    layers = []
    for rows in (PAST, (plain(1, 60),)):
        check_attention(Case(rows, 16, 2, 4, 128, dtype=F16, kv_dtype=E4M3), "cpu", atol=3e-2, rtol=3e-2)
        layers.append(len(rooms))
    assert layers == [2, 4] and {len(room) for room in rooms} == {paged_dense.MOST_ELEMENTS}


@pytest.mark.parametrize("static", [False, True], ids=["scales of pages", "scales of the layer"])
def test_the_past_of_fp8_pages(static: bool) -> None:
    """More rows than a program counts at once; rows of one token, and those of padding, have no tiles."""
    torch.manual_seed(0)
    rows = [(3 + i % 7, 1) for i in range(258)] + [(130, 2), (0, 5), (128, 3), (1, 2)] + [(0, 0)] * 2
    page, heads, entries = 8, 3, 41
    k, v = (torch.randn(entries, page, heads, 128).clamp(-3, 3).to(E4M3) for _ in range(2))
    scales = torch.exp2(torch.randint(-3, 3, (1 if static else entries, 2, heads)).float()).expand(entries, -1, -1)
    table = torch.randint(0, entries, (len(rows), 20))
    slots = torch.randperm(len(rows)).int()
    new = torch.tensor([count for _, count in rows], dtype=torch.int32)
    starts, lengths = torch.zeros(len(rows) + 1, dtype=torch.int32), torch.tensor([sum(r) for r in rows]).int()
    starts[1:] = new.cumsum(0)
    past = tuple(old for old, count in rows if count > 1)
    dense = paged_dense.Dense.of(past, len(rows), slots.device)
    room = paged_dense.room_for_tiles(torch.bfloat16, slots.device)
    found = dense.copy(KVPages(0, k, v, scales, static), table, (slots, starts, lengths), slice(1, 3), room)
    for row, (old, count) in enumerate(rows):
        for at in range(0, old if count > 1 else 0, 128):
            n = torch.arange(at, min(at + 128, old))
            entry = table[slots[row], n // page]
            for which, (copied, codes) in enumerate(((found.k, k), (found.v, v))):
                want = codes[entry, n % page].float() * scales[entry, which].unsqueeze(-1)
                tile = copied[int(dense.first_R[row]) + at // 128].float()
                assert torch.equal(tile[: len(n)], want[:, 1:]) and not tile[len(n) :].any()
    assert dense.first_R.diff()[258:262].tolist() == [2, 0, 1, 1] and len(dense.tiles) == 4


def test_a_fixed_order_has_the_one_kernel_of_its_own(monkeypatch: pytest.MonkeyPatch, launched: Groups) -> None:
    """Tokens of an engine with `batch_invariant` must not depend on how long the rows of a step are."""
    monkeypatch.setattr(PagedBackend, "fixed", True)
    set_borders(monkeypatch, "attention", wide_queries=2)
    check_attention(Case(FRESH[:1], 16, 1, 4, 128, dtype=F16, kv_dtype=F16, lead=16), "cpu", atol=3e-2, rtol=3e-2)
    assert launched.programs == 0
