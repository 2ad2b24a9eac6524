"""Steps of one layer's attention in captured graphs, by a backend that is planned on the host, one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from helpers.attention_cases import Case, RowCase, Step, _make_pool, expected, make_batch, make_call, make_step
from pagerunner.attention.base import GraphShape, PlanInputs
from pagerunner.attention.calls import AttentionCall, Heads
from pagerunner.batch import GroupBatch, KVPages, StepRows, WritePlaces
from pagerunner.ops.paged_attention import Scores
from pagerunner.runner.graphs import Graph, GraphEngine

COLUMNS = 64  # of the page table


@dataclass
class Captured:
    """A graph, the tensors that it works on, and the backend's state for it."""

    shape: GraphShape
    state: Any
    rows: StepRows
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    layer: KVPages
    group: GroupBatch
    graph: Graph


def capture(backend: Any, case: Case, shape: GraphShape, pages: int, engine: GraphEngine, device: str) -> Captured:
    """Run the layer once, then capture it, with state of its own each time. Pages are NaN."""
    pool, kv, _ = _make_pool(case, pages)
    typed = pool.to(device).view(case.kv_dtype)
    layer = KVPages(0, *(typed.as_strided(x.shape, x.stride(), x.storage_offset()) for x in kv))
    heads = (case.kv_heads * case.group, case.kv_heads, case.kv_heads)
    q, k, v = (torch.zeros(shape.tokens, n, case.head_dim, dtype=case.dtype, device=device) for n in heads)
    table = torch.zeros(shape.rows + 3, COLUMNS, dtype=torch.int64, device=device)
    entry = torch.full((shape.tokens,), -1, device=device)
    ones = [1] * shape.rows
    rows = replace(StepRows.of(ones, ones, range(shape.rows), device), max_query_len=shape.tokens)
    batch = make_batch(make_step(case, device), case, backend)
    scale = make_step(case).scale
    for last in (False, True):
        state = backend.new_state(shape)
        plan = backend.plan(PlanInputs(rows, [], [], [], table, case.page_tokens, None), state)
        group = replace(batch.groups[0], plan=plan, page_table=table, write=WritePlaces(entry, entry + 1))
        call = AttentionCall(Heads(q, k, v), layer, group, rows, Scores(scale))
        work = lambda call=call: (backend.run(call),)  # noqa: E731
        if last:
            return Captured(shape, state, rows, q, k, v, layer, group, engine.capture(work))
        work()
    raise AssertionError("unreachable")


def replay(captured: Captured, backend: Any, case: Case, step: Step) -> torch.Tensor:
    """The step's output, [T, H, D] float64 on the CPU; that of padding must be finite."""
    batch = make_batch(step, case, backend)  # an eager step's plan in between
    slots, mine = batch.rows.slots_R.tolist(), batch.groups[0].page_table
    group, tokens = captured.group, len(step.q)
    group.page_table[: len(mine), : mine.shape[1]] = mine
    for held, given in ((captured.q, step.q), (captured.k, step.k), (captured.v, step.v)):
        held[:tokens] = given
    for pages, given in ((captured.layer.k, step.layer.k), (captured.layer.v, step.layer.v)):
        pages[: len(given)] = given
    group.write.entry_T.fill_(-1)
    group.write.entry_T[:tokens], group.write.offset_T[:tokens] = step.write
    inputs = PlanInputs(
        captured.rows, step.query_lens, step.seq_lens, slots, group.page_table, case.page_tokens, case.reach
    )
    backend.plan(inputs, captured.state)
    captured.graph.replay()
    out = captured.graph.outputs[0]
    assert out.isfinite().all()
    return out[:tokens].double().cpu()


def replayed(
    backend: Any,
    case: Case,
    steps: Sequence[tuple[RowCase, ...]],
    shapes: Sequence[GraphShape],
    engine: GraphEngine,
    device: str = "cpu",
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of each step what a graph and what the reference made of it, in float64; the graphs take turns."""
    first = make_step(case, device)
    backend.run(make_call(case, first, make_batch(first, case, backend), Heads(first.q, first.k, first.v)))
    made = [[make_step(replace(case, rows=rows), device, seed) for rows in steps] for seed in range(2)]
    pages = max(len(step.layer.k) for some in made for step in some)
    graphs = [capture(backend, case, shape, pages, engine, device) for shape in shapes]
    for turn, (rows, step) in enumerate(zip((*steps, *steps), (*made[0], *made[1]), strict=True)):
        mine = replace(case, rows=rows)
        yield replay(graphs[turn % len(graphs)], backend, mine, step), torch.cat(expected(mine, step))
