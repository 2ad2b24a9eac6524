"""Every operation has a twin in plain torch, which is its definition, and may have a Triton kernel of the same signature.

A few have a version by the CPU kernels (`ops/native/`) too, see `Op.on_cpu`.

Kernels are in `ops/kernels/`, which imports Triton. That package is imported only when an operation with a kernel gets a tensor
on a CUDA device. Without Triton the twins serve CUDA as well.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Hashable
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed; asks without importing it."""
    return importlib.util.find_spec("triton") is not None


class Op(Generic[P, R]):
    """An operation: called, it runs the kernel if its first argument is on a CUDA device, else the CPU's version or the twin."""

    def __init__(self, twin: Callable[P, R], module: str) -> None:
        functools.update_wrapper(self, twin)
        self.twin = twin
        self._module = module
        self._kernel: Callable[..., R] | None = None
        self._native: Callable[P, R] | None = None

    def on_cpu(self, native: Callable[P, R]) -> Callable[P, R]:
        """Declare a version for tensors on a CPU. It returns NotImplemented for those that it leaves to the twin."""
        self._native = native
        return native

    @property
    def kernel(self) -> Callable[..., R]:
        """The Triton version; importing it needs Triton."""
        if self._kernel is None:
            module = importlib.import_module(f"pagerunner.ops.kernels.{self._module}")
            self._kernel = getattr(module, self.twin.__name__)
        return self._kernel

    def kernels_for(self, tokens: int, *of: Any) -> Hashable:
        """What decides which kernels run for so many tokens, as `<operation>_kernels` in the kernel's module says. Needs Triton.

        It is equal for numbers of tokens that need the same kernels. `of` is what else the operation chooses by. Example:
        `route.kernels_for(tokens, experts, active)`.
        """
        module = importlib.import_module(f"pagerunner.ops.kernels.{self._module}")
        found: Hashable = getattr(module, f"{self.twin.__name__}_kernels")(tokens, *of)
        return found

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run it."""
        first: Any = args[0]
        if first.is_cuda and has_triton():
            return (self._kernel or self.kernel)(*args, **kwargs)  # a property is a call more, in every operation
        if self._native is not None:
            made = self._native(*args, **kwargs)
            if made is not NotImplemented:
                return made
        return self.twin(*args, **kwargs)


def gpu_kernel(module: str) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Declare that `ops/kernels/<module>.py` has a kernel with the decorated twin's name and signature."""
    return lambda twin: Op(twin, module)
