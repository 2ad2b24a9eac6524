"""Gated activations; see `ops/activation.py`. Every step is rounded to x's dtype where the twins do."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.launch import blocks, dependent, padded, start_next_and_wait

SILU, GELU_TANH = tl.constexpr(0), tl.constexpr(1)
CLAMPED_SWIGLU, LIMITED_SILU = tl.constexpr(2), tl.constexpr(3)
"""A kernel's KIND. The last two have a limit."""

WORDS = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")
"""Whether steps may be written in PTX, which Triton's interpreter doesn't know."""


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Float32 numbers rounded to `dtype`, in float32.

    Left to itself, the compiler rounds most numbers one by one, at a quarter of the rate, in the unit that exponentials need.
    """
    if dtype == tl.bfloat16 and WORDS and x.numel > 1:
        y = tl.inline_asm_elementwise(
            "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, 0xFFFF0000; }",
            "=r,=r,r,r", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        y = x.to(dtype).to(tl.float32)
    return y


@triton.jit
def logistic(x):
    """1 / (1 + exp(-x)) in float32."""
    if WORDS:
        y = tl.inline_asm_elementwise(
            "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }",
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        y = 1.0 / (1.0 + tl.exp(-x))
    return y


@triton.jit
def power(x):
    """e^x in float32, and 0 where it is less than 2^-126: half the instructions of `tl.exp`."""
    if WORDS:
        y = tl.inline_asm_elementwise(
            "{ .reg .f32 t; mul.f32 t, $1, 0f3FB8AA3B; ex2.approx.ftz.f32 $0, t; }",
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        y = tl.exp(x)
    return y


@triton.jit
def gated(gate, up, limit, KIND: tl.constexpr, dtype: tl.constexpr):
    """The gated activation of float32 gates and ups that are rounded to `dtype`, in `dtype`."""
    if KIND >= CLAMPED_SWIGLU:
        gate = rounded(tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL), dtype)
        up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
        up = rounded(tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL), dtype)
    if KIND == CLAMPED_SWIGLU:
        first = gate * rounded(logistic(rounded(gate * 1.702, dtype)), dtype)
        up = rounded(up + 1.0, dtype)
    elif KIND == GELU_TANH:  # 0.5 * (1 + tanh(z)) is the logistic function of 2 z
        first = gate * logistic(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        first = gate * logistic(gate)
    return (rounded(first, dtype) * up).to(dtype)


@triton.jit
def _gated_kernel(x_ptr, out_ptr, inner, x_row, limit, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """BLOCK features of one row."""
    start_next_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < inner
    dtype = out_ptr.dtype.element_ty
    x_ptr += row * x_row
    step: tl.constexpr = 2 if KIND == CLAMPED_SWIGLU else 1
    ups = 1 if KIND == CLAMPED_SWIGLU else inner
    gate = tl.load(x_ptr + cols * step, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + ups + cols * step, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * inner + cols, gated(gate, up, limit, KIND, dtype), mask=mask)


@triton.jit
def _softcap_kernel(x_ptr, count, cap, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start_next_and_wait(PDL)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    dtype = x_ptr.dtype.element_ty
    x = (tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32) / cap).to(dtype).to(tl.float32)
    fade = tl.exp(-2.0 * tl.abs(x))
    tanh = (1.0 - fade) / (1.0 + fade)
    tanh = tl.where(x < 0, -tanh, tanh).to(dtype).to(tl.float32)
    tl.store(x_ptr + place, (tanh * cap).to(dtype), mask=mask)


@triton.jit
def _add_sigmoid_gated_kernel(x_ptr, gate_ptr, y_ptr, features, x_row, gate_row, y_row, BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """BLOCK features of one row, whose gate is one number."""
    start_next_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < features
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    gate = (1.0 / (1.0 + tl.exp(-tl.load(gate_ptr + row * gate_row).to(tl.float32)))).to(dtype).to(tl.float32)
    x = tl.load(x_ptr + row * x_row + cols, mask=mask, other=0.0).to(tl.float32) * gate
    y = tl.load(y_ptr + row * y_row + cols, mask=mask, other=0.0).to(tl.float32) + x.to(dtype).to(tl.float32)
    tl.store(y_ptr + row * y_row + cols, y.to(dtype), mask=mask)


def add_sigmoid_gated_(x_TD: torch.Tensor, gate_T1: torch.Tensor, residual_TD: torch.Tensor) -> None:
    """See `ops/activation.py`."""
    tokens, features = residual_TD.shape
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    assert residual_TD.stride(1) == 1, "a residual stream's features lie beside each other"
    if tokens:
        block = min(1024, padded(features))
        _add_sigmoid_gated_kernel[(tokens, blocks(features, block))](
            x_TD, gate_T1, residual_TD, features, x_TD.stride(0), gate_T1.stride(0), residual_TD.stride(0), BLOCK=block,
            **dependent(residual_TD.device),
        )  # fmt: skip


def _run(x: torch.Tensor, kind: int, limit: float = 0.0) -> torch.Tensor:
    inner = x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], inner)
    if not out.numel():
        return out
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, 2 * inner).contiguous()
    block = min(1024, padded(inner))
    _gated_kernel[(rows.shape[0], blocks(inner, block))](
        rows, out, inner, rows.stride(0), float(limit), KIND=kind, BLOCK=block, **dependent(x.device)
    )
    return out


def silu_and_mul(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    """See `ops/activation.py`."""
    return _run(gate_up_T2I, SILU.value)


def gelu_tanh_and_mul(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    """See `ops/activation.py`."""
    return _run(gate_up_T2I, GELU_TANH.value)


def clamped_swiglu(gate_up_T2I: torch.Tensor, limit: float) -> torch.Tensor:
    """See `ops/activation.py`."""
    return _run(gate_up_T2I, CLAMPED_SWIGLU.value, limit)


def limited_silu_and_mul(gate_up_T2I: torch.Tensor, limit: float) -> torch.Tensor:
    """See `ops/activation.py`."""
    return _run(gate_up_T2I, LIMITED_SILU.value, limit)


def softcap_(x: torch.Tensor, cap: float) -> torch.Tensor:
    """See `ops/activation.py`."""
    if not x.is_contiguous():
        raise ValueError("A soft cap is applied in place and needs a dense tensor.")
    if x.numel():
        _softcap_kernel[(blocks(x.numel(), 1024),)](x, x.numel(), float(cap), BLOCK=1024, **dependent(x.device))
    return x
