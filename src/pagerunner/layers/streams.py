"""Several residual streams instead of one; see `ops.streams`. Shape letters: T tokens, S wanted tokens, M streams, D hidden features."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial

import torch

from pagerunner.layers.sublayer import ResidualStream
from pagerunner.ops.linear import Norm
from pagerunner.ops.streams import Gates, Left, StreamWeights, add_left, end_streams, enter_sublayer


class Streams(ResidualStream):
    """`x_TD` are the streams, [T, M, D]. `left` is what the last sublayer is still to add to them, or None."""

    __slots__ = ("left",)

    def __init__(self, x_TMD: torch.Tensor, row_T: torch.Tensor | None = None, most_tokens: int = 0) -> None:
        super().__init__(x_TMD, row_T, most_tokens)
        self.left: Left | None = None

    def enter(self, weights: StreamWeights, iterations: int, norm: Norm) -> tuple[torch.Tensor, Gates]:
        """What a sublayer reads, normed [T, D], and its gates. The streams are whole afterwards."""
        x_TD, self.x_TD, gates = enter_sublayer(self.x_TD, self.left, weights, iterations, norm)
        self.left = None
        return x_TD, gates

    def end(self, weights: StreamWeights, norm: Norm) -> torch.Tensor:
        """The streams as one, normed [T, D]. The streams are whole afterwards."""
        x_TD, self.x_TD = end_streams(self.x_TD, self.left, weights, norm)
        self.left = None
        return x_TD

    def leave(self, y_TD: torch.Tensor, gates: Gates) -> None:
        """A sublayer's result, which the next sublayer adds."""
        self.left = Left(y_TD, gates)

    def whole(self) -> torch.Tensor:
        """See ResidualStream."""
        if self.left is not None:
            self.x_TD, self.left = add_left(self.x_TD, self.left), None
        return self.x_TD

    def keep(self, tokens_S: torch.Tensor) -> None:
        """Drop all tokens but these, given by their places in T."""
        super().keep(tokens_S)
        if self.left is not None:
            y_TD, gates = self.left
            self.left = Left(y_TD.index_select(0, tokens_S), Gates(*(gate.index_select(0, tokens_S) for gate in gates)))


def kernels_of(shape: tuple[int, ...], device: torch.device) -> list[Callable[[int], Hashable]]:
    """What decides which kernels a number of tokens needs on a CUDA device, if these have several streams; see `Op.kernels_for`."""
    return [partial(_kernels, shape[1], device)] if len(shape) > 1 else []


def _kernels(features: int, device: torch.device, tokens: int) -> Hashable:
    return enter_sublayer.kernels_for(tokens, features, device)
