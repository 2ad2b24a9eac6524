"""The CPU kernels' shared library: compiled by the machine's own C compiler, for this very processor, and kept for the next time.

It is kept in `~/.cache/pagerunner` (or XDG_CACHE_HOME's), under a name that says what it was made of: the source, the flags,
the compiler and the processor. If that folder can't keep it or code there can't be run, it is kept in `pagerunner-UID` of
the temp directory. The file ends with a checksum: a damaged one is compiled again. A folder keeps the `KEPT` files that were
used last. `PAGERUNNER_CPU_KERNELS=0` turns the kernels off. `CC` names the compiler; otherwise it is `cc`, `gcc` or `clang`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import math
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)
SWITCH = "PAGERUNNER_CPU_KERNELS"
SOURCES = (
    "common.h", "products.h", "attention.h", "small.h", "mixture.h", "latent.h", "recurrent.h", "suffix.h", "kernels.c",
)  # fmt: skip
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
LINK = ("-shared", "-fPIC", "-lm")
SECONDS = 120
KEPT = 8
_CHECKSUM = hashlib.sha256().digest_size  # bytes that end the file
_OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


class Library:
    """The kernels, which take commands, see `calls`.

    - `threads(commands, bytes, most)`: how many threads they are worth, of so many.
    - `scratch(commands, bytes, threads)`: how many floats of memory they work in.
    - `bytes(kind)`: how large the structure of a command is; 0 for no kind.
    - `run(commands, bytes, memory, threads)`: the number of a command that was given what it can't use; 0 if all were done.
    - `suffix_extend`, `suffix_draft`: see `suffix`.
    """

    def __init__(self, path: Path) -> None:
        loaded = ctypes.CDLL(str(path))
        loaded.pagerunner_init.argtypes = [ctypes.c_void_p] * len(_OPENMP)
        self.lanes: int = loaded.pagerunner_init(*_openmp())
        commands = (ctypes.c_char_p, ctypes.c_long)
        self.threads = _function(loaded.pagerunner_threads, *commands, ctypes.c_long)
        self.bytes = _function(loaded.pagerunner_bytes, ctypes.c_long)
        self.scratch = _function(loaded.pagerunner_scratch, *commands, ctypes.c_long)
        self.run = _function(loaded.pagerunner_run, *commands, ctypes.c_void_p, ctypes.c_long)
        number, place = ctypes.c_long, ctypes.c_void_p
        self.suffix_extend = _function(loaded.pagerunner_suffix_extend, place, place, number)
        self.suffix_draft = _function(loaded.pagerunner_suffix_draft, place, place, number, place, place)

    @property
    def panel(self) -> int:
        """Output features of a matrix that stand together."""
        return 2 * self.lanes


def library() -> Library | None:
    """The kernels, if this machine can have them and they aren't turned off. The first call may compile them, which takes seconds."""
    return None if os.environ.get(SWITCH, "1") == "0" else loaded()


@functools.cache
def loaded() -> Library | None:
    """The kernels, turned off or not: for what was stored for them."""
    try:
        return _found_or_made()
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        logger.warning(
            "CPU kernels could not be compiled and loaded, so torch's operators serve, which are slower: %s", error
        )
        return None


def _function(found: ctypes._NamedFuncPointer, *arguments: type[ctypes._SimpleCData[Any]]) -> Callable[..., int]:
    found.argtypes, found.restype = arguments, ctypes.c_long
    return found


def _openmp() -> list[int | None]:
    """Addresses in the OpenMP runtime that torch has loaded, so that both share their threads; None without one."""
    try:
        own = ctypes.CDLL(torch._C.__file__)
        return [ctypes.cast(getattr(own, name), ctypes.c_void_p).value for name in _OPENMP]
    except (AttributeError, OSError):
        return [None] * len(_OPENMP)


def _found_or_made() -> Library:
    compiler = _compiler()
    sources = [Path(__file__).parent / name for name in SOURCES]
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=True, timeout=SECONDS).stdout
    said = (*compiler, *FLAGS, *LINK, _processor())
    parts = [version, *(one.encode() for one in said), *(source.read_bytes() for source in sources)]
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()
    name = f"kernels-{digest[:32]}.so"
    cache, temporary = _cache(), _temporary()
    if cache is not None:
        try:
            return _kept(compiler, sources[-1], cache / name)
        except OSError as error:  # a full disk, or one whose files can't be run
            logger.info("CPU kernels can't be kept in %s: %s", cache, error)
    if temporary is not None:
        return _kept(compiler, sources[-1], temporary / name)
    with tempfile.TemporaryDirectory(prefix="pagerunner-") as once:
        return _kept(compiler, sources[-1], Path(once) / name)


def _kept(compiler: list[str], source: Path, target: Path) -> Library:
    if _is_whole(target):
        with contextlib.suppress(OSError):  # a folder that can't be written to is never cleared either
            os.utime(target)
    else:  # to map a file that was cut short may end the process
        _compile(compiler, source, target)
        _clear(target.parent)
    return Library(target)


def _clear(folder: Path) -> None:
    """Remove libraries but those used last: every version of the kernels, compiler and processor has one of its own."""

    def used(file: Path) -> float:
        try:
            return file.stat().st_mtime
        except FileNotFoundError:  # another process removed it
            return math.inf

    for file in sorted(folder.glob("kernels-*.so"), key=used, reverse=True)[KEPT:]:
        file.unlink(missing_ok=True)


def _is_whole(target: Path) -> bool:
    try:
        held = target.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(held[:-_CHECKSUM]).digest() == held[-_CHECKSUM:]


def _compiler() -> list[str]:
    named = os.environ.get("CC")
    if named and named.strip():
        try:
            return shlex.split(named)
        except ValueError as error:
            raise OSError(f"CC is {named!r}, which is no command: {error}") from error
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if found is None:
        raise OSError("there is no C compiler (cc, gcc or clang); Debian's package is gcc with libc6-dev")
    return [found]


def _compile(compiler: list[str], source: Path, target: Path) -> None:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        command = [*compiler, *FLAGS, str(source), *LINK, "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        if done.returncode:
            raise OSError(f"{shlex.join(command)} ended with {done.returncode}: {done.stderr[-500:]}")
        with made.open("r+b") as file:
            checksum = hashlib.sha256(file.read()).digest()
            file.write(checksum)
            file.flush()
            os.fsync(file.fileno())
        made.replace(target)  # whole or not at all, whoever else compiles at the same time
    logger.info("CPU kernels compiled in %.1f s: %s", time.perf_counter() - started, target)


def _cache() -> Path | None:
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagerunner"
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        return cache if _is_private(cache.stat()) else None
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        return None


def _temporary() -> Path | None:
    """One folder for every start. Others may have made something of this name: a link is not followed."""
    try:
        folder = Path(tempfile.gettempdir()) / f"pagerunner-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder if _is_private(folder.lstat()) else None
    except OSError:
        return None


def _is_private(found: os.stat_result) -> bool:
    """A folder that only this user writes to: whoever could write there could run code here."""
    others = stat.S_IWGRP | stat.S_IWOTH
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & others


def _processor() -> str:
    """What `-march=native` depends on: a home directory may be shared by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    kinds = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    first = {line.partition(":")[0].strip(): line for line in reversed(lines)}
    return "\n".join([platform.machine(), *(first[kind] for kind in kinds if kind in first)])
