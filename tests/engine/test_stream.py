"""A slow reader gets several outputs as one; a failed stream gives what it had first."""

from __future__ import annotations

import asyncio

import pytest

from pagerunner.engine.frontend.stream import OutputStream
from pagerunner.errors import EngineDeadError
from pagerunner.types import CompletionOutput, Logprob, RequestOutput


def output(index: int, text: str, *, finish_reason: str | None = None, finished: bool = False) -> RequestOutput:
    one = CompletionOutput(
        index=index,
        text=text,
        token_ids=[ord(char) for char in text],
        logprobs=[{ord(char): Logprob(-1.0)} for char in text],
        finish_reason=finish_reason,
    )
    return RequestOutput(request_id="r", prompt="p", prompt_token_ids=[1], outputs=[one], finished=finished)


def test_deltas_are_joined_per_sequence() -> None:
    async def main() -> RequestOutput:
        stream = OutputStream(["r"], delta=True)
        stream.put(output(0, "ab"))
        stream.put(output(1, "x"))
        stream.put(output(0, "cd", finish_reason="stop"))
        stream.put(output(1, "y", finish_reason="length", finished=True))
        return await stream.get()

    merged = asyncio.run(main())
    assert merged.finished
    assert [(one.index, one.text, one.finish_reason) for one in merged.outputs] == [
        (0, "abcd", "stop"),
        (1, "xy", "length"),
    ]
    assert merged.outputs[0].token_ids == [ord(char) for char in "abcd"]
    assert [list(entry) for entry in merged.outputs[0].logprobs or []] == [[ord(char)] for char in "abcd"]


def test_cumulative_outputs_replace_each_other() -> None:
    async def main() -> str:
        stream = OutputStream(["r"], delta=False)
        stream.put(output(0, "a"))
        stream.put(output(0, "ab"))
        return (await stream.get()).outputs[0].text

    assert asyncio.run(main()) == "ab"


def test_what_came_before_an_error_is_read_first() -> None:
    async def main() -> None:
        stream = OutputStream(["r"], delta=True)
        stream.put(output(0, "a"))
        stream.fail(EngineDeadError("gone"))
        assert (await stream.get()).outputs[0].text == "a"
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="gone"):
                await stream.get()

    asyncio.run(main())


def test_get_waits_for_the_next_output() -> None:
    async def main() -> None:
        stream = OutputStream(["r"], delta=True)
        waiting = asyncio.create_task(stream.get())
        await asyncio.sleep(0)
        assert not waiting.done()
        stream.put(output(0, "a"))
        assert (await waiting).outputs[0].text == "a"

    asyncio.run(main())
