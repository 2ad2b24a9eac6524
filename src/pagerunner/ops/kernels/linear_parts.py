"""Parts of the kernels of products: a norm's weights before the product, the gate behind it, and the tile of a program."""

from __future__ import annotations

import triton
import triton.language as tl

NO_NORM, PLAIN_NORM, OFFSET_NORM = 0, 1, 2


@triton.jit
def norm_weight(norm_ptr, cols, mask, NORM: tl.constexpr):
    """A norm's weights, float32; counted from 1 where `NORM` is OFFSET_NORM."""
    weight = tl.load(norm_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if NORM == 2:
        weight += 1.0
    return weight


@triton.jit
def silu_gate(y, up, dtype: tl.constexpr):
    """`silu(y) * up` of float32 sums, with the twin's casts."""
    gate = y.to(dtype).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return gate * up.to(dtype).to(tl.float32)


@triton.jit
def tile_of(num_tokens, num_features, BT: tl.constexpr, BN: tl.constexpr, HIGH: tl.constexpr):
    """The tile of this program: HIGH tiles of output features take all tokens in turn, so that both stay in the cache."""
    token_tiles, feature_tiles = tl.cdiv(num_tokens, BT), tl.cdiv(num_features, BN)
    first = tl.program_id(0) // (HIGH * token_tiles) * HIGH
    inner = tl.program_id(0) % (HIGH * token_tiles)
    high = tl.minimum(feature_tiles - first, HIGH)
    return inner // high, first + inner % high
