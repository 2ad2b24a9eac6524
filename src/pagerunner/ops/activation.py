"""Gated activations. Shape letters: T tokens, I intermediate features."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from pagerunner.ops.dispatch import gpu_kernel
from pagerunner.ops.native import recurrent, small


@gpu_kernel("activation")
def silu_and_mul(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, where each row holds the gate's features and then the up projection's."""
    inner = gate_up_T2I.shape[-1] // 2
    return F.silu(gate_up_T2I[..., :inner]).mul_(gate_up_T2I[..., inner:])


@gpu_kernel("activation")
def gelu_tanh_and_mul(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) * up` with gelu's tanh form, laid out as in `silu_and_mul`."""
    inner = gate_up_T2I.shape[-1] // 2
    return F.gelu(gate_up_T2I[..., :inner], approximate="tanh").mul_(gate_up_T2I[..., inner:])


@gpu_kernel("activation")
def clamped_swiglu(gate_up_T2I: torch.Tensor, limit: float) -> torch.Tensor:
    """gpt-oss's `gate * sigmoid(1.702 * gate) * (up + 1)`, where gate and up features alternate.

    The gate is at most `limit`, and up within +-`limit`.
    """
    gate, up = gate_up_T2I[..., ::2].clamp(max=limit), gate_up_T2I[..., 1::2].clamp(-limit, limit)
    return gate.mul_(torch.sigmoid(gate * 1.702)).mul_(up.add_(1))


@gpu_kernel("activation")
def limited_silu_and_mul(gate_up_T2I: torch.Tensor, limit: float) -> torch.Tensor:
    """`silu_and_mul` with the gate at most `limit` and up within +-`limit` (DeepSeek-V4)."""
    inner = gate_up_T2I.shape[-1] // 2
    gate, up = gate_up_T2I[..., :inner].clamp(max=limit), gate_up_T2I[..., inner:].clamp(-limit, limit)
    return F.silu(gate).mul_(up)


@gpu_kernel("activation")
def softcap_(x: torch.Tensor, cap: float) -> torch.Tensor:
    """`cap * tanh(x / cap)` in place."""
    return x.div_(cap).tanh_().mul_(cap)


silu_and_mul.on_cpu(small.silu_and_mul)
gelu_tanh_and_mul.on_cpu(small.gelu_tanh_and_mul)
softcap_.on_cpu(small.softcap_)


def sigmoid_gated(x_THD: torch.Tensor, gate_THD: torch.Tensor) -> torch.Tensor:
    """`x * sigmoid(gate)`, [T, H, D]."""
    if small.serves(x_THD, gate_THD):
        return recurrent.sigmoid_gated(x_THD, gate_THD)
    return x_THD * gate_THD.sigmoid()


@gpu_kernel("activation")
def add_sigmoid_gated_(x_TD: torch.Tensor, gate_T1: torch.Tensor, residual_TD: torch.Tensor) -> None:
    """Add `x * sigmoid(gate)` to `residual` in place. `x` is undefined afterwards."""
    if small.serves(x_TD, gate_T1, residual_TD):
        recurrent.add_sigmoid_gated_(x_TD, gate_T1, residual_TD)
    else:
        residual_TD.add_(x_TD.mul_(gate_T1.sigmoid()))


class GatedActivation(NamedTuple):
    """A gated activation as a value, so that a product can apply it itself.

    `kind` "silu" is `silu_and_mul`, "limited_silu" is `limited_silu_and_mul`, "clamped_swiglu" is gpt-oss's. `limit` is that of the last two.
    """

    kind: Literal["silu", "limited_silu", "clamped_swiglu"]
    limit: float = 0.0

    @property
    def alternating(self) -> bool:
        """Whether gate and up features alternate; otherwise all gates come before all ups."""
        return self.kind == "clamped_swiglu"

    def __call__(self, gate_up_T2I: torch.Tensor) -> torch.Tensor:
        """Apply it, [T, I]."""
        if self.kind == "silu":
            return silu_and_mul(gate_up_T2I)
        if self.kind == "limited_silu":
            return limited_silu_and_mul(gate_up_T2I, self.limit)
        return clamped_swiglu(gate_up_T2I, self.limit)


SILU = GatedActivation("silu")
