"""Parts of the kernels of products: the norm before a product, the gate before or behind it, and the tile of a program."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.activation import logistic, rounded
from pagerunner.ops.linear import Norm
from pagerunner.ops.stored import Stored, rows_of

NO_NORM, PLAIN_NORM, OFFSET_NORM = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""A kernel's NORM: the weights of an offset norm count from 1."""


class Product(NamedTuple):
    """What a kernel of products computes: `x @ weight.T + bias` into `out`, or added to it.

    `x` may go through a norm before, and with `gated` the result is `silu(gate) * up` of the gate's features and then up's.
    """

    x_TI: torch.Tensor
    weight_OI: torch.Tensor | Stored
    bias_O: torch.Tensor | None
    out_TO: torch.Tensor
    norm: Norm | None = None
    gated: bool = False
    add: bool = False

    def after_norm(self) -> Product:
        """The same with the norm computed, for kernels that leave it to others."""
        return self if self.norm is None else self._replace(x_TI=self.norm(self.x_TI), norm=None)

    def of_rows(self, first: int, last: int) -> Product:
        """The same of some output features of a stored matrix, without a gate."""
        if last - first == self.out_TO.shape[1]:
            return self
        assert not isinstance(self.weight_OI, torch.Tensor)
        own, bias = rows_of(self.weight_OI, first, last), None if self.bias_O is None else self.bias_O[first:last]
        return self._replace(weight_OI=own, bias_O=bias, out_TO=self.out_TO[:, first:last])


def norm_kind(norm: Norm | None) -> int:
    """The norm as kernels know it."""
    kind = NO_NORM if norm is None else OFFSET_NORM if norm.offset else PLAIN_NORM
    return int(kind.value)


def halves(size: int) -> tuple[int, int]:
    """A number as the sum of two powers of two, or of one and 0. Example: 160 = 128 + 32."""
    first = 1 << (size.bit_length() - 1)
    return first, size - first


@triton.jit
def norm_weight(norm_ptr, cols, mask, NORM: tl.constexpr):
    """A norm's weights, float32."""
    weight = tl.load(norm_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if NORM == OFFSET_NORM:
        weight += 1.0
    return weight


@triton.jit
def silu_gate(y, up, dtype: tl.constexpr):
    """`silu(y) * up` of float32 sums, with the twin's casts."""
    gate = rounded(y, dtype)
    return rounded(gate * logistic(gate), dtype) * rounded(up, dtype)


@triton.jit
def held(place, mask, ADD: tl.constexpr):
    """What `put` adds to. It is loaded before the sum: loaded after it, a program would wait for it."""
    old = 0.0
    if ADD:
        old = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    return old


@triton.jit
def put(place, y, old, mask, ADD: tl.constexpr):
    """Store float32 sums, rounded, or `old` and rounded sums."""
    dtype: tl.constexpr = place.dtype.element_ty
    y = y.to(dtype)
    if ADD:
        y = (old + y.to(tl.float32)).to(dtype)
    tl.store(place, y, mask=mask)


@triton.jit
def store_or_add(place, y, mask, ADD: tl.constexpr):
    """As `put`, to what is there by now."""
    dtype: tl.constexpr = place.dtype.element_ty
    y = y.to(dtype)
    if ADD:
        y = (tl.load(place, mask=mask, other=0.0).to(tl.float32) + y.to(tl.float32)).to(dtype)
    tl.store(place, y, mask=mask)


@triton.jit
def normed(x, weight, eps, K: tl.constexpr, NORM: tl.constexpr, dtype: tl.constexpr):
    """The norm of all K features of a token, float32, with the twins' casts."""
    x *= 1.0 / tl.sqrt_rn(tl.sum(x * x) * (1.0 / K) + eps)
    if NORM == PLAIN_NORM:  # it rounds before it multiplies by its weight (kernels/norm.py)
        x = rounded(x, dtype)
    return rounded(x * weight, dtype)


@triton.jit
def token_inputs(x_ptr, weight, cols, inside, eps, K: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr):
    """A token's inputs in float32, with the twins' casts: themselves, their norm, or `silu(gate) * up` of 2 K numbers.

    `cols` are all K columns, in any order and shape, and perhaps some that aren't `inside`.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    if NORM != NO_NORM:
        x = normed(x, weight, eps, K, NORM, dtype)
    if GATED:
        up = tl.load(x_ptr + K + cols, mask=inside, other=0.0).to(tl.float32)
        x = rounded(silu_gate(x, up, dtype), dtype)
    return x


@triton.jit
def tile_of(number, num_tokens, num_features, BT: tl.constexpr, BN: tl.constexpr, HIGH: tl.constexpr):
    """Tokens' and features' numbers of a tile: HIGH tiles of output features take all tokens in turn, so that both stay in the cache."""
    token_tiles, feature_tiles = tl.cdiv(num_tokens, BT), tl.cdiv(num_features, BN)
    first = number // (HIGH * token_tiles) * HIGH
    inner = number % (HIGH * token_tiles)
    high = tl.minimum(feature_tiles - first, HIGH)
    return inner // high, first + inner % high
