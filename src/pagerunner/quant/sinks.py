"""Where tensors of a checkpoint go: a sink takes one of them, and fills a part of a model's weights with it.

A tensor reaches a sink by a loader's thread. `copy` brings it from the host to where the weights are, and what a sink computes
after that, such as packing, runs there too, in the order of the copies.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

Axis = Literal["outputs", "inputs", "experts"]
"""What a dimension of a tensor counts: output features or input features of a matrix, or the experts that have one each."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes of weights that aren't quantised. Weights may be converted among them, and to or from no other."""
INDICES = (torch.int64, torch.int32)


class Along(NamedTuple):
    """What a dimension of a tensor counts, and where it may be cut.

    Each element stands for `step` neighbouring features along `axis`; the last one may stand for fewer. A cut lies at multiples of
    `multiple` features, because weights in memory can't be divided elsewhere. Example: words of eight 4-bit numbers, which memory holds
    in runs of 32 columns, are Along("inputs", 8, 32).
    """

    axis: Axis
    step: int = 1
    multiple: int = 1


class CopyWeight(Protocol):
    """`target[...] = source`, converting; a copy to a device may be done later, in the order of its current stream."""

    def __call__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a host tensor of the same shape."""


Axes = Sequence[Axis | Along | None]


class SinkError(Exception):
    """What a tensor holds contradicts the config. The message goes on where the tensor's name ends: "holds 3 at [0], ..."."""


class Sink(ABC):
    """Takes one tensor of a checkpoint. It is made for one load; sinks of tensors that are packed together may share state.

    `shape` is the tensor's, whole. `dtypes` are those it may have: a loader refuses any other, because a copy from codes to
    numbers, or the reverse, would convert silently. `axes` say what each of its dimensions counts, for those who divide it; a name alone
    is an `Along` of single features. None: the dimension can't be cut, or need not be.
    `optional`: a checkpoint may lack the tensor, because nothing depends on it.
    `fills`: weights are filled from the tensor. Otherwise it is only looked at. Then it is about the whole matrix, whichever part of it
    a device holds.
    """

    optional = False
    fills = True

    def __init__(self, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], axes: Axes | None = None) -> None:
        self.shape, self.dtypes = shape, dtypes
        self.axes = tuple(Along(one) if isinstance(one, str) else one for one in axes or (None,) * len(shape))

    def along(self, axis: Axis) -> tuple[int, Along] | None:
        """The dimension that counts `axis`, and how, if there is one."""
        return next(((place, one) for place, one in enumerate(self.axes) if one is not None and one.axis == axis), None)

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape is taken; a writer may leave out dimensions of 1, or have them elsewhere.

        Whoever cuts such a tensor gives it the sink's `shape` first. Its elements are in the same order.
        """
        return shape == self.shape

    def part_of(self, source: torch.Tensor) -> torch.Tensor:
        """The elements of `source` that the weights are filled with: all of them, unless the sink is one of several ranks'."""
        return source

    @abstractmethod
    def put(self, source: torch.Tensor, copy: CopyWeight) -> torch.Tensor | None:
        """Fill the weights from `source`, a host tensor of `shape` and one of `dtypes`.

        Returns None, or the `evidence` of what it has copied, where the weights lie. It may be looked at when the copies are done: a
        device finds it faster than the host would, and nothing waits for it.

        Raises:
            SinkError: what the tensor holds contradicts the config.
        """


HOLDS_NAN = "holds codes that are no numbers (NaN); the file is damaged."
_PIECE = 2**24  # codes that are looked at together, which bounds the memory that it takes
_FLOATS_PIECE = 2**30  # torch's kernels count up to 2**31


def evidence(numbers: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor | None:
    """What shows whether some numbers are NaN or infinite, on their device; None for dtypes that hold neither.

    Of floats they are the least and the largest of each piece, in `dtype` if it is given. Of e4m3 it is a bool, true if a code is NaN: 0x7f
    or 0xff.
    """
    if not numbers.numel():
        return None
    if numbers.dtype in FLOATS:  # torch says NaN of a piece that holds one
        found = torch.stack([x for piece in _pieces(numbers, _FLOATS_PIECE) for x in torch.aminmax(piece)])
        return found if dtype is None else found.to(dtype)
    if numbers.dtype != torch.float8_e4m3fn:
        return None
    return torch.stack([(piece & 127).amax() for piece in _pieces(numbers.view(torch.uint8), _PIECE)]).amax() == 127


def _pieces(numbers: torch.Tensor, most: int) -> tuple[torch.Tensor, ...]:
    """Parts along dimension 0 of at most so many numbers, unless one of its elements has more."""
    return numbers.split(max(1, most * len(numbers) // numbers.numel())) if numbers.dim() else (numbers,)


def is_damage(evidence: torch.Tensor) -> bool:
    """Whether `evidence`, or several of one kind together, shows a number that is NaN or infinite."""
    return bool(evidence.any() if evidence.dtype == torch.bool else ~evidence.isfinite().all())


def _evidence_of_copy(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor | None:
    """That of `target`, to which `source` was copied. A host looks at the source where that is enough, as it has fewer bytes or as many."""
    held = target.device.type == "cpu" and torch.promote_types(source.dtype, target.dtype) == target.dtype
    return evidence(source if held else target)


def beyond(dtype: torch.dtype, number: float) -> str:
    """What to say of a number that `dtype` can't hold: its end, and which dtype holds the number, if one does."""
    exact = torch.tensor(number, dtype=torch.float64)
    better = next((one for one in (torch.bfloat16, torch.float32) if exact.to(one).isfinite()), None)
    instead = f'; dtype="{name_of(better)}" holds it.' if better else ". The file is damaged."
    return f"more than {name_of(dtype)} can hold ({torch.finfo(dtype).max:g}){instead}"


def name_of(dtype: torch.dtype) -> str:
    """The dtype as users write it."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class ScaleCheck:
    """Refuses scales that make numbers of none of their codes, or numbers that the model's `dtype` can't hold.

    `most` is the largest number that a code, and further scales, can bring to the product. Example: 6 of e2m1, and 6 x 448 for the
    scale of a matrix whose groups have scales in e4m3. A scale of 0 is taken, as groups of zeros have it. `signed`: so is one below 0,
    which some tools write beside whole numbers. `divides`: numbers are divided by the one scale that is looked at. `limit`:
    kernels compute with no larger scale.
    """

    dtype: torch.dtype
    most: float
    signed: bool = False
    divides: bool = False
    limit: float = math.inf

    def __call__(self, source: torch.Tensor) -> None:
        """Look at scales on the host. Bytes are exponents (e8m0).

        Raises:
            SinkError: names the first scale that is NaN, infinite or negative, or the largest.
        """
        if not source.numel():
            return
        source = source.view(torch.float8_e8m0fnu) if source.dtype == torch.uint8 else source
        largest, below = _largest(source)
        if not math.isfinite(largest) or (below and not self.signed):
            numbers = source.float()
            place = tuple((~(numbers.isfinite() & ((numbers >= 0) | self.signed))).nonzero()[0].tolist())
            known = "finite" if self.signed else "finite and not negative"
            raise SinkError(f"holds {numbers[place].item():g} at {list(place)}; scales must be {known}.")
        if self.divides and not largest:
            raise SinkError("holds 0, and numbers are divided by it.")
        number = self.most / largest if self.divides else self.most * largest
        held = torch.tensor(number, dtype=torch.float64).to(self.dtype).isfinite()
        if held and largest <= self.limit:
            return
        numbers = source.float()
        place = tuple((numbers.abs() == largest).nonzero()[0].tolist())
        found, does = numbers[place].item(), "divides" if self.divides else "multiplies"
        if held:
            raise SinkError(
                f"holds {found:g} at {list(place)}; kernels in {name_of(self.dtype)} compute with scales up to {self.limit:g}. "
                'dtype="float32" takes larger ones.'
            )
        raise SinkError(
            f"holds {found:g} at {list(place)}, which {does} numbers up to {self.most:g}: "
            f"{number:g} is {beyond(self.dtype, number)}"
        )


def _largest(scales: torch.Tensor) -> tuple[float, bool]:
    """The largest absolute value, NaN if a scale is, and whether a scale is below 0."""
    if scales.dtype == torch.float8_e8m0fnu:
        return scales.view(torch.uint8).amax().view(scales.dtype).float().item(), False
    if scales.dtype == torch.float8_e4m3fn:
        codes = scales.view(torch.uint8)
        return (codes & 127).amax().view(scales.dtype).float().item(), bool(codes.amax() > 128)  # 128 is -0
    least, most = torch.aminmax(scales.float())  # NaN if one is
    return torch.maximum(-least, most).item(), bool(least < 0)


class CopySink(Sink):
    """Fills `target`, a view of weights, converting floats to its float dtype and indices to its integer one."""

    def __init__(self, target: torch.Tensor, axes: Axes | None = None) -> None:
        super().__init__(tuple(target.shape), FLOATS if target.is_floating_point() else INDICES, axes)
        self.target = target

    def put(self, source: torch.Tensor, copy: CopyWeight) -> torch.Tensor | None:
        """See Sink."""
        copy(self.target, source)
        return _evidence_of_copy(source, self.target)


class IndexSink(CopySink):
    """Fills `target` with whole numbers from 0 to `count` - 1; kernels use them as places in memory. `what` names one of the `count`."""

    def __init__(self, target: torch.Tensor, count: int, what: str) -> None:
        super().__init__(target)
        self._count, self._what = count, what

    def put(self, source: torch.Tensor, copy: CopyWeight) -> torch.Tensor | None:
        """See Sink. Raises SinkError if a number is outside."""
        outside = ((source < 0) | (source >= self._count)).nonzero()
        if len(outside):
            place = tuple(outside[0].tolist())
            raise SinkError(
                f"holds {source[place].item()} at {list(place)}, but by the config there are {self._count} {self._what}s, from 0 on."
            )
        return super().put(source, copy)


class OffsetSink(IndexSink):
    """As IndexSink, of whole numbers less their places: the fifth one holds 3 for the number 7."""

    def put(self, source: torch.Tensor, copy: CopyWeight) -> torch.Tensor | None:
        """See Sink. Raises SinkError if a number is outside."""
        return super().put(source + torch.arange(len(source)), copy)


class ByteSink(Sink):
    """Fills `target`, a view of codes, byte by byte, from a tensor of `dtype`, which is the target's unless it is given."""

    def __init__(self, target: torch.Tensor, axes: Axes | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__(tuple(target.shape), (dtype or target.dtype,), axes)
        self.target = target

    def put(self, source: torch.Tensor, copy: CopyWeight) -> torch.Tensor | None:
        """See Sink."""
        copy(self.target.view(torch.uint8), source.view(torch.uint8))
        return evidence(self.target)
