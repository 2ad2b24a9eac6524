"""Times of DeepSeek-V4's attention on a CUDA device: choosing slots, and attention to a window and to these, beside the bytes that they must read.

    python scripts/bench_vectors.py [--rows 1 64] [--contexts 4096 32768] [--heads 64] [--pages bf16 fp8] [--layers 4]

A line is one layer of rows of one token in a graph, in the sizes of DeepSeek-V4-Flash: slots of 4 tokens, of which an indexer chooses 512, and
a window of 128. `choose` and `attend` are its parts alone; together they take less time than both, as attention begins while slots are being
chosen, or chooses them itself. The floor is the bytes of indexer keys, of the window and of chosen slots over `--bandwidth`. Each of several layers has pages of its own, so that the device's cache doesn't
hold them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from triton.testing import do_bench_cudagraph

from pagerunner.batch import StepRows
from pagerunner.ops.rope import RopeAngles
from pagerunner.ops.sparse_latents import Latents
from pagerunner.ops.vectors_attention import Choice, Slots, Window, vectors_attention

SIZE, CODES, WINDOW, RATIO, TOP_K, INDEX, INDEX_HEADS, PAGE = 512, 448, 128, 4, 512, 128, 64, 64
DTYPE, E4M3 = torch.bfloat16, torch.float8_e4m3fn


class Layer(NamedTuple):
    """What one layer's launches are given."""

    q_THD: torch.Tensor
    window: Window
    slots: Slots
    choice: Choice


def pages_of(count: int, slots: int, fp8: bool) -> torch.Tensor | Latents:
    """Pages of so many vectors, filled with numbers."""
    if not fp8:
        return torch.randn(count, slots, SIZE, device="cuda", dtype=DTYPE)
    memory = torch.randint(0, 64, (count, slots * 584), dtype=torch.uint8, device="cuda")
    vectors, scales = (
        memory[:, : slots * 576].unflatten(1, (slots, 576)),
        memory[:, slots * 576 :].unflatten(1, (slots, 8)),
    )
    pages = Latents(vectors[..., :CODES].view(E4M3), vectors[..., CODES:].view(DTYPE), scales[..., : CODES // 64])
    pages.rope_ESP.normal_()
    scales.random_(126, 129)
    return pages


def layer_of(rows: StepRows, context: int, heads: int, fp8: bool, scratch: dict[Any, Any]) -> Layer:
    """Rows of one token that see `context` tokens each."""
    count, held = rows.num_tokens, PAGE // RATIO
    per_row = -(-context // PAGE)
    table = torch.randperm(count * per_row, device="cuda").view(count, per_row)
    window_table = torch.full((count, per_row), -1, device="cuda")
    last = slice(max(0, (context - WINDOW) // PAGE), per_row)
    kept = window_table[:, last]
    kept.copy_(torch.randperm(kept.numel(), device="cuda").view_as(kept))
    window = Window(
        torch.randn(count, SIZE, device="cuda", dtype=DTYPE), pages_of(kept.numel(), PAGE, fp8), window_table, WINDOW
    )
    keys, key_scales = torch.randn(count * per_row, held, INDEX, device="cuda", dtype=DTYPE), None
    if fp8:
        keys, key_scales = keys.to(E4M3), 2.0 ** torch.randint(-2, 2, keys.shape[:2], device="cuda")
    queries = torch.randn(count, INDEX_HEADS, INDEX, device="cuda", dtype=DTYPE)
    weights = torch.randn(count, INDEX_HEADS, device="cuda")
    slots = Slots(pages_of(count * per_row, held, fp8), table, RATIO, None)
    return Layer(
        torch.randn(count, heads, SIZE, device="cuda", dtype=DTYPE),
        window,
        slots,
        Choice(queries, weights, TOP_K, keys, key_scales, scratch),
    )


class Step:
    """A step's layers, and their launches."""

    def __init__(self, count: int, context: int, heads: int, fp8: bool, layers: int) -> None:
        self.rows = StepRows.of([1] * count, [context] * count, range(count), "cuda")
        scratch: dict[Any, Any] = {}
        self.layers = [layer_of(self.rows, context, heads, fp8, scratch) for _ in range(layers)]
        self.sinks_H = torch.randn(heads, device="cuda")
        self.angles = RopeAngles(*(torch.rand(count, 1, 64, device="cuda", dtype=DTYPE) for _ in range(2)))
        self.chosen = [self.choose(layer) for layer in self.layers]

    def choose(self, layer: Layer) -> torch.Tensor:
        """The slots that a layer's tokens see."""
        chosen = layer.slots._replace(chosen=layer.choice).choose(self.rows).chosen
        assert isinstance(chosen, torch.Tensor)
        return chosen

    def attend(self, layer: Layer, chosen: torch.Tensor | Choice) -> torch.Tensor:
        """Attention to these, or to what it chooses."""
        slots = layer.slots._replace(chosen=chosen)
        return vectors_attention(layer.q_THD, layer.window, slots, self.rows, SIZE**-0.5, self.sinks_H, self.angles)

    def timed(self, run: Callable[[int], object]) -> float:
        """Microseconds of a layer."""
        torch.cuda.synchronize()  # what was filled on this stream, before a graph's own reads it
        every = range(len(self.layers))
        found: float = do_bench_cudagraph(lambda: [run(at) for at in every], rep=20)
        return found * 1e3 / len(every)

    def times(self) -> tuple[float, ...]:
        """Of all, of choosing, and of attention."""
        return (
            self.timed(lambda at: self.attend(self.layers[at], self.layers[at].choice)),
            self.timed(lambda at: self.choose(self.layers[at])),
            self.timed(lambda at: self.attend(self.layers[at], self.chosen[at])),
        )


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 32_768])
    parser.add_argument("--heads", type=int, nargs="+", default=[64])
    parser.add_argument("--pages", nargs="+", default=["bf16", "fp8"], choices=["bf16", "fp8"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--bandwidth", type=float, default=4.35, help="TB/s")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}; microseconds of a layer")
    print(
        f"{'rows':>5} {'context':>8} {'heads':>6} {'pages':>6} {'all':>9} {'choose':>9} {'attend':>9} {'floor':>9} {'times':>6}"
    )
    for heads in args.heads:
        for pages in args.pages:
            for rows in args.rows:
                for context in args.contexts:
                    fp8 = pages == "fp8"
                    torch.manual_seed(0)
                    found = Step(rows, context, heads, fp8, args.layers).times()
                    seen = context // RATIO
                    keys = (seen if seen > TOP_K else 0) * (132 if fp8 else 256)
                    floor = (
                        rows
                        * (keys + (min(context, WINDOW) + min(seen, TOP_K)) * (584 if fp8 else 1024))
                        / args.bandwidth
                        / 1e6
                    )
                    line = "".join(f" {x:9.1f}" for x in (*found, floor))
                    print(f"{rows:>5} {context:>8} {heads:>6} {pages:>6}{line} {found[0] / floor:6.2f}", flush=True)
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
