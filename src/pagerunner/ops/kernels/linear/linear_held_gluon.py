"""The kernel of `kernels/linear/linear_held.py`, in Gluon: Triton's language with layouts that the program chooses.

Weights go from memory into the registers from which matrix units take them. A thread loads 16 bytes of a row: eight columns, which are four
pairs of a matrix unit's operand. Inputs are loaded with their columns in the same order, so that products are of equal columns. Example: the first
product of a warp takes columns 0, 1, 2, 3 of eight, those of its second 4 to 7.

Shape letters: S warps, each with its share of inputs; a step is S * 64 inputs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from pagerunner.ops.kernels.launch import start_next, wait_turn
from pagerunner.ops.kernels.linear.linear_parts import NO_NORM, OFFSET_NORM, silu_gate


@gluon.jit
def _weights(w_ptr, rows, cols, live, step, K: gl.constexpr, S: gl.constexpr):
    """A step's weights [S, 16, 64] of 16 rows."""
    at = w_ptr + rows.to(gl.int64)[None, :, None] * K + (cols + step * (S * 64))[:, None, :]
    mask = live[None, :, None]
    if (step + 1) * S * 64 > K:
        mask = mask & (cols < K - step * (S * 64))[:, None, :]
    return gl.load(at, mask=mask, other=0.0)


@gluon.jit
def _inputs(x_ptr, x_stride, tokens, cols, valid, step, K: gl.constexpr, S: gl.constexpr):
    """A step's inputs [S, 64, tokens]."""
    at = x_ptr + tokens[None, None, :] * x_stride + (cols + step * (S * 64))[:, :, None]
    mask = valid[None, None, :]
    if (step + 1) * S * 64 > K:
        mask = mask & (cols < K - step * (S * 64))[:, :, None]
    return gl.load(at, mask=mask, other=0.0)


@gluon.jit
def _whole(acc, scale, bias, NORM: gl.constexpr, BIAS: gl.constexpr):
    """What the warps have summed up [16, tokens], with the norm's scale and the bias."""
    y = gl.sum(acc, 0)
    if NORM != NO_NORM:
        y *= scale[None, :]
    if BIAS:
        y += bias[:, None]
    return y


@gluon.jit(do_not_specialize=["num_tokens", "num_features"])
def held_kernel(x_ptr, norm_ptr, w_ptr, bias_ptr, y_ptr, num_tokens, num_features, x_stride, y_stride, eps, K: gl.constexpr, S: gl.constexpr,
                BM: gl.constexpr, BN: gl.constexpr, EARLY: gl.constexpr, NORM: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr,
                BIAS: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """BN output features, at most 16, of up to BM tokens. With GATED they are gates, and the BN features of up that belong to them come with them.

    EARLY steps' weights are on their way at a time; the first ones before the turn.
    """
    start_next(PDL)
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [S, 1, 1], [1, 16, 8])
    first: gl.constexpr = gl.DotOperandLayout(0, mma, 8)
    second: gl.constexpr = gl.DotOperandLayout(1, mma, 8)
    steps: gl.constexpr = (K + S * 64 - 1) // (S * 64)
    own = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, first)))
    rows = gl.program_id(0) * BN + own
    live = (own < BN) & (rows < num_features)
    warp_w = gl.arange(0, S, gl.SliceLayout(1, gl.SliceLayout(1, first)))
    cols_w = gl.expand_dims(warp_w, 1) * 64 + gl.expand_dims(
        gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, first))), 0
    )
    w, u = (), ()
    for step in gl.static_range(min(EARLY, steps)):
        w = w + (_weights(w_ptr, rows, cols_w, live, step, K, S),)
        if GATED:
            u = u + (_weights(w_ptr, rows + num_features, cols_w, live, step, K, S),)
    cols = gl.expand_dims(gl.arange(0, S, gl.SliceLayout(1, gl.SliceLayout(2, second))), 1) * 64
    cols = cols + gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(2, second))), 0)
    tokens = gl.arange(0, BM, gl.SliceLayout(0, gl.SliceLayout(1, second)))
    valid = tokens < num_tokens
    outs: gl.constexpr = gl.SliceLayout(0, mma)
    features = gl.program_id(0) * BN + gl.arange(0, 16, gl.SliceLayout(1, outs))
    out_tokens = gl.arange(0, BM, gl.SliceLayout(0, outs))
    place = y_ptr + out_tokens.to(gl.int64)[None, :] * y_stride + features[:, None]
    own_y = gl.arange(0, 16, gl.SliceLayout(1, outs))
    inside = ((own_y < BN) & (features < num_features))[:, None] & (out_tokens < num_tokens)[None, :]
    bias, up_bias = features, features
    if BIAS:
        bias = gl.load(bias_ptr + features, mask=features < num_features, other=0.0).to(gl.float32)
        if GATED:
            up_bias = gl.load(bias_ptr + num_features + features, mask=features < num_features, other=0.0).to(
                gl.float32
            )
    wait_turn(PDL)
    if ADD:
        old = gl.load(place, mask=inside, other=0.0).to(gl.float32)
    acc = gl.zeros((S, 16, BM), gl.float32, mma)
    up = acc
    square = gl.zeros((S, 64, BM), gl.float32, second)
    for step in gl.static_range(steps):
        x = _inputs(x_ptr, x_stride, tokens, cols, valid, step, K, S)
        if step + EARLY < steps:
            w = w + (_weights(w_ptr, rows, cols_w, live, step + EARLY, K, S),)
            if GATED:
                u = u + (_weights(w_ptr, rows + num_features, cols_w, live, step + EARLY, K, S),)
        if NORM != NO_NORM:
            at = cols + step * (S * 64)
            weight = gl.load(norm_ptr + at, mask=at < K, other=0.0).to(gl.float32)
            if NORM == OFFSET_NORM:
                weight += 1.0
            wide = x.to(gl.float32)
            square += wide * wide
            x = (wide * weight[:, :, None]).to(x.dtype)
        acc = mma_v2(w[step], x, acc)
        if GATED:
            up = mma_v2(u[step], x, up)
    dtype: gl.constexpr = y_ptr.dtype.element_ty
    scale = square
    if NORM != NO_NORM:
        scale = gl.sum(gl.sum(square, 1), 0) * (1.0 / K)
        scale = gl.convert_layout(1.0 / gl.sqrt_rn(scale + eps), gl.SliceLayout(0, outs))
    y = _whole(acc, scale, bias, NORM, BIAS)
    if GATED:
        y = silu_gate(y, _whole(up, scale, up_bias, NORM, BIAS), dtype)
    y = y.to(dtype)
    if ADD:
        y = (old + y.to(gl.float32)).to(dtype)
    gl.store(place, y, mask=inside)
