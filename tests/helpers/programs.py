"""Python programs in processes of their own that needn't import torch: they are forked from a process that has.

A start imports torch, 2 s of computing. A fork takes 0.1 s. What is forked is like what is started: a child of the process that
starts it, with its own command line, environment, session and open files, and with programs of its own that are forked too.

A process that starts programs has a mould, a process that has imported everything and waits. For each program the mould forks a child,
which forks the program and ends. The program is an orphan then. The kernel gives it to the process that asked, which has said that it
adopts orphans (PR_SET_CHILD_SUBREAPER). So exit statuses, signals and `getppid` are as ever. Before a program begins it forks its own mould.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

PRELOADED = (
    "fastapi", "httpx", "pagerunner.cli.main", "pagerunner.engine.core.process", "pagerunner.engine.rank",
    "pagerunner.engine.startup.build", "pagerunner.llm", "torch", "uvicorn",
)  # fmt: skip
"""What programs would import, 2 s of computing."""
READ_AT_IMPORT = ("PAGERUNNER_LIMIT_", "OMP_", "GOMP_", "MKL_", "TORCH", "PYTORCH_", "TRITON_", "PYTHON")
"""Beginnings of the variables that Python reads when it starts, and those modules when they are imported."""
HARMLESS = (
    "PYTHONPATH", "OMP_WAIT_POLICY", "TORCH_NCCL_", "TORCH_SYMM_MEM_", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR",
)  # fmt: skip
"""Beginnings of those that make no difference: the path is set again, one thread waits for nobody, and CPUs have neither NCCL nor multicast. Caches'
places, which torch's compiler sets for its process and all that it starts, are looked up when they are needed."""
MODULES = (
    "pagerunner",
    "pagerunner.engine.core.process",
    "pagerunner.engine.rank",
    "pagerunner.server.api_processes",
    "helpers.ranks",
)
"""Programs that are forked. Others, such as workers with a limit on their memory, are started."""

_at_first = dict(os.environ)
_SUBREAPER = 36
_NAME_ROOM = 500  # bytes for a program's command line
_Popen, _execute = subprocess.Popen, inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]


def _read_at_import(environ: Any) -> set[tuple[str, str]]:
    return {
        (name, value)
        for name, value in environ.items()
        if name.startswith(READ_AT_IMPORT) and not name.startswith(HARMLESS) and not _is_time_limit(name)
    }


def _is_time_limit(name: str) -> bool:
    """These are used where they are read, so a program only has to read the variables again."""
    return name.startswith("PAGERUNNER_LIMIT_") and name.endswith("_SECONDS")


def begin_with_this_environment() -> None:
    """The first mould reads the environment as it is now, whatever a test sets before it needs one."""
    global _at_first
    _at_first = dict(os.environ)


class _Mould:
    """This process's end of the way to its mould."""

    def __init__(self, link: socket.socket, environ: Any) -> None:
        self._link, self._known, self._pid = link, _read_at_import(environ), os.getpid()
        self._lock = threading.Lock()
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl

    @staticmethod
    def first() -> _Mould:
        """Start one."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = f"from helpers.programs import be_a_mould; be_a_mould({theirs.fileno()})"
        environ = {**_at_first, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-P", "-c", code, "-" * _NAME_ROOM]
        with theirs:
            _Popen(
                command, env=environ, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
        return _Mould(ours, environ)

    def changed(self, environ: Any) -> list[str]:
        """Variables of READ_AT_IMPORT that the mould has read otherwise."""
        return sorted({name for name, _ in _read_at_import(environ) ^ self._known})

    def fork(self, order: dict[str, Any], fds: Sequence[int]) -> int:
        """The program's process. It has `fds` as its standard input, output and error."""
        with self._lock:
            self._prctl(_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._link, [json.dumps(order | {"parent": os.getpid()}).encode()], fds)
                return int(self._link.recv(20))
            finally:
                self._prctl(_SUBREAPER, 0, 0, 0, 0)


_mould: _Mould | None = None
_making = threading.Lock()


def _own_mould() -> _Mould:
    global _mould
    with _making:
        if _mould is None or _mould._pid != os.getpid():
            _mould = _Mould.first()
        return _mould


class Popen(_Popen):  # type: ignore[type-arg]
    """`subprocess.Popen` that forks a Python program, where a fork can be what the start would be."""

    def _execute_child(self, *given: Any) -> None:
        how = _execute.bind(self, *given).arguments
        environ = dict(os.environ) if how["env"] is None else how["env"]
        order = None if how["shell"] or how["preexec_fn"] or how["pass_fds"] else _program(how["args"])
        if order is None or _own_mould().changed(environ):
            super()._execute_child(*given)  # type: ignore[misc]
            return
        order |= {"env": environ, "cwd": str(how["cwd"] or os.getcwd()), "session": how["start_new_session"]}
        pipes = [how[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        given_fds = (pipes[0], pipes[3], pipes[5])
        self.pid = _own_mould().fork(order, [number if fd == -1 else fd for number, fd in enumerate(given_fds)])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _program(command: Any) -> dict[str, Any] | None:
    if isinstance(command, str | bytes | os.PathLike) or command[0] != sys.executable:
        return None
    words = [str(word) for word in command[1:]]
    safe = words[:1] == ["-P"]
    flag, *rest = words[safe:] or [""]
    if flag not in ("-c", "-m") or (flag == "-m" and rest[0] not in MODULES):
        return None
    return {"command": [str(word) for word in command], "flag": flag, "what": rest[0], "words": rest[1:], "safe": safe}


def run_python(
    code: str, words: Sequence[str], env: dict[str, str], timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """What `python -c code words` prints and ends with, in this environment.

    Raises:
        ValueError: the environment has other variables of READ_AT_IMPORT than the tests began with, which a module that is imported
            already wouldn't see.
        subprocess.TimeoutExpired: it has not ended within `timeout` seconds.
    """
    if changed := _own_mould().changed(env):
        raise ValueError(f"{changed} are read before the program starts: start it by subprocess.run.")
    pipe = subprocess.PIPE
    with Popen([sys.executable, "-c", code, *words], env=env, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def be_a_mould(number: int) -> None:
    """Wait for orders from the other end of a socket, until that is closed. In a program: run it."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    link = socket.socket(fileno=number)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    while True:
        order, fds = _next_program(link)
        link.close()
        if order["session"]:
            os.setsid()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():  # the program
            theirs.close()
            break
        ours.close()
        for fd in fds:
            os.close(fd)
        link = theirs
    _become(order, fds)
    global _mould
    _mould = _Mould(ours, os.environ)
    subprocess.Popen = Popen  # type: ignore[misc]
    end(_status(order))


def _next_program(link: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Returns in a new program alone."""
    while True:
        data, fds, *_ = socket.recv_fds(link, 1 << 20, 3)
        if not data:
            os._exit(0)
        read, write = os.pipe()
        if not (between := os.fork()):
            if program := os.fork():
                os.write(write, str(program).encode())
                os._exit(0)
            os.close(read)
            os.close(write)
            return json.loads(data), fds
        os.waitpid(between, 0)
        link.sendall(os.read(read, 20))
        for fd in (read, write, *fds):
            os.close(fd)


def _become(order: dict[str, Any], fds: Sequence[int]) -> None:
    until = time.monotonic() + 100
    while os.getppid() != order["parent"]:
        if time.monotonic() > until:
            os._exit(1)
        time.sleep(0.001)
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    path = [entry for entry in order["env"].get("PYTHONPATH", "").split(os.pathsep) if entry]
    if any(map(_is_time_limit, os.environ)):
        importlib.reload(importlib.import_module("pagerunner.limits"))
    sys.path[:] = [*([] if order["safe"] else [""]), *path, *(entry for entry in sys.path if entry not in path)]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _show(order["command"])


def _show(command: Sequence[str]) -> None:
    """What /proc says of the process: the arguments that it was started with are overwritten."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, end = (
        int(fields[45]),
        int(fields[46]),
    )  # arg_start and arg_end; man 5 proc counts from 1, and two fields earlier
    text = b"\0".join(os.fsencode(word) for word in command)[: end - first - 1]
    if first:
        ctypes.memmove(first, text.ljust(end - first, b"\0"), end - first)


def _status(order: dict[str, Any]) -> int:
    """Run the program. What it ends with."""
    try:
        _run(order)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def end(status: int) -> NoReturn:
    """As an interpreter ends, but without freeing each object: that would copy all that the fork shares, 0.3 s of computing."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 255)


def _run(order: dict[str, Any]) -> None:
    sys.argv[:] = ["-c" if order["flag"] == "-c" else "-m", *order["words"]]
    if order["flag"] == "-m":
        sys.modules.pop(order["what"], None)  # as a start has not imported it before it runs
        runpy.run_module(order["what"], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(compile(order["what"], "<string>", "exec"), main.__dict__)
