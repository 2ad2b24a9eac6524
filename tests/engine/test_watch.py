"""The thread that watches ranks' processes, and what the system may refuse where they are started. No rank runs here."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import zmq

from helpers.patience import LONG, patient, until
from pagerunner import children
from pagerunner.config import EngineArgs
from pagerunner.demo import demo_path
from pagerunner.dist.base import CommError
from pagerunner.engine import rank as of_rank
from pagerunner.engine.core import client
from pagerunner.engine.core.executors import places, process, watch
from pagerunner.engine.core.executors.doors import Doors
from pagerunner.engine.core.executors.watch import RankWatch
from pagerunner.engine.core.messages import WireError
from pagerunner.engine.startup.resolve import resolve
from pagerunner.engine.worker import orders
from pagerunner.engine.worker.ways import Ways
from pagerunner.errors import EngineDeadError


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE)


def watched(directory: Path, seconds: float) -> RankWatch:
    """A watch of two ranks."""
    return RankWatch(zmq.Context.instance(), directory, 2, seconds, Doors(directory))


def test_a_rank_is_named_with_its_machine_where_there_are_several(tmp_path: Path) -> None:
    one = watched(tmp_path, 1.0)
    lost = WireError.of(CommError("Rank 1 of 2 has lost another rank in all_gather."))
    assert str(one.named(1, lost)) == "Rank 1 of 2 has lost another rank in all_gather."
    one.machines = ["10.0.0.1", "10.0.0.2"]
    assert str(one.named(1, lost)) == "Rank 1 of 2 on 10.0.0.2 has lost another rank in all_gather."
    assert str(one.named(0, WireError.of(ValueError("no")))).startswith("Rank 0 of 2 on 10.0.0.1: ")
    one.close()


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
    until(lambda: one._error is not None)
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


class Told:
    """A watch of two ranks with a limit of 2 seconds, and what it says of what it is told."""

    def __init__(self, directory: Path) -> None:
        self.watch, self.now = watched(directory, 2.0), time.monotonic()
        self.watch._hung = lambda rank, sentence: EngineDeadError(sentence)  # type: ignore[method-assign]

    def look(self, seconds: float, *reports: orders.Report) -> str | None:
        """What it says so many seconds after its begin."""
        with patch.object(watch.time, "monotonic", lambda: self.now + seconds):
            for report in reports:
                self.watch._take(report)
            found = self.watch._why_late(self.now + seconds)
        return None if found is None else str(found)


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    one = Told(tmp_path)
    yield one
    one.watch.close()


KNOB = "(PAGERUNNER_LIMIT_RANK_SECONDS in the server's environment)"


def test_a_device_that_finishes_no_step_is_noticed_though_its_host_launches_more(told: Told) -> None:
    """Hosts wait for nobody, but get no more steps as long as no results come. What devices have finished shows which one stands still."""

    def said(seconds: float, *done: int) -> str | None:
        return told.look(
            seconds, *(orders.Alive(rank, moved=9, begun=9, steps=3, done=n) for rank, n in enumerate(done))
        )

    told.watch.given = 3
    assert said(0, 0, 0) is said(1.9, 1, 1) is said(3.8, 2, 1) is said(5.7, 3, 1) is said(7.6, 3, 1) is None
    assert (
        said(7.8, 3, 1)
        == f"Rank 1 of 2: its device has worked for 2 seconds {KNOB} on step 2 of 3 that it was given, and hangs."
    )
    assert said(7.9, 3, 3) is said(60, 3, 3) is None


def test_a_host_that_stands_in_a_step_is_told_from_those_that_wait_for_it(told: Told) -> None:
    def said(seconds: float, moved: int, hung: int) -> str | None:
        waiting = orders.Alive(1 - hung, moved, begun=moved, steps=4, done=4, waits=True)
        return told.look(seconds, waiting, orders.Alive(hung, 8, begun=8, steps=4, done=4))

    told.watch.given = 5
    for hung in (0, 1):
        began = 10.0 * hung
        assert (
            said(began, 8 + hung, hung)
            is said(began + 1.9, 10 + hung, hung)
            is said(began + 3.8, 10 + hung, hung)
            is None
        )
        expected = f"Rank {hung} of 2 hangs: no rank has come further for 2 seconds {KNOB}, and it is at step 5 of 5 that it was given."
        assert said(began + 4, 10 + hung, hung) == expected


def test_a_step_in_which_all_hosts_stand_has_an_end(told: Told) -> None:
    """All wait in a call of a driver, for example, and so for nobody else."""
    told.watch.given = 1
    both = [orders.Alive(rank, moved=3, begun=3) for rank in range(2)]
    assert told.look(0, *both) is told.look(1.9, *both) is None
    assert f"Rank 0 of 2 hangs: no rank has come further for 2 seconds {KNOB}, and it is at step 1 of 1" in str(
        told.look(2.1, *both)
    )


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
        thread.join(LONG)
        reports._socket.close(0)
    assert isinstance(failed, orders.Failed) and "illegal memory access" in str(failed.error.exception())
    assert ended == [1] and "illegal memory access" in caplog.text


def asked(told: Told, found: dict[int, Any]) -> threading.Thread:
    """A thread that waits until all ranks have loaded, and is in it."""

    def wait() -> None:
        with contextlib.suppress(EngineDeadError):
            told.watch.from_all(lambda: found, "loaded")

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    until(lambda: told.watch._asked is not None)
    return thread


def test_ranks_may_load_in_unequal_times_as_long_as_one_moves(told: Told) -> None:
    """Rank 0 has its weights and waits in a sum. Rank 1 reads for minutes, and hangs then."""
    asked(told, told.watch.loaded)
    first = orders.Alive(0, moved=900, begun=2, waits=True)
    for tensors in range(100):
        assert told.look(19.9 * tensors, first, orders.Alive(1, moved=1 + tensors, begun=1)) is None
    said = told.look(19.9 * 99 + 20.1, first, orders.Alive(1, moved=100, begun=1))
    assert said == f"Rank 1 of 2 hangs: no rank has come further for 20 seconds {KNOB}, and it hasn't loaded."


def test_a_start_in_which_all_ranks_stand_has_an_end_and_what_is_done_counts_as_a_move(told: Told) -> None:
    thread = asked(told, told.watch.loaded)
    both = [orders.Alive(rank, moved=3) for rank in range(2)]
    assert told.look(0, *both) is told.look(19.9, *both) is None
    assert "Rank 0 of 2 hangs: no rank has come further for 20 seconds" in str(told.look(20.1, *both))
    assert told.look(20.2, *both, orders.Loaded(0, [])) is told.look(40.1, *both) is None
    assert "Rank 1 of 2 hangs" in str(told.look(40.3, *both)), "who has loaded doesn't hang"
    with told.watch._changed:
        told.watch._take(orders.Loaded(1, []))
        told.watch._changed.notify_all()
    thread.join(LONG)
    assert told.look(60, *both) is None


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

    asyncio.run(asyncio.wait_for(close(), LONG))
    assert "still there: the engine core (process 4711)" in caplog.text


def test_an_executor_that_nobody_holds_is_gone_at_once_and_its_ranks_with_it() -> None:
    """`del llm` ends the ranks and frees their devices: nothing that the executor has refers to it, or it would wait for the garbage collector."""
    heard: Any = SimpleNamespace(ended_adapters=None, who=None)
    ranks: Any = SimpleNamespace(weights=[""], give=None, watch=heard)
    executor = process.ProcessExecutor(ranks)
    assert executor.adapters is not None
    gone = weakref.ref(executor)
    del executor
    assert gone() is None
