"""The multi-token prediction module of Qwen3-Next and Qwen3.5: one layer with gated attention, behind a product of embedding and hidden state.

Shape letters: T tokens of the step, S wanted tokens, D hidden features.
"""

from __future__ import annotations

import torch

from pagerunner.batch import ForwardBatch
from pagerunner.layers.linear import Linear
from pagerunner.layers.norm import OffsetRMSNorm
from pagerunner.layers.sublayer import ResidualStream, StepContext
from pagerunner.models.configs.hybrid import GatedDeltaConfig
from pagerunner.models.drafting import Drafted, DraftModel, SharedWeights
from pagerunner.models.qwen3_next import attention_layer
from pagerunner.models.rotary import Rotary


class Qwen3NextMTP(DraftModel):
    """It takes the hidden state behind the final norm, and goes on with its own behind its norm."""

    takes = "final"
    prefix = "mtp."

    def __init__(
        self, config: GatedDeltaConfig, shared: SharedWeights, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(shared)
        self.taken_size = config.hidden_size
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = OffsetRMSNorm(hidden, eps, dtype)
        self.pre_fc_norm_hidden = OffsetRMSNorm(hidden, eps, dtype)
        self.fc = Linear(2 * hidden, hidden, dtype, plain=True)  # in floats in quantised checkpoints, too
        self.layers = (attention_layer(config, dtype),)
        self.norm = OffsetRMSNorm(hidden, eps, dtype)
        self.rotary = Rotary(config.rope, config.rotary_dim, dtype, device)

    def step(self, hidden_TX: torch.Tensor, batch: ForwardBatch) -> Drafted:
        """See DraftModel."""
        embedded_TD = self.pre_fc_norm_embedding(self.shared.embed_tokens(batch.token_ids))
        both = torch.cat((embedded_TD, self.pre_fc_norm_hidden(hidden_TX)), 1)
        stream = ResidualStream(self.fc(both), batch.rows.row_T)
        self.layers[0](stream, StepContext(self.rotary(batch.positions), batch, batch.wanted_S))
        normed_SD = stream.normed(self.norm)
        return Drafted(normed_SD, normed_SD)
