"""The supervisor of API processes, with small programs in their place: what hangs, what the system refuses, and what fails."""

from __future__ import annotations

import asyncio
import errno
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from helpers.patience import LONG
from pagerunner import limits
from pagerunner.config import EngineArgs
from pagerunner.server import api_processes
from pagerunner.server.api_processes import ApiLaunch, Supervisor
from pagerunner.server.listening import StopSignals

SAYS = "print('\\n\\nserves\\npage', flush=True);"
LIVES_ON = f"import time; {SAYS} [[time.sleep(0.1), print(flush=True)] for _ in range(600)]"
SILENT = f"import time; {SAYS} time.sleep(60)"
NEVER_SERVES = "import time; [[time.sleep(0.1), print(flush=True)] for _ in range(600)]"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {LIVES_ON}"
DRAINS = """
import signal, time
def drain(*_):
    time.sleep(0.3)
    open({path!r}, "w").close()
    raise SystemExit
signal.signal(signal.SIGTERM, drain)
"""
REFUSED = BlockingIOError(errno.EAGAIN, "no")


class NoCore:
    """What the supervisor asks of a core's client."""

    death = None

    def send(self, message: object) -> None: ...

    async def close(self) -> None: ...


def supervised(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    programs: list[str | OSError],
    act: Callable[[Supervisor, StopSignals], Awaitable[None]],
    serving: int = 2,
) -> int:
    """Run a supervisor whose API processes are these programs, one after the other; `act` once so many are serving. The exit status."""
    asked = iter(programs)

    async def start(module: str, environment: dict[str, str]) -> asyncio.subprocess.Process:
        if isinstance(program := next(asked), OSError):
            raise program
        return await asyncio.create_subprocess_exec(
            sys.executable, "-S", "-c", program, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    async def run() -> int:
        stop = StopSignals()
        launch = ApiLaunch(EngineArgs(model="x"), {"drain_seconds": 0.1}, "127.0.0.1", 0, [], 0, 0, 0)
        supervisor = Supervisor([], launch, str(tmp_path), stop)
        supervisor._clients = [NoCore()]  # type: ignore[list-item]
        running = asyncio.create_task(supervisor.run(2))
        while len(supervisor._announced) < serving:
            await asyncio.sleep(0.01)
        await act(supervisor, stop)
        return await asyncio.wait_for(running, LONG)

    monkeypatch.setattr(api_processes, "start_async", start)
    return asyncio.run(run())


@pytest.mark.parametrize("signals", [1, 2, 3])
def test_a_process_that_hangs_ends_with_the_server(
    signals: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(api_processes, "LAST_WORDS_SECONDS", 0.1)
    monkeypatch.setattr(api_processes, "_END_SECONDS", 0.1)

    async def act(supervisor: Supervisor, stop: StopSignals) -> None:
        for _ in range(signals):
            stop.ask()

    assert supervised(monkeypatch, tmp_path, [STUBBORN, LIVES_ON], act) == 0
    assert "had not ended are killed: 1" in caplog.text


def test_a_process_that_the_system_refuses_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(api_processes, "_AGAIN_SECONDS", 0.05)

    async def act(supervisor: Supervisor, stop: StopSignals) -> None:
        other = supervisor._serving[2]
        supervisor._serving[1].kill()
        while "is started again in 0.1 seconds" not in caplog.text:
            await asyncio.sleep(0.01)
        while len(supervisor._serving) < 2:
            await asyncio.sleep(0.01)
        assert supervisor._serving[2] is other and other.returncode is None
        stop.ask()

    assert supervised(monkeypatch, tmp_path, [LIVES_ON, LIVES_ON, REFUSED, REFUSED, LIVES_ON], act) == 0
    assert "API process 1 of 2 can't be started: [Errno 11] no." in caplog.text


def test_when_keeping_one_fails_the_others_drain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drained = tmp_path / "drained"

    async def act(supervisor: Supervisor, stop: StopSignals) -> None:
        monkeypatch.setattr(api_processes, "mark_process_dead", lambda *_: 1 // 0)
        supervisor._serving[1].kill()

    with pytest.raises(ZeroDivisionError):
        supervised(monkeypatch, tmp_path, [LIVES_ON, DRAINS.format(path=str(drained)) + LIVES_ON], act)
    assert drained.exists()


def test_a_process_that_is_silent_is_killed_and_replaced(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It was stopped, or its event loop hangs. The kernel would go on giving it its share of connections."""
    monkeypatch.setattr(limits, "RANK_SECONDS", 3)

    async def act(supervisor: Supervisor, stop: StopSignals) -> None:
        silent, other = supervisor._serving[1], supervisor._serving[2]
        while supervisor._serving.get(1) in (None, silent):
            await asyncio.sleep(0.01)
        assert silent.returncode == -9 and supervisor._serving[2] is other and other.returncode is None
        stop.ask()

    assert supervised(monkeypatch, tmp_path, [SILENT, LIVES_ON, LIVES_ON], act) == 0
    assert "API process 1 of 2 has given no sign of life for 3 seconds (PAGERUNNER_LIMIT_RANK_SECONDS" in caplog.text
    assert capsys.readouterr().out == "serves\npage\n"


def test_a_signal_to_one_process_alone_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def act(supervisor: Supervisor, stop: StopSignals) -> None:
        supervisor._serving[1].terminate()
        while "It has ended its requests before. It is started again in 0 seconds." not in caplog.text:
            await asyncio.sleep(0.01)
        stop.ask()

    drains = DRAINS.format(path=str(tmp_path / "drained")) + LIVES_ON
    assert supervised(monkeypatch, tmp_path, [drains, LIVES_ON, LIVES_ON], act) == 0
    assert [one.levelname for one in caplog.records if "exit status 0" in one.message] == ["WARNING"]


def test_a_server_says_that_it_serves_though_one_process_can_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who waits for the line doesn't wait for ever. The one that has failed is tried again, and the log says why."""
    monkeypatch.setattr(api_processes, "_AGAIN_SECONDS", 0.05)
    said = ""

    async def act(supervisor: Supervisor, stop: StopSignals) -> None:
        nonlocal said
        assert not capsys.readouterr().out, "the other one may still begin"
        supervisor._serving[2].kill()
        while not (said := capsys.readouterr().out):
            await asyncio.sleep(0.01)
        stop.ask()

    assert supervised(monkeypatch, tmp_path, [LIVES_ON, NEVER_SERVES, LIVES_ON], act, serving=1) == 0
    assert said == "serves\npage\n" and not capsys.readouterr().out
