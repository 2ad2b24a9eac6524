"""How fast the disk tier writes and reads pages, beside plain reads of the same files.

    python scripts/bench_disk.py /path/on/the/disk --page-kib 2304

It ends within `--seconds`: the disk is measured first, and so many bytes are taken as leave time for all ways. What was measured until then is
printed when it is interrupted, too.

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
import signal
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

    readers = [threading.Thread(target=read, daemon=True) for _ in range(threads)]
    started = time.perf_counter()
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    return sum(counts) / (time.perf_counter() - started)


WAYS = ("dd", "plain", "direct", "buffered", "tier")


class Bench:
    """Rates by way, and what they cost."""

    def __init__(self, asked: argparse.Namespace, root: Path) -> None:
        self.asked, self.root, self.nbytes = asked, root, asked.page_kib * 1024
        self.until, self.woken = time.monotonic() + asked.seconds, threading.Event()
        self.rates, self.cpu = dict[str, list[float]](), dict[str, list[float]]()
        made = self.store()
        rate = made.stats().read_rate
        gib = asked.gib or min(max(0.45 * asked.seconds * rate / (len(WAYS) * asked.rounds + 2) / 2**30, 0.25), 4)
        self.count = int(gib * 2**30) // self.nbytes
        print(f"measured at the start: {rate / 1e9:.2f} GB/s; {gib:.2f} GiB are read in each way", flush=True)
        self.slab, self.places = (memoryview(mmap.mmap(-1, self.count * self.nbytes)) for _ in range(2))
        for number in range(self.count):
            piece = os.urandom(4096) * (self.nbytes // 4096 + 1)
            self.slab[number * self.nbytes :][: self.nbytes] = piece[: self.nbytes]
        self.note("write", partial(self.timed, made, made.write, self.slab))
        made.close()

    def store(self, direct: bool = True) -> DiskStore:
        made = DiskStore(
            self.root, b"b" * 32, max_bytes=2**40, largest_page=self.nbytes, on_end=self.woken.set,
            read_threads=self.asked.read_threads, write_threads=self.asked.write_threads, seconds=600, direct=direct,
        )  # fmt: skip
        made.ready.wait(60)
        return made

    def timed(self, made: DiskStore, begin: Callable[..., None], memory: memoryview) -> float:
        what = [(GROUP, key_of(n), memory[n * self.nbytes :][: self.nbytes]) for n in range(self.count)]
        started = time.perf_counter()
        for first in range(0, self.count, BATCH):
            begin(first, what[first : first + BATCH])
        assert all(wait(made, -(-self.count // BATCH), self.woken)), "a page failed"
        return self.count * self.nbytes / (time.perf_counter() - started)

    def note(self, name: str, measure: Callable[[], float]) -> None:
        before = time.process_time()
        self.rates.setdefault(name, []).append(measure())
        self.cpu.setdefault(name, []).append((time.process_time() - before) / (self.count * self.nbytes / 1e9))

    def read(self, name: str, paths: list[Path], *, last: bool) -> None:
        forget(paths)
        if name not in ("buffered", "tier"):
            threads = 1 if name == "dd" else self.asked.read_threads
            return self.note(name, partial(plain, paths, threads, os.O_DIRECT if name == "direct" else 0))
        self.places[:] = bytes(len(self.places))  # touched, as pinned memory is
        made = self.store(name == "tier")  # a start, as after a restart
        forget(paths)
        self.note(name, partial(self.timed, made, made.read, self.places))
        assert self.places == self.slab, "bytes differ"
        if name == "buffered" and last:
            self.note("cached", partial(self.timed, made, made.read, self.places))
        made.close()

    def run(self) -> None:
        paths = sorted(self.root.rglob("*.pages"))
        for turn in range(self.asked.rounds):
            for name in WAYS:
                if time.monotonic() > self.until:
                    print(f"{self.asked.seconds:g} s are over in round {turn + 1}")
                    return
                self.read(name, paths, last=turn == self.asked.rounds - 1)

    def table(self) -> None:
        asked, middle = self.asked, {name: statistics.median(found) for name, found in self.rates.items()}
        of = lambda rate, name: f"{rate / middle[name]:.2f}" if name in middle else "-"  # noqa: E731
        print(
            f"{self.count} pages of {self.nbytes:,} bytes, {asked.read_threads} threads read, {asked.write_threads} write"
        )
        print("| | GB/s | of dd | of plain | processor, s a GB |\n|---|---|---|---|---|")
        for name, rate in middle.items():
            cost = statistics.median(self.cpu[name])
            print(f"| {name} | {rate / 1e9:.2f} | {of(rate, 'dd')} | {of(rate, 'plain')} | {cost:.2f} |", flush=True)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--gib", type=float, help="bytes of pages, in GiB; else as many as there is time for, up to 4")
    parser.add_argument("--page-kib", type=int, default=2304, help="a page of Llama 3 8B with 16 tokens is 2,048")
    parser.add_argument("--read-threads", type=int, default=READ_THREADS)
    parser.add_argument("--write-threads", type=int, default=WRITE_THREADS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=35, help="no way is begun later than this")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    root, bench = Path(tempfile.mkdtemp(dir=asked.root)), None
    try:
        bench = Bench(asked, root)
        bench.run()
    except KeyboardInterrupt:
        print("interrupted")
    finally:
        if bench is not None:
            bench.table()
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
