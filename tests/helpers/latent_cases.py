"""Steps of latent attention, run against attention over expanded keys and values, with NaN in every unwritten slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from helpers.attention_cases import padded, strided
from pagerunner.attention.base import GraphShape, PlanInputs
from pagerunner.attention.calls import LatentCall, UpProjection
from pagerunner.batch import ForwardBatch, GroupBatch, LatentPages, StepRows, WritePlaces
from pagerunner.ops.latent_attention import read_latent, store_latent_
from pagerunner.ops.latent_heads import LatentPrep
from pagerunner.ops.linear import Norm
from pagerunner.ops.rope import RopeAngles, rope_angles


@dataclass(frozen=True)
class RowCase:
    """A row's past, its tokens this step, and how many pages of the first row it would like to share."""

    start: int
    queries: int
    shared_pages: int = 0


@dataclass(frozen=True)
class Case:
    """One step."""

    rows: tuple[RowCase, ...]
    page_tokens: int = 16
    heads: int = 2
    key_dim: int = 6
    rope_dim: int = 4
    value_dim: int = 5
    latent_dim: int = 8
    gap: int = 0
    dtype: torch.dtype = torch.float32  # of the pages
    compute: torch.dtype = torch.float32
    padding: int = 0  # rows and tokens that a graph has beyond the step's own
    in_graph: bool = False
    stride: int = 0  # a strided batch, with room for so many tokens in each of the rows, and of the rows of padding
    raw: bool = False  # the backend also norms and rotates
    pairs: bool = True


def run(case: Case, backend: Any, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """The backend's output and the reference's, [T, H, V], float64 on the CPU.

    Of fp8 pages the reference takes what they hold afterwards.
    """
    torch.manual_seed(0)
    size, vector = case.page_tokens, case.latent_dim + case.rope_dim
    stride = 2 * size * vector + case.gap  # two layers; the step runs the second
    num_pages = sum(-(-(r.start + r.queries) // size) for r in case.rows) + 3
    fp8 = case.dtype.itemsize == 1
    scales = torch.zeros(num_pages, 2, 1) if fp8 else None
    pool = torch.full((num_pages * stride,), float("nan")).to(case.dtype)
    pages = pool.as_strided((num_pages, size, vector), (stride, vector, 1), size * vector)
    free = torch.randperm(num_pages).tolist()
    vectors: list[torch.Tensor] = []
    tables: list[list[int]] = []
    entries, offsets = [], []
    for row in case.rows:
        length = row.start + row.queries
        own = torch.randn(length, vector).to(case.compute if fp8 else case.dtype).to(case.compute).float()
        held: list[int] = []
        if tables:
            count = min(row.shared_pages, row.start // size, vectors[0].shape[0] // size)
            held = tables[0][:count]
            own[: count * size] = vectors[0][: count * size]
        past = torch.arange(len(held) * size, row.start)
        held = held + [free.pop() for _ in range(-(-length // size) - len(held))]
        store_latent_.twin(
            own[past].to(case.compute), pages, WritePlaces(torch.tensor(held)[past // size], past % size), _one(scales)
        )
        entries += [held[p // size] for p in range(row.start, length)]
        offsets += [p % size for p in range(row.start, length)]
        vectors.append(own)
        tables.append(held)
    query_lens = [r.queries for r in case.rows]
    seq_lens = [r.start + r.queries for r in case.rows]
    tokens = sum(query_lens)
    q = torch.randn(tokens, case.heads, case.key_dim + case.rope_dim).to(case.compute)
    weight = torch.randn(case.heads * (case.key_dim + case.value_dim), case.latent_dim) / case.latent_dim**0.5
    weight = weight.to(case.compute)
    up = UpProjection(weight.to(device), case.heads, case.key_dim, case.value_dim)
    new = torch.cat([x[r.start :] for x, r in zip(vectors, case.rows, strict=True)]).to(case.compute)
    given, stored, prep = q.clone(), new.clone(), None
    if case.raw:
        prep = _prep(case, torch.cat([torch.arange(r.start, r.start + r.queries) for r in case.rows]))
        prep.apply_(q, new)
        for own, r, ready in zip(vectors, case.rows, new.split(query_lens), strict=True):
            own[r.start :] = ready.to(case.dtype).float()
        for own, held in zip(vectors[1:], tables[1:], strict=True):
            count = sum(a == b for a, b in zip(held, tables[0], strict=False)) * size
            own[:count] = vectors[0][:count]
    places, count = _places(case)
    if prep is not None:
        prep = _on(prep, places, count, device)
    pool = pool.to(device)
    pages = pool.as_strided((num_pages, size, vector), (stride, vector, 1), size * vector)
    layer = LatentPages(0, pages, None if scales is None else scales.to(device))
    where = (_spread(torch.tensor(x), places, count, fill).to(device) for x, fill in ((entries, -1), (offsets, 0)))
    batch = _batch(case, backend, device, tables, query_lens, seq_lens, *where, layer)
    given, stored = (_spread(x, places, count, 1e4).to(device) for x in (given, stored))
    for _ in range(2):  # a second layer of the same step reuses the plan
        inputs = torch.cat((given.flatten(1), stored), -1)  # as one projection makes them
        q_THD, vectors_TL = inputs[:, : given[0].numel()].unflatten(-1, given.shape[1:]), inputs[:, given[0].numel() :]
        call = LatentCall(q_THD, vectors_TL, up, layer, batch.groups[0], batch.rows, 0.4, prep)
        out = backend.run(call)
    assert out.isfinite().all()
    if layer.scales is not None:
        pages, scales = pages.view(torch.uint8).cpu().view(case.dtype), layer.scales.cpu()
        for own, held in zip(vectors, tables, strict=True):
            at = torch.arange(own.shape[0])
            own[:] = read_latent(pages, torch.tensor(held)[at // size], at % size, torch.float32, _one(scales))
    want = _expected(case, vectors, weight.double(), q.double())
    out = out.double().cpu()
    if case.stride:
        missing = torch.ones(count, dtype=torch.bool).index_fill_(0, places, False)
        assert not out[missing].any(), "tokens that aren't there get zeros"
    return out[places], want


def _expected(case: Case, vectors: list[torch.Tensor], weight: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Attention over expanded keys and values, [T, H, V] in float64."""
    want, first = [], 0
    for own, row in zip(vectors, case.rows, strict=True):
        both = (own[:, : case.latent_dim].double() @ weight.T).unflatten(-1, (case.heads, -1))
        rope = own[:, None, case.latent_dim :].double().expand(-1, case.heads, -1)
        keys, values = torch.cat((both[..., : case.key_dim], rope), -1), both[..., case.key_dim :]
        scores = torch.einsum("qhd,lhd->hql", q[first : first + row.queries], keys) * 0.4
        later = torch.arange(own.shape[0]) > row.start + torch.arange(row.queries).unsqueeze(-1)
        want.append(torch.einsum("hql,lhv->qhv", scores.masked_fill(later, float("-inf")).softmax(-1), values))
        first += row.queries
    return torch.cat(want)


def _places(case: Case) -> tuple[torch.Tensor, int]:
    """Where the step's tokens are, and among how many."""
    lens = torch.tensor([row.queries for row in case.rows])
    if not case.stride:
        return torch.arange(int(lens.sum())), int(lens.sum()) + case.padding
    inside = torch.cat([torch.arange(count) for count in lens.tolist()])
    row_T = torch.arange(len(lens)).repeat_interleave(lens)
    return row_T * case.stride + inside, (len(lens) + case.padding) * case.stride


def _spread(x: torch.Tensor, places: torch.Tensor, count: int, fill: float) -> torch.Tensor:
    """The tokens of `x` at their places among `count`."""
    return x.new_full((count, *x.shape[1:]), fill).index_copy_(0, places, x)


def _one(scales: torch.Tensor | None) -> torch.Tensor | None:
    """The vectors' scales."""
    return None if scales is None else scales[:, 0, 0]


def _prep(case: Case, positions: torch.Tensor) -> LatentPrep:
    frequencies = torch.rand(case.rope_dim // 2)
    norm = Norm((1 + 0.2 * torch.randn(case.latent_dim)).to(case.compute), 1e-6)
    return LatentPrep(norm, rope_angles(positions, frequencies, 1.0, case.compute), case.pairs)


def _on(prep: LatentPrep, places: torch.Tensor, count: int, device: str) -> LatentPrep:
    """For a step with more tokens."""
    angles = (_spread(x, places, count, 1.0).to(device) for x in prep.angles)
    norm = prep.norm._replace(weight_I=prep.norm.weight_I.to(device))
    return prep._replace(norm=norm, angles=RopeAngles(*angles))


def _batch(
    case: Case,
    backend: Any,
    device: str,
    tables: list[list[int]],
    query_lens: list[int],
    seq_lens: list[int],
    entry: torch.Tensor,
    offset: torch.Tensor,
    layer: LatentPages,
) -> ForwardBatch:
    size, count, wide = case.page_tokens, len(tables), max(map(len, tables))
    slots = torch.randperm(count + 2)[:count].tolist()
    table = torch.full((count + 2, wide + 1), -1, dtype=torch.int64)
    for slot, held in zip(slots, tables, strict=True):
        table[slot, : len(held)] = torch.tensor(held)
    table = table.to(device)
    rows = StepRows.of(query_lens, seq_lens, slots, device)
    if case.stride:
        rows, _ = strided(rows, case.stride, case.padding)
    elif case.padding:
        rows = padded(rows, case.padding)
    shape = GraphShape(rows.num_rows, rows.num_tokens, rows.max_seq_len) if case.in_graph else None
    hosts = ([], [], []) if case.in_graph else (query_lens, seq_lens, slots)
    plan = backend.plan(PlanInputs(rows, *hosts, table, size, None), backend.new_state(shape))
    nothing = torch.zeros(rows.num_tokens, dtype=torch.int64, device=device)
    return ForwardBatch(
        nothing, rows, nothing, (GroupBatch(table, WritePlaces(entry, offset), size, backend, plan),), (layer,)
    )
