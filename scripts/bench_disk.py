"""How fast the disk tier writes and reads pages, beside plain reads of the same files.

    python scripts/bench_disk.py /path/on/the/disk --gib 8 --page-kib 2304

Before each read the page cache forgets the files. `dd` is one thread that reads the files one after another, 2 MiB at a time; `plain` are
as many threads as the tier has, without headers and checksums; `direct` are such threads past the page cache; `buffered` is the tier
with the page cache alone. All are measured in turns, and the
median of the rounds is shown. `cached` is the tier once more, with the files in the page cache. Every page that the tier reads is compared.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import queue
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pagerunner.tiers.disk import READ_THREADS, WRITE_THREADS, DiskStore

GROUP, EACH, BATCH = 0, 2 * 2**20, 32  # pages of one number


def key_of(number: int) -> bytes:
    """The key of a page."""
    return hashlib.sha256(b"%d" % number).digest()


def forget(paths: list[Path]) -> None:
    """The page cache forgets the files."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def wait(store: DiskStore, left: int, woken: threading.Event) -> list[bool]:
    """The outcomes of so many numbers."""
    found: list[bool] = []
    while left:
        woken.wait(60)
        woken.clear()
        for _, well in store.ended():
            found += well
            left -= 1
    return found


def plain(paths: list[Path], threads: int, flags: int) -> float:
    """Bytes a second of threads that read the files, 2 MiB at a time."""
    pieces: queue.SimpleQueue[tuple[Path, int]] = queue.SimpleQueue()
    for path in paths:
        for offset in range(0, path.stat().st_size, EACH):
            pieces.put((path, offset))
    counts: list[int] = []

    def read() -> None:
        place, done, fds = mmap.mmap(-1, EACH), 0, {}
        try:
            while True:
                path, offset = pieces.get_nowait()
                if path not in fds:
                    fds[path] = os.open(path, os.O_RDONLY | flags)
                done += os.preadv(fds[path], [place], offset)
        except queue.Empty:
            counts.append(done)
            for fd in fds.values():
                os.close(fd)

    readers = [threading.Thread(target=read) for _ in range(threads)]
    started = time.perf_counter()
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    return sum(counts) / (time.perf_counter() - started)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--gib", type=float, default=2.0, help="bytes of pages, in GiB")
    parser.add_argument("--page-kib", type=int, default=2304, help="a page of Llama 3 8B with 16 tokens is 2,048")
    parser.add_argument("--read-threads", type=int, default=READ_THREADS)
    parser.add_argument("--write-threads", type=int, default=WRITE_THREADS)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    nbytes, root = asked.page_kib * 1024, Path(tempfile.mkdtemp(dir=asked.root))
    count = int(asked.gib * 2**30) // nbytes
    slab = memoryview(mmap.mmap(-1, count * nbytes))
    for number in range(count):
        slab[number * nbytes :][:nbytes] = (os.urandom(4096) * (nbytes // 4096 + 1))[:nbytes]
    pages = [(GROUP, key_of(n), slab[n * nbytes :][:nbytes]) for n in range(count)]
    places = memoryview(mmap.mmap(-1, count * nbytes))
    places[:] = bytes(len(places))  # touched, as pinned memory is
    targets = [(GROUP, key_of(n), places[n * nbytes :][:nbytes]) for n in range(count)]
    woken = threading.Event()

    def store(direct: bool = True) -> DiskStore:
        made = DiskStore(
            root, b"b" * 32, max_bytes=4 * int(asked.gib * 2**30) + 2**32, largest_page=nbytes, on_end=woken.set,
            read_threads=asked.read_threads, write_threads=asked.write_threads, seconds=600, direct=direct,
        )  # fmt: skip
        made.ready.wait(60)
        return made

    def timed(made: DiskStore, begin: Callable[..., None], what: list[tuple[int, bytes, memoryview]]) -> float:
        started = time.perf_counter()
        for first in range(0, count, BATCH):
            begin(first, what[first : first + BATCH])
        assert all(wait(made, -(-count // BATCH), woken)), "a page failed"
        return count * nbytes / (time.perf_counter() - started)

    try:
        made = store()
        print(f"measured at the start: {made.stats().read_rate / 1e9:.2f} GB/s", flush=True)
        rates, cpu = dict[str, list[float]](), dict[str, list[float]]()

        def note(name: str, measure: Callable[[], float]) -> None:
            before = time.process_time()
            rates.setdefault(name, []).append(measure())
            cpu.setdefault(name, []).append((time.process_time() - before) / (count * nbytes / 1e9))

        note("write", lambda: timed(made, made.write, pages))
        made.close()
        paths = sorted(root.rglob("*.pages"))
        for turn in range(asked.rounds):
            for name in ("dd", "plain", "direct", "buffered", "tier"):
                forget(paths)
                if name in ("buffered", "tier"):
                    places[:] = bytes(len(places))
                    made = store(name == "tier")  # a start, as after a restart
                    forget(paths)
                    note(name, partial(timed, made, made.read, targets))
                    assert places == slab, "bytes differ"
                    if name == "buffered" and turn == asked.rounds - 1:
                        note("cached", partial(timed, made, made.read, targets))
                    made.close()
                else:
                    threads = 1 if name == "dd" else asked.read_threads
                    note(name, partial(plain, paths, threads, os.O_DIRECT if name == "direct" else 0))
        print(f"{count} pages of {nbytes:,} bytes, {asked.read_threads} threads read, {asked.write_threads} write")
        print("| | GB/s | of dd | of plain | processor, s a GB |\n|---|---|---|---|---|")
        middle = {name: statistics.median(found) for name, found in rates.items()}
        for name, rate in middle.items():
            print(
                f"| {name} | {rate / 1e9:.2f} | {rate / middle['dd']:.2f} | {rate / middle['plain']:.2f} | {statistics.median(cpu[name]):.2f} |"
            )
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
