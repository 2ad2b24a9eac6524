"""Checks of the paged attention kernels against their twins, at any size and on any device."""

from __future__ import annotations

from dataclasses import replace

import torch

from helpers.attention_cases import FP8, Case, Step, make_batch, make_step, padded_heads, strided
from pagerunner.attention.base import GraphShape, PlanInputs
from pagerunner.attention.paged import PagedBackend
from pagerunner.batch import ForwardBatch, KVPages, StepRows, WritePlaces
from pagerunner.ops.paged_attention import (
    HeadPrep,
    PagedPlan,
    Scores,
    paged_attention,
    prepare_heads_,
    projected_attention,
    store_kv_,
)
from pagerunner.ops.rope import RopeAngles


def snapshot(step: Step) -> tuple[KVPages, torch.Tensor]:
    """The layer's pages as views of a copy of their memory, and that copy as bytes."""
    views = step.layer
    storage = views.k.view(torch.uint8) if views.scales is not None else views.k
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage.untyped_storage()).clone()

    def same(x: torch.Tensor) -> torch.Tensor:
        return whole.view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())

    scales = views.scales
    if scales is not None and not views.static:
        scales = same(scales)
    return KVPages(0, same(views.k), same(views.v), scales, views.static), whole


def assert_heads_close(got: torch.Tensor, want: torch.Tensor, rel: float, of_head: float) -> None:
    """NaN in the same places, elsewhere within `rel` of the element and `of_head` of its head's largest one: a rotation
    leaves small numbers as differences of large ones.
    """
    got, want = got.float(), want.float()
    assert torch.equal(got.isnan(), want.isnan())
    got, want = got.nan_to_num(0.0), want.nan_to_num(0.0)
    bound = rel * want.abs() + of_head * want.abs().amax(-1, keepdim=True)
    excess = (got - want).abs() - bound
    assert (excess <= 0).all(), f"{int((excess > 0).sum())} of {excess.numel()}, by up to {float(excess.max())}"


def assert_pages_close(got: KVPages, want: KVPages, rel: float, of_head: float) -> None:
    """That pages stand for the same, and that those of fp8 have the same scales, but where a last bit made one grow."""
    if got.scales is None or want.scales is None:
        for mine, twin in ((got.k, want.k), (got.v, want.v)):
            assert_heads_close(mine, twin, rel, of_head)
        return
    assert (got.scales != want.scales).float().mean() < 0.01
    for which in (0, 1):
        mine, twin = (
            (pages.k, pages.v)[which].float() * pages.scales[:, which, :].unsqueeze(1).unsqueeze(-1)
            for pages in (got, want)
        )
        assert_heads_close(mine, twin, rel, of_head)


def check_store(case: Case, device: str, *, fused: bool, norm: bool = True, static: bool = False) -> None:
    """`prepare_heads_` (fused) or `store_kv_`: kernel and twin must leave the same bytes behind, but for the last bits of
    what was normed and rotated.
    """
    step = make_step(case, device)
    if static:
        heads = step.layer.k.shape[2]
        both = torch.tensor([[0.5], [0.3]], device=device).repeat(1, heads)
        scales = both.expand(step.layer.k.shape[0], 2, heads)
        layer = replace(step.layer, scales=scales, static=True)
        step = replace(step, layer=layer)
    heads, kv_heads, dim = step.q.shape[1], case.kv_heads, case.head_dim
    gen = torch.Generator().manual_seed(3)
    tokens = step.q.shape[0]
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=gen)
    qkv *= torch.logspace(-2, 2, tokens).view(-1, 1, 1)  # so that scales grow
    qkv = qkv.to(case.dtype).to(device)
    angle = torch.randn(tokens, 1, dim // 2, generator=gen)
    cos, sin = (torch.cat(x, -1).to(case.dtype).to(device) for x in ((angle.cos(),) * 2, (-angle.sin(), angle.sin())))
    weights = [torch.randn(dim, generator=gen).to(case.dtype).to(device) if norm else None for _ in range(2)]
    prep = HeadPrep(heads, kv_heads, RopeAngles(cos, sin), weights[0], weights[1], 1e-5, offset=kv_heads == 1)
    results = []
    for kernel in (True, False):
        pages, memory = snapshot(step)
        mine = qkv.clone()
        if fused:
            op = prepare_heads_.kernel if kernel else prepare_heads_.twin
            op(mine, prep, pages, step.write)
        else:
            k, v = mine[:, heads : heads + kv_heads], mine[:, heads + kv_heads :]
            op = store_kv_.kernel if kernel else store_kv_.twin
            op(k, v, pages, step.write)
        results.append((mine, pages, memory))
    (got, got_pages, got_memory), (want, want_pages, want_memory) = results
    if not fused:
        assert torch.equal(got, want)
        assert torch.equal(got_memory, want_memory)
        return
    close, of_head = {torch.float32: (1e-5, 1e-6), torch.float16: (4e-3, 2e-3), torch.bfloat16: (3e-2, 1e-2)}[
        case.dtype
    ]
    if case.kv_dtype in FP8:
        close = max(close, 0.13 if case.kv_dtype == torch.float8_e4m3fn else 0.26)  # one step of the format
    assert_heads_close(got, want, close, of_head)
    if case.dtype == torch.float32 and case.kv_dtype in FP8:
        assert ((got - want).abs() > 1e-5 * want.abs() + 1e-7).float().mean() < 0.01
    assert_pages_close(got_pages, want_pages, close, of_head)
    assert ((got_memory == 0xFF) == (want_memory == 0xFF)).float().mean() > 0.99


def check_attention(case: Case, device: str, atol: float = 2e-5, rtol: float = 2e-5) -> None:
    """`paged_attention`'s kernels against its twin."""
    step = make_step(case, device)
    batch = make_batch(step, case, PagedBackend())
    group, pages = batch.groups[0], step.layer
    store_kv_.twin(step.k, step.v, pages, step.write)
    heads, scores = padded_heads(case, step), Scores(step.scale, case.softcap, step.sinks)
    args = (*heads, pages, group.page_table, batch.rows, group.plan, scores)
    want = paged_attention.twin(*args)
    for _ in range(2):  # a second layer reuses what the first computed
        got = paged_attention.kernel(*args)
        assert got.isfinite().all()
        torch.testing.assert_close(got, want, atol=atol, rtol=rtol)


def check_projected(
    case: Case,
    device: str,
    atol: float = 2e-5,
    rtol: float = 2e-5,
    *,
    loud: float = 1.0,
    static: bool = False,
    parts: int = 0,
) -> None:
    """`projected_attention` against its twin: what it returns, and what it leaves in pages. `loud` multiplies keys and
    values, beyond what the scales of fp8 pages have been made for. `parts`: the projection comes as so many sums, which are of two tokens more.
    """
    step = make_step(case, device)
    if static:
        heads = step.layer.k.shape[2]
        both = torch.tensor([[0.7], [0.3]], device=device).repeat(1, heads)  # no powers of two, as a checkpoint's own
        scales = both.expand(step.layer.k.shape[0], 2, heads)
        step = replace(step, layer=replace(step.layer, scales=scales, static=True))
    batch = make_batch(step, case, PagedBackend())
    heads, dim = step.q.shape[1], case.head_dim
    gen = torch.Generator().manual_seed(5)
    tokens = step.q.shape[0] + case.padding
    qkv = torch.randn(tokens, heads + 2 * case.kv_heads, dim, generator=gen).to(case.dtype).to(device)
    angle = torch.randn(tokens, 1, dim // 2, generator=gen)
    cos, sin = (torch.cat(x, -1).to(case.dtype).to(device) for x in ((angle.cos(),) * 2, (-angle.sin(), angle.sin())))
    weights = [(torch.rand(dim, generator=gen) * x).to(case.dtype).to(device) for x in (1.0, loud)]
    qkv[:, heads + case.kv_heads :] *= loud
    prep = HeadPrep(heads, case.kv_heads, RopeAngles(cos, sin), weights[0], weights[1], 1e-5, offset=case.kv_heads == 1)
    group, scores = batch.groups[0], Scores(step.scale, case.softcap, step.sinks)
    if parts:
        sums = torch.randn(parts, tokens + 2, *qkv.shape[1:], generator=gen).to(device)
        prep = prep._replace(parts_PTND=sums)
    results = []
    for run in (projected_attention.twin, projected_attention.kernel):
        pages, _ = snapshot(step)
        args = (pages, group.write, group.page_table, batch.rows, group.plan, scores)
        results.append((run(qkv.clone(), prep, *args), pages))
    (want, want_pages), (got, got_pages) = results
    if (
        got_pages.scales is None or got_pages.static
    ):  # a second layer that finds the first one's schedule, and stores the same
        again = projected_attention.kernel(qkv.clone(), prep, got_pages, *args[1:])
        assert torch.equal(again, got)
    torch.testing.assert_close(got, want, atol=atol * loud, rtol=rtol)
    assert_pages_close(got_pages, want_pages, rtol, 1e-2 if case.dtype == torch.bfloat16 else atol)


def in_strides(case: Case, batch: ForwardBatch, stride: int) -> tuple[StepRows, PagedPlan, torch.Tensor]:
    """The batch as a strided one in a graph, with as many more rows as the case has padding: its rows, the plan, and where tokens are."""
    rows, places = strided(batch.rows, stride, case.padding)
    group, backend = batch.groups[0], PagedBackend()
    shape = GraphShape(rows.num_rows, rows.num_tokens, rows.max_seq_len)
    inputs = PlanInputs(rows, [], [], [], group.page_table, case.page_tokens, case.reach)
    return rows, backend.plan(inputs, backend.new_state(shape)), places


def spread(x: torch.Tensor, places: torch.Tensor, count: int, value: float) -> torch.Tensor:
    """The tokens of `x` at their places among `count`."""
    return x.new_full((count, *x.shape[1:]), value).index_copy_(0, places, x)


def check_drafts(
    case: Case, stride: int, device: str, atol: float = 2e-5, rtol: float = 2e-5, *, equal: bool = False
) -> None:
    """`paged_attention` of a strided batch against the twin's of the same rows without room for more tokens. `equal`: bit for bit what the
    kernel for rows of one token gives to the rows' first tokens, to their second ones, and so on.
    """
    step = make_step(replace(case, drafts=True), device)
    batch = make_batch(step, replace(case, padding=0), PagedBackend())
    rows, plan, places = in_strides(case, batch, stride)
    group, pages, scores = batch.groups[0], step.layer, Scores(step.scale, case.softcap, step.sinks)
    store_kv_.twin(step.k, step.v, pages, step.write)
    want = paged_attention.twin(
        step.q, step.k, step.v, pages, group.page_table, batch.rows, replace(group.plan, scratch={}), scores
    )
    heads = [spread(x, places, rows.num_tokens, 10.0) for x in (step.q, step.k, step.v)]
    args = (*heads, pages, group.page_table, rows, plan, scores)
    twin = paged_attention.twin(*args)
    torch.testing.assert_close(twin[places], want, atol=atol, rtol=rtol)
    for _ in range(2):  # a second layer reuses what the first computed
        got = paged_attention.kernel(*args)
        torch.testing.assert_close(got, twin, atol=atol, rtol=rtol)
    one_token = replace(group.plan, one_token=True)
    for number in range(stride) if equal else ():
        at = (places % stride == number).nonzero().squeeze(-1)
        heads = [x.index_select(0, at) for x in (step.q, step.k, step.v)]
        alone, fresh = batch.rows.of_tokens(at), replace(one_token, scratch={})
        one = paged_attention.kernel(*heads, pages, group.page_table, alone, fresh, scores)
        assert torch.equal(got[places[at]], one)


def check_projected_drafts(case: Case, stride: int, device: str, atol: float = 2e-5, rtol: float = 2e-5) -> None:
    """`projected_attention` of a strided batch against its twin: what it returns, and what it leaves in pages."""
    step = make_step(replace(case, drafts=True), device)
    batch = make_batch(step, replace(case, padding=0), PagedBackend())
    rows, plan, places = in_strides(case, batch, stride)
    heads, dim, total = step.q.shape[1], case.head_dim, rows.num_tokens
    gen = torch.Generator().manual_seed(5)
    qkv = torch.randn(total, heads + 2 * case.kv_heads, dim, generator=gen).to(case.dtype).to(device)
    angle = torch.randn(total, 1, dim // 2, generator=gen)
    cos, sin = (torch.cat(x, -1).to(case.dtype).to(device) for x in ((angle.cos(),) * 2, (-angle.sin(), angle.sin())))
    weights = [torch.rand(dim, generator=gen).to(case.dtype).to(device) for _ in range(2)]
    prep = HeadPrep(heads, case.kv_heads, RopeAngles(cos, sin), weights[0], weights[1], 1e-5, offset=case.kv_heads == 1)
    write = WritePlaces(
        spread(step.write.entry_T, places, total, -1).to(torch.int64),
        spread(step.write.offset_T, places, total, 0).to(torch.int64),
    )
    scores, results = Scores(step.scale, case.softcap, step.sinks), []
    for run in (projected_attention.twin, projected_attention.kernel):
        pages, _ = snapshot(step)
        plan.scratch.clear()
        results.append((run(qkv.clone(), prep, pages, write, batch.groups[0].page_table, rows, plan, scores), pages))
    (want, want_pages), (got, got_pages) = results
    torch.testing.assert_close(got, want, atol=atol, rtol=rtol)
    assert_pages_close(got_pages, want_pages, rtol, 1e-2 if case.dtype == torch.bfloat16 else atol)
