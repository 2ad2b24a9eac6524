"""Products of few tokens with 4-bit codes against their twins, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from helpers.effort import by_days
from pagerunner.ops.activation import silu_and_mul
from pagerunner.ops.kernels import linear_packed as kernels
from pagerunner.ops.kernels import linear_stored
from pagerunner.ops.linear import Norm, linear, linear_add_, norm_linear_silu
from pagerunner.ops.stored import Stored4, Stored8, dense, pack4


def stored_4(
    outputs: int,
    inputs: int,
    group: int,
    numbers: str = "int4",
    scale: str = "float16",
    *,
    zeros: bool = False,
    rows: bool = False,
) -> Stored4:
    codes = pack4(torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8))
    shape = (outputs, inputs // group)
    if scale == "e8m0":
        scales = torch.randint(120, 126, shape, dtype=torch.uint8)
    else:
        scales = (torch.rand(shape) * 0.2 + 0.1).to(getattr(torch, scale))
    own = torch.randint(0, 16, shape, dtype=torch.uint8) if zeros else None
    return Stored4(codes, scales, group, numbers, own, torch.rand(outputs) if rows else None)


FORMS = {
    "int4 g128": lambda o, i: stored_4(o, i, 128),
    "int4 g384": lambda o, i: stored_4(o, i, 384, scale="bfloat16"),
    "int4 whole": lambda o, i: stored_4(o, i, i),
    "int4 zeros": lambda o, i: stored_4(o, i, 128, zeros=True),
    "int4 whole zeros": lambda o, i: stored_4(o, i, i, zeros=True),
    "mxfp4": lambda o, i: stored_4(o, i, 32, "e2m1", "e8m0"),
    "nvfp4": lambda o, i: stored_4(o, i, 16, "e2m1", "float8_e4m3fn", rows=True),
}
BLOCKS = [(1, 16, 2, 1), (1, 32, 1, 2), (2, 16, 4, 4), (3, 32, 2, 1), (7, 16, 2, 2), (16, 32, 2, 1)]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    assert (got - want).norm() < 1e-5 * want.norm()


@pytest.mark.parametrize(("form", "block"), by_days(FORMS, BLOCKS, each=2))
def test_products(form, block, monkeypatch):
    """Some pieces have no input, the last block has rows that aren't there, the last step has inputs that aren't there."""
    tokens, *config = block
    monkeypatch.setattr(kernels, "packed_config", lambda *shape: kernels.PackedConfig(*config))
    torch.manual_seed(tokens)
    stored, x = FORMS[form](38, 1152), torch.randn(tokens, 1157)[:, 1:-4]
    assert kernels.fits(x, stored)
    bias = torch.randn(38)
    want = linear.twin(x, stored, bias)
    close(linear.kernel(x, stored, bias), want)
    residual = torch.randn(tokens, 39)[:, 1:]
    expected = residual + want
    linear_add_.kernel(x, stored, residual, bias)
    close(residual, expected)
    if config[0] // max(1, 8 // tokens) >= 2:
        norm = Norm(torch.randn(1152), 1e-2)
        close(norm_linear_silu.kernel(x, norm, stored, bias), norm_linear_silu.twin(x, norm, stored, bias))


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("inputs", [32, 96, 576])
def test_inputs_that_segments_do_not_divide(inputs, tokens):
    torch.manual_seed(inputs)
    x = torch.randn(tokens, inputs)
    for stored in (stored_4(6, inputs, 32, "e2m1", "e8m0"), stored_4(6, inputs, inputs, zeros=True)):
        close(linear.kernel(x, stored), linear.twin(x, stored))


@pytest.mark.parametrize("numbers", ["int4", "e2m1"])
def test_every_code_and_every_scale_byte(numbers):
    """Each at every place of a run."""
    codes = (torch.arange(128)[:, None] + torch.arange(32)).to(torch.uint8) % 16
    scales = torch.arange(63, 191, dtype=torch.uint8)[:, None]
    stored = Stored4(pack4(codes), scales, 32, numbers)
    got = torch.cat([kernels.run_packed(x, stored, None, torch.empty(16, 128)) for x in torch.eye(32).split(16)])
    assert torch.equal(got, dense(stored, torch.float32).t())
    broken = stored._replace(scales=torch.full_like(scales, 255))
    assert not kernels.run_packed(torch.ones(1, 32), broken, None, torch.empty(1, 128)).isfinite().any()


def test_a_large_input_costs_the_others_nothing():
    """What a code counts from is taken off the segment's sum; an input of 30,000 leaves float32's error only."""
    torch.manual_seed(6)
    stored, x = stored_4(16, 512, 128), torch.randn(1, 512)
    x[0, 7] = 30000.0
    got = kernels.run_packed(x, stored, None, torch.empty(1, 16))
    want = x.double() @ dense(stored, torch.float64).t()
    assert ((got - want).abs() < 1e-6 * 30000).all()


def test_what_it_serves():
    x = torch.randn(1, 256)
    assert not kernels.fits(x, stored_4(4, 256, 64)) and not kernels.fits(x, stored_4(4, 256, 32, "e2m1"))
    assert not kernels.fits(x, stored_4(4, 256, 64, "e2m1", "e8m0"))
    assert not kernels.fits(torch.randn(17, 256), stored_4(4, 256, 128))
    assert not kernels.fits(x, Stored8(torch.zeros(4, 256, dtype=torch.int8), torch.ones(4, 1), (1, 256)))


def test_the_gate_is_applied_to_its_own_feature(monkeypatch):
    monkeypatch.setattr(linear_stored, "run_few", lambda *_, **__: 1 / 0)
    torch.manual_seed(8)
    stored, x = stored_4(2 * 21, 256, 128), torch.randn(2, 256)
    got = linear_stored.run(x, stored, None, torch.empty(2, 21), gated=True)
    close(got, silu_and_mul(x @ dense(stored, torch.float32).t()))
