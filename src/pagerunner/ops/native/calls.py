"""Calls of the CPU kernels. A call is a command: a kind and a C structure of addresses and sizes.

A command runs at once; or it is put off, to run with others in one call (`Commands`); or it is recorded (`Recording`). What a recording
holds runs again in one go, on the same tensors. So a step of many small kernels costs one call, and its threads are woken once.
"""

from __future__ import annotations

import contextvars
import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode
from torch.utils._pytree import tree_leaves

from pagerunner.ops.native.library import Library, loaded

PRODUCT, PREPARE, ATTENTION, ROWS, ANGLES, NORM, STEP, GREEDY, ROTATE, MAP, LOGITS, ROUTE, EXPERTS = range(13)
HEAD_PRODUCT, LATENT_HEADS, TEMPER, CONVOLUTION, DELTA, MAMBA, GATE, COPY = range(13, 21)
"""Kinds of commands, as in native/kernels.c."""
_HEADER = struct.Struct("2q")
_ALIGNED = 64  # bytes
_FAULTS = {
    ROWS: "a token id is outside the vocabulary",
    STEP: "a step's rows name a slot, a position or a page table entry that isn't there",
    EXPERTS: "a token is sent to an expert that isn't there",
}
_recording: contextvars.ContextVar[Recording | None] = contextvars.ContextVar("recording", default=None)
Result = TypeVar("Result")


class CannotRecordError(RuntimeError):
    """What was to be recorded does more than call CPU kernels."""


class RecordingTooLargeError(CannotRecordError):
    """What was to be recorded needs more memory than there is for it."""


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


class Operand(NamedTuple):
    """A tensor that a command reads or fills, and where it lies; nowhere (0) if there is none."""

    place: int
    tensor: torch.Tensor | None


def operand(
    name: str, x: torch.Tensor | None, *shape: int | None, dense: int = 1, dtype: torch.dtype = torch.float32
) -> Operand:
    """A tensor of `dtype`, whose last `dense` dimensions have no gaps; of the shape, if one is given.

    Raises TypeError or ValueError for other tensors: see `address` and `sized`.
    """
    if x is None:
        return Operand(0, None)
    if shape:
        sized(name, x, *shape)
    return Operand(address(name, x, dtype, dense), x)


def made(x: torch.Tensor) -> Operand:
    """A tensor of `empty`, which a command fills."""
    return Operand(x.data_ptr(), x)


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
    recording = _recording.get()
    return torch.empty(shape, dtype=torch.float32) if recording is None else recording.empty(shape)


def empty_numbers(*shape: int) -> torch.Tensor:
    """An int64 tensor for what a command makes."""
    recording = _recording.get()
    if recording is None:
        return torch.empty(shape, dtype=torch.int64)
    return recording.empty((*shape[:-1], 2 * shape[-1])).view(torch.int64)


class Commands:
    """Commands that run in one call. Until then nothing but further commands may read what they make."""

    def __init__(self) -> None:
        self._packed = bytearray()
        self._tensors: list[torch.Tensor | None] = []  # they must live until the commands have run

    def add(self, command: bytes, tensors: Iterable[torch.Tensor | None]) -> None:
        """Another command, with the tensors whose addresses it holds."""
        self._packed += command
        self._tensors += tensors

    def run(self) -> None:
        """Run them in their order. Raises what `call` raises."""
        if self._packed:
            _run_or_record(bytes(self._packed), self._tensors)


def call(
    kind: int, form: struct.Struct, operands: Iterable[Operand | int], *sizes: float, commands: Commands | None = None
) -> None:
    """Run a command, or record it, or put it off: add it to `commands`. A C structure of this form holds operands' places, then sizes.

    Among operands may be sizes, where the structure has them there.

    Raises:
        IndexError: it looks up a row that its matrix doesn't have, or a slot or page table entry that isn't there.
        RuntimeError: there is no memory to work in. Nothing has been computed then.
    """
    operands = tuple(operands)
    places = (one.place if isinstance(one, Operand) else one for one in operands)
    command = _HEADER.pack(kind, form.size) + form.pack(*places, *sizes)
    tensors = [one.tensor for one in operands if isinstance(one, Operand)]
    if commands is None:
        _run_or_record(command, tensors)
    else:
        commands.add(command, tensors)


def _run_or_record(commands: bytes, tensors: Iterable[torch.Tensor | None]) -> None:
    recording = _recording.get()
    if recording is None:
        _run(commands)
    else:
        recording.add(commands, tensors)


def memory_of(kind: int, packed: bytes) -> int:
    """Bytes that a command works in, on as many threads as torch takes. It may hold any addresses."""
    command = _HEADER.pack(kind, len(packed)) + packed
    return 4 * kernels().scratch(command, len(command), torch.get_num_threads())


def _run(commands: bytes) -> None:
    library = kernels()
    threads = library.threads(commands, len(commands), torch.get_num_threads())
    floats = library.scratch(commands, len(commands), threads)
    memory = torch.empty(floats, dtype=torch.float32)
    _refuse(commands, library.run(commands, len(commands), memory.data_ptr(), threads))


def _refuse(commands: bytes, failed: int) -> None:
    """Raise for the command of this number, from 1 on; 0: all were done."""
    place = 0
    for number in range(1, failed + 1):
        kind, size = _HEADER.unpack_from(commands, place)
        if number == failed:
            raise IndexError(f"{_FAULTS[kind]} (command {number})")
        place += _HEADER.size + size


class Recording:
    """Commands with the tensors between them, which lie in `memory` (uint8, at an address that is a multiple of 64).

    `memory` may serve any number of recordings, which then run one at a time. What commands read and don't make themselves stays where
    it was: `is_valid` says whether it did. It looks at the tensors that were given: of a module that has other tensors since, it knows nothing.
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
            raise RecordingTooLargeError(f"its tensors take more than {self._memory.numel()} bytes")
        self._taken = -(-last // _ALIGNED) * _ALIGNED
        return self._memory[first:last].view(torch.float32).view(shape)

    def add(self, commands: bytes, tensors: Iterable[torch.Tensor | None]) -> None:
        """Further commands, with the tensors whose addresses they hold."""
        self._commands += commands
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
            _refuse(commands, library.run(commands, size, place, library.threads(commands, size, most)))

        return run


def record(memory: torch.Tensor, work: Callable[[], Result]) -> tuple[Recording, Result]:
    """Record what `work` calls instead of running it. Also returns what `work` returns.

    Wherever an interrupt comes, the thread doesn't record afterwards: a context ends with the call that runs in it.

    Raises CannotRecordError when torch is asked to compute something, and RecordingTooLargeError where the memory ends.
    """
    made = Recording(memory)

    def run() -> Result:
        _recording.set(made)
        try:
            with _ViewsAlone():
                return work()
        finally:
            # an interrupt came while torch entered or left it
            while isinstance(_get_current_dispatch_mode(), _ViewsAlone):
                _pop_mode()

    return made, contextvars.copy_context().run(run)


class _ViewsAlone(TorchDispatchMode):
    """torch may make views of tensors, and nothing else, while commands are recorded."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # else torch imports its compiler at the first call, which takes two seconds
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if _recording.get() is None:  # two interrupts on each other's heels have left this mode behind
            return func(*args, **(kwargs or {}))
        returns = func._schema.returns
        if func._schema.is_mutable or not returns or any(one.alias_info is None for one in returns):
            raise CannotRecordError(f"{func} is not a CPU kernel")
        made = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        if any(x.numel() and x.untyped_storage().data_ptr() not in given for x in tree_leaves(made)):
            raise CannotRecordError(f"{func} copies")
        return made
