"""How fast a directory's disk reads, measured with a file that the page cache has forgotten."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from pathlib import Path

_EACH = 2**20


def read_rate(directory: Path, nbytes: int, threads: int) -> float:
    """Bytes a second that so many threads read, of a file of `nbytes` that is made for it. It has no name, so a crash leaves nothing.

    On a file system in memory this is the memory's speed.

    Raises:
        OSError: the file can't be made or read.
    """
    path = directory / f"probe-{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        path.unlink()
        offsets: queue.SimpleQueue[int] = queue.SimpleQueue()
        data = os.urandom(_EACH)
        for offset in range(0, nbytes, _EACH):
            os.pwrite(fd, data, offset)
            offsets.put(offset)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

        def read() -> None:
            place = bytearray(_EACH)
            with contextlib.suppress(queue.Empty, OSError):
                while True:
                    os.preadv(fd, [place], offsets.get_nowait())

        readers = [threading.Thread(target=read, name="disk-probe", daemon=True) for _ in range(threads)]
        started = time.monotonic()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        return nbytes / max(time.monotonic() - started, 1e-6)
    finally:
        os.close(fd)
