"""Kernels in Gluon whose groups of warps do different things, run as Python: each group of each program is a thread. See `helpers.gluon_programs`.

A barrier counts as the device's do: a phase ends when all have arrived and all bytes have come. A wait for what never comes is an error after some seconds.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch

from helpers.gluon_programs import NOTHING, At, Copies, Shared, language, multiply, room

PATIENCE = 60.0
BARRIERS = object()


class Barrier:
    """What groups meet at."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.left = self.bytes = self.phase = 0

    def init(self, count: int) -> None:
        self.count = self.left = count

    def arrive(self, more: int = 0, threads: int = 1) -> None:
        with self.changed:
            assert self.left >= threads, "more arrivals than the barrier counts"
            self.left -= threads
            self.bytes += more
            self._end()

    def came(self, number: int) -> None:
        with self.changed:
            self.bytes -= number
            self._end()

    def _end(self) -> None:
        if not self.left and not self.bytes:
            self.phase, self.left = self.phase + 1, self.count
            self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase & 1 != int(parity), PATIENCE), "nobody ends this phase"


class Barriers(list[Barrier]):
    """Several of them in shared memory."""

    index = list[Barrier].__getitem__


class Panels:
    """Panels of 64 columns in shared memory, as tiles of `shape` of several panels each."""

    def __init__(self, panels: torch.Tensor, shape: list[int]) -> None:
        self.panels, self.shape, self.dtype = panels, shape, panels.dtype

    def index(self, at: int) -> Panels:
        count = self.shape[-1] // 64
        own = self.panels[int(at) * count : int(at) * count + count]
        return Panels(own, self.shape[1:])

    def load(self, layout: Any) -> torch.Tensor:
        return self.dense().as_subclass(Codes)

    def store(self, values: torch.Tensor) -> None:
        for panel, own in zip(self.panels.as_subclass(torch.Tensor), values.split(64, 1), strict=True):
            panel.view(self.shape[0], 64).copy_(own.as_subclass(torch.Tensor))

    def copy_(self, values: torch.Tensor) -> None:
        self.store(values)

    def fill_(self, value: float) -> None:
        self.panels.fill_(value)

    def permute(self, dims: tuple[int, int]) -> torch.Tensor:
        return self.dense().permute(dims)

    def dense(self) -> torch.Tensor:
        return torch.cat([one.reshape(self.shape[0], 64) for one in self.panels.as_subclass(torch.Tensor)], 1)


class Codes(torch.Tensor):
    """Bytes that may stand for numbers of 8 bits."""

    def to(self, kind: Any, bitcast: bool = False) -> torch.Tensor:
        if not bitcast:
            return super().to(kind)
        return self.as_subclass(torch.Tensor).view(
            {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}[str(kind)]
        )


class Room(Shared):
    """A buffer in shared memory whose panels may be taken together."""

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Panels | Room:
        if len(shape) == self.dim() == 2:  # a tile by words of several elements
            return self.as_subclass(torch.Tensor).view(dtype).as_subclass(Room)
        return Panels(self.reshape(-1, shape[-2], 64), shape)


class Described:
    """A tensor and a block of it, for the copy engine."""

    def __init__(self, tensor: torch.Tensor, shape: list[int], strides: list[int], block: list[int]) -> None:
        self.tensor, self.shape, self.strides, self.block = tensor, shape, strides, block
        self.dtype, self.layout = tensor.dtype, None

    def _own(self, corner: list[Any]) -> tuple[torch.Tensor, tuple[slice, ...]]:
        """What there is of a block, and where in the block."""
        ends = [max(0, min(b, s - int(c))) for b, s, c in zip(self.block, self.shape, corner, strict=True)]
        whole = self.tensor.as_strided(self.shape, self.strides)
        own = tuple(slice(int(c), int(c) + end) for c, end in zip(corner, ends, strict=True))
        return whole[own], tuple(slice(0, end) for end in ends)

    def read(self, corner: list[Any]) -> torch.Tensor:
        found = torch.zeros(self.block, dtype=self.tensor.dtype)
        own, inside = self._own(corner)
        found[inside] = own
        return found

    def write(self, corner: list[Any], smem: torch.Tensor) -> None:
        own, inside = self._own(corner)
        own.copy_(smem.as_subclass(torch.Tensor)[inside])


def copied(desc: Described, corner: list[Any], barrier: Barrier, smem: torch.Tensor) -> None:
    found = desc.read(corner)
    smem.copy_(found)
    one(barrier).came(found.nbytes)


def whole(operand: Any) -> torch.Tensor:
    return operand.dense() if isinstance(operand, Panels) else operand


class Groups:
    """A kernel's launches. `known`: what its module knows by these names."""

    def __init__(self, module: ModuleType, name: str, **known: Any) -> None:
        self.known, self.programs, self.adding = known, 0, threading.Lock()
        self.names: dict[
            str, Any
        ] = {}  # its functions' own too, and as they are now: the module may name this object from now on
        for value in (*vars(module).values(), vars(module)):
            self.names |= (
                value
                if isinstance(value, dict) and value is vars(module)
                else getattr(getattr(value, "fn", None), "__globals__", {})
            )
        self.kernel = name

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            constants.pop("num_warps")
            At.tensors = tuple(value for value in arguments if isinstance(value, torch.Tensor))
            given = [At(v.data_ptr(), v.dtype) if isinstance(v, torch.Tensor) else v for v in arguments]
            places = list(itertools.product(*map(range, grid)))
            programs = [self._program(list(place), len(places)) for place in places]
            together([partial(program, *given, **constants) for program in programs])
            self.programs += len(places)

        return launch

    def _add(self, at: At, more: int, sem: str = "acq_rel") -> torch.Tensor:
        with self.adding:
            before = at.load()
            at.store(before + more)
        return before

    def _program(self, place: list[int], programs: int) -> Any:
        gl = language(place)
        gl.__dict__.update(
            num_programs=lambda axis: programs, to_tensor=torch.tensor, warp_specialize=specialized,
            allocate_shared_memory=lambda dtype, shape, layout: Barriers(Barrier() for _ in range(shape[0])) if layout is BARRIERS
            else room(dtype, shape, layout).as_subclass(Room), where=chosen, max=lambda x, axis: x.amax(axis),
            inline_asm_elementwise=lambda words, constraints, arguments, **_: arguments[0], DotOperandLayout=lambda *_: None,
            BlockedLayout=lambda *_: None, atomic_add=self._add,
        )  # fmt: skip
        mbarrier = SimpleNamespace(
            MBarrierLayout=lambda: BARRIERS, init=lambda b, count: one(b).init(count), expect=lambda b, number: one(b).arrive(number),
            arrive=lambda b, pred=True: one(b).arrive() if pred else None, wait=lambda b, parity, pred=True: one(b).wait(parity) if pred else None,
        )  # fmt: skip
        known: dict[str, Any] = {name: getattr(value, "value", value) for name, value in self.names.items()}
        tma = SimpleNamespace(
            async_copy_global_to_shared=copied,
            async_copy_shared_to_global=Described.write,
            store_wait=lambda left: None,
        )
        known |= {"gl": gl, "mbarrier": mbarrier, "tma": tma, "async_copy": Copies()}
        known |= {"warpgroup_mma": lambda a, b, acc, **how: multiply(whole(a), whole(b), acc, **how)}
        known |= {"warpgroup_mma_wait": lambda left, deps: deps[0] if len(deps) == 1 else deps}
        known |= dict.fromkeys(NOTHING, lambda *_: None) | self.known
        for name, value in self.names.items():
            if name not in self.known and name not in NOTHING and hasattr(value, "arg_names"):
                known[name] = FunctionType(value.fn.__code__, known, name)
        return known[self.kernel]


def one(barrier: Barrier | Barriers) -> Barrier:
    return barrier[0] if isinstance(barrier, Barriers) else barrier


def chosen(mask: Any, one: Any, other: Any) -> torch.Tensor:
    return torch.where(*(torch.as_tensor(x) for x in (mask, one, other)))


def specialized(groups: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
    together([partial(function, *arguments) for function, arguments in groups])


def together(functions: list[Callable[[], None]]) -> None:
    """Run functions in threads. The first error is raised."""
    errors: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:  # raised again below, in the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a group waits for ever"
