"""What others put into the disk tier's directory: it is passed over, and costs pages alone."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest

from helpers.disk_pages import files, opened, read, write
from helpers.patience import patient

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
