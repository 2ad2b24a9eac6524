"""The two halves of a decoder layer, and the residual stream that they add to.

Shape letters: T tokens of the step, S wanted tokens, D hidden features, I features before an output projection.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch

from pagerunner.batch import ForwardBatch
from pagerunner.dist.base import RankSums
from pagerunner.layers.linear import Linear
from pagerunner.layers.module import Module
from pagerunner.layers.norm import RMSNorm
from pagerunner.ops.lora import Adapters
from pagerunner.ops.pair_sums import PairSums, add_pairs_


class ResidualStream:
    """What flows through the layers of a decoder.

    `x_TD` is the residual stream. `pending_TD` is the output of a sublayer that is still to be added to it, or None; if there is a `pending_norm`, that norm of it. `sums` are still to be added
    up, and then to be added to it: outputs of experts, or what ranks have of an output. None: there are none. At most one of the two is there. The next
    norm adds it in the same kernel. A sublayer whose last product adds to `x_TD` itself leaves nothing pending.

    `row_T` are the rows of the tokens, negative ones for a graph's padding. None: there is no padding. `most_tokens`: see `ForwardBatch`.
    `adapters` are those of the stream's tokens, None if none of them has one.
    """

    __slots__ = ("adapters", "most_tokens", "pending_TD", "pending_norm", "row_T", "sums", "x_TD")

    def __init__(
        self,
        x_TD: torch.Tensor,
        row_T: torch.Tensor | None = None,
        most_tokens: int = 0,
        adapters: Adapters | None = None,
    ) -> None:
        self.x_TD, self.row_T, self.most_tokens, self.adapters = x_TD, row_T, most_tokens, adapters
        self.pending_TD: torch.Tensor | None = None
        self.pending_norm: RMSNorm | None = None
        self.sums: PairSums | RankSums | None = None

    @property
    def is_whole(self) -> bool:
        """Whether nothing is pending."""
        return self.pending_TD is None and self.sums is None

    def add(self, linear: Linear, x_TI: torch.Tensor) -> None:
        """Add the linear's output to the stream, now or, if ranks have parts of it, by the next norm."""
        self.sums = linear.part(x_TI, self.adapters)
        if self.sums is None:
            linear.add_(x_TI, self.x_TD, self.adapters)

    def add_sums(self) -> None:
        """Add the sums now."""
        if isinstance(self.sums, RankSums):
            self.sums.add_(self.x_TD)
        elif self.sums is not None:
            add_pairs_(self.x_TD, self.sums)
        self.sums = None

    def add_sums_before(self, linear: Linear) -> None:
        """Add ranks' sums now, if nothing is gained by adding them in the norm: because their kernel has none, or because the linear's has."""
        if isinstance(self.sums, RankSums) and (not self.sums.takes_norm() or linear.joins_norm(self.x_TD.shape[0])):
            self.add_sums()

    def normed(self, norm: RMSNorm) -> torch.Tensor:
        """`norm(x)` with what was pending added to x, [T, D]."""
        if self.sums is not None:
            sums, self.sums = self.sums, None
            return norm.add_sums(sums, self.x_TD)
        if (before := self.pending_norm) is not None and self.pending_TD is not None:
            pending_TD, self.pending_TD, self.pending_norm = self.pending_TD, None, None
            return norm.add_normed(pending_TD, before, self.x_TD)
        return norm(self.x_TD) if (pending := self.take_pending()) is None else norm.add(pending, self.x_TD)

    def take_pending(self) -> torch.Tensor | None:
        """What was pending as it is to be added, [T, D], which whoever calls this does. None: nothing was."""
        self._norm_pending()
        pending_TD, self.pending_TD = self.pending_TD, None
        return pending_TD

    def _norm_pending(self) -> None:
        if self.pending_norm is not None and self.pending_TD is not None:
            self.pending_TD = self.pending_norm(self.pending_TD)
        self.pending_norm = None

    def product(self, norm: RMSNorm, linear: Linear, *, in_parts: bool = False) -> torch.Tensor:
        """`linear(norm(x))` with what was pending added to x. The norm is part of the product if nothing was pending. `in_parts`: see Linear."""
        self.add_sums_before(linear)
        if isinstance(self.sums, PairSums):
            pairs, self.sums = self.sums, None
            return linear.of_sum(self.x_TD, pairs, norm, self.adapters)
        if self.is_whole:
            of_norm = linear.in_parts if in_parts else linear.of_norm
            return of_norm(self.x_TD, norm, self.adapters)
        if in_parts:
            return linear.in_parts(self.normed(norm), None, self.adapters)
        return linear(self.normed(norm), self.adapters)

    def whole(self) -> torch.Tensor:
        """The stream with what was pending added to it."""
        self.add_sums()
        if (pending_TD := self.take_pending()) is not None:
            self.x_TD.add_(pending_TD)
        return self.x_TD

    def copy_to(self, out_TD: torch.Tensor) -> None:
        """Copy the stream with what was pending added to it; pending outputs stay pending."""
        self.add_sums()
        self._norm_pending()
        if self.pending_TD is None:
            out_TD.copy_(self.x_TD)
        else:
            torch.add(self.x_TD, self.pending_TD, out=out_TD)

    def keep(self, tokens_S: torch.Tensor) -> None:
        """Drop all tokens but these, given by their places in T. Nothing may be pending."""
        assert self.is_whole, "a sublayer's output waits for tokens that are dropped"
        self.x_TD = self.x_TD.index_select(0, tokens_S)
        if self.row_T is not None:  # none is padding, but routers have other kernels without rows
            self.row_T = self.row_T.index_select(0, tokens_S)
        if self.adapters is not None:
            self.adapters = self.adapters.of_tokens(tokens_S)


class StepContext(NamedTuple):
    """What a step gives to a layer.

    `angles` are what the decoder computed from positions. `wanted_S` are the tokens that stay in the stream, by their places in T; None:
    all of them. The last layer may want only sampled tokens, as other tokens' hidden states are no longer needed behind its mixer.
    """

    angles: Any
    batch: ForwardBatch
    wanted_S: torch.Tensor | None = None


class FeedForward(Module, ABC):
    """The half of a layer that looks at each token by itself."""

    @abstractmethod
    def __call__(self, x_TD: torch.Tensor, adapters: Adapters | None = None) -> torch.Tensor:
        """The output for normed hidden states, [T, D], of tokens with these adapters."""

    def add_to(self, stream: ResidualStream, norm: RMSNorm) -> None:
        """Add the output for the normed stream to the stream, now or by the next norm."""
        stream.pending_TD = self(stream.normed(norm), stream.adapters)


class Mixer(Module, ABC):
    """The half of a layer that looks at other tokens: attention or a recurrence, and an output projection.

    `o_proj` is the output projection. A mixer whose checkpoints name it otherwise says so in `names`.
    `adds_itself`: the output projection adds to the stream. Otherwise the next norm adds its output.
    """

    adds_itself = False
    o_proj: Linear

    @abstractmethod
    def mix(self, stream: ResidualStream, norm: RMSNorm, context: StepContext) -> torch.Tensor:
        """The input of the output projection, [T, I]; of the wanted tokens alone, [S, I].

        Keys, values and states of all tokens are stored.
        """

    def adds(self, tokens: int) -> bool:
        """Whether the output projection of so many tokens adds to the stream."""
        return self.adds_itself

    def add_to(self, stream: ResidualStream, norm: RMSNorm, context: StepContext) -> None:
        """Add the output for the normed stream to the stream, now or by the next norm. Only wanted tokens stay in the stream."""
        self.add_mixed(stream, self.mix(stream, norm, context), context.wanted_S)

    def add_mixed(self, stream: ResidualStream, mixed_SI: torch.Tensor, wanted_S: torch.Tensor | None) -> None:
        """Add the output projection of what `mix` returned to the stream, now or by the next norm. Only wanted tokens stay in the stream."""
        if wanted_S is not None:
            stream.keep(wanted_S)
        if not mixed_SI.shape[0]:
            return
        if self.adds(mixed_SI.shape[0]):
            stream.add(self.o_proj, mixed_SI)
        else:
            stream.pending_TD = self.o_proj(mixed_SI, stream.adapters)


def only(x: torch.Tensor, wanted_S: torch.Tensor | None) -> torch.Tensor:
    """The rows of `x` [T, ..] that are wanted, [S, ..]. All rows if `wanted` is None."""
    return x if wanted_S is None else x.index_select(0, wanted_S)
