"""What others put into the disk tier's directory: it is passed over, and costs pages alone."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest

from helpers.disk_pages import OF, files, opened, read, write
from helpers.patience import patient
from pagerunner.tiers.directory import Directory

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


def test_a_pipe_in_the_place_of_a_segment_holds_up_no_reader(root: Path) -> None:
    store = opened(root)
    write(store, range(4))
    for path in files(root):
        path.unlink()
        os.mkfifo(path)
    started = time.monotonic()
    assert read(store, range(4)) == [False] * 4
    assert time.monotonic() - started < patient(10), "a look at the directory would wake it after 30 s"
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
