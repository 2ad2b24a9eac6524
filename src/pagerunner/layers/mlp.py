"""Feed-forward layers. Shape letters: T tokens, D features."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagerunner.dist.base import RankSums
from pagerunner.layers.cuts import Features, by_inputs, by_outputs
from pagerunner.layers.linear import FusedLinear, Linear
from pagerunner.layers.norm import RMSNorm
from pagerunner.layers.sublayer import FeedForward, ResidualStream
from pagerunner.ops.activation import silu_and_mul
from pagerunner.ops.lora import Adapters
from pagerunner.ops.stored import Stored


def inner_features(count: int) -> Features:
    """Features between the products of a feed-forward, as devices divide them."""
    return Features("inner", count)


class GatedMLP(FeedForward):
    """`down(silu(gate(x)) * up(x))`, with gate and up as one matrix; or another gated `activation`."""

    def __init__(
        self,
        features: int,
        inner: int,
        dtype: torch.dtype,
        *,
        bias: bool = False,
        activation: Callable[[torch.Tensor], torch.Tensor] = silu_and_mul,
    ) -> None:
        super().__init__()
        self.activation = activation
        parts = {"gate_proj": inner, "up_proj": inner}
        own = inner_features(inner)
        self.gate_up_proj = FusedLinear(features, parts, dtype, bias=bias, cuts=dict.fromkeys(parts, by_outputs(own)))
        self.down_proj = Linear(inner, features, dtype, bias=bias, cut=by_inputs(own))
        self.gate_up_proj.takes_adapters = self.down_proj.takes_adapters = True

    def __call__(self, x_TD: torch.Tensor, adapters: Adapters | None = None) -> torch.Tensor:
        """Apply the layer."""
        return self.down_proj(self.activation(self.gate_up_proj(x_TD, adapters)), adapters)

    def add_(self, x_TD: torch.Tensor, residual_TD: torch.Tensor, adapters: Adapters | None = None) -> None:
        """Add the layer's output to `residual` in place."""
        self.down_proj.add_(self.activation(self.gate_up_proj(x_TD, adapters)), residual_TD, adapters)

    def add_to(self, stream: ResidualStream, norm: RMSNorm) -> None:
        """See FeedForward. Where nothing is pending, norm and addition are part of the products. Ranks' sums are added up with the norm or before it."""
        stream.add_sums_before(self.gate_up_proj)
        if isinstance(stream.sums, RankSums):
            normed_TD = stream.normed(norm)
            if self.activation is silu_and_mul:
                stream.add(self.down_proj, self.gate_up_proj.silu(normed_TD, stream.adapters))
            else:
                stream.add(self.down_proj, self.activation(self.gate_up_proj(normed_TD, stream.adapters)))
            return
        if not stream.is_whole:
            super().add_to(stream, norm)
            return
        x_TD = stream.x_TD
        if self.activation is silu_and_mul and self.down_proj.takes_gate(x_TD.shape[0]):
            gate_up = self.gate_up_proj.of_norm(x_TD, norm, stream.adapters)
            self.down_proj.add_silu_(gate_up, x_TD, stream.adapters)
        else:
            stream.add(self.down_proj, self._inner_of_norm(stream, norm))

    def matrices(self) -> tuple[torch.Tensor | Stored, torch.Tensor | Stored] | None:
        """Both matrices, if they and `silu(gate) * up` are all there is to the layer."""
        if self.activation is not silu_and_mul or self.gate_up_proj.has_bias or self.down_proj.has_bias:
            return None
        both, down = self.gate_up_proj.matrix, self.down_proj.matrix
        return None if both is None or down is None else (both, down)

    def _inner_of_norm(self, stream: ResidualStream, norm: RMSNorm) -> torch.Tensor:
        """What `down_proj` gets for the normed stream, [T, inner]. Nothing may be pending."""
        if self.activation is silu_and_mul:
            return self.gate_up_proj.silu_of_norm(stream.x_TD, norm, stream.adapters)
        return self.activation(self.gate_up_proj.of_norm(stream.x_TD, norm, stream.adapters))
