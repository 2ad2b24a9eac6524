"""Products of few tokens with stored matrices on the device, against float64; the words of PTX make exact numbers."""

from __future__ import annotations

import functools

import pytest
import torch

from helpers.stored_cases import stored
from pagerunner.ops.kernels.linear import linear_packed, linear_row, linear_stored
from pagerunner.ops.kernels.linear.linear_parts import Product
from pagerunner.ops.linear import Norm, linear, linear_add_, norm_linear, norm_linear_silu
from pagerunner.ops.stored import Stored, Stored4, Stored8, dense, pack4

random = functools.partial(torch.randn, device="cuda")
FORMS = [
    "fp8 row", "int8 row", "fp8 block", "int4 bf16 32", "int4 f16 64 zeros", "int4 f16 128", "int4 bf16 128 zeros", "int4 f16 all",
    "e2m1 e8m0 32", "e2m1 e4m3 16 rows",
]  # fmt: skip


def made(form: str, outputs: int, inputs: int) -> Stored:
    """A random matrix on the device; a group is a whole row where 128 doesn't divide the row."""
    return stored(form if inputs % 128 == 0 else form.replace(" 128", " all"), outputs, inputs, device="cuda")


SIZES = [(4096, 1024, 1), (4096, 1024, 16), (2880, 250, 1), (2880, 250, 3), (576, 192, 1), (576, 192, 2), (192, 100, 7)]
SIZES += [(192, 100, 17), (576, 192, 64)]


def close(got: torch.Tensor, want: torch.Tensor, twin: torch.Tensor | None = None) -> None:
    """Within a few roundings of the result's dtype, or twice as far as the twin's result; NaN never passes.

    A twin is needed behind a norm. Example: with one zero point for a whole row, all weights of most rows have one sign. If the token's inputs nearly
    cancel, rounding the normed inputs alone costs 1 % of the result.
    """
    bound = {torch.bfloat16: 6e-3, torch.float16: 1.5e-3, torch.float32: 2e-5}[got.dtype]
    if twin is not None:
        bound = max(bound, 2 * float((twin.double() - want.double()).norm() / want.double().norm()))
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert error < bound, error


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("inputs", "features", "tokens"), SIZES)
def test_products(form, inputs, features, tokens):
    """Every product, against float64."""
    matrix = made(form, 2 * features, inputs)
    exact_OI, x = dense(matrix, torch.float64), random(tokens, inputs + 16)[:, 8:-8].bfloat16()
    bias, scale = random(2 * features).bfloat16(), (torch.rand(inputs, device="cuda") + 0.5).bfloat16()
    exact = x.double() @ exact_OI.t()
    close(linear(x, matrix), exact)
    close(linear(x, matrix, bias), exact + bias.double())
    residual = random(tokens, 2 * features).bfloat16() * exact.std().bfloat16()
    want = residual.double() + exact
    linear_add_(x, matrix, residual)
    close(residual, want)
    normed = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * scale.double()
    exact = normed @ exact_OI.t()
    norm, (gate, up) = Norm(scale, 1e-6), exact.chunk(2, -1)
    close(norm_linear(x, norm, matrix), exact, norm_linear.twin(x, norm, matrix))
    gated = torch.nn.functional.silu(gate) * up
    close(norm_linear_silu(x, norm, matrix), gated, norm_linear_silu.twin(x, norm, matrix))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 5])
def test_other_dtypes(form, dtype, tokens):
    torch.backends.cuda.matmul.allow_tf32 = False
    matrix, x = made(form, 200, 576), random(tokens, 576).to(dtype)
    close(linear(x, matrix), x.double() @ dense(matrix, torch.float64).t())


@pytest.mark.parametrize("numbers", ["int4", "e2m1"])
@pytest.mark.parametrize("words", [True, False])
def test_every_code_of_four_bits_is_exact(numbers, words):
    codes = torch.arange(16, dtype=torch.uint8, device="cuda").repeat(2).expand(64, 32)
    scales = torch.ones(64, 1, device="cuda", dtype=torch.float16)
    matrix = Stored4(pack4(codes), scales, 32, numbers)
    x = torch.eye(32, device="cuda", dtype=torch.bfloat16 if words else torch.float16)[:16]
    got = linear_stored.run_few(Product(x, matrix, None, torch.empty(16, 64, device="cuda")))
    assert torch.equal(got.t(), dense(matrix, torch.float32)[:, :16])


@pytest.mark.parametrize("tokens", [1, 3, 16])
@pytest.mark.parametrize("zeros", [False, True])
def test_every_packed_code_is_exact_in_float16(tokens, zeros):
    """Each code at every place of a run, its zero point beside it. Published checkpoints of AWQ and GPTQ are in float16."""
    codes = ((torch.arange(64)[:, None] + torch.arange(256)) % 16).to("cuda", torch.uint8)
    scales = torch.ldexp(torch.ones(64, 2), torch.arange(128).view(64, 2) % 5 - 2).to("cuda", torch.float16)
    from_zero = torch.arange(128, device="cuda").view(64, 2) % 16 if zeros else None
    matrix = Stored4(pack4(codes), scales, 128, "int4", None if from_zero is None else from_zero.to(torch.uint8))
    assert linear_packed.reads(matrix, torch.float16)
    eye = torch.eye(256, device="cuda", dtype=torch.float16)
    got = torch.cat(
        [
            linear_packed.run_packed(Product(x, matrix, None, torch.empty(len(x), 64, device="cuda")))
            for x in eye.split(tokens)
        ]
    )
    assert torch.equal(got, dense(matrix, torch.float32).t())


@pytest.mark.parametrize("numbers", ["int4", "e2m1"])
def test_every_code_and_every_scale_byte_of_packed_codes_is_exact(numbers):
    codes = ((torch.arange(128)[:, None] + torch.arange(32)) % 16).to("cuda", torch.uint8)
    scales = torch.arange(64, 128, dtype=torch.uint8, device="cuda").repeat(2)[:, None]
    matrix = Stored4(pack4(codes), scales, 32, numbers)
    eye = torch.eye(32, device="cuda", dtype=torch.bfloat16)
    got = torch.cat(
        [linear_packed.run_packed(Product(x, matrix, None, torch.empty(16, 128, device="cuda"))) for x in eye.split(16)]
    )
    assert torch.equal(got, dense(matrix, torch.float32).t())
    broken, ones = matrix._replace(scales=torch.full_like(scales, 255)), torch.ones_like(eye[:1])
    assert (
        not linear_packed.run_packed(Product(ones, broken, None, torch.empty(1, 128, device="cuda"))).isfinite().any()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_large_input_costs_the_others_nothing(dtype):
    """What codes of int4 count from is taken off the sums: an error of float32 and not of the inputs' dtype."""
    matrix, x = made("int4 f16 128", 256, 4096), random(1, 4096).to(dtype)
    x[0, 7] = 30000.0
    got = linear_packed.run_packed(Product(x, matrix, None, torch.empty(1, 256, device="cuda")))
    want = x.double() @ dense(matrix, torch.float64).t()
    assert ((got - want).abs() < 1e-4 * 30000).all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("run", [linear_row.run_row, linear_stored.run_few])
def test_every_code_of_eight_bits_is_exact(dtype, run):
    codes = torch.arange(256, dtype=torch.uint8, device="cuda")[:, None].expand(256, 32).contiguous().view(dtype)
    matrix = Stored8(codes, torch.ones(256, 1, device="cuda"), (1, 32))
    x = torch.eye(32, device="cuda", dtype=torch.bfloat16)[3:4]
    got = run(Product(x, matrix, None, torch.empty(1, 256, device="cuda")))[0]
    want = dense(matrix, torch.float32)[:, 3]
    assert torch.equal(got[~want.isnan()], want[~want.isnan()])


def chain(x: torch.Tensor, matrices: list[Stored], scale: Norm, wait: bool) -> torch.Tensor:
    """Products that each need the one before."""
    stream = x.clone()
    for matrix in matrices:
        inner = norm_linear(stream, scale, matrix)
        if wait:
            torch.cuda.synchronize()
        linear_add_(inner, matrix, stream)
        if wait:
            torch.cuda.synchronize()
    return stream


@pytest.mark.parametrize("form", ["fp8 row", "fp8 block", "int4 bf16 32", "int4 f16 128", "e2m1 e8m0 32"])
@pytest.mark.parametrize("tokens", [1, 8])
def test_a_chain_of_dependent_launches_keeps_its_order(form, tokens):
    matrices, x = [made(form, 2048, 2048) for _ in range(10)], random(tokens, 2048).bfloat16()
    scale = Norm(torch.ones(2048, device="cuda", dtype=torch.bfloat16), 1e-6)
    want = chain(x, matrices, scale, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(x, matrices, scale, False)
    for _ in range(20):
        graph.replay()
        assert torch.equal(out, want)
