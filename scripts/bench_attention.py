"""Times the paged attention kernels on this machine's GPU and compares them with their twins.

    python scripts/bench_attention.py [--only decode,prefill,...] [--tiles '{"decode": [[16, 64, 4, 3, 2]]}']

A table: kernel, shape, time, rate, share of the card's ceiling (measured here), error. Decode steps run as CUDA graphs
over several layers of one page-major pool, so that the cache holds nothing of the next layer's pages. `--tiles` tries
other tiles than the kernels choose: rows, keys, warps, stages, programs per multiprocessor.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from pagerunner.batch import KVPages, StepRows, WritePlaces
from pagerunner.ops.kernels.paged import paged_attention as kernels
from pagerunner.ops.paged_attention import (
    HeadPrep,
    PagedPlan,
    Scores,
    paged_attention,
    prepare_heads_,
    projected_attention,
)
from pagerunner.ops.rope import RopeAngles

DEVICE = torch.device("cuda")
COMPILE_ONLY = False
COPY, PRODUCT = 4.28e12, 788e12  # measured on an H200: bytes read and written by a copy, bf16 products of 8192^3


@dataclass
class Shape:
    """A step of rows with `queries` new tokens after `past` ones."""

    past: list[int]
    queries: int
    heads: int
    kv_heads: int = 8
    dim: int = 128
    page: int = 16
    layers: int = 8
    kv_dtype: torch.dtype = torch.bfloat16
    shared: int = 0
    window: int = 0
    dtype: torch.dtype = torch.bfloat16

    @property
    def kv_bytes(self) -> int:
        """What one layer must read of pages, a shared prefix counted once."""
        tokens = sum(min(n + self.queries, self.window or 1 << 60) for n in self.past)
        tokens -= self.shared * (len(self.past) - 1)
        return tokens * self.kv_heads * self.dim * 2 * self.kv_dtype.itemsize

    @property
    def flops(self) -> float:
        """Of one layer's causal attention."""
        pairs = sum(self.queries * n + self.queries * (self.queries + 1) / 2 for n in self.past)
        return 4.0 * pairs * self.heads * self.dim


class Step:
    """Tensors of a shape: pages in random order, layers side by side in each page."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        page, block = shape.page, shape.page * shape.kv_heads * shape.dim
        counts = [-(-(n + shape.queries) // page) for n in shape.past]
        total = sum(counts) + 1
        fp8 = shape.kv_dtype.itemsize == 1
        scales_bytes = 2 * shape.kv_heads * 4 if fp8 else 0
        layer_size = 2 * block + scales_bytes // shape.kv_dtype.itemsize
        stride = shape.layers * layer_size
        pool = torch.empty(total * stride, dtype=torch.uint8 if fp8 else shape.kv_dtype, device=DEVICE)
        for part in pool.split(1 << 28):
            part.random_(0, 0x70) if fp8 else part.normal_()
        size, strides = (total, page, shape.kv_heads, shape.dim), (stride, shape.kv_heads * shape.dim, shape.dim, 1)
        self.pages = []
        for layer in range(shape.layers):
            first = layer * layer_size
            k, v = (pool.view(shape.kv_dtype).as_strided(size, strides, first + i * block) for i in range(2))
            scales = None
            if fp8:
                at = (total, 2, shape.kv_heads), (stride // 4, shape.kv_heads, 1), (first + 2 * block) // 4
                scales = pool.view(torch.float32).as_strided(*at).fill_(2.0**-6)
            self.pages.append(KVPages(0, k, v, scales))
        order = torch.randperm(total).tolist()
        table = torch.zeros(len(counts) + 1, max(counts) + 16, dtype=torch.int64)
        common = [order.pop() for _ in range(shape.shared // page)]
        for row, count in enumerate(counts):
            table[row, :count] = torch.tensor(common + [order.pop() for _ in range(count - len(common))])
        rows, new = len(counts), shape.queries
        positions = torch.cat([torch.arange(n, n + new) for n in shape.past])
        self.table = table.to(DEVICE)
        self.rows = StepRows.of([new] * rows, [n + new for n in shape.past], range(rows), DEVICE)
        row_of, offset = torch.arange(rows).repeat_interleave(new), positions % page
        self.write = WritePlaces(table[row_of, positions // page].to(DEVICE), offset.to(DEVICE))
        self.qkv = torch.randn(rows * new, shape.heads + 2 * shape.kv_heads, shape.dim, device=DEVICE).to(shape.dtype)
        self.parts = self.qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
        self.library = True  # whether a library may do it
        self.plan = self.new_plan()
        angles = torch.randn(rows * new, 1, shape.dim, device=DEVICE).to(shape.dtype)
        weight = torch.randn(shape.dim, device=DEVICE).to(shape.dtype)
        self.prep = HeadPrep(shape.heads, shape.kv_heads, RopeAngles(angles, angles), weight, weight, 1e-6)

    def new_plan(self) -> PagedPlan:
        """A plan that has computed nothing yet."""
        shape = self.shape
        fresh = (shape.queries,) * len(shape.past) if self.library and not any(shape.past) else ()
        return PagedPlan(
            window=shape.window,
            one_token=shape.queries == 1,
            usual_query_len=shape.queries,
            fresh=fresh,
            past=tuple(shape.past) if shape.queries > 1 and not fresh else (),
            sharing=bool(shape.shared),
        )

    def attend(self, layer: int) -> torch.Tensor:
        """One layer's attention; a step begins with layer 0."""
        return paged_attention(*self.parts, self.pages[layer], *self.rest(layer))

    def project(self, layer: int) -> torch.Tensor:
        """One layer from its projection on."""
        return projected_attention(self.qkv, self.prep, self.pages[layer], self.write, *self.rest(layer))

    def rest(self, layer: int) -> tuple[torch.Tensor, StepRows, PagedPlan, Scores]:
        """What layers share; the first one's plan is new."""
        if layer == 0:
            self.plan = self.new_plan()
        return self.table, self.rows, self.plan, Scores(self.shape.dim**-0.5)

    def error(self) -> float:
        """Relative error of a layer's attention against the twin, after its tokens were stored."""
        if COMPILE_ONLY:
            return 0.0
        q, k, v = self.parts
        entry, offset = self.write
        for which, x in ((0, k), (1, v)):
            pages = (self.pages[0].k, self.pages[0].v)[which]
            if self.pages[0].scales is None:
                pages[entry, offset] = x.to(pages.dtype)
        if self.pages[0].scales is not None:  # as the pages have them, and exact in fp8
            for which, x in ((0, k), (1, v)):
                held = (
                    (self.pages[0].k, self.pages[0].v)[which].view(torch.uint8)[entry, offset].view(self.shape.kv_dtype)
                )
                x.copy_(held.to(torch.float32) * 2.0**-6)
        got = self.attend(0).float()
        want = torch.cat(list(self._twin(q, k, v)), 1).float()
        return float((got - want).norm() / want.norm())

    def _twin(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Iterator[torch.Tensor]:
        """The twin's results. Of large steps it has one head of keys at a time, as it holds all scores."""
        kv_heads, group = self.shape.kv_heads, self.shape.heads // self.shape.kv_heads
        count = 1 if self.shape.queries * len(self.shape.past) > 8192 or self.shape.heads > 32 else kv_heads
        for head in range(0, kv_heads, count):
            some = slice(head, head + count)
            whole = self.pages[0]
            scales = None if whole.scales is None else whole.scales[:, :, some]
            pages = KVPages(0, whole.k[:, :, some].contiguous(), whole.v[:, :, some].contiguous(), scales)
            queries = q[:, head * group : (head + count) * group]
            yield paged_attention.twin(queries, k[:, some], v[:, some], pages, *self.rest(0))


def graph_time(run: Callable[[], object], calls: int, repeat: int = 7) -> float:
    """Median seconds of one of the `calls` that `run` makes, replayed as a graph."""
    run()
    torch.cuda.synchronize()
    if COMPILE_ONLY:
        return 1.0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[repeat // 2] / calls


@contextmanager
def tiles(name: str, values: list[int] | None) -> Iterator[None]:
    """The kernel `name` with other tiles."""
    if values is None:
        yield
        return
    attribute = f"{name}_tiles"
    before = getattr(kernels, attribute)
    setattr(kernels, attribute, lambda *_: kernels.Tiles(*values))
    try:
        yield
    finally:
        setattr(kernels, attribute, before)


DECODES = {
    "256 x 100..2000 G2": lambda: Shape([100 + 1900 * i // 255 for i in range(256)], 1, 16),
    "256 x 1000 G2": lambda: Shape([1000] * 256, 1, 16),
    "256 x 1000 G4": lambda: Shape([1000] * 256, 1, 32),
    "256 x 1000 G4 fp8": lambda: Shape([1000] * 256, 1, 32, kv_dtype=torch.float8_e4m3fn),
    "256 x 1000 G2 fp8": lambda: Shape([1000] * 256, 1, 16, kv_dtype=torch.float8_e4m3fn),
    "64 x 256 G2": lambda: Shape([256] * 64, 1, 16, layers=28),
    "64 x 256 G2 fp8": lambda: Shape([256] * 64, 1, 16, layers=28, kv_dtype=torch.float8_e4m3fn),
    "1 x 300 G2": lambda: Shape([300], 1, 16, layers=28),
    "1 x 300 G4": lambda: Shape([300], 1, 32, layers=36),
    "1 x 300 G2 fp8": lambda: Shape([300], 1, 16, layers=28, kv_dtype=torch.float8_e4m3fn),
    "1 x 40000 G4": lambda: Shape([40000], 1, 32),
    "8 x 40000 G4": lambda: Shape([40000] * 8, 1, 32),
    "8 x 40000 G4 fp8": lambda: Shape([40000] * 8, 1, 32, kv_dtype=torch.float8_e4m3fn),
    "256 x 2048 shared + 64 G2": lambda: Shape([2112] * 256, 1, 16, shared=2048),
    "256 x 2000 window 128 G8": lambda: Shape([2000] * 256, 1, 64, dim=64, window=128, layers=4),
}
PREFILLS = {
    "8192 new G2": lambda: Shape([0], 8192, 16, layers=1),
    "8192 new G4": lambda: Shape([0], 8192, 32, layers=1),
    "12000 new G4": lambda: Shape([0], 12000, 32, layers=1),
    "2 x 4000 new G4": lambda: Shape([0] * 2, 4000, 32, layers=1),
    "8 x 1000 new G4": lambda: Shape([0] * 8, 1000, 32, layers=1),
    "32 x 256 new G4": lambda: Shape([0] * 32, 256, 32, layers=1),
    "4 x 2048 new G8": lambda: Shape([0] * 4, 2048, 64, layers=1),
    "8192 after 8192 G4": lambda: Shape([8192], 8192, 32, layers=1),
    "8 x 500 after 2000 G4": lambda: Shape([2000] * 8, 500, 32, layers=1),
    "4096 after 60000 G4": lambda: Shape([60000], 4096, 32, layers=1),
    "2048 after 8192 G4": lambda: Shape([8192], 2048, 32, layers=1),
    "2048 after 8192 G4 fp8": lambda: Shape([8192], 2048, 32, layers=1, kv_dtype=torch.float8_e4m3fn),
    "255 x 32 after 2048 G2": lambda: Shape([2048] * 255, 32, 16, layers=1),
}


def run_decode(name: str, shape: Shape, variants: list[list[int] | None]) -> None:
    """One line for each variant."""
    step = Step(shape)
    for values in variants:
        with tiles("decode", values):
            error = step.error()

            def run() -> None:
                for layer in range(shape.layers):
                    step.attend(layer)

            took = graph_time(run, shape.layers)
        rate = shape.kv_bytes / took
        label = "" if values is None else str(values)
        print(
            f"decode   {name:28s} {label:20s} {took * 1e6:9.2f} us {rate / 1e12:6.2f} TB/s {rate / COPY:5.0%} {error:.1e}",
            flush=True,
        )


def run_project(name: str, shape: Shape) -> None:
    """From the projection's output to attention's."""
    step = Step(shape)

    def run() -> None:
        for layer in range(shape.layers):
            step.project(layer)

    took = graph_time(run, shape.layers)
    print(f"project  {name:28s} {took * 1e6:9.2f} us", flush=True)


def run_prefill(name: str, shape: Shape, variants: list[list[int] | None]) -> None:
    """One line for each variant."""
    step = Step(shape)
    for values in variants:
        with tiles("prefill", values):
            step.library = values is None
            error = step.error()
            took = graph_time(lambda: step.attend(0), 1)
        rate = shape.flops / took
        label = "" if values is None else str(values)
        print(
            f"prefill  {name:28s} {label:20s} {took * 1e6:9.2f} us {rate / 1e12:6.0f} TFLOP/s {rate / PRODUCT:5.0%} {error:.1e}",
            flush=True,
        )


def run_store(name: str, shape: Shape) -> None:
    """Norm, rope and page write of every layer."""
    step = Step(shape)

    def run() -> None:
        for layer in range(shape.layers):
            prepare_heads_(step.qkv, step.prep, step.pages[layer], step.write)

    took = graph_time(run, shape.layers)
    moved = step.qkv.numel() * step.qkv.element_size() * 2
    print(f"store    {name:28s} {'':20s} {took * 1e6:9.2f} us {moved / took / 1e12:6.2f} TB/s", flush=True)


def cudnn(tokens: int, heads: int, kv_heads: int = 8, dim: int = 128) -> None:
    """torch's cuDNN attention for one row of new tokens, and what its first call at another length costs."""
    op = torch.ops.aten._scaled_dot_product_cudnn_attention
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, device=DEVICE, dtype=torch.bfloat16)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in qkv.split([heads, kv_heads, kv_heads], 1))

    def call(count: int) -> object:
        return op(q[:, :, :count], k[:, :, :count], v[:, :, :count], None, True, 0.0, True, False, scale=dim**-0.5)

    firsts = []
    for count in (tokens, tokens - 16, tokens - 77):
        start = time.perf_counter()
        call(count)
        torch.cuda.synchronize()
        firsts.append(time.perf_counter() - start)
    took = graph_time(lambda: call(tokens), 1)
    flops = 4.0 * tokens * (tokens + 1) / 2 * heads * dim
    print(
        f"cudnn    {tokens} new, {heads} heads {took * 1e6:9.2f} us {flops / took / 1e12:6.0f} TFLOP/s, first calls "
        + ", ".join(f"{x * 1e3:.1f} ms" for x in firsts),
        flush=True,
    )


def wanted(name: str, match: str) -> bool:
    """A shape is asked for by its name, or by a part that isn't the name of another."""
    return name == match if match in DECODES or match in PREFILLS else match in name


def main() -> None:
    """Everything, or what is asked for."""
    global COMPILE_ONLY
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="store,decode,project,prefill,cudnn")
    parser.add_argument("--match", default="", help="only shapes whose name contains this")
    parser.add_argument("--tiles", type=json.loads, default={})
    parser.add_argument("--compile-only", action="store_true", help="only fill Triton's cache")
    args = parser.parse_args()
    COMPILE_ONLY = args.compile_only
    torch.manual_seed(0)
    only = args.only.split(",")
    with torch.inference_mode():
        for name, make in DECODES.items():
            if wanted(name, args.match):
                shape = make()
                shape.layers = 1 if COMPILE_ONLY else shape.layers
                if "decode" in only:
                    run_decode(name, shape, args.tiles.get("decode", [None]))
                if "project" in only and len(shape.past) == 1:
                    run_project(name, shape)
        for name, make in PREFILLS.items() if "prefill" in only else ():
            if wanted(name, args.match):
                run_prefill(name, make(), args.tiles.get("prefill", [None]))
        if "store" in only:
            run_store("1 token G2", DECODES["1 x 300 G2"]())
            run_store("1 token G2 fp8", DECODES["1 x 300 G2 fp8"]())
            run_store("256 tokens G2", DECODES["256 x 1000 G2"]())
            run_store("8192 tokens G4", PREFILLS["8192 new G4"]())
        if "cudnn" in only and not COMPILE_ONLY:
            cudnn(8192, 32)
            cudnn(4096, 32)


if __name__ == "__main__":
    main()
