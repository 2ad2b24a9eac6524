"""The dense kernels at real shapes on the device, against their twins or the formula in float64."""

from __future__ import annotations

import functools

import pytest
import torch

from pagerunner.ops import norm
from pagerunner.ops.activation import clamped_swiglu, gelu_tanh_and_mul, silu_and_mul, softcap_
from pagerunner.ops.linear import Norm, linear, linear_add_, norm_linear, norm_linear_silu
from pagerunner.ops.rope import rope_, rope_angles, rope_pairs_

DTYPES = [torch.bfloat16, torch.float32]
SHAPES = [
    (1024, 4096, torch.bfloat16),
    (3072, 1024, torch.bfloat16),
    (12288, 4096, torch.bfloat16),
    (1000, 333, torch.bfloat16),
    (1000, 333, torch.float32),
]
random = functools.partial(torch.randn, device="cuda")


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Within a few roundings of the result's dtype, by the norm of the difference; NaN never passes."""
    bound = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}[got.dtype]
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert error < bound, error


@pytest.mark.parametrize("tokens", [1, 3, 7, 40])
@pytest.mark.parametrize(("inputs", "features", "dtype"), SHAPES)
def test_products(inputs, features, tokens, dtype):
    """Every product, against float64."""
    torch.backends.cuda.matmul.allow_tf32 = False
    x, weight = random(tokens, inputs).to(dtype), (random(2 * features, inputs) * inputs**-0.5).to(dtype)
    bias, scale = random(2 * features).to(dtype), (torch.rand(inputs, device="cuda") + 0.5).to(dtype)
    exact = x.double() @ weight.double().t()
    close(linear(x, weight), exact)
    close(linear(x, weight, bias), exact + bias.double())
    residual = random(tokens, 2 * features).to(dtype)
    want = residual.double() + exact
    linear_add_(x, weight, residual)
    close(residual, want)
    normed = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * scale.double()
    exact = normed @ weight.double().t()
    close(norm_linear(x, Norm(scale, 1e-6), weight), exact)
    gate, up = exact.chunk(2, -1)
    close(norm_linear_silu(x, Norm(scale, 1e-6), weight), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "features"), [(1, 1024), (64, 4096), (700, 1000)])
def test_norms(tokens, features, dtype):
    x, gate, weight = random(tokens, features).to(dtype), random(tokens, features).to(dtype), random(features).to(dtype)
    for offset in (False, True):
        close(norm.rms_norm(x, weight, 1e-6, offset), norm.rms_norm.twin(x, weight, 1e-6, offset))
    for op in (norm.rms_norm_then_gate, norm.gate_then_rms_norm):
        close(op(x, gate, weight, 1e-6), op.twin(x, gate, weight, 1e-6))
    for offset in (False, True):
        residuals, op = (gate.clone(), gate.clone()), norm.add_rms_norm_
        close(op(x, residuals[0], weight, 1e-6, offset), op.twin(x, residuals[1], weight, 1e-6, offset))
        assert torch.equal(*residuals)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 300])
def test_heads(tokens, dtype):
    positions = torch.randint(0, 131_072, (tokens,), device="cuda")
    frequencies = 1e6 ** -(torch.arange(64, device="cuda") / 64)
    angles, want = (f(positions, frequencies, 1.25, dtype) for f in (rope_angles, rope_angles.twin))
    close(angles.cos_T1D, want.cos_T1D)
    close(angles.sin_T1D, want.sin_T1D)
    qkv, weight = random(tokens, 32, 128).to(dtype), random(128).to(dtype)
    for op in (lambda f, x: f(x, angles), lambda f, x: f(x, weight, weight + 1, 16, 1e-6)):
        for function in (rope_, rope_pairs_) if op.__code__.co_freevars == ("angles",) else (norm.qk_norm_,):
            got, twin = qkv.clone(), qkv.clone()
            op(function, got[:, :24])
            op(function.twin, twin[:, :24])
            close(got, twin)
            assert torch.equal(got[:, 24:], qkv[:, 24:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 6144), (300, 6144), (7, 24576)])
def test_activations(shape, dtype):
    x = random(shape).to(dtype) * 3
    close(silu_and_mul(x), silu_and_mul.twin(x))
    close(gelu_tanh_and_mul(x), gelu_tanh_and_mul.twin(x))
    close(clamped_swiglu(x, 7.0), clamped_swiglu.twin(x, 7.0))
    close(softcap_(x.clone(), 2.0), softcap_.twin(x.clone(), 2.0))


def test_a_chain_of_dependent_launches_keeps_its_order():
    """Each kernel starts while the one before it runs: the result must be that of running them one by one."""
    x, weights = random(1, 2048).bfloat16(), [(random(2048, 2048) * 0.02).bfloat16() for _ in range(20)]
    scale = Norm(torch.ones(2048, device="cuda", dtype=torch.bfloat16), 1e-6)

    def chain(wait: bool) -> torch.Tensor:
        stream = x.clone()
        for weight in weights:
            inner = norm_linear(stream, scale, weight)
            if wait:
                torch.cuda.synchronize()
            linear_add_(inner, weight, stream)
            if wait:
                torch.cuda.synchronize()
        return stream

    want = chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(False)
    for _ in range(20):
        graph.replay()
        assert torch.equal(out, want)
