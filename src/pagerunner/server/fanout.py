"""Several prompts of one call, run side by side and read as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from msgspec import UNSET, UnsetType

from pagerunner.server.protocol.answers import AnswerMetrics, PromptTokensDetails, Usage
from pagerunner.types import RequestOutput

Indexed = tuple[int, RequestOutput]


async def merged(sources: Sequence[AsyncGenerator[RequestOutput, None]]) -> AsyncGenerator[Indexed, None]:
    """Outputs of all sources with their source's index, as they come. Closing it, or any failure, closes all."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as outputs:
            async for output in outputs:
                yield 0, output
        return
    queue: asyncio.Queue[Indexed | None] = asyncio.Queue(maxsize=len(sources))

    async def read(index: int, source: AsyncGenerator[RequestOutput, None]) -> None:
        async with aclosing(source) as outputs:
            async for output in outputs:
                await queue.put((index, output))

    async def read_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for index, source in enumerate(sources):
                    group.create_task(read(index, source))
        except ExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
        finally:
            ended.set()

    ended = asyncio.Event()
    reading = asyncio.ensure_future(read_all())
    reading.add_done_callback(lambda _: queue.put_nowait(None) if queue.empty() else None)
    try:
        while not (ended.is_set() and queue.empty()):
            item = await queue.get()
            if item is not None:
                yield item
        await reading
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


class TokenCounter:
    """Adds up a call's usage from its outputs, deltas or final ones."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        self._generated = 0
        self._told: AnswerMetrics | UnsetType = UNSET

    def add(self, index: int, output: RequestOutput) -> None:
        """Count one output of prompt `index`."""
        cached = max(output.num_cached_tokens, self._prompts.get(index, (0, 0))[1])
        self._prompts[index] = (len(output.prompt_token_ids), cached)
        self._generated += sum(len(one.token_ids) for one in output.outputs)
        if output.metrics is not None and output.metrics.speculative_decoding is not None:
            self._told = AnswerMetrics(output.metrics.speculative_decoding)

    def metrics(self) -> AnswerMetrics | UnsetType:
        """What became of drafts, where that is to be told; only of calls with one prompt."""
        return self._told if len(self._prompts) == 1 else UNSET

    def usage(self) -> Usage:
        """The counts so far."""
        prompt = sum(tokens for tokens, _ in self._prompts.values())
        cached = sum(tokens for _, tokens in self._prompts.values())
        return Usage(prompt, self._generated, prompt + self._generated, PromptTokensDetails(cached))
