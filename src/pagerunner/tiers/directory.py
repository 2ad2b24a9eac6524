"""The directory of the disk tier: which segments there are, whose they are, and how room is made for the next one.

Several engines may share a directory, with equal fingerprints or others. `max_bytes` is the bound of the whole directory: the oldest
segments are unlinked first, whoever wrote them. The lock of the directory is held while segments are made, adopted or unlinked; never while
pages move. The kernel frees the locks of an engine that was killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from pagerunner.errors import ConfigError
from pagerunner.tiers.segments import BLOCK, Record, Segment, record_bytes

logger = logging.getLogger(__name__)
SEGMENT_BYTES = 256 * 2**20
LEAST_SEGMENTS = 8
"""In `max_bytes`: two that are written, one that is given up while its hot pages are copied, and others to find pages in."""
_LOCK_SECONDS = 5.0


class NoRoomError(OSError):
    """All segments that could be given up are being written."""


class Directory:
    """`segment_bytes` is how large a segment becomes, `bytes` how many all segments had at the last look, `newest` the age of the youngest at the start.

    Raises:
        ConfigError: the directory can't be used, is open to other users, or max_bytes is too small for pages of `largest_page` bytes.
    """

    def __init__(self, root: Path, fingerprint: bytes, max_bytes: int, largest_page: int) -> None:
        self.path = root / "pagerunner-pages"
        self.fingerprint, self.max_bytes, self.bytes = fingerprint, max_bytes, 0
        self._strange: set[str] = set()
        least = BLOCK + record_bytes(largest_page)
        self.segment_bytes = max(min(SEGMENT_BYTES, max_bytes // LEAST_SEGMENTS), least)
        if self.segment_bytes * LEAST_SEGMENTS > max_bytes:
            raise ConfigError(
                f"max_bytes={max_bytes:,} of the disk tier is too small: it must hold {LEAST_SEGMENTS} files of a page of {largest_page:,} bytes, "
                f"{LEAST_SEGMENTS * least:,} in all."
            )
        try:
            root.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700, exist_ok=True)
            status = self.path.lstat()
            if status.st_uid != os.geteuid() or status.st_mode & 0o170077 != 0o040000:
                raise ConfigError(
                    f"{self.path} holds what users have sent, so it must be a directory that belongs to the engine's user and is closed to others "
                    f"(chmod 700); its owner is {status.st_uid} and its mode {status.st_mode:o}."
                )
            with self.locked():
                self._sweep()
                self.newest = max((segment.age for segment, _ in self.segments()), default=0)
        except OSError as error:
            raise ConfigError(f"root_dir={str(root)!r} of the disk tier can't be used: {error}.") from None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory's lock. Raises TimeoutError if another engine holds it for seconds, as a stopped one may."""
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            deadline = time.monotonic() + _LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        said = f"{self.path} has been locked for {_LOCK_SECONDS} s"
                        raise TimeoutError(errno.ETIMEDOUT, said) from None
                    time.sleep(0.002)
            yield
        finally:
            os.close(fd)

    def _sweep(self) -> None:
        """Remove index files whose segments are gone: their engine was killed between the two. To be called with the lock."""
        for path in list(self.path.iterdir()):
            segment = Segment.named(path.with_suffix(".pages"))
            if segment is not None and path.suffix in (".index", ".writing") and not segment.path.exists():
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def found_again(self, identity: bytes) -> Iterator[Segment | None]:
        """The segment of this identity, whatever its name is by now. It keeps that name within the block. None if it is gone."""
        with self.locked():
            yield next((segment for segment, _ in self.segments() if segment.identity == identity), None)

    def segments(self) -> list[tuple[Segment, int]]:
        """All segments with their sizes, the oldest first, of other fingerprints too. What isn't a regular file is passed over."""
        found = []
        with os.scandir(self.path) as entries:
            for entry in entries:
                segment = Segment.named(Path(entry.path))
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if segment is not None and stat.S_ISREG(status.st_mode):
                        found.append((segment, status.st_size))
                    elif segment is not None and entry.path not in self._strange:
                        self._strange.add(entry.path)
                        logger.warning("The disk tier passes over %s, which isn't a regular file.", entry.path)
        self.bytes = sum(size for _, size in found)
        return sorted(found, key=lambda one: one[0].path.name)

    def victims(self) -> list[tuple[Segment, int]]:
        """Segments to give up so that there is room for one more, with locked descriptors. To be called with the lock.

        Raises NoRoomError if giving up all that nobody writes isn't enough.
        """
        room = self.max_bytes - 2 * self.segment_bytes  # one for the new segment, and one while hot pages are copied
        there, found = self.segments(), list[tuple[Segment, int]]()
        held = self.bytes
        for segment, size in there:
            if held <= room:
                return found
            with contextlib.suppress(OSError):  # it is being written, or is gone
                found.append((segment, segment.open(lock=True)))
                held -= size
        if held > room:
            for _, fd in found:
                os.close(fd)
            raise NoRoomError(errno.ENOSPC, f"{self.path}: max_bytes={self.max_bytes:,} leaves no room for a segment")
        return found

    def create(self, age: int) -> tuple[Segment, int]:
        """A new segment of this age with its header, and its locked descriptor. To be called with the lock.

        The file has its full size from the start, so that a disk is full here, and not within a page. Sealing gives back what isn't used.
        """
        segment = Segment.new(self.path, self.fingerprint, age=age)
        os.close(os.open(segment.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        fd = segment.open(lock=True)
        try:
            os.posix_fallocate(fd, 0, self.segment_bytes)
            os.pwrite(fd, segment.header(self.fingerprint), 0)
        except BaseException:
            os.close(fd)
            segment.unlink()
            raise
        return segment, fd

    def unfinished(self, nbytes: int, age: int) -> tuple[Segment, int] | None:
        """The youngest segment of this fingerprint that is less than half full and takes such a page, to go on with, and its locked descriptor.

        It is renamed, as its age is that of its pages to come. To be called with the lock. Without this, each start would leave a small file.
        """
        most = min(self.segment_bytes // 2, self.segment_bytes - record_bytes(nbytes))
        for segment, size in reversed(self.segments()):
            if segment.of(self.fingerprint) and size <= most:
                with contextlib.suppress(OSError):  # it is being written, or is gone
                    fd = segment.open(lock=True)
                    try:
                        if segment.is_of(fd, self.fingerprint):
                            os.posix_fallocate(fd, 0, self.segment_bytes)
                            segment.rename(Segment.new(self.path, self.fingerprint, segment.identity, age).path)
                            return segment, fd
                    except OSError:
                        os.close(fd)
                        raise
                    os.close(fd)
        return None

    def adopt(self, segment: Segment) -> tuple[list[Record], bool]:
        """The records of a segment, and whether these are all that it will ever have.

        One that somebody writes tells what its index file lists, if there is one. One whose writer is gone is cut behind its last whole
        record, and sealed. One that isn't of this fingerprint, whatever its name says, has none.
        """
        with self.locked():
            mine = True
            try:
                fd = segment.open(lock=True)
            except BlockingIOError:
                fd, mine = segment.open(), False
            try:
                if not segment.is_of(fd, self.fingerprint):
                    return [], mine
                records = segment.records(fd, self.fingerprint, walk=mine)
                if mine:
                    self._seal(segment, fd, records)
                return records, mine
            finally:
                os.close(fd)

    def _seal(self, segment: Segment, fd: int, records: list[Record]) -> None:
        end = records[-1].end if records else BLOCK
        with contextlib.suppress(OSError):  # a full disk, or one that is only read
            if os.fstat(fd).st_size > end:
                os.ftruncate(fd, end)
            if not segment.index.exists():
                segment.seal(self.fingerprint, records)


class Writer:
    """The segment that a thread appends to."""

    def __init__(self, directory: Directory) -> None:
        self.segment: Segment | None = None
        self.age = 0
        """Of the next segment that it begins, in nanoseconds since 1970."""
        self._directory, self._fd, self._records = directory, -1, list[Record]()

    @property
    def _end(self) -> int:
        return self._records[-1].end if self._records else BLOCK

    def takes(self, nbytes: int) -> bool:
        """Whether a page fits in, and may be found there."""
        there = self.segment is not None and not self.segment.gone
        return there and self._end + record_bytes(nbytes) <= self._directory.segment_bytes

    def begin(self, segment: Segment, fd: int, records: list[Record]) -> None:
        """Append to this one, behind its records."""
        self.segment, self._fd, self._records = segment, fd, records

    def append(self, group: int, key: bytes, page: memoryview) -> Record:
        """Write a page. After an OSError the segment must be sealed."""
        assert self.segment is not None
        record = self.segment.append(self._fd, self._end, group, key, page)
        self._records.append(record)
        return record

    def take_back(self) -> None:
        """Strike the last page out. The next one takes its place, so the index doesn't list it, which may have the same key."""
        assert self.segment is not None
        self.segment.strike(self._records.pop().offset)

    def seal(self) -> None:
        """The segment is finished, and others may use it. What can't be written of its index is walked at the next start."""
        if self.segment is None:
            return
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, self._end)
            self.segment.seal(self._directory.fingerprint, self._records)
        os.close(self._fd)
        self.segment = None
