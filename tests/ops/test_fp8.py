"""fp8 with power-of-two scales: everything fits, rounding is relative, and another scale rounds nothing again."""

from __future__ import annotations

import pytest
import torch

from pagerunner.ops.fp8 import ROOM, fitting_scale, from_fp8, grown_scale, to_fp8

DTYPES = {torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3}  # with their relative rounding errors


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_scale_is_the_smallest_power_of_two_that_fits(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    largest = torch.cat((torch.logspace(-20, 20, 401), torch.tensor([most, most * 4, most / 8])))
    scale = fitting_scale(largest, dtype)
    assert torch.equal(scale, 2 ** scale.log2().round())
    assert (largest <= scale * most).all() and (largest > scale * most / 2).all()
    assert fitting_scale(torch.tensor([0.0]), dtype).tolist() == [0.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_relative_and_the_same_at_every_larger_scale(dtype: torch.dtype) -> None:
    x = torch.randn(1000)
    x = x[x.abs() > 0.01]
    scale = fitting_scale(x.abs().max(), dtype)
    held = from_fp8(to_fp8(x, scale, dtype), scale, torch.float32)
    assert ((held - x).abs() <= DTYPES[dtype] * x.abs()).all()
    coarser = scale * 4
    assert torch.equal(from_fp8(to_fp8(held, coarser, dtype), coarser, torch.float32), held)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_does_not_fit_saturates_and_zeros_stay(dtype: torch.dtype) -> None:
    x, scale = torch.tensor([1e9, -1e9, 0.0]), torch.tensor(1.0)
    most = torch.finfo(dtype).max
    assert from_fp8(to_fp8(x, scale, dtype), scale, torch.float32).tolist() == [most, -most, 0.0]
    assert from_fp8(to_fp8(x * 0, scale * 0, dtype), scale * 0, torch.float32).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pages_scale_stays_while_it_serves_and_then_leaves_room(dtype: torch.dtype) -> None:
    first = torch.tensor([0.0, 1e-3, 1.0, 300.0])
    scale = grown_scale(torch.zeros(4), first, dtype)
    assert scale.tolist() == (fitting_scale(first, dtype) * ROOM).tolist()
    assert torch.equal(grown_scale(scale, first * ROOM, dtype), scale), "there was room"
    larger = grown_scale(scale, first * ROOM * 2.5, dtype)
    assert (larger[1:] > scale[1:] * ROOM).all() and larger[0] == 0
    assert torch.equal(grown_scale(larger, first, dtype), larger), "scales never shrink"
