"""Kernels in Gluon with tiles in shared memory run as Python: on tensors of torch, one program after another.

What comes by copies is NaN until it has been waited for, and so is shared memory that nobody has written. Layouts are nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from threading import Event
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch


class At:
    """Addresses of elements, in bytes: pointers of several tensors may be chosen among."""

    tensors: tuple[torch.Tensor, ...] = ()

    def __init__(self, at: Any, kind: torch.dtype) -> None:
        self.at, self.kind, self.dtype = torch.as_tensor(at), kind, SimpleNamespace(element_ty=kind)

    def to(self, kind: torch.dtype, bitcast: bool) -> At:
        return At(self.at, kind)

    def __add__(self, more: Any) -> At:
        return At(self.at + torch.as_tensor(more).long() * self.kind.itemsize, self.kind)

    def __getitem__(self, index: Any) -> At:
        return At(self.at[index], self.kind)

    def _found(self, mask: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Of each tensor its memory, which places are its, and their numbers."""
        left, found = mask.clone(), []
        for tensor in self.tensors:
            first, memory = tensor.untyped_storage().data_ptr(), torch.empty(0, dtype=tensor.dtype)
            memory.set_(tensor.untyped_storage())
            inside = left & (self.at >= first) & (self.at < first + memory.nbytes)
            words = tensor.dtype in (torch.uint8, torch.bfloat16) and self.kind in (torch.int32, torch.int64)
            words = words or (tensor.dtype == torch.uint8 and self.kind.itemsize == 1)
            if (tensor.dtype == self.kind or words) and inside.any():
                left &= ~inside
                memory = memory[: memory.nbytes // 8 * 8 // memory.itemsize].view(self.kind) if words else memory
                found.append((memory, inside, (self.at[inside] - first) // self.kind.itemsize))
        assert not left.any(), "an address of no tensor"
        return found

    def load(self, mask: Any = True, other: float = float("nan")) -> torch.Tensor:
        mask = torch.as_tensor(mask).expand(self.at.shape)
        values = (
            torch.full(self.at.shape, other, dtype=self.kind)
            if not mask.all()
            else torch.zeros(self.at.shape, dtype=self.kind)
        )
        for memory, inside, places in self._found(mask):
            raw = torch.uint8 if self.kind.itemsize == 1 else self.kind  # torch takes no elements of fp8
            values.view(raw)[inside] = memory.view(raw)[places]
        return values

    def store(self, values: torch.Tensor, mask: Any = True) -> None:
        mask = torch.as_tensor(mask).expand(self.at.shape)
        values = torch.as_tensor(values).expand(self.at.shape)
        for memory, inside, places in self._found(mask):
            memory[places] = values[inside].to(memory.dtype)


class Shared(torch.Tensor):
    """A buffer in shared memory."""

    def index(self, at: int) -> Shared:
        return self[at]

    def slice(self, first: int, count: int, dim: int = 0) -> Shared:
        return self.narrow(dim, first, count)

    def load(self, layout: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        """Panels of a tile's columns; or words of two elements."""
        if len(shape) == self.dim():
            return self.as_subclass(torch.Tensor).view(dtype).as_subclass(Shared)
        return self.unflatten(1, (shape[0], shape[2])).transpose(0, 1)

    def store(self, values: torch.Tensor) -> None:
        self.copy_(values)


class Copies:
    """Copies that have ended only when they are waited for."""

    def __init__(self) -> None:
        self.groups: list[list[tuple[Shared, torch.Tensor]]] = [[]]

    def async_copy_global_to_shared(self, smem: Shared, at: At, mask: Any = True) -> None:
        """Masked elements are zeros."""
        smem.fill_(float("nan") if smem.dtype.is_floating_point else 0x7F)
        self.groups[-1].append((smem, at.load(mask, 0)))

    def commit_group(self) -> None:
        self.groups.append([])

    def mbarrier_arrive(self, barrier: Any, increment_count: bool) -> None:
        """Each thread of a group arrives when what it has asked for has come."""
        self.commit_group()
        self.wait_group(0)
        barrier.arrive(threads=barrier.count)

    def wait_group(self, left: int) -> None:
        while len(self.groups) > left + 1:
            for smem, values in self.groups.pop(0):
                smem.copy_(values)


def room(dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
    return torch.full(shape, float("nan") if dtype.is_floating_point else 0x7F, dtype=dtype).as_subclass(Shared)


def multiply(a, b, acc, use_acc=True, is_async=False):
    found = a.as_subclass(torch.Tensor).float() @ b.as_subclass(torch.Tensor).float()
    return acc + found if use_acc else found


def add(at, more, **_):
    """Programs run one after another, or as threads that wait for each other."""
    before = at.load()
    at.store(before + more)
    return before


def where(mask, one, other):
    if isinstance(one, At):
        return At(torch.where(mask, one.at, other.at), one.kind)
    return torch.where(torch.as_tensor(mask), one, other)


def numbers_of_e4m3(words, constraints, arguments, dtype, is_pure, pack):
    """The only PTX of these kernels."""
    return arguments[0].view(torch.float8_e4m3fn).to(dtype)


def in_order(score, live):
    bits = score.contiguous().view(torch.int32)
    key = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return torch.where(live, key, -(2**31)), *(key[live].aminmax() if live.any() else (torch.tensor(0),) * 2)


def thirds(low, high):
    third = (high - low) // 3 + 1
    return low + third, low + torch.minimum(2 * third, high - low)


class Numbers:
    """Those that a program has chosen, in its shared memory."""

    def __init__(self) -> None:
        self.numbers = torch.full((4096,), -1)

    def note(self, chosen: At, place: torch.Tensor, number: torch.Tensor, there: torch.Tensor) -> None:
        (chosen + place).store(number, there)
        self.numbers[place[there]] = number[there]

    def known(self) -> dict[str, Any]:
        """What a choice does without PTX, by its names."""
        read = {"_note": self.note, "just_chosen": lambda place, there: self.numbers[place].where(there, -1)}
        sums = {"_own": lambda: 0, "_total": lambda x, room: x.sum(), "in_order": in_order, "thirds": thirds}
        return read | sums


class Cluster:
    """Programs of a cluster, run as threads: one goes on until it waits for the others, and then the next one begins."""

    def __init__(self, count: int) -> None:
        self.count, self.given = count, [Queue() for _ in range(count)]
        self.comes = [Event() for _ in range(count)]

    def swap(self, rank: int, *values: Any) -> Any:
        """What the other one of two gives here."""
        self.given[1 - rank].put(values)
        self.comes[rank].set()
        return self.given[rank].get(timeout=60)

    def run(self, program: Callable[[int], None]) -> None:
        with ThreadPoolExecutor(self.count) as pool:
            ends = []
            for rank in range(self.count):
                ends.append(pool.submit(program, rank))
                ends[rank].add_done_callback(lambda _, comes=self.comes[rank]: comes.set())
                self.comes[rank].wait()
            for end in ends:
                end.result()


def language(programs: list[int], grid: tuple[int, ...] = (), cluster: int = 1) -> SimpleNamespace:
    number, nothing = torch.as_tensor, lambda *_: None
    return SimpleNamespace(
        num_warps=lambda: 8, num_ctas=lambda: cluster, num_programs=lambda axis: torch.tensor(grid[axis]), zeros_like=torch.zeros_like, DotOperandLayout=nothing, split=lambda x: (x[..., 0], x[..., 1]),
        program_id=lambda axis: torch.tensor(programs[axis]), arange=lambda first, end, layout: torch.arange(first, end), static_range=range,
        load=lambda at, mask=True, other=float("nan"): at.load(mask, other), store=lambda at, values, mask=True: at.store(values, mask), where=where,
        maximum=lambda a, b: torch.maximum(number(a), number(b)), minimum=lambda a, b: torch.minimum(number(a), number(b)),
        cdiv=lambda a, b: (a + b - 1) // b, full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype), exp2=torch.exp2, log2=torch.log2, sum=torch.sum,
        max=lambda x, axis: x.amax(axis), convert_layout=lambda x, layout, **_: x, multiple_of=lambda x, n: x, reshape=torch.reshape,
        expand_dims=torch.unsqueeze, join=lambda *parts: torch.stack(parts, -1), permute=torch.permute, SliceLayout=nothing, SwizzledSharedLayout=nothing, NVMMADistributedLayout=nothing, NVMMASharedLayout=nothing, abs=torch.abs, BlockedLayout=nothing,
        allocate_shared_memory=room, thread_barrier=nothing, inline_asm_elementwise=numbers_of_e4m3, associative_scan=lambda x, axis, add: x.cumsum(axis), float32=torch.float32, int32=torch.int32,
        int64=torch.int64, uint8=torch.uint8, bfloat16=torch.bfloat16, float16=torch.float16, int16=torch.int16, pointer_type=lambda kind: kind, atomic_add=add, DistributedLinearLayout=nothing,
    )  # fmt: skip


NOTHING = ("fence_async_shared", "start_next_and_wait", "start_next", "wait_turn")


class Launched:
    """A kernel's launches, run as Python. `known`: what its module knows by these names."""

    def __init__(self, module: ModuleType, name: str, **known: Any) -> None:
        self.module, self.name, self.known, self.programs = module, name, known, 0

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, num_ctas=1, maxnreg=None, **constants):
            At.tensors = tuple(value for value in arguments if isinstance(value, torch.Tensor))
            given = [At(v.data_ptr(), v.dtype) if isinstance(v, torch.Tensor) else v for v in arguments]
            for programs in itertools.product(*map(range, grid)):
                both = Cluster(num_ctas)
                both.run(lambda rank: self._program(list(programs), grid, both, rank)(*given, **constants))  # noqa: B023
                self.programs += num_ctas

        return launch

    def _program(self, programs: list[int], grid: tuple[int, ...], cluster: Cluster, rank: int) -> Any:
        known = {
            "gl": language(programs, grid, cluster.count),
            "_rank": lambda: rank,
            "_swap": lambda *given: cluster.swap(*given[:4]),
            "async_copy": Copies(),
            "warpgroup_mma": multiply,
        }
        known |= {"_store": lambda at, values, mask: at.store(values, mask)} | Numbers().known()
        known |= {"tl": known["gl"]}  # of functions in Triton
        known |= {"warpgroup_mma_wait": lambda left, deps: deps[0], "warpgroup_mma_init": lambda acc: acc}
        known |= dict.fromkeys(NOTHING, lambda *_: None) | self.known
        return self._names(vars(self.module), known, {})[self.name]

    def _names(self, names: dict[str, Any], known: dict[str, Any], done: dict[int, dict[str, Any]]) -> dict[str, Any]:
        """A module's names, functions in Gluon as functions in Python. Those of other modules know these modules' names."""
        if id(names) in done:
            return done[id(names)]
        found = done[id(names)] = {name: getattr(value, "value", value) for name, value in names.items()} | known
        for name, value in names.items():
            if name not in known and hasattr(value, "arg_names"):
                found[name] = FunctionType(value.fn.__code__, self._names(value.fn.__globals__, known, done), name)
        return found
