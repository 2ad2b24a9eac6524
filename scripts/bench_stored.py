"""Times products of many tokens with stored matrices on a CUDA device, at the shapes of Qwen3-8B.

    python scripts/bench_stored.py [--sections layers,ways] [--tokens 64,256,8192] [--forms 'bf16;mxfp4']

`layers` is one layer: its four products with norms, gate and additions, without attention. `ways` is one product in each of the ways that
`ops/kernels/linear/linear_many.py` chooses from. Everything is a CUDA graph over the weights of several layers, so that none stay in the
cache. Tables show microseconds of one layer or one product.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from pagerunner.ops.kernels.linear import linear as kernels
from pagerunner.ops.kernels.linear import linear_many as many
from pagerunner.ops.kernels.linear.linear_parts import Product
from pagerunner.ops.kernels.linear.linear_rounded import cublas, rounding, run_rounded
from pagerunner.ops.linear import Norm
from pagerunner.ops.quantize import quantize
from pagerunner.ops.stored import Stored, Stored4, Stored8, pack4

HIDDEN = 4096
MATRICES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24_576, 4096), "down": (4096, 12_288)}
FORMS = (
    "bf16", "fp8 row", "fp8 block", "fp8 row, rounded", "fp8 block, rounded", "int8 row, rounded", "int4 128", "int4 128 zeros",
    "mxfp4",
)  # fmt: skip
Weights = torch.Tensor | Stored


def random_weights(form: str, outputs: int, inputs: int) -> Weights:
    """A matrix of the form, with a deviation of about 0.02."""
    half = {"device": "cuda", "dtype": torch.bfloat16}
    if form == "bf16":
        return torch.randn(outputs, inputs, **half) * 0.02
    if form.startswith("int4") or form == "mxfp4":
        codes = pack4(torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, device="cuda"))
        if form == "mxfp4":
            scales = torch.randint(118, 122, (outputs, inputs // 32), dtype=torch.uint8, device="cuda")
            return Stored4(codes, scales, 32, "e2m1")
        zeros = torch.randint(0, 16, (outputs, inputs // 128), dtype=torch.uint8, device="cuda")
        scales = torch.full((outputs, inputs // 128), 0.004, **half)
        return Stored4(codes, scales, 128, "int4", zeros if form.endswith("zeros") else None)
    kind, _, rounded = form.partition(", ")
    block = (128, 128) if kind.endswith("block") else (1, inputs)
    scales = torch.full((outputs // block[0], inputs // block[1]), 0.0005, device="cuda")
    numbers = (torch.randn(outputs, inputs, device="cuda") * 40).clamp_(-127, 127)
    codes = numbers.to(torch.int8 if kind.startswith("int8") else torch.float8_e4m3fn)
    return Stored8(codes, scales, block, ("block" if block[0] > 1 else "token") if rounded else "none")


def graph_us(calls: list[Callable[[], object]], replays: int = 7) -> float:
    """Median microseconds of one of the calls, all of which are replayed as one CUDA graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2] * 1000 / len(calls)


def layer_us(layers: list[dict[str, Weights]], tokens: int) -> float:
    """Microseconds of one layer."""
    half = {"device": "cuda", "dtype": torch.bfloat16}
    stream, norm = torch.randn(tokens, HIDDEN, **half), Norm(torch.ones(HIDDEN, **half), 1e-6)

    def layer(weights: dict[str, Weights]) -> None:
        qkv = kernels.norm_linear(stream, norm, weights["qkv"])
        kernels.linear_add_(qkv[:, :HIDDEN], weights["o"], stream)
        gate_up, down = weights["gate_up"], weights["down"]
        if not isinstance(down, torch.Tensor):
            kernels.silu_linear_add_(kernels.norm_linear(stream, norm, gate_up), down, stream)
        else:
            kernels.linear_add_(kernels.norm_linear_silu(stream, norm, gate_up), down, stream)

    return graph_us([lambda weights=weights: layer(weights) for weights in layers])


def layer_table(tokens: list[int], forms: list[str]) -> None:
    """Each form at each number of tokens."""
    print("layer".ljust(22) + "".join(f"{count:>9}" for count in tokens))
    for form in forms:
        layers = [{name: random_weights(form, *shape) for name, shape in MATRICES.items()} for _ in range(3)]
        print(form.ljust(22) + "".join(f"{layer_us(layers, count):9.0f}" for count in tokens), flush=True)


def ways_of(form: str, weights: list[Weights], x: torch.Tensor, out: torch.Tensor) -> dict[str, float]:
    """Microseconds of one product by way."""
    if form == "bf16":
        return {"cuBLAS": graph_us([lambda w=w: torch.mm(x, w.t(), out=out) for w in weights])}
    first = weights[0]
    how = rounding(first) if isinstance(first, Stored8) else None
    if how is None:
        chosen, found = many.tile_tokens, {}
        for way, most in (("unpacked", 0), ("tiles", x.shape[0])):
            many.tile_tokens = lambda weight, most=most: most
            found[way] = graph_us([lambda w=w: many._product(Product(x, w, None, out)) for w in weights])
        many.tile_tokens = chosen
        return found
    rounded = quantize(x, how.dtype, grouped=how.grouped)
    found = {"rounding": graph_us([lambda: quantize(x, how.dtype, grouped=how.grouped)] * 8)}
    if not form.startswith("int8"):
        found["cuBLAS"] = graph_us([lambda w=w: cublas(rounded, w, x.dtype, how.grouped) for w in weights])
    ours = [lambda w=w: run_rounded(rounded, w, None, out, grouped=how.grouped) for w in weights]
    return {**found, "ours": graph_us(ours)}


def ways_table(tokens: list[int], forms: list[str]) -> None:
    """Each product at each number of tokens."""
    half = {"device": "cuda", "dtype": torch.bfloat16}
    for name, (outputs, inputs) in MATRICES.items():
        for form in forms:
            weights = [random_weights(form, outputs, inputs) for _ in range(max(2, 2**28 // (outputs * inputs)))]
            for count in tokens:
                x, out = torch.randn(count, inputs, **half), torch.empty(count, outputs, **half)
                found = ways_of(form, weights, x, out)
                print(f"{name:8} {count:5} {form:20} " + "  ".join(f"{way} {us:.1f}" for way, us in found.items()))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", default="layers,ways")
    parser.add_argument("--tokens", default="17,32,64,128,256,512,1024,8192")
    parser.add_argument("--forms", default=";".join(FORMS), help="separated by semicolons")
    args = parser.parse_args()
    forms = args.forms.split(";")
    tokens = [int(count) for count in args.tokens.split(",")]
    if "layers" in args.sections.split(","):
        layer_table(tokens, forms)
    if "ways" in args.sections.split(","):
        ways_table(tokens, forms)


if __name__ == "__main__":
    main()
