"""Processes that this package starts: each runs one of its modules, and ends when whoever started it is gone.

A child imports what its parent would import, and nothing from the directory that it happens to be started in. It gets no
variable of the environment but those that are named here. So a key that a user gave the server isn't in the environment of a
process that runs a checkpoint's template, and isn't sent to another machine. API processes alone have all of it: they are the server.

Standard input is the child's leash. The parent writes the first line to it, which says what the child is to do, and leaves
it open. Its end tells the child that the parent is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import fcntl
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import IO, Protocol

from pagerunner.errors import EngineDeadError
from pagerunner.limits import PREFIX as LIMIT
from pagerunner.limits import TABLE

HELPER_NAMES = ("PATH", "LANG", "LC_ALL", "TZ", *(LIMIT + limit.name for limit in TABLE))
"""What helpers may know, which work on what clients and checkpoints say."""
ENGINE_NAMES = frozenset(
    "PATH HOME USER LOGNAME TMPDIR TMP TEMP LANG LANGUAGE TZ VIRTUAL_ENV TERM COLUMNS LINES NO_COLOR FORCE_COLOR "
    "CC CXX CFLAGS CXXFLAGS LDFLAGS CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH LIBRARY_PATH COMPILER_PATH GCC_EXEC_PREFIX "
    "MAX_JOBS RAY_ADDRESS RAY_USE_TLS RAY_TLS_SERVER_CERT RAY_TLS_SERVER_KEY RAY_TLS_CA_CERT RAY_AUTH_MODE RAY_AUTH_TOKEN_PATH "
    "RAY_TMPDIR".split()
)
ENGINE_PREFIXES = tuple(
    "PAGERUNNER_ LC_ LD_ XDG_ PYTHON CONDA_ COVERAGE_ RUST_ TQDM_ TOKENIZERS_ SAFETENSORS_ "
    "OMP_ KMP_ GOMP_ MKL_ OPENBLAS_ DNNL_ ONEDNN_ ATEN_ MALLOC_ GLIBC_ ASAN_ "
    "CUDA_ NVIDIA_ NVCC_ CUBLAS_ CUDNN_ CUPTI_ NCCL_ NVSHMEM_ NVTX_ NSYS_ QUADD_ GLOO_ UCX_ "
    "TORCH PYTORCH_ KINETO_ TRITON_ TVM_ FLASHINFER_ "
    "NIX_BINTOOLS NIX_CC NIX_CFLAGS NIX_CXX NIX_DONT_ NIX_ENFORCE_ NIX_HARDENING NIX_LD NIX_STORE".split()
)
"""What an engine core or a rank may know: what compilers, libraries and drivers are set by, and the settings of this package.

On NixOS a compiler is a script that finds headers, libraries and the loader of programs in NIX_*. NIX_CONFIG isn't among them: it
may hold access tokens.
"""
HOST_IP = "PAGERUNNER_HOST_IP"
"""The variable with this machine's address, for engines and trainers on several machines. Without it nothing leaves the machine."""
LOOPBACK = "127.0.0.1"
_TRAVELS = ("PAGERUNNER_", "NCCL_", "NVSHMEM_", "TORCH_", "PYTORCH_", "GLOO_", "TRITON_")
_PATHS = ("RAY_TLS_SERVER_KEY",)  # the file of a key, and not the key
SECRETS = tuple("_KEY _KEYS _APIKEY _TOKEN _SECRET _SECRETS _PASSWORD _PASSWD _PASS _CREDENTIALS _AUTH".split())
"""Ends of the names of variables that no child gets, and no report shows."""
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_PARENT_CHECK_SECONDS = 1.0
_END_SECONDS = 10.0
_STARTED: weakref.WeakSet[subprocess.Popen[bytes]] = weakref.WeakSet()
_LONGEST_SOCKET_PATH = 100  # the kernel's limit is 107 bytes
_PRIVATE, _UNLOCKED = "pagerunner-run-", "pagerunner-"
_LOCKS: dict[Path, int] = {}


def helper_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of helper processes: the limits and the language, but no keys."""
    return {name: environ[name] for name in HELPER_NAMES if name in environ}


def engine_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of processes that run a model. Keys and tokens stay behind, whatever their names begin with."""
    return {
        name: value
        for name, value in environ.items()
        if name in _PATHS or ((name in ENGINE_NAMES or name.startswith(ENGINE_PREFIXES)) and not name.endswith(SECRETS))
    }


def settings_of_engine(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What an engine takes along to other machines: how it and its libraries are set, and not what describes this machine."""
    return {
        name: value
        for name, value in engine_environment(environ).items()
        if name.startswith(_TRAVELS) and name != HOST_IP
    }


def host_ip(environ: Mapping[str, str] = os.environ) -> str:
    """The address at which processes of an engine listen: loopback unless the user has named another one."""
    return environ.get(HOST_IP) or LOOPBACK


def interface(address: str) -> str | None:
    """The name of this machine's network interface that has this IPv4 address, if one has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no such address
                found = fcntl.ioctl(asked, _GET_ADDRESS, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


def private_directory() -> Path:
    """A new directory that only this user may read, for sockets between processes: its path is short enough for one.

    It goes with `remove_directory`. This process holds a lock on it. When all processes of an engine are killed at once, nobody is left to
    remove it; then the next process of this user that makes such a directory finds it without a lock, and does.
    """
    _remove_left_ones()
    while True:
        directory = Path(tempfile.mkdtemp(prefix=_PRIVATE))
        if len(os.fsencode(directory)) > _LONGEST_SOCKET_PATH:
            directory.rmdir()
            directory = Path(tempfile.mkdtemp(prefix=_PRIVATE, dir="/tmp"))
        try:
            lock = _locked(directory)
        except (BlockingIOError, FileNotFoundError):
            continue  # another process has just taken it for one that was left
        except OSError:  # there are no locks here, or no descriptor for one
            directory.rmdir()
            return Path(tempfile.mkdtemp(prefix=_UNLOCKED, dir=directory.parent))
        if directory.exists():
            _LOCKS[directory] = lock
            return directory
        os.close(lock)


def remove_directory(directory: Path) -> None:
    """Remove a private directory and what is in it."""
    shutil.rmtree(directory, ignore_errors=True)
    if (lock := _LOCKS.pop(directory, None)) is not None:
        os.close(lock)


def _locked(directory: Path) -> int:
    """A descriptor that keeps the directory locked. Raises BlockingIOError if another process has locked it."""
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(lock)
        raise
    return lock


@cache
def _remove_left_ones() -> None:
    """Remove this user's private directories that no process holds."""
    for place in {tempfile.gettempdir(), "/tmp"}:
        with contextlib.suppress(OSError):
            for found in Path(place).glob(f"{_PRIVATE}*"):
                with contextlib.suppress(OSError):
                    if found.lstat().st_uid == os.getuid():
                        lock = _locked(found)
                        shutil.rmtree(found, ignore_errors=True)
                        os.close(lock)


def exit_reason(who: str, status: int) -> str:
    """A sentence for the end of a process with this status, a negative one for a signal."""
    if status < 0:
        # not the real-time signals between the first and the last
        known = -status in {one.value for one in signal.Signals}
        name = signal.Signals(-status).name if known else f"signal {-status}"
        hint = ", perhaps by the kernel for want of memory" if -status == signal.SIGKILL else ""
        return f"{who} was ended by {name}{hint}."
    return f"{who} ended with exit status {status}."


def command(module: str, *arguments: str) -> list[str]:
    """What runs a module of this package with the interpreter of this process (-P: not with its directory's modules)."""
    return [sys.executable, "-P", "-m", module, *arguments]


def with_path(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child that imports what this process would import."""
    return {**environment, "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)}


def start(
    module: str,
    environment: Mapping[str, str],
    *,
    first_line: bytes = b"",
    stdout: int | None = None,
    stderr: int | None = None,
    own_session: bool = False,
) -> subprocess.Popen[bytes]:
    """Start `module` in a process with a pipe as its standard input, and write `first_line` to it.

    `own_session`: a Ctrl-C isn't for the child, and its group can be ended as one.

    Raises OSError when it can't be started.
    """
    process = subprocess.Popen(
        command(module),
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        env=with_path(environment),
        start_new_session=own_session,
    )
    _STARTED.add(process)
    tell(process, first_line)
    return process


def kill_started() -> None:
    """Kill what `start` has started in this process, which is about to leave. One that was stopped can't see the end of its leash."""
    for process in list(_STARTED):
        process.kill()  # nothing happens to one that has ended


def tell(process: subprocess.Popen[bytes], line: bytes) -> None:
    """Write the first line, or a part of it, to a child."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the child has ended already; its exit status says how
        process.stdin.write(line)
        process.stdin.flush()


@contextlib.contextmanager
def starting(who: str) -> Iterator[None]:
    """Inside: what the system refuses, such as a process or a file descriptor more, becomes a sentence about `who`.

    Raises EngineDeadError.
    """
    try:
        yield
    except Exception as error:
        if getattr(error, "errno", None) is None:  # neither the system's nor that of sockets
            raise
        raise EngineDeadError(f"{who} can't be started: {error}.") from error


class Process(Protocol):
    """What is asked of a process that has been started, here or on another machine: a `subprocess.Popen` is one."""

    @property
    def pid(self) -> int:
        """Its number on its machine."""

    @property
    def stdin(self) -> IO[bytes] | None:
        """Its leash, if this process holds it."""

    def poll(self) -> int | None:
        """The exit status, or None."""

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises subprocess.TimeoutExpired."""

    def send_signal(self, sig: int, /) -> None:
        """Send it a signal."""

    def kill(self) -> None:
        """End it."""


def end(processes: Mapping[str, Process]) -> str:
    """Kill processes, by their names, and wait for their ends, but not for ever. A sentence about those that don't end, or "".

    A process that waits inside a driver, or for a disk, ends when that wait does, whatever signal it gets.
    """
    for process in processes.values():
        process.kill()
    until, stuck = time.monotonic() + _END_SECONDS, []
    for who, process in processes.items():
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            stuck.append(f"{who} (process {process.pid})")
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
    if not stuck:
        return ""
    return f" Killed {_END_SECONDS:g} seconds ago, but still there: {', '.join(stuck)}. What it holds, such as a device's memory, isn't free."


async def start_async(module: str, environment: Mapping[str, str]) -> asyncio.subprocess.Process:
    """As `start`, for an event loop, with a pipe as standard output too, in a session of its own."""
    return await asyncio.create_subprocess_exec(
        *command(module),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=with_path(environment),
        start_new_session=True,
    )


def run_to_end(module: str, *arguments: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run `module` and wait for its end; what it wrote is in the result."""
    return subprocess.run(
        command(module, *arguments), env=with_path(environment), capture_output=True, text=True, check=False
    )


def read_first_line(module: str) -> bytes:
    """In a child: the line that the parent has written. No other one follows. Raises as `read_lines`."""
    return next(read_lines(module))


def read_lines(module: str) -> Iterator[bytes]:
    """In a child: the lines that the parent writes, until it is gone. Nobody else reads what it writes.

    Raises SystemExit for a user who started `module` by hand, and, without a word, if the parent has ended after a part of the first line.
    """
    found, held = False, bytearray()
    while piece := os.read(sys.stdin.fileno(), 1 << 16):
        held += piece
        while (end := held.find(b"\n") + 1) > 0:
            line, held, found = bytes(held[:end]), held[end:], True
            yield line
    if not found:
        raise SystemExit(1 if held else f"{module} is started by the engine, not by hand.")


def heed_parent_alone() -> int:
    """In a child that works for a server: leave its end to the parent, whose process id is returned. SIGUSR1 prints the stacks of its threads."""
    # Ctrl-C and a service manager's TERM reach the whole process group. The frontend drains first, then tells us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    return os.getppid()


def wait_for_parents_end(parent: int) -> None:
    """In a thread of a child: return when the process `parent` is gone, or has closed this child's standard input."""
    stdin = sys.stdin.fileno()
    while os.getppid() == parent:
        readable, _, _ = select.select([stdin], [], [], _PARENT_CHECK_SECONDS)
        if readable and not os.read(stdin, 1):
            break
