"""Steps for attention backends, run against attention written out row by row, with NaN in every slot that nobody wrote."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from pagerunner.attention.base import PlanInputs, Reach
from pagerunner.attention.calls import AttentionCall, Heads, Projection
from pagerunner.batch import ForwardBatch, GroupBatch, KVPages, StepRows, WritePlaces
from pagerunner.ops.paged_attention import HeadPrep, Scores
from pagerunner.ops.rope import RopeAngles


@dataclass(frozen=True)
class RowCase:
    """A row's past, its tokens this step, and how much of an earlier row's pages it would like to share."""

    start: int
    queries: int
    parent: int
    shared_pages: int


@dataclass(frozen=True)
class Case:
    """One step."""

    rows: tuple[RowCase, ...]
    page_tokens: int
    kv_heads: int
    group: int
    head_dim: int
    gap: int = 0
    lead: int = 4  # elements before the first page
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    head_dim_v: int = 0
    reach: Reach | None = None
    sinks: bool = False
    softcap: float = 0.0
    padding: int = 0  # rows and tokens that a graph has beyond the step's own
    spare_columns: int = 0  # of the page table, for backends that read whole tables
    drafts: bool = False  # all of the step's tokens have pages, as any may be the row's last


FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass
class Step:
    """A case's tensors on one device, ready to be run by a backend."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    layer: KVPages
    tables: list[list[int]]  # by row, from `first_pages` on
    first_pages: list[int]
    write: WritePlaces
    query_lens: list[int]
    seq_lens: list[int]
    keys: list[torch.Tensor]  # what pages hold of every row, [L, K, D]
    values: list[torch.Tensor]
    sinks: torch.Tensor | None
    scale: float


def held(x: torch.Tensor, kv_dtype: torch.dtype) -> torch.Tensor:
    """`x` as pages hold it; in fp8 with a scale of 1."""
    return x.to(kv_dtype).to(x.dtype)


def _make_pool(case: Case, num_pages: int) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor | None]:
    """Memory full of NaN, views of it as one layer's keys and values, and those of fp8 pages' scales."""
    size, heads, dim = case.page_tokens, case.kv_heads, case.head_dim
    dim_v = case.head_dim_v or dim
    block = size * heads * (dim + dim_v)
    itemsize = case.kv_dtype.itemsize
    scales_at = -(-block * itemsize // 4) * 4 if case.kv_dtype in FP8 else 0
    part = scales_at + 8 * case.kv_heads if scales_at else block * itemsize  # a layer's share of a page, in bytes
    stride = 2 * part + case.gap * (4 if scales_at else itemsize)  # two layers; the step runs the second
    lead = case.lead * itemsize  # pages don't begin where memory does
    pool = torch.full((num_pages * stride + lead,), 0xFF, dtype=torch.uint8)  # NaN in every dtype
    typed = pool.view(case.kv_dtype)
    kv = []
    for i, d in enumerate((dim, dim_v)):
        first = (lead + part) // itemsize + i * size * heads * dim
        kv.append(typed.as_strided((num_pages, size, heads, d), (stride // itemsize, heads * d, d, 1), first))
    scales = None
    if scales_at:
        first = (lead + part + scales_at) // 4
        scales = pool.view(torch.float32).as_strided(
            (num_pages, 2, case.kv_heads), (stride // 4, case.kv_heads, 1), first
        )
        scales.zero_()  # as of fresh pages
    return pool, kv, scales


def make_step(case: Case, device: str = "cpu", seed: int = 0) -> Step:
    """Random tensors of a case. Whatever the step may not read is NaN."""
    gen = torch.Generator().manual_seed(seed)
    size, heads, dim = case.page_tokens, case.kv_heads, case.head_dim
    dim_v = case.head_dim_v or dim
    num_pages = sum(-(-(r.start + r.queries) // size) for r in case.rows) + 3
    pool, kv, scales = _make_pool(case, num_pages)
    free = torch.randperm(num_pages, generator=gen).tolist()
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    tables: list[list[int]] = []
    entries, offsets, first_pages = [], [], []
    whole: list[list[int]] = []
    for i, row in enumerate(case.rows):
        length = row.start + row.queries
        k, v = (held(torch.randn(length, heads, d, generator=gen).to(case.dtype), case.kv_dtype) for d in (dim, dim_v))
        oldest, kept_from = 0, row.start
        if case.reach is not None:  # what this step doesn't read, and what no later step reads, is in no page
            oldest = max(case.reach.oldest(row.start), 0)
            kept_from = row.start if case.drafts else max(case.reach.oldest(length), row.start)
        pages: list[int] = []
        if i and case.reach is None:
            parent = row.parent % i
            count = min(row.shared_pages, row.start // size, keys[parent].shape[0] // size)
            pages = whole[parent][:count]
            k[: count * size], v[: count * size] = keys[parent][: count * size], values[parent][: count * size]
        own_from = len(pages) * size
        pages = pages + [free.pop() for _ in range(-(-length // size) - len(pages))]
        past = torch.arange(max(own_from, oldest), row.start)
        where = (torch.tensor(pages)[past // size], past % size)
        for view, x in zip(kv, (k, v), strict=True):
            raw = view if scales is None else view.view(torch.uint8)
            x = x[past].to(case.kv_dtype)
            raw[where] = x if scales is None else x.view(torch.uint8)
        if scales is not None:
            scales[torch.tensor(pages)[past // size].unique()] = 1.0
        entries += [pages[p // size] if p >= kept_from else -1 for p in range(row.start, length)]
        offsets += [p % size for p in range(row.start, length)]
        keys.append(k)
        values.append(v)
        whole.append(pages)
        # a page of tokens that this step computes, and no later step reads, is never there
        gone = range(-(-row.start // size), kept_from // size)
        first_pages.append(oldest // size)
        tables.append([-1 if n in gone else page for n, page in enumerate(pages)][oldest // size :])
    query_lens = [r.queries for r in case.rows]
    tokens = sum(query_lens)
    # as a model has them: side by side in one projection's output
    q_heads = heads * case.group
    qk = torch.empty(tokens, q_heads + heads, dim, dtype=case.dtype)
    qk[:, :q_heads] = torch.randn(tokens, q_heads, dim, generator=gen)
    qk[:, q_heads:] = torch.cat([k[r.start :] for k, r in zip(keys, case.rows, strict=True)])
    v_new = torch.cat([v[r.start :] for v, r in zip(values, case.rows, strict=True)])
    pool = pool.to(device)
    typed = pool.view(case.kv_dtype)
    kv = [typed.as_strided(x.shape, x.stride(), x.storage_offset()) for x in kv]
    if scales is not None:
        scales = pool.view(torch.float32).as_strided(scales.shape, scales.stride(), scales.storage_offset())
    qk = qk.to(device)
    return Step(
        q=qk[:, :q_heads],
        k=qk[:, q_heads:],
        v=v_new.to(device),
        layer=KVPages(0, kv[0], kv[1], scales),
        tables=tables,
        first_pages=first_pages,
        write=WritePlaces(torch.tensor(entries, device=device), torch.tensor(offsets, device=device)),
        query_lens=query_lens,
        seq_lens=[r.start + r.queries for r in case.rows],
        keys=keys,
        values=values,
        sinks=torch.randn(q_heads, generator=gen).to(device) if case.sinks else None,
        scale=0.7 / math.sqrt(dim),
    )


def make_batch(step: Step, case: Case, backend: Any) -> ForwardBatch:
    """The step as the backend has planned it. Rows are in slots of no particular order, of a table with more of them."""
    device = step.q.device
    count = len(step.tables)
    ends = [first + len(pages) for first, pages in zip(step.first_pages, step.tables, strict=True)]
    columns = max(map(len, step.tables)) if case.reach else max(ends)
    columns += case.spare_columns
    order = torch.randperm(count + 3, generator=torch.Generator().manual_seed(1))[:count].tolist()
    table = torch.full((count + 3, columns), -1, dtype=torch.int64)
    for slot, first, pages in zip(order, step.first_pages, step.tables, strict=True):
        for n, page in enumerate(pages):
            table[slot, (first + n) % columns] = page
    table = table.to(device)
    rows = StepRows.of(step.query_lens, step.seq_lens, order, device)
    if case.padding:
        rows = padded(rows, case.padding)
    inputs = PlanInputs(rows, step.query_lens, step.seq_lens, order, table, case.page_tokens, case.reach)
    plan = backend.plan(inputs, backend.new_state(None))
    more = torch.full((case.padding,), -1, device=device)
    entries, offsets = torch.cat((step.write.entry_T, more)), torch.cat((step.write.offset_T, torch.zeros_like(more)))
    group = GroupBatch(table, WritePlaces(entries, offsets), case.page_tokens, backend, plan)
    nothing = torch.zeros(rows.num_tokens, dtype=torch.int64, device=device)
    last = torch.tensor(step.query_lens, device=device).cumsum(0) - 1
    return ForwardBatch(nothing, rows, last, (group,), (step.layer,))


def padded(rows: StepRows, count: int) -> StepRows:
    """With `count` more rows and tokens, as a graph has them."""

    def more(x: torch.Tensor, value: int) -> torch.Tensor:
        return torch.cat((x, x.new_full((count,), value)))

    return replace(
        rows,
        slots_R=more(rows.slots_R, 0),
        query_start_R1=more(rows.query_start_R1, int(rows.query_start_R1[-1])),
        seq_lens_R=more(rows.seq_lens_R, 0),
        row_T=more(rows.row_T, -1),
        positions_T=more(rows.positions_T, 0),
    )


def strided(rows: StepRows, stride: int, more: int = 0) -> tuple[StepRows, torch.Tensor]:
    """The same rows with room for `stride` tokens each, and `more` rows of padding; and the places of the tokens there."""
    count, device = rows.num_rows, rows.row_T.device
    row_T = rows.row_T.long()
    places = row_T * stride + torch.arange(rows.num_tokens, device=device) - rows.query_start_R1[row_T]
    total = (count + more) * stride

    def spread(x: torch.Tensor, value: int) -> torch.Tensor:
        return x.new_full((total,), value).index_copy_(0, places, x)

    of_rows = replace(
        padded(rows, more),
        query_start_R1=torch.arange(0, total + 1, stride, dtype=torch.int32, device=device),
        row_T=spread(rows.row_T, -1),
        positions_T=spread(rows.positions_T, 0),
        max_query_len=stride,
        one_token=False,
        stride=stride,
    )
    return of_rows, places


def make_call(case: Case, step: Step, batch: ForwardBatch, inputs: Heads | Projection, **more: Any) -> AttentionCall:
    """The layer's call."""
    scores = Scores(step.scale, case.softcap, step.sinks)
    return AttentionCall(inputs, step.layer, batch.groups[0], batch.rows, scores, **more)


def padded_heads(case: Case, step: Step) -> Heads:
    """The step's heads, and large numbers in padding."""
    heads = Heads(step.q, step.k, step.v)
    if not case.padding:
        return heads
    return Heads(*(torch.cat((x, torch.full_like(x[:1], 1e4).expand(case.padding, -1, -1))) for x in heads))


def run(case: Case, backend: Any, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """The backend's output and the reference's, [T, H, D], both float64 on the CPU."""
    step = make_step(case, device)
    batch = make_batch(step, case, backend)
    call = make_call(case, step, batch, padded_heads(case, step))
    for _ in range(2):  # a second layer of the same step reuses the plan
        out = backend.run(call)
    if case.padding:
        assert out[-case.padding :].isfinite().all()
        out = out[: -case.padding]
    return out.double().cpu(), torch.cat(expected(case, step))


def check_sampled(case: Case, sampled: list[int], backend: Any, device: str = "cpu", **close: float) -> None:
    """What a backend computes for some tokens alone is what it computes for them among all; it stores the same."""
    heads, dim = case.kv_heads * case.group, case.head_dim
    tokens = sum(row.queries for row in case.rows)
    gen = torch.Generator().manual_seed(1)
    angles = RopeAngles(*torch.randn(2, tokens, 1, dim, generator=gen).to(device, case.dtype))
    q_norm, k_norm = torch.rand(2, dim, generator=gen).to(device, case.dtype)
    prep = HeadPrep(heads, case.kv_heads, angles, q_norm, k_norm, 1e-6)
    index = torch.tensor(sampled, dtype=torch.int64, device=device)
    for projected in (True, False):
        found, stored = [], []
        for wanted in (None, index):
            step = make_step(case, device)
            batch = make_batch(step, case, backend)
            qkv = torch.cat((step.q, step.k, step.v), 1)
            inputs = Projection(qkv, prep) if projected else Heads(*prep.split(qkv))
            out = backend.run(make_call(case, step, batch, inputs, wanted=wanted))
            found.append(out[index] if wanted is None else out)
            stored.append([x.view(torch.uint8) for x in (step.layer.k, step.layer.v)])
        torch.testing.assert_close(found[1], found[0], **close)
        assert all(map(torch.equal, *stored))


def expected(case: Case, step: Step) -> list[torch.Tensor]:
    """Attention written out, [Q, H, D] of every row in float64."""
    want = []
    first = 0
    q_THD, sinks = step.q.cpu().double(), None if step.sinks is None else step.sinks.cpu().double()
    for k, v, row in zip(step.keys, step.values, case.rows, strict=True):
        k_LHD, v_LHD = (x.double().repeat_interleave(case.group, 1) for x in (k, v))
        scores_HQL = torch.einsum("qhd,lhd->hql", q_THD[first : first + row.queries], k_LHD) * step.scale
        first += row.queries
        if case.softcap:
            scores_HQL = torch.tanh(scores_HQL / case.softcap) * case.softcap
        queries_Q1 = row.start + torch.arange(row.queries).unsqueeze(-1)
        hidden_QL = torch.arange(k.shape[0]) > queries_Q1
        if case.reach is not None:
            hidden_QL |= torch.arange(k.shape[0]) < case.reach.oldest(queries_Q1)
        scores_HQL = scores_HQL.masked_fill(hidden_QL, float("-inf"))
        if sinks is not None:
            scores_HQL = torch.cat((scores_HQL, sinks.view(-1, 1, 1).expand(-1, row.queries, 1)), -1)
        weights_HQL = scores_HQL.softmax(-1)[..., : k.shape[0]]
        want.append(torch.einsum("hql,lhd->qhd", weights_HQL, v_LHD))
    return want


def plain(start: int, queries: int, shared: int = 0) -> RowCase:
    """A row that shares pages with the first one, if any."""
    return RowCase(start, queries, 0, shared)


rows = st.builds(
    RowCase,
    start=st.one_of(st.just(0), st.integers(0, 130), st.integers(500, 700)),
    queries=st.one_of(st.just(1), st.integers(1, 9), st.integers(1, 70)),
    parent=st.integers(0, 7),
    shared_pages=st.one_of(st.just(0), st.integers(0, 50)),
)
cases = st.builds(
    Case,
    rows=st.lists(rows, min_size=1, max_size=8).map(tuple),
    page_tokens=st.sampled_from([1, 3, 16, 48]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    head_dim=st.sampled_from([2, 8, 20, 64]),
    gap=st.sampled_from([0, 0, 4, 5]),
    head_dim_v=st.sampled_from([0, 0, 0, 6]),
    reach=st.one_of(st.none(), st.none(), st.builds(Reach, st.sampled_from([1, 2, 20, 64, 300]), st.booleans())),
    sinks=st.booleans(),
    softcap=st.sampled_from([0.0, 0.0, 0.0, 1.5]),
)
