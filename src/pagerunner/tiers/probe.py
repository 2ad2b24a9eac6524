"""How fast a directory's disk reads, measured with files that the page cache has forgotten."""

from __future__ import annotations

import contextlib
import os
import queue
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

_EACH = 2**20


def read_rate(directory: Path, nbytes: int, threads: int, there: Sequence[Path]) -> float:
    """Bytes a second that so many threads read, of a file of `nbytes` that is made for it. It has no name, so a crash leaves nothing.

    Where nothing can be written, as on a full disk, so many bytes of the files that are `there` are read.
    On a file system in memory this is the memory's speed.

    Raises:
        OSError: nothing can be written, and nothing is there.
    """
    with contextlib.ExitStack() as stack:
        try:
            files = [_made(directory, nbytes, stack)]
        except OSError:
            files = [_opened(path, stack) for path in there]
            if not any(size for _, size in files):
                raise
        return _measure(files, nbytes, threads)


def _made(directory: Path, nbytes: int, stack: contextlib.ExitStack) -> tuple[int, int]:
    fd = stack.enter_context(tempfile.TemporaryFile(dir=directory, buffering=0)).fileno()
    data = os.urandom(_EACH)
    for offset in range(0, nbytes, _EACH):
        os.pwrite(fd, data, offset)
    os.fdatasync(fd)
    return fd, nbytes


def _opened(path: Path, stack: contextlib.ExitStack) -> tuple[int, int]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # somebody has unlinked it
        return -1, 0
    stack.callback(os.close, fd)
    return fd, os.fstat(fd).st_size


def _measure(files: Sequence[tuple[int, int]], nbytes: int, threads: int) -> float:
    places: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    for fd, size in files:
        for offset in range(0, min(size, nbytes), _EACH):
            places.put((fd, offset))
        if size:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        nbytes -= min(size, nbytes)
    total = list[int]()

    def read() -> None:
        place = bytearray(_EACH)
        with contextlib.suppress(queue.Empty, OSError):
            while True:
                fd, offset = places.get_nowait()
                total.append(os.preadv(fd, [place], offset))

    readers = [threading.Thread(target=read, name="disk-probe", daemon=True) for _ in range(threads)]
    started = time.monotonic()
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    return sum(total) / max(time.monotonic() - started, 1e-6)
