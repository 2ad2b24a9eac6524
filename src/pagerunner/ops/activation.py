"""Gated activations. Shape letters: T tokens, I intermediate features."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_and_mul(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, where each row holds the gate's features and then the up projection's."""
    inner = gate_up_T2I.shape[-1] // 2
    return F.silu(gate_up_T2I[..., :inner]).mul_(gate_up_T2I[..., inner:])
