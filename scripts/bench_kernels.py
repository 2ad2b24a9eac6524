"""Times the dense kernels on a CUDA device, at the shapes of Qwen3-0.6B and 8B, against the floor by bytes.

    python scripts/bench_kernels.py --sections chain,rows,few,ops [--jobs 14]

`rows` and `few` try block sizes for products of few tokens, one kind of linear layer at a time: a CUDA graph over all
layers' weights of that kind, so that no weights stay in the cache. `chain` is all products of one step with the norms, gates
and additions between them. `ops` are single kernels. With --jobs, that many processes compile what is tried first. Tables
show microseconds per call, and for `chain` milliseconds per step.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from pagerunner.ops.activation import SILU, silu_and_mul
from pagerunner.ops.kernels.linear import linear as kernels
from pagerunner.ops.kernels.linear.linear import FewConfig, RowsConfig
from pagerunner.ops.kernels.linear.linear_parts import Product
from pagerunner.ops.linear import Norm, linear, linear_add_, norm_linear, norm_linear_silu
from pagerunner.ops.moe import ExpertWeights, moe_experts
from pagerunner.ops.norm import add_rms_norm_, rms_norm
from pagerunner.ops.rope import rope_, rope_angles
from pagerunner.ops.routing import Routing, route
from pagerunner.ops.sample import SlotSettings, sample

BYTES_PER_US = 4.35e6
VOCAB = 151_936
# (hidden, inner, layers, query heads, key/value heads, head size)
MODELS = {"0.6b": (1024, 3072, 28, 16, 8, 128), "8b": (4096, 12_288, 36, 32, 8, 128)}
ROWS = [RowsConfig(*c) for c in itertools.product((1, 2, 4, 8, 16, 32), (1024, 2048, 4096), (1, 2, 4, 8))]
FEW = [FewConfig(*c) for c in itertools.product((16, 32), (64, 128, 256), (4, 8), (3,))]


def kinds(model: str) -> dict[str, tuple[int, int, bool, bool, bool]]:
    """Linear layers: inputs, features of the result, behind a norm, gated, added to the residual stream."""
    hidden, inner, _, heads, kv_heads, dim = MODELS[model]
    return {
        "qkv": (hidden, (heads + 2 * kv_heads) * dim, True, False, False),
        "o": (heads * dim, hidden, False, False, True),
        "gate_up": (hidden, inner, True, True, False),
        "down": (inner, hidden, False, False, True),
        "head": (hidden, VOCAB, False, False, False),
    }


def graph_us(run: Callable[[], object], calls: int, replays: int = 12) -> float:
    """Median microseconds of one of the `calls` that `run` makes, replayed as a CUDA graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2] * 1000 / calls


class Kind:
    """All layers' weights of one kind, and its inputs and outputs for some tokens."""

    def __init__(self, model: str, name: str, tokens: int, layers: int | None = None) -> None:
        self.inputs, self.features, self.norm, self.gated, self.add = kinds(model)[name]
        count = 2 if name == "head" else MODELS[model][2]
        rows = self.features * (2 if self.gated else 1)
        half = {"device": "cuda", "dtype": torch.bfloat16}
        self.weights = [torch.randn(rows, self.inputs, **half) * 0.02 for _ in range(layers or count)]
        self.x = torch.randn(tokens, self.inputs, **half)
        self.out = torch.randn(tokens, self.features, **half)
        self.scale = Norm(torch.ones(self.inputs, **half), 1e-6)
        self.floor_us = rows * self.inputs * 2 / BYTES_PER_US

    def rows(self, config: RowsConfig | None) -> None:
        """Every layer once by the kernel for up to four tokens."""
        for weight in self.weights:
            norm = self.scale if self.norm else None
            kernels.run_rows(
                Product(self.x, weight, None, self.out, norm, gated=self.gated, add=self.add), config=config
            )

    def few(self, config: FewConfig | None) -> None:
        """Every layer once by the kernel for up to 16 tokens."""
        for weight in self.weights:
            norm = self.scale if self.norm else None
            kernels.run_few(
                Product(self.x, weight, None, self.out, norm, gated=self.gated, add=self.add), config=config
            )

    def library(self) -> None:
        """Every layer once by cuBLAS."""
        for weight in self.weights:
            if self.add:
                self.out.addmm_(self.x, weight.t())
            else:
                torch.nn.functional.linear(self.x, weight)


def fits(config: RowsConfig, inputs: int, gated: bool) -> bool:
    """Whether each thread reads 64 or 128 weights at a time, in blocks as long as the rows allow."""
    each = config.features * config.inputs * (2 if gated else 1) / (config.warps * 32)
    steps = -(-inputs // config.inputs)
    return each in (64, 128) and config.inputs < 2 * inputs and steps <= 3


def few_fits(config: FewConfig, inputs: int, gated: bool) -> bool:
    """Whether each thread reads 32 to 128 weights at a time."""
    each = config.features * config.inputs * (2 if gated else 1) / 32
    return 64 <= each <= 128 and config.inputs * config.warps <= inputs


def rows_tasks(tokens: int = 1) -> list[tuple[str, str, int, RowsConfig]]:
    """What `rows` tries."""
    return [
        (model, name, tokens, config)
        for model in MODELS
        for name, (inputs, _, _, gated, _) in kinds(model).items()
        for config in ROWS
        if fits(config, inputs, gated)
    ]


def few_tasks() -> list[tuple[str, str, int, FewConfig]]:
    """What `few` tries."""
    return [
        (model, name, tokens, config)
        for model in MODELS
        for name, (inputs, _, _, gated, _) in kinds(model).items()
        for tokens in (2, 16)  # the same kernel
        for config in FEW
        if few_fits(config, inputs, gated) and (config.stages == 2 or config.inputs * config.warps < inputs)
    ]


def compile_share(sections: list[str], share: int, jobs: int) -> None:
    """Compile every `jobs`-th task by running it on one layer."""
    tasks: list[tuple[str, str, int, RowsConfig | FewConfig]] = []
    tasks += rows_tasks() if "rows" in sections else []
    tasks += [task for task in few_tasks() if task[2] == 16] if "few" in sections else []
    for model, name, tokens, config in tasks[share::jobs]:
        kind = Kind(model, name, tokens, 1)
        kind.rows(config) if isinstance(config, RowsConfig) else kind.few(config)
    torch.cuda.synchronize()


def best_table(tasks: list[tuple[str, str, int, RowsConfig | FewConfig]]) -> None:
    """The three best blocks of each kind, beside cuBLAS and the floor."""
    for (model, name, tokens), group in itertools.groupby(tasks, lambda task: task[:3]):
        kind, found = Kind(model, name, tokens), []
        for *_, config in group:
            run = kind.rows if isinstance(config, RowsConfig) else kind.few
            try:
                found.append((graph_us(lambda run=run, config=config: run(config), len(kind.weights)), tuple(config)))
            except Exception as error:  # a block that needs more shared memory than there is
                print(model, name, tokens, config, str(error)[:80])
        found.sort()
        library = graph_us(kind.library, len(kind.weights))
        shown = "  ".join(f"{us:.2f} {config}" for us, config in found[:4])
        print(f"{model} {name:8} T={tokens:<3} floor {kind.floor_us:.2f} cublas {library:.2f} | {shown}", flush=True)


def step(model: str, tokens: int, how: str) -> Callable[[], object]:
    """All products of one step. Attention is left out: the output projection reads the queries."""
    layers = MODELS[model][2]
    parts = {name: Kind(model, name, tokens) for name in kinds(model)}
    stream, final = parts["o"].out, parts["qkv"].scale

    def fused() -> None:
        for i in range(layers):
            qkv = norm_linear(stream, parts["qkv"].scale, parts["qkv"].weights[i])
            linear_add_(qkv[:, : parts["o"].inputs], parts["o"].weights[i], stream)
            inner = norm_linear_silu(stream, parts["gate_up"].scale, parts["gate_up"].weights[i])
            linear_add_(inner, parts["down"].weights[i], stream)
        linear(rms_norm(stream, final.weight_I, 1e-6), parts["head"].weights[0])

    def separate() -> None:
        product = torch.nn.functional.linear
        x, residual, weight = stream, torch.zeros_like(stream), final.weight_I
        for i in range(layers):
            qkv = product(add_rms_norm_(x, residual, weight, 1e-6), parts["qkv"].weights[i])
            x = product(qkv[:, : parts["o"].inputs], parts["o"].weights[i])
            inner = silu_and_mul(product(add_rms_norm_(x, residual, weight, 1e-6), parts["gate_up"].weights[i]))
            x = product(inner, parts["down"].weights[i])
        product(add_rms_norm_(x, residual, weight, 1e-6), parts["head"].weights[0])

    return fused if how == "fused" else separate


# Blocks by (inputs, gated) that `sets` compares over a whole step of one token.
SETS = {
    "one warp": {
        (1024, False): (4, 1024, 1),
        (2048, False): (2, 2048, 1),
        (1024, True): (2, 1024, 1),
        (3072, False): (4, 1024, 1),
    },
    "two warps": {
        (1024, False): (8, 1024, 2),
        (2048, False): (4, 2048, 2),
        (1024, True): (4, 1024, 2),
        (3072, False): (4, 2048, 2),
    },
    "four warps": {
        (1024, False): (16, 1024, 4),
        (2048, False): (8, 2048, 4),
        (1024, True): (8, 1024, 4),
        (3072, False): (8, 2048, 4),
    },
    "64 weights": {
        (1024, False): (4, 1024, 2),
        (2048, False): (4, 2048, 4),
        (1024, True): (2, 1024, 2),
        (3072, False): (8, 2048, 8),
    },
}


def set_table() -> None:
    """Milliseconds per step of 0.6B with each of SETS."""
    usual = kernels.rows_config
    run = step("0.6b", 1, "fused")
    for name, blocks in SETS.items():
        kernels.rows_config = lambda inputs, _, gated, blocks=blocks: RowsConfig(*blocks[inputs, gated])
        print(f"0.6b T=1 {name}: {graph_us(run, 1000):.3f}", flush=True)
    kernels.rows_config = usual


def cold_table() -> None:
    """Seconds to compile what a step of 0.6B launches, with an empty cache (set TRITON_CACHE_DIR)."""
    for tokens in (1, 2, 64):
        run = step("0.6b", tokens, "fused")
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        print(f"0.6b T={tokens}: first step {time.perf_counter() - start:.1f} s", flush=True)


def chain_table() -> None:
    """Milliseconds per step."""
    dependent = kernels.dependent
    for model, tokens in itertools.product(MODELS, (1, 2, 16, 64, 256, 8192)):
        hidden, inner, layers, heads, kv_heads, dim = MODELS[model]
        per_layer = hidden * (heads + 2 * kv_heads) * dim + heads * dim * hidden + 3 * hidden * inner
        line = f"{model} T={tokens:<3} floor {(per_layer * layers + VOCAB * hidden) * 2 / BYTES_PER_US / 1000:.3f}"
        for how in ("separate", "fused"):
            run = step(model, tokens, how)
            line += f"  {how} {graph_us(run, 1000):.3f}"
        if tokens == 1:
            kernels.dependent = lambda device: {"PDL": False}
            line += f"  fused, without dependent launches {graph_us(run, 1000):.3f}"
            kernels.dependent = dependent
        print(line, flush=True)


def show(name: str, bytes_moved: float, run: Callable[[int], object], copies: int) -> None:
    """One line: microseconds of a call, which gets its number, beside the floor."""
    us = graph_us(lambda: [run(i) for i in range(copies)], copies)
    print(f"{name:44} {us:9.2f} us  floor {bytes_moved / BYTES_PER_US:8.2f}", flush=True)


def small_ops(tokens: int) -> None:
    """Norms, activations and rotary positions of some tokens."""
    half = {"device": "cuda", "dtype": torch.bfloat16}
    x, y = torch.randn(8, tokens, 4096, **half), torch.randn(8, tokens, 4096, **half)
    weight, qkv = torch.ones(4096, **half), torch.randn(8, tokens, 48, 128, **half)
    show(f"add_rms_norm_ {tokens} x 4096", tokens * 4096 * 8, lambda i: add_rms_norm_(x[i], y[i], weight, 1e-6), 8)
    show(f"silu_and_mul {tokens} x 4096", tokens * 4096 * 3, lambda i: silu_and_mul(x[i]), 8)
    positions, frequencies = torch.arange(tokens, device="cuda"), torch.rand(64, device="cuda")
    angles = rope_angles(positions, frequencies, 1.0, torch.bfloat16)
    show(f"rope_angles {tokens}", tokens * 512, lambda i: rope_angles(positions, frequencies, 1.0, torch.bfloat16), 8)
    show(f"rope_ {tokens} x 40 x 128", tokens * 40 * 128 * 4, lambda i: rope_(qkv[i][:, :40], angles), 8)


def sampling(rows: int) -> None:
    """Choosing tokens for some rows: by temperature, min-p, top-k and top-p."""
    slots = torch.arange(rows, device="cuda")
    kinds = {
        "greedy": (0.0, 0.0, 0, 1.0),
        "temperature 1": (1.0, 0.0, 0, 1.0),
        "0.7, top-p 0.95, top-k 20": (0.7, 0.0, 20, 0.95),
        "0.7, top-p 0.95": (0.7, 0.0, 0, 0.95),
        "min-p 0.05": (1.0, 0.05, 0, 1.0),
    }
    for spread in (1, 4):
        logits = [(torch.randn(rows, VOCAB, device="cuda") * spread).bfloat16() for _ in range(4)]
        for name, (temperature, min_p, top_k, top_p) in kinds.items():
            pack = SlotSettings.pack(seed=7, temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
            settings = SlotSettings(torch.tensor([pack] * rows, device="cuda"))
            run = partial(_sampled, logits, slots, settings)
            show(f"sample {rows}, logits of {spread}, {name}", rows * VOCAB * 2, run, 4)


def _sampled(logits: list[torch.Tensor], slots: torch.Tensor, settings: SlotSettings, i: int) -> None:
    sample(logits[i], slots, slots, settings)


def experts(tokens: int) -> None:
    """The experts of one layer of Qwen3-30B-A3B."""
    half = {"device": "cuda", "dtype": torch.bfloat16}
    gate_up, down = torch.randn(128, 1536, 2048, **half) * 0.02, torch.randn(128, 2048, 768, **half) * 0.02
    x = torch.randn(tokens, 2048, **half)
    routes = route(torch.randn(tokens, 128, device="cuda"), Routing(8, normalise=True))
    per_expert = 3 * 2048 * 768 * 2
    floor = max(len(routes.experts_TA.unique()) * per_expert, tokens * 8 * per_expert / 790e6 * BYTES_PER_US)
    show(f"moe_experts {tokens}", floor, lambda i: moe_experts(x, routes, ExpertWeights(gate_up, down, SILU)), 1)


def ops_table() -> None:
    """Single operations."""
    for tokens in (1, 64, 8192):
        small_ops(tokens)
    sampling_table()
    for tokens in (1, 16, 64, 256, 4096):
        experts(tokens)


def sampling_table() -> None:
    """Choosing tokens."""
    for rows in (1, 64, 256):
        sampling(rows)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", default="chain,rows,few,ops")
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--share", type=int, default=-1)
    args = parser.parse_args()
    sections = args.sections.split(",")
    if args.share >= 0:
        compile_share(sections, args.share, args.jobs)
        return
    command = [sys.executable, __file__, "--sections", args.sections, "--jobs", str(args.jobs), "--share"]
    others = [subprocess.Popen([*command, str(share)]) for share in range(args.jobs)]
    for other in others:
        other.wait()
    if "rows" in sections:
        best_table(rows_tasks())
    if "few" in sections:
        best_table(few_tasks())
    if "ops" in sections:
        ops_table()
    if "cold" in sections:
        cold_table()
    if "sets" in sections:
        set_table()
    if "sampling" in sections:
        sampling_table()
    if "experts" in sections:
        experts(4096)
    if "chain" in sections:
        chain_table()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
