"""Times products of few tokens with stored weights on a CUDA device, at the shapes of Qwen3-8B, against the floor by bytes.

    python scripts/bench_stored_few.py [--forms e4m3,blocks,int4] [--tokens 1,4,16] [--search]

Each kind of linear layer is timed with its norm, gate and addition, in a CUDA graph over more weights than the cache holds. Every
launch depends on the one before, as in a step. The floor is bytes over 4.35 TB/s. `bf16` are the kernels for weights of 16 bits. With
--search, other blocks than the kernels' own are tried, and the three best are shown.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator

import torch

from bench_kernels import BYTES_PER_US, graph_us, kinds
from pagerunner.ops.kernels.linear import linear_packed, linear_row, linear_stored
from pagerunner.ops.kernels.linear.linear_packed import PackedConfig
from pagerunner.ops.kernels.linear.linear_parts import Product
from pagerunner.ops.kernels.linear.linear_row import RowConfig
from pagerunner.ops.kernels.linear.linear_stored import FewConfig
from pagerunner.ops.linear import Norm, linear, linear_add_, norm_linear, norm_linear_silu
from pagerunner.ops.stored import Stored, Stored4, Stored8

LAYERS = 36
POOL_BYTES = 2**30
Block = PackedConfig | RowConfig | FewConfig
Weights = torch.Tensor | Stored


def bytes_of(weights: Weights) -> int:
    """What a product reads of them."""
    tensors = [weights] if isinstance(weights, torch.Tensor) else [t for t in weights if isinstance(t, torch.Tensor)]
    return sum(tensor.nbytes for tensor in tensors)


def make(form: str, rows: int, inputs: int) -> Weights:
    """Random weights without NaN."""
    codes = torch.randint(0, 256, (rows, inputs), dtype=torch.uint8, device="cuda") & 0xF7
    if form == "bf16":
        return torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    if form in ("e4m3", "int8", "blocks"):
        block = (128, 128) if form == "blocks" else (1, inputs)
        scales = torch.rand(-(-rows // block[0]), -(-inputs // block[1]), device="cuda")
        return Stored8(codes.view(torch.int8 if form == "int8" else torch.float8_e4m3fn), scales, block)
    group = {"mxfp4": 32, "nvfp4": 16}.get(form, 128)
    shape, packed = (rows, inputs // group), codes[:, : inputs // 2].contiguous()
    if form == "mxfp4":
        return Stored4(packed, torch.randint(118, 126, shape, dtype=torch.uint8, device="cuda"), group, "e2m1")
    if form == "nvfp4":
        scales = (torch.rand(shape, device="cuda") + 0.1).to(torch.float8_e4m3fn)
        return Stored4(packed, scales, group, "e2m1", None, torch.rand(rows, device="cuda"))
    zeros = torch.randint(0, 16, shape, dtype=torch.uint8, device="cuda") if form == "zeros" else None
    return Stored4(packed, torch.rand(shape, device="cuda").half(), group, "int4", zeros)


def blocks_to_try(form: str, tokens: int) -> Iterator[Block | None]:
    """Blocks of the kernels for stored weights; None stands for the kernels' own."""
    yield None
    if tokens == 1 and form in ("e4m3", "int8", "blocks"):
        yield from (RowConfig(*c) for c in itertools.product((1, 2, 4, 8), (4096, 16384), (4, 8, 16)))
    if form in ("int4", "zeros", "mxfp4", "nvfp4"):
        yield from (PackedConfig(*c) for c in itertools.product((16, 32, 64, 128), (1, 2, 4, 8), (1, 2, 4)))
    yield from (FewConfig(*c) for c in itertools.product((16, 32, 64, 128), (512, 1024), (4, 8), (0, 3)))


class Kind:
    """One kind of linear layer: weights of several layers, inputs and outputs for some tokens."""

    def __init__(self, name: str, form: str, tokens: int) -> None:
        self.inputs, self.features, behind_norm, self.gated, self.add = kinds("8b")[name]
        rows = self.features * (2 if self.gated else 1)
        first = make(form, rows, self.inputs)
        count = max(3, min(LAYERS, POOL_BYTES // bytes_of(first)))
        self.weights = [first, *(make(form, rows, self.inputs) for _ in range(count - 1))]
        self.x = torch.randn(tokens, self.inputs, device="cuda", dtype=torch.bfloat16)
        self.out = torch.randn(tokens, self.features, device="cuda", dtype=torch.bfloat16)
        self.norm = Norm(torch.ones(self.inputs, device="cuda", dtype=torch.bfloat16), 1e-6) if behind_norm else None
        self.floor_us = bytes_of(first) / BYTES_PER_US

    def by_choice(self, weights: Weights) -> None:
        """One product, by the kernels' own choice."""
        if self.gated and self.norm:
            norm_linear_silu(self.x, self.norm, weights)
        elif self.norm:
            norm_linear(self.x, self.norm, weights)
        elif self.add:
            linear_add_(self.x, weights, self.out)
        else:
            linear(self.x, weights)

    def by_block(self, weights: Weights, config: Block) -> None:
        """One product, with this block."""
        assert not isinstance(weights, torch.Tensor)
        how = {"gated": self.gated, "add": self.add}
        x = self.norm(self.x) if self.norm else self.x
        if isinstance(config, RowConfig):
            assert isinstance(weights, Stored8)
            linear_row.run_row(Product(self.x, weights, None, self.out, self.norm, **how), config=config)
        elif isinstance(config, PackedConfig):
            assert isinstance(weights, Stored4)
            linear_packed.run_packed(Product(x, weights, None, self.out, **how), config=config)
        else:
            linear_stored.run_few(Product(x, weights, None, self.out, **how), config=config)

    def microseconds(self, config: Block | None) -> float:
        """Of one product."""
        product: Callable[[Weights], None] = self.by_choice if config is None else lambda w: self.by_block(w, config)
        return graph_us(lambda: [product(weights) for weights in self.weights], len(self.weights))


def table(form: str, tokens: int, search: bool) -> None:
    """Microseconds of each kind, and milliseconds of all layers' products."""
    total = 0.0
    for name in kinds("8b"):
        kind, found = Kind(name, form, tokens), []
        for config in blocks_to_try(form, tokens) if search and form != "bf16" else [None]:
            try:
                found.append((kind.microseconds(config), "own" if config is None else str(tuple(config))))
            except Exception as error:  # a block that needs more shared memory than there is
                print(form, name, config, str(error)[:80])
        total += 0.0 if name == "head" else found[0][0] * LAYERS / 1000
        shown = "  ".join(f"{us:.2f} {block}" for us, block in [found[0], *sorted(found[1:])[:3]])
        print(f"{form:7} T={tokens:<3} {name:8} floor {kind.floor_us:6.2f} | {shown}", flush=True)
    print(f"{form:7} T={tokens:<3} all layers without the head: {total:.3f} ms", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--forms", default="bf16,e4m3,blocks,int8,int4,zeros,mxfp4,nvfp4")
    parser.add_argument("--tokens", default="1,4,16")
    parser.add_argument("--search", action="store_true")
    args = parser.parse_args()
    for tokens, form in itertools.product(map(int, args.tokens.split(",")), args.forms.split(",")):
        table(form, tokens, args.search)


if __name__ == "__main__":
    main()
