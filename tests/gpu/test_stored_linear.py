"""Products of few tokens with stored matrices on the device, against float64; the words of PTX make exact numbers."""

from __future__ import annotations

import functools

import pytest
import torch

from pagerunner.ops.kernels import linear_packed, linear_row, linear_stored
from pagerunner.ops.linear import Norm, linear, linear_add_, norm_linear, norm_linear_silu
from pagerunner.ops.stored import Stored, Stored4, Stored8, dense, pack4

random = functools.partial(torch.randn, device="cuda")
draw = functools.partial(torch.randint, device="cuda", dtype=torch.uint8)


def stored_8(rows: int, inputs: int, dtype: torch.dtype, block: tuple[int, int]) -> Stored8:
    codes = (random(rows, inputs) * 40).clamp(-127, 127).to(dtype)
    scales = torch.rand(-(-rows // block[0]), -(-inputs // block[1]), device="cuda") * 0.02 + 0.01
    return Stored8(codes, scales, block)


def stored_4(
    rows: int, inputs: int, group: int, numbers: str, dtype: torch.dtype, zeros: bool, factors: bool
) -> Stored4:
    shape = (rows, inputs // group)
    scales = draw(118, 126, shape) if dtype == torch.uint8 else (torch.rand(shape, device="cuda") * 0.2 + 0.1).to(dtype)
    own = draw(0, 16, shape) if zeros else None
    factor = torch.rand(rows, device="cuda") if factors else None
    return Stored4(pack4(draw(0, 16, (rows, inputs))), scales, group, numbers, own, factor)


FORMS = {
    "e4m3 rows": lambda o, i: stored_8(o, i, torch.float8_e4m3fn, (1, i)),
    "int8 rows": lambda o, i: stored_8(o, i, torch.int8, (1, i)),
    "e4m3 blocks": lambda o, i: stored_8(o, i, torch.float8_e4m3fn, (128, 128)),
    "int4 g32": lambda o, i: stored_4(o, i, 32, "int4", torch.bfloat16, False, False),
    "int4 g64 zeros": lambda o, i: stored_4(o, i, 64, "int4", torch.float16, True, False),
    "int4 g128": lambda o, i: stored_4(o, i, 128 if i % 128 == 0 else i, "int4", torch.float16, False, False),
    "int4 g128 zeros": lambda o, i: stored_4(o, i, 128 if i % 128 == 0 else i, "int4", torch.bfloat16, True, False),
    "int4 whole": lambda o, i: stored_4(o, i, i, "int4", torch.float16, False, False),
    "mxfp4": lambda o, i: stored_4(o, i, 32, "e2m1", torch.uint8, False, False),
    "nvfp4": lambda o, i: stored_4(o, i, 16, "e2m1", torch.float8_e4m3fn, False, True),
}


SIZES = [(4096, 1024, 1), (4096, 1024, 16), (2880, 250, 1), (2880, 250, 3), (576, 192, 1), (576, 192, 2), (192, 100, 7)]
SIZES += [(192, 100, 17), (576, 192, 64)]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Within a few roundings of the result's dtype; NaN never passes."""
    bound = {torch.bfloat16: 6e-3, torch.float16: 1.5e-3, torch.float32: 2e-5}[got.dtype]
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert error < bound, error


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("inputs", "features", "tokens"), SIZES)
def test_products(form, inputs, features, tokens):
    """Every product, against float64."""
    stored = FORMS[form](2 * features, inputs)
    matrix, x = dense(stored, torch.float64), random(tokens, inputs + 16)[:, 8:-8].bfloat16()
    bias, scale = random(2 * features).bfloat16(), (torch.rand(inputs, device="cuda") + 0.5).bfloat16()
    exact = x.double() @ matrix.t()
    close(linear(x, stored), exact)
    close(linear(x, stored, bias), exact + bias.double())
    residual = random(tokens, 2 * features).bfloat16() * exact.std().bfloat16()
    want = residual.double() + exact
    linear_add_(x, stored, residual)
    close(residual, want)
    normed = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * scale.double()
    exact = normed @ matrix.t()
    close(norm_linear(x, Norm(scale, 1e-6), stored), exact)
    gate, up = exact.chunk(2, -1)
    close(norm_linear_silu(x, Norm(scale, 1e-6), stored), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 5])
def test_other_dtypes(form, dtype, tokens):
    torch.backends.cuda.matmul.allow_tf32 = False
    stored, x = FORMS[form](200, 576), random(tokens, 576).to(dtype)
    close(linear(x, stored), x.double() @ dense(stored, torch.float64).t())


@pytest.mark.parametrize("numbers", ["int4", "e2m1"])
@pytest.mark.parametrize("words", [True, False])
def test_every_code_of_four_bits_is_exact(numbers, words):
    codes = torch.arange(16, dtype=torch.uint8, device="cuda").repeat(2).expand(64, 32)
    scales = torch.ones(64, 1, device="cuda", dtype=torch.float16)
    stored = Stored4(pack4(codes), scales, 32, numbers)
    x = torch.eye(32, device="cuda", dtype=torch.bfloat16 if words else torch.float16)[:16]
    got = linear_stored.run_few(x, stored, None, torch.empty(16, 64, device="cuda"))
    assert torch.equal(got.t(), dense(stored, torch.float32)[:, :16])


@pytest.mark.parametrize("numbers", ["int4", "e2m1"])
def test_every_code_and_every_scale_byte_of_packed_codes_is_exact(numbers):
    codes = ((torch.arange(128)[:, None] + torch.arange(32)) % 16).to("cuda", torch.uint8)
    scales = torch.arange(64, 128, dtype=torch.uint8, device="cuda").repeat(2)[:, None]
    stored = Stored4(pack4(codes), scales, 32, numbers)
    eye = torch.eye(32, device="cuda", dtype=torch.bfloat16)
    got = torch.cat(
        [linear_packed.run_packed(x, stored, None, torch.empty(16, 128, device="cuda")) for x in eye.split(16)]
    )
    assert torch.equal(got, dense(stored, torch.float32).t())
    broken, ones = stored._replace(scales=torch.full_like(scales, 255)), torch.ones_like(eye[:1])
    assert not linear_packed.run_packed(ones, broken, None, torch.empty(1, 128, device="cuda")).isfinite().any()


def test_a_large_input_costs_the_others_nothing():
    """What codes of int4 count from is taken off the sums: an error of float32 and not of bfloat16."""
    stored, x = FORMS["int4 g128"](256, 4096), random(1, 4096).bfloat16()
    x[0, 7] = 30000.0
    got = linear_packed.run_packed(x, stored, None, torch.empty(1, 256, device="cuda"))
    want = x.double() @ dense(stored, torch.float64).t()
    assert ((got - want).abs() < 1e-4 * 30000).all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("run", [linear_row.run_row, linear_stored.run_few])
def test_every_code_of_eight_bits_is_exact(dtype, run):
    codes = torch.arange(256, dtype=torch.uint8, device="cuda")[:, None].expand(256, 32).contiguous().view(dtype)
    stored = Stored8(codes, torch.ones(256, 1, device="cuda"), (1, 32))
    x = torch.eye(32, device="cuda", dtype=torch.bfloat16)[3:4]
    got, want = run(x, stored, None, torch.empty(1, 256, device="cuda"))[0], dense(stored, torch.float32)[:, 3]
    assert torch.equal(got[~want.isnan()], want[~want.isnan()])


def chain(x: torch.Tensor, stored: list[Stored], scale: Norm, wait: bool) -> torch.Tensor:
    """Products that each need the one before."""
    stream = x.clone()
    for matrix in stored:
        inner = norm_linear(stream, scale, matrix)
        if wait:
            torch.cuda.synchronize()
        linear_add_(inner, matrix, stream)
        if wait:
            torch.cuda.synchronize()
    return stream


@pytest.mark.parametrize("form", ["e4m3 rows", "e4m3 blocks", "int4 g32", "int4 g128", "mxfp4"])
@pytest.mark.parametrize("tokens", [1, 8])
def test_a_chain_of_dependent_launches_keeps_its_order(form, tokens):
    stored, x = [FORMS[form](2048, 2048) for _ in range(10)], random(tokens, 2048).bfloat16()
    scale = Norm(torch.ones(2048, device="cuda", dtype=torch.bfloat16), 1e-6)
    want = chain(x, stored, scale, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(x, stored, scale, False)
    for _ in range(20):
        graph.replay()
        assert torch.equal(out, want)
