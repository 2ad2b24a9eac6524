"""The core process: messages, refusals, death, and that nothing is left behind. Against the fake core."""

from __future__ import annotations

import asyncio
import errno
import inspect
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from helpers import fake_core
from helpers.patience import LONG, patient
from helpers.processes import is_alive
from pagerunner import limits
from pagerunner.config import EngineArgs
from pagerunner.engine.core import client, process
from pagerunner.engine.core import messages as wire
from pagerunner.engine.core.client import CoreClient, launch_core
from pagerunner.engine.core.process import CoreLoop
from pagerunner.engine.frontend.input_processor import InputProcessor
from pagerunner.errors import (
    CheckpointError,
    ConfigError,
    EngineDeadError,
    EngineSleepingError,
    InvalidRequestError,
    RequestFailedError,
)
from pagerunner.types import EngineRequest, RequestUpdate, SamplingParams

ARGS = EngineArgs(model="none")


def request(name: str, prompt: list[int], max_tokens: int = 4) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=prompt,
        params=SamplingParams(max_tokens=max_tokens),
        seed=0,
        max_tokens=max_tokens,
    )


def add(*requests: EngineRequest) -> wire.Add:
    return wire.Add([one.request_id for one in requests], msgspec.Raw(msgspec.msgpack.encode(list(requests))))


@pytest.mark.parametrize("step", ["_bound", "_spawn"])
def test_without_file_descriptors_a_start_is_an_error_and_leaves_no_directory(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(client, step, refuse)
    for name in ("open", "scandir"):  # what rmtree calls
        monkeypatch.setattr(os, name, refuse)
    with pytest.raises(EngineDeadError, match="process can't be started: .*Too many open files"):
        asyncio.run(launch_core(ARGS, fake_core.FACTORY))
    monkeypatch.undo()
    assert not [*tmp_path.iterdir()]


def family(count: int, **params: Any) -> list[EngineRequest]:
    """The sequences of one request with `n` of `count`, as the frontend makes them."""
    inputs = InputProcessor(None, vocab_size=300_000, max_model_len=100_000, eos_token_ids=(1,))
    wanted = SamplingParams(n=count, max_tokens=4, output_kind="delta", **params)
    return inputs.process([5] * 30_000, wanted, "r", priority=3, cache_salt="s")


class Adds:
    """A core that keeps what is added."""

    has_work = True

    def __init__(self) -> None:
        self.requests: list[EngineRequest] = []

    def add(self, request: EngineRequest) -> None:
        self.requests.append(request)


def test_siblings_travel_once_and_arrive_as_they_were() -> None:
    requests = family(128, prompt_logprobs=2, allowed_token_ids=list(range(1000)))
    message = msgspec.msgpack.encode(wire.Add.of(requests))
    assert len(message) < len(msgspec.msgpack.encode(wire.Add.of(requests[:1]))) + 128 * 50
    core: Any = Adds()
    loop = CoreLoop(core, sockets=[], stall_seconds=60)
    loop._add(msgspec.msgpack.decode(message, type=wire.Add))
    assert core.requests == requests
    assert [one.params.prompt_logprobs for one in core.requests[:2]] == [2, None]


def test_what_one_request_asks_for_holds_the_core_up_once_and_not_n_times() -> None:
    message = wire.Add.of(family(128, allowed_token_ids=list(range(limits.MAX_ALLOWED_TOKEN_IDS))))
    core: Any = Adds()
    started = time.process_time()
    CoreLoop(core, sockets=[], stall_seconds=60)._add(message)
    assert time.process_time() - started < 1.0, "it was 20 s"
    assert len(core.requests) == 128


def test_every_frontend_hears_that_weights_are_half_new() -> None:
    sent: list[list[bytes]] = [[], []]
    sockets: Any = [SimpleNamespace(send=one.append) for one in sent]
    core: Any = SimpleNamespace(weights_fault="They are half new.", sleep_level=0)
    loop = CoreLoop(core, sockets, stall_seconds=60)
    loop._lives[1] = 1
    loop._tell([], wire.SchedulerStats())
    for (message,) in sent:
        told = msgspec.msgpack.decode(message, type=wire.Updates)
        assert (told.weights_fault, told.level) == ("They are half new.", 0)


@pytest.mark.parametrize(("seconds", "order"), [(0.0, "a1 step b1 step a2 step b2 step"), (60.0, "a1 a2 b1 b2 step")])
def test_steps_go_on_while_many_requests_come(monkeypatch: pytest.MonkeyPatch, seconds: float, order: str) -> None:
    """Two frontends have sent two requests each. Both have their turn."""
    monkeypatch.setattr(process, "INTAKE_SECONDS", seconds)
    done: list[str] = []

    class Core:
        failure_fd, weights_fault, sleep_level, has_work = None, "", None, True

        def add(self, request: EngineRequest) -> None:
            done.append(request.request_id)

        def step(self) -> list[RequestUpdate]:
            done.append("step")
            loop._running = any(queues)
            return []

        def stats(self) -> wire.SchedulerStats:
            return wire.SchedulerStats()

    class Socket:
        def __init__(self, queue: list[bytes]) -> None:
            self.queue = queue

        def recv(self, _: int) -> bytes:
            if not self.queue:
                raise zmq.Again
            return self.queue.pop(0)

        def send(self, _: bytes) -> None:
            pass

    monkeypatch.setattr(process.zmq, "Poller", lambda: SimpleNamespace(register=lambda *_: None))
    queues = [[msgspec.msgpack.encode(add(request(f"{who}{n}", [1]))) for n in (1, 2)] for who in "ab"]
    sockets: Any = [Socket(queue) for queue in queues]
    core: Any = Core()
    loop = CoreLoop(core, sockets, stall_seconds=60)
    loop._lives[1] = 1
    loop.run()
    assert " ".join(done) == order


class Frontend:
    """Collects what the core sends."""

    def __init__(self) -> None:
        self.messages: list[wire.FromCore] = []
        self.death: EngineDeadError | None = None

    def died(self, error: EngineDeadError) -> None:
        self.death = error

    async def until(self, condition: Callable[[], object], seconds: float = LONG) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.005)

    def updates(self, name: str) -> list[RequestUpdate]:
        found = [message for message in self.messages if isinstance(message, wire.Updates)]
        return [update for message in found for update in message.updates if update.request_id == name]

    def tokens(self, name: str) -> list[int]:
        return [token for update in self.updates(name) for token in update.new_token_ids]

    def finished(self, name: str) -> bool:
        return any(update.finish_reason is not None for update in self.updates(name))

    def refused(self) -> list[wire.Refused]:
        return [message for message in self.messages if isinstance(message, wire.Refused)]


@asynccontextmanager
async def running() -> AsyncIterator[tuple[CoreClient, Frontend]]:
    frontend = Frontend()
    core = await launch_core(ARGS, fake_core.FACTORY)
    client = CoreClient(core, receive=frontend.messages.append, died=frontend.died)
    try:
        yield client, frontend
    finally:
        await client.close()


def set_options(monkeypatch: pytest.MonkeyPatch, **options: object) -> None:
    monkeypatch.setenv(fake_core.OPTIONS_VARIABLE, msgspec.json.encode(options).decode())


def test_the_core_gets_settings_and_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "PAGERUNNER_API_KEY", "AWS_SESSION_TOKEN", "SSH_AUTH_SOCK", "NCCL_NVLS_ENABLE"):
        monkeypatch.setenv(name, "0")

    async def main() -> set[str]:
        async with running() as (client, _):
            held = Path(f"/proc/{client.pid}/environ").read_text().split("\0")
            return {variable.partition("=")[0] for variable in held}

    names = asyncio.run(main())
    assert names & {"HF_TOKEN", "PAGERUNNER_API_KEY", "AWS_SESSION_TOKEN", "SSH_AUTH_SOCK"} == set()
    assert {"NCCL_NVLS_ENABLE", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "PYTHONPATH", "PATH"} <= names


def test_requests_run_and_updates_come_back() -> None:
    async def main() -> None:
        async with running() as (client, frontend):
            assert client.ready.max_model_len == 2048
            assert msgspec.json.decode(client.ready.memory_plan)["groups"][0]["num_pages"] == 1024
            client.send(add(request("a", [5, 6]), request("b", [9], max_tokens=2)))
            await frontend.until(lambda: frontend.finished("a") and frontend.finished("b"))
            assert frontend.tokens("a") == [5, 6, 5, 6]
            assert frontend.tokens("b") == [9, 9]
            last = [m.stats for m in frontend.messages if isinstance(m, wire.Updates) and m.stats is not None][-1]
            assert (last.running, last.waiting, last.kv_usage) == (0, 0, 0.0)
            assert last.steps_total == 4

    asyncio.run(main())


def test_a_refused_request_fails_alone_and_takes_its_siblings_along() -> None:
    async def main() -> None:
        async with running() as (client, frontend):
            client.send(add(request("good", [5], max_tokens=3)))
            client.send(add(request("sibling", [1]), request("huge", [1], max_tokens=1_000_000)))
            await frontend.until(frontend.refused)
            [refused] = frontend.refused()
            assert refused.request_ids == ["sibling", "huge"]
            error = refused.error.exception()
            assert isinstance(error, InvalidRequestError) and error.param == "max_tokens"
            assert "needs 62501 pages; there are 1024" in str(error)
            await frontend.until(lambda: frontend.finished("good"))
            assert frontend.tokens("good") == [5, 5, 5]
            assert frontend.updates("sibling") == []

    asyncio.run(main())


def test_values_the_core_cannot_accept_or_a_bug_in_add_end_only_that_request() -> None:
    async def main() -> None:
        async with running() as (client, frontend):
            bad = msgspec.msgpack.decode(msgspec.msgpack.encode([request("x", [1])]))
            bad[0]["params"]["n"] = 0
            client.send(wire.Add(["x"], msgspec.Raw(msgspec.msgpack.encode(bad))))
            client.send(wire.Add(["y"], msgspec.Raw(b"\x01")))
            client.send(add(request("z", [fake_core.BREAK_ADD])))
            await frontend.until(lambda: len(frontend.refused()) == 3)
            kinds = [type(refused.error.exception()) for refused in frontend.refused()]
            assert kinds == [InvalidRequestError, InvalidRequestError, RequestFailedError]
            client.send(add(request("good", [5], max_tokens=1)))
            await frontend.until(lambda: frontend.finished("good"))

    asyncio.run(main())


def test_while_a_sleep_waits_for_requests_their_readers_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    set_options(monkeypatch, step_seconds=0.01)

    async def main() -> None:
        async with running() as (client, frontend):
            client.send(add(request("short", [5], max_tokens=20), request("endless", [6], max_tokens=1900)))
            await frontend.until(lambda: frontend.tokens("short"))
            asleep = asyncio.create_task(client.call(lambda call_id: wire.Sleep(call_id, 1, "wait")))
            await frontend.until(lambda: frontend.finished("short"))
            assert len(frontend.updates("short")) == 20 and not asleep.done()
            client.send(add(request("late", [5])))
            await frontend.until(frontend.refused)
            assert isinstance(frontend.refused()[0].error.exception(), EngineSleepingError)
            awake = asyncio.create_task(client.call(lambda call_id: wire.WakeUp(call_id, None)))
            assert await client.call(wire.ReadSleepLevel) is None and not awake.done()
            client.send(wire.Abort(["endless"]))
            async with asyncio.timeout(LONG):
                await asleep
                await awake
            assert frontend.finished("endless") and await client.call(wire.ReadSleepLevel) is None
            client.send(add(request("next", [5], max_tokens=2)))
            await frontend.until(lambda: frontend.finished("next"))

    asyncio.run(main())


def test_requests_that_come_while_a_pause_begins_wait_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    set_options(monkeypatch, step_seconds=0.01)

    async def main() -> None:
        async with running() as (client, frontend):
            client.send(add(request("endless", [6], max_tokens=1900)))
            await frontend.until(lambda: frontend.tokens("endless"))
            paused = asyncio.create_task(client.call(lambda call_id: wire.Sleep(call_id, 0, "wait")))
            await asyncio.sleep(0.05)
            client.send(add(request("late", [5], max_tokens=2)))
            client.send(add(request("gone_0", [5]), request("gone_1", [5])))
            client.send(wire.Abort(["gone_0", "gone_1"]))
            await frontend.until(lambda: frontend.finished("gone_0") and frontend.finished("gone_1"))
            assert not paused.done() and not frontend.updates("late")
            client.send(wire.Abort(["endless"]))
            async with asyncio.timeout(LONG):
                await paused
            client.send(add(request("later", [5], max_tokens=2)))
            client.send(add(request("left", [5], max_tokens=2)))
            client.send(wire.Abort(["left"]))
            await frontend.until(lambda: frontend.finished("left"))
            assert (
                await client.call(wire.ReadSleepLevel) == 0 and not frontend.updates("late") and not frontend.refused()
            )
            await client.call(lambda call_id: wire.WakeUp(call_id, None))
            await frontend.until(lambda: frontend.finished("late") and frontend.finished("later"))
            assert len(frontend.updates("left")) == len(frontend.updates("gone_0")) == 1

    asyncio.run(main())


def test_what_comes_after_a_pause_that_waits_is_done_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second sleep that waits doesn't hold up the readers of what the first one's end let run."""
    set_options(monkeypatch, step_seconds=0.01)

    async def main() -> None:
        async with running() as (client, frontend):
            client.send(add(request("first", [6], max_tokens=10)))
            await frontend.until(lambda: frontend.tokens("first"))
            calls = [
                asyncio.create_task(client.call(lambda call_id: wire.Sleep(call_id, 0, "wait"))),
                asyncio.create_task(client.call(lambda call_id: wire.WakeUp(call_id, None))),
            ]
            await asyncio.sleep(0)
            client.send(add(request("second", [5], max_tokens=50)))
            calls.append(asyncio.create_task(client.call(lambda call_id: wire.Sleep(call_id, 1, "wait"))))
            await frontend.until(lambda: len(frontend.updates("second")) > 5)
            assert not frontend.finished("second") and not calls[2].done()
            async with asyncio.timeout(LONG):
                await asyncio.gather(*calls)
            assert frontend.finished("second") and await client.call(wire.ReadSleepLevel) == 1

    asyncio.run(main())


def test_a_sleep_that_waits_finishes_the_requests_of_a_paused_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their readers are served meanwhile, and the engine is asleep only afterwards."""
    set_options(monkeypatch, step_seconds=0.01)

    async def main() -> None:
        async with running() as (client, frontend):
            await client.call(lambda call_id: wire.Sleep(call_id, 0, "keep"))
            client.send(add(request("queued", [5], max_tokens=30)))
            asleep = asyncio.create_task(client.call(lambda call_id: wire.Sleep(call_id, 1, "wait")))
            await frontend.until(lambda: len(frontend.tokens("queued")) > 2)
            assert not asleep.done() and await client.sleep_level() is None
            async with asyncio.timeout(LONG):
                await asleep
            assert len(frontend.tokens("queued")) == 30 and frontend.finished("queued")
            assert await client.sleep_level() == 1

    asyncio.run(main())


def test_a_sleep_that_must_be_refused_doesnt_wait_for_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    set_options(monkeypatch, step_seconds=0.01)

    async def main() -> None:
        async with running() as (client, frontend):
            client.send(add(request("endless", [6], max_tokens=1900)))
            await frontend.until(lambda: frontend.tokens("endless"))
            with pytest.raises(ConfigError, match="sleep level"):
                await client.call(lambda call_id: wire.Sleep(call_id, 7, "wait"))
            client.send(add(request("next", [5], max_tokens=2)))
            await frontend.until(lambda: frontend.finished("next"))

    asyncio.run(main())


def test_a_sleep_or_wake_that_fails_in_any_way_is_answered_and_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    set_options(monkeypatch, step_seconds=0.01, sleeps_to_fail=2, wakes_to_fail=2)

    async def main() -> None:
        async with running() as (client, frontend):
            client.send(add(request("endless", [6], max_tokens=1900)))
            await frontend.until(lambda: frontend.tokens("endless"))
            for _ in range(2):
                with pytest.raises(
                    RequestFailedError, match=r"Sleep has failed \(OSError.*no memory to lock.*tried again"
                ):
                    await client.call(lambda call_id: wire.Sleep(call_id, 1, "abort"))
            await frontend.until(lambda: frontend.finished("endless"))  # its reader hears what the failed sleep did
            await client.call(lambda call_id: wire.Sleep(call_id, 1, "abort"))
            for _ in range(2):
                with pytest.raises(RequestFailedError, match=r"WakeUp has failed \(OSError.*no memory to map"):
                    await client.call(lambda call_id: wire.WakeUp(call_id, None))
            await client.call(lambda call_id: wire.WakeUp(call_id, None))
            client.send(add(request("next", [5], max_tokens=2)))
            await frontend.until(lambda: frontend.finished("next"))

    asyncio.run(main())


def test_abort_ends_a_running_request(monkeypatch: pytest.MonkeyPatch) -> None:
    set_options(monkeypatch, step_seconds=0.01)

    async def main() -> None:
        async with running() as (client, frontend):
            client.send(add(request("a", [5], max_tokens=1000)))
            await frontend.until(lambda: frontend.updates("a"))
            client.send(wire.Abort(["a", "unknown"]))
            await frontend.until(lambda: frontend.finished("a"))
            assert frontend.updates("a")[-1].finish_reason == "abort"

    asyncio.run(main())


def test_calls_are_answered_and_their_errors_raised() -> None:
    async def main() -> None:
        async with running() as (client, _):
            assert await client.call(wire.ReadSleepLevel) is None
            await client.call(lambda call_id: wire.Sleep(call_id, 1, "abort"))
            assert await client.call(wire.ReadSleepLevel) == 1
            await client.call(lambda call_id: wire.WakeUp(call_id, None))
            assert await client.call(wire.ReadSleepLevel) is None
            assert await client.call(wire.ResetPrefixCache) is True
            with pytest.raises(ConfigError, match="level must be 0, 1 or 2, got 9"):
                await client.call(lambda call_id: wire.Sleep(call_id, 9, "abort"))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("token", "reason"),
    [(fake_core.CRASH, "RuntimeError: the fake core was told to crash"), (fake_core.EXIT, "exit status 3")],
)
def test_a_core_that_fails_is_noticed_within_a_second_with_its_reason(token: int, reason: str) -> None:
    async def main() -> None:
        async with running() as (client, frontend):
            start = time.monotonic()
            client.send(add(request("a", [token])))
            await frontend.until(lambda: frontend.death)
            assert time.monotonic() - start < patient(1.0)
            assert reason in str(frontend.death)
            with pytest.raises(EngineDeadError, match=reason):
                client.send(wire.Abort(["a"]))
            with pytest.raises(EngineDeadError, match=reason):
                await client.call(wire.ReadSleepLevel)

    asyncio.run(main())


def test_a_killed_core_fails_calls_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with running() as (client, frontend):
            client.send(add(request("a", [fake_core.HANG])))
            await asyncio.sleep(0.1)
            call = asyncio.create_task(client.call(wire.ReadSleepLevel))
            await asyncio.sleep(0.02)
            os.kill(client.pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await asyncio.wait_for(call, LONG)
            assert "SIGKILL" in str(frontend.death)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("start", "kind", "reason"),
    [
        ("checkpoint_error", CheckpointError, "model.safetensors is truncated: 10 bytes of 20."),
        ("bug", EngineDeadError, "ZeroDivisionError: a bug while loading"),
        ("exit", EngineDeadError, "exit status 7"),
    ],
)
def test_a_failed_start_raises_the_cores_own_error(
    start: str, kind: type[Exception], reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_options(monkeypatch, start=start)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def main() -> None:
        with pytest.raises(kind, match=reason):
            async with running():
                raise AssertionError("must not start")

    asyncio.run(main())
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_factory_is_a_config_error() -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="no_such_module"):
            await launch_core(ARGS, "no_such_module:build")

    asyncio.run(main())


def test_shutdown_leaves_no_process_and_no_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(
        dir="/tmp"
    ) as short:  # else its path may be too long for sockets, and they go elsewhere
        leaves_nothing(monkeypatch, Path(short))


def leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def main() -> int:
        async with running() as (client, frontend):
            [directory] = tmp_path.iterdir()
            assert directory.stat().st_mode & 0o777 == 0o700
            os.kill(client.pid, signal.SIGINT)
            os.kill(client.pid, signal.SIGTERM)
            await asyncio.sleep(0.05)
            assert is_alive(client.pid) and frontend.death is None
            return client.pid

    assert not is_alive(asyncio.run(main()))
    assert list(tmp_path.iterdir()) == []


def test_what_a_core_holds_is_not_freed_when_it_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A group with a trainer that stands still would be waited for, for minutes. What is to be done at the end is done: pages go to the disk."""
    set_options(monkeypatch, ends=str(tmp_path / "ended"))

    async def main() -> int:
        async with running() as (client, _):
            pass
        return client._core.exited.result()

    assert (asyncio.run(main()), (tmp_path / "ended").exists()) == (0, True), "it wasn't killed"


def test_cancelling_the_start_ends_the_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_options(monkeypatch, load_seconds=60)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def main() -> None:
        start = asyncio.create_task(launch_core(ARGS, fake_core.FACTORY))
        await asyncio.sleep(0.3)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start

    begun = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - begun < patient(5)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_parent_leaves_no_orphan_and_no_directory(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import asyncio, sys
        from helpers import fake_core
        from pagerunner.config import EngineArgs
        from pagerunner.engine.core.client import launch_core

        async def main():
            core = await launch_core(EngineArgs(model="none"), fake_core.FACTORY)
            print(core.process.pid, flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
    """)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=env)
    with parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        parent.kill()
    deadline = time.monotonic() + LONG
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(child)
    assert list(tmp_path.iterdir()) == []


def test_the_fake_core_has_all_that_the_core_process_asks_of_a_core() -> None:
    asked = set(re.findall(r"self\._core\.(\w+)", inspect.getsource(CoreLoop)))
    fake = fake_core.FakeCore(fake_core.FakeOptions(), 4)
    assert {"add", "change_weights"} < asked and asked - set(dir(fake)) == set()
