"""Activations of 8 bits: the twin by plain loops, and the kernels against the twin in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch

from helpers import interpreter_floats
from helpers.stored_cases import dequantized
from pagerunner.ops.kernels.quantize import quantize_many
from pagerunner.ops.linear import Norm
from pagerunner.ops.quantize import quantize, silu_quantize

interpreter_floats.install()
E4M3, INT8 = torch.float8_e4m3fn, torch.int8
FORMS = [(E4M3, False), (E4M3, True), (INT8, False)]


def activations(tokens: int, features: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Tokens of very different size, the last one zeros; rows don't lie side by side."""
    torch.manual_seed(features)
    x = torch.randn(tokens, features + 3) * torch.logspace(-3, 3, tokens)[:, None]
    x[-1] = 0.0
    return x.to(dtype)[:, :features]


def test_a_scale_is_the_largest_magnitude_over_the_largest_number():
    x = torch.tensor([[8.96, 0.05, -4.48, 0.0]])
    codes, scales = quantize.twin(x, E4M3)
    assert scales.tolist() == [[pytest.approx(0.02)]]
    assert codes.float().tolist() == [[448.0, 2.5, -224.0, 0.0]]
    codes, scales = quantize.twin(torch.tensor([[127.0, 0.5, 1.5, -2.5]]), INT8)
    assert (scales.tolist(), codes.tolist()) == ([[1.0]], [[127, 0, 2, -2]])  # halves go to the even number


def test_groups_of_128_features_have_scales_of_their_own_and_the_last_may_be_shorter():
    x = torch.ones(3, 300)
    x[:, 128:256] = 100.0
    x[1] = 0.0
    codes, scales = quantize.twin(x, E4M3, grouped=True)
    assert scales.shape == (3, 3) and scales.stride(0) == 1
    assert scales.tolist()[0] == pytest.approx([1 / 448, 100 / 448, 1 / 448])
    assert scales.tolist()[1] == [1.0, 1.0, 1.0] and not codes[1].float().any()
    torch.testing.assert_close(dequantized(quantize.twin(x, E4M3, grouped=True)), x)


@pytest.mark.parametrize(("dtype", "grouped"), FORMS)
@pytest.mark.parametrize("features", [192, 128, 576])
@pytest.mark.parametrize("norm", [None, False, True])
def test_the_kernel_rounds_as_the_twin(dtype, grouped, features, norm):
    x = activations(5, features)
    before = None if norm is None else Norm(torch.rand(features), 1e-6, offset=norm)
    same(quantize.kernel(x, dtype, grouped=grouped, norm=before), quantize.twin(x, dtype, grouped=grouped, norm=before))


@pytest.mark.parametrize(("dtype", "grouped"), FORMS)
@pytest.mark.parametrize("tokens", [1, 8, 11])
def test_programs_of_many_short_tokens_round_some_at_a_time(dtype, grouped, tokens):
    for features in (192, 1152):
        x = activations(tokens, features)
        same(quantize_many(x, dtype, grouped=grouped), quantize.twin(x, dtype, grouped=grouped))


@pytest.mark.parametrize(("dtype", "grouped"), FORMS)
@pytest.mark.parametrize("features", [192, 40])
def test_the_gate_before(dtype, grouped, features):
    x = activations(4, 2 * features).clamp(-20, 20)
    same(silu_quantize.kernel(x, dtype, grouped=grouped), silu_quantize.twin(x, dtype, grouped=grouped))


def test_half_precision_and_no_tokens():
    x = activations(3, 192, torch.float16)
    norm = Norm(torch.rand(192).half(), 1e-6)
    same(quantize.kernel(x, E4M3, norm=norm), quantize.twin(x, E4M3, norm=norm))
    codes, scales = quantize.kernel(x[:0], E4M3, grouped=True)
    assert (codes.shape, scales.shape) == ((0, 192), (0, 2))


@pytest.mark.parametrize(("dtype", "grouped"), FORMS)
def test_what_is_not_a_number_stays_so_in_its_own_token(dtype, grouped):
    x = activations(3, 192)
    x[0, 5], x[1, 7] = math.nan, math.inf
    for run in (quantize.kernel, quantize.twin):
        got = dequantized(run(x, dtype, grouped=grouped))
        assert got[0, 5].isnan() and not got[1, 7].isfinite() and got[2].isfinite().all()
    for gated in (silu_quantize.kernel, silu_quantize.twin):
        assert not dequantized(gated(x, dtype, grouped=grouped))[:2].isfinite().all(1).any()


@pytest.mark.parametrize(("dtype", "grouped"), FORMS)
@pytest.mark.parametrize("largest", [1e-34, 1e-37, 1e-44])
def test_magnitudes_whose_scale_has_no_reciprocal(dtype, grouped, largest):
    x = activations(3, 192)
    x[0], x[0, 5] = 0.0, largest
    for run in (quantize.kernel, quantize.twin):
        got = run(x, dtype, grouped=grouped)
        numbers = dequantized(got)
        assert got.codes.float().isfinite().all() and (got.scales >= 2.0**-126).all()
        assert abs(float(numbers[0, 5]) - largest) <= max(largest / 16, 2.0**-126)
        assert not numbers[0, 6:].any()
    gate_up = torch.cat((torch.full((2, 192), -88.0), torch.ones(2, 192)), 1)  # the gates' silu is about -5e-37
    for gated in (silu_quantize.kernel, silu_quantize.twin):
        assert gated(gate_up, dtype, grouped=grouped).codes.float().isfinite().all()


def same(got, want):
    """The same numbers, but for those whose last bit of a sum rounds them to a neighbour."""
    torch.testing.assert_close(got.scales, want.scales, rtol=1e-5, atol=0)
    assert (got.codes.dtype, got.codes.shape) == (want.codes.dtype, want.codes.shape)
    far = (got.codes.float() - want.codes.float()).abs() > 0
    assert far.float().mean() < 0.01
    torch.testing.assert_close(
        dequantized(got), dequantized(want), rtol=0.13, atol=0.01 * float(want.scales.max()) * 127
    )
