"""Sinks for tensors that checkpoints hold packed in other orders than memory: what they need is computed where the weights lie.

A sink waits for no other tensor, except where input features are sorted (`Sorting`): codes wait for their order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from pagerunner.quant.sinks import Axes, CopyWeight, ScaleCheck, Sink, SinkError, evidence


class PackSink(Sink):
    """Brings a tensor to `device` as it is, and lets `fill` put it where it belongs.

    `check` looks at scales before. `meant`: floats stand for the model's weights in this dtype, which must hold them.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype | tuple[torch.dtype, ...],
        fill: Callable[..., object],
        device: torch.device,
        axes: Axes | None = None,
        check: ScaleCheck | None = None,
        meant: torch.dtype | None = None,
    ) -> None:
        super().__init__(shape, dtype if isinstance(dtype, tuple) else (dtype,), axes)
        self._fill, self._device, self._check, self._meant = fill, device, check, meant

    def put(self, source: torch.Tensor, copy: CopyWeight) -> torch.Tensor | None:
        """See Sink."""
        if self._check is not None:
            self._check(source)
        staged = _staged(source, self._device, copy)
        self._fill(staged)
        return None if self._check is not None else evidence(staged, self._meant)


class SlicesSink(PackSink):
    """As PackSink, for one slice along dimension 0 after another, which bounds what lies on the device beside the weights.

    `fill` is given a slice's number too.
    """

    def put(self, source: torch.Tensor, copy: CopyWeight) -> torch.Tensor | None:
        """See Sink."""
        if self._check is not None:
            self._check(source)
        found = []
        for number, part in enumerate(source):
            staged = _staged(part, self._device, copy)
            self._fill(number, staged)
            found.append(evidence(staged, self._meant))
        shown = [one for one in found if one is not None]
        return torch.stack(shown) if shown else None


def _staged(source: torch.Tensor, device: torch.device, copy: CopyWeight) -> torch.Tensor:
    """The tensor on the device; numbers of a byte are copied as bytes."""
    staged = torch.empty(source.shape, dtype=source.dtype, device=device)
    if source.dtype.itemsize == 1:
        copy(staged.view(torch.uint8), source.view(torch.uint8))
    else:
        copy(staged, source)
    return staged


class NumberSink(PackSink):
    """Takes one scale, which a checkpoint holds as [] or [1]."""

    def __init__(
        self,
        dtypes: tuple[torch.dtype, ...],
        fill: Callable[[torch.Tensor], object],
        device: torch.device,
        check: ScaleCheck,
    ) -> None:
        super().__init__((1,), dtypes, fill, device, check=check)

    def takes(self, shape: tuple[int, ...]) -> bool:
        """See Sink."""
        return shape in ((), (1,))


class UnusedSink(Sink):
    """Takes a number that nothing uses, such as a scale for activations, if the checkpoint holds it."""

    optional = True
    fills = False

    def __init__(self, dtypes: tuple[torch.dtype, ...]) -> None:
        super().__init__((1,), dtypes)

    def takes(self, shape: tuple[int, ...]) -> bool:
        """See Sink."""
        return shape in ((), (1,))

    def put(self, source: torch.Tensor, copy: CopyWeight) -> None:
        """See Sink."""


class EqualSink(Sink):
    """Takes a tensor that must hold what the config says already; `said` is the config's side of the error."""

    fills = False

    def __init__(
        self,
        want: torch.Tensor,
        dtypes: tuple[torch.dtype, ...],
        said: str,
        *,
        axes: Axes | None = None,
        optional: bool = False,
    ) -> None:
        super().__init__(tuple(want.shape), dtypes, axes)
        self._want, self._said, self.optional = want, said, optional

    def put(self, source: torch.Tensor, copy: CopyWeight) -> None:
        """See Sink. Raises SinkError if it holds something else."""
        different = (source.cpu() != self._want).nonzero()
        if len(different):
            place = tuple(different[0].tolist())
            raise SinkError(
                f"holds {source[place].item()} at {list(place)}, and not {self._want[place].item()}, but {self._said}."
            )


class Sorting:
    """Codes [O, I] whose input features are sorted by their group: both what says the group and the codes are needed for it.

    `order` int32 [I] gets the input feature of each column; `put_codes` gets the codes in that order.
    """

    def __init__(self, order: torch.Tensor, group: int, put_codes: Callable[[torch.Tensor], object]) -> None:
        self._order, self._group, self._put_codes = order, group, put_codes
        self._codes: torch.Tensor | None = None
        self._lock, self._known = threading.Lock(), False

    def take_codes(self, codes: torch.Tensor) -> None:
        """Codes [O, I] in the checkpoint's order of input features."""
        with self._lock:
            self._codes = codes
            ready = self._known
        if ready:
            self._finish()

    def groups_sink(self) -> Sink:
        """Takes the group of each input feature, int32 [I]."""
        return _GroupsSink(self, self._order, self._group)

    def take_order(self, order: torch.Tensor, copy: CopyWeight) -> None:
        """The input feature of each column, a host tensor."""
        copy(self._order, order.to(torch.int32))
        with self._lock:
            self._known = True
            ready = self._codes is not None
        if ready:
            self._finish()

    def _finish(self) -> None:
        codes, self._codes = self._codes, None
        assert codes is not None
        self._put_codes(codes.index_select(1, self._order))


class _GroupsSink(Sink):
    def __init__(self, sorting: Sorting, order: torch.Tensor, group: int) -> None:
        super().__init__(tuple(order.shape), (torch.int32, torch.int64))
        self._sorting, self._group = sorting, group

    def put(self, source: torch.Tensor, copy: CopyWeight) -> None:
        """See Sink. Raises SinkError unless every group has as many input features as the config says."""
        groups, order = source.cpu().sort(stable=True)
        different = (groups != torch.arange(len(groups)) // self._group).nonzero()
        if len(different):
            raise SinkError(
                f"gives input feature {int(order[different[0]])} to group {int(groups[different[0]])}; with a group_size of "
                f"{self._group} each group from 0 to {len(groups) // self._group - 1} must have {self._group} of them."
            )
        self._sorting.take_order(order, copy)
