"""The door for grammars: who waits for whom, what is remembered, and what becomes of processes that die."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import make_checkpoint
from helpers.patience import LONG, patient, until
from helpers.processes import children_of, is_alive
from pagerunner import SamplingParams, StructuredOutputsParams, limits
from pagerunner.engine.structured_output import grammar, grammar_door
from pagerunner.engine.structured_output.grammar_door import GrammarDoor
from pagerunner.engine.structured_output.options import read_structured_outputs_config
from pagerunner.errors import ConfigError, InvalidRequestError, RequestFailedError
from pagerunner.text.tokenizer import Tokenizer
from pagerunner.types import EngineRequest, Grammar


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("door"), "qwen3")


def new_door(checkpoint: Path) -> GrammarDoor:
    return GrammarDoor(Tokenizer.from_path(checkpoint).to_json(), 512, [0])


@pytest.fixture
def door(checkpoint: Path) -> Iterator[GrammarDoor]:
    made = new_door(checkpoint)
    made.check(StructuredOutputsParams(regex="started"))
    yield made
    made.close()


def slow(name: str, rules: int = 8_000) -> StructuredOutputsParams:
    """A grammar that compiles for seconds, and is refused then."""
    lines = ["root ::= r0", *(f"r{i} ::= r{i + 1}" for i in range(rules)), f'r{rules} ::= "{name}"']
    return StructuredOutputsParams(grammar="\n".join(lines))


def regex(text: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=text)


def worker_of(door: GrammarDoor) -> int:
    assert door._process is not None and door._process.pid is not None
    return door._process.pid


def test_it_checks_once_and_gives_up_in_time(door: GrammarDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    first = door.check(regex("a+"))
    assert first == door.check(regex("a+"))
    assert door.check(StructuredOutputsParams(regex="a+", after="x")).after == "x"
    monkeypatch.setattr(limits, "MAX_GRAMMAR_SECONDS", 0.3)
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="0.3 seconds"):
            door.check(slow("late", 3_000))
    with pytest.raises(InvalidRequestError, match="0.3 seconds"):
        asyncio.run(door.prepare(slow("late", 3_000)))
    monkeypatch.setattr(limits, "MAX_GRAMMAR_SECONDS", 5.0)
    asyncio.run(door.prepare(regex("b+")))


def test_only_what_the_compiler_said_is_remembered(door: GrammarDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    good = regex("[ab]{7}")
    with monkeypatch.context() as busy:
        busy.setattr(limits, "MAX_GRAMMAR_SECONDS", 1e-6)
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match="seconds to compile"):
                asyncio.run(door.prepare(good))
    assert asyncio.run(door.prepare(good)).text == door.check(good).text
    with pytest.raises(InvalidRequestError, match="unclosed group"):
        door.check(regex("("))
    sent: list[Any] = []
    monkeypatch.setattr(grammar_door._Process, "send", lambda self, order: sent.append(order))
    assert door.check(good).text
    with pytest.raises(InvalidRequestError, match="unclosed group"):
        door.check(regex("("))
    assert not sent, "what was settled is remembered"


def test_slow_grammars_of_clients_that_left_delay_nobody(door: GrammarDoor) -> None:
    async def main() -> float:
        tasks = [asyncio.create_task(door.prepare(slow(f"{i}"), "them")) for i in range(20)]
        await asyncio.sleep(0.3)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        start = time.monotonic()
        await door.prepare(regex("b+"), "us")
        assert not door._jobs
        deadline = time.monotonic() + LONG
        while children_of(worker_of(door)):  # nor do they go on
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        return time.monotonic() - start

    assert asyncio.run(main()) < patient(5)


def test_slow_grammars_of_clients_that_stay_delay_nobody_either(door: GrammarDoor) -> None:
    async def main() -> None:
        large = [asyncio.create_task(door.prepare(slow(f"{i}"), "them")) for i in range(20)]
        many = [asyncio.create_task(door.prepare(regex(f"(((a{{1,90}}){{90}}){{9{i}}})"), "them")) for i in range(20)]
        await asyncio.sleep(0.3)
        start = time.monotonic()
        await door.prepare(regex("c+"), "us")
        assert time.monotonic() - start < patient(5)
        assert sum(job.started for job in door._jobs.values()) <= 8
        for task in (*large, *many):
            task.cancel()
        await asyncio.gather(*large, *many, return_exceptions=True)

    asyncio.run(main())


def test_of_two_that_wait_for_the_same_grammar_one_may_leave(door: GrammarDoor) -> None:
    async def main() -> None:
        first, second = (asyncio.create_task(door.prepare(slow("same", 1_000))) for _ in range(2))
        await asyncio.sleep(0.05)
        first.cancel()
        assert (await second).text

    asyncio.run(main())


def test_a_process_that_died_between_two_grammars_is_not_the_second_ones_fault(door: GrammarDoor) -> None:
    for name in "bcd":
        os.kill(worker_of(door), signal.SIGKILL)
        assert door.check(regex(f"{name}+")).text
    assert door.check(regex("b+")).text


def test_a_child_that_is_killed_from_outside_is_tried_again(door: GrammarDoor) -> None:
    @contextmanager
    def killing(count: int) -> Iterator[list[int]]:
        kills, over = list[int](), threading.Event()

        def kill_first() -> None:
            while len(kills) < count and not over.wait(0.001):
                for child in children_of(worker_of(door)):
                    if child not in kills:
                        kills.append(child)
                        os.kill(child, signal.SIGKILL)

        killer = threading.Thread(target=kill_first)
        killer.start()
        try:
            yield kills
        finally:
            over.set()
            killer.join()

    for attempt in range(20):  # a child may have ended before it is seen
        with killing(1) as kills:
            assert door.check(slow(f"again {attempt}", 1_000)).text
        if kills:
            break
    assert kills
    said = ""
    for attempt in range(20):
        asked = slow(f"once more {attempt}", 1_000)
        try:
            with killing(3):
                door.check(asked)
        except RequestFailedError as error:
            said = str(error)
            break
    assert "was killed" in said
    assert door.check(asked).text, "that is not remembered"


def test_at_the_end_nobody_waits_for_the_queue(checkpoint: Path) -> None:
    door = new_door(checkpoint)

    async def main() -> float:
        tasks = [asyncio.create_task(door.prepare(slow(f"{i}"))) for i in range(12)]
        await asyncio.sleep(0.5)
        pid = worker_of(door)
        start = time.monotonic()
        door.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, RequestFailedError) and "shutting down" in str(one) for one in results)
        with pytest.raises(RequestFailedError, match="shutting down"):
            await door.prepare(regex("a"))
        while is_alive(pid) and time.monotonic() < start + patient(5):
            await asyncio.sleep(0.01)
        return time.monotonic() - start

    assert asyncio.run(main()) < patient(5)


def test_a_program_that_ends_waits_for_no_grammar(checkpoint: Path) -> None:
    code = f"""
import threading, time
from pathlib import Path
from pagerunner import StructuredOutputsParams
from pagerunner.engine.structured_output.grammar_door import GrammarDoor
from pagerunner.text.tokenizer import Tokenizer
{inspect.getsource(new_door)}
{inspect.getsource(slow)}
door = new_door(Path({str(checkpoint)!r}))
door.check(StructuredOutputsParams(regex="a"))
for number in range(6):
    threading.Thread(target=lambda: door.check(slow(str(number))), daemon=True).start()
time.sleep(0.3)
print(time.time(), door._process.pid)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG)
    ended = time.time()
    assert ran.returncode == 0, ran.stderr[-2000:]
    said, pid = ran.stdout.split()
    assert ended - float(said) < patient(5)
    until(lambda: not is_alive(int(pid)))


def test_a_schema_that_is_too_large_is_refused_before_it_is_compiled(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_door, "_Process", lambda *args: pytest.fail("it reached the compiler"))
    door = new_door(checkpoint)
    schema = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(20_000)}}
    with pytest.raises(InvalidRequestError, match="at most 262,144 are allowed"):
        asyncio.run(door.prepare(StructuredOutputsParams(json=schema)))


def test_a_tokenizer_that_llguidance_does_not_know(checkpoint: Path) -> None:
    door = GrammarDoor('{"version": "1.0"}', 512, [0])
    for name in "ab":
        with pytest.raises(InvalidRequestError, match="tokenizer"):
            door.check(regex(name))


def test_compact_json_by_default(checkpoint: Path) -> None:
    door = GrammarDoor(Tokenizer.from_path(checkpoint).to_json(), 512, [0], disable_any_whitespace=True)
    compact = door.check(StructuredOutputsParams(json={"type": "object"}, disable_any_whitespace=True))
    assert door.check(StructuredOutputsParams(json={"type": "object"})) == compact
    assert door.check(StructuredOutputsParams(json={"type": "object"}, whitespace_pattern=" ?")) != compact
    door.close()
    assert read_structured_outputs_config(
        '{"backend": "guidance", "disable_any_whitespace": true}'
    ).disable_any_whitespace
    assert not read_structured_outputs_config(None).disable_any_whitespace
    with pytest.raises(
        ConfigError, match="backend of structured_outputs_config must be one of auto, guidance, got 'xgrammar'"
    ):
        read_structured_outputs_config({"backend": "xgrammar"})
    for bad in ("{", {"nope": 1}, '{"disable_any_whitespace": 3}'):
        with pytest.raises(ConfigError, match="structured_outputs_config must be JSON"):
            read_structured_outputs_config(bad)


def test_what_nobody_waits_for_is_not_compiled_in_the_core_either(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that were aborted leave the queue of the core's compilers; small grammars have compilers of their own."""
    gate, compiled = threading.Event(), []
    compile_ = grammar.compile_grammar

    def slowly(tokenizer: Any, text: str) -> Any:
        compiled.append(text)
        if len(text) > 4_096:
            gate.wait(LONG)
        return compile_(tokenizer, text)

    monkeypatch.setattr(grammar, "compile_grammar", slowly)
    data = Tokenizer.from_path(checkpoint).to_json()
    guides = grammar.Guides(lambda: grammar.guide_tokenizer(data, 512, [0]))

    def guide(text: str) -> grammar.GrammarGuide:
        lark = json.dumps({"grammars": [{"lark_grammar": f'start: "{text}"'}]})
        return guides(
            EngineRequest(
                request_id=text[:20],
                prompt_token_ids=[5],
                params=SamplingParams(),
                seed=0,
                max_tokens=9,
                grammar=Grammar(lark),
            )
        )

    large = [guide(f"{number}" * 5_000) for number in range(6)]
    for one in large[2:]:
        one.close()
    quick = guide("quick")
    quick.wait(LONG)
    assert quick.ready and quick.error is None
    again = guide("5" * 5_000)
    gate.set()
    again.wait(LONG)
    assert again.error is None and again.masks[0] is not None
    assert len(compiled) == 4, "two that had begun, the small one, and the one that came back"
