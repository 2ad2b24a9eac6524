"""Times of the kernels of recurrent layers and latent attention on a CUDA device, beside what the card allows.

    python scripts/bench_state_kernels.py [--only NAME]

Sizes are those of Qwen3-Next (gated delta rule), Bamba (Mamba-2), DeepSeek-V3 (128 heads) and V2-Lite (16 heads), in
bfloat16. Floors: bytes read and written once over `--bandwidth`, operations over `--rate`; the larger one counts.
Where the flash-linear-attention package is installed, its kernels for prompts stand beside ours: from queries, keys, values,
decays and rates to outputs and last states, without what ours do before (softplus, unit length of Mamba-2's steps) and
without states in between.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
from triton.testing import do_bench_cudagraph

from pagerunner.batch import StepRows
from pagerunner.ops.causal_conv import causal_conv_rows
from pagerunner.ops.gdn import gated_delta_rows
from pagerunner.ops.latent_attention import BLOCK_QUERIES, Pieces, expanded_attention, latent_values
from pagerunner.ops.mamba2 import mamba2_rows
from pagerunner.ops.state_rows import StateRows

DTYPE = torch.bfloat16


class Timed(NamedTuple):
    """One line of the table: what to run, and the bytes and operations that it can't do without."""

    name: str
    shape: str
    run: Callable[[], object]
    gigabytes: float
    gigaflops: float


def rows_of(lengths: list[int]) -> StateRows:
    """Rows whose pages are scattered; the pages' numbers are below 1.5 times the number of rows."""
    count = len(lengths)
    table = torch.randperm(count + count // 2, device="cuda")[:count, None]
    return StateRows(StepRows.of(lengths, lengths, torch.randperm(count).tolist(), "cuda"), table)


def rand(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    """Normal numbers on the device."""
    return torch.randn(shape, device="cuda", dtype=dtype)


def recurrent_lines(lengths: list[int], what: str) -> list[Timed]:
    """The convolution, the gated delta rule and Mamba-2 over the same rows."""
    rows, tokens, count = rows_of(lengths), sum(lengths), len(lengths)
    pages, f32 = count + count // 2, torch.float32
    conv = (rand(tokens, 8192), rand(pages, 3, 8192), rand(8192, 4), None, rows)
    state = rand(pages, 32, 128, 128, dtype=f32)
    delta = (rand(tokens, 8192), rand(tokens, 32), rand(tokens, 32), rand(32), rand(32), state, 16, rows)
    state_2 = rand(pages, 128, 64, 128, dtype=f32)
    mamba = (rand(tokens, 8448), rand(tokens, 128), rand(128), rand(128), rand(128), state_2, rows)
    chunk = 64 if max(lengths) > 8 else 0
    # of a chunk: solving (counted as two products), two masked products, three with the state
    delta_flops = tokens * 32 * 2 * (4 * chunk * 128 + 3 * 128 * 128)
    mamba_flops = tokens * 128 * 2 * (chunk * 64 + 2 * 64 * 128)
    return [
        Timed("convolution", what, lambda: causal_conv_rows(*conv), (tokens * 2 + count * 6) * 8192 * 2e-9, 0),
        Timed(
            "gated delta",
            what,
            lambda: gated_delta_rows(*delta),
            tokens * 12288 * 2e-9 + count * 32 * 128 * 128 * 8e-9,
            delta_flops * 1e-9,
        ),
        Timed(
            "Mamba-2",
            what,
            lambda: mamba2_rows(*mamba),
            tokens * 16640 * 2e-9 + count * 128 * 64 * 128 * 8e-9,
            mamba_flops * 1e-9,
        ),
    ]


def peer_lines(lengths: list[int], what: str) -> list[Timed]:
    """flash-linear-attention over rows of one length, of the sizes of `recurrent_lines`; nothing where it isn't installed."""
    if importlib.util.find_spec("fla") is None:
        return []
    gated_delta = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    simple_gla = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
    ours, f32 = recurrent_lines(lengths, what), torch.float32
    batch = len(lengths), lengths[0]
    known = {"output_final_state": True}
    q, k, v, state = (
        rand(*batch, 16, 128),
        rand(*batch, 16, 128),
        rand(*batch, 32, 128),
        rand(len(lengths), 32, 128, 128),
    )
    decays, rates = -torch.rand(*batch, 32, device="cuda", dtype=f32), rand(*batch, 32).sigmoid()
    delta = {"initial_state": state.to(f32), "use_qk_l2norm_in_kernel": True, **known}
    q_2, k_2 = (rand(*batch, 1, 128).expand(-1, -1, 128, -1).contiguous() for _ in range(2))
    v_2, state_2 = rand(*batch, 128, 64), rand(len(lengths), 128, 128, 64, dtype=f32)
    decays_2 = -torch.rand(*batch, 128, device="cuda", dtype=f32)
    return [
        ours[1]._replace(name="gated delta, fla", run=lambda: gated_delta(q, k, v, decays, rates, **delta)),
        ours[2]._replace(
            name="Mamba-2, fla", run=lambda: simple_gla(q_2, k_2, v_2, decays_2, initial_state=state_2, **known)
        ),
    ]


def latent_line(heads: int, count: int, length: int) -> Timed:
    """Absorbed decode of `count` rows of `length` tokens, pages in random order, and its way back to values."""
    pages_each = -(-length // 64)
    pages = rand(count * pages_each, 64, 576)
    table = torch.randperm(count * pages_each, device="cuda").view(count, pages_each)
    rows = StepRows.of([1] * count, [length] * count, range(count), "cuda")
    q, q_rope = rand(heads, count, 512).transpose(0, 1), rand(count, heads, 192)[..., 128:]
    work, up, scratch = count * length, rand(heads, 256, 512)[:, 128:], {}
    return Timed(
        f"latent, {heads} heads",
        f"{count} x {length}",
        lambda: latent_values(q, q_rope, pages, table, rows, 0.07, up, scratch),
        work * 1152e-9 + up.numel() * 2e-9,
        (work * (576 + 512) + count * 128 * 512) * heads * 2e-9,
    )


def expanded_line(heads: int, length: int) -> Timed:
    """Causal attention of one prompt over its expanded keys and values."""
    q, both, vectors = rand(length, heads, 192), rand(length, heads, 256), rand(length, 576)
    out, lse = rand(length, heads, 128), rand(length, heads, dtype=torch.float32)
    piece = torch.tensor([[0, length, 0, length, 0]], dtype=torch.int32, device="cuda")
    blocks = torch.arange(-(-length // BLOCK_QUERIES) - 1, -1, -1, dtype=torch.int32, device="cuda")
    rope = vectors[:, 512:]
    return Timed(
        f"expanded, {heads} heads",
        f"1 x {length}",
        lambda: expanded_attention(q, both, rope, Pieces(piece, blocks), 0.07, out, lse, False),
        length * heads * (192 + 256 + 128) * 2e-9,
        length * length / 2 * heads * 2 * (192 + 128) * 1e-9,
    )


def lines() -> list[Callable[[], list[Timed]]]:
    """What is timed, made when its turn comes."""
    return [
        lambda: recurrent_lines([1] * 64, "64 x 1"),
        lambda: recurrent_lines([1], "1 x 1"),
        lambda: recurrent_lines([8192], "1 x 8192"),
        lambda: recurrent_lines([256] * 32, "32 x 256"),
        lambda: peer_lines([8192], "1 x 8192"),
        lambda: peer_lines([256] * 32, "32 x 256"),
        lambda: [latent_line(16, 64, 4096), latent_line(16, 1, 8192), latent_line(128, 64, 4096)],
        lambda: [latent_line(128, 1, 8192), expanded_line(16, 8192), expanded_line(128, 4096)],
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="lines whose name contains this")
    parser.add_argument("--bandwidth", type=float, default=4350, help="GB/s")
    parser.add_argument("--rate", type=float, default=790, help="TFLOP/s")
    args = parser.parse_args()
    print(f"{'kernel':22} {'shape':12} {'us':>9} {'floor us':>9} {'share':>6}")
    for make in lines():
        for line in make():
            if args.only in line.name:
                found = do_bench_cudagraph(line.run, rep=50, return_mode="median") * 1e3
                floor = max(line.gigabytes / args.bandwidth * 1e6, line.gigaflops / args.rate * 1e3)
                print(f"{line.name:22} {line.shape:12} {found:9.1f} {floor:9.1f} {floor / found:6.0%}", flush=True)


if __name__ == "__main__":
    main()
