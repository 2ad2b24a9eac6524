"""Where tensors of a checkpoint go: a sink takes one of them, and fills a part of a model's weights with it.

A tensor reaches a sink by a loader's thread. `copy` brings it from the host to where the weights are, and what a sink computes
after that, such as packing, runs there too, in the order of the copies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, Protocol

import torch

Axis = Literal["outputs", "inputs"]
"""What a dimension of a linear layer's tensor counts: output features or input features."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes of weights that aren't quantised. Weights may be converted among them, and to or from no other."""
INDICES = (torch.int64, torch.int32)


class CopyWeight(Protocol):
    """`target[...] = source`, converting; a copy to a device may be done later, in the order of its current stream."""

    def __call__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a host tensor of the same shape."""
        ...


class SinkError(Exception):
    """What a tensor holds contradicts the config. The message goes on where the tensor's name ends: "holds 3 at [0], ..."."""


class Sink(ABC):
    """Takes one tensor of a checkpoint. It is made for one load; sinks of tensors that are packed together may share state.

    `shape` is the tensor's, whole. `dtypes` are those it may have: a loader refuses any other, because a copy from codes to
    numbers, or the reverse, would convert silently. `axes` say what each of its dimensions counts, for those who divide it.
    `optional`: a checkpoint may lack the tensor, because nothing depends on it.
    """

    optional = False

    def __init__(
        self, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], axes: tuple[Axis | None, ...] | None = None
    ) -> None:
        self.shape, self.dtypes = shape, dtypes
        self.axes: tuple[Axis | None, ...] = (None,) * len(shape) if axes is None else axes

    def dimension(self, axis: Axis | None) -> int | None:
        """The dimension that counts `axis`, if there is one."""
        return self.axes.index(axis) if axis is not None and axis in self.axes else None

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape is taken; a writer may leave out dimensions of 1."""
        return shape == self.shape

    @abstractmethod
    def put(self, source: torch.Tensor, copy: CopyWeight) -> None:
        """Fill the weights from `source`, a host tensor of `shape` and one of `dtypes`.

        Raises:
            SinkError: what the tensor holds contradicts the config.
        """


def check_scales(source: torch.Tensor, *, signed: bool = False) -> None:
    """Refuse scales that make numbers of none of their codes. Bytes are exponents (e8m0).

    A scale of 0 is taken, as groups of zeros have it. `signed`: so is one below 0, which some tools write beside whole numbers.

    Raises:
        SinkError: names the first scale that is NaN, infinite or negative.
    """
    if not source.numel():
        return
    if source.dtype == torch.uint8:
        source = source.view(torch.float8_e8m0fnu)
    if source.dtype == torch.float8_e8m0fnu:
        good = bool(source.view(torch.uint8).amax() < 255)
    elif source.dtype == torch.float8_e4m3fn:
        codes = source.view(torch.uint8)
        if signed:
            good = not bool(((codes & 127) == 127).any())
        else:
            good = not (bool(codes.amax() > 128) or bool((codes == 127).any()))  # 128 is -0
    else:
        least, most = torch.aminmax(source.float())  # NaN if one is
        good = bool((least >= 0) | (least > -torch.inf) & signed) and bool(most < torch.inf)
    if good:
        return
    numbers = source.float()
    place = tuple((~(numbers.isfinite() & ((numbers >= 0) | signed))).nonzero()[0].tolist())
    known = "finite" if signed else "finite and not negative"
    raise SinkError(f"holds {numbers[place].item():g} at {list(place)}; scales must be {known}.")


class CopySink(Sink):
    """Fills `target`, a view of weights, converting floats to its float dtype and indices to its integer one."""

    def __init__(self, target: torch.Tensor, axes: tuple[Axis | None, ...] | None = None) -> None:
        super().__init__(tuple(target.shape), FLOATS if target.is_floating_point() else INDICES, axes)
        self.target = target

    def put(self, source: torch.Tensor, copy: CopyWeight) -> None:
        """See Sink."""
        copy(self.target, source)


class IndexSink(CopySink):
    """Fills `target` with whole numbers from 0 to `count` - 1; kernels use them as places in memory. `what` names one of the `count`."""

    def __init__(self, target: torch.Tensor, count: int, what: str) -> None:
        super().__init__(target)
        self._count, self._what = count, what

    def put(self, source: torch.Tensor, copy: CopyWeight) -> None:
        """See Sink. Raises SinkError if a number is outside."""
        outside = ((source < 0) | (source >= self._count)).nonzero()
        if len(outside):
            place = tuple(outside[0].tolist())
            raise SinkError(
                f"holds {source[place].item()} at {list(place)}, but by the config there are {self._count} {self._what}s, from 0 on."
            )
        super().put(source, copy)


class ByteSink(Sink):
    """Fills `target`, a view of codes, byte by byte, from a tensor of `dtype`, which is the target's unless it is given."""

    def __init__(
        self, target: torch.Tensor, axes: tuple[Axis | None, ...] | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(tuple(target.shape), (dtype or target.dtype,), axes)
        self.target = target

    def put(self, source: torch.Tensor, copy: CopyWeight) -> None:
        """See Sink."""
        copy(self.target.view(torch.uint8), source.view(torch.uint8))
