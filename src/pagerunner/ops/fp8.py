"""fp8 numbers with a scale. An element stands for number * scale.

Scales are powers of two, so a scale moves exponents and nothing else. Three things follow:

* An element is rounded to fp8's few mantissa bits, whatever its scale.
* Two elements are rounded alike even if their scales differ.
* Growing a scale rounds only elements that fall below fp8's smallest normal number.

So a page's scale leaves room for larger elements. Room costs no bit of an element that isn't tiny, and pages rarely have to be
converted to a larger scale.

Converting to fp8 saturates. Elements are handled as bytes, because torch indexes fp8 tensors on few devices.
"""

from __future__ import annotations

import torch

ROOM = 4.0
"""How many times as large as what it is made for the numbers that a page's scale serves may be."""


def fitting_scale(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The smallest power of two that brings magnitudes of up to `largest` into fp8 `dtype`; 0 for 0. Float32.

    For infinity, and for what is no number, it is infinite, which makes no number of all that it scales.
    """
    mantissa, exponent = torch.frexp(largest.float() / torch.finfo(dtype).max)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)  # a power of two already
    fitting = torch.ldexp(torch.ones_like(mantissa), exponent.clamp(min=-126)).where(largest.isfinite(), float("inf"))
    return torch.where(largest == 0, 0.0, fitting)


def grown_scale(old: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scale of a page that is to hold magnitudes of up to `largest` too: the old one if it serves; 0 for zeros."""
    fitting = fitting_scale(largest, dtype)
    return torch.where(fitting > old, fitting * ROOM, old)


def to_fp8(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x / scale` in fp8, saturated; a scale of 0 stands for zeros only."""
    most = torch.finfo(dtype).max
    return (x.float() / torch.where(scale > 0, scale, 1.0)).clamp_(-most, most).to(dtype)


def exponents(scale: torch.Tensor) -> torch.Tensor:
    """The byte of each scale, which is 0 or a power of two: the exponent's bits of a float32, as in e8m0. A 0 stays 0."""
    return (scale.float().view(torch.int32) >> 23).to(torch.uint8)


def from_exponents(bytes_N: torch.Tensor) -> torch.Tensor:
    """Scales in float32 of such bytes."""
    return (bytes_N.to(torch.int32) << 23).view(torch.float32)


def from_fp8(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x * scale` in `dtype`."""
    return (x.float() * scale).to(dtype)
