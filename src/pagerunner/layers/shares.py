"""What one of several ranks holds of a model: a range of each of its features, and so a part of each tensor of its checkpoint.

The whole model, without memory, declares its tensors and how they may be cut (layers/cuts.py). A rank's model has the sizes
of its own part. Example: the second of two ranks takes 4,608 of an MLP's 9,216 inner features. Its `up_proj` is [4608, 4096], and
of the checkpoint's tensor [9216, 4096] it reads rows 4,608 to 9,215.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from pagerunner.errors import ConfigError
from pagerunner.layers.cuts import EXPERTS, Features
from pagerunner.layers.module import CheckpointTensor
from pagerunner.quant.sinks import CopyWeight, Sink

Parts = Mapping[Features, range]
MOST_RANKS = 64  # of which an error says whether they would do
_SAID = {"inner": "inner features", "kv_heads": "key/value heads", "vocabulary": "token ids"}


def together(tensors: Iterable[CheckpointTensor]) -> dict[Features, int]:
    """How many neighbours of each of the features can't be divided."""
    found: dict[Features, int] = {}
    for tensor in tensors:
        for features, count in tensor.cut.together().items() if tensor.cut is not None else ():
            found[features] = math.lcm(found.get(features, 1), count)
    return found


def divided(tensors: Iterable[CheckpointTensor], ranks: int) -> list[Parts]:
    """Each rank's features, which are as many as the others' or as nearly so as can be.

    Raises ConfigError with the numbers of ranks that work, if some features can't be divided among so many.
    """
    found = together(tensors)
    for features, count in found.items():
        if not _can_be_divided(features, count, ranks):
            works = _numbers_that_work(found)
            kept = f", {count:,} of which stay together," if count > 1 else ""
            said = _SAID.get(features.name, features.name.replace("_", " "))
            raise ConfigError(
                f"The model's {features.count:,} {said}{kept} can't be divided among {ranks:,} ranks. "
                f"Numbers of ranks that work for the whole model: {', '.join(map(str, works))}."
            )
    ranges = {features: _ranges(features, count, ranks) for features, count in found.items()}
    return [{features: own[rank] for features, own in ranges.items()} for rank in range(ranks)]


def numbers_of_ranks(tensors: Iterable[CheckpointTensor]) -> list[int]:
    """Numbers of ranks that `divided` can do, of up to MOST_RANKS."""
    return _numbers_that_work(together(tensors))


def _numbers_that_work(found: dict[Features, int]) -> list[int]:
    return [n for n in range(1, MOST_RANKS + 1) if all(_can_be_divided(*one, n) for one in found.items())]


def _is_repeated(features: Features, together: int, ranks: int) -> bool:
    """Whether several ranks take the same one of the features."""
    return features.repeated and ranks > features.count and ranks % features.count == 0 and together == 1


def _can_be_divided(features: Features, together: int, ranks: int) -> bool:
    if _is_repeated(features, together, ranks):
        return True
    pieces = -(-features.count // together)
    if features.even and (features.count % together or pieces % ranks):
        return ranks == 1
    return pieces >= ranks


def _ranges(features: Features, together: int, ranks: int) -> list[range]:
    count = features.count
    if _is_repeated(features, together, ranks):
        return [range(rank * count // ranks, rank * count // ranks + 1) for rank in range(ranks)]
    pieces = -(-count // together)
    bounds = [min(rank * pieces // ranks * together, count) for rank in range(ranks + 1)]
    return [range(*pair) for pair in zip(bounds, bounds[1:], strict=False)]


def _of_all_teams(parts: Parts, rank: int, ranks: int) -> Parts:
    """A rank's features, with the experts that it has as number `rank` of the ranks of all teams."""
    return {
        features: _ranges(features, 1, ranks)[rank] if features.name == EXPERTS else own
        for features, own in parts.items()
    }


def shape_of(tensor: CheckpointTensor, parts: Parts) -> tuple[int, ...]:
    """The shape of a rank's part of the tensor."""
    shape = list(tensor.sink.shape)
    if tensor.cut is not None:
        shape[tensor.cut.dimension] = sum(part.stop - part.start for part in tensor.cut.slices(parts))
    return tuple(shape)


def part_of(tensor: CheckpointTensor, held: torch.Tensor, parts: Parts) -> torch.Tensor:
    """A rank's part of the tensor that a checkpoint holds. A view where the part is one range.

    Of a tensor that lies in a mapped file, only the part is read.
    """
    held = held.reshape(tensor.sink.shape)
    if tensor.cut is None:
        return held
    dimension = tensor.cut.dimension
    slices = [held.narrow(dimension, one.start, one.stop - one.start) for one in tensor.cut.slices(parts)]
    return slices[0] if len(slices) == 1 else torch.cat(slices, dimension)


class Declares(Protocol):
    """A model, or a part of one."""

    def checkpoint(self, prefix: str = "") -> Iterator[CheckpointTensor]:
        """See Module."""


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's share of a model. `whole` is the whole model, stored in its checkpoint's format, without memory.

    `ranks` are the features of each of a team's ranks. A rank's model may also have a part of the whole model's layers. It is one of
    `teams` teams, each of which has the whole model but for the experts.
    """

    whole: Declares
    ranks: Sequence[Parts]
    rank: int
    team: int = 0
    teams: int = 1

    @classmethod
    def of(cls, whole: Declares, rank: int, ranks: int, team: int = 0, teams: int = 1) -> Share:
        """The share of one of the `ranks` ranks of a team. Ranks of all teams divide experts. Raises ConfigError as `divided`."""
        parts = divided(whole.checkpoint(), ranks)
        if teams > 1:
            parts = [_of_all_teams(own, team * ranks + number, teams * ranks) for number, own in enumerate(parts)]
        return cls(whole, parts, rank, team, teams)

    @property
    def of_experts(self) -> tuple[int, int]:
        """Which of how many ranks it is that divide experts."""
        return self.team * len(self.ranks) + self.rank, self.teams * len(self.ranks)

    @property
    def parts(self) -> Parts:
        """The rank's own features."""
        return self.ranks[self.rank]

    @property
    def counts(self) -> dict[tuple[str, int], int]:
        """How many of the whole model's features, by their name and count, the rank has."""
        return {(features.name, features.count): len(own) for features, own in self.parts.items()}

    def checkpoint(self, own: Declares, prefix: str = "") -> Iterator[CheckpointTensor]:
        """What the rank's model `own` takes of the whole model's checkpoint. The sinks are good for one load."""
        declared = {tensor.name: tensor for tensor in self.whole.checkpoint(prefix)}
        for tensor in own.checkpoint(prefix):
            yield replace(tensor, sink=PartSink(declared[tensor.name], tensor.sink, self))


class PartSink(Sink):
    """Takes a whole tensor of a checkpoint, and fills a rank's weights with its part.

    `own` is the sink of the rank's model. What is only looked at is about the whole matrix, so the whole model's sink looks.
    """

    def __init__(self, whole: CheckpointTensor, own: Sink, share: Share) -> None:
        super().__init__(whole.sink.shape, whole.sink.dtypes, whole.sink.axes)
        self.optional, self.fills = whole.sink.optional, whole.sink.fills
        self._whole, self._own, self._share = whole, own, share

    def takes(self, shape: tuple[int, ...]) -> bool:
        """See Sink."""
        return self._whole.sink.takes(shape)

    def part_of(self, source: torch.Tensor) -> torch.Tensor:
        """See Sink. Zeros where another rank has the one term of a sum."""
        part = part_of(self._whole, source, self._share.parts)
        return torch.zeros_like(part) if self._whole.once and self._share.rank else part.contiguous()

    def put(self, source: torch.Tensor, copy: CopyWeight) -> torch.Tensor | None:
        """See Sink."""
        if not self.fills:
            return self._whole.sink.put(source, copy)
        part = self.part_of(source)
        assert self._own.takes(tuple(part.shape)), (
            f"{self._whole.name}: a part of {list(part.shape)}, not {list(self._own.shape)}"
        )
        return self._own.put(part, copy)
