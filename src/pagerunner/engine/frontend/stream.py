"""The outputs of one request on their way to a reader that may be slower than the engine."""

from __future__ import annotations

import asyncio

from pagerunner.types import CompletionOutput, RequestOutput


class OutputStream:
    """Holds at most one output.

    Outputs that come before the reader returns are merged into it, so memory stays bounded.
    """

    def __init__(self, sequence_ids: list[str], delta: bool) -> None:
        self.sequence_ids = sequence_ids
        self._delta = delta
        self._pending: RequestOutput | None = None
        self._error: Exception | None = None
        self._ready = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Hand over the next output."""
        if self._pending is not None and self._delta:
            merge_delta(self._pending, output)
        else:
            self._pending = output
        self._ready.set()

    def fail(self, error: Exception) -> None:
        """End the stream with an error, after what is pending has been read."""
        self._error = error
        self._ready.set()

    async def get(self) -> RequestOutput:
        """The next output. Raises the error the stream ended with."""
        await self._ready.wait()
        output = self._pending
        if output is None:
            if self._error is None:
                raise RuntimeError("an output stream woke up with nothing to read")
            raise self._error
        self._pending = None
        if self._error is None:
            self._ready.clear()
        return output


def merge_delta(into: RequestOutput, later: RequestOutput) -> None:
    """Append a later delta of the same request to an earlier one."""
    by_index = {output.index: output for output in into.outputs}
    for output in later.outputs:
        earlier = by_index.get(output.index)
        if earlier is None:
            into.outputs.append(output)
        else:
            _append(earlier, output)
    into.finished = later.finished
    into.metrics = later.metrics
    into.num_cached_tokens = max(into.num_cached_tokens, later.num_cached_tokens)
    if later.prompt_logprobs is not None:
        into.prompt_logprobs = later.prompt_logprobs


def _append(earlier: CompletionOutput, later: CompletionOutput) -> None:
    earlier.text += later.text
    earlier.token_ids += later.token_ids  # in place: a reader may be thousands of tokens late
    if later.logprobs is not None:
        earlier.logprobs = earlier.logprobs or []
        earlier.logprobs += later.logprobs
    earlier.cumulative_logprob = later.cumulative_logprob
    earlier.finish_reason = later.finish_reason
    earlier.stop_reason = later.stop_reason
