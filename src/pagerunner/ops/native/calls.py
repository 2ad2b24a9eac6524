"""Calls of the CPU kernels. A call is a command: a kind and a C structure of addresses and sizes. It runs at once, or it is recorded.

What a recording holds runs again in one go, on the same tensors. So a step of many small kernels costs one call, and its threads are
woken once.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pagerunner.ops.native.library import Library, loaded

PRODUCT, PREPARE, ATTENTION, ROWS, ANGLES, NORM, STEP, GREEDY = range(8)  # as in native/kernels.c
_HEADER = struct.Struct("2q")
_ALIGNED = 64  # bytes
_own = threading.local()


class CannotRecordError(RuntimeError):
    """What was to be recorded does more than call CPU kernels, or needs more memory than there is for it."""


def kernels() -> Library:
    """The kernels, where something was stored or chosen for them."""
    found = loaded()
    assert found is not None, "only machines with CPU kernels come here"
    return found


def address(name: str, x: torch.Tensor, dtype: torch.dtype, dense: int) -> int:
    """Where a tensor of `dtype` lies, whose last `dense` dimensions have no gaps. Raises TypeError for other tensors."""
    if x.dtype != dtype or not (x.is_contiguous() or _is_dense(x, dense)) or x.is_cuda:
        raise TypeError(
            f"a CPU kernel reads {name} as {dtype} on a CPU, with the last {dense} dimensions one behind another; it is {x.dtype} on "
            f"{x.device} of shape {list(x.shape)} with strides {list(x.stride())}"
        )
    return x.data_ptr()


def sized(name: str, x: torch.Tensor, *shape: int | None) -> None:
    """Raise ValueError unless the tensor has this shape; None: any size."""
    if x.shape == shape:  # nearly always, and several times as fast
        return
    if x.dim() != len(shape) or any(want not in (None, have) for want, have in zip(shape, x.shape, strict=True)):
        wanted = ["any" if size is None else size for size in shape]
        raise ValueError(f"a CPU kernel takes {name} of shape {wanted}; it is {x.dtype} of shape {list(x.shape)}")


def _is_dense(x: torch.Tensor, dense: int) -> bool:
    step = 1
    for place in range(x.dim() - 1, x.dim() - 1 - dense, -1):
        if x.shape[place] != 1 and x.stride(place) != step:
            return False
        step *= x.shape[place]
    return True


def empty(*shape: int) -> torch.Tensor:
    """A float32 tensor for what a command makes."""
    recording: Recording | None = getattr(_own, "recording", None)
    return torch.empty(shape, dtype=torch.float32) if recording is None else recording.empty(shape)


def call(kind: int, packed: bytes, tensors: Iterable[torch.Tensor | None]) -> None:
    """Run a command, or record it. `tensors` are those whose addresses it holds.

    Raises:
        IndexError: it looks up a row that its matrix doesn't have.
        RuntimeError: there is no memory to work in. Nothing has been computed then.
    """
    recording: Recording | None = getattr(_own, "recording", None)
    if recording is not None:
        recording.add(kind, packed, tensors)
        return
    waiting: bytearray | None = getattr(_own, "waiting", None)
    command = _HEADER.pack(kind, len(packed)) + packed
    if waiting is None:
        _run(command)
    else:
        waiting += command


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Run the commands of the block in one call, at its end; at the outer one's end if blocks are nested.

    Until then nothing but further commands may read what they make, and all tensors must live.
    """
    if getattr(_own, "waiting", None) is not None:
        yield
        return
    waiting = bytearray()
    _own.waiting = waiting
    try:
        yield
    finally:
        _own.waiting = None
    if waiting:
        _run(bytes(waiting))


def memory_of(kind: int, packed: bytes) -> int:
    """Bytes that a command works in, on as many threads as torch takes. It may hold any addresses."""
    command = _HEADER.pack(kind, len(packed)) + packed
    return 4 * kernels().scratch(command, len(command), torch.get_num_threads())


def _run(commands: bytes) -> None:
    library = kernels()
    threads = library.threads(commands, len(commands), torch.get_num_threads())
    floats = library.scratch(commands, len(commands), threads)
    memory = torch.empty(floats, dtype=torch.float32)
    _refuse(library.run(commands, len(commands), memory.data_ptr(), threads))


def _refuse(failed: int) -> None:
    if failed:
        raise IndexError(f"a token id is outside the vocabulary (command {failed})")


class Recording:
    """Commands with the tensors between them, which lie in `memory` (uint8, at an address that is a multiple of 64).

    `memory` may serve any number of recordings, which then run one at a time. What commands read and don't make themselves stays where
    it was: `is_valid` says whether it did.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._taken = 0
        self._commands = bytearray()
        self._given: dict[int, torch.Tensor] = {}  # a tensor of each storage, by its address at the time

    def empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Room for float32 numbers that nothing else in this recording takes."""
        count = 1
        for size in shape:
            count *= size
        first, last = self._taken, self._taken + 4 * count
        if last > self._memory.numel():
            raise CannotRecordError(f"its tensors take more than {self._memory.numel()} bytes")
        self._taken = -(-last // _ALIGNED) * _ALIGNED
        return self._memory[first:last].view(torch.float32).view(shape)

    def add(self, kind: int, packed: bytes, tensors: Iterable[torch.Tensor | None]) -> None:
        """Another command."""
        self._commands += _HEADER.pack(kind, len(packed)) + packed
        for tensor in tensors:
            if tensor is not None:
                self._given.setdefault(tensor.untyped_storage().data_ptr(), tensor)

    @property
    def is_valid(self) -> bool:
        """Whether all tensors are where they were."""
        return all(tensor.untyped_storage().data_ptr() == place for place, tensor in self._given.items())

    def finish(self, most: int) -> Callable[[], None]:
        """What runs the commands again, on `most` threads or fewer. It raises as `call` does."""
        library, commands, size = kernels(), bytes(self._commands), len(self._commands)
        place = self.empty((library.scratch(commands, size, most),)).data_ptr()

        def run() -> None:
            _refuse(library.run(commands, size, place, library.threads(commands, size, most)))

        return run


@contextlib.contextmanager
def recording(memory: torch.Tensor) -> Iterator[Recording]:
    """Record what this thread calls in the block instead of running it.

    Raises CannotRecordError in the block when torch is asked to compute something.
    """
    made = Recording(memory)
    with _ViewsAlone():
        _own.recording = made
        try:
            yield made
        finally:
            _own.recording = None


class _ViewsAlone(TorchDispatchMode):
    """torch may make views of tensors, and nothing else."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        if func._schema.is_mutable or not returns or any(one.alias_info is None for one in returns):
            raise CannotRecordError(f"{func} is not a CPU kernel")
        made = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        if any(x.numel() and x.untyped_storage().data_ptr() not in given for x in tree_leaves(made)):
            raise CannotRecordError(f"{func} copies")
        return made
