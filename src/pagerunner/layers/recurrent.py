"""The step between projections and the recurrent backend. Shape letters: T tokens, C channels, W taps."""

from __future__ import annotations

import torch

from pagerunner.attention.calls import Recurrence, RecurrentCall, Tensors
from pagerunner.batch import ForwardBatch, StatePages
from pagerunner.layers.cuts import Section, TensorCut
from pagerunner.layers.module import Module


class CausalConv(Module):
    """Weights of a depthwise causal convolution, [C, 1, W] as checkpoints hold them; recurrences apply it.

    `sections` say of which features its channels are.
    """

    def __init__(
        self, channels: int, taps: int, dtype: torch.dtype, sections: tuple[Section, ...], *, bias: bool = False
    ) -> None:
        super().__init__()
        self.cuts = dict.fromkeys(("weight", "bias"), TensorCut(0, sections))
        self.weights = {"weight": torch.empty(channels, 1, taps, dtype=dtype, device="meta")}
        if bias:
            self.weights["bias"] = torch.empty(channels, dtype=dtype, device="meta")

    @property
    def weight_CW(self) -> torch.Tensor:
        """One row of taps per channel, oldest first."""
        return self.weights["weight"].squeeze(1)

    @property
    def bias_C(self) -> torch.Tensor | None:
        """One number per channel, if the convolution adds it."""
        return self.weights.get("bias")


class PagedRecurrence:
    """A layer's recurrence over its requests' states, by whatever backend the batch's memory group has planned."""

    def __init__(self, layer_index: int) -> None:
        self.layer_index = layer_index

    def __call__(self, recurrence: Recurrence, inputs: Tensors, batch: ForwardBatch) -> torch.Tensor:
        """Run every row from its state on and keep the new ones; `inputs` are [T, ..], and so is the result."""
        pages = batch.kv[self.layer_index]
        assert isinstance(pages, StatePages), "the layer's memory is not recurrent state"
        group = batch.groups[pages.group]
        out: torch.Tensor = group.backend.run(RecurrentCall(recurrence, inputs, pages, group, batch.rows))
        return out
