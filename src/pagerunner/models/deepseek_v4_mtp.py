"""The multi-token prediction module of DeepSeek-V4: one more layer with several residual streams, and what makes them one.

Shape letters: T tokens of the step, S wanted tokens, M residual streams, D hidden features.
"""

from __future__ import annotations

import torch

from pagerunner.batch import ForwardBatch
from pagerunner.layers.linear import Linear
from pagerunner.layers.norm import RMSNorm
from pagerunner.layers.streams import Streams
from pagerunner.layers.sublayer import StepContext
from pagerunner.models.configs.deepseek_v4 import DeepseekV4Config
from pagerunner.models.deepseek_v4 import Angles, Collapse, HyperConnectedLayer
from pagerunner.models.drafting import Drafted, DraftModel, SharedWeights
from pagerunner.models.rotary import Rotary


class DeepseekV4MTP(DraftModel):
    """It takes the residual streams as they are behind the last layer, and goes on with its own."""

    takes = "streams"
    prefix = "mtp.0."
    names = {"layer": ""}
    unused_tensors = ("emb.", "embed.", "head.")

    def __init__(
        self, config: DeepseekV4Config, shared: SharedWeights, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(shared)
        self.taken_size = config.streams * config.hidden_size
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.streams = config.streams
        self.enorm, self.hnorm = RMSNorm(hidden, eps, dtype), RMSNorm(hidden, eps, dtype)
        self.e_proj, self.h_proj = Linear(hidden, hidden, dtype), Linear(hidden, hidden, dtype)
        self.layer = HyperConnectedLayer(config, config.layers[0], dtype)
        self.hc_head = Collapse(config)
        self.norm = RMSNorm(hidden, eps, dtype)
        self.rotary = Rotary(config.window_rope, config.rope_dim, dtype, device)

    def step(self, hidden_TX: torch.Tensor, batch: ForwardBatch) -> Drafted:
        """See DraftModel."""
        embedded_TD = self.e_proj(self.enorm(self.embedded(batch)))
        streams = self.h_proj(self.hnorm(hidden_TX.reshape(-1, embedded_TD.shape[1]))).unflatten(0, (-1, self.streams))
        stream = Streams(streams + embedded_TD.unsqueeze(1), batch.rows.row_T)
        self.layer(stream, StepContext(Angles(self.rotary, self.rotary, batch), batch, batch.wanted_S))
        if not stream.x_TD.shape[0]:
            return Drafted(stream.x_TD[:, 0], stream.x_TD.flatten(1))
        hidden_SD = self.hc_head(stream, self.norm)
        return Drafted(hidden_SD, stream.x_TD.flatten(1))
