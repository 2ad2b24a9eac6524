"""Time one forward pass on CPU: float32, random weights, two model shapes, four kinds of step.

    python scripts/bench_forward_cpu.py [--threads 2] [--profile]

Each figure is the median (and the fastest) of repeated steps in milliseconds; "plan" is the attention backend's share
of preparing the step, "logits" the output projection, "forward" everything between. Pages are in random order.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from pagerunner.attention.base import PlanInputs
from pagerunner.attention.torch_ref import TorchBackend
from pagerunner.batch import ForwardBatch, GroupBatch, KVPages, StepRows, WritePlaces
from pagerunner.models.checkpoint.loader import Model, build_model, dummy_weights, materialize, weights_bytes
from pagerunner.models.configs.base import RopeConfig
from pagerunner.models.configs.decoder import DecoderConfig

PAGE_TOKENS = 16
NUM_PAGES = 1400


def shape(hidden: int, layers: int, heads: int, head_dim: int, inner: int, vocab: int) -> DecoderConfig:
    """A Qwen3 of this size, with 4 key/value heads and tied embeddings."""
    return DecoderConfig(
        path="",
        family="qwen3",
        dtype="float32",
        num_layers=layers,
        vocab_size=vocab,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_ids=(),
        sampling_defaults={},
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=4,
        head_dim=head_dim,
        intermediate_size=inner,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        rope=RopeConfig(theta=1e6),
        qk_norm=True,
    )


SHAPES = {"tiny": shape(256, 4, 8, 32, 768, 4096), "small": shape(768, 16, 12, 64, 2304, 32000)}


def steps() -> dict[str, tuple[list[int], list[int], int]]:
    """Query lengths, sequence lengths and shared first pages of each kind of step."""
    lengths = random.Random(0)
    mixed = [lengths.randint(16, 256) + lengths.randint(0, 128) for _ in range(32)]
    return {
        "decode 1 (context 200)": ([1], [200], 0),
        "decode 32 (context 200)": ([1] * 32, [200] * 32, 0),
        "decode 32 (16..384)": ([1] * 32, mixed, 0),
        "decode 32 (512 shared + 24)": ([1] * 32, [536] * 32, 32),
        "prefill 512": ([512], [512], 0),
        "32 share 512, at once": ([528] + [16] * 31, [528] * 32, 32),
    }


def make_kv(config: DecoderConfig) -> tuple[KVPages, ...]:
    """A pool of pages, each holding all layers."""
    heads, dim = config.num_kv_heads, config.head_dim
    block = PAGE_TOKENS * heads * dim
    stride = config.num_layers * 2 * block
    pool = torch.randn(NUM_PAGES * stride)
    strides = (stride, heads * dim, dim, 1)
    views = [
        pool.as_strided((NUM_PAGES, PAGE_TOKENS, heads, dim), strides, i * block) for i in range(config.num_layers * 2)
    ]
    return tuple(KVPages(0, views[2 * i], views[2 * i + 1]) for i in range(config.num_layers))


def make_batch(
    config: DecoderConfig, kv: tuple[KVPages, ...], query_lens: list[int], seq_lens: list[int], shared: int
) -> Callable[[], ForwardBatch]:
    """A function that plans the step and returns its batch."""
    free = list(range(NUM_PAGES))
    random.Random(1).shuffle(free)
    common = [free.pop() for _ in range(shared)]
    pages = [common + [free.pop() for _ in range(-(-length // PAGE_TOKENS) - shared)] for length in seq_lens]
    table = torch.zeros(len(pages), max(map(len, pages)), dtype=torch.int64)
    positions, entries = [], []
    for row, (count, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        table[row, : len(pages[row])] = torch.tensor(pages[row])
        positions += range(length - count, length)
        entries += [pages[row][p // PAGE_TOKENS] for p in range(length - count, length)]
    position_T = torch.tensor(positions)
    last = torch.tensor(query_lens).cumsum(0) - 1
    tokens = torch.randint(config.vocab_size, position_T.shape)
    backend, slots = TorchBackend(), range(len(pages))

    def batch() -> ForwardBatch:
        rows = StepRows.of(query_lens, seq_lens, slots)
        plan = backend.plan(PlanInputs(rows, query_lens, seq_lens, slots, table, PAGE_TOKENS, None), None)
        group = GroupBatch(
            table, WritePlaces(torch.tensor(entries), position_T % PAGE_TOKENS), PAGE_TOKENS, backend, plan
        )
        return ForwardBatch(tokens, rows, last, (group,), kv)

    return batch


def measure(model: Model, batch: Callable[[], ForwardBatch], seconds: float) -> list[list[float]]:
    """Milliseconds of plan, forward and logits, for as many steps as fit in the time."""
    times: list[list[float]] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        marks = [time.perf_counter()]
        step = batch()
        marks.append(time.perf_counter())
        hidden = model(step)
        marks.append(time.perf_counter())
        model.compute_logits(hidden[step.logits_index])
        marks.append(time.perf_counter())
        times.append([(b - a) * 1000 for a, b in zip(marks, marks[1:], strict=False)])
    return times[2:]


def main() -> None:
    """Run the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--shape", choices=[*SHAPES], action="append")
    parser.add_argument("--profile", action="store_true", help="print torch's operator table of each step")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{'model':6} {'step':28} {'plan':>14} {'forward':>16} {'logits':>14}   median (fastest), ms")
    with torch.inference_mode():
        for name in args.shape or SHAPES:
            config = SHAPES[name]
            model = build_model(config, "float32")
            materialize(model, torch.zeros(weights_bytes(model), dtype=torch.uint8))
            dummy_weights(model)
            kv = make_kv(config)
            for label, (query_lens, seq_lens, shared) in steps().items():
                batch = make_batch(config, kv, query_lens, seq_lens, shared)
                columns = list(zip(*measure(model, batch, args.seconds), strict=True))
                cells = [f"{statistics.median(c):8.2f} ({min(c):5.2f})" for c in columns]
                print(f"{name:6} {label:28} {cells[0]:>14} {cells[1]:>16} {cells[2]:>14}", flush=True)
                if args.profile:
                    with torch.profiler.profile() as profile:
                        measure(model, batch, 0.2)
                    print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=22))


if __name__ == "__main__":
    main()
