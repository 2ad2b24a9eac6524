"""Programs that tests fork are like those that are started: environment, parent, signals, ends, and programs of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.patience import LONG
from helpers.programs import Popen, run_python
from pagerunner.engine.core.executors import places

ORIGINAL = frozenset(os.environ)


@pytest.mark.parametrize("name", ["PAGERUNNER_LIMIT_MAX_N", "OMP_NUM_THREADS", "TRITON_INTERPRET", "PYTHONHASHSEED"])
def test_what_was_read_before_the_fork_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=name):
        run_python("", (), {**os.environ, name: "8"})
    without = {key: value for key, value in os.environ.items() if key != name}
    monkeypatch.setenv(name, "8")
    if name not in ORIGINAL:
        assert run_python("", (), without).returncode == 0
    else:
        with pytest.raises(ValueError, match=name):
            run_python("", (), without)


PROGRAM = """
import atexit, os, subprocess, sys
atexit.register(print, "the end")
own = subprocess.run([sys.executable, "-c", "import os; print(os.getppid())"], stdout=subprocess.PIPE)
print(int(own.stdout) == os.getpid(), os.getppid(), os.getsid(0) == os.getpid(), sys.argv, os.getcwd())
print(sys.path[0] == sys.argv[1], "torch" in sys.modules, "LANGUAGE" in os.environ, sys.stdin.read(), flush=True)
sys.exit(7)
"""


def test_a_forked_program_is_like_one_that_is_started(tmp_path: Path) -> None:
    path = os.pathsep.join(["/somewhere", *filter(None, sys.path)])
    environ = {name: value for name, value in os.environ.items() if name != "LANGUAGE"} | {"PYTHONPATH": path}
    command = [sys.executable, "-P", "-c", PROGRAM, "/somewhere", "b c"]
    pipe = subprocess.PIPE
    with Popen(
        command, env=environ, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=tmp_path, start_new_session=True
    ) as program:
        shown = Path(f"/proc/{program.pid}/cmdline").read_bytes()
        out, err = program.communicate("what it reads")
    assert program.returncode == 7 and err == ""
    assert out.splitlines() == [
        f"True {os.getpid()} True ['-c', '/somewhere', 'b c'] {tmp_path}",
        "True True False what it reads",
        "the end",
    ]
    assert shown.startswith("\0".join(command[:3]).encode()) or b"be_a_mould" in shown, "it has just begun"


def test_ends_of_forked_programs_are_those_of_programs() -> None:
    for code, status, said in (
        ("raise SystemExit('a sentence')", 1, "a sentence\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT, "KeyboardInterrupt\n"),
        ("import os; os._exit(3)", 3, ""),
    ):
        done = run_python(code, (), dict(os.environ))
        assert (done.returncode, done.stderr[-len(said) :] if said else done.stderr) == (status, said), code
    with pytest.raises(subprocess.TimeoutExpired):
        run_python("import time; time.sleep(600)", (), dict(os.environ), timeout=0.1)


def test_a_leash_that_is_let_go_and_a_signal_reach_a_forked_program() -> None:
    pipe = subprocess.PIPE
    with Popen(
        [sys.executable, "-c", "print('reads', flush=True); input()"], stdin=pipe, stdout=pipe, stderr=pipe
    ) as program:
        assert program.stdin is not None and program.stdout is not None
        assert program.stdout.readline() == b"reads\n"
        program.stdin.close()
        assert program.wait(LONG) == 1
    with Popen(
        [sys.executable, "-c", "import time; print('sleeps', flush=True); time.sleep(600)"], stdout=pipe
    ) as program:
        assert program.stdout is not None
        program.stdout.readline()
        program.kill()
        assert program.stdout.read() == b"" and program.wait(LONG) == -signal.SIGKILL


def test_what_a_fork_can_not_do_is_started() -> None:
    for code, how in (
        ("import sys; print('torch' in sys.modules)", {"env": {**os.environ, "OMP_NUM_THREADS": "3"}}),
        ("import sys; print('torch' in sys.modules)", {"preexec_fn": lambda: None}),
    ):
        done = Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, **how).communicate()[0]  # type: ignore[arg-type]
        assert done == b"False\n"


def test_ranks_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine sets for them could keep them from it. Then each would take 2 s of computing in every test, and nobody would see why."""
    given = list[dict[str, str]]()
    monkeypatch.setattr(places, "start", lambda program, environ, **how: given.append(environ))
    places._begin()
    assert run_python("import sys; print('torch' in sys.modules)", (), given[0]).stdout == "True\n"


def test_a_forked_program_has_the_limits_of_its_environment() -> None:
    code = "from pagerunner import limits; print(limits.STALL_SECONDS, limits.RANK_SECONDS)"
    for environ, found in (({"PAGERUNNER_LIMIT_STALL_SECONDS": "7"}, "7 30\n"), ({}, "120 30\n")):
        assert run_python(code, (), {**os.environ, **environ}).stdout == found
