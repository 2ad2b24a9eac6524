"""Segments: whatever is cut off, flipped or mixed up in a file, a page is right or it is a miss."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.effort import share_of_the_day
from pagerunner.tiers.segments import BLOCK, Direct, Record, Segment, record_bytes

OF = b"f" * 32
HEADER = 311  # bytes of a record's first block that say something
PAGES = [(0, b"a" * 32, b"A" * 300), (1, b"b" * 40, os.urandom(BLOCK)), (0, b"c" * 32, b"C" * 1), (2, b"", b"D" * 5000)]


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[tuple[Segment, int, list[Record]]]:
    """A segment with four pages."""
    made = Segment.new(tmp_path, OF)
    fd = os.open(made.path, os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, made.header(OF), 0)
    records = list[Record]()
    for group, key, page in PAGES:
        records.append(made.append(fd, records[-1].end if records else BLOCK, group, key, memoryview(page)))
    yield made, fd, records
    os.close(fd)


def right(segment: Segment, fd: int, record: Record) -> bool:
    """Whether the page can be read. Fails if it is another one than was written."""
    place = memoryview(bytearray(record.nbytes))
    well = segment.read(fd, record, place)
    assert not well or (record.group, record.key, bytes(place)) in PAGES, record
    return well


def test_records_lie_at_whole_blocks_and_are_found_by_walking(segment: tuple[Segment, int, list[Record]]) -> None:
    made, fd, records = segment
    assert [record.offset for record in records] == [BLOCK, 3 * BLOCK, 5 * BLOCK, 7 * BLOCK]
    assert os.fstat(fd).st_size == records[-1].end == 10 * BLOCK
    assert list(made.walk(fd, BLOCK)) == records
    assert all(right(made, fd, record) for record in records)
    again = Segment.named(made.path)
    assert again is not None and again.identity == made.identity and again.of(OF) and not again.of(b"g" * 32)
    assert made.is_of(fd, OF) and not made.is_of(fd, OF[:8] + b"g" * 24)


def test_a_file_that_was_cut_at_any_byte_has_the_pages_before_the_cut(
    segment: tuple[Segment, int, list[Record]],
) -> None:
    made, fd, records = segment
    full = os.fstat(fd).st_size
    edges = {place + by for place in range(0, full, BLOCK) for by in (-1, 0, 1)}
    for size in sorted({*share_of_the_day(full, 13), *edges} & set(range(full)), reverse=True):
        os.ftruncate(fd, size)
        whole = [record for record in records if record.end <= size]
        assert list(made.walk(fd, BLOCK)) == whole, size
        assert [right(made, fd, record) for record in whole] == [True] * len(whole), size
        assert not any(right(made, fd, record) for record in records if record.offset + BLOCK + record.nbytes > size)


def test_a_flipped_bit_costs_its_page_alone_where_the_index_is_known(
    segment: tuple[Segment, int, list[Record]],
) -> None:
    made, fd, records = segment
    made.seal(OF, records)
    for place in share_of_the_day(os.fstat(fd).st_size, 13):
        [byte] = os.pread(fd, 1, place)
        os.pwrite(fd, bytes([byte ^ 1 << place % 8]), place)
        for record in records:
            at = place - record.offset
            damaged = 0 <= at < HEADER or BLOCK <= at < BLOCK + record.nbytes
            assert right(made, fd, record) is not damaged, (place, record)
        assert made.is_of(fd, OF) is (place >= BLOCK)
        os.pwrite(fd, bytes([byte]), place)
    assert made.records(fd, OF, walk=False) == records


def test_a_damaged_index_says_nothing_and_the_walk_finds_all(segment: tuple[Segment, int, list[Record]]) -> None:
    made, fd, records = segment
    made.seal(OF, records)
    good = made.index.read_bytes()
    for place in share_of_the_day(len(good), 5):
        flipped = bytearray(good)
        flipped[place] ^= 1 << place % 8
        made.index.write_bytes(flipped)
        assert made.records(fd, OF, walk=False) == []
        made.index.write_bytes(good[:place])
        assert made.records(fd, OF, walk=False) == []
    assert made.records(fd, OF, walk=True) == records
    made.index.write_bytes(good)
    assert made.records(fd, b"g" * 32, walk=False) == []
    os.ftruncate(fd, records[-1].offset)  # the index lists more than there is
    assert made.records(fd, OF, walk=True) == records[:-1]


def test_a_walk_goes_on_behind_an_index_that_is_older(segment: tuple[Segment, int, list[Record]]) -> None:
    made, fd, records = segment
    made.seal(OF, records[:2])
    assert made.records(fd, OF, walk=False) == records[:2]
    assert made.records(fd, OF, walk=True) == records


def test_a_record_in_a_wrong_place_or_file_is_a_miss(
    segment: tuple[Segment, int, list[Record]], tmp_path: Path
) -> None:
    made, fd, records = segment
    first = records[0]
    data = os.pread(fd, record_bytes(first.nbytes), first.offset)
    os.pwrite(fd, data, records[-1].end)  # a block that a file system has brought to a wrong place
    assert not right(made, fd, first._replace(offset=records[-1].end))
    assert not right(made, fd, first._replace(key=b"x" * 32))
    assert not right(made, fd, first._replace(group=3))
    assert not right(made, fd, first._replace(nbytes=first.nbytes - 1))
    other = Segment.new(tmp_path, OF)
    os.link(made.path, other.path)
    assert not right(other, fd, first)


def test_an_append_goes_on_where_the_system_wrote_less(
    segment: tuple[Segment, int, list[Record]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, fd, records = segment
    write, read, rng = os.pwritev, os.preadv, random.Random(7)

    def some(fd: int, parts: list[memoryview], offset: int) -> int:
        data = b"".join(parts)
        return os.pwrite(fd, data[: rng.randint(1, len(data))], offset)

    monkeypatch.setattr(os, "pwritev", some)
    record = made.append(fd, records[-1].end, *PAGES[1][:2], memoryview(PAGES[1][2]))
    monkeypatch.setattr(os, "pwritev", write)

    def less(fd: int, parts: list[memoryview], offset: int, flags: int = 0) -> int:
        part = next(part for part in parts if len(part))
        return read(fd, [part[: rng.randint(1, len(part))]], offset)

    monkeypatch.setattr(os, "preadv", less)
    assert right(made, fd, record)
    assert os.fstat(fd).st_size == record.end


@pytest.mark.parametrize("nbytes", [2 * BLOCK, BLOCK + 4])  # the second one isn't whole sectors
@pytest.mark.parametrize("cached", [True, False])
def test_what_the_page_cache_lacks_is_read_past_it(tmp_path: Path, nbytes: int, cached: bool) -> None:
    made = Segment.new(tmp_path, OF)
    with open(made.path, "wb+") as file:
        page, place = os.urandom(nbytes), memoryview(mmap.mmap(-1, nbytes))
        record = made.append(file.fileno(), BLOCK, 0, b"k", memoryview(page))
        os.fdatasync(file.fileno())
        if not cached:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        direct = Direct()
        direct.open(made, file.fileno())
        assert made.read(file.fileno(), record, place, direct) and place == page
        place[:] = bytes(nbytes)
        assert not made.read(file.fileno(), record._replace(key=b"l"), place, direct)
        direct.close()
        assert made.read(file.fileno(), record, place, direct) and place == page


def test_files_of_others_have_no_segment(tmp_path: Path) -> None:
    for name in (
        "lock",
        "x.pages",
        "1-2-3.pages",
        f"{'x' * 20}-{'f' * 16}-{'0' * 32}.pages",
        f"{0:020d}-{'f' * 16}-{'z' * 32}.pages",
        "probe-1",
    ):
        assert Segment.named(tmp_path / name) is None
