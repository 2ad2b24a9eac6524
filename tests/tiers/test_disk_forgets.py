"""What the disk tier has forgotten or hidden isn't found, whatever goes on meanwhile: looks, writes, copies, other engines."""

from __future__ import annotations

import errno
import random
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from helpers.disk_pages import OF, SIZES, crashed, found, key_of, opened, outcomes, page_of, read, write
from helpers.effort import effort
from helpers.patience import LONG, until
from pagerunner.tiers import directory, disk
from pagerunner.tiers.directory import Directory
from pagerunner.tiers.disk import DiskStore
from pagerunner.tiers.segments import Record, Segment

SMALL = 8 * 32 * 1024  # segments of two pages


def test_what_is_forgotten_stays_so_after_a_restart_and_a_crash(root: Path, store: DiskStore, tmp_path: Path) -> None:
    write(store, range(6))
    store.forget(0, [key_of(1), key_of(77)])
    store.forget(1, [key_of(2)])
    assert found(store, range(6)) == [0, 2, 3, 4, 5]
    write(store, range(6, 10))  # by both threads, behind what is forgotten
    again = opened(crashed(root, tmp_path / "left"))
    assert found(again, range(10)) == [0, *range(2, 10)]
    assert read(again, range(10)) == [number != 1 for number in range(10)]
    again.close()
    store.forget(0, [key_of(3)])
    store.close()
    last = opened(root)
    assert read(last, range(10)) == [number not in (1, 3) for number in range(10)]
    last.close()


def test_a_page_that_can_not_be_struck_out_is_said(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be found at the next start, so who reads the log can clear the directory."""

    def broken(segment: Segment, offset: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    write(store, range(2))
    monkeypatch.setattr(Segment, "strike", broken)
    store.forget(0, [key_of(0)])
    until(lambda: "Input/output error" in caplog.text)
    assert "may be found at the next start" in caplog.text and str(store.directory.path) in caplog.text
    assert found(store, range(2)) == [1]


def test_what_is_forgotten_is_not_found_while_its_strike_waits(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, held, strike = opened(root, max_bytes=SMALL), threading.Event(), Segment.strike
    monkeypatch.setattr(Segment, "strike", lambda *of: held.wait(LONG) and strike(*of))
    assert all(write(store, range(5)))  # by two threads, in segments of two pages: all but the last ones are sealed
    store.forget(0, [key_of(number) for number in range(5)])
    store._scan()
    assert found(store, range(5)) == []
    held.set()
    assert all(write(store, range(5))) and found(store, range(5)) == [*range(5)]
    store.close()


@pytest.mark.parametrize("clears", [False, True])
def test_what_is_forgotten_while_its_segment_is_given_up_is_not_copied(
    root: Path, monkeypatch: pytest.MonkeyPatch, clears: bool
) -> None:
    store, usual, begun, go_on = opened(root, max_bytes=SMALL), Segment.read, threading.Event(), threading.Event()
    write(store, [0])
    assert read(store, [0]) == [True]  # so it is worth a copy

    def slow(segment: Segment, fd: int, record: Record, *given: Any) -> bool:
        if threading.current_thread().name == "disk-write":
            begun.set()
            go_on.wait(LONG)
        return usual(segment, fd, record, *given)

    monkeypatch.setattr(Segment, "read", slow)
    for number in range(1, 100):
        store.write(number, [(0, key_of(number), memoryview(page_of(number)))])
    assert begun.wait(LONG)
    if clears:
        store.clear()
    store.forget(0, [key_of(0)])
    go_on.set()
    ended = list[Any]()
    until(lambda: ended.extend(store.ended()) or len(ended) == 99)
    store._scan()  # its copy's segment is sealed, and lists it
    assert found(store, [0]) == [] and store.stats().pages_copied == 0
    monkeypatch.undo()
    store.close()
    again = opened(root, max_bytes=SMALL)
    assert read(again, [0]) == [False]
    assert write(again, [0]) == [True] and read(again, [0]) == [True]
    again.close()


@pytest.mark.parametrize("moment", ["before", "within"])
def test_what_is_forgotten_while_another_engine_goes_on_with_its_file_is_struck(
    root: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    first = opened(root)
    write(first, range(4))
    first.close()
    store, other = opened(root), opened(root)
    usual, begun, go_on = Segment.rename, threading.Event(), threading.Event()

    def slow(*given: Any) -> None:
        usual(*given)
        begun.set()
        go_on.wait(LONG)

    if moment == "within":  # the directory is locked then
        monkeypatch.setattr(Segment, "rename", slow)
    other.write(1, [(0, key_of(number), memoryview(page_of(number))) for number in (8, 9)])
    if moment == "within":
        assert begun.wait(LONG)
    else:
        assert outcomes(other) == [True] * 2
    store.forget(0, [key_of(number) for number in range(4)])
    go_on.set()
    store.close()
    if moment == "within":
        assert outcomes(other) == [True] * 2
    assert read(other, range(4)) == [False] * 4
    other.close()
    again = opened(root)
    assert read(again, [*range(4), 8, 9]) == [False] * 4 + [True] * 2
    again.close()


def have_ended(store: DiskStore, ended: list[Any], most: int) -> bool:
    """Whether so many reads and writes have ended in all."""
    ended.extend(store.ended())
    return len(ended) >= most


def test_what_is_forgotten_while_files_are_given_up_copied_and_renamed_is_never_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = Segment.read

    def slow(*given: Any) -> bool:
        if threading.current_thread().name.startswith("disk-write"):  # a copy
            time.sleep(0.003)
        return usual(*given)

    monkeypatch.setattr(Segment, "read", slow)
    for seed in range(effort(1, 40)):
        rng, root, wrong, asked, ended = random.Random(seed), tmp_path / f"{seed}", set[int](), 0, list[Any]()
        hot = list[int]()
        store = opened(root, max_bytes=SMALL)
        write(store, range(8))
        store.close()  # whose last files others go on with
        store = opened(root, max_bytes=SMALL)
        for new in range(8, 80, 2):
            there = found(store, range(new))
            for number in rng.sample(there, min(len(there), 4)):  # what was read is copied when its file is given up
                hot, asked = [*hot[-20:], number], asked + 1
                store.read(asked, [(0, key_of(number), memoryview(bytearray(SIZES[0])))])
            asked += 1
            store.write(asked, [(0, key_of(number), memoryview(page_of(number))) for number in (new, new + 1)])
            if rng.random() < 0.15:
                other = opened(root, max_bytes=SMALL)
                write(other, [1000 + new])
                other.close()
            if hot and rng.random() < 0.5:
                wrong.add(number := min(rng.sample(hot, min(len(hot), 8))))  # found, or being copied, or gone
                store.forget(0, [key_of(number)])
            until(partial(have_ended, store, ended, asked - 5))
        until(partial(have_ended, store, ended, asked))
        assert len(wrong) > 5 and store.stats().segments_dropped
        store._scan()
        assert found(store, sorted(wrong)) == [], seed
        store.close()
        again = opened(root, max_bytes=SMALL)
        assert not any(read(again, sorted(wrong))), seed
        again.close()


def test_what_is_forgotten_is_struck_when_a_stopped_engine_has_let_the_directory_go(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "_LOCK_SECONDS", 0.3)
    first = opened(root)
    write(first, range(2))
    first.close()
    store, other = opened(root), opened(root)
    write(other, [8, 9])  # goes on with both files
    with other.directory.locked():
        store.forget(0, [key_of(0), key_of(1)])
        assert write(store, [2]) == [False]
    assert write(store, [3]) == [True]
    assert read(other, range(2)) == [False] * 2
    store.close()
    other.close()


def test_what_is_cleared_is_found_at_the_next_start(
    root: Path, store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_SCAN_SECONDS", 0.05)
    write(store, range(4))
    store.clear()
    write(store, range(3, 6))
    store._look.set()
    time.sleep(0.2)
    assert found(store, range(6)) == [3, 4, 5]
    store.forget(0, [key_of(1), key_of(3)])  # both records of 3
    store.close()
    again = opened(root)
    assert read(again, range(6)) == [number not in (1, 3) for number in range(6)]
    again.close()


def test_what_is_forgotten_is_struck_before_what_waits_to_be_written(
    root: Path, tmp_path: Path, store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert write(store, [1]) == [True]
    usual, may, done = Segment.append, threading.Semaphore(0), threading.Semaphore(0)

    def slow(*given: Any) -> Record:
        done.release()
        may.acquire(timeout=LONG)
        return usual(*given)

    monkeypatch.setattr(Segment, "append", slow)
    store.write(1, [(0, key_of(number), memoryview(page_of(number))) for number in range(2, 60)])
    assert done.acquire(timeout=LONG) and done.acquire(timeout=LONG)  # each thread is within a page
    store.forget(0, [key_of(1)])
    may.release(2)
    assert done.acquire(timeout=LONG) and done.acquire(timeout=LONG)  # within the next ones
    left = opened(crashed(root, tmp_path / "killed"))
    assert read(left, [1]) == [False]
    left.close()
    may.release(100)
    assert outcomes(store) == [True] * 58


def test_a_page_that_was_forgotten_and_written_again_is_found_at_the_next_start(root: Path) -> None:
    store = opened(root)
    write(store, [0, 1])
    store.forget(0, [key_of(0)])
    assert write(store, [0]) == [True]
    store.close()
    again = opened(root)  # an index lists both places of page 0
    assert read(again, [0, 1]) == [True] * 2
    again.close()


def test_what_is_on_its_way_when_all_is_cleared_is_not_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(root)
    usual, begun, go_on = Segment.append, threading.Semaphore(0), threading.Event()

    def slow(*given: Any) -> Record:
        begun.release()
        go_on.wait(LONG)
        return usual(*given)

    monkeypatch.setattr(Segment, "append", slow)
    store.write(1, [(0, key_of(number), memoryview(page_of(number))) for number in range(8)])
    assert begun.acquire(timeout=LONG) and begun.acquire(timeout=LONG)  # both threads are within a page
    store.clear()
    go_on.set()
    assert outcomes(store) == [False] * 8
    assert found(store, range(8)) == []
    assert write(store, range(2, 4)) == [True] * 2
    assert found(store, range(8)) == [2, 3]
    store.close()
    again = opened(root)
    assert read(again, range(8)) == [
        number in (2, 3) for number in range(8)
    ]  # nor later: nobody could have forgotten it
    again.close()


@pytest.mark.parametrize("moment", ["before", "within", "after"])
def test_what_is_cleared_is_not_found_by_a_look_at_the_directory(
    root: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    first = opened(root)
    write(first, range(4))
    first.close()
    usual, begun, go_on = Directory.adopt, threading.Event(), threading.Event()

    def slow(*given: Any) -> tuple[list[Record], bool]:
        done = usual(*given) if moment == "after" else None
        begun.set()
        go_on.wait(LONG)
        return done or usual(*given)

    monkeypatch.setattr(Directory, "adopt", slow)
    if moment == "before":
        looks = lambda: threading.current_thread().name == "disk-keep"  # noqa: E731
        monkeypatch.setattr(
            Directory, "segments", lambda _: [] if not looks() or begun.set() or go_on.wait(LONG) else []
        )
    store = DiskStore(root, OF, max_bytes=4 << 20, largest_page=6000, rate=1e9)
    assert begun.wait(LONG)
    store.clear()
    monkeypatch.undo()
    go_on.set()
    assert write(store, [9]) == [True]  # goes on with one of the segments
    until(lambda: store._hidden == 1 and not store._look.is_set())
    store._look.set()
    until(lambda: not store._look.is_set())
    assert found(store, range(10)) == [9]
    store.close()
    again = opened(root)
    assert read(again, [*range(4), 9]) == [True] * 5
    again.close()
