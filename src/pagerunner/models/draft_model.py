"""A smaller model as the drafter: it reads the text itself, and takes nothing of the target.

Shape letters: T tokens of the step, S wanted tokens, D hidden features.
"""

from __future__ import annotations

import torch

from pagerunner.batch import ForwardBatch
from pagerunner.models.decoder import CausalLM
from pagerunner.models.drafting import Drafted, DraftModel, SharedWeights


class SmallerModel(DraftModel):
    """A whole model, whose first pass is over the target's own tokens: it fills pages, and guesses nothing."""

    takes = "nothing"
    shifted = False
    names = {"model": ""}

    def __init__(self, model: CausalLM, shared: SharedWeights) -> None:
        super().__init__(shared)
        self.model, self.taken_size = model, 0
        self.unused_tensors, self.asked_by = model.unused_tensors, model.asked_by

    def step(self, hidden_TX: torch.Tensor, batch: ForwardBatch) -> Drafted:
        """See DraftModel."""
        hidden_SD = self.model(batch)
        return Drafted(hidden_SD, hidden_SD[:, :0])

    def compute_logits(self, logit_input_SD: torch.Tensor) -> torch.Tensor:
        """See DraftModel."""
        return self.model.compute_logits(logit_input_SD)
