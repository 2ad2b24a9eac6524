"""Root-mean-square norms. Shape letters: T tokens, D features, N heads, H query heads.

The obvious `x.pow(2).mean().add(eps).rsqrt()` is nine small tensor ops on CPU; `vector_norm` is one pass, so a norm
here is five ops. Statistics are float32 whatever the dtype, as in the models' own code.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from pagerunner.ops.dispatch import gpu_kernel
from pagerunner.ops.native import recurrent, small


@functools.cache
def _scalar(value: float, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.float32, device=device)


def _inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return torch.addcmul(_scalar(eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()


@gpu_kernel("norm")
def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: bool = False) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, as a new tensor of x's dtype.

    With an `offset` it is `1 + weight`, and all is float32 up to the result.
    """
    scaled = x_TD * _inverse_rms(x_TD, eps)
    if offset:
        return torch.addcmul(scaled, scaled, weight_D.to(scaled.dtype)).to(x_TD.dtype)
    if scaled.dtype != x_TD.dtype:
        scaled = scaled.to(x_TD.dtype)
    return scaled.mul_(weight_D)


@gpu_kernel("norm")
def add_rms_norm_(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: bool = False
) -> torch.Tensor:
    """Add `x` to `residual` in place and return the norm of the sum."""
    return rms_norm.twin(residual_TD.add_(x_TD), weight_D, eps, offset)


@gpu_kernel("norm")
def add_normed_rms_norm_(
    x_TD: torch.Tensor,
    x_weight_D: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    offset: bool = False,
) -> torch.Tensor:
    """Add the norm of `x` to `residual` in place and return the norm of the sum. Both norms have one `eps` and `offset`."""
    return add_rms_norm_.twin(rms_norm.twin(x_TD, x_weight_D, eps, offset), residual_TD, weight_D, eps, offset)


rms_norm.on_cpu(small.rms_norm)
add_rms_norm_.on_cpu(small.add_rms_norm_)
add_normed_rms_norm_.on_cpu(small.add_normed_rms_norm_)


@gpu_kernel("norm")
def qk_norm_(
    qk_TND: torch.Tensor,
    q_weight_D: torch.Tensor,
    k_weight_D: torch.Tensor,
    num_q_heads: int,
    eps: float,
    offset: bool = False,
) -> None:
    """Norm every head of `qk` in place: the first `num_q_heads` with `q_weight`, the rest with `k_weight`. `offset`: see `rms_norm`."""
    if offset:
        for heads_TND, weight_D in ((qk_TND[:, :num_q_heads], q_weight_D), (qk_TND[:, num_q_heads:], k_weight_D)):
            heads_TND.copy_(rms_norm(heads_TND, weight_D, eps, offset))
        return
    if qk_TND.dtype == torch.float32:
        qk_TND.mul_(_inverse_rms(qk_TND, eps))
    else:
        qk_TND.copy_(qk_TND * _inverse_rms(qk_TND, eps))
    qk_TND[:, :num_q_heads].mul_(q_weight_D)
    qk_TND[:, num_q_heads:].mul_(k_weight_D)


@gpu_kernel("norm")
def rms_norm_then_gate(x_TD: torch.Tensor, gate_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm(x) * silu(gate)`, the product in float32."""
    return rms_norm.twin(x_TD, weight_D, eps).float().mul_(F.silu(gate_TD.float())).to(x_TD.dtype)


@gpu_kernel("norm")
def gate_then_rms_norm(x_TD: torch.Tensor, gate_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm(x * silu(gate))`, all but the weight in float32."""
    gated = x_TD.float() * F.silu(gate_TD.float())
    return gated.mul_(_inverse_rms(gated, eps)).to(x_TD.dtype).mul_(weight_D)


rms_norm_then_gate.on_cpu(recurrent.norm_then_gate)
gate_then_rms_norm.on_cpu(recurrent.gate_then_norm)
