"""Products of rounded inputs whose weights come early, as far as they can be tested without a card; `tests/gpu` runs the kernel."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.as_python import Pointer, as_python
from helpers.barriers import Barrier, Room, waits
from helpers.gluon_programs import room
from helpers.stored_cases import dequantized, stored
from pagerunner.ops import numerics
from pagerunner.ops.kernels.launch import blocks, padded
from pagerunner.ops.kernels.linear import linear as kernels
from pagerunner.ops.kernels.linear import linear_eight, linear_rounded, linear_stored
from pagerunner.ops.kernels.linear.linear_eight import SIZES, EightConfig, _fastest
from pagerunner.ops.kernels.linear.linear_parts import Product
from pagerunner.ops.kernels.linear.linear_sums import add_parts
from pagerunner.ops.quantize import GROUP, Quantized, quantize
from pagerunner.ops.stored import Stored8, dense

LEAST = numerics.FAST.products.early_tokens
SHAPES = [
    (6144, 4096),
    (4096, 4096),
    (24_576, 4096),
    (4096, 12_288),
    (28_672, 4096),
    (4096, 14_336),
    (1000, 208),
    (64, 16),
]


@pytest.mark.parametrize("tokens", [1, 9, 16, 17, 40, 72, 100, 136, 160])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_configurations_have_room(tokens, shape):
    """All that a program asks for fits, registers are those of a multiprocessor, tiles hold all tokens, and there is a program for each multiprocessor at most."""
    config = _fastest(tokens, *shape, 132)[1]
    (count, block, more), (w_stages, x_stages) = config.cut, config.stages
    assert tokens <= config.tokens == count * block + more
    assert (w_stages * 64 * config.groups + x_stages * config.tokens) * GROUP <= linear_eight.ROOM
    assert 2 <= x_stages <= w_stages
    assert config.tiles == 1 or config.parts == 1
    assert blocks(blocks(shape[0], 64 * config.groups), config.tiles) * config.parts <= 132
    most, average = config.registers
    assert average % 8 == most % 8 == 0 and average * 4 * (config.groups + 1) * 32 <= 65_536
    assert average * (config.groups + 1) - 32 - most * (config.groups - 1) >= most


@pytest.mark.parametrize(
    ("tokens", "shape", "want"),
    [
        (16, (6144, 4096), (3, 1, 4)),
        (64, (6144, 4096), (2, 1, 2)),
        (96, (4096, 12_288), (2, 1, 4)),
        (96, (24_576, 4096), (3, 1, 1)),
        (160, (24_576, 4096), (3, 1, 1)),
        (64, (28_672, 4096), (2, 2, 1)),
        (64, (1024, 4096), (1, 1, 4)),
    ],
)
def test_choices_are_those_that_were_fastest(tokens, shape, want):
    """On an H200 with 132 multiprocessors, or within 4 % of it; the last two by the same rule."""
    assert _fastest(tokens, *shape, 132)[1][1:] == want


@pytest.mark.parametrize(
    ("shape", "high", "want"),
    [
        ((24_576, 4096), 128, [24_576]), ((51_200, 5120), 128, [50_688, 51_200]), ((51_200, 5120), 1, [50_688, 51_200]), ((51_200, 5120), 384, [50_688, 51_200]),
        ((51_200, 5120), 256, [50_688, 51_200]), ((51_200, 5120), 1024, [51_200]), ((28_672, 4096), 1, [28_672]),
    ],
)  # fmt: skip
def test_what_is_left_of_whole_rounds_has_a_launch_of_its_own(shape, high, want):
    """Where that takes a tenth less, and whole blocks with one scale come before it."""
    found = linear_eight.pieces(72, *shape, 132, high)
    assert [last for last, _ in found] == want
    if len(found) == 2:
        assert found[0][1][1:] == (3, 2, 1) and found[1][1] == _fastest(72, want[1] - want[0], shape[1], 132)[1]


def test_pieces_are_multiplied_by_their_own_rows(monkeypatch):
    """Each launch has its rows' codes, scales, bias and outputs."""
    config = _fastest(20, 256, 256, 132)[1]
    monkeypatch.setattr(linear_eight, "pieces", lambda *_: ((128, config), (256, config)))
    monkeypatch.setattr(linear_eight, "multiprocessors", lambda device: 132)

    def run(x: Quantized, product: Product, grouped: bool, _: Any) -> None:
        assert isinstance(product.weight_OI, Stored8) and product.add
        product.out_TO.add_(dequantized(x) @ dense(product.weight_OI, torch.float32).T + product.bias_O)

    monkeypatch.setattr(linear_eight, "_run_piece", run)
    for form in ("fp8 row", "fp8 block"):
        matrix, bias, out = stored(form, 256, 256), torch.randn(256), torch.zeros(20, 256)
        x = quantize(torch.randn(20, 256), torch.float8_e4m3fn, grouped="block" in form)
        linear_eight.run_eight(x, matrix, bias, out, grouped="block" in form, add=True)
        torch.testing.assert_close(out, dequantized(x) @ dense(matrix, torch.float32).T + bias, atol=1e-2, rtol=1e-4)


def test_sizes_are_blocks_and_a_smaller_one():
    """What is behind the whole blocks is a power of two of at least 8, as products want it."""
    for size in SIZES:
        count, block, more = EightConfig(size, 1, 1, 1).cut
        assert count * block + more == size and more in (0, 8, 16, 32)


@pytest.mark.parametrize(
    ("form", "tokens", "served"),
    [("fp8 row", LEAST - 1, False), ("fp8 row", LEAST, True), ("int8 row", 96, True), ("fp8 row", 97, False), ("fp8 block", 160, True), ("fp8 block", 161, False)],
)  # fmt: skip
def test_which_products_take_it(monkeypatch, form, tokens, served):
    """Rounded ones on Hopper, with the gate in the rounding. The warm-up knows its kernels."""
    seen = []
    monkeypatch.setattr(linear_eight, "has_gluon", lambda device: True)
    monkeypatch.setattr(linear_eight, "run_eight", lambda x, *_, **how: seen.append((x.codes.shape[0], how["add"])))
    monkeypatch.setattr(linear_rounded, "run_rounded", lambda *_, **how: None)
    monkeypatch.setattr(linear_stored, "run", lambda product: product.out_TO)
    matrix = stored(form, 256, 256)._replace(activations="block" if "block" in form else "token")
    gate_up, residual = torch.randn(tokens, 512).half(), torch.zeros(tokens, 256).half()
    kernels.linear(gate_up[:, :256], matrix)
    kernels.silu_linear_add_(gate_up, matrix, residual)
    assert seen == ([(tokens, False), (tokens, True)] if served else [])
    answer = kernels.linear_kernels(tokens, matrix, torch.float16, residual.device)
    assert isinstance(answer, EightConfig) is served
    assert kernels.silu_linear_add__kernels(tokens, matrix, torch.float16, residual.device) is (tokens >= LEAST)
    seen.clear()
    kernels.linear(gate_up[:, :256], matrix._replace(activations="none"))
    assert not seen


class Sums(torch.Tensor):
    """Sums in registers."""

    type = SimpleNamespace(layout=None)  # type: ignore[assignment]


class Coming:
    """Sums and products that haven't ended."""

    def __init__(self, sums: Sums, products: list[Any], alone: bool = False) -> None:
        self.sums, self.products, self.alone, self.shape, self.type = sums, products, alone, sums.shape, Sums.type

    def without(self, left: int) -> Any:
        """The products but the last `left` are computed now."""
        for w, x in self.products[: len(self.products) - left]:
            self.sums = self.sums + w.as_subclass(torch.Tensor) @ x.as_subclass(torch.Tensor)
        self.products = self.products[len(self.products) - left :]
        return self if self.products else self.sums


def multiply(w: Any, x: Any, acc: Any, *, use_acc: bool = True, is_async: bool) -> Coming:
    before = acc if isinstance(acc, Coming) else Coming(acc, [])
    return Coming(before.sums if use_acc else torch.zeros_like(before.sums), [*before.products, (w, x)], not use_acc)


def ended(left: int, *, deps: tuple[Any, ...]) -> Any:
    """`left` products are equally many of each block's sums; with a product alone they are others'."""
    found = tuple(one.without(0 if one.alone else left // len(deps)) if isinstance(one, Coming) else one for one in deps)  # fmt: skip
    return found if len(found) > 1 else found[0]


class Program:
    """A program of the kernel, run as Python: its warps are threads, copies come late, and products are computed when they are waited for."""

    def __init__(self, x: Quantized, weight: Stored8, config: EightConfig, stages: tuple[int, int], target: torch.Tensor, number: int) -> None:  # fmt: skip
        self.x, self.weight, self.config, self.stages, self.target, self.number = x, weight, config, stages, target, number  # fmt: skip
        (count, block, more), (w_stages, x_stages) = config.cut, stages
        changed = threading.Condition()
        self.rooms = (
            room(torch.float32, [w_stages * config.groups, 64, GROUP], None),
            room(torch.float32, [x_stages * count, block, GROUP], None),
            room(torch.float32, [x_stages, more or 8, GROUP], None),
        )
        self.barriers = tuple(
            Room(Barrier(arrive, changed) for _ in range(stages))
            for arrive, stages in ((1, w_stages), (1, x_stages), (config.groups, x_stages))
        )
        self.copies = ThreadPoolExecutor(3)

    def known(self) -> dict[str, Any]:
        """What the kernel's module knows, as Python."""
        number = torch.as_tensor
        language = SimpleNamespace(
            minimum=lambda a, b: min(a, b) if isinstance(a, int) and isinstance(b, int) else torch.minimum(number(a), number(b)), static_range=range, int64=torch.int64,
            float32=torch.float32, int32=torch.int32, int8=torch.int8, program_id=lambda axis: torch.tensor(self.number), to_tensor=torch.tensor,
            zeros=lambda shape, *_: torch.zeros(shape).as_subclass(Sums), NVMMADistributedLayout=lambda *_: None, SliceLayout=lambda *_: None,
            arange=lambda first, last, layout: torch.arange(first, last), thread_barrier=lambda: None,
            load=lambda at: at.load(torch.tensor(True), 0.0), store=lambda at, values, mask: at.store(values, mask),
        )  # fmt: skip
        return {
            "gl": language, "warpgroup_mma": multiply,
            "warpgroup_mma_wait": ended, "LINE": None, "store_outputs": self.store,
        } | waits(self.copies, self.bring)  # fmt: skip

    def bring(self, source: torch.Tensor, at: list[Any], barrier: Barrier, target: torch.Tensor) -> None:
        time.sleep(random.random() * 1e-3)
        target.zero_()
        block = source[int(at[0]) : int(at[0]) + target.shape[0], int(at[1]) : int(at[1]) + GROUP].float()
        target[: block.shape[0], : block.shape[1]] = block
        barrier.came(0, -target.numel())

    def store(self, acc: Sums, bias: Any, place: Pointer, feature: int, num_tokens: int, num_features: int, stride: int, *_: bool) -> None:  # fmt: skip
        rows, tokens = torch.arange(64)[:, None] + int(feature), torch.arange(acc.shape[1])[None, :]
        (place + (tokens * stride + rows)).store(acc, (rows < num_features) & (tokens < int(num_tokens)))

    def run(self, grouped: bool, serial: bool) -> None:
        from pagerunner.ops.kernels.linear import linear_eight_gluon as kernel

        config, known = self.config, self.known()
        for name in ("_copy_weights", "_copy_inputs", "next_step", "_zeros", "_block", "_product", "_add_one", "_add_scaled", "_ended", "_add", "_store"):  # fmt: skip
            known[name] = as_python(getattr(kernel, name), **known)
        (tokens, inputs), outputs = self.x.codes.shape, self.weight.shape[0]
        part = blocks(blocks(inputs, GROUP), config.parts)
        tile, steps = part * config.parts, part if config.parts > 1 else part * config.tiles
        first = self.number * steps
        count = min(steps, blocks(outputs, 64 * config.groups) * tile - first)
        wide, done = padded(config.tokens), config.parts == 1
        copied = (*config.cut, config.groups, *self.stages, False)
        computed = (*config.cut, wide, config.groups, *self.stages, grouped, self.weight.block[0], serial, done, False, False, False)  # fmt: skip
        scales = room(torch.float32, [2 * config.groups, wide], None)
        sizes = first, count, tokens, outputs, outputs, self.x.scales.stride(1), self.weight.scales.shape[1], tile, steps  # fmt: skip
        codes = self.weight.codes, self.x.codes, self.x.codes
        with ThreadPoolExecutor(1 + config.groups) as warps, self.copies:
            waiting = [warps.submit(as_python(kernel._copy, **known), *codes, *self.rooms, *self.barriers, first, count, tile, *copied)]  # fmt: skip
            for c in range(config.groups):
                waiting.append(warps.submit(
                    as_python(kernel._compute, **known), c, *self.rooms, scales, *self.barriers, Pointer(self.x.scales), Pointer(self.weight.scales), None,
                    Pointer(self.target), *sizes, *computed,
                ))  # fmt: skip
            for one in waiting:
                one.result()


@pytest.mark.parametrize(("grouped", "serial"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(
    ("tokens", "size", "groups", "tiles", "parts", "stages", "columns"),
    [
        (5, 8, 1, 2, 1, (3, 2), 7),
        (13, 16, 3, 1, 2, (6, 3), 4),
        (71, 96, 2, 1, 3, (4, 4), 7),
        (140, 160, 2, 3, 1, (3, 2), 4),
    ],
)
def test_programs_compute_the_product(grouped, serial, tokens, size, groups, tiles, parts, stages, columns):
    """Copies never overwrite what is still to be multiplied, nothing waits for ever, every number has its scales, and sums lie where they are read."""
    outputs, inputs = 328, 128 * columns - 16
    config = EightConfig(size, groups, tiles, parts)
    x = quantize(torch.randn(tokens, inputs), torch.float8_e4m3fn, grouped=grouped)
    shape = (blocks(outputs, 128), columns) if grouped else (outputs, 1)
    block = (128, 128) if grouped else (1, inputs)
    weight = Stored8((torch.randn(outputs, inputs) * 20).to(torch.float8_e4m3fn), torch.rand(shape) + 0.5, block)
    out = torch.full((tokens, outputs), torch.nan)
    target = out if parts == 1 else torch.full((parts, tokens, outputs), torch.nan)
    for number in range(blocks(blocks(outputs, 64 * groups), tiles) * parts):
        Program(x, weight, config, stages, target, number).run(grouped, serial)
    if parts > 1:
        add_parts(target, None, out)
    torch.testing.assert_close(out, dequantized(x) @ dense(weight, torch.float32).T, atol=1e-2, rtol=1e-4)
