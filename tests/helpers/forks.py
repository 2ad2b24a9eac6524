"""`pytest --forks 3`: tests are collected once, then three processes that are forked run them, a file at a time.

pytest-xdist starts processes that collect all tests each: 11 s of computing, most of it imports. A fork has everything, and shares the memory.
Each process asks for a file when it begins the last test of the one before, so the fixtures of the session stay in between.
The first of them gets the last files and the others get the first ones, until they meet: files that wait stand last, and while one waits others compute.
What it reports goes through a pipe to the first process, whose plugins hear it as if the tests had run there.
A process that dies fails the test that it was at. Another one takes over what is left of the file.
A process that says nothing for `--silence` seconds shows its threads and is ended: a test that hangs fails, and the others still run.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import itertools
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import pytest
from _pytest.assertion import rewrite
from _pytest.faulthandler import fault_handler_stderr_fd_key

from helpers.programs import end

Part = list[int]
"""Places of tests in `session.items`, which one process runs in this order."""
_OWN_FOLDER = "process"
_SECONDS_TO_END = 120
_SECONDS_TO_DUMP = 5


def add_option(parser: pytest.Parser) -> None:
    """The option's words."""
    help = "run tests in so many processes, whole files in each, which are forked after the tests are collected"
    parser.addoption("--forks", type=int, default=1, metavar="N", help=help)
    help = "end a forked process whose test takes longer"
    parser.addoption("--silence", type=float, default=300, metavar="SECONDS", help=help)


@contextlib.contextmanager
def rewriting_assertions(session: pytest.Session) -> Iterator[None]:
    """Where all tests are asked for, other processes help to rewrite the assertions of files that pytest hasn't met before.

    It stores the result: 10 s and more for all files. The first process begins at the other end, and imports what it has rewritten.
    """
    config, pids = session.config, list[int]()
    helpers = min(config.getoption("forks"), os.cpu_count() or 1) - 1
    if sys.dont_write_bytecode or config.args != config.getini("testpaths"):
        helpers = 0
    paths = sorted((config.rootpath / "tests").rglob("test_*.py"), reverse=True)
    for own in range(helpers):
        if (pid := os.fork()) == 0:
            with contextlib.suppress(BaseException):  # what can't be rewritten is said when its turn comes
                _rewrite(config, paths[own::helpers])
            os._exit(0)
        pids.append(pid)
    yield
    for pid in pids:
        os.waitpid(pid, 0)


def _rewrite(config: pytest.Config, paths: Sequence[Path]) -> None:
    state = config.stash[rewrite.assertstate_key]
    for path in paths:
        stored = rewrite.get_cache_dir(path) / (path.name[:-3] + rewrite.PYC_TAIL)
        if rewrite._read_pyc(path, stored) is None:
            rewrite._write_pyc(state, *reversed(rewrite._rewrite_test(path, config)), stored)


def folder_of_all(factory: pytest.TempPathFactory) -> Path:
    """A folder for what the processes of this run share."""
    own = factory.getbasetemp()
    return own.parent if own.name.startswith(_OWN_FOLDER) else own


@dataclass
class _Process:
    """What the first process knows of another one."""

    number: int
    pid: int
    link: Connection
    left: Part = field(default_factory=list)
    heard: float = field(default_factory=time.monotonic)
    silent: bool = False


def run(session: pytest.Session) -> bool | None:
    """In the place of pytest's own loop over the tests. None: one process is enough."""
    config = session.config
    files = [list(part) for _, part in itertools.groupby(range(len(session.items)), lambda at: session.items[at].path)]
    processes = min(config.getoption("forks"), len(files))
    if processes < 2 or config.option.collectonly or config.option.usepdb or session.testsfailed:
        return None
    _First(session, files).run(processes)
    return True


class _First:
    """The process that collected the tests."""

    def __init__(self, session: pytest.Session, files: list[Part]) -> None:
        self._session, self._hook = session, session.config.hook
        self._to_do, self._others, self._numbers = files[::-1], list[_Process](), itertools.count()
        self._silence: float = session.config.getoption("silence")
        session.config._tmp_path_factory.getbasetemp()  # one for all

    def run(self, processes: int) -> None:
        try:
            for _ in range(processes):
                self._fork()
            while self._others:
                for link in wait([other.link for other in self._others], self._silence / 10):
                    self._listen(next(other for other in self._others if other.link is link))
                    if self._session.shouldfail:
                        raise self._session.Failed(self._session.shouldfail)
                    if self._session.shouldstop:
                        raise self._session.Interrupted(self._session.shouldstop)
                self._end_silent()
        finally:
            self._end()

    def _fork(self) -> None:
        ours, theirs = Pipe()
        number = next(self._numbers)
        if (pid := os.fork()) == 0:
            for link in (ours, *(other.link for other in self._others)):
                link.close()  # else nobody would hear that this process's first one has ended
            _Other(self._session, theirs, number).run()
        theirs.close()
        self._others.append(_Process(number, pid, ours))

    def _take(self, number: int) -> Part:
        """The next file of this process."""
        if not self._to_do:
            return []
        return self._to_do.pop(0 if number == 0 else -1)

    def _end_silent(self) -> None:
        for other in [*self._others]:
            over = time.monotonic() - other.heard - self._silence
            other.silent = over > 0
            if over > _SECONDS_TO_DUMP:
                os.kill(other.pid, signal.SIGKILL)
                self._bury(other)  # its end may not be heard: a program that its test has forked may keep the link
            elif over > 0:
                os.kill(other.pid, signal.SIGABRT)

    def _listen(self, other: _Process) -> None:
        other.heard = time.monotonic()
        try:
            what, said = other.link.recv()
        except (EOFError, ConnectionError):
            self._bury(other)
            return
        if what == "next":
            part = self._take(other.number)
            other.left += part
            with contextlib.suppress(ConnectionError):  # it has just died, which is heard next
                other.link.send(part)
        elif what == "report":
            self._hook.pytest_runtest_logreport(
                report=self._hook.pytest_report_from_serializable(config=self._session.config, data=said)
            )
        elif what == "warning":
            said["warning_message"] = warnings.WarningMessage(**said["warning_message"])
            self._hook.pytest_warning_recorded.call_historic(kwargs=said)
        else:
            getattr(self._hook, f"pytest_runtest_log{what}")(**said)
            if what == "finish":
                other.left.pop(0)

    def _bury(self, other: _Process) -> None:
        other.link.close()
        self._others.remove(other)
        status = os.waitstatus_to_exitcode(os.waitpid(other.pid, 0)[1])
        if not other.left and status == 0:
            return
        at = other.left.pop(0) if other.left else None
        where = self._session.items[at].nodeid if at is not None else f"process {other.number}"
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with {status}"
        if other.silent:
            how += f" after {self._silence:g} seconds of silence"
        report = pytest.TestReport(
            where, (where.partition("::")[0], None, where), {}, "failed", f"The process {how} in {where}.", "call"
        )
        self._hook.pytest_runtest_logreport(report=report)
        if other.left:
            self._to_do.append(other.left)
            self._fork()

    def _end(self) -> None:
        """Those that still run are interrupted, as by Ctrl-C: they end what their tests have started."""
        until = time.monotonic() + _SECONDS_TO_END
        for other in self._others:
            other.link.close()
            os.kill(other.pid, signal.SIGINT)
        for other in self._others:
            while os.waitpid(other.pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > until:
                    os.kill(other.pid, signal.SIGKILL)
                time.sleep(0.01)


class _Other:
    """A forked process, and the plugin that tells the first one what happens in it."""

    def __init__(self, session: pytest.Session, link: Connection, number: int) -> None:
        self._session, self._config, self._link = session, session.config, link
        plugins = self._config.pluginmanager
        plugins.unregister(name="terminalreporter")
        self._listens = False  # what has been warned of before is told to each new plugin
        plugins.register(self)
        self._listens = True
        capture = plugins.get_plugin("capturemanager")  # the files that it writes into are shared with other processes
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
        self._stderr = self._config.stash[fault_handler_stderr_fd_key]  # what is captured by now is shown to nobody
        factory = self._config._tmp_path_factory
        factory._basetemp = factory.mktemp(f"{_OWN_FOLDER}{number}", numbered=False)
        atexit.unregister(factory._exit_stack.close)  # the first process removes what earlier runs have left

    def run(self) -> NoReturn:
        status = 1
        try:
            self._run()
            status = 0
        except (KeyboardInterrupt, ConnectionError, EOFError):
            with contextlib.suppress(BaseException):
                self._session._setupstate.teardown_exact(None)
        except BaseException:
            traceback.print_exc()
        self._link.close()
        faulthandler.dump_traceback_later(_SECONDS_TO_END, exit=True, file=self._stderr)
        end(status)

    def _run(self) -> None:
        following = self._next()
        while part := following:
            for at, after in zip(part, [*part[1:], None], strict=True):
                if after is None:
                    following = self._next()
                    after = following[0] if following else None
                items = self._session.items
                item, nextitem = items[at], None if after is None else items[after]
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)

    def _next(self) -> Part:
        self._link.send(("next", None))
        return self._link.recv()

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._link.send(("start", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._link.send(("report", data))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self._link.send(("finish", {"nodeid": nodeid, "location": location}))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        """A warning may be of a class that has no name, and its words are what is shown."""
        if not self._listens:
            return
        given = {"message": f"{warning_message.message}", "category": UserWarning}
        if (category := warning_message.category).__module__ == "builtins":
            given["category"] = category
        given |= {"filename": warning_message.filename, "lineno": warning_message.lineno}
        self._link.send(("warning", {"warning_message": given, "when": when, "nodeid": nodeid, "location": location}))
