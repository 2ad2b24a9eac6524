"""AsyncEngine in a fork of its process, and in another loop: each method says so, and nothing is lost where the engine was made."""

from __future__ import annotations

import asyncio
import inspect
import os
import select
import signal
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from helpers import fake_core
from helpers.patience import LONG, patient
from helpers.serving import write_text_side
from pagerunner.config import EngineArgs
from pagerunner.engine.frontend.async_engine import AsyncEngine
from pagerunner.types import SamplingParams
from pagerunner.types.weights import FinishUpdate

PARAMS = SamplingParams(max_tokens=1000, output_kind="delta")
SLOW = '{"step_seconds": 0.02}'  # the request is under way for 20 s, however busy the machine is
NOT_CALLS = {"from_args"}  # it makes an engine of the fork's own


def calls_of(engine: AsyncEngine, outputs: Any) -> dict[str, Callable[[], Any]]:
    """A call of each method; of `generate` a new request and one that is under way."""
    return {
        "generate": lambda: anext(engine.generate("a", PARAMS, "new")),
        "the next output": lambda: anext(outputs),
        "add_request": lambda: engine.add_request("new", "a", PARAMS),
        "render_chat": lambda: engine.render_chat([{"role": "user", "content": "a"}]),
        "encode": lambda: engine.encode("a"),
        "decode": lambda: engine.decode([1]),
        "abort": lambda: engine.abort("running"),
        "stop": engine.stop,
        "sleep": engine.sleep,
        "wake_up": engine.wake_up,
        "is_sleeping": engine.is_sleeping,
        "reset_prefix_cache": engine.reset_prefix_cache,
        "change_weights": lambda: engine.change_weights(FinishUpdate()),
        "memory_state": engine.memory_state,
        "watch": lambda: engine.watch(0),
        "check_health": engine.check_health,
        "shutdown": engine.shutdown,
    }


def said_by(call: Callable[[], Any]) -> str:
    """What the call raises, run in a loop of the fork's own."""

    async def run() -> None:
        result = call()
        if isinstance(result, Awaitable):
            async with asyncio.timeout(LONG):
                await result

    try:
        asyncio.new_event_loop().run_until_complete(run())
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def answers_of_a_fork(calls: dict[str, Callable[[], Any]]) -> tuple[int, dict[str, str]]:
    """The fork's process id, and what each call raises there."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # nothing of pytest may go on here
        asyncio._set_running_loop(None)
        for name, call in calls.items():
            os.write(writer, f"{name}\t{said_by(call)}\n".encode())
        os._exit(0)
    os.close(writer)
    text = b""
    try:
        while text.count(b"\n") < len(calls):
            assert select.select([reader], [], [], patient(20))[0], f"the fork hangs after {text.decode()}"
            text += os.read(reader, 1 << 16)
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return child, dict(line.split("\t") for line in text.decode().splitlines())


def test_a_fork_of_the_process_and_another_loop_hear_that_the_engine_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(fake_core.OPTIONS_VARIABLE, SLOW)

    async def main() -> None:
        args = EngineArgs(model=str(write_text_side(tmp_path)))
        engine = await AsyncEngine.from_args(args, core_factory=fake_core.FACTORY)
        try:
            async with aclosing(engine.generate("hello", PARAMS, "running")) as outputs:
                first = await anext(outputs)
                calls = calls_of(engine, outputs)
                methods = {name for name, _ in inspect.getmembers(AsyncEngine, inspect.isroutine) if name[0] != "_"}
                assert methods - NOT_CALLS <= calls.keys()
                child, said = await asyncio.to_thread(answers_of_a_fork, calls)
                sentence = f"RuntimeError: This AsyncEngine was made in process {os.getpid()}, of which process {child} is a fork."
                assert [name for name, one in said.items() if not one.startswith(sentence)] == []
                calls.pop("the next output")  # which would be the last one then
                said = await asyncio.to_thread(lambda: {name: said_by(call) for name, call in calls.items()})
                sentence = "RuntimeError: This AsyncEngine was made in another event loop"
                assert [name for name, one in said.items() if not one.startswith(sentence)] == []
                later = await anext(outputs)
            assert (
                not first.finished and not later.finished and later.outputs[0].token_ids
            )  # nothing is lost where it was made
            assert await engine.encode("a") and not await engine.is_sleeping()
            engine.check_health()
        finally:
            await engine.shutdown()

    asyncio.run(main())
