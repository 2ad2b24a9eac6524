"""Compiling the kernels of a start before they are needed, several at a time; see `ops/ahead.py`.

A rehearsal of the start finds these kernels: during the rehearsal a launch compiles its kernel and does nothing else. Every new
tensor holds zeros meanwhile, so that a number that a kernel would have written is at least a valid index.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime._async_compile import AsyncCompileMode, active_mode
from triton.runtime.cache import get_cache_manager, triton_key
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction, compute_cache_key

MOST_THREADS = 16
_MARK = "compiled"
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class _Zeros(TorchDispatchMode):
    """Fills new tensors with zeros where torch would leave memory as it was."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.zero_() if getattr(func, "overloadpacket", func).__name__ in _EMPTY else out


def _build(compile_kernel: Callable[[], Any]) -> Any:
    """Compile a kernel, and on disk the module in C that launches it."""
    kernel = compile_kernel()
    with contextlib.suppress(Exception):  # the launch of the kernel builds it again and reports what is wrong
        driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


class _Builders:
    """Where Triton sends what it compiles in the background. Most of that time it doesn't hold the interpreter's lock."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:
        return self._pool.submit(_build, compile_kernel)


def load_driver() -> None:
    """Let Triton find its driver, for which it compiles a module in C, and hash its own sources, by which its cache is named."""
    triton_key()
    driver.active  # noqa: B018 - made when it is first asked for


def compile_launched(rehearse: Callable[[], object]) -> int:
    """Compile, in threads, every kernel that `rehearse` launches in this thread, without launching any.

    Returns how many there were. A kernel that can't be compiled is left for its first real launch, which reports the error.
    """
    seen: set[tuple[int, Any]] = set()
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if active_mode.get() is None:  # another thread's launch, which goes on as usual
            return run(self, *args, grid=grid, warmup=warmup, **options)
        _, keys, _, _, binder = self.device_caches[driver.active.get_current_device()]
        _, specialization, given = binder(*args, **options)
        key = id(self), compute_cache_key(keys, specialization, given)
        if key in seen:
            return None
        seen.add(key)
        return run(self, *args, grid=grid, warmup=True, **options)

    workers = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(workers, "compile") as pool, AsyncCompileMode(_Builders(pool), ignore_errors=True):
        JITFunction.run = compile_only
        try:
            with _Zeros():
                rehearse()
        finally:
            JITFunction.run = run
    return len(seen)


def _mark(name: str) -> tuple[Any, str]:
    """Where Triton's cache says that all kernels of `name` are in it, for these sources, this Triton, and this device."""
    target = driver.active.get_current_target()
    parts = [name, triton.__version__, torch.__version__, repr(target)]
    digest = hashlib.sha256("\n".join(parts).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return get_cache_manager(digest.hexdigest()), _MARK


def is_compiled(name: str) -> bool:
    """Whether a start of this name has left its kernels in Triton's cache."""
    manager, mark = _mark(name)
    return manager.get_file(mark) is not None


def set_compiled(name: str) -> None:
    """Note that a start of this name has left its kernels in Triton's cache."""
    manager, mark = _mark(name)
    manager.put("", mark)
