"""The kernel of `kernels/vectors_gluon.py` run as Python: which keys a program reads, and what it makes of them. `tests/gpu` runs it on a card."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.as_python import as_python
from helpers.vectors_cases import Case, inputs
from pagerunner.ops.kernels import vectors_attention as kernels
from pagerunner.ops.rope import RopeAngles, rope_pairs_
from pagerunner.ops.vectors_attention import vectors_attention

DECODE, PREFILL = ((300, 1), (3, 1), (0, 1), (63, 1), (129, 1)), ((0, 70), (37, 1), (101, 33))
FULL = Case(DECODE, window=20, heads=64, size=512, dtype=torch.bfloat16)
CASES = {
    "decode, chosen": replace(FULL, top_k=40),
    "decode, all": FULL,
    "decode, window": replace(FULL, ratio=0, window=128),
    "prefill, chosen": replace(FULL, rows=PREFILL, top_k=9, padding=2),
    "prefill, heavy": replace(FULL, rows=PREFILL, ratio=32),
    "drafts": replace(FULL, rows=((0, 3), (40, 4), (18, 1)), stride=4, padding=4, top_k=5),
}


class At:
    """Addresses of elements, in bytes: pointers of several tensors may be chosen among."""

    tensors: tuple[torch.Tensor, ...] = ()

    def __init__(self, at: Any, kind: torch.dtype) -> None:
        self.at, self.kind, self.dtype = torch.as_tensor(at), kind, SimpleNamespace(element_ty=kind)

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
            if tensor.dtype == self.kind and inside.any():
                left &= ~inside
                found.append((memory, inside, (self.at[inside] - first) // self.kind.itemsize))
        assert not left.any(), "an address of no tensor"
        return found

    def load(self, mask: Any = True, other: float = float("nan")) -> torch.Tensor:
        mask = torch.as_tensor(mask).expand(self.at.shape)
        values = torch.zeros(self.at.shape, dtype=self.kind)
        values[~mask] = other if not mask.all() else 0
        for memory, inside, places in self._found(mask):
            values[inside] = memory[places]
        return values

    def store(self, values: torch.Tensor) -> None:
        for memory, inside, places in self._found(torch.ones(self.at.shape, dtype=torch.bool)):
            memory[places] = values[inside]


class Shared(torch.Tensor):
    """A buffer in shared memory: NaN until something has come."""

    def index(self, at: int) -> Shared:
        return self[at]

    def store(self, values: torch.Tensor) -> None:
        self.copy_(values)


class Copies:
    """Copies that have ended only when they are waited for."""

    def __init__(self) -> None:
        self.groups: list[list[tuple[Shared, torch.Tensor]]] = [[]]

    def async_copy_global_to_shared(self, smem: Shared, at: At) -> None:
        smem.fill_(float("nan"))
        self.groups[-1].append((smem, at.load()))

    def commit_group(self) -> None:
        self.groups.append([])

    def wait_group(self, left: int) -> None:
        while len(self.groups) > left + 1:
            for smem, values in self.groups.pop(0):
                smem.copy_(values)


def multiply(a, b, acc, use_acc=True, is_async=False):
    found = a.as_subclass(torch.Tensor).float() @ b.as_subclass(torch.Tensor).float()
    return acc + found if use_acc else found


def where(mask, one, other):
    if isinstance(one, At):
        return At(torch.where(mask, one.at, other.at), one.kind)
    return torch.where(mask, one, other)


def turned(x, cos, sin, D, P):
    own = [part.load().float().expand(len(x), 1, P) for part in (cos + torch.arange(P), sin + torch.arange(P))]
    rope_pairs_(x[:, None, -P:], RopeAngles(own[0].contiguous(), -own[1].contiguous()))
    return x


def language(programs: list[int]) -> SimpleNamespace:
    held = lambda dtype, shape, layout: torch.full(shape, float("nan"), dtype=dtype).as_subclass(Shared)  # noqa: E731
    number = torch.as_tensor
    return SimpleNamespace(
        program_id=lambda axis: torch.tensor(programs[axis]), arange=lambda first, end, layout: torch.arange(first, end),
        load=lambda at, mask=True, other=float("nan"): at.load(mask, other), store=lambda at, values: at.store(values), where=where,
        maximum=lambda a, b: torch.maximum(number(a), number(b)), minimum=lambda a, b: torch.minimum(number(a), number(b)),
        cdiv=lambda a, b: (a + b - 1) // b, full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype), exp2=torch.exp2, log2=torch.log2, sum=torch.sum,
        max=lambda x, axis: x.amax(axis), convert_layout=lambda x, layout: x, multiple_of=lambda x, n: x, SliceLayout=lambda *_: None,
        allocate_shared_memory=held, thread_barrier=lambda: None, float32=torch.float32, int32=torch.int32, int64=torch.int64,
    )  # fmt: skip


class Launched:
    """The kernel's launches, run as Python."""

    programs = 0

    def __getitem__(self, grid):
        from pagerunner.ops.kernels import vectors_gluon as kernel

        def launch(*arguments, num_warps, **constants):
            At.tensors = tuple(value for value in arguments if isinstance(value, torch.Tensor))
            given = [At(v.data_ptr(), v.dtype) if isinstance(v, torch.Tensor) else v for v in arguments]
            for program in range(grid[0]):
                for block in range(grid[1]):
                    known = {
                        "gl": language([program, block]),
                        "async_copy": Copies(),
                        "LOG2_E": 1 / math.log(2),
                        "LOWEST": -1e30,
                    }
                    known |= {
                        "warpgroup_mma": multiply,
                        "warpgroup_mma_wait": lambda left, deps: deps[0],
                        "_back": turned,
                    }
                    known |= dict.fromkeys(("fence_async_shared", "start_next_and_wait"), lambda *_: None)
                    for name in ("_span", "_number", "_entry", "_place", "_copy", "_finish", "_leave", "_take"):
                        known[name] = as_python(getattr(kernel, name), **known)
                    as_python(kernel.vectors_kernel, **known)(*given, **constants)
                    self.programs += 1

        return launch


@pytest.mark.days(4)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_the_twins_results(monkeypatch: pytest.MonkeyPatch, name: str, parts: int) -> None:
    torch.manual_seed(3)
    (q, window, *others), _ = inputs(CASES[name])
    arguments = (q, window._replace(pages_EXD=window.pages_EXD.contiguous()), *others)
    launched = Launched()
    monkeypatch.setattr(kernels, "_gluon", lambda: SimpleNamespace(vectors_kernel=launched))
    monkeypatch.setattr(kernels, "has_gluon", lambda device: True)
    monkeypatch.setattr(kernels, "_parts", lambda *_: parts)
    want, got = vectors_attention.twin(*arguments), kernels.vectors_attention(*arguments)
    assert launched.programs == arguments[0].shape[0] * parts
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_what_does_not_fit_goes_by_the_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that begin 8 bytes into a line, heads or elements of other numbers, float32, and slots in fp8."""
    monkeypatch.setattr(kernels, "has_gluon", lambda device: True)
    (q, window, slots, *_), _ = inputs(FULL)
    assert not kernels.by_gluon(q, window, slots)
    window = window._replace(pages_EXD=window.pages_EXD.contiguous())
    assert kernels.by_gluon(q, window, slots) and kernels.by_gluon(q, window, None)
    for change in ({"heads": 48}, {"size": 256}, {"dtype": torch.float32}, {"block": 56}):
        (q, window, slots, *_), _ = inputs(replace(FULL, **change))
        assert not kernels.by_gluon(q, window._replace(pages_EXD=window.pages_EXD.contiguous()), slots), change
