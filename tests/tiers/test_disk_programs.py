"""The disk tier of engines that are killed, that share a directory, and whose disk is full."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.disk_pages import files, found, opened, read, write
from helpers.patience import LONG
from pagerunner.tiers.disk import WRITE_THREADS

SMALL = 8 * 64 * 1024


def start(root: Path, *words: int) -> subprocess.Popen[str]:
    """The program of helpers/disk_pages.py."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "helpers.disk_pages", str(root), *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)


def lines(process: subprocess.Popen[str]) -> list[list[str]]:
    assert process.stdout is not None
    with process.stdout:
        found = [line.split() for line in process.stdout if line.endswith("\n")]
    process.wait(LONG)
    return found


@pytest.mark.parametrize("after", [1, 7, 40])
def test_a_killed_engine_has_lost_nothing_that_was_written(tmp_path: Path, after: int) -> None:
    process = start(tmp_path, 0, 100_000, 64 << 20)
    assert process.stdout is not None
    told = [process.stdout.readline() for _ in range(after)]
    process.send_signal(signal.SIGKILL)
    written = [int(line.split()[0]) for line in told] + [int(line[0]) for line in lines(process)]
    assert len(written) >= after
    store = opened(tmp_path, max_bytes=64 << 20)
    assert found(store, written) == written
    assert read(store, written) == [True] * len(written)
    beyond = found(store, range(len(written), len(written) + 100))
    # Written, and not told any more. Those that the kill has met may be found and not be whole, which reading notices.
    assert read(store, beyond).count(False) <= WRITE_THREADS
    assert write(store, [200_000]) == [True]
    store.close()


def test_a_file_that_may_not_grow_ends_writing_and_reading_goes_on(tmp_path: Path) -> None:
    first = start(tmp_path, 0, 6, SMALL)
    assert lines(first)[-1] == ["end", "well"]
    told = lines(start(tmp_path, 6, 30, SMALL, 40_000))
    assert told[-1][0] == "end" and "File too large" in " ".join(told[-1])
    store = opened(tmp_path, max_bytes=SMALL)
    written = [*range(6), *(int(number) for number, well in told[:-1] if well == "1")]
    assert read(store, written) == [True] * len(written)
    store.close()


def test_two_engines_in_one_directory(tmp_path: Path) -> None:
    engines = [start(tmp_path, first, first + 150, SMALL) for first in (0, 75)]
    for told in map(lines, engines):
        assert told[-1] == ["end", "well"]  # each page that it has read was right
        assert all(line[1] == "1" for line in told[:-1])
    assert sum(path.stat().st_size for path in files(tmp_path)) <= SMALL
    store = opened(tmp_path, max_bytes=SMALL)
    there = found(store, range(225))
    assert len(there) > 8
    assert read(store, there) == [True] * len(there)
    store.close()
