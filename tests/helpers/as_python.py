"""Kernels in Gluon run as Python, as Triton's interpreter doesn't know them: on tensors of torch, one program after another."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import torch


def as_python(function: Any, **known: Any) -> Callable[..., Any]:
    """A function in Gluon as one in Python, with `known` in place of what its module knows."""
    code: FunctionType = function.fn
    return FunctionType(code.__code__, {**code.__globals__, **known}, None, None, code.__closure__)


class Pointer:
    """Places in a tensor's memory, [...]: the places' numbers, from its first element."""

    def __init__(self, tensor: torch.Tensor, places: Any = 0) -> None:
        self.tensor, self.places = tensor, torch.as_tensor(places)
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.tensor, self.places + more)

    def memory(self, count: int) -> torch.Tensor:
        return self.tensor.as_strided((count,), (1,))

    def load(self, mask: torch.Tensor, other: float) -> torch.Tensor:
        places, live = torch.broadcast_tensors(self.places, mask)
        found = torch.full(places.shape, other, dtype=self.tensor.dtype)
        if live.any():
            found[live] = self.memory(int(places[live].max()) + 1)[places[live]]
        return found

    def store(self, values: torch.Tensor, mask: torch.Tensor) -> None:
        places, live = torch.broadcast_tensors(self.places, mask)
        if live.any():
            self.memory(int(places[live].max()) + 1)[places[live]] = values[live]


def language(program: int) -> SimpleNamespace:
    """What a kernel that computes in registers names of Gluon's language, for one of its programs. Layouts are nothing."""
    nothing = lambda *_: None  # noqa: E731
    return SimpleNamespace(
        NVMMADistributedLayout=nothing, DotOperandLayout=nothing, SliceLayout=nothing, static_range=range, int64=torch.int64, float32=torch.float32,
        program_id=lambda axis: program, arange=lambda first, end, layout: torch.arange(first, end), expand_dims=torch.unsqueeze,
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype), sum=torch.sum, sqrt_rn=torch.sqrt, convert_layout=lambda x, layout: x,
        load=lambda at, mask, other: at.load(mask, other), store=lambda at, values, mask: at.store(values, mask),
    )  # fmt: skip
