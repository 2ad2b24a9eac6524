"""The disk tier: pages outlive the engine, files stay within their bound, and every fault is a miss."""

from __future__ import annotations

import errno
import logging
import math
import os
import random
import shutil
import threading
import time
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from helpers.disk_pages import OF, SIZES, crashed, files, found, key_of, opened, outcomes, page_of, read, write
from helpers.effort import effort
from helpers.patience import LONG, until
from pagerunner.errors import ConfigError
from pagerunner.tiers import directory, disk
from pagerunner.tiers.directory import Directory
from pagerunner.tiers.disk import DiskStore
from pagerunner.tiers.index import Index
from pagerunner.tiers.segments import Record, Segment

SMALL = 8 * 32 * 1024  # segments of 32 KiB: three pages of 12 KiB of disk do not fit, two do


def test_pages_are_there_after_a_restart(root: Path, store: DiskStore) -> None:
    assert write(store, range(20)) == [True] * 20
    assert write(store, range(5), group=1) == [True] * 5
    store.close()
    assert files(root, ".index")
    again = opened(root)
    assert found(again, range(25)) == list(range(20))
    assert read(again, range(20)) == [True] * 20
    assert read(again, range(5), group=1) == [True] * 5
    stats = again.stats()
    assert (stats.pages, stats.reads, stats.failures, stats.writes) == (25, 25, 0, 0)
    assert stats.read_bytes == 20 * SIZES[0] + 5 * SIZES[1]
    again.close()


def test_pages_are_there_after_a_crash_and_the_next_start_seals_them(
    root: Path, store: DiskStore, tmp_path: Path
) -> None:
    write(store, range(20))
    left = crashed(root, tmp_path / "left")
    assert not files(left, ".index")
    again = opened(left)
    assert read(again, range(20)) == [True] * 20
    assert len(files(left, ".index")) == len(files(left))
    assert sum(path.stat().st_size for path in files(left)) < 20 * 3 * 4096 + 3 * 4096  # what wasn't used is given back
    again.close()


def test_a_page_is_written_once(store: DiskStore) -> None:
    write(store, [1, 2])
    assert write(store, [1, 2, 3]) == [True] * 3
    assert store.stats().writes == 3


def test_stores_that_are_given_the_same_pages_have_the_same_segments_of_the_same_ages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of two ranks: each gives up the oldest segment, and a page counts that both have. Another thread is slow on each."""
    kept: list[list[set[int]]] = []
    usual = Segment.append
    for rank in range(2):

        def slow(*given: Any, rank: int = rank) -> Record:
            time.sleep(0.005 * (crc32(given[4]) % 2 == rank))
            return usual(*given)

        monkeypatch.setattr(Segment, "append", slow)
        store = opened(tmp_path / str(rank), max_bytes=2 * SMALL)
        assert all(write(store, range(20)))
        store.close()
        of_names = {(0, key_of(number)): number for number in range(20)}
        in_files: dict[str, set[int]] = {}
        for name, (segment, _) in store._index.items():
            in_files.setdefault(segment.path.name, set()).add(of_names[name])
        kept.append([in_files[name] for name in sorted(in_files)])
    assert kept[0] == kept[1] and len(kept[0]) > 3


def test_a_page_that_is_read_outlives_those_that_are_not(root: Path) -> None:
    store = opened(root, max_bytes=SMALL)
    write(store, [0, 1])
    for number in range(2, 60):
        assert read(store, [0]) == [True], number
        write(store, [number])
    assert found(store, [0, 1]) == [0]
    assert store.stats().pages_copied >= 2
    assert sum(path.stat().st_size for path in files(root)) <= SMALL
    store.close()


def test_many_short_lives_leave_few_files(root: Path) -> None:
    for number in range(10):
        store = opened(root)
        assert read(store, range(number)) == [True] * number
        write(store, [number])
        store.close()
    assert len(files(root)) <= 2  # one for each thread that writes


def test_pages_are_read_while_the_store_goes_on_with_their_segment(
    root: Path, store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The segment has another name then, and for a moment the index has the old one."""
    write(store, range(6))
    store.close()
    usual, renamed, go_on = Segment.records, threading.Event(), threading.Event()

    def slow(segment: Segment, *given: Any, **named: Any) -> list[Record]:
        if threading.current_thread().name == "disk-write":
            renamed.set()
            assert go_on.wait(LONG)
        return usual(segment, *given, **named)

    monkeypatch.setattr(Segment, "records", slow)
    again = opened(root)
    again.write(1, [(0, key_of(6), memoryview(page_of(6)))])
    assert renamed.wait(LONG)
    try:
        assert read(again, range(6)) == [True] * 6
    finally:
        go_on.set()
    assert outcomes(again) == [True]
    again.close()


def test_a_segment_that_is_renamed_by_another_store_is_read_and_one_that_is_gone_is_a_miss(
    root: Path, store: DiskStore
) -> None:
    write(store, range(6))
    store.close()
    first, other = opened(root), opened(root)
    assert read(first, range(6)) == [True] * 6
    write(other, [6])  # it goes on with a segment, which has another name then
    assert read(first, range(6)) == [True] * 6
    for path in files(root):
        path.unlink()
    assert read(first, range(6)) == [False] * 6
    until(lambda: found(first, range(6)) == [])
    first.close()
    other.close()


def test_the_engine_waits_for_no_look_at_the_directory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, passes = opened(root, max_bytes=SMALL), list[int]()
    write(store, range(6))
    usual = Index.items
    monkeypatch.setattr(Index, "items", lambda index: passes.append(len(index)) or usual(index))
    monkeypatch.setattr(Index, "__iter__", lambda index: passes.append(len(index)) or iter(list(index.keys())))
    store._scan()
    files(root)[0].unlink()
    store._scan()
    assert not passes, "goes over all pages of a disk, of which there may be a million"
    assert store.stats().pages == len(found(store, range(6))) < 6
    with store._lock:
        thread = threading.Thread(target=store.ended, daemon=True)
        thread.start()
        thread.join(LONG)
        assert not thread.is_alive(), "each step asks what has ended"
    store.close()


@pytest.mark.parametrize("cleared", [False, True])
def test_a_file_that_cannot_be_read_when_it_is_given_up_takes_its_pages_along(
    root: Path, monkeypatch: pytest.MonkeyPatch, cleared: bool
) -> None:
    store = opened(root, max_bytes=SMALL)
    write(store, range(10))
    if cleared:
        store.clear()
        until(lambda: store._hidden == 1)

    def broken(*_: object) -> bool:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Segment, "is_of", broken)
    monkeypatch.setattr(Directory, "unfinished", lambda *_: None)
    assert all(write(store, range(20, 60)))
    there = found(store, range(60))
    assert store.stats().pages == len(there) < 16 and not set(there) & set(range(10))
    assert not store._cleared
    store.close()


def test_another_fingerprint_reads_nothing_and_both_share_the_bound(root: Path) -> None:
    ours = opened(root, max_bytes=SMALL)
    write(ours, range(4))
    ours.close()
    near = OF[:8] + b"g" * 24  # its files' names look like ours
    for fingerprint in (b"g" * 32, near):
        theirs = opened(root, max_bytes=SMALL, fingerprint=fingerprint)
        assert found(theirs, range(4)) == []
        assert read(theirs, range(4)) == [False] * 4
        assert write(theirs, [100]) == [True]
        theirs.close()
    again = opened(root, max_bytes=SMALL)
    assert found(again, [*range(4), 100]) == list(range(4))
    again.close()
    theirs = opened(root, max_bytes=SMALL, fingerprint=near)
    write(theirs, range(200, 230))
    theirs.close()
    assert sum(path.stat().st_size for path in files(root)) <= SMALL
    assert found(opened(root, max_bytes=SMALL), range(4)) == []


def test_two_engines_find_what_either_has_sealed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_SCAN_SECONDS", 0.05)
    first, second = opened(root), opened(root)
    write(first, range(4))
    write(second, range(4, 8))
    assert found(second, range(4)) == []  # it is being written
    first.close()
    until(lambda: found(second, range(8)) == list(range(8)))
    assert read(second, range(8)) == [True] * 8
    second.close()


@pytest.mark.parametrize("where", ["posix_fallocate", "pwritev", "pwrite"])
def test_a_full_disk_ends_writing_with_one_warning(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    store = opened(root, max_bytes=SMALL)
    write(store, range(3))
    usual = getattr(os, where)

    def full(fd: int, data: object, *rest: int) -> int:
        if where == "pwritev":
            usual(fd, [b"".join(data)[:5000]], *rest)  # type: ignore[call-overload]
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, where, full)
    with caplog.at_level(logging.WARNING):
        assert not all(write(store, range(10, 20)))
        assert write(store, range(20, 24)) == [False] * 4
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "The disk tier writes no more until the engine starts again"
    ]
    assert "No space left" in store.stats().read_only
    assert read(store, range(3)) == [True] * 3
    store.close()
    monkeypatch.undo()
    again = opened(root, max_bytes=SMALL)
    assert read(again, range(3)) == [True] * 3
    assert write(again, [20]) == [True]
    again.close()


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_fault_that_passes_ends_writing_for_a_while(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    store = opened(root)
    usual, asked = os.posix_fallocate, list[int]()

    def failing(*given: Any) -> None:
        asked.append(1)
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "posix_fallocate", failing)
    with caplog.at_level(logging.WARNING):
        assert write(store, [0]) == [False]
        monkeypatch.setattr(os, "posix_fallocate", usual)
        assert write(store, [0]) == [False], "not yet"
    assert [record.message for record in caplog.records] == [
        f"The disk tier writes nothing for 30 seconds: [Errno {error}] {os.strerror(error)}. Then it tries again; pages that are there are still read."
    ]
    stats = store.stats()
    assert (len(asked), stats.skipped, stats.read_only) == (1, 2, "")
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 30)
    assert write(store, [0]) == [True]
    store.close()


def test_what_is_to_be_struck_waits_for_a_fault_that_passes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(root)
    write(store, [0, 1])
    usual, asked = Segment.strike, list[int]()

    def failing(*given: Any) -> None:
        asked.append(1)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Segment, "strike", failing)
    store.forget(0, [key_of(0)])
    until(lambda: asked)
    monkeypatch.setattr(Segment, "strike", usual)
    assert write(store, [2]) == [True]
    store.close()
    again = opened(root)
    assert read(again, range(3)) == [False, True, True]
    again.close()


def test_a_directory_without_room_is_no_full_disk(root: Path) -> None:
    stores = [opened(root, max_bytes=SMALL) for _ in range(5)]  # ten threads that write, and room for six segments
    for number, store in enumerate(stores * 4):
        write(store, [number])
    assert sum(path.stat().st_size for path in files(root)) <= SMALL
    skipped = sum(store.stats().skipped for store in stores)
    assert skipped > 0 and not any(store.stats().read_only for store in stores)
    for store in stores[1:]:
        store.close()
    assert write(stores[0], [99]) == [True]
    stores[0].close()


def test_a_flipped_bit_is_a_miss_and_the_page_can_be_written_again(
    root: Path, store: DiskStore, caplog: pytest.LogCaptureFixture
) -> None:
    write(store, range(2))
    store.close()
    for path in files(root):
        data = bytearray(path.read_bytes())
        for place in range(8192 + 7, len(data), 12288):
            data[place] ^= 4
        path.write_bytes(data)
    again = opened(root)
    assert found(again, range(2)) == [0, 1]
    with caplog.at_level(logging.WARNING):
        assert read(again, range(2)) == [False] * 2
    assert found(again, range(2)) == []
    again._scan()  # a look at a segment that isn't whole, or going on with it, reads its records again
    for segment, whole in list(again._known.values()):
        again._found(segment, again.directory.adopt(segment)[0], again._clears, whole=whole)
    assert found(again, range(2)) == []
    assert again.stats().failures == 2
    assert len([r for r in caplog.records if "can't be used, and is forgotten" in r.message]) == 1
    assert write(again, range(2)) == [True] * 2
    assert read(again, range(2)) == [True] * 2
    again.close()


def test_whatever_is_done_to_the_files_a_page_is_right_or_a_miss(tmp_path: Path) -> None:
    for seed in range(effort(6, 60)):
        rng = random.Random(seed)
        root = tmp_path / f"{seed}"
        store = opened(root, max_bytes=SMALL)
        for step in range(15):
            what = rng.choice(["write", "write", "read", "restart", "crash", "cut", "flip", "lose"])
            numbers = rng.sample(range(30), 5)
            group = rng.randrange(2)
            if what == "write":
                assert all(write(store, numbers, group))
            elif what == "read":
                read(store, numbers, group)
            else:
                if what in ("restart", "lose"):
                    store.close()
                left = crashed(root, tmp_path / f"{seed}.{step}")
                store.close()
                root, paths = left, files(left) + files(left, ".index")
                path = rng.choice(paths) if paths else None
                if path and what == "cut":
                    os.truncate(path, rng.randrange(path.stat().st_size + 1))
                elif path and what == "flip":
                    data = bytearray(path.read_bytes())
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                    path.write_bytes(data)
                elif path and what == "lose":
                    path.unlink()
                store = opened(root, max_bytes=SMALL)
            assert sum(path.stat().st_size for path in files(root)) <= SMALL, (seed, step)
        read(store, range(30))
        read(store, range(30), 1)
        store.close()


def test_what_waits_to_be_written_is_written_at_the_end(root: Path) -> None:
    store = opened(root)
    pages = [(0, key_of(number), memoryview(page_of(number))) for number in range(50)]
    store.write(1, pages)
    store.close()
    assert outcomes(store) == [True] * 50
    assert found(opened(root), range(50)) == list(range(50))


def test_a_disk_that_hangs_fails_what_waits_and_is_not_asked_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(root, OF, max_bytes=SMALL, largest_page=6000, read_threads=1, seconds=0.1, rate=1e6)
    write(store, range(2))
    assert store.seconds(500_000) == 0.5
    usual, hold = os.preadv, threading.Event()

    def hang(*given: object) -> int:
        hold.wait(LONG)
        return usual(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", hang)
    places = [memoryview(bytearray(SIZES[0])) for _ in range(2)]
    for number in range(2):
        store.read(number + 10, [(0, key_of(number), places[number])])
    assert 0.012 <= store.seconds(0) < math.inf
    until(lambda: store.seconds(0) == math.inf)
    assert store.ended() == []  # the first may still write to its place
    hold.set()
    done = list[tuple[int, list[bool]]]()
    until(lambda: done.extend(store.ended()) or len(done) == 2)
    assert sorted(done) == [(10, [True]), (11, [False])]  # nothing is begun after its time
    assert places[0] == page_of(0)
    until(lambda: store.seconds(0) == 0)
    store.close()


def test_the_end_waits_for_no_disk_that_hangs_and_begins_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_FINISH_SECONDS", 0.2)
    store = DiskStore(root, OF, max_bytes=SMALL, largest_page=6000, read_threads=1, rate=1e6)
    write(store, range(4))
    usual, hold = os.preadv, threading.Event()
    monkeypatch.setattr(os, "preadv", lambda *given: (hold.wait(LONG), usual(*given))[1])
    store.read(7, [(0, key_of(number), memoryview(bytearray(SIZES[0]))) for number in range(4)])
    started = time.monotonic()
    store.close()
    assert time.monotonic() - started < LONG / 2
    hold.set()
    assert outcomes(store).count(True) <= 2  # those that had begun
    store.read(8, [(0, key_of(0), memoryview(bytearray(SIZES[0])))])
    assert outcomes(store) == [False]
    store.write(9, [(0, key_of(9), memoryview(page_of(9)))])
    assert outcomes(store) == [False]
    assert store.seconds(1) == math.inf


def test_the_rate_is_measured_at_the_start_and_follows_what_is_read(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "pagerunner-pages").mkdir(mode=0o700, parents=True)
    probe = root / "pagerunner-pages" / f"probe-{os.getpid()}"
    probe.touch()  # of a program of this number that was killed, as the first one of each container has
    store = opened(root, rate=None)
    probe.unlink()
    rate = store.stats().read_rate
    assert rate > 0 and store.seconds(10**9) == pytest.approx(10**9 / rate)
    assert [path for path in (root / "pagerunner-pages").iterdir() if path.name != "lock"] == []
    monkeypatch.setattr(disk, "_PIECE", SIZES[0])
    write(store, [1])
    read(store, [1])
    assert store.stats().read_rate != rate
    store.close()


def test_a_disk_that_was_slow_for_a_while_is_measured_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_SCAN_SECONDS", 0.01)
    monkeypatch.setattr(disk, "_PIECE", SIZES[0])
    rates = list[float]()
    monkeypatch.setattr(disk, "read_rate", lambda *_: rates.append(2e6) or rates[-1])
    store = opened(root, rate=1e6)
    write(store, [1])
    with monkeypatch.context() as slow:
        slow.setattr(Segment, "read", lambda *given: time.sleep(0.1) or True)
        for _ in range(40):
            store.read(3, [(0, key_of(1), memoryview(bytearray(SIZES[0])))])
            outcomes(store)
            if store.stats().read_rate < 3e5:
                break
    assert store.stats().read_rate < 3e5 and not rates, "reads tell how fast it is"
    monkeypatch.setattr(disk, "_MEASURE_SECONDS", 0.05)
    until(lambda: rates)
    until(lambda: store.stats().read_rate == rates[-1])
    time.sleep(0.1)
    assert len(rates) == 1, "as fast as at the start: nothing more is to be measured"
    store.close()


@pytest.mark.parametrize("where", ["posix_fallocate pwrite pwritev", "fdatasync"])
def test_a_disk_that_is_full_at_the_start_is_measured_by_pages_that_are_there(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    monkeypatch.setattr(disk, "_SCAN_SECONDS", 0.02)
    store = opened(root)
    write(store, range(20))
    store.close()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in where.split():
        monkeypatch.setattr(os, name, full)
    with caplog.at_level(logging.WARNING):
        again = opened(root, rate=None)
    assert math.isfinite(again.seconds(10**6))
    assert read(again, range(20)) == [True] * 20
    assert not caplog.records
    again.close()
    with caplog.at_level(logging.WARNING):
        empty = opened(root.with_name("empty"), rate=None)
        time.sleep(0.2)  # it looks again and again
    assert empty.seconds(1) == math.inf
    assert [record.message.split(", and reads nothing")[0] for record in caplog.records] == [
        f"The disk tier can't measure how fast {empty.directory.path} reads"
    ]
    monkeypatch.undo()
    empty._look.set()
    until(lambda: math.isfinite(empty.seconds(1)))
    empty.close()
    left = [path for path in (root / "pagerunner-pages").iterdir() if path.suffix not in (".pages", ".index")]
    assert [path.name for path in left] == ["lock"]


def test_a_stopped_engine_that_has_the_lock_costs_pages_and_no_time(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "_LOCK_SECONDS", 0.3)
    store = opened(root)
    with store.directory.locked():
        assert write(store, [1]) == [False]
    assert not store.stats().read_only and store.stats().skipped == 1
    assert write(store, [1]) == [True]
    store.close()


def test_an_unforeseen_error_costs_a_page(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Segment.append

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Segment, "append", broken)
    assert write(store, [1]) == [False] and store.stats().skipped == 1
    monkeypatch.setattr(Segment, "append", usual)
    assert write(store, [1]) == [True]
    assert read(store, [1]) == [True]
    assert store.ended() == []


@pytest.mark.parametrize("why", ["late", "cancelled"])
def test_what_is_not_written_in_time_is_counted(store: DiskStore, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    usual, begun, go_on = Segment.append, threading.Semaphore(0), threading.Event()

    def slow(*given: Any) -> Record:
        begun.release()
        go_on.wait(LONG)
        return usual(*given)

    monkeypatch.setattr(Segment, "append", slow)
    if why == "late":
        monkeypatch.setattr(disk, "_WRITE_SECONDS", 0.0)
        store.write(1, [(0, key_of(number), memoryview(page_of(number))) for number in range(10)])
        assert outcomes(store) == [False] * 10 and store.stats().skipped == 10
    else:
        store.write(1, [(0, key_of(number), memoryview(page_of(number))) for number in range(1, 11)])
        assert begun.acquire(timeout=LONG) and begun.acquire(timeout=LONG)
        store.cancel()
        go_on.set()
        assert outcomes(store).count(True) == 2 and store.stats().skipped == 8


def test_the_caller_is_woken_once_for_each_number(root: Path) -> None:
    woken = list[int]()
    store = DiskStore(root, OF, max_bytes=SMALL, largest_page=6000, rate=1.0, on_end=lambda: woken.append(1))
    write(store, range(4))
    read(store, range(8))
    assert len(woken) == 2
    store.close()


def test_what_cannot_be_a_disk_tier_is_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match="max_bytes=100,000 of the disk tier is too small.* 8 files of a page of 6,000 bytes, 131,072 in all",
    ):
        opened(root, max_bytes=100_000)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="root_dir='.*file' of the disk tier can't be used"):
        opened(tmp_path / "file")
    (root / "pagerunner-pages").mkdir(parents=True)
    (root / "pagerunner-pages").chmod(0o755)
    with pytest.raises(
        ConfigError, match=r"belongs to the engine's user and is closed to others \(chmod 700\).* mode 40755"
    ):
        opened(root)
    shutil.rmtree(root)
    root.mkdir()
    (root / "pagerunner-pages").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="closed to others"):
        opened(root)
