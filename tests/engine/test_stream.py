"""A slow reader gets several steps' outputs as one; a failed stream gives what it had first."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from engine.test_output_processor import encode, update
from pagerunner.engine.frontend.input_processor import InputProcessor
from pagerunner.engine.frontend.output_processor import OutputProcessor
from pagerunner.engine.frontend.stream import OutputStream
from pagerunner.errors import EngineDeadError
from pagerunner.types import OutputKind, RequestUpdate, SamplingParams, TokenLogprobs
from text.tokenizers_for_tests import tokenizer


class Reading:
    """A request, and the stream that its reader holds."""

    def __init__(self, kind: OutputKind, n: int = 1) -> None:
        backend = tokenizer("byte_level")
        inputs = InputProcessor(backend, vocab_size=400, max_model_len=1000, eos_token_ids=(1,))
        self._outputs = OutputProcessor(backend)
        params = SamplingParams(n=n, output_kind=kind, logprobs=0)
        requests = inputs.process([5, 6], params, "r")
        self.ids = [one.request_id for one in requests]
        self.stream = OutputStream(self._outputs.add("r", "p", requests).output)

    def put(self, *updates: RequestUpdate) -> None:
        for one in updates:
            changed, _ = self._outputs.take([one])
            for _ in changed:
                self.stream.advance()


def said(to: str, text: str, finish_reason: str | None = None) -> Iterator[RequestUpdate]:
    tokens = encode(text)
    for place, token in enumerate(tokens):
        last = finish_reason if place == len(tokens) - 1 else None
        yield update(token, to=to, logprobs=[TokenLogprobs(token, -1.0, 1, [], [])], finish_reason=last)


def test_deltas_are_joined_per_sequence() -> None:
    async def main() -> None:
        reading = Reading("delta", n=2)
        first, second = reading.ids
        reading.put(*said(first, "ab"), *said(second, "x"))
        seen = await reading.stream.get()
        assert [(one.index, one.text, one.finish_reason) for one in seen.outputs] == [(0, "ab", None), (1, "x", None)]
        reading.put(*said(first, "c"), *said(second, "y", "length"), *said(first, "de", "stop"))
        merged = await reading.stream.get()
        assert merged.finished
        # A token that ends the answer is no part of its text.
        ends = [(one.index, one.text, one.finish_reason) for one in merged.outputs]
        assert ends == [(0, "cd", "stop"), (1, "y", "length")]
        assert merged.outputs[0].token_ids == encode("cde")
        assert [list(entry) for entry in merged.outputs[0].logprobs or []] == [[token] for token in encode("cde")]

    asyncio.run(main())


def test_cumulative_outputs_replace_each_other() -> None:
    async def main() -> str:
        reading = Reading("cumulative")
        reading.put(*said("r", "a"), *said("r", "b"))
        return (await reading.stream.get()).outputs[0].text

    assert asyncio.run(main()) == "ab"


def test_what_came_before_an_error_is_read_first() -> None:
    async def main() -> None:
        reading = Reading("delta")
        reading.put(*said("r", "a"))
        reading.stream.fail(EngineDeadError("gone"))
        assert (await reading.stream.get()).outputs[0].text == "a"
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="gone"):
                await reading.stream.get()

    asyncio.run(main())


def test_get_waits_for_the_next_output() -> None:
    async def main() -> None:
        reading = Reading("delta")
        waiting = asyncio.create_task(reading.stream.get())
        await asyncio.sleep(0)
        assert not waiting.done()
        reading.put(*said("r", "a"))
        assert (await waiting).outputs[0].text == "a"

    asyncio.run(main())
