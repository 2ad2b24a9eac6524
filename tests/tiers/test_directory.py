"""The disk tier's directory: what others put into it is passed over and costs pages alone, and what is written into it is found."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.disk_pages import OF, SIZES, files, found, opened, read, write
from helpers.patience import LONG, until
from pagerunner.tiers import disk
from pagerunner.tiers.directory import Directory
from pagerunner.tiers.disk import DiskStore
from pagerunner.tiers.segments import Record

SMALL = 8 * 32 * 1024  # segments of 32 KiB


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def test_what_is_no_regular_file_is_passed_over_and_named(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = opened(root, max_bytes=SMALL)
    write(store, range(6))
    store.close()
    pipe, folder = files(root)[:2]
    for path in (pipe, folder):
        path.unlink()
    os.mkfifo(pipe)
    folder.mkdir()
    with caplog.at_level(logging.WARNING):
        again = opened(root, max_bytes=SMALL)
        for number in range(10, 70):
            assert write(again, [number]) == [True]
    assert not again.stats().read_only and pipe.exists() and folder.exists()
    assert sorted(record.message for record in caplog.records) == sorted(
        f"The disk tier passes over {path}, which isn't a regular file." for path in (pipe, folder)
    )
    again.close()


def test_a_pipe_in_the_place_of_a_segment_holds_up_no_reader(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_SCAN_SECONDS", 1000)
    store = opened(root)
    write(store, range(4))
    for path in files(root):
        path.unlink()
        os.mkfifo(path)
    started = time.monotonic()
    assert read(store, range(4)) == [False] * 4
    assert time.monotonic() - started < LONG, "a look at the directory would wake it after 1,000 s"
    store.close()


def test_what_a_crash_has_left_of_a_segment_that_is_gone_is_removed(root: Path) -> None:
    """Between a segment's new name, or its end, and that of its index."""
    there = Directory(root, OF, 4 << 20, 6000)
    with there.locked():
        segments = [there.create(number) for number in range(3)]
    for segment, fd in segments:
        segment.seal(OF, [])
        os.close(fd)
    first, second, third = (segment for segment, _ in segments)
    first.path.unlink()
    second.index.rename(second.index.with_suffix(".writing"))
    second.path.unlink()
    (there.path / "notes.index").touch()  # somebody's own
    Directory(root, OF, 4 << 20, 6000)
    assert {path.name for path in there.path.iterdir()} == {"lock", "notes.index", third.path.name, third.index.name}


def test_a_clock_that_was_ahead_keeps_no_old_pages(root: Path) -> None:
    """What was written by a clock of the year 2100 is given up first all the same, as it was there before."""
    store = opened(root, max_bytes=SMALL)
    write(store, range(100, 112))
    store.close()
    for path in [*files(root), *files(root, ".index")]:
        path.rename(path.with_name(f"{4_102_444_800 * 10**9 + int(path.name[10:20]):020d}{path.name[20:]}"))
    again = opened(root, max_bytes=SMALL)
    assert found(again, range(100, 112))
    for number in range(60):
        assert write(again, [number]) == [True]
    assert len(found(again, range(48, 60))) >= 8 and not found(again, range(100, 112))
    again.close()


def test_pages_that_are_written_during_a_look_at_the_directory_are_found(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first look at a large directory takes seconds. It has listed the files before these pages' one was begun."""
    store = opened(root)
    write(store, range(60))  # no file is left to go on with
    store.close()
    usual, listed, go_on = Directory.adopt, threading.Event(), threading.Event()

    def slow(*given: Any) -> tuple[list[Record], bool]:
        listed.set()
        assert go_on.wait(LONG)
        return usual(*given)

    monkeypatch.setattr(Directory, "adopt", slow)
    again = DiskStore(root, OF, max_bytes=4 << 20, largest_page=max(SIZES), rate=1e9)
    assert listed.wait(LONG)
    assert write(again, [60, 61, 62]) == [True] * 3
    go_on.set()
    until(again.ready.is_set)
    assert found(again, range(60, 63)) == [60, 61, 62] and read(again, range(63)) == [True] * 63
    again.close()


def test_the_directory_is_closed_to_others_and_bounded(root: Path) -> None:
    store = opened(root, max_bytes=SMALL)
    for number in range(60):
        assert write(store, [number]) == [True]
        assert sum(path.stat().st_size for path in files(root)) <= SMALL
    there = found(store, range(60))
    assert 8 <= len(there) < 60 and there[-1] == 59
    assert read(store, there) == [True] * len(there)
    assert (root / "pagerunner-pages").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in files(root)} == {0o600}
    assert store.stats().segments_dropped > 0
    store.close()
    assert found(opened(root, max_bytes=SMALL), range(60)) == there


def test_a_directory_that_is_gone_is_said_once_and_has_no_pages_until_it_is_back(
    root: Path, store: DiskStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that is unmounted. It was looked for again with each page that couldn't be read, and each time a line of the log said so."""
    write(store, range(6))
    monkeypatch.setattr(disk, "_SCAN_SECONDS", 0.001)
    root.rename(away := root.with_name("away"))
    looks, look = list[int](), store._scan
    monkeypatch.setattr(store, "_scan", lambda: (looks.append(1), look()))
    with caplog.at_level(logging.WARNING):
        assert read(store, range(6)) == [False] * 6
        until(lambda: store.stats().pages == 0 and len(looks) > 3)
        assert store.stats().bytes == 0
        assert write(store, [6]) == [False] and store.stats().read_only
    blind, unwritten = [record.message for record in caplog.records]
    assert blind.startswith(f"The disk tier can't look through {root / 'pagerunner-pages'}: [Errno 2]")
    assert unwritten.startswith("The disk tier writes no more until the engine starts again: [Errno 2]")
    away.rename(root)
    store.close()
    again = opened(root)
    assert found(again, range(7)) == list(range(6))
    root.rename(away)
    until(lambda: again.stats().pages == 0)
    away.rename(root)
    until(lambda: found(again, range(6)) == list(range(6)))
    assert read(again, range(6)) == [True] * 6 and again.stats().bytes > 0
    again.close()
