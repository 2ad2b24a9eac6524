"""`pytest --forks`: what happens in forked processes is told as if it had happened in one."""

from __future__ import annotations

import getpass
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from helpers import forks

HELPERS = Path(__file__).parents[1]
CONFTEST = """
import os, signal
import pytest
from _pytest import pathlib
from helpers import forks
from helpers.patience import LONG
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so do its programs
COLLECTED = os.getpid()
remove = pathlib.maybe_delete_a_numbered_dir
def tell(path):
    with open("removes", "a") as file: file.write(f"{path.name} {os.getpid()}\\n")
    remove(path)
pathlib.maybe_delete_a_numbered_dir = tell
def pytest_addoption(parser): forks.add_option(parser)
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session):
    with forks.rewriting_assertions(session): return (yield)
@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session): return forks.run(session)
@pytest.fixture(scope="session", autouse=True)
def whole():
    yield
    with open("sessions", "a") as file: file.write(f"{os.getpid()} {os.getppid() == COLLECTED}\\n")
"""
FILES = {
    "test_a.py": """
import os, warnings
def test_passes(tmp_path): print("not shown"); (tmp_path / "one").write_text("1"); assert os.listdir(tmp_path) == ["one"]
def test_warns(): warnings.warn("an old way", DeprecationWarning)
def test_fails(): print("shown"); one = 1; assert one == 2
""",
    "test_b.py": """
import os, pytest
def test_before(): pass
def test_dies(): os.kill(os.getpid(), 9)
def test_after(): pass
@pytest.mark.skip(reason="so that a sample suite has a skipped test")
def test_skipped(): pass
""",
    "test_c.py": """
import os, pytest
@pytest.fixture
def broken():
    yield
    raise OSError("no way back")
def test_broken(broken): pass
def test_leaves(): os._exit(3)
""",
    "test_d.py": """
import pathlib, time
def test_is_interrupted():
    try:
        pathlib.Path("waits").touch()
        time.sleep(60)
    finally: pathlib.Path("cleaned").touch()
""",
    "test_y.py": """
import os, pathlib, time
def test_hangs():
    if os.fork():
        time.sleep(600)
    for _ in range(300):
        if pathlib.Path("after").exists(): os._exit(0)
        time.sleep(0.1)
    pathlib.Path("late").touch()
    os._exit(0)
def test_after_that(): pathlib.Path("after").touch()
""",
    "test_z.py": """
import signal, time
def test_hangs_while_it_ends():
    signal.signal(signal.SIGABRT, signal.SIG_IGN)
    time.sleep(600)
""",
}


def start(root: Path, *words: str) -> subprocess.Popen[str]:
    (root / "pytest.ini").write_text("[pytest]\ntestpaths = tests\naddopts = -p no:cacheprovider -p no:schemathesis\n")
    (root / "tests").mkdir()
    (root / "tests/conftest.py").write_text(CONFTEST)
    for name, text in FILES.items():
        (root / "tests" / name).write_text(text)
    settings = {
        "PYTHONPATH": f"{HELPERS}",
        "COLUMNS": "300",
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTEST_DEBUG_TEMPROOT": f"{root}",
    }
    env = os.environ | settings
    command = [sys.executable, "-m", "pytest", "--forks", "2", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=root, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def test_what_happens_in_processes_is_told_by_one(tmp_path: Path) -> None:
    with start(tmp_path, "-rs", *(f"--deselect=tests/test_{name}.py" for name in "dyz")) as process:
        said, _ = process.communicate(timeout=120)
    assert process.returncode == pytest.ExitCode.TESTS_FAILED
    assert re.search(r"3 failed, 5 passed, 1 skipped, 4 deselected, 1 warning, 1 error in ", said), said
    assert "The process was ended by SIGKILL in tests/test_b.py::test_dies." in said
    assert "The process ended with 3 in tests/test_c.py::test_leaves." in said
    for shown in ("assert 1 == 2", "\nshown\n", "no way back", "an old way", "so that a sample suite has"):
        assert shown in said
    assert "not shown" not in said
    assert len(list((tmp_path / "tests/__pycache__").glob("test_*pytest*.pyc"))) == len(FILES)
    sessions = [line.split() for line in (tmp_path / "sessions").read_text().splitlines()]
    assert len(sessions) >= 1 and len({number for number, _ in sessions}) == len(sessions)
    assert {forked for _, forked in sessions} == {"True"}


def test_the_first_process_begins_with_the_last_file_and_the_others_with_the_first() -> None:
    """A file of a process that has died goes to the next one that asks."""
    config: Any = SimpleNamespace(hook=None, getoption=lambda _: 1.0, _tmp_path_factory=Mock())
    first = forks._First(SimpleNamespace(config=config), [[0, 1], [2], [3], [4, 5]])
    assert [first._take(number) for number in (0, 1, 0)] == [[4, 5], [0, 1], [3]]
    first._to_do.append([1])
    assert [first._take(number) for number in (2, 0, 1)] == [[1], [2], []]


def test_one_process_removes_what_earlier_runs_have_left(tmp_path: Path) -> None:
    """Which may be so much that a process would be ended while it is at it."""
    for number in range(8):
        (tmp_path / f"pytest-of-{getpass.getuser()}/pytest-{number}").mkdir(parents=True, mode=0o700)
    with start(tmp_path, "-k", "warns or before or broken") as process:
        said, _ = process.communicate(timeout=120)
    assert "3 passed" in said
    assert {line.split()[1] for line in (tmp_path / "removes").read_text().splitlines()} == {f"{process.pid}"}


def test_ctrl_c_ends_the_processes_and_what_they_have_begun(tmp_path: Path) -> None:
    with start(tmp_path, "-k", "interrupted or passes") as process:
        until = time.monotonic() + 60
        while not (tmp_path / "waits").exists() and time.monotonic() < until:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=120)
    assert process.returncode == pytest.ExitCode.INTERRUPTED, said
    assert (tmp_path / "cleaned").exists()


def test_a_test_that_hangs_fails_and_the_others_run(tmp_path: Path) -> None:
    with start(tmp_path, "--silence", "2", "-k", "test_y or test_z or passes") as process:
        said, _ = process.communicate(timeout=120)
    assert process.returncode == pytest.ExitCode.TESTS_FAILED
    assert re.search(r"2 failed, 2 passed, \d+ deselected in ", said), said
    assert "The process was ended by SIGABRT after 2 seconds of silence in tests/test_y.py::test_hangs." in said
    assert "The process was ended by SIGKILL after 2 seconds of silence in tests/test_z.py" in said
    assert not (tmp_path / "late").exists()  # what the test that hangs has forked keeps its link open
