"""Chat templates that explode end with a sentence for one conversation; ordinary ones cost little."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import re
import resource
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoints import write_tokenizer
from helpers.effort import by_days, effort
from helpers.patience import LONG, patient
from pagerunner import limits
from pagerunner.errors import EngineDeadError, InvalidRequestError, RequestFailedError
from pagerunner.text import chat_template, template_pool
from pagerunner.text.template_pool import TemplateRenderer
from pagerunner.text.tokenizer import Tokenizer

USER = [{"role": "user", "content": "hi"}]
PICKY = (
    "{% set ask = messages[0].content %}"
    "{% if ask == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "{% if ask == 'memory' %}{{ ('x' * 4000000000)|length }}{% endif %}"
    "{% if ask == 'output' %}{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}{% endif %}"
    "{% if ask == 'secret' %}{{ environ }}{% endif %}"
    "{% if ask == 'escape' %}{{ ''.__class__.__mro__[1].__subclasses__() }}{% endif %}"
    "{% if ask == 'depth' %}{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}{% endif %}"
    "<{{ ask }}>"
)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_tokenizer(tmp_path, 300, add_bos=False)
    return Tokenizer.from_path(tmp_path, PICKY)


def with_renderer(tokenizer: Tokenizer, work: Any) -> Any:
    async def main() -> Any:
        renderer = TemplateRenderer(tokenizer)
        try:
            return await work(renderer)
        finally:
            await renderer.close()

    return asyncio.run(main())


def ask(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_what_explodes_is_refused_and_the_next_conversation_is_rendered(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TEMPLATE_SECONDS", 1)

    async def work(renderer: TemplateRenderer) -> None:
        for text, words in (
            ("loop", "more than 1 seconds .*PAGERUNNER_LIMIT_TEMPLATE_SECONDS"),
            ("memory", "MemoryError|range|Overflow"),
            ("output", "more than 8000000 characters .*PAGERUNNER_LIMIT_MAX_PROMPT_CHARS"),
            ("escape", "refuses|unsafe"),
            ("depth", "RecursionError"),
        ):
            with pytest.raises(InvalidRequestError, match=words):
                await renderer.render(ask(text), {})
            assert await renderer.render(ask("fine"), {}) == "<fine>"
        with pytest.raises(InvalidRequestError, match="surrogate|utf-8"):
            await renderer.render(ask("\ud800"), {})

    with_renderer(tokenizer, work)


def test_a_slow_conversation_holds_up_no_other(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TEMPLATE_SECONDS", 1000)

    async def work(renderer: TemplateRenderer) -> None:
        await asyncio.gather(*(renderer.render(ask("fine"), {}) for _ in range(4)))  # starts them
        slow = [asyncio.create_task(renderer.render(ask("loop"), {})) for _ in range(2)]
        await asyncio.sleep(0.1)
        texts = await asyncio.gather(*(renderer.render(ask(f"{number}"), {}) for number in range(20)))
        assert texts == [f"<{number}>" for number in range(20)]
        for task in slow:
            assert not task.done()
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)

    with_renderer(tokenizer, work)


def test_many_endless_conversations_hold_up_another_ones_text_for_a_moment(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TEMPLATE_SECONDS", 1000)
    monkeypatch.setattr(template_pool, "_QUICK_SECONDS", 0.15)

    async def work(renderer: TemplateRenderer) -> tuple[float, float]:
        await renderer.render(ask("fine"), {})
        slow = [asyncio.create_task(renderer.render(ask("loop"), {}, "them")) for _ in range(effort(13, 20))]
        await asyncio.sleep(0.1)
        seconds = []
        for source in ("us", "them"):
            start = time.perf_counter()
            assert await renderer.render(ask("quick"), {}, source) == "<quick>"
            seconds.append(time.perf_counter() - start)
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        assert renderer._quick.free == 8 and renderer._slow.free == 4
        assert await renderer.render(ask("after"), {}) == "<after>"
        return seconds[0], seconds[1]

    other, same = with_renderer(tokenizer, work)
    print(f"another client waited {other:.2f} s, the same one {same:.2f} s")
    assert other < patient(3) and same < patient(8)


FOLDED = ('{{ "a" * 3000000000 }}', '{{ "%3000000000d" % 1 }}', '{{ "a"|center(3000000000) }}', "{{ [0] * 400000000 }}")


@pytest.mark.parametrize("expression", FOLDED)
def test_constants_of_a_template_are_computed_by_nobody(tmp_path: Path, expression: str) -> None:
    """Jinja's compiler computes them, also in a branch that is never taken, and for the names that a template reads."""
    write_tokenizer(tmp_path, 300, add_bos=False)
    text = f"{{%- if thinking -%}}{expression}{{%- endif -%}}<{{{{ messages[0].content }}}}>"
    tokenizer = Tokenizer.from_path(tmp_path, text)

    async def work(renderer: TemplateRenderer) -> None:
        assert await renderer.variables() == {"thinking", "messages"}
        assert await renderer.render(ask("fine"), {}) == "<fine>"
        with pytest.raises(InvalidRequestError):
            await renderer.render(ask("fine"), {"thinking": True})

    chat_template._environment.cache_clear()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with_renderer(tokenizer, work)
    assert "_environment" not in {name for name, one in vars(chat_template).items() if _was_called(one)}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def _was_called(function: Any) -> bool:
    return hasattr(function, "cache_info") and function.cache_info().currsize > 0


def test_a_template_that_cannot_be_read_is_each_conversations_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And a line at the start."""
    write_tokenizer(tmp_path, 300, add_bos=False)
    tokenizer = Tokenizer.from_path(tmp_path, "{{ broken")
    said = "The chat template of chat_template is not valid: unexpected end of template, expected 'end of print statement'."

    async def work(renderer: TemplateRenderer) -> None:
        with caplog.at_level(logging.WARNING):
            assert await renderer.variables() == frozenset()
        assert [record.getMessage() for record in caplog.records] == [f"{said} Chats with it are refused."]
        with pytest.raises(InvalidRequestError, match=f"^{re.escape(said)}$"):
            await renderer.render(ask("fine"), {})

    with_renderer(tokenizer, work)


def test_a_client_that_leaves_gets_nobody_elses_text(tokenizer: Tokenizer) -> None:
    async def work(renderer: TemplateRenderer) -> None:
        await renderer.render(ask("first"), {})
        for _ in range(3):
            task = asyncio.create_task(renderer.render(ask("secret of the one that left"), {}))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert await renderer.render(ask("next"), {}) == "<next>"

    with_renderer(tokenizer, work)


def test_a_client_that_leaves_twice_leaves_no_process_and_no_slot(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cancelled while it waits for the end of the process that its first leaving ends."""
    monkeypatch.setattr(template_pool, "_QUICK_SECONDS", 0.15)

    async def work(renderer: TemplateRenderer) -> None:
        runs: list[template_pool._Run] = []
        begin = renderer._begin

        async def kept(frame: bytes) -> template_pool._Run:
            runs.append(await begin(frame))
            return runs[-1]

        renderer._begin = kept  # type: ignore[method-assign]
        for seconds in (0.05, *[0.25] * 5):  # among the quick ones, among the slow ones, which have four places
            count = len(runs)
            task = asyncio.create_task(renderer.render(ask("loop"), {}))
            while len(runs) == count:
                assert not task.done(), task
                await asyncio.sleep(0.01)
            await asyncio.sleep(seconds)
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        async with asyncio.timeout(LONG):
            for run in runs:
                assert await run.process.wait() != 0
            assert await renderer.render(ask("a"), {}) == "<a>"
            assert renderer._slow.take("") and renderer._quick.take("")

    with_renderer(tokenizer, work)


@pytest.mark.parametrize(("leaves", "slow"), by_days(["not at all", "once", "twice"], [False, True]))
def test_a_close_leaves_no_process_to_a_loop_that_ends(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, leaves: str, slow: bool
) -> None:
    """Whoever waits for the end of a killed process may be cancelled. asyncio warns of a process that outlives its loop."""
    monkeypatch.setattr(template_pool, "_QUICK_SECONDS", 0.05 if slow else 60)
    unclosed: list[str] = []
    gc.collect()  # what other tests of this process have left
    monkeypatch.setattr(sys, "unraisablehook", lambda error: unclosed.append(repr(error.exc_value)))

    async def main() -> None:
        renderer = TemplateRenderer(tokenizer)
        assert await renderer.render(ask("fine"), {}) == "<fine>"
        task = asyncio.create_task(renderer.render(ask("loop"), {}))
        async with asyncio.timeout(LONG):
            while renderer._idle or (slow and renderer._slow.free == 4):
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        for _ in range(("not at all", "once", "twice").index(leaves)):
            task.cancel()
            await asyncio.sleep(0)
        await renderer.close()
        with pytest.raises(EngineDeadError if leaves == "not at all" else asyncio.CancelledError):
            await task
        with pytest.raises(EngineDeadError, match="has stopped and renders no more conversations"):
            await renderer.render(ask("late"), {})

    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        for _ in range(3):
            asyncio.run(main())
            gc.collect()
    assert not unclosed


def test_a_process_that_dies_is_replaced(tokenizer: Tokenizer) -> None:
    async def work(renderer: TemplateRenderer) -> None:
        await renderer.render(ask("a"), {})
        os.kill(renderer._idle[0].pid, 9)
        assert await renderer.render(ask("b"), {}) == "<b>", "it wasn't this conversation's fault"
        assert await renderer.render(ask("c"), {}) == "<c>"

    with_renderer(tokenizer, work)


def kill_while_starting(monkeypatch: pytest.MonkeyPatch, how_many: int) -> list[int]:
    """The next processes are killed before they have said a word. Returns the list of the killed, which grows."""
    start, killed = asyncio.create_subprocess_exec, []

    async def started(*words: Any, **options: Any) -> asyncio.subprocess.Process:
        process = await start(*words, **options)
        if len(killed) < how_many:
            os.kill(process.pid, 9)
            killed.append(process.pid)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
    return killed


def test_a_process_that_is_killed_while_it_starts_is_replaced(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = kill_while_starting(monkeypatch, 1)
    assert with_renderer(tokenizer, lambda renderer: renderer.render(USER, {})) == "<hi>"
    assert len(killed) == 1


def test_processes_that_never_start_end_in_a_sentence(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = kill_while_starting(monkeypatch, 99)
    with pytest.raises(RequestFailedError, match="ended twice while it was started"):
        with_renderer(tokenizer, lambda renderer: renderer.render(USER, {}))
    assert len(killed) == 2


def test_a_system_without_room_for_a_process_is_named(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*words: Any, **options: Any) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", full)
    with pytest.raises(RequestFailedError, match="can't be started: .*Resource temporarily unavailable"):
        with_renderer(tokenizer, lambda renderer: renderer.render(USER, {}))


def test_the_process_knows_no_keys(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGERUNNER_API_KEY", "secret")

    async def work(renderer: TemplateRenderer) -> bytes:
        await renderer.render(ask("a"), {})
        return Path(f"/proc/{renderer._idle[0].pid}/environ").read_bytes()

    environment = with_renderer(tokenizer, work)
    assert b"PYTHONPATH" in environment and b"secret" not in environment


def test_texts_are_the_tokenizers_own(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 300, add_bos=True)
    plain = Tokenizer.from_path(tmp_path)
    options = {"add_generation_prompt": True, "enable_thinking": False}
    text = with_renderer(plain, lambda renderer: renderer.render(USER, options))
    assert text == plain.apply_chat_template(USER, **options) and "hi" in text


def test_an_ordinary_conversation_costs_no_start_of_a_process(tokenizer: Tokenizer) -> None:
    """Half a millisecond was measured, and a start takes a hundred. Other work on the machine adds to all but some rounds."""

    async def work(renderer: TemplateRenderer) -> float:
        medians = []
        for _ in range(20):
            times = []
            for _ in range(20):
                start = time.perf_counter()
                await renderer.render(ask("fine"), {})
                times.append(time.perf_counter() - start)
            medians.append(statistics.median(times))
        return min(medians)

    seconds = with_renderer(tokenizer, work)
    print(f"{seconds * 1e3:.2f} ms")
    assert seconds < patient(0.005)
