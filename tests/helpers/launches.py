"""What Triton compiles kernels for, noted where a test runs none of them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from pagerunner.ops import kernels
from pagerunner.ops.dispatch import Op

MULTIPROCESSORS = 132


def compiled_for(kernel: Any, args: tuple[Any, ...], how: dict[str, Any]) -> tuple[Any, ...]:
    """Equal for two launches that one compiled kernel serves: constants, of other whole numbers whether they are 1 or multiples of 16, and of
    tensors whether they begin at a multiple of 16 bytes."""
    free = kernel.kwargs.get("do_not_specialize") or ()
    anywhere = (*free, *(kernel.kwargs.get("do_not_specialize_on_alignment") or ()))
    given = dict(zip(kernel.arg_names, args, strict=False))
    fixed = {
        name: given.pop(name)
        for name, kind in kernel.fn.__annotations__.items()
        if "constexpr" in str(kind) and name in given
    }
    sorts: list[Any] = [(name, v == 1, v % 16 == 0) for name, v in given.items() if type(v) is int and name not in free]
    tensors = [(name, v) for name, v in given.items() if isinstance(v, torch.Tensor) and name not in anywhere]
    sorts += [(name, v.data_ptr() % 16 == 0) for name, v in tensors]
    constants = [(name, str(value)) for name, value in (fixed | how).items() if name not in ("grid", "warmup")]
    blocks = [str(v.block_shape) for v in args if hasattr(v, "block_shape")]
    return (kernel.fn.__name__, *sorts, *sorted(constants), *blocks)


@contextmanager
def noted_launches() -> Iterator[set[tuple[Any, ...]]]:
    """What kernels are compiled for inside, where operations take theirs as on a device and none is run. New tensors hold zeros."""
    from triton.runtime.interpreter import InterpretedFunction

    from pagerunner.ops.kernels.ahead import _Zeros

    class Zeros(_Zeros):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.mm.dtype:  # CPUs have none
                return torch.mm(args[0], args[1]).to(args[2])
            return super().__torch_dispatch__(func, types, args, kwargs)

    found: set[tuple[Any, ...]] = set()
    patches: list[Any] = [
        patch.object(
            InterpretedFunction, "run", lambda kernel, *args, **how: found.add(compiled_for(kernel, args, how))
        ),
        patch.object(Op, "__call__", lambda op, *args, **how: (op.kernel if op._module else op.twin)(*args, **how)),
    ]
    for module in pkgutil.walk_packages(kernels.__path__, kernels.__name__ + "."):
        if hasattr(importlib.import_module(module.name), "multiprocessors"):
            patches.append(patch(module.name + ".multiprocessors", lambda device: MULTIPROCESSORS))
    for each in patches:
        each.start()
    try:
        with Zeros(), torch.inference_mode():
            yield found
    finally:
        for each in reversed(patches):
            each.stop()
