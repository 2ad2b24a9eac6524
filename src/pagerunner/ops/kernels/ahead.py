"""Compiling the kernels of a start before they are needed, several at a time; see `ops/ahead.py`.

A rehearsal of the start finds these kernels: during the rehearsal a launch compiles its kernel and does nothing else. Every new
tensor holds zeros meanwhile, so that a number that a kernel would have written is at least a valid index.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime._async_compile import AsyncCompileMode, active_mode
from triton.runtime.cache import get_cache_manager, triton_key
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction, compute_cache_key, serialize_specialization_data

from pagerunner import children
from pagerunner.life import LIFE
from pagerunner.ops.kernels.compilers import Asked, Kernel
from pagerunner.threads import usable_cores

logger = logging.getLogger(__name__)
MOST_THREADS = 16
_FEWEST_CORES = 4  # with fewer, a process that imports torch costs more than it brings
_COMPILERS = "pagerunner.ops.kernels.compilers"
_PATIENCE_SECONDS = 120.0  # for processes to compile what takes this one a minute
_MARK = "compiled"
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_do_compile = JITFunction._do_compile
_compilers: list[tuple[subprocess.Popen[bytes], int]] = []
"""The process that waits for kernels to compile, if one has been started, and how many it may fork."""


class _Zeros(TorchDispatchMode):
    """Fills new tensors with zeros where torch would leave memory as it was."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.zero_() if getattr(func, "overloadpacket", func).__name__ in _EMPTY else out


def _build(compile_kernel: Callable[[], Any], may_begin: threading.Event) -> Any:
    """Compile a kernel, and on disk the module in C that launches it."""
    may_begin.wait()
    kernel = compile_kernel()
    with contextlib.suppress(Exception):  # the launch of the kernel builds it again and reports what is wrong
        driver.active.launcher_cls(kernel.src, kernel.metadata)
    LIFE.moved()
    return kernel


class _Builders:
    """Where Triton sends what it compiles in the background. Most of that time it doesn't hold the interpreter's lock."""

    def __init__(self, pool: ThreadPoolExecutor, may_begin: threading.Event) -> None:
        self.pool, self._may_begin = pool, may_begin

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:
        return self.pool.submit(_build, compile_kernel, self._may_begin)


def load_driver() -> None:
    """Let Triton find its driver, for which it compiles a module in C, and hash its own sources, by which its cache is named."""
    triton_key()
    driver.active  # noqa: B018 - made when it is first asked for


def start_compilers(name: str, ranks: int = 1) -> None:
    """Start the process of `ops/kernels/compilers.py`, unless kernels of `name` are compiled or there are few cores.

    So many `ranks` of this machine start one each, and divide the cores.
    """
    if usable_cores() >= _FEWEST_CORES and not is_compiled(name):
        alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a process with threads had better not fork
        environment = children.engine_environment() | alone
        process = children.start(_COMPILERS, environment, stdout=subprocess.PIPE, own_session=True)
        _compilers.append((process, max(1, usable_cores() // ranks)))


def _compile_in_processes(kernels: list[Kernel]) -> None:
    """Have the kernels compiled into Triton's cache; returns when that has ended, when the processes have, or when it takes too long."""
    process, workers = _compilers.pop()
    target = driver.active.get_current_target()
    asked = Asked((target.backend, target.arch, target.warp_size), kernels, workers)
    until = time.monotonic() + _PATIENCE_SECONDS
    try:
        assert process.stdout is not None
        # in a thread, as more may be written than a pipe holds, and a process that hangs reads nothing
        line = msgspec.json.encode(asked) + b"\n"
        threading.Thread(target=children.tell, args=(process, line), name="tell-compilers", daemon=True).start()
        while select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
            if not os.read(process.stdout.fileno(), 4096):
                break
            LIFE.moved()
        else:
            logger.warning(
                "The processes that compile kernels have taken %g seconds and are ended; this one goes on alone.",
                _PATIENCE_SECONDS,
            )
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # it leads a group of its own
        children.end({"the process that compiles kernels": process})
        if process.stdout is not None:
            process.stdout.close()


def compile_launched(rehearse: Callable[[], object]) -> int:
    """Compile every kernel that `rehearse` launches in this thread, without launching any.

    Threads do it as the rehearsal goes on; or, after it, first the processes that `start_compilers` has started. Then threads find most
    in Triton's cache.

    Returns how many there were. A kernel that can't be compiled is left for its first real launch, which reports the error.
    """
    seen: set[tuple[int, Any]] = set()
    kernels: list[Kernel] = []
    run, do_compile = JITFunction.run, JITFunction._do_compile

    def note(
        self: Any, key: Any, signature: Any, device: int, constants: Any, options: Any, attrs: Any, warmup: bool
    ) -> Any:
        if active_mode.get() is not None:
            text = ""
            with contextlib.suppress(TypeError):  # a constant that JSON doesn't have
                text = serialize_specialization_data(self._fn_name, signature, constants, attrs, options, key)
            kernels.append(Kernel(self.module, self.fn.__name__, text))
        return do_compile(self, key, signature, device, constants, options, attrs, warmup)

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

    workers, may_begin = min(MOST_THREADS, usable_cores()), threading.Event()
    builders = _Builders(ThreadPoolExecutor(workers, "compile"), may_begin)
    with builders.pool, AsyncCompileMode(builders, ignore_errors=True):
        JITFunction.run, JITFunction._do_compile = compile_only, note
        if not _compilers:
            may_begin.set()
        try:
            with _Zeros():
                rehearse()
        finally:
            JITFunction.run, JITFunction._do_compile = run, do_compile
            try:
                if not may_begin.is_set():
                    _compile_in_processes(kernels)
            finally:
                may_begin.set()
    return len(seen)


def expect_kernels(expected: bool) -> None:
    """Say whether kernels may be compiled from now on, as in a start. Others are named in the log."""
    JITFunction._do_compile = _do_compile if expected else _compile_late


def _compile_late(self: Any, *args: Any, **options: Any) -> Any:
    began = time.monotonic()
    made = _do_compile(self, *args, **options)
    if self.fn.__module__.startswith("pagerunner."):
        logger.warning(
            "The kernel %s was compiled after the start, and a step waited %.1f s for it. The warm-up should have met it: "
            "please report the model, the engine's arguments and the lengths of the prompts.",
            self.fn.__name__,
            time.monotonic() - began,
        )
    return made


def _mark(name: str) -> tuple[Any, str]:
    """Where Triton's cache says that all kernels of `name` are in it, for these sources, this Triton, and this device."""
    target = driver.active.get_current_target()
    parts = [name, triton.__version__, torch.__version__, repr(target)]
    digest = hashlib.sha256("\n".join(parts).encode())
    for source in sorted(Path(__file__).parent.rglob("*.py")):
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
