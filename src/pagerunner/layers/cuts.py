"""How the tensors of a model may be cut, so that each of several devices holds a part of them.

Devices divide features: heads, inner features, token ids. A layer says which of its rows or columns belong to which features, and a
form's sinks say which elements of a checkpoint's tensors stand for these rows or columns. Example: an MLP has 9,216 inner features, and
the second of two devices takes 4,608 to 9,215. They are rows of `up_proj` and columns of `down_proj`. GPTQ holds the columns of
`down_proj` eight in a word, [1152, O], so the device reads words 576 to 1,151.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pagerunner.quant.sinks import Axis, Sink

EXPERTS = "experts"


@dataclass(frozen=True, slots=True)
class Features:
    """What devices divide: heads of attention, inner features of a feed-forward, token ids.

    A device that computes some of them also has the weights that read them. So a product into these features and a product out of them
    name equal `Features`, and equal ones are cut alike in the whole model.

    `even`: all devices take equally many, because their states lie in pages of the same size. `repeated`: where there are more
    devices than features, several devices take the same one.
    """

    name: str
    count: int
    even: bool = False
    repeated: bool = False


class Section(NamedTuple):
    """Rows or columns of a matrix that belong to `features`: `width` neighbours belong to each."""

    features: Features
    width: int = 1

    @property
    def size(self) -> int:
        """The number of its rows or columns."""
        return self.features.count * self.width


class Cut(NamedTuple):
    """Which rows ("outputs") or columns ("inputs") of a matrix devices may divide, or which matrices ("experts"): all of them, as `sections`
    one behind another.
    """

    axis: Axis
    sections: tuple[Section, ...]


def by_outputs(features: Features, width: int = 1) -> Cut:
    """The cut of a matrix whose rows belong to `features`: each device computes some of the outputs."""
    return Cut("outputs", (Section(features, width),))


def by_inputs(features: Features, width: int = 1) -> Cut:
    """The cut of a matrix whose columns belong to `features`: each device computes a sum over some inputs, and sums are added up."""
    return Cut("inputs", (Section(features, width),))


@dataclass(frozen=True, slots=True)
class TensorCut:
    """How a checkpoint's tensor is cut.

    `dimension` of the tensor counts the rows or columns of `sections`, `step` of them an element. All cuts lie at multiples of
    `multiple` rows or columns, which suit each tensor that a checkpoint holds of the same matrix, and the matrix in memory.
    """

    dimension: int
    sections: tuple[Section, ...]
    step: int = 1
    multiple: int = 1

    def together(self) -> dict[Features, int]:
        """How many neighbours of each of the sections' features can't be divided; all of them if the tensor can't be cut.

        Example: heads of 192 rows in blocks of 128 rows are cut after every second head, so 2.
        """
        found: dict[Features, int] = {}
        first = 0
        for section in self.sections:
            features, width = section
            own = math.lcm(width, self.multiple) // width if first % self.multiple == 0 else features.count
            found[features] = min(math.lcm(found.get(features, 1), own), features.count)
            first += section.size
        return found

    def slices(self, parts: Mapping[Features, range]) -> list[slice]:
        """The elements along `dimension`, one slice for each section, that a device holds which takes `parts` of the features.

        `parts` begin at multiples of `together`, and end there or with the last of the features.
        """
        found: list[slice] = []
        first = 0
        for section in self.sections:
            part, width = parts[section.features], section.width
            start, stop = first + part.start * width, first + part.stop * width
            taken = found[-1].stop if found else 0  # an element that two sections share is the first one's
            found.append(slice(max(start // self.step, taken), -(-stop // self.step)))
            first += section.size
        return found


def tensor_cuts(sinks: Mapping[str, Sink], cut: Cut | None) -> dict[str, TensorCut | None]:
    """How the tensors of one matrix are cut, by the names of their sinks. None: each device reads the whole tensor.

    That is so if `cut` is None, if no dimension of the tensor counts what is cut, and for tensors that are only looked at.
    """
    if cut is None:
        return dict.fromkeys(sinks)
    places = {name: sink.along(cut.axis) if sink.fills else None for name, sink in sinks.items()}
    multiple = math.lcm(*(math.lcm(along.step, along.multiple) for _, along in filter(None, places.values())))
    return {
        name: None if place is None else TensorCut(place[0], cut.sections, place[1].step, multiple)
        for name, place in places.items()
    }
