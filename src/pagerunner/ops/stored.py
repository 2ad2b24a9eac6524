"""Matrices of weights in fewer bits than the model's dtype, and what they stand for.

A matrix has codes, which are small numbers, and scales that multiply them. Matrices of 8 bits are `Stored8`, matrices of 4 bits are
`Stored4`. Both may hold the matrices of all experts, with a first dimension E. `dense` says what a matrix stands for; it is the twin of
every conversion in a kernel.

**The order of 4-bit codes.** Two codes share a byte. A row's columns are taken in runs of 32; a run is 16 bytes. Byte j of run r holds
column 32 r + j in its low nibble and column 32 r + 16 + j in its high one. So a thread that reads a run's 16 bytes gets two pieces of
16 neighbouring columns, each by one mask or one shift. Parts of the output features, experts, and cuts of the input features at multiples of
32 are slices of the codes. Example: byte 0x71 at place 3 of a row says that column 3 is 1 and column 19 is 7.

Number formats: e4m3 and e2m1 are those of the OCP Microscaling Formats specification 1.0; e8m0 is its scale, 2 ** (byte - 127).

Shape letters: O output features, I input features, E experts, G groups of a row.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from pagerunner.errors import ConfigError

RUN = 32
"""Columns in 16 bytes of 4-bit codes."""
_PIECE = 2**20  # numbers that are unpacked at a time
LIFTED_SCALES = 2.0**57
"""The largest scale of groups of 4-bit codes in bfloat16. Kernels for it multiply scales by up to 2**70 beforehand, and bfloat16 ends below 2**128."""


class Stored8(NamedTuple):
    """A matrix [O, I] of 8-bit codes, or all experts' [E, O, I].

    `codes` [.., O, I] are float8_e4m3fn or int8. `scales` [.., ceil(O / bo), ceil(I / bi)] are float32. `block` is (bo, bi),
    the rows and columns that share a scale: (1, I) is one scale for each output feature, (128, 128) are blocks.
    `activations` says how products of many tokens may round their input to the codes' dtype: with a scale for each "token", or for each "block" of
    128 features of a token; "none" leaves it alone. Products of few tokens don't round, as reading the weights takes their time.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]
    activations: str = "none"

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrix's, unpacked."""
        return tuple(self.codes.shape)


class Stored4(NamedTuple):
    """A matrix [O, I] of 4-bit codes, or all experts' [E, O, I]. I is a multiple of 32.

    `codes` uint8 [.., O, I / 2] are in the order that this file's docstring gives. `scales` [.., O, G] multiply `group`
    neighbouring columns each; they are float16, bfloat16, float32, float8_e4m3fn, or uint8, whose bytes are e8m0. `numbers`
    is what a code c stands for: "int4" is c - 8, or c - zero where there are `zeros`, uint8 [.., O, G]; "e2m1" is a float
    with a sign, two bits of exponent and one of mantissa. `rows`, float32 [.., O], multiply a whole output feature.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    group: int
    numbers: str
    zeros: torch.Tensor | None = None
    rows: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrix's, unpacked."""
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])


Stored = Stored8 | Stored4


def pack4(codes: torch.Tensor) -> torch.Tensor:
    """Bytes [.., O, I / 2] of the codes [.., O, I], uint8 from 0 to 15."""
    if codes.shape[-1] % RUN:
        raise ConfigError(
            f"A matrix of 4-bit codes has {codes.shape[-1]} input features; only multiples of {RUN} are supported."
        )
    runs = codes.unflatten(-1, (-1, 2, RUN // 2))
    return (runs[..., 0, :] | runs[..., 1, :] << 4).flatten(-2)


def unpack4(packed: torch.Tensor) -> torch.Tensor:
    """The codes [.., O, I] of bytes [.., O, I / 2]; the reverse of `pack4`."""
    runs = packed.unflatten(-1, (-1, RUN // 2))
    return torch.stack((runs & 15, runs >> 4), -2).flatten(-3)


def dense(stored: Stored, dtype: torch.dtype) -> torch.Tensor:
    """The matrix in `dtype`: computed in float32, then rounded once.

    Large ones are unpacked some rows at a time, as several copies of them in float32 are needed on the way.
    """
    (*_, rows, _), high = stored.shape, stored.block[0] if isinstance(stored, Stored8) else 1
    step = max(1, _PIECE * rows // max(1, math.prod(stored.shape)) // high) * high
    if step >= rows:
        return _dense(stored, dtype)
    out = torch.empty(stored.shape, dtype=dtype, device=stored.codes.device)
    for first in range(0, rows, step):
        out[..., first : first + step, :] = _dense(rows_of(stored, first, first + step), dtype)
    return out


def rows_of(stored: Stored, first: int, last: int) -> Stored:
    """Some output features. Those of 8 bits begin with a block."""
    rows, codes = slice(first, last), stored.codes[..., first:last, :]
    if isinstance(stored, Stored8):
        high = stored.block[0]
        return stored._replace(codes=codes, scales=stored.scales[..., first // high : -(-last // high), :])
    zeros = None if stored.zeros is None else stored.zeros[..., rows, :]
    factors = None if stored.rows is None else stored.rows[..., rows]
    return stored._replace(codes=codes, scales=stored.scales[..., rows, :], zeros=zeros, rows=factors)


def _dense(stored: Stored, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(stored, Stored8):
        rows, columns = stored.shape[-2:]
        scales = stored.scales.repeat_interleave(stored.block[0], -2)[..., :rows, :]
        scales = scales.repeat_interleave(stored.block[1], -1)[..., :columns]
        return (stored.codes.float() * scales).to(dtype)
    codes, scales = unpack4(stored.codes), _scale_numbers(stored.scales)
    if stored.numbers == "e2m1":
        numbers = _e2m1(codes)
    else:
        zeros = 8 if stored.zeros is None else stored.zeros.repeat_interleave(stored.group, -1).float()
        numbers = codes.float() - zeros
    if stored.rows is not None:
        scales = scales * stored.rows.unsqueeze(-1)
    return (numbers * scales.repeat_interleave(stored.group, -1)).to(dtype)


def _scale_numbers(scales: torch.Tensor) -> torch.Tensor:
    """Scales in float32; bytes are e8m0."""
    return (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()


def _e2m1(codes: torch.Tensor) -> torch.Tensor:
    """0, 0.5, 1, 1.5, 2, 3, 4, 6 for codes 0 to 7; bit 3 is the sign. Float32."""
    exponent, half = (codes >> 1 & 3).float(), (codes & 1).float() * 0.5
    magnitude = torch.where(exponent > 0, (1.0 + half) * torch.exp2(exponent - 1.0), half)
    return torch.where(codes > 7, -magnitude, magnitude)
