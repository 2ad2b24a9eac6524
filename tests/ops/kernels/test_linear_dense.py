"""Products whose weights come early, as far as they can be tested without a card. Triton's interpreter doesn't know Gluon; `tests/gpu` runs the kernel."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.as_python import as_python
from helpers.barriers import Barrier, Room, waits
from helpers.borders import set_borders
from pagerunner.ops.activation import silu_and_mul
from pagerunner.ops.kernels.launch import blocks
from pagerunner.ops.kernels.linear import linear as kernels
from pagerunner.ops.kernels.linear import linear_dense
from pagerunner.ops.kernels.linear.linear_dense import (
    MAX_TOKENS,
    ROOM,
    STEP,
    DenseConfig,
    add_sums,
    config_of,
    dense_config,
    parts_of,
    pieces,
    sums_twin,
    whole_gates,
)
from pagerunner.ops.kernels.linear.linear_parts import Product

SHAPES = [(3072, 4096), (4096, 1024), (24576, 4096), (1000, 200), (64, 8), (4096, 12288)]


def product_of(tokens: int, outputs: int, inputs: int, *, gated: bool, add: bool, bias: bool) -> Product:
    torch.manual_seed(tokens)
    out = torch.randn(tokens, outputs // 2 if gated else outputs)
    return Product(
        torch.randn(tokens, inputs), torch.randn(outputs, inputs), torch.randn(outputs) if bias else None, out, gated=gated, add=add
    )  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_every_step_is_one_programs_and_every_part_is_numbered(shape, groups):
    """Parts of a tile are 0, 1, ... in the order of its columns, and as many as the second kernel counts."""
    total = blocks(shape[1], STEP)
    tiles = blocks(shape[0], 64 * groups)
    for steps in {1, 3, total, 2 * total, blocks(tiles * total, 132), blocks(tiles * total, 4)}:
        config = config_of(64, groups, steps)
        found: dict[int, list[tuple[int, int, int]]] = {}
        for own in pieces(config, *shape):
            assert 0 < sum(piece.steps for piece in own) <= steps
            for piece in own:
                found.setdefault(piece.tile, []).append((piece.part, piece.first, piece.steps))
        assert sorted(found) == list(range(tiles))
        for tile, parts in found.items():
            begin = tile * total
            count = (begin + total - 1) // steps - begin // steps + 1
            assert [part for part, _, _ in parts] == list(range(count))
            assert count <= parts_of(config, total)
            ends = [first + own for _, first, own in parts]
            assert [first for _, first, _ in parts] == [0, *ends[:-1]] and ends[-1] == total


@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 16, 32, 64, 65, 96, 128])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_configurations_have_room(tokens, shape):
    """All that a program asks for fits, inputs are never further ahead than weights, and the programs are one for each multiprocessor."""
    config = dense_config(tokens, *shape, 132)
    weights, inputs = config.rows * STEP * 2, config.tokens * STEP * 2
    assert tokens <= config.tokens <= MAX_TOKENS and config.tokens >= 8
    assert config.w_stages * weights + config.x_stages * inputs + 1024 <= ROOM
    assert 2 <= config.x_stages <= config.w_stages
    assert blocks(blocks(shape[0], config.rows) * blocks(shape[1], STEP), config.steps) <= 132
    most, average = config.registers
    assert average % 8 == most % 8 == 0
    assert average * (config.groups + 1) - 32 - most * (config.groups - 1) >= most


def test_less_room_has_fewer_stages():
    assert config_of(64, 2, 12) == DenseConfig(64, 2, 12, 9, 6)
    assert config_of(64, 2, 12, 100 * 1024) == DenseConfig(64, 2, 12, 4, 3)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("gated", "add"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize(("tokens", "groups", "steps"), [(1, 1, 3), (5, 2, 2), (17, 3, 4), (33, 2, 5), (65, 1, 2)])
def test_sums_are_added(bias, gated, add, tokens, groups, steps):
    """What a program hasn't stored isn't read."""
    product = product_of(tokens, 200, 296, gated=gated, add=add, bias=bias)
    x, weight, bias_O, out, *_ = product
    config = config_of(tokens, groups, steps)
    want = torch.nn.functional.linear(x, weight, bias_O)
    want = silu_and_mul(want) if gated else want
    want = out + want if add else want
    add_sums(sums_twin(x, weight, config), product, config)
    torch.testing.assert_close(out, want, atol=2e-3, rtol=1e-4)


class Block(torch.Tensor):
    """A tile's block in shared memory."""

    def slice(self, start: int, length: int) -> Any:
        return self[start : start + length]


class Program:
    """A program of the kernel, run as Python: its warps are threads, copies come late, and products are computed when they are waited for."""

    def __init__(self, product: Product, config: DenseConfig, sums: torch.Tensor, program: int) -> None:
        self.x, self.w, self.config, self.sums = product.x_TI, product.weight_OI, config, sums
        changed, count = threading.Condition(), config.groups
        self.w_smem = Room(
            torch.full((config.high, 64), torch.nan).as_subclass(Block) for _ in range(config.w_stages * count)
        )
        self.x_smem = Room(torch.full((config.tokens, 64), torch.nan) for _ in range(config.x_stages))
        self.w_full = Room(Barrier(1, changed) for _ in range(config.w_stages))
        self.x_full = Room(Barrier(1, changed) for _ in range(config.x_stages))
        self.done = Room(Barrier(count, changed) for _ in range(config.x_stages))
        self.language = SimpleNamespace(
            minimum=min, static_range=range, int64=torch.int64, float32=torch.float32, program_id=lambda axis: torch.tensor(program),
            zeros=lambda shape, *_: [torch.zeros(shape)], NVMMADistributedLayout=lambda *_: None,
        )  # fmt: skip
        self.total = blocks(self.w.shape[1], STEP)
        self.first = program * config.steps
        self.count = min(config.steps, blocks(self.w.shape[0], config.rows) * self.total - self.first)
        self.copies = ThreadPoolExecutor(3)

    def known(self) -> dict[str, Any]:
        """What the kernel's module knows, as Python."""
        return {
            "gl": self.language, "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": self.ended, "_store_sums": self.store, "_store_gated": self.store_gated,
        } | waits(self.copies, self.bring)  # fmt: skip

    def bring(self, source: torch.Tensor, at: list[int], barrier: Barrier, target: torch.Tensor) -> None:
        time.sleep(random.random() * 1e-3)
        target.zero_()
        block = source[at[0] : at[0] + target.shape[0], at[1] : at[1] + 64]
        target[: block.shape[0], : block.shape[1]] = block
        barrier.came(0, -target.numel() * 2)

    def multiply(self, w: torch.Tensor, x: torch.Tensor, acc: list[Any], *, is_async: bool) -> list[Any]:
        return [*acc, (w, x)]

    def ended(self, left: int, *, deps: tuple[list[Any]]) -> Any:
        """The products but the last `left` are computed now."""
        total, *products = deps[0]
        for w, x in products[: len(products) - left]:
            total = total + w @ x
        return [total, *products[len(products) - left :]]

    def store(self, acc: list[Any], place: torch.Tensor, num_tokens: int, by_token: int) -> None:
        """Over what no program has stored yet."""
        strides = (1, by_token) if by_token else (acc[0].shape[1], 1)
        target = self.sums.as_strided(acc[0].shape, strides, int(place))
        assert target.isnan().all()
        target[:, :num_tokens] = acc[0][:, :num_tokens]

    def store_gated(
        self, acc: list[Any], out: torch.Tensor, feature: torch.Tensor, num_tokens: int, stride: int
    ) -> None:
        gate, up = acc[0][:num_tokens].chunk(2, 1)
        out[:, int(feature) : int(feature) + gate.shape[1]] = torch.nn.functional.silu(gate) * up

    def run(self, by_token: int, out: torch.Tensor | None = None) -> None:
        """`by_token`: so many features of a token lie one behind the other; 0: a feature's tokens do. `out`: of gates."""
        from pagerunner.ops.kernels.linear import linear_dense_gluon as kernel

        config, rooms = self.config, (self.w_smem, self.x_smem, self.w_full, self.x_full, self.done)
        known = self.known()
        for name in ("_copy_weights", "_copy_inputs", "next_step"):
            known[name] = as_python(getattr(kernel, name), **known)
        copy, compute = as_python(kernel._copy, **known), as_python(kernel._compute, **known)
        sizes = config.tokens, config.groups, config.w_stages, config.x_stages
        stride, gated = by_token or self.sums.shape[1], out is not None
        outputs = self.w.shape[0] // (2 if gated else 1)
        with ThreadPoolExecutor(1 + config.groups) as warps, self.copies:
            waiting = [
                warps.submit(
                    copy,
                    self.w,
                    self.x,
                    *rooms,
                    self.first,
                    self.count,
                    self.total,
                    outputs,
                    *sizes,
                    gated,
                    config.high,
                    False,
                    False,
                )
            ]
            for c in range(config.groups):
                waiting.append(warps.submit(
                    compute, c, *rooms, None, 0 if out is None else out, self.first, self.count, self.x.shape[0], outputs, stride, self.total, config.steps,
                    *sizes, False, False, False, gated, config.high, by_token, False,
                ))  # fmt: skip
            for one in waiting:
                one.result()


@pytest.mark.parametrize(
    ("groups", "steps", "w_stages", "x_stages", "outputs", "columns"),
    [
        (1, 9, 3, 2, 500, 7),
        (2, 7, 4, 4, 500, 7),
        (3, 5, 6, 3, 500, 7),
        (2, 20, 3, 2, 500, 7),
        (1, 2, 9, 6, 500, 7),
        (2, 4, 4, 3, 512, 8),
    ],
)
def test_a_program_computes_its_parts(groups, steps, w_stages, x_stages, outputs, columns):
    """Copies never overwrite what is still to be multiplied, nothing waits for ever, and parts lie where the second kernel reads them, or the sum of ranks."""
    product = product_of(5, outputs, 64 * columns - 8, gated=False, add=False, bias=False)
    config = DenseConfig(8, groups, steps, w_stages, x_stages)
    want = sums_twin(product.x_TI, product.weight_OI, config)
    by_token = outputs if outputs % config.rows == columns % steps == 0 else 0
    sums = torch.full(want.transpose(1, 2).shape if by_token else want.shape, torch.nan)
    for program in range(len(list(pieces(config, outputs, 64 * columns - 8)))):
        Program(product, config, sums, program).run(by_token)
    found = sums.transpose(1, 2) if by_token else sums
    live = ~want.isnan()
    torch.testing.assert_close(found[live], want[live], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(("groups", "high"), [(1, 64), (2, 64), (3, 64), (3, 32)])
def test_a_program_computes_whole_gates(groups, high):
    """Half of its groups' rows are gates, and the others the ups that belong to them."""
    outputs, columns = high * groups * 2, 7
    product = product_of(5, outputs, 64 * columns - 8, gated=True, add=False, bias=False)
    config = DenseConfig(8, groups, columns, 4, 3, high)
    out = torch.full((5, outputs // 2), torch.nan)
    for program in range(2):
        Program(product, config, torch.empty(1, 1), program).run(0, out)
    gate, up = (product.x_TI @ product.weight_OI.T).chunk(2, 1)
    torch.testing.assert_close(out, torch.nn.functional.silu(gate) * up, atol=1e-3, rtol=1e-4)


def test_gates_are_whole_where_their_tiles_have_most_multiprocessors() -> None:
    """As in 8B on four ranks, on two, and on one card. Fewer tiles would leave memory idle, and more would come in two turns."""
    found = {
        outputs: whole_gates(64, outputs, 4096, 132) for outputs in (6144, 8448, 4288, 12_288, 4224, 24_576, 12_292)
    }
    assert [one and (one.groups, one.high, one.steps) for one in found.values()] == [(1, 64, 64)] * 3 + [
        (3, 32, 64),
        None,
        (3, 64, 64),
        None,
    ]
    for outputs, config in found.items():
        if config is not None:
            assert 66 < outputs / config.rows <= 132 and outputs % config.rows == 0
            assert (config.w_stages * config.rows + config.x_stages * 64) * STEP * 2 + 64 * config.rows + 1024 <= ROOM
    for outputs, fewest in ((6144, 33), (12_288, 17), (24_576, 17)):
        assert (
            whole_gates(fewest, outputs, 4096, 132) == found[outputs]
            and whole_gates(fewest - 1, outputs, 4096, 132) is None
        )
        assert whole_gates(65, outputs, 4096, 132) is None


@pytest.mark.parametrize(
    ("tokens", "shape", "groups", "steps"),
    [(8, (12_288, 4096), 3, 32), (16, (4096, 6144), 2, 24), (32, (12_288, 4096), 3, 32), (64, (4096, 12_288), 2, 48), (1, (3072, 4096), 3, 8)],
)  # fmt: skip
def test_choices_are_those_that_were_fastest(tokens, shape, groups, steps):
    """On an H200 with 132 multiprocessors, of three divisions."""
    assert dense_config(tokens, *shape, 132)[1:3] == (groups, steps)


def test_which_products_take_it(monkeypatch):
    """Those of 2 to 64 tokens whose operands the copy engine reads; the smallest are left to the kernel for few tokens. The warm-up knows its kernels."""
    seen: list[Product] = []
    monkeypatch.setattr(linear_dense, "has_gluon", lambda device: True)
    monkeypatch.setattr(linear_dense, "multiprocessors", lambda device: 132)
    set_borders(monkeypatch, "products", least_dense_weights=64 * 100)
    monkeypatch.setattr(linear_dense, "run_dense", lambda product: seen.append(product) or product.out_TO)
    half, card = torch.float16, torch.device("cpu")
    weight, x = torch.randn(64, 128).to(half), torch.randn(24, 128).to(half)
    residual = torch.zeros(24, 64).to(half)
    kernels.linear_add_(x, weight, residual)
    assert seen[-1].add and seen[-1].out_TO is residual
    assert kernels.norm_linear_silu(x[:9], None, weight).shape == (9, 32)
    assert seen[-1].gated
    assert kernels.linear_kernels(24, weight, half, card) == dense_config(32, 64, 128, 132)
    assert kernels.linear_kernels(65, weight, half, card) == kernels.linear_kernels(4096, weight, half, card)
    assert kernels.linear_kernels(1, weight, half, card) == 1
    count = len(seen)
    assert count == 2
    narrow, shifted = torch.randn(64, 110).to(half), torch.randn(24, 131).to(half)[:, 3:]
    for own, matrix in (
        (x[:1], weight),
        (x.float(), weight.float()),
        (x[:, :110], narrow),
        (shifted, weight),
        (x[:9, :96], weight[:, :96].clone()),
    ):
        want = torch.nn.functional.linear(own.float(), matrix.float())
        torch.testing.assert_close(kernels.linear(own, matrix).float(), want, atol=0.2, rtol=0.02)
    kernels.linear(torch.randn(65, 128).to(half), weight)
    kernels.linear(x[:, :120], torch.randn(64, 128).to(half)[:, :120])
    assert len(seen) == count


def test_tiles_with_room_are_whole_for_many_tokens() -> None:
    """Not for few tokens, whose sums are added in less time, nor where there are few tiles."""
    cases = (64, 4096), (33, 2048), (32, 4096), (64, 1024)
    parts = [parts_of(dense_config(tokens, outputs, 1024, 132), 16) for tokens, outputs in cases]
    assert parts[:2] == [1, 1]
    assert dense_config(64, 4096, 1024, 132).steps == 16
    assert min(parts[2:]) > 1, parts
