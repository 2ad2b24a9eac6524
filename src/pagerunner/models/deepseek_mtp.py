"""The multi-token prediction module of DeepSeek-V3 and V3.2: one more layer with experts, behind a product of embedding and hidden state.

Shape letters: T tokens of the step, S wanted tokens, D hidden features.
"""

from __future__ import annotations

import torch

from pagerunner.batch import ForwardBatch
from pagerunner.layers.linear import Linear
from pagerunner.layers.norm import RMSNorm
from pagerunner.layers.sublayer import ResidualStream, StepContext
from pagerunner.models.configs.deepseek import DeepseekConfig
from pagerunner.models.deepseek import decoder_layer
from pagerunner.models.drafting import Drafted, DraftModel, SharedWeights
from pagerunner.models.rotary import Rotary


class DeepseekMTP(DraftModel):
    """It takes the hidden state behind the final norm, and goes on with its own behind its norm.

    Its tensors follow those of the target's layers. Copies of the embedding and the output weights are among them, and are not read.
    """

    takes = "final"
    names = {"layer": "", "norm": "shared_head.norm"}
    unused_tensors = ("embed_tokens.", "shared_head.head.")

    def __init__(self, config: DeepseekConfig, shared: SharedWeights, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shared)
        self.taken_size = config.hidden_size
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.prefix = f"model.layers.{config.first_layer}."
        self.enorm, self.hnorm = RMSNorm(hidden, eps, dtype), RMSNorm(hidden, eps, dtype)
        self.eh_proj = Linear(2 * hidden, hidden, dtype, plain=True)  # in floats in quantised checkpoints, too
        self.layer = decoder_layer(config, 0, dtype)
        self.norm = RMSNorm(hidden, eps, dtype)
        self.rotary = Rotary(config.rope, config.rope_dim, dtype, device)

    def step(self, hidden_TX: torch.Tensor, batch: ForwardBatch) -> Drafted:
        """See DraftModel."""
        both = torch.cat((self.enorm(self.embedded(batch)), self.hnorm(hidden_TX)), 1)
        stream = ResidualStream(self.eh_proj(both), batch.rows.row_T)
        self.layer(stream, StepContext(self.rotary(batch.positions), batch, batch.wanted_S))
        normed_SD = stream.normed(self.norm)
        return Drafted(normed_SD, normed_SD)
