"""What ranks do together. All ranks of a group make the same calls in the same order, with tensors of the same shapes and dtypes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from pagerunner.errors import PagerunnerError


class CommError(PagerunnerError):
    """Another rank is gone or too late. Its group is of no use afterwards."""


class Norm(Protocol):
    """A norm of tokens, as `ops/linear.py` has it."""

    @property
    def weight_I(self) -> torch.Tensor:
        """The weight of each feature."""

    @property
    def eps(self) -> float:
        """What is added to the mean of squares."""

    @property
    def offset(self) -> bool:
        """Whether the weight counts from 1."""

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor:
        """The norm of `x` [T, D]."""


@runtime_checkable
class Comm(Protocol):
    """A group of ranks, as one of them sees it.

    What a call leaves is the same on all ranks, to the bit: sums are made in the order of the ranks, in float32 at least, and are
    rounded once. So a token's sum depends neither on its neighbours nor on the rank that looks at it. NCCL's sums of more than two ranks are the
    exception: they are rounded after each addition, and are the same on all ranks.

    On CPUs a call raises CommError when a rank is gone, or later than the group's time limit. On CUDA devices it returns at once, and the device
    waits: for ever, if a rank is gone. The core's watch ends such ranks (`engine/core/executors/watch.py`).
    """

    rank: int
    size: int

    def all_reduce_(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """Replace `x` by the sum of all ranks' `x`. With a `residual`, add the sum to it instead; what `x` holds then is undefined."""

    def takes_norm(self, x: torch.Tensor) -> bool:
        """Whether `add_norm_` of `x` [T, D] has the norm in the sum's own kernel, and gains by it."""
        return False

    def add_norm_(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Add the sum of all ranks' `x` [T, D] to `residual` in place, and return the norm of that."""
        self.all_reduce_(x, residual)
        return norm(residual)

    def takes_parts(self, tokens: int, features: int, dtype: torch.dtype) -> bool:
        """Whether `add_parts_` is there for such sums, on all ranks."""
        return False

    def add_parts_(self, parts: torch.Tensor, residual: torch.Tensor, norm: Norm | None = None) -> torch.Tensor | None:
        """As `all_reduce_` or `add_norm_`, with `parts` float32 [P, T, D], which add up to `x` in their order. Tokens may be more than the residual's."""
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        x = total[: residual.shape[0]].to(residual.dtype)
        if norm is not None:
            return self.add_norm_(x, residual, norm)
        self.all_reduce_(x, residual)
        return None

    def takes_pairs(self, tokens: int, features: int, dtype: torch.dtype) -> bool:
        """Whether `add_pairs_` is there for such sums, on all ranks: so far of two."""
        return self.size == 2 and self.takes_parts(tokens, features, dtype)

    def add_pairs_(
        self, pairs: torch.Tensor, experts: torch.Tensor, residual: torch.Tensor, norm: Norm | None = None
    ) -> torch.Tensor | None:
        """As `add_parts_`, with the outputs `pairs` [T * A, D] of each token's `experts` [T, A], which add up to `x` in the order of the experts' numbers.

        Numbers below 0 are no experts.
        """
        order = experts.long().argsort(stable=True, dim=-1).unsqueeze(-1)
        outputs = pairs.unflatten(0, experts.shape).float().masked_fill(experts.unsqueeze(-1) < 0, 0.0)
        return self.add_parts_(outputs.gather(1, order.expand_as(outputs)).transpose(0, 1), residual, norm)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' `x` in the order of the ranks, [size, *x.shape]."""

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Give `x[r]` to rank r. What the ranks have given to this one, in their order, of the shape of `x` [size, ...]."""

    def broadcast_bytes(self, data: bytes | None, root: int = 0) -> bytes:
        """What rank `root` calls with, on all ranks. Others pass None."""


class RankSums(NamedTuple):
    """What a sublayer adds to the residual stream: the sum of all ranks' parts. To be added once.

    This rank's `part` is [T, D]. Or it is still to be added up: several [P, T, D] in float32, or outputs of a token's `experts`, see `Comm.add_pairs_`.
    """

    part: torch.Tensor
    comm: Comm
    experts: torch.Tensor | None = None

    def takes_norm(self) -> bool:
        """Whether the norm behind the sum can be part of the sum's kernel."""
        return self.part.dim() == 3 or self.experts is not None or self.comm.takes_norm(self.part)

    def add_(self, residual_TD: torch.Tensor) -> None:
        """Add the sum to `residual` in place."""
        if self.experts is not None:
            self.comm.add_pairs_(self.part, self.experts, residual_TD)
        elif self.part.dim() == 3:
            self.comm.add_parts_(self.part, residual_TD)
        else:
            self.comm.all_reduce_(self.part, residual_TD)

    def total(self) -> torch.Tensor:
        """The sum of parts [T, D]."""
        self.comm.all_reduce_(self.part)
        return self.part

    def add_norm_(self, residual_TD: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Add the sum to `residual` in place and return the norm of that, [T, D]."""
        if self.experts is not None:
            normed_TD = self.comm.add_pairs_(self.part, self.experts, residual_TD, norm)
        elif self.part.dim() == 3:
            normed_TD = self.comm.add_parts_(self.part, residual_TD, norm)
        else:
            normed_TD = self.comm.add_norm_(self.part, residual_TD, norm)
        assert normed_TD is not None
        return normed_TD


class Stage(Protocol):
    """Some of an engine's ranks, which run consecutive layers, as one of them sees its ways to the other stages.

    A rank speaks to those that have the same place in other stages. Example: of four ranks in two stages, 0 speaks to 2, and 1 to 3.

    Calls raise CommError when a rank is gone.
    """

    number: int
    count: int
    is_first: bool
    """It has the embedding."""
    is_last: bool
    """It has the output weights, and samples."""
    in_graphs: bool
    """CUDA graphs can record what is sent and received."""

    @property
    def world(self) -> Comm:
        """The ranks of all stages."""

    def begin_layer(self) -> None:
        """Count a layer, or a product with the output weights, by which others see that this rank moves."""

    def send(self, x: torch.Tensor) -> None:
        """Give `x` to the next stage, without waiting for it. Nobody changes `x` afterwards."""

    def receive(self, x: torch.Tensor) -> None:
        """Fill `x` with what the stage before has sent."""

    def tell(self, tokens: torch.Tensor) -> None:
        """Give the last stage's tokens to all others, as `send`."""

    def hear(self, tokens: torch.Tensor) -> None:
        """Fill `tokens` with what the last stage has told next."""

    def let_go(self) -> None:
        """Free what has been sent to the next stage, once that has it. No step is under way."""


def union(comm: Comm, numbers: Iterable[int]) -> list[int]:
    """All ranks' numbers, on all of them."""
    told = gathered_bytes(comm, json.dumps(sorted(numbers)).encode())
    return sorted({number for one in told for number in json.loads(one)})


def gathered_bytes(comm: Comm, own: bytes) -> list[bytes]:
    """What each rank calls with, in the order of the ranks, on all of them."""
    return [comm.broadcast_bytes(own if comm.rank == root else None, root) for root in range(comm.size)]


def sum_in_order(parts: torch.Tensor) -> torch.Tensor:
    """The sum of `parts` [size, ...] along the first dimension, in its order; see Comm."""
    narrow = parts.is_floating_point() and parts.itemsize < torch.float32.itemsize
    total = parts[0].float() if narrow else parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)
