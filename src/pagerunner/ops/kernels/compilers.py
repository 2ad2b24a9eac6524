"""A process that compiles kernels on all cores, for a process that is loading a model.

Triton's front end is Python, so threads of one process take turns in it. This process imports Triton and the kernels while its parent
loads weights, and starts no thread and no device. So it may fork: a child for each core, which compiles one kernel after another into Triton's
cache. What goes wrong here is left to the parent, which compiles what it doesn't find.

Processes that share a cache divide the kernels, as those of an engine's ranks do: who compiles one has a lock, and the others turn to the next.

Standard input is the leash, here too: at its end all that was forked ends at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import os
import select
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

_PATIENCE_SECONDS = 300.0  # for a parent that has not come to its kernels
LOCK_SECONDS = 20.0
"""So long another process may take for a kernel. One that was stopped holds its lock for ever."""
_LOOK_SECONDS = 0.02
BUILT = b"\n"
"""What is written to standard output for each kernel."""
_INDEX = struct.Struct("H")
_LOCKS = "pagerunner.lock"  # a file in Triton's cache; each kernel has a byte of it, which needn't be there


class Kernel(msgspec.Struct):
    """One to compile: where it is defined, and what Triton says of the values that it is for; "" if that can't be said in JSON."""

    module: str
    name: str
    specialization: str


class Asked(msgspec.Struct):
    """What the parent writes to standard input, a line: the device's target (`GPUTarget`), the kernels, and by how many processes."""

    target: tuple[str, int, int]
    kernels: list[Kernel]
    workers: int


class _TargetAlone:
    """In the place of Triton's driver: says for which device, and opens none."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """What the parent said."""
        return self._target


def build(kernel: Kernel) -> None:
    """Compile a kernel, and the module in C that launches it, into Triton's cache."""
    compiled: Any = _function(kernel).preload(kernel.specialization)
    importlib.import_module("triton.backends.nvidia.driver").CudaLauncher(compiled.src, compiled.metadata)


def _function(kernel: Kernel) -> Any:
    return getattr(sys.modules[kernel.module], kernel.name)


def _code_length(kernel: Kernel) -> int:
    """0 for what isn't a kernel of a module. Triton's name for a kernel in its cache is made here too.

    Whatever Triton's sources say, that name depends on which functions have been named before (3.6). So kernels are named in the order in which
    the parent has named them.
    """
    try:
        function = _function(kernel)
        return len(function.src) if function.cache_key and kernel.specialization else 0
    except Exception:
        return 0


def _build_in_turn(kernel: Kernel, locks: int | None, seconds: float) -> bool:
    """Build a kernel, unless another process does. That is waited for; False if it takes longer than so many seconds."""
    name = f"{_function(kernel).cache_key} {kernel.specialization}"
    place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6])
    until = time.monotonic() + seconds
    while locks is not None:
        try:
            fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
            break
        except (BlockingIOError, PermissionError):
            if time.monotonic() >= until:
                return False
            time.sleep(_LOOK_SECONDS)
        except OSError:
            locks = None  # the file system has no locks
    try:
        build(kernel)  # or find it in the cache
    finally:
        if locks is not None:
            fcntl.lockf(locks, fcntl.LOCK_UN, 1, place)
    return True


def _open_locks() -> int | None:
    """The file of the locks. None: it can't be had, so each rank's processes compile all kernels."""
    with contextlib.suppress(OSError):
        os.makedirs(knobs.cache.dir, exist_ok=True)
        return os.open(os.path.join(knobs.cache.dir, _LOCKS), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    return None


def build_all(kernels: list[Kernel], workers: int) -> None:
    """Build kernels in as many forked processes; returns when all have ended. Those with most code come first. Each writes a line for a kernel.

    If standard input ends meanwhile, this process and its group are killed. It leads that group.
    """
    lengths = [_code_length(kernel) for kernel in kernels]
    kernels = [
        kernels[place] for place in sorted(range(len(kernels)), key=lambda place: -lengths[place]) if lengths[place]
    ]
    todo, add = os.pipe()
    ends, lives = os.pipe()  # closed when no child is left
    started = []
    for _ in range(min(workers, len(kernels))):
        if (child := os.fork()) == 0:
            os.close(add)
            try:
                _build_some(kernels, todo)
            finally:
                os._exit(0)
        started.append(child)
    os.close(todo)
    os.close(lives)
    with contextlib.suppress(BrokenPipeError), open(add, "wb") as pipe:
        pipe.write(b"".join(map(_INDEX.pack, range(len(kernels)))))
    stdin = sys.stdin.fileno()
    if stdin in select.select([stdin, ends], [], [])[0]:  # nothing follows the line with the kernels
        os.killpg(os.getpid(), signal.SIGKILL)
    os.close(ends)
    for child in started:
        os.waitpid(child, 0)


def _build_some(kernels: list[Kernel], todo: int) -> None:
    """In a child: build those whose numbers come from `todo`, and then wait for those that other processes build."""
    put_off, locks = [], _open_locks()
    while index := os.read(todo, _INDEX.size):
        kernel = kernels[_INDEX.unpack(index)[0]]
        with contextlib.suppress(Exception):
            if _build_in_turn(kernel, locks, 0.0):
                os.write(sys.stdout.fileno(), BUILT)
            else:
                put_off.append(kernel)
    for kernel in put_off:
        with contextlib.suppress(Exception):
            if not _build_in_turn(kernel, locks, LOCK_SECONDS):
                build(kernel)
            os.write(sys.stdout.fileno(), BUILT)


def main() -> None:
    """Entry point of the process."""
    here = Path(__file__).parent
    for file in here.rglob("[a-z]*.py"):
        importlib.import_module(".".join(("pagerunner.ops.kernels", *file.relative_to(here).with_suffix("").parts)))
    line = sys.stdin.buffer.readline() if select.select([sys.stdin], [], [], _PATIENCE_SECONDS)[0] else b""
    if line.endswith(b"\n"):  # not if the parent has ended, as a start does that finds something wrong
        asked = msgspec.json.decode(line, type=Asked)
        driver.set_active(_TargetAlone(GPUTarget(*asked.target)))
        build_all(asked.kernels, asked.workers)


if __name__ == "__main__":
    main()
