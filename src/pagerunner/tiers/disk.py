"""The disk tier: a KeepingStore over segments in a directory (`segments.py`, `directory.py`), with threads of its own.

Each writing thread appends to a segment of its own, so that a file has no holes. A page's key decides which thread writes it: stores of several
ranks, which are given the same keys, have segments with the same pages, and so give up the same ones.

Reading threads take the pages of one number in the order in which they lie on the disk. A file is opened for each read: a segment that somebody has unlinked meanwhile is a miss, one that was renamed is looked for by its identity.

The oldest segment goes when room is needed. Of its pages, those that were read since they were written are copied to the new segment,
up to half of it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from zlib import crc32

import msgspec

from pagerunner.logs import SparingLog
from pagerunner.tiers.directory import Directory, NoRoomError, Writer
from pagerunner.tiers.index import Index, Name
from pagerunner.tiers.probe import read_rate
from pagerunner.tiers.segments import LONGEST_KEY, Direct, Record, Segment, record_bytes
from pagerunner.tiers.stats import StoreStats
from pagerunner.tiers.stores import Page

logger = logging.getLogger(__name__)
READ_THREADS = 8
WRITE_THREADS = 2
_PIECE = 8 * 2**20  # bytes that a thread reads before others may take over
_PROBE = 64 * 2**20
_SCAN_SECONDS = 30.0
_SLOWER = 0.8  # reads with checksums are rarely as fast as the start's probe
_MEASURE_SECONDS = 300.0  # so long after the last measurement a disk that had become slower is measured again
_FINISH_SECONDS = 5.0  # so long a store that is closed writes what it was given
CLOSE_SECONDS = _FINISH_SECONDS + 3.0
"""So long `close` takes at most, on a busy machine."""
_WRITE_SECONDS = 60.0  # nobody waits for a page to be written, but for its place
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN)  # a full disk doesn't pass so soon
_PAUSE_SECONDS = 30.0
_STEADY = 0.7  # how much of the measured rate stays when a number of some size has been read


class _Begun:
    """A number, how many of its pages are left, and the outcomes. `clears`: how often the store had been cleared when it began.

    A segment that is begun for one of its pages has the `age` of the write, whichever thread comes first: so ranks give up segments in one order.
    """

    __slots__ = ("age", "clears", "deadline", "left", "nbytes", "number", "outcomes", "reads", "started")

    def __init__(self, number: int, pages: Sequence[Page], seconds: float, *, reads: bool) -> None:
        self.number, self.left, self.outcomes, self.reads = number, len(pages), [False] * len(pages), reads
        self.nbytes = sum(len(place) for *_, place in pages)
        self.started = time.monotonic()
        self.deadline, self.clears, self.age = self.started + seconds, 0, 0


def _opened(segment: Segment, direct: Direct | None) -> int:
    fd = segment.open()
    if direct is not None:
        direct.open(segment, fd)
    return fd


Piece = tuple[_Begun, list[tuple[int, Page, Segment | None, int]]]
"""Pages of a number, each with its place in it; of a read also its segment and the record's offset."""


class DiskStore:
    """A KeepingStore in a directory below `root`.

    `largest_page` are the bytes of the largest page there will be. What isn't read `seconds` after it was asked for has failed.
    `rate`: the bytes a second that are read, measured at the start if it isn't given. `ready` is set when the index is whole and the rate is known.
    `direct`: what isn't in the page cache is read past it.

    Raises:
        ConfigError: see Directory.
    """

    def __init__(
        self,
        root: Path,
        fingerprint: bytes,
        *,
        max_bytes: int,
        largest_page: int,
        on_end: Callable[[], None] = lambda: None,
        read_threads: int = READ_THREADS,
        write_threads: int = WRITE_THREADS,
        seconds: float = 10.0,
        rate: float | None = None,
        direct: bool = True,
    ) -> None:
        self.directory = Directory(root, fingerprint, max_bytes, largest_page)
        self.ready = threading.Event()
        self._on_end, self._seconds, self._direct = on_end, seconds, direct
        # of what is written now, in nanoseconds since 1970; the youngest of all, though a clock may have been ahead
        self._ages = max(time.time_ns(), self.directory.newest + 1) - time.monotonic_ns()
        self._lock = threading.Lock()
        self._index = Index()
        self._cleared = Index()
        self._hot: set[Name] = set()
        self._copying: set[Name] = set()  # of segments that are given up; `forget` takes them out
        self._known: dict[bytes, tuple[Segment, bool]] = {}
        self._ended: deque[tuple[int, list[bool]]] = deque()
        self._stats = StoreStats(read_rate=rate or 0.0)
        self._queued = 0  # bytes to read
        self._busy_since, self._busy_bytes = 0.0, 0
        self._reading: dict[int, float] = {}  # threads in a read, and since when
        self._closing, self._look = threading.Event(), threading.Event()
        self._cancelled = 0.0  # what was begun until then needn't be done
        self._end = math.inf  # of writing, when the store is being closed
        self._passed_over: set[bytes] = set()  # identities of segments that nothing is found in any more
        self._wrong: set[tuple[bytes, int]] = set()  # records, by segment and offset, that couldn't be used
        # how often clear() was called, and for how many of these `_passed_over` is complete
        self._clears = self._hidden = 0
        self._unmeasured = False
        self._pause_until, self._pauses = 0.0, SparingLog(logger, seconds=600)
        self._blind = SparingLog(logger, seconds=600)
        self._first_rate, self._measured = rate or 0.0, time.monotonic()
        self._probe_bytes = min(_PROBE, self.directory.segment_bytes)
        self._to_read: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        self._to_write: list[queue.SimpleQueue[Piece | None]] = [queue.SimpleQueue() for _ in range(write_threads)]
        self._to_strike: deque[tuple[Segment, int]] = deque()  # before any page is written: a crash would bring it back
        self._striking = threading.Lock()  # a thread that finds the line empty waits for who is at it
        work: list[tuple[str, Callable[[], None]]] = [("keep", self._keep)]
        work += [("read", self._read_pieces)] * read_threads
        work += [("write", partial(self._write_pieces, line)) for line in self._to_write]
        self._threads = [threading.Thread(target=run, name=f"disk-{name}", daemon=True) for name, run in work]
        self._readers = read_threads
        for thread in self._threads:
            thread.start()

    # -- PageStore

    def find(self, group: int, keys: Sequence[bytes]) -> list[bool]:
        """See PageStore."""
        found = map(self._index.get, ((group, key) for key in keys))
        return [entry is not None and not entry[0].gone for entry in found]

    def read(self, number: int, pages: Sequence[Page]) -> None:
        """See PageStore."""
        begun = _Begun(number, pages, self._seconds, reads=True)
        found, missing = list[tuple[int, Page, Segment | None, int]](), list[int]()
        for at, page in enumerate(pages):
            segment, offset = self._index.get(page[:2], (None, 0))
            if segment is None or segment.gone or self._closing.is_set():
                missing.append(at)
            else:
                found.append((at, page, segment, offset))
        with self._lock:
            if not self._queued:
                self._busy_since, self._busy_bytes = begun.started, 0
            self._queued += begun.nbytes
        found.sort(key=lambda one: (one[2].path.name if one[2] else "", one[3]))
        piece, size = list[tuple[int, Page, Segment | None, int]](), 0
        for one in found:
            if piece and (one[2] is not piece[-1][2] or size >= _PIECE):
                self._to_read.put((begun, piece))
                piece, size = [], 0
            piece.append(one)
            size += len(one[1][2])
        if piece:
            self._to_read.put((begun, piece))
        self._settle(begun, missing, well=False)

    def write(self, number: int, pages: Sequence[Page]) -> None:
        """See PageStore. A page that is there already isn't written again."""
        begun = _Begun(number, pages, _WRITE_SECONDS, reads=False)
        begun.clears, begun.age = self._clears, self._ages + time.monotonic_ns()
        closed = self._closing.is_set()
        for at, page in enumerate(pages if not closed else ()):
            self._to_write[crc32(page[1]) % len(self._to_write)].put((begun, [(at, page, None, 0)]))
        self._settle(begun, range(len(pages)) if closed else [], well=False)

    def ended(self) -> list[tuple[int, list[bool]]]:
        """See PageStore."""
        ended = list[tuple[int, list[bool]]]()
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def seconds(self, nbytes: int) -> float:
        """See PageStore."""
        rate, now = self._stats.read_rate, time.monotonic()
        stuck = any(now - since > self._seconds for since in list(self._reading.values()))
        return math.inf if self._closing.is_set() or stuck or not rate else (self._queued + nbytes) / rate

    def close(self) -> None:
        """See PageStore. What was to be written still is, for some seconds. Then segments are sealed, so that the next start needn't walk them."""
        self._end = time.monotonic() + _FINISH_SECONDS
        self._closing.set()
        self._look.set()
        for line in [self._to_read] * self._readers + self._to_write:
            line.put(None)
        for thread in self._threads:
            thread.join(max(self._end + 1 - time.monotonic(), 0))

    # -- KeepingStore

    def forget(self, group: int, keys: Sequence[bytes]) -> None:
        """See KeepingStore."""
        for key in keys:
            for index in (self._index, self._cleared):
                with self._lock:
                    self._copying.discard((group, key))
                    found = index.get((group, key))
                    if found is not None:
                        del index[group, key]
                        self._wrong.add((found[0].identity, found[1]))  # a look may list it until it is struck
                if found is not None:
                    self._to_strike.append(found)
                    for line in self._to_write:
                        line.put((_Begun(0, [], 0.0, reads=False), []))  # for a thread that waits

    def clear(self) -> None:
        """See KeepingStore. What is on its way isn't kept, and what the next look lists was there before."""
        with self._lock:
            self._clears += 1
            self._passed_over.update(self._known)
            self._cleared.take(self._index)  # which may turn out to be wrong
            self._hot = set()
        self._look.set()

    def cancel(self) -> None:
        """See KeepingStore."""
        self._cancelled = time.monotonic()

    def changes(self) -> tuple[list[Name], list[Name]]:
        """The pages that are found since the last call, and those that aren't any more. The first call gives all that are found."""
        with self._lock:
            touched = self._index if self._index.touched is None else self._index.touched
            there = [name for name in touched if name in self._index]
            gone = [name for name in touched if name not in self._index]
            self._index.touched = set()
        return there, gone

    def stats(self) -> StoreStats:
        """A copy of the figures as they are now."""
        with self._lock:
            return msgspec.structs.replace(self._stats, pages=len(self._index), bytes=self.directory.bytes)

    # -- what threads tell

    def _settle(self, begun: _Begun, places: Sequence[int], *, well: bool) -> None:
        """These pages of a number have ended."""
        with self._lock:
            for at in places:
                begun.outcomes[at] = well
            begun.left -= len(places)
            last = begun.left == 0
            if last:
                begun.left = -1
                self._ended.append((begun.number, begun.outcomes))
                if begun.reads:
                    self._queued -= begun.nbytes
                    self._measure(begun)
        if last:
            self._on_end()

    def _measure(self, begun: _Begun) -> None:
        """A number was read. The rate follows what was read while there was always something to read."""
        now = time.monotonic()
        self._busy_bytes += begun.nbytes if all(begun.outcomes) else 0
        if (self._queued and now - self._busy_since < 1) or self._busy_bytes < _PIECE:
            return
        rate = self._busy_bytes / max(now - self._busy_since, 1e-6)
        self._stats.read_rate += (1 - _STEADY) * (rate - self._stats.read_rate)
        self._busy_since, self._busy_bytes, self._measured = now, 0, now

    def _late(self, begun: _Begun) -> bool:
        now = time.monotonic()
        over = begun.reads and self._closing.is_set()
        return over or begun.started <= self._cancelled or now > min(begun.deadline, self._end)

    # -- reading

    def _read_pieces(self) -> None:
        me, direct = threading.get_ident(), Direct() if self._direct else None
        while (piece := self._to_read.get()) is not None:
            begun, pages = piece
            self._reading[me] = time.monotonic()
            self._read_piece(begun, pages, me, direct)
            del self._reading[me]

    def _read_piece(
        self, begun: _Begun, pages: list[tuple[int, Page, Segment | None, int]], me: int, direct: Direct | None
    ) -> None:
        segment = pages[0][2]
        assert segment is not None
        fd = -1 if self._late(begun) else self._open(segment, direct)
        for at, (group, key, place), _, offset in pages:
            well = False
            if fd >= 0 and not self._late(begun):
                self._reading[me] = time.monotonic()
                well = self._read_page(fd, segment, Record(group, key, len(place), offset), place, direct)
            self._settle(begun, [at], well=well)
        if fd >= 0:
            os.close(fd)
        if direct is not None:
            direct.close()

    def _open(self, segment: Segment, direct: Direct | None) -> int:
        """A descriptor to read a segment by; -1 if it is gone. A writing thread or another engine that goes on with it may have just renamed it."""
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileNotFoundError):
                return _opened(segment, direct)
            self._look.set()
            with self.directory.found_again(segment.identity) as there:
                return -1 if there is None else _opened(there, direct)
        return -1

    def _read_page(self, fd: int, segment: Segment, record: Record, place: memoryview, direct: Direct | None) -> bool:
        said = "its checksum or its name is wrong"
        try:
            well = segment.read(fd, record, place, direct)
        except (OSError, ValueError) as error:  # ValueError: the place was given back
            well, said = False, str(error)
        name = record.group, record.key
        with self._lock:
            if well:
                self._hot.add(name)
                self._stats.reads += 1
                self._stats.read_bytes += record.nbytes
            else:
                self._stats.failures += 1
                self._wrong.add((segment.identity, record.offset))
                if self._index.get(name) == (segment, record.offset):
                    del self._index[name]
            first = self._stats.failures == 1 and not well
        if first:
            logger.warning(
                "A page of the disk tier can't be used, and is forgotten: %s at byte %d: %s. Others of this kind are only counted.",
                segment.path,
                record.offset,
                said,
            )
        return well

    # -- writing

    def _write_pieces(self, line: queue.SimpleQueue[Piece | None]) -> None:
        writer = Writer(self.directory)
        while (piece := line.get()) is not None:
            begun, pages = piece
            self._strike_all()
            for at, (group, key, place), *_ in pages:
                well, writer.age = False, begun.age + at
                try:
                    late = self._late(begun)
                    well = self._skip() if late else self._write_page(writer, group, key, place, begun.clears)
                except Exception:  # the thread goes on, with another segment
                    logger.exception("The disk tier couldn't write a page")
                    writer.seal()
                    self._skip()
                self._settle(begun, [at], well=well)
        writer.seal()

    def _strike_all(self) -> None:
        with self._striking:
            while self._to_strike:
                try:
                    self._strike(*self._to_strike[0])
                except OSError as error:
                    if isinstance(error, TimeoutError) or error.errno in _PASSING:  # again before the next page
                        return
                    path = self._to_strike[0][0].path
                    logger.warning(
                        "The disk tier can't strike a forgotten page out of %s: %s. It may be found at the next start.",
                        path,
                        error,
                    )
                self._to_strike.popleft()

    def _strike(self, segment: Segment, offset: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            segment.strike(offset)
            return
        with self.directory.found_again(segment.identity) as there:
            if there is not None:
                there.strike(offset)

    def _skip(self) -> bool:
        with self._lock:
            self._stats.skipped += 1
        return False

    def _write_page(self, writer: Writer, group: int, key: bytes, place: memoryview, clears: int) -> bool:
        if self.find(group, [key])[0]:
            return True
        try:
            if (
                self._stats.read_only
                or time.monotonic() < self._pause_until
                or len(key) > LONGEST_KEY
                or clears != self._clears
            ):
                raise NoRoomError
            if not writer.takes(len(place)):
                self._next_segment(writer, len(place))
            record = writer.append(group, key, place)
            if not self._written(writer, record, clears):
                writer.take_back()  # nobody could forget it, as it isn't in the index
                raise NoRoomError
        except (NoRoomError, TimeoutError):
            return self._skip()
        except OSError as error:
            writer.seal()
            self._stop_writing(error)
            return False
        return True

    def _stop_writing(self, error: OSError) -> None:
        self._skip()
        if error.errno in _PASSING:
            self._pause_until = time.monotonic() + _PAUSE_SECONDS
            self._pauses.warn(
                "The disk tier writes nothing for %g seconds: %s. Then it tries again; pages that are there are still read.",
                _PAUSE_SECONDS,
                error,
            )
            return
        with self._lock:
            first = not self._stats.read_only
            self._stats.read_only = str(error)
        if first:
            logger.warning(
                "The disk tier writes no more until the engine starts again: %s. Pages that are there are still read.",
                error,
            )

    def _next_segment(self, writer: Writer, nbytes: int) -> None:
        """Make room, and begin a segment that takes such a page, or go on with one. Then copy what was hot in those that were given up."""
        writer.seal()
        clears = self._clears
        with contextlib.ExitStack() as stack:
            hot = list[tuple[Segment, int, Record]]()
            with self.directory.locked():
                victims = self.directory.victims()
                for _, source in victims:
                    stack.callback(os.close, source)
                for victim, source in victims:
                    hot += [(victim, source, record) for record in self._drop(victim, source)]
                    victim.unlink()
                segment, fd = self.directory.unfinished(nbytes, writer.age) or self.directory.create(writer.age)
            records = segment.records(fd, self.directory.fingerprint, walk=True)
            writer.begin(self._found(segment, records, clears, whole=False), fd, records)
            for victim, source, record in hot:
                place = memoryview(bytearray(record.nbytes))
                if writer.takes(record_bytes(record.nbytes) + nbytes) and victim.read(source, record, place):
                    copy = writer.append(record.group, record.key, place)
                    if not self._written(writer, copy, clears, copied=True):
                        writer.take_back()
                self._copying.discard((record.group, record.key))

    def _written(self, writer: Writer, record: Record, clears: int, *, copied: bool = False) -> bool:
        """A page is on the disk. False if it isn't found there: the store was cleared meanwhile, or a copied page forgotten or written elsewhere."""
        assert writer.segment is not None
        name = record.group, record.key
        with self._lock:
            if clears != self._clears or (copied and (name not in self._copying or name in self._index)):
                self._wrong.add((writer.segment.identity, record.offset))
                return False
            self._index[name] = writer.segment, record.offset
            self._wrong.discard((writer.segment.identity, record.offset))
            self._stats.pages_copied += copied
            self._stats.writes += not copied
            self._stats.write_bytes += 0 if copied else record.nbytes
        return True

    def _drop(self, victim: Segment, fd: int) -> list[Record]:
        """Forget a segment that is about to be unlinked. Returns what is worth copying: at most half of a segment in all."""
        records, kept, room = list[Record](), [], self.directory.segment_bytes // 2
        with contextlib.suppress(OSError):  # it can't be read, which is no reason to keep it
            if victim.is_of(fd, self.directory.fingerprint):
                records = victim.records(fd, self.directory.fingerprint, walk=True)
        with self._lock:
            self._stats.segments_dropped += 1
            known, _ = self._known.pop(victim.identity, (victim, True))
            for record in records:
                name = record.group, record.key
                fits = record_bytes(record.nbytes) <= room
                if name in self._hot and fits and self._index.get(name) == (known, record.offset):
                    room -= record_bytes(record.nbytes)
                    kept.append(record)
                    self._copying.add(name)
            self._lose(known)
        return kept

    def _lose(self, segment: Segment) -> None:
        """A segment is gone."""
        segment.gone = True
        self._cleared.lose(segment)
        self._hot.difference_update(self._index.lose(segment))

    def _lose_all(self) -> None:
        """The directory is gone. If it comes back, a look finds what it holds then."""
        with self._lock:
            while self._known:
                self._lose(self._known.popitem()[1][0])
            self.directory.bytes = 0

    # -- looking after the directory

    def _keep(self) -> None:
        """Find what there is, measure the disk, and from time to time see what other engines have done."""
        while not self._closing.is_set():
            self._look.clear()
            try:
                self._scan()
            except OSError as error:
                self._blind.warn("The disk tier can't look through %s: %s.", self.directory.path, error)
                if isinstance(error, FileNotFoundError | NotADirectoryError):  # it is unmounted, or was removed
                    self._lose_all()
            self._probe()
            self.ready.set()
            self._look.wait(_SCAN_SECONDS)

    def _probe(self) -> None:
        """Measure how fast the disk reads. On a full disk that takes pages that are there, and while there are none nothing is to be read.

        A disk that has become slower is measured again when nothing was read for some time: what doesn't pay is never read, so reads wouldn't tell.
        """
        known, now = self._stats.read_rate, time.monotonic()
        if known and (known >= _SLOWER * self._first_rate or now - self._measured < _MEASURE_SECONDS):
            return
        self._measured = now
        with self._lock:
            there = [segment.path for segment, whole in self._known.values() if whole]
        try:
            self._stats.read_rate = rate = read_rate(self.directory.path, self._probe_bytes, self._readers, there)
            self._first_rate = self._first_rate or rate
        except OSError as error:
            first, self._unmeasured = not (self._unmeasured or known), True
            if first:
                logger.warning(
                    "The disk tier can't measure how fast %s reads, and reads nothing from it until it can: %s.",
                    self.directory.path,
                    error,
                )

    def _scan(self) -> None:
        """Read the indices of segments that aren't known whole, and forget those that are gone."""
        clears, before = self._clears, set(self._known)  # a segment that is begun from now on may not be listed
        # a list of all, none just renamed
        with self.directory.locked() if clears != self._hidden else contextlib.nullcontext():
            there = {segment.identity: segment for segment, _ in self.directory.segments()}
        with self._lock:
            if clears not in (self._hidden, self._clears):
                return  # cleared again: the next look is at once
            if clears != self._hidden:
                self._passed_over.update(there)
                self._hidden = clears
        for identity, found in there.items():
            segment, whole = self._known.get(identity, (found, False))
            if self._closing.is_set() or clears != self._clears:
                return
            if segment.path != found.path:  # an engine goes on with it
                segment.path, whole = found.path, False
            if not whole and identity not in self._passed_over and segment.of(self.directory.fingerprint):
                with contextlib.suppress(OSError):
                    records, whole = self.directory.adopt(segment)
                    self._found(segment, records, clears, whole=whole)
        if lost := before - there.keys():
            with self.directory.locked():  # one that was just renamed may have been listed under neither name
                lost -= {segment.identity for segment, _ in self.directory.segments()}
        with self._lock:
            for identity in lost & self._known.keys():
                self._lose(self._known.pop(identity)[0])

    def _found(self, segment: Segment, records: Sequence[Record], clears: int, *, whole: bool) -> Segment:
        """A segment has these records, and if it is `whole` never others. Returns the object that stands for it.

        They aren't found if the store has been cleared since they were there.
        """
        with self._lock:
            known, _ = self._known.get(segment.identity, (segment, whole))
            known.path = segment.path
            self._known[segment.identity] = known, whole
            if not clears == self._clears == self._hidden or segment.identity in self._passed_over:
                return known
            last = {(record.group, record.key): record for record in records}  # what is there twice was forgotten first
            for name, record in last.items():
                if (known.identity, record.offset) in self._wrong:
                    continue
                if name not in self._index or self._index[name][0].gone:
                    self._index[name] = known, record.offset
        return known
