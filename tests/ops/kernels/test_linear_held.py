"""Products whose weights go straight into registers, as far as they can be tested without a card. Gluon is run as Python; `tests/gpu` runs the kernel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from helpers.as_python import Pointer, as_python, language
from pagerunner.ops.kernels.launch import blocks
from pagerunner.ops.kernels.linear import linear as kernels
from pagerunner.ops.kernels.linear import linear_dense, linear_held
from pagerunner.ops.kernels.linear.linear_held import HeldConfig, config_of, held_config, run_held
from pagerunner.ops.kernels.linear.linear_parts import Product
from pagerunner.ops.linear import Norm, linear, linear_add_, norm_linear, norm_linear_silu


def multiply(a, b, acc):
    assert a.dtype == b.dtype, "matrix units take operands of one type"
    return acc + a.float() @ b.float()


def gate(y, up, dtype):
    return F.silu(y.to(dtype)).float() * up.to(dtype).float()


class Launched:
    """The kernel's launches, run as Python; what was loaded before the turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.early: list[torch.Tensor] = []
        self.turn = False
        monkeypatch.setattr(linear_held, "_gluon", lambda: self)
        monkeypatch.setattr(linear_held, "dependent", lambda device: {"PDL": True})
        monkeypatch.setattr(linear_held, "has_gluon", lambda device: True)

    @property
    def held_kernel(self):
        return self

    def __getitem__(self, grid):
        def launch(x, norm, w, bias, y, *sizes, num_warps, maxnreg, **constants):
            assert num_warps == constants["S"] and maxnreg % 8 == 0
            for program in range(grid[0]):
                self.run(program, [Pointer(one) for one in (x, norm, w, bias, y)], sizes, constants)

        return launch

    def run(self, program, pointers, sizes, constants):
        from pagerunner.ops.kernels.linear import linear_held_gluon as kernel

        gl = language(program)
        self.turn, self.early = False, []
        plain = gl.load

        def load(at, mask, other):
            if not self.turn:
                self.early.append(at.tensor)
            return plain(at, mask, other)

        gl.load = load
        known = {
            "gl": gl,
            "mma_v2": multiply,
            "silu_gate": gate,
            "start_next": lambda PDL: None,
            "wait_turn": self.wait,
        }
        for name in ("_weights", "_inputs", "_whole"):
            known[name] = as_python(getattr(kernel, name), **known)
        as_python(kernel.held_kernel, **known)(*pointers, *sizes, **constants)

    def wait(self, PDL):
        self.turn = True


@pytest.fixture
def launched(monkeypatch):
    pytest.importorskip("triton.experimental.gluon")
    return Launched(monkeypatch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("tokens", "config"), [(2, HeldConfig(4, 16, 128, 2)), (7, HeldConfig(2, 8, 128, 1)), (8, None)]
)
def test_products(launched, tokens, config, bias, dtype, monkeypatch):
    """All kinds: plain, added, behind a norm, and with a gate; the last steps and programs are partly empty, and nothing is written beside the outputs."""
    torch.manual_seed(tokens)
    x = torch.randn(tokens, 339)[:, :328].to(dtype)
    weight, more = (torch.randn(40, 328) / 18).to(dtype), torch.randn(40).to(dtype) if bias else None
    if config is not None:
        monkeypatch.setattr(linear_held, "held_config", lambda *_: config)
    close = {"atol": 0.06, "rtol": 0.02} if dtype == torch.bfloat16 else {"atol": 8e-3, "rtol": 4e-3}
    torch.testing.assert_close(kernels.linear(x, weight, more), linear.twin(x, weight, more), **close)
    wide = torch.randn(tokens, 47).to(dtype)
    want = wide.clone()
    linear_add_.twin(x, weight, want[:, :40], more)
    kernels.linear_add_(x, weight, wide[:, :40], more)
    torch.testing.assert_close(wide, want, **close)
    assert torch.equal(wide[:, 40:], want[:, 40:])
    for offset in (False, True):
        norm = Norm(torch.randn(328).to(dtype) / 4, 1e-3, offset)
        torch.testing.assert_close(
            kernels.norm_linear(x, norm, weight, more), norm_linear.twin(x, norm, weight, more), **close
        )
        for before in (norm, None):
            got, want = (
                kernels.norm_linear_silu(x, before, weight, more),
                norm_linear_silu.twin(x, before, weight, more),
            )
            torch.testing.assert_close(got, want, **close)


@pytest.mark.parametrize("gated", [False, True])
def test_weights_are_asked_for_before_the_turn(launched, gated):
    """As many steps' as are early. What the kernel before writes, the inputs and what is added to, is not."""
    x, weight, out = (
        torch.randn(4, 1024).half(),
        torch.randn(16, 1024).half(),
        torch.zeros(4, 8 if gated else 16).half(),
    )
    run_held(Product(x, weight, None, out, gated=gated, add=not gated), HeldConfig(2, 16, 128, 3))
    assert [one is weight for one in launched.early] == [True] * (6 if gated else 3)


CHOICES = [  # outputs, inputs, a norm before, a gate behind: warps, features, registers
    ((4096, 1024, True, False), (4, 16, 168)), ((1024, 2048, False, False), (4, 8, 128)), ((6144, 1024, True, True), (4, 16, 168)),
    ((1024, 3072, False, False), (4, 8, 128)), ((12_288, 2048, True, False), (4, 16, 168)), ((2048, 4096, False, False), (4, 8, 128)),
    ((1024, 2048, False, True), (4, 8, 128)), ((2048, 512, False, False), (4, 16, 128)), ((6144, 4096, True, False), (4, 16, 168)),
    ((4096, 4096, False, False), (4, 16, 128)), ((4096, 12_288, False, False), (4, 16, 128)),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "block"), CHOICES, ids=str)
def test_choices_are_those_that_were_fastest(shape, block):
    """On an H200, of eight blocks, or within 3 % of the fastest."""
    outputs, inputs, norm, gated = shape
    assert held_config(inputs, outputs // 2 if gated else outputs, norm, gated)[:3] == block


def test_early_weights_have_half_of_the_registers():
    """A thread holds 16 numbers of one row or two a step, in 8 or 16 registers."""
    assert [config_of(4096, gated, 4, 16, 128).early for gated in (False, True)] == [4, 2]
    assert [config_of(4096, gated, 4, 8, 128).early for gated in (False, True)] == [8, 4]
    assert config_of(512, False, 4, 16, 128).early == blocks(512, 256)


def test_which_products_take_it(launched, monkeypatch):
    """Those of 2 to 8 tokens in half precision with not too large matrices; larger ones and other numbers of tokens have the kernels that they had."""
    seen: list[str] = []
    monkeypatch.setattr(linear_dense, "has_gluon", lambda device: True)
    monkeypatch.setattr(linear_dense, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(linear_held, "run_held", lambda product: seen.append("held") or product.out_TO)
    monkeypatch.setattr(linear_dense, "run_dense", lambda product: seen.append("dense") or product.out_TO)
    monkeypatch.setattr(kernels, "_run", lambda product: seen.append("few") or product.out_TO)
    small, middle, large = (torch.empty(size, 8192, dtype=torch.bfloat16, device="meta") for size in (64, 4096, 16_384))
    for tokens, matrix, gated in (
        (1, small, False), (2, small, False), (8, small, True), (9, small, False), (4, middle, False), (4, middle, True), (4, large, False), (9, middle, False),
    ):  # fmt: skip
        x = torch.empty(tokens, 8192, dtype=torch.bfloat16, device="meta")
        run = kernels._few_tokens(x, matrix, gated)
        assert run is not None
        run(Product(x, matrix, None, x))
    assert seen == ["few", "held", "held", "few", "held", "dense", "dense", "dense"]
    half, card = torch.bfloat16, torch.device("cpu")
    assert len({kernels.linear_kernels(tokens, middle, half, card) for tokens in range(2, 9)}) == 1
    assert len({kernels.linear_kernels(tokens, middle, half, card) for tokens in (1, 2, 9, 17, 33, 65)}) == 6
    narrow = torch.empty(64, 100, dtype=half, device="meta")
    assert not any(
        linear_held.serves(4, *other, card)
        for other in ((torch.float32, small.float()), (torch.float16, small), (half, narrow))
    )
    assert not linear_held.serves(4, half, small[:, :64], card), "rows that lie apart"
    assert not linear_held.fits(torch.empty(8192, 4, dtype=half, device="meta").T, small, False), (
        "inputs that lie apart"
    )
