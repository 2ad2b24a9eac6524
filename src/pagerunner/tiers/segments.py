"""The files of the disk tier: segments, which are only appended to, and their index files.

A segment begins with a header: magic, format version, byte order, fingerprint, and an identity of its own. Records follow, each at a
multiple of 4,096 bytes: a block with the record's header, then the page's bytes, then zeros up to the next block. Example: a page of
2 MiB takes 2,101,248 bytes.

A record is believed if the checksum of its header is right, and the header names this segment, this place, and the page that was asked for.
Its page is believed if the page's checksum, which the header holds, is right too. So whatever a crash, a full disk or a fault of the
hardware leaves in a file is a miss. Nothing is flushed page by page: a page that was lost is a miss as well.

Whoever appends to a segment has its lock (`flock`). A sealed segment has an index file, which appears whole or not at all. An index
only says where to look. A segment without one is walked from header to header, and what is behind the first wrong header doesn't count.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

VERSION = 1
BLOCK = 4096
LONGEST_KEY = 255
NOBODY = 2**32 - 1
"""The group of records that were struck out."""
_SEGMENT = struct.Struct("<8sI6s32s16s")
_RECORD = struct.Struct("<8s16sQIIQI255s")
_INDEX = struct.Struct("<8sI32s16sQQ")
_ENTRY = struct.Struct("<IIQQ")
_CRC = struct.Struct("<I")
_PAGES, _PAGE, _LIST = b"PGRSEGMT", b"PGRRECRD", b"PGRINDEX"
_ZEROS = bytes(BLOCK)


class Record(NamedTuple):
    """A page in a segment: the record begins at `offset`."""

    group: int
    key: bytes
    nbytes: int
    offset: int

    @property
    def end(self) -> int:
        """Where the next record begins."""
        return self.offset + record_bytes(self.nbytes)


def record_bytes(nbytes: int) -> int:
    """What a page of so many bytes takes in a segment."""
    return BLOCK + -(-nbytes // BLOCK) * BLOCK


class Segment:
    """A file of pages. `gone`: it was unlinked, so nothing in it is there."""

    __slots__ = ("gone", "identity", "path")

    def __init__(self, path: Path, identity: bytes) -> None:
        self.path, self.identity, self.gone = path, identity, False

    @classmethod
    def named(cls, path: Path) -> Self | None:
        """The segment that a path's name says, None for another file."""
        parts = path.name.removesuffix(".pages").split("-")
        if not path.name.endswith(".pages") or [len(part) for part in parts] != [20, 16, 32]:
            return None
        with contextlib.suppress(ValueError):
            return cls(path, bytes.fromhex(parts[2])) if parts[0].isdecimal() else None
        return None

    @classmethod
    def new(cls, directory: Path, fingerprint: bytes, identity: bytes | None = None, age: int | None = None) -> Self:
        """A name for a segment that begins now, or is of another age. Names sort by age."""
        identity = identity or os.urandom(16)
        name = f"{time.time_ns() if age is None else age:020d}-{fingerprint[:8].hex()}-{identity.hex()}.pages"
        return cls(directory / name, identity)

    @property
    def age(self) -> int:
        """When it was begun, in nanoseconds since 1970."""
        return min(int(self.path.name[:20]), 2**63)

    @property
    def index(self) -> Path:
        """Where its index file is."""
        return self.path.with_suffix(".index")

    def of(self, fingerprint: bytes) -> bool:
        """Whether the name says so. The header decides."""
        return self.path.name.split("-")[1] == fingerprint[:8].hex()

    def open(self, *, lock: bool = False) -> int:
        """A file descriptor, with the lock on it if wanted. Raises BlockingIOError if somebody else has the lock."""
        how = os.O_RDWR if lock else os.O_RDONLY | os.O_NONBLOCK  # a pipe in its place would wait for a writer
        fd = os.open(self.path, how | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if lock:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def unlink(self) -> None:
        """Remove it and its index."""
        self.gone = True
        for path in (self.path, self.index):
            path.unlink(missing_ok=True)

    def rename(self, path: Path) -> None:
        """Give it another name. Its index goes: whoever has the lock makes it again."""
        os.rename(self.path, path)
        self.index.unlink(missing_ok=True)
        self.path = path

    def header(self, fingerprint: bytes) -> bytes:
        """The segment's first block."""
        fields = _SEGMENT.pack(_PAGES, VERSION, sys.byteorder.encode(), fingerprint, self.identity)
        return (fields + _CRC.pack(zlib.crc32(fields))).ljust(BLOCK, b"\0")

    def read(self, fd: int, record: Record, place: memoryview, direct: Direct | None = None) -> bool:
        """Fill the place with the record's page. False if it isn't certain that this is the page.

        With `direct`, what the page cache doesn't hold is read past it.
        """
        head = memoryview(bytearray(BLOCK)) if direct is None else direct.head
        fill = _fill if direct is None else direct.fill
        if fill(fd, [head, place], record.offset) < BLOCK + len(place):
            return False
        found = self._parse(head, record.offset)
        return found is not None and found[0] == record and found[1] == zlib.crc32(place)

    def walk(self, fd: int, start: int = BLOCK) -> Iterator[Record]:
        """The records from `start` on, up to the first that isn't whole. Pages aren't read."""
        size = os.fstat(fd).st_size
        while start + BLOCK <= size:
            head = bytearray(BLOCK)
            _fill(fd, [memoryview(head)], start)
            found = self._parse(head, start)
            if found is None or found[0].end > size:
                return
            yield found[0]
            start = found[0].end

    def is_of(self, fd: int, fingerprint: bytes) -> bool:
        """Whether the file's header says that it is this segment, of this fingerprint, version and byte order."""
        return os.pread(fd, BLOCK, 0) == self.header(fingerprint)

    def records(self, fd: int, fingerprint: bytes, *, walk: bool) -> list[Record]:
        """What the index file lists, and what a walk behind that finds if wanted."""
        found = self._listed(fingerprint, os.fstat(fd).st_size)
        if walk:
            found += self.walk(fd, found[-1].end if found else BLOCK)
        return found

    def append(self, fd: int, offset: int, group: int, key: bytes, page: memoryview) -> Record:
        """Write a record at the end. After an error the file may have any part of it."""
        record = Record(group, key, len(page), offset)
        parts: list[bytes | memoryview] = [self._head(record, zlib.crc32(page)), page, _ZEROS[: -len(page) % BLOCK]]
        while any(map(len, parts)):
            written = os.pwritev(fd, parts, offset)
            offset += written
            for at, part in enumerate(parts):
                parts[at] = memoryview(part)[written:]
                written = max(written - len(part), 0)
        return record

    def strike(self, offset: int) -> None:
        """Give the record there the name of no page. Those behind it are still found by walking."""
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            found = self._parse(os.pread(fd, BLOCK, offset), offset)
            if found is not None:
                os.pwrite(fd, self._head(found[0]._replace(group=NOBODY, key=b""), 0), offset)
        finally:
            os.close(fd)

    def seal(self, fingerprint: bytes, records: Sequence[Record]) -> None:
        """Write the index file. It appears whole: written beside, flushed, then renamed."""
        head = _INDEX.pack(_LIST, VERSION, fingerprint, self.identity, len(records), records[-1].end if records else 0)
        entries = [_ENTRY.pack(r.group, len(r.key), r.nbytes, r.offset) + r.key for r in records]
        data = b"".join([head, *entries])
        beside = self.index.with_suffix(".writing")
        try:
            with open(beside, "wb") as file:
                file.write(data + _CRC.pack(zlib.crc32(data)))
                file.flush()
                os.fsync(file.fileno())
            os.rename(beside, self.index)
        except OSError:
            beside.unlink(missing_ok=True)
            raise
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _head(self, record: Record, crc: int) -> bytes:
        group, key, nbytes, offset = record
        fields = _RECORD.pack(_PAGE, self.identity, offset, group, len(key), nbytes, crc, key)
        return (fields + _CRC.pack(zlib.crc32(fields))).ljust(BLOCK, b"\0")

    def _listed(self, fingerprint: bytes, size: int) -> list[Record]:
        """What the index file says; nothing if it is damaged, or of another segment."""
        try:
            data = self.index.read_bytes()
        except OSError:
            return []
        body, found, at = data[: -_CRC.size], list[Record](), _INDEX.size
        if len(body) < at or _CRC.pack(zlib.crc32(body)) != data[-_CRC.size :]:
            return []
        magic, version, of, identity, count, end = _INDEX.unpack_from(body)
        if (magic, version, of, identity) != (_LIST, VERSION, fingerprint, self.identity) or end > size:
            return []
        for _ in range(count):
            group, length, nbytes, offset = _ENTRY.unpack_from(body, at)
            at += _ENTRY.size + length
            found.append(Record(group, body[at - length : at], nbytes, offset))
        return found

    def _parse(self, head: bytes | bytearray | memoryview, offset: int) -> tuple[Record, int] | None:
        """The record whose header this is, and its page's checksum."""
        if len(head) < BLOCK or _CRC.unpack_from(head, _RECORD.size)[0] != zlib.crc32(memoryview(head)[: _RECORD.size]):
            return None
        magic, identity, place, group, length, nbytes, crc, key = _RECORD.unpack_from(head)
        if (magic, identity, place) != (_PAGE, self.identity, offset):
            return None
        return Record(group, key[:length], nbytes, offset), crc


class Direct:
    """Reads of one thread that take from the page cache what is there, and the rest from the disk without a copy (O_DIRECT).

    The disk wants addresses and sizes in whole sectors. Where it refuses, the page cache is filled after all.
    """

    def __init__(self) -> None:
        self.head = memoryview(mmap.mmap(-1, BLOCK))  # at the beginning of a page of memory
        self._fd = -1

    def open(self, segment: Segment, fd: int) -> None:
        """The file that is read next, which `fd` is by way of the page cache. Not every file system has such files."""
        self.close()
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # to ask the page cache reads nothing ahead
            self._fd = os.open(segment.path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW)

    def close(self) -> None:
        """The file isn't read any more."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def fill(self, fd: int, parts: list[memoryview], offset: int) -> int:
        """As `_fill`."""
        if self._fd >= 0 and not self._cached(fd, offset + BLOCK):
            with contextlib.suppress(OSError):
                return _fill(self._fd, list(parts), offset)
        return _fill(fd, parts, offset)

    def _cached(self, fd: int, offset: int) -> bool:
        """Whether the page cache has what is there. It is asked of one block, as asking may read."""
        try:
            return os.preadv(fd, [self.head], offset, os.RWF_NOWAIT) > 0
        except OSError:
            return False


def _fill(fd: int, parts: list[memoryview], offset: int) -> int:
    """Read into all parts; how many bytes there were, fewer only at the file's end."""
    total = 0
    while any(map(len, parts)):
        count = os.preadv(fd, parts, offset + total)
        if count == 0:
            break
        total += count
        for at, part in enumerate(parts):
            parts[at] = part[count:]
            count = max(count - len(part), 0)
    return total
