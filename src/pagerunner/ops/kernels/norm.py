"""Root-mean-square norms, one pass each; see `ops/norm.py`. Rounding is the twins': statistics in float32, the scaled value
in x's dtype before the weight, except where the weight counts from 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.launch import blocks, dependent, padded, row_warps, start_next, wait_turn

NO_GATE, GATE_AFTER, GATE_BEFORE = 0, 1, 2


@triton.jit
def _normed(x, weight, eps, D: tl.constexpr, OFFSET: tl.constexpr, TYPE: tl.constexpr):
    """Vectors' norms times their weights, float32."""
    y = x * (1.0 / tl.sqrt_rn(tl.sum(x * x, 1) * (1.0 / D) + eps))[:, None]
    if OFFSET:
        return y + y * weight
    else:
        return y.to(TYPE).to(tl.float32) * weight


@triton.jit(do_not_specialize=["num_rows", "heads"])
def _norm_kernel(x_ptr, other_ptr, weight_ptr, before_ptr, out_ptr, num_rows, heads, x_token, x_head, other_token, other_head, eps,
                 D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, BEFORE: tl.constexpr,
                 OFFSET: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """ROWS vectors of D features. `other` is the residual (with ADD, written) or the gate; `out` is dense. BEFORE: x has a norm of its own before."""
    start_next(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (cols < D)[None, :]
    weight = tl.load(weight_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)[None, :]
    tokens, head = (rows // heads).to(tl.int64), rows % heads
    wait_turn(PDL)
    out_type = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + (tokens * x_token + head * x_head)[:, None] + cols[None, :], mask=mask, other=0.0).to(
        tl.float32
    )
    if ADD or GATE != 0:
        other_place = other_ptr + (tokens * other_token + head * other_head)[:, None] + cols[None, :]
        other = tl.load(other_place, mask=mask, other=0.0).to(tl.float32)
    if BEFORE:
        before = tl.load(before_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)[None, :]
        x = _normed(x, before, eps, D, OFFSET, out_type).to(out_type).to(tl.float32)
    if ADD:
        total = (x + other).to(other_ptr.dtype.element_ty)
        tl.store(other_place, total, mask=mask)
        x = total.to(tl.float32)
    if GATE == 2:
        x *= other / (1.0 + tl.exp(-other))
    y = _normed(x, weight, eps, D, OFFSET, out_type)
    if GATE == 1:
        y = y.to(out_type).to(tl.float32) * (other / (1.0 + tl.exp(-other)))
    tl.store(out_ptr + rows.to(tl.int64)[:, None] * D + cols[None, :], y.to(out_type), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "heads", "num_q_heads"])
def _heads_kernel(x_ptr, q_weight_ptr, k_weight_ptr, num_rows, heads, num_q_heads, x_token, x_head, eps,
                  D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, OFFSET: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """ROWS heads, in place."""
    start_next(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    inside = cols < D
    mask = (rows < num_rows)[:, None] & inside[None, :]
    q_weight = tl.load(q_weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    k_weight = tl.load(k_weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    tokens, head = (rows // heads).to(tl.int64), rows % heads
    weight = tl.where((head < num_q_heads)[:, None], q_weight[None, :], k_weight[None, :])
    wait_turn(PDL)
    place = x_ptr + (tokens * x_token + head * x_head)[:, None] + cols[None, :]
    x = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    y = _normed(x, weight, eps, D, OFFSET, x_ptr.dtype.element_ty)
    tl.store(place, y.to(x_ptr.dtype.element_ty), mask=mask)


def _as_heads(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """[tokens, heads, D], or [tokens, D] of one head, without a copy where vectors are dense; the number of heads, and the strides of tokens and heads."""
    if x.dim() not in (2, 3):
        x = x.reshape(-1, x.shape[-1])
    x = x if x.stride(-1) == 1 else x.contiguous()
    return (x, 1, x.stride(0), 0) if x.dim() == 2 else (x, x.shape[1], x.stride(0), x.stride(1))


def _shape(features: int) -> tuple[int, int, int]:
    """Vectors of a program, its columns, its warps: about 1024 elements or one vector."""
    block = padded(features)
    rows = max(1, 1024 // block)
    return rows, block, row_warps(block)


def _run(
    x: torch.Tensor,
    other: torch.Tensor | None,
    weight_D: torch.Tensor,
    eps: float,
    *,
    add: bool = False,
    before_D: torch.Tensor | None = None,
    offset: bool = False,
    gate: int = NO_GATE,
) -> torch.Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return out
    x_THD, heads, *x_strides = _as_heads(x)
    other_THD, _, *other_strides = (x_THD, heads, *x_strides) if other is None else _as_heads(other)
    num_rows = x_THD.shape[0] * heads
    rows, block, warps = _shape(x.shape[-1])
    _norm_kernel[(blocks(num_rows, rows),)](
        x_THD, other_THD, weight_D, weight_D if before_D is None else before_D, out, num_rows, heads, *x_strides, *other_strides, eps,
        D=x.shape[-1], ROWS=rows, BLOCK=block, ADD=add, BEFORE=before_D is not None, OFFSET=offset, GATE=gate, num_warps=warps, **dependent(x.device),
    )  # fmt: skip
    return out


def _in_place(x: torch.Tensor, what: str) -> torch.Tensor:
    if x.stride(-1) != 1 or x.dim() not in (2, 3):
        raise ValueError(f"{what} is changed in place and needs dense vectors of two or three dimensions.")
    return x


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: bool = False) -> torch.Tensor:
    """See `ops/norm.py`."""
    return _run(x_TD, None, weight_D, eps, offset=offset)


def add_rms_norm_(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: bool = False
) -> torch.Tensor:
    """See `ops/norm.py`."""
    return _run(x_TD, _in_place(residual_TD, "residual"), weight_D, eps, add=True, offset=offset)


def add_normed_rms_norm_(
    x_TD: torch.Tensor,
    x_weight_D: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    offset: bool = False,
) -> torch.Tensor:
    """See `ops/norm.py`."""
    residual_TD = _in_place(residual_TD, "residual")
    return _run(x_TD, residual_TD, weight_D, eps, add=True, before_D=x_weight_D, offset=offset)


def qk_norm_(
    qk_TND: torch.Tensor,
    q_weight_D: torch.Tensor,
    k_weight_D: torch.Tensor,
    num_q_heads: int,
    eps: float,
    offset: bool = False,
) -> None:
    """See `ops/norm.py`."""
    if not qk_TND.numel():
        return
    num_rows = qk_TND.shape[0] * qk_TND.shape[1]
    rows, block, warps = _shape(qk_TND.shape[-1])
    _heads_kernel[(blocks(num_rows, rows),)](
        _in_place(qk_TND, "qk"), q_weight_D, k_weight_D, num_rows, qk_TND.shape[1], num_q_heads, qk_TND.stride(0),
        qk_TND.stride(1), eps, D=qk_TND.shape[-1], ROWS=rows, BLOCK=block, OFFSET=offset, num_warps=warps,
        **dependent(qk_TND.device),
    )  # fmt: skip


def rms_norm_then_gate(x_TD: torch.Tensor, gate_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """See `ops/norm.py`."""
    return _run(x_TD, gate_TD, weight_D, eps, gate=GATE_AFTER)


def gate_then_rms_norm(x_TD: torch.Tensor, gate_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """See `ops/norm.py`."""
    return _run(x_TD, gate_TD, weight_D, eps, gate=GATE_BEFORE)
