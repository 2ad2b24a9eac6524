"""EAGLE-3 drafters: they take hidden states of several of the target's layers.

A product joins these hidden states. The first layer attends by queries, keys and values of embedding and hidden state beside each other.

Shape letters: T tokens of the step, D hidden features, X features that a pass takes of a token, G hidden features of the target.
"""

from __future__ import annotations

import torch

from pagerunner.layers.linear import Linear
from pagerunner.layers.norm import RMSNorm
from pagerunner.layers.sublayer import ResidualStream, StepContext
from pagerunner.models.configs.drafter import EagleConfig
from pagerunner.models.drafting import Drafted, SharedWeights
from pagerunner.models.eagle import EagleDrafter, FirstLayer


class WideLayer(FirstLayer):
    """The first layer, with the norms of embedding and hidden state."""

    def __init__(self, config: EagleConfig, dtype: torch.dtype) -> None:
        super().__init__(config, 2 * config.hidden_size, dtype)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)


class Eagle3ForCausalLM(EagleDrafter):
    """EAGLE-3."""

    def __init__(self, config: EagleConfig, shared: SharedWeights, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, shared, WideLayer(config, dtype), dtype, device)
        hidden, eps, parts = config.hidden_size, config.rms_norm_eps, max(len(config.takes), 1)
        self.target_size, self.norm_of_all, self.joins = config.target_size, config.norm_before_fc, config.joins
        self.norms_residual, self.norms_output = config.norm_before_residual, config.norm_output
        if config.norm_before_fc:
            self.input_norm = RMSNorm(parts * config.target_size, eps, dtype)
        self.fc_norm = tuple(RMSNorm(config.target_size, eps, dtype) for _ in range(parts * config.fc_norm))
        if config.joins:
            self.fc = Linear(parts * config.target_size, hidden, dtype, bias=config.fc_bias)
        self.norm = RMSNorm(hidden, eps, dtype)

    def combined(self, taken_TX: torch.Tensor) -> torch.Tensor:
        """See DraftModel: the target's hidden states, joined to one, [T, D]."""
        if self.norm_of_all:
            taken_TX = self.input_norm(taken_TX)
        if self.fc_norm:
            parts_TnG = taken_TX.unflatten(1, (-1, self.target_size)).unbind(1)
            taken_TX = torch.cat(
                [norm(part.contiguous()) for norm, part in zip(self.fc_norm, parts_TnG, strict=True)], 1
            )
        return self.fc(taken_TX) if self.joins else taken_TX.clone()

    def enter(
        self, first: FirstLayer, embedded_TD: torch.Tensor, hidden_TX: torch.Tensor, context: StepContext
    ) -> ResidualStream:
        """See EagleDrafter."""
        assert isinstance(first, WideLayer)
        normed_TD = first.hidden_norm(hidden_TX)
        both = torch.cat((first.input_layernorm(embedded_TD), normed_TD), 1)
        stream = ResidualStream(normed_TD if self.norms_residual else hidden_TX, context.batch.rows.row_T)
        first.attend(both, stream, context)
        return stream

    def leave(self, stream: ResidualStream) -> Drafted:
        """See EagleDrafter."""
        normed_SD = stream.normed(self.norm)
        return Drafted(normed_SD, normed_SD if self.norms_output else stream.x_TD)
