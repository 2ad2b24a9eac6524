"""The thread that watches ranks' processes, and what the system may refuse where they are started. No rank runs here."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from helpers.patience import patient, until
from pagerunner import children
from pagerunner.config import EngineArgs
from pagerunner.demo import demo_path
from pagerunner.engine import rank as of_rank
from pagerunner.engine.core import client
from pagerunner.engine.core.executors import places, process, watch
from pagerunner.engine.core.executors.doors import Doors
from pagerunner.engine.core.executors.watch import RankWatch
from pagerunner.engine.startup.resolve import resolve
from pagerunner.engine.worker import orders
from pagerunner.engine.worker.ways import Ways
from pagerunner.errors import EngineDeadError


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE)


def watched(directory: Path, seconds: float) -> RankWatch:
    """A watch of two ranks."""
    return RankWatch(zmq.Context.instance(), directory, 2, seconds, Doors(directory))


def test_a_watch_that_has_never_begun_can_be_closed(tmp_path: Path) -> None:
    """As where no thread can be started. The error that says so must not be hidden by another one."""
    one = watched(tmp_path, 1.0)
    one.close()
    assert not tmp_path.exists() and one._reports.closed
    with pytest.raises(EngineDeadError, match="shut down"):
        one.check()


def test_ranks_are_watched_without_pidfd_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kernels before 5.3 lack it, sandboxes forbid it, and a Python that was built on an old system has no such function."""
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    monkeypatch.delattr(os, "eventfd", raising=False)
    one, processes = watched(tmp_path, 9.0), [sleeper(), sleeper()]
    one.begin(processes)
    processes[1].kill()
    until(lambda: one._error is not None, 5)
    assert zmq.select([one.failure_fd], [], [], 0)[0] == [one.failure_fd]
    with pytest.raises(EngineDeadError, match="^Rank 1 of 2 was ended by SIGKILL"):
        one.check()
    one.close()
    assert processes[0].returncode == -9 and not tmp_path.exists()


class Stuck:
    """A process that waits in its device's driver, so that no signal ends it."""

    pid, stdin = 4_711, None

    def kill(self) -> None:
        pass

    def poll(self) -> None:
        pass

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is not None, "this waits for ever"
        raise subprocess.TimeoutExpired("rank", timeout)


def test_a_rank_that_does_not_end_is_named_and_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(children, "_END_SECONDS", 0.1)
    one, other = watched(tmp_path, 9.0), sleeper()
    stuck: Any = Stuck()
    one.begin([stuck, other])
    error = one.fail("Rank 1 of 2 hangs.")
    assert str(error) == (
        "Rank 1 of 2 hangs. Killed 0.1 seconds ago, but still there: rank 0 of 2 (process 4711). "
        "What it holds, such as a device's memory, isn't free."
    )
    one.close()
    assert other.returncode == -9


@pytest.mark.parametrize("what", ["pipe", "process"])
def test_ranks_that_the_system_refuses_are_a_sentence_and_nothing_is_left(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(*_: object, **__: object) -> subprocess.Popen[bytes]:
        if started:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        started.append(sleeper())
        return started[0]

    def pipe() -> tuple[int, int]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    resolved = resolve(EngineArgs(model=str(demo_path()), tensor_parallel_size=4, device="cpu", max_model_len=64))
    monkeypatch.setattr(places, "start", start)
    monkeypatch.setattr(process, "private_directory", lambda: tmp_path)
    if what == "pipe":
        monkeypatch.setattr(os, "pipe", pipe)
    with pytest.raises(EngineDeadError, match=r"^The ranks of tensor_parallel_size=4 can't be started: \[Errno"):
        process.load_ranks(resolved)
    assert not tmp_path.exists() and [one.returncode for one in started] == [-9] * (what == "process")


def test_a_ctrl_c_while_ranks_end_leaves_no_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(_: object) -> str:
        raise KeyboardInterrupt

    one = watched(tmp_path, 9.0)
    monkeypatch.setattr(watch, "end", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one.close()
    assert not tmp_path.exists()


def test_a_core_that_the_system_refuses_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no such interpreter"))
    with pytest.raises(EngineDeadError, match=r"^The engine core process can't be started: .*No such file"):
        asyncio.run(client.launch_core(EngineArgs(model=str(demo_path()))))


def test_a_device_that_finishes_no_step_is_noticed_though_its_host_goes_on(tmp_path: Path) -> None:
    """Hosts launch steps and wait for nobody. What devices have finished shows which one stands still."""
    one = watched(tmp_path, 2.0)
    hung: list[str] = []
    one._hung = lambda rank, sentence: hung.append(sentence)  # type: ignore[method-assign, assignment, return-value]

    def said(now: float, *done: int) -> list[str]:
        for rank, steps in enumerate(done):
            one._known[rank].heard_at = now
            one._known[rank].take(orders.Alive(rank, begun=9, steps=3, done=steps), now)
        one._why_late(now)
        return hung

    now = time.monotonic()
    assert said(now, 0, 0) == said(now + 1.9, 1, 1) == said(now + 3.8, 2, 1) == said(now + 3.89, 3, 1) == []
    assert said(now + 4.0, 3, 1) == [
        "Rank 1 of 2: its device has worked for 2 seconds (PAGERUNNER_LIMIT_RANK_SECONDS in the server's environment) on step 2 of 3 "
        "that it was given, and hangs."
    ]
    hung.clear()
    assert said(now + 4.1, 3, 3) == said(now + 60, 3, 3) == []
    one.close()


def test_a_device_error_that_is_met_while_a_rank_looks_how_far_it_is_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that gives no results waits for no step. The thread that reports may be the first one to meet the error."""

    class Broken:
        @property
        def steps_done(self) -> int:
            raise RuntimeError("an illegal memory access was encountered")

    context: Any = zmq.Context.instance()
    with context.socket(zmq.PULL) as core:
        core.bind(f"ipc://{tmp_path}/reports")
        reports = of_rank.Reports(context, Ways(addresses={orders.REPORTS: f"ipc://{tmp_path}/reports"}), 1)
        broken: Any = Broken()
        reports.worker = broken
        ended: list[int] = []
        monkeypatch.setattr(of_rank.os, "_exit", ended.append)
        thread = threading.Thread(target=of_rank.or_end, args=(reports.say_alive, reports), daemon=True)
        thread.start()
        assert core.poll(patient(5) * 1000)
        failed = msgspec.msgpack.decode(core.recv(), type=orders.Report)
        thread.join(patient(5))
        reports._socket.close(0)
    assert isinstance(failed, orders.Failed) and "illegal memory access" in str(failed.error.exception())
    assert ended == [1] and "illegal memory access" in caplog.text


def test_ranks_may_load_in_unequal_times(tmp_path: Path) -> None:
    """One that waits in its first sum for another that still reads its weights is not a sign of a fault for so long."""
    one = watched(tmp_path, 2.0)
    hung: list[str] = []
    one._hung = lambda rank, sentence: hung.append(sentence)  # type: ignore[method-assign, assignment, return-value]

    def said(now: float) -> list[str]:
        for number, begun in enumerate((2, 1)):
            one._known[number].heard_at = now
            one._known[number].take(orders.Alive(number, begun), now)
        one._why_late(now)
        return hung

    now = time.monotonic()
    assert said(now) == said(now + 5.9) == []
    assert "Rank 1 of 2 hangs: it hasn't come further for 6 seconds" in said(now + 6.1)[0]
    hung.clear()
    one.loaded |= {number: orders.Loaded(number, []) for number in range(2)}
    assert "Rank 1 of 2 hangs: it hasn't come further for 2 seconds" in said(now + 2.1)[0]
    one.close()


class Silent:
    """A socket to a core that says nothing."""

    def send(self, data: bytes) -> None:
        pass

    async def recv(self) -> bytes:
        await asyncio.sleep(600)
        return b""

    def close(self) -> None:
        pass


def test_a_core_that_does_not_end_is_not_waited_for_either(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(children, "_END_SECONDS", 0.1)
    stuck: Any = Stuck()
    silent: Any = Silent()
    ready: Any = None

    async def close() -> None:
        exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        core = client.LoadedCore("It", 4711, stuck, silent, tmp_path, exited, ready)
        await client.CoreClient(core, receive=print, died=lambda error: None).close(timeout=0.1)

    asyncio.run(asyncio.wait_for(close(), 5))
    assert "still there: the engine core (process 4711)" in caplog.text
