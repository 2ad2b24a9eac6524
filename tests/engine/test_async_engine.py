"""AsyncEngine over the fake core: outputs, aborts, sleep, health, and that text work doesn't hold up the loop."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers import fake_core
from helpers.patience import LONG, stretched
from helpers.serving import write_text_side
from pagerunner import limits
from pagerunner.config import EngineArgs
from pagerunner.engine.frontend.async_engine import AsyncEngine
from pagerunner.engine.frontend.frontend import Frontend, build_frontend
from pagerunner.engine.frontend.observer import EngineObserver, FinishedSequence
from pagerunner.engine.structured_output import grammar_door
from pagerunner.engine.structured_output.grammar_worker import Order
from pagerunner.errors import (
    CheckpointError,
    ConfigError,
    EngineDeadError,
    EngineSleepingError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
)
from pagerunner.text.stop_strings import StopAutomaton
from pagerunner.types import EngineRequest, RequestOutput, RequestUpdate, SamplingParams, StructuredOutputsParams

ENGINES: dict[str, AsyncEngine] = {}
STALL = stretched(0.5)  # an idle engine that waits for a core of a busy machine does not hang


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_side(tmp_path_factory.mktemp("model"))


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 ms a step."""
    options = msgspec.json.encode(fake_core.FakeOptions(step_seconds=0.02)).decode()
    monkeypatch.setenv(fake_core.OPTIONS_VARIABLE, options)


@asynccontextmanager
async def running(model: Path, **options: Any) -> AsyncIterator[AsyncEngine]:
    engine = await AsyncEngine.from_args(EngineArgs(model=str(model)), core_factory=fake_core.FACTORY, **options)
    try:
        yield engine
    finally:
        await engine.shutdown()


@pytest.fixture(scope="module", autouse=True)
def shared(forked: None) -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:  # the loop of ENGINES
        yield runner
        for engine in ENGINES.values():
            runner.run(engine.shutdown())


def with_shared(runner: asyncio.Runner, model: Path, test: Callable[[AsyncEngine], Awaitable[None]]) -> None:
    """As `with_engine`, and the engine goes on for other tests, unless this one fails: a start takes longer than most of them."""

    async def main() -> None:
        core, args = os.environ.get(fake_core.OPTIONS_VARIABLE, ""), EngineArgs(model=str(model))
        engine = ENGINES.pop(core, None) or await AsyncEngine.from_args(args, core_factory=fake_core.FACTORY)
        try:
            await test(engine)
            await until(lambda: engine.num_unfinished == 0 and engine.sleep_level == -1)
            engine.check_health()
        except BaseException:
            await engine.shutdown()
            raise
        ENGINES[core] = engine

    runner.run(main())


def with_engine(model: Path, test: Callable[[AsyncEngine], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with running(model, **options) as engine:
            await test(engine)

    asyncio.run(main())


async def last(engine: AsyncEngine, name: str, prompt: Any, **params: Any) -> RequestOutput:
    async with aclosing(engine.generate(prompt, SamplingParams(**params), name)) as outputs:
        output = [one async for one in outputs][-1]
    assert output.finished
    return output


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG):
        while not condition():
            await asyncio.sleep(0.005)


def test_every_output_kind_ends_with_the_same_text(shared: asyncio.Runner, model: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        texts = {}
        for kind in ("cumulative", "delta", "final_only"):
            text = ""
            async for output in engine.generate("hello", SamplingParams(max_tokens=9, output_kind=kind), kind):
                [one] = output.outputs
                text = text + one.text if kind == "delta" else one.text
            texts[kind] = text
        assert set(texts.values()) == {texts["cumulative"]} and texts["cumulative"].startswith("hello")
        assert engine.num_unfinished == 0

    with_shared(shared, model, test)


def test_n_sequences_come_as_one_request(shared: asyncio.Runner, model: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        output = await last(engine, "a", [5, 6], n=3, max_tokens=3)
        assert [(one.index, one.token_ids) for one in output.outputs] == [(index, [5, 6, 5]) for index in range(3)]

    with_shared(shared, model, test)


@pytest.mark.usefixtures("slow")
def test_leaving_the_iterator_or_being_cancelled_aborts(shared: asyncio.Runner, model: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        params = SamplingParams(max_tokens=1000, n=2)
        async with aclosing(engine.generate("hello", params, "left")) as outputs:
            async for _ in outputs:
                break
        task = asyncio.create_task(last(engine, "cancelled", "hello", max_tokens=1000))
        await until(lambda: engine.num_unfinished > 0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: engine.num_unfinished == 0)
        assert engine.stats.running == 0

    with_shared(shared, model, test)


@pytest.mark.usefixtures("slow")
def test_abort_ends_a_request_with_what_it_has(model: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        tasks = [asyncio.create_task(last(engine, name, "hello", max_tokens=1000)) for name in ("a", "b")]
        await until(lambda: engine.stats.running == 2)
        engine.abort("unknown")
        engine.abort("a")
        first = await tasks[0]
        assert first.outputs[0].finish_reason == "abort" and first.outputs[0].token_ids
        assert not tasks[1].done()
        engine.stop()
        assert (await tasks[1]).outputs[0].finish_reason == "abort"

    with_engine(model, test)


def test_errors_reach_only_the_request_that_caused_them(shared: asyncio.Runner, model: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
            ("", {}, InvalidRequestError, "empty"),
            ([10**6], {}, InvalidRequestError, "1000000"),
            ([fake_core.BREAK_ADD], {"n": 3}, RequestFailedError, "could not add"),
            ([fake_core.FAIL_ONE], {"n": 2}, RequestFailedError, "NaN in its logits"),
        ]
        good = asyncio.create_task(last(engine, "good", "hello", max_tokens=200))
        for prompt, params, kind, words in cases:
            given = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
            with pytest.raises(kind, match=words):
                await last(engine, "bad", given, **params)
        for call in (engine.memory_state(1), engine.watch(0, -1)):
            with pytest.raises(
                InvalidRequestError, match=r"engine must be in \[0, 1\), as data_parallel_size is 1; got -?1"
            ):
                await call
        assert len((await good).outputs[0].token_ids) == 200
        assert engine.num_unfinished == 0

    with_shared(shared, model, test)


@pytest.mark.usefixtures("slow")
def test_a_request_id_in_use_is_refused_and_the_first_goes_on(shared: asyncio.Runner, model: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        first = asyncio.create_task(last(engine, "same", "hello", max_tokens=10))
        await until(lambda: engine.num_unfinished == 1)
        with pytest.raises(InvalidRequestError, match="same"):
            await last(engine, "same", "hello")
        assert len((await first).outputs[0].token_ids) == 10

    with_shared(shared, model, test)


@pytest.mark.usefixtures("slow")
def test_an_id_that_looks_like_a_siblings_is_another_request(model: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        first = asyncio.create_task(last(engine, "x", "hello", n=2, max_tokens=20))
        await until(lambda: engine.num_unfinished == 2)
        for name in ("x_0", "x_1", "x-0", "x-0_0", "x-1_0"):
            assert (await last(engine, name, "hello", max_tokens=1)).request_id == name
        output = await first
        assert output.request_id == "x" and [len(one.token_ids) for one in output.outputs] == [20, 20]
        assert engine.num_unfinished == 0

    with_engine(model, test)


def test_sleep_refuses_and_wake_up_serves_again(shared: asyncio.Runner, model: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        await engine.sleep(1)
        assert await engine.is_sleeping()
        with pytest.raises(EngineSleepingError, match="wake_up"):
            await last(engine, "a", "hello")
        await engine.wake_up()
        assert not await engine.is_sleeping()
        assert (await last(engine, "b", "hello", max_tokens=2)).outputs[0].token_ids
        assert await engine.reset_prefix_cache() is True

    with_shared(shared, model, test)


@pytest.mark.usefixtures("slow")
def test_a_caller_of_sleep_who_is_cancelled_leaves_the_right_state(shared: asyncio.Runner, model: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        task = asyncio.create_task(last(engine, "a", "hello", max_tokens=10))
        await until(lambda: engine.stats.running == 1)
        sleeping = asyncio.create_task(engine.sleep(1, "wait"))
        await asyncio.sleep(0.01)
        sleeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sleeping
        assert len((await task).outputs[0].token_ids) == 10
        await until(lambda: engine.sleep_level == 1)
        assert await engine.is_sleeping()
        waking = asyncio.create_task(engine.wake_up())
        await asyncio.sleep(0)
        waking.cancel()
        await until(lambda: engine.sleep_level == -1)
        assert (await last(engine, "b", "hello", max_tokens=1)).finished

    with_shared(shared, model, test)


def test_requests_wait_while_the_engine_is_paused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(engine: AsyncEngine) -> None:
        await engine.sleep(0)
        waiting = [asyncio.create_task(last(engine, name, "hello", max_tokens=2)) for name in "abc"]
        await until(lambda: engine.stats.waiting + engine.stats.running == 3)
        monkeypatch.setattr(limits, "MAX_QUEUED_REQUESTS", 3)
        with pytest.raises(QueueFullError, match="MAX_QUEUED_REQUESTS"):
            await last(engine, "d", "hello")
        waiting[1].cancel()
        await until(lambda: engine.num_unfinished == 2 and engine.stats.waiting + engine.stats.running == 2)
        await asyncio.sleep(2 * STALL)
        engine.check_health()
        assert not waiting[0].done() and not waiting[2].done()
        await engine.wake_up()
        for one in (waiting[0], waiting[2]):
            assert len((await one).outputs[0].token_ids) == 2

    with_engine(model, test, stall_seconds=STALL)


def test_a_request_larger_than_the_queue_is_told_what_to_ask_for(
    shared: asyncio.Runner, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(engine: AsyncEngine) -> None:
        text = "hello there my friend"
        size = len(await engine.encode(text))
        for most, param in ((size - 1, "prompt"), (4 * size - 1, "n")):
            monkeypatch.setattr(limits, "MAX_QUEUED_TOKENS", most)
            words = rf"^The request has {4 * size} prompt tokens \(n=4\); at most {most} may wait at once \(PAGERUNNER_"
            with pytest.raises(InvalidRequestError, match=words) as caught:
                await last(engine, "a", text, n=4)
            assert caught.value.param == param
        monkeypatch.setattr(limits, "MAX_QUEUED_TOKENS", 4 * size)
        assert len((await last(engine, "a", text, n=4, max_tokens=1)).outputs) == 4

    with_shared(shared, model, test)


@pytest.mark.usefixtures("slow")
def test_unfinished_requests_of_a_sleeping_engine_are_no_stall(model: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        task = asyncio.create_task(last(engine, "a", "hello", max_tokens=5))
        await until(lambda: engine.stats.running == 1)
        await engine.sleep(1, "keep")
        await asyncio.sleep(2 * STALL)
        engine.check_health()
        await engine.wake_up()
        engine.check_health()
        assert len((await task).outputs[0].token_ids) == 5

    with_engine(model, test, stall_seconds=STALL)


def test_after_a_sleep_or_wake_up_that_failed_the_level_is_the_cores(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = msgspec.json.encode(fake_core.FakeOptions(step_seconds=0.02, sleeps_to_fail=1, wakes_to_fail=1)).decode()
    monkeypatch.setenv(fake_core.OPTIONS_VARIABLE, options)

    class Levels(EngineObserver):
        seen: list[int | None] = []

        def on_sleep(self, level: int | None) -> None:
            self.seen.append(level)

    async def test(engine: AsyncEngine) -> None:
        task = asyncio.create_task(last(engine, "a", "hello", max_tokens=5))
        await until(lambda: engine.stats.running == 1)
        with pytest.raises(ConfigError, match="sleep level"):
            await engine.sleep(7)
        assert engine.sleep_level == -1
        for change in (lambda: engine.sleep(1, "keep"), engine.wake_up):
            with pytest.raises(RequestFailedError, match="tried again"):
                await change()
            assert await engine.is_sleeping()
            assert engine.sleep_level == 1 and Levels.seen[-1] == 1
        await asyncio.sleep(2 * STALL)
        engine.check_health()  # requests that are kept are no stall
        await engine.sleep(0, "keep")
        assert engine.sleep_level == 1  # a lighter level while asleep changes nothing
        await engine.wake_up()
        engine.check_health()
        assert engine.sleep_level == -1 and Levels.seen[-1] is None
        assert len((await task).outputs[0].token_ids) == 5

    with_engine(model, test, stall_seconds=STALL, observer=Levels())


def unhealthy(engine: AsyncEngine) -> bool:
    try:
        engine.check_health()
    except EngineDeadError:
        return True
    return False


def test_a_hanging_core_is_unhealthy_only_while_it_has_work(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    printed: list[str] = []

    def stacks_are_printed() -> bool:
        """The watchdog has had the core print where it hangs."""
        printed.append(capfd.readouterr().err)
        return "in _advance" in "".join(printed)

    async def test(engine: AsyncEngine) -> None:
        await asyncio.sleep(2 * STALL)
        engine.check_health()
        task = asyncio.create_task(last(engine, "a", {"prompt_token_ids": [fake_core.HANG]}))
        await until(lambda: unhealthy(engine) and stacks_are_printed())
        with pytest.raises(EngineDeadError, match="1 unfinished requests and has made no step for"):
            engine.check_health()
        task.cancel()
        os.kill(engine.replicas[0].client.pid, signal.SIGKILL)

    with_engine(model, test, stall_seconds=STALL)


def test_death_reaches_every_reader_and_later_calls(model: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        waiting = [asyncio.create_task(last(engine, f"w{index}", "hello", max_tokens=2000)) for index in range(3)]
        with pytest.raises(EngineDeadError, match="told to crash"):
            await last(engine, "crash", {"prompt_token_ids": [fake_core.CRASH]})
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, EngineDeadError)
        with pytest.raises(EngineDeadError, match="told to crash"):
            await last(engine, "late", "hello")
        with pytest.raises(EngineDeadError, match="told to crash"):
            engine.check_health()

    with_engine(model, test)


def test_long_texts_are_tokenised_off_the_loop(model: Path) -> None:
    loop_went_on = threading.Event()

    def slow_frontend(args: EngineArgs, max_model_len: int) -> Frontend:
        frontend = build_frontend(args, max_model_len)
        process = frontend.inputs.process

        def slow_process(*args: Any, **kwargs: Any) -> Any:
            assert loop_went_on.wait(LONG)
            return process(*args, **kwargs)

        frontend.inputs.process = slow_process  # type: ignore[method-assign]
        return frontend

    async def test(engine: AsyncEngine) -> None:
        task = asyncio.create_task(last(engine, "long", "word " * 900, max_tokens=1))
        await asyncio.sleep(0.01)
        for _ in range(5):
            await asyncio.sleep(0.001)
        assert not task.done()
        loop_went_on.set()
        await task

    with_engine(model, test, frontend_factory=slow_frontend)


def test_text_that_cannot_be_processed_ends_its_request_only(model: Path) -> None:
    def broken_frontend(args: EngineArgs, max_model_len: int) -> Frontend:
        frontend = build_frontend(args, max_model_len)
        take = frontend.outputs.take

        def broken_take(updates: list[RequestUpdate]) -> Any:
            if any(update.request_id.startswith("bad-") for update in updates):
                raise KeyError("a bug in the detokeniser")
            return take(updates)

        frontend.outputs.take = broken_take  # type: ignore[method-assign]
        return frontend

    async def test(engine: AsyncEngine) -> None:
        good = asyncio.create_task(last(engine, "good", "hello", max_tokens=200))
        with pytest.raises(RequestFailedError, match="a bug in the detokeniser"):
            await last(engine, "bad", "hello", max_tokens=2000)
        assert len((await good).outputs[0].token_ids) == 200
        await until(lambda: engine.num_unfinished == 0)

    with_engine(model, test, frontend_factory=broken_frontend)


def test_chat_rendering_and_text_helpers(shared: asyncio.Runner, model: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        ids = await engine.render_chat([{"role": "user", "content": "hi"}])
        assert await engine.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert await engine.decode(await engine.encode("hello, world")) == "hello, world"
        assert engine.max_model_len == engine.memory_plan["max_model_len"] == 2048

    with_shared(shared, model, test)


def test_added_requests_stream_deltas_and_can_be_aborted(shared: asyncio.Runner, model: Path, slow: None) -> None:
    async def test(engine: AsyncEngine) -> None:
        params = SamplingParams(max_tokens=6, output_kind="delta")
        stream = await engine.add_request("a", "hello", params)
        outputs = [await stream.get()]
        while not outputs[-1].finished:
            outputs.append(await stream.get())
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == 6
        assert len(outputs) > 1
        endless = await engine.add_request("b", "hello", SamplingParams(max_tokens=1000))
        await endless.get()
        engine.abort("b")
        while not (output := await endless.get()).finished:
            pass
        assert output.outputs[0].finish_reason == "abort"
        assert engine.num_unfinished == 0

    with_shared(shared, model, test)


def test_observers_hear_of_sequences_and_of_sleep(model: Path) -> None:
    class Listener(EngineObserver):
        def __init__(self) -> None:
            self.heard: list[object] = []

        def on_started(self, request: EngineRequest) -> None:
            self.heard.append(("started", request.request_id))

        def on_dropped(self, request: EngineRequest) -> None:
            self.heard.append(("dropped", request.request_id))

        def on_finished(self, sequence: FinishedSequence) -> None:
            self.heard.append((sequence.reason, sequence.request.request_id, sequence.is_first))
            assert sequence.arrival <= sequence.admitted <= sequence.first_token <= sequence.last_token <= sequence.end

        def on_sleep(self, level: int | None) -> None:
            self.heard.append(level)

    listener = Listener()

    async def test(engine: AsyncEngine) -> None:
        await last(engine, "a", {"prompt_token_ids": [5]}, max_tokens=2, n=2)
        with pytest.raises(RequestFailedError):
            await last(engine, "b", {"prompt_token_ids": [fake_core.BREAK_ADD]})
        await engine.sleep(1)
        await engine.wake_up()
        assert engine.startup.seconds["weights"] == 1.5 and "process and imports" in engine.startup.seconds

    with_engine(model, test, observer=listener)
    assert listener.heard[:2] == [("started", "a-0_0"), ("started", "a-0_1")]
    assert sorted(map(str, listener.heard[2:4])) == ["('length', 'a-0_0', True)", "('length', 'a-0_1', False)"]
    assert listener.heard[4:] == [("started", "b-1"), ("dropped", "b-1"), 1, None]


def test_many_bad_words_are_tokenised_off_the_loop(shared: asyncio.Runner, model: Path) -> None:
    async def test(engine: AsyncEngine) -> None:
        places: list[bool] = []
        tokenizer = engine.tokenizer
        encode = type(tokenizer).encode

        def watched(self: Any, text: str, **how: Any) -> list[int]:
            places.append(threading.current_thread() is threading.main_thread())
            return encode(self, text, **how)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(tokenizer), "encode", watched)
            await last(engine, "few", {"prompt_token_ids": [5, 6]}, max_tokens=1, bad_words=["ab"])
            assert all(places) and places
            places.clear()
            await last(engine, "many", {"prompt_token_ids": [5, 6]}, max_tokens=1, bad_words=["ab" * 50] * 80)
            assert places and not any(places)

    with_shared(shared, model, test)


def test_long_stop_strings_are_prepared_off_the_loop(shared: asyncio.Runner, model: Path) -> None:
    """As many at once as there may be: what they are searched with is made once for each, and never on the loop."""
    made: list[bool] = []
    init = StopAutomaton.__init__

    def noted(self: StopAutomaton, strings: tuple[str, ...]) -> None:
        made.append(threading.current_thread() is threading.main_thread())
        init(self, strings)

    async def test(engine: AsyncEngine) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StopAutomaton, "__init__", noted)
            stops = [[f"{number:04}{letter}" * 100 for letter in "abcdefgh"] for number in range(40)]
            await asyncio.gather(
                *(
                    last(engine, str(n), {"prompt_token_ids": [5]}, max_tokens=1, stop=one)
                    for n, one in enumerate(stops)
                )
            )
            assert made == [False] * len(stops)
            made.clear()
            await last(engine, "short", {"prompt_token_ids": [5]}, max_tokens=1, stop=["a new one"])
            assert made == [True]

    with_shared(shared, model, test)


def test_more_new_grammars_at_once_than_are_remembered_dont_hold_up_the_loop(
    shared: asyncio.Runner, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_door, "KEPT", 2)
    checks: list[str] = []
    send = grammar_door._Process.send

    def counted(self: Any, order: Order) -> None:
        if order.wanted is not None:
            checks.append(str(order.wanted.regex))
        send(self, order)

    monkeypatch.setattr(grammar_door._Process, "send", counted)

    async def test(engine: AsyncEngine) -> None:
        wanted = [StructuredOutputsParams(regex=f"a{{{count}}}") for count in range(1, 8)]
        await asyncio.gather(
            *(last(engine, str(one.regex), "ab", max_tokens=1, structured_outputs=one) for one in wanted)
        )
        assert sorted(checks) == sorted(str(one.regex) for one in wanted), "each once, none while the loop waits"

    with_shared(shared, model, test)


def test_a_lighter_sleep_while_asleep_leaves_the_state_that_it_is(model: Path) -> None:
    """As the core does it: what level 2 has freed stays freed."""
    levels: list[int | None] = []

    class Noted(EngineObserver):
        def on_sleep(self, level: int | None) -> None:
            levels.append(level)

    async def test(engine: AsyncEngine) -> None:
        for level in (1, 2, 1):
            await engine.sleep(level)
        await engine.wake_up()
        await engine.sleep(1)

    with_engine(model, test, observer=Noted())
    assert levels == [1, 2, None, 1], "told of changes alone"


def test_a_chat_template_that_is_no_file_is_refused_before_anything_is_loaded(model: Path, tmp_path: Path) -> None:
    large = tmp_path / "large.jinja"
    with large.open("wb") as file:
        file.truncate(2**33)
    for option, words in (
        *((place, "no regular file") for place in ("/dev/zero", str(tmp_path))),
        (str(large), "8589934592 bytes"),
        (str(tmp_path / "nope.jinja"), "There is no chat template file"),
        ("no template and no name " * 20, "There is no chat template file"),
    ):
        args = EngineArgs(model=str(model), chat_template=option)
        with pytest.raises(CheckpointError, match=words):  # the factory isn't reached
            asyncio.run(AsyncEngine.from_args(args, core_factory="nowhere:build"))
