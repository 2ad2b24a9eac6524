"""Times of DeepSeek-V3.2's attention on a CUDA device: indexer and attention to what it chooses, beside the bytes that they must read.

    python scripts/bench_sparse.py [--rows 1 64] [--contexts 128 4096] [--heads 16 128] [--pages bf16 fp8] [--drafts N] [--prompt N]

A line is one layer's attention in a graph: from projections to values. `scores`, `choice`, `chosen` and `rest` are its parts: the indexer's
logits, the exact best of them, attention to these, and what is left (rotary positions, pages, products with the up-projection). The
floor is the bytes of the indexer's keys and of chosen slots over `--bandwidth`. Each of several layers has pages of its own, so that the
device's cache doesn't hold them. With `--prompt` a line is a piece of a prompt of so many tokens behind the context, and its rate counts
the operations that the algorithm needs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch
from triton.testing import do_bench, do_bench_cudagraph

from pagerunner.attention.base import GraphShape, PlanInputs
from pagerunner.attention.calls import IndexerQueries, LatentCall, UpProjection
from pagerunner.attention.paged_sparse import PagedSparseBackend
from pagerunner.batch import GroupBatch, LatentPages, StepRows, WritePlaces
from pagerunner.ops.indexer import choose_slots
from pagerunner.ops.kernels.latent.indexer import run_choice, run_scores
from pagerunner.ops.latent_heads import LatentPrep
from pagerunner.ops.linear import Norm
from pagerunner.ops.rope import RopeAngles
from pagerunner.ops.sparse_latents import Latents, chosen_values

LATENT, ROPE, KEY, VALUE, INDEX, INDEX_HEADS, TOP_K, PAGE = 512, 64, 128, 128, 128, 64, 2048, 64
DTYPE = torch.bfloat16


class Step(NamedTuple):
    """One layer's call for each of several layers."""

    calls: list[LatentCall]
    backend: PagedSparseBackend


def pages_of(count: int, fp8: bool) -> LatentPages:
    """Pages of one layer, filled with numbers."""
    slots = 656 if fp8 else 1152
    unit = PAGE * (slots + (132 if fp8 else 256))
    memory = torch.randint(0, 64, (count * unit,), dtype=torch.uint8, device="cuda")

    def view(dtype: torch.dtype, first: int, stride: int, elements: int) -> torch.Tensor:
        size, item = (count, PAGE, elements), dtype.itemsize
        return memory.view(dtype).as_strided(size, (unit // item, stride // item, 1), first // item)

    if not fp8:
        vectors, keys = view(DTYPE, 0, 1152, LATENT + ROPE), view(DTYPE, PAGE * 1152, 256, INDEX)
        for x in (vectors, keys):
            x.normal_()
        return LatentPages(0, vectors, indexer=keys)
    held = torch.float8_e4m3fn
    made = LatentPages(
        0,
        view(held, 0, 656, LATENT),
        indexer=view(held, PAGE * 656, INDEX, INDEX),
        rope=view(DTYPE, 528, 656, ROPE),
        slot_scales=view(torch.float32, LATENT, 656, 4),
        indexer_scales=view(torch.float32, PAGE * (656 + INDEX), 4, 1).squeeze(-1),
    )
    assert made.rope is not None and made.slot_scales is not None and made.indexer_scales is not None
    made.rope.normal_()
    made.slot_scales.fill_(0.5)
    made.indexer_scales.copy_(2.0 ** torch.randint(-2, 2, made.indexer_scales.shape, device="cuda"))
    return made


def step_of(rows: int, context: int, heads: int, fp8: bool, layers: int, tokens: int, in_graph: bool) -> Step:
    """Rows that have `context` tokens after this step, of which `tokens` are new."""
    per_row = -(-context // PAGE)
    table = torch.randperm(rows * per_row, device="cuda").view(rows, per_row)
    drafts = in_graph and tokens > 1
    batch = StepRows.of([tokens] * rows, [context] * rows, range(rows), "cuda")
    if drafts:
        batch = StepRows(*(getattr(batch, name) for name in StepRows.__slots__[:7]), one_token=False, stride=tokens)
    backend, total = PagedSparseBackend(), rows * tokens
    shape = GraphShape(rows, total, context) if in_graph else None
    hosts = ([], [], []) if in_graph else ([tokens] * rows, [context] * rows, list(range(rows)))
    at = batch.positions_T
    entry = table[batch.row_T.long(), at // PAGE].contiguous()
    weight = torch.randn(heads * (KEY + VALUE), LATENT, device="cuda", dtype=DTYPE) / LATENT**0.5
    angles = RopeAngles(*(torch.rand(total, 1, ROPE, device="cuda", dtype=DTYPE) for _ in range(2)))
    prep = LatentPrep(Norm(torch.ones(LATENT, device="cuda", dtype=DTYPE), 1e-6), angles, True)
    plan = backend.plan(PlanInputs(batch, *hosts, table, PAGE, None), backend.new_state(shape))
    group = GroupBatch(table, WritePlaces(entry, at % PAGE), PAGE, backend, plan)
    calls = []
    for _ in range(layers):
        q = torch.randn(total, heads, KEY + ROPE, device="cuda", dtype=DTYPE)
        vectors = torch.randn(total, LATENT + ROPE, device="cuda", dtype=DTYPE)
        index_q = torch.randn(total, INDEX_HEADS, INDEX, device="cuda", dtype=DTYPE)
        chooser = IndexerQueries(index_q, torch.randn(total, INDEX_HEADS, device="cuda"), TOP_K)
        keys = torch.randn(total, INDEX, device="cuda", dtype=DTYPE)
        up = UpProjection(weight, heads, KEY, VALUE)
        calls.append(LatentCall(q, vectors, up, pages_of(rows * per_row, fp8), group, batch, 0.07, prep, chooser, keys))
    return Step(calls, backend)


def timed(run: Callable[[], object], layers: int, in_graph: bool) -> float:
    """Microseconds of a layer."""
    bench = do_bench_cudagraph if in_graph else do_bench
    torch.cuda.synchronize()  # what was filled on this stream, before a graph's own reads it
    found: float = bench(run, rep=20)
    return found * 1e3 / layers


def parts_of(step: Step, in_graph: bool) -> list[float]:
    """Microseconds of all, scores, choice, and attention to what was chosen with the product behind it."""
    layers = len(step.calls)

    def each(run: Callable[[LatentCall], object]) -> float:
        return timed(lambda: [run(call) for call in step.calls], layers, in_graph)

    def choice(call: LatentCall) -> tuple[object, ...]:
        chooser = call.chooser
        assert chooser is not None
        return chooser.q_TJI, chooser.weights_TJ, TOP_K, call.pages.indexer, call.group.page_table, call.rows, 1

    whole = each(step.backend.run)
    rows, shared = step.calls[0].rows, {}
    scores = chosen_time = picked = 0.0
    if rows.max_seq_len > TOP_K and rows.num_tokens <= 1024:
        scores = each(lambda call: run_scores(*choice(call), call.pages.indexer_scales))  # type: ignore[arg-type]
        held = run_scores(*choice(step.calls[0]), step.calls[0].pages.indexer_scales)  # type: ignore[arg-type]
        picked = each(lambda call: run_choice(held, TOP_K, rows, 1, shared))
    first, scratch = step.calls[0], {}
    chosen = choose_slots(*choice(first), {}, first.pages.indexer_scales)  # type: ignore[arg-type]
    total, heads = rows.num_tokens, first.up.num_heads
    q = torch.randn(total, heads, LATENT, device="cuda", dtype=DTYPE)

    def attend(call: LatentCall) -> object:
        pages = call.pages
        if pages.rope is not None:
            held = Latents(pages.latent, pages.rope, pages.slot_scales)
        else:
            held = Latents(pages.latent[..., :LATENT], pages.latent[..., LATENT:])
        turned = call.q_THD[..., KEY:]
        return chosen_values(q, turned, held, call.group.page_table, rows, chosen, 0.07, call.up.values_HVC, scratch)

    chosen_time = each(attend)
    return [whole, scores, picked, chosen_time]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 4096, 32_768, 65_536])
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--pages", nargs="+", default=["bf16", "fp8"], choices=["bf16", "fp8"])
    parser.add_argument("--drafts", type=int, default=0, help="draft tokens of each row")
    parser.add_argument("--prompt", type=int, default=0, help="new tokens of each row, not in a graph")
    parser.add_argument("--bandwidth", type=float, default=4.35, help="TB/s")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}; microseconds of a layer")
    print(
        f"{'rows':>5} {'context':>8} {'heads':>6} {'pages':>6} {'all':>9} {'scores':>9} {'choice':>9} {'chosen':>9} {'rest':>9} {'floor':>9} {'times':>6}"
    )
    for heads in args.heads:
        for pages in args.pages:
            for rows in args.rows:
                for context in args.contexts:
                    fp8, tokens = pages == "fp8", args.prompt or 1 + args.drafts
                    layers = 1 if args.prompt else 8 if rows * context < 100_000 else 2
                    torch.manual_seed(0)
                    in_graph = not args.prompt
                    step = step_of(rows, max(context, tokens), heads, fp8, layers, tokens, in_graph)
                    found = parts_of(step, in_graph)
                    scored = context if context > TOP_K else 0
                    bytes_read = rows * (
                        scored * (132 if fp8 else 256) + min(context, TOP_K) * tokens * (656 if fp8 else 1152)
                    )
                    floor = bytes_read / args.bandwidth / 1e6
                    rest = found[0] - sum(found[1:])
                    line = "".join(f" {x:9.1f}" for x in (*found, rest, floor))
                    more = f" {found[0] / floor:6.2f}"
                    if args.prompt:
                        seen = rows * (tokens * context - tokens * (tokens - 1) / 2)
                        chosen = rows * sum(min(TOP_K, context - i) for i in range(tokens))
                        work = 2 * (seen * INDEX_HEADS * INDEX + chosen * heads * (2 * LATENT + ROPE))
                        more = f" {work / found[0] / 1e6:6.1f} TFLOP/s"
                    print(f"{rows:>5} {context:>8} {heads:>6} {pages:>6}{line}{more}", flush=True)
                    del step
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
