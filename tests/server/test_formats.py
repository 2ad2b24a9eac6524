"""The pieces between HTTP and engine that need no server: bodies, log-probabilities, fan-out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec
import pytest

from pagerunner.errors import CapacityError, InvalidRequestError
from pagerunner.server.errors import error_body
from pagerunner.server.fanout import TokenCounter, merged
from pagerunner.server.http import decode_body
from pagerunner.server.logprobs import CompletionLogprobsWriter, chat_logprobs, joined, prompt_logprobs
from pagerunner.server.params import chat_params, completion_params
from pagerunner.server.protocol.requests import ChatRequest, CompletionRequest
from pagerunner.types import CompletionOutput, Logprob, RequestOutput, SamplingParams

# The chosen token is the third most likely one, as sampling may have it.
POSITION = {7: Logprob(-3.0, 3, "c"), 5: Logprob(-0.5, 1, "aa"), 6: Logprob(-1.0, 2, "b")}


def test_a_chosen_token_outside_the_top_is_listed_beside_it() -> None:
    piece = CompletionLogprobsWriter(2).write([7], [POSITION])
    assert (piece.tokens, piece.token_logprobs) == (["c"], [-3.0])
    assert piece.top_logprobs == [{"aa": -0.5, "b": -1.0, "c": -3.0}]
    [entry] = chat_logprobs([7], [POSITION], 2).content
    assert (entry.token, entry.logprob) == ("c", -3.0)
    assert [(top.token, top.logprob) for top in entry.top_logprobs] == [("aa", -0.5), ("b", -1.0)]
    assert chat_logprobs([7], [POSITION], 0).content[0].top_logprobs == []


def test_of_tokens_with_one_text_the_best_is_listed() -> None:
    position = {5: Logprob(-0.5, 1, "\ufffd"), 6: Logprob(-1.0, 2, "\ufffd")}
    piece = CompletionLogprobsWriter(2).write([5, 6], [position, position])
    assert piece.top_logprobs == [{"\ufffd": -0.5}] * 2 and piece.token_logprobs == [-0.5, -1.0]


def test_offsets_go_on_over_prompt_and_pieces() -> None:
    writer = CompletionLogprobsWriter(1)
    prompt = writer.write_prompt([9, 5], [None, POSITION], "first")
    pieces = [writer.write([5, 6], [POSITION, POSITION]), writer.write([7], [POSITION])]
    whole = joined(prompt, joined(*pieces))
    assert whole.tokens == ["first", "aa", "aa", "b", "c"]
    assert whole.text_offset == [0, 5, 7, 9, 10]
    assert whole.token_logprobs[0] is None and whole.top_logprobs[0] is None


def test_prompt_logprobs_keep_ids_ranks_and_texts() -> None:
    none, entry = prompt_logprobs([None, POSITION])
    assert none is None and entry is not None
    assert entry["7"] == {"logprob": -3.0, "rank": 3, "decoded_token": "c"}


def test_errors_name_the_field_and_its_place() -> None:
    decoder = msgspec.json.Decoder(ChatRequest)
    for body, param in (
        (b'{"messages": [{"role": "user", "content": "a"}], "x": 1}', "x"),
        (b'{"messages": [{"role": 3, "content": "a"}]}', "messages[0].role"),
        (b'{"zzz": 1}', "zzz"),
        (b"{}", "messages"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            decode_body(body, decoder)
        assert caught.value.param == param


def test_the_checkpoints_defaults_apply_where_the_client_is_silent() -> None:
    defaults = SamplingParams(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.05, max_tokens=77)
    params = completion_params(CompletionRequest(prompt="a", top_p=0.5), defaults)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.6, 0.5, 20, 77)
    request = msgspec.json.decode(
        b'{"messages": [{"role": "user", "content": "a"}], "temperature": 0}', type=ChatRequest
    )
    chat = chat_params(request, defaults)
    assert (chat.temperature, chat.repetition_penalty, chat.max_tokens, chat.logprobs) == (0, 1.05, None, None)


def test_best_of_equal_to_n_changes_nothing() -> None:
    assert completion_params(CompletionRequest(prompt="a", n=2, best_of=2), SamplingParams()).n == 2
    with pytest.raises(InvalidRequestError, match="best_of=3 is not supported"):
        completion_params(CompletionRequest(prompt="a", n=2, best_of=3), SamplingParams())


def test_memory_that_cant_be_had_now_is_no_fault_of_the_server() -> None:
    error = error_body(CapacityError("another process has the memory")).error
    assert (error.code, error.type) == (503, "ServiceUnavailableError")


def output(name: str, tokens: int, cached: int = 0) -> RequestOutput:
    return RequestOutput(
        request_id=name,
        prompt=None,
        prompt_token_ids=[1, 2, 3],
        outputs=[CompletionOutput(index=0, text="", token_ids=[0] * tokens)],
        finished=False,
        num_cached_tokens=cached,
    )


def test_usage_counts_each_prompt_once_and_every_token() -> None:
    counter = TokenCounter()
    for index, tokens, cached in ((0, 1, 2), (1, 1, 0), (0, 3, 0), (1, 2, 1)):
        counter.add(index, output("x", tokens, cached))
    usage = counter.usage()
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, 7, 13)
    assert usage.prompt_tokens_details.cached_tokens == 3


class Source:
    """Yields `count` outputs, then ends or fails; knows whether it was closed."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.closed = False
        self._count = count
        self._error = error

    async def read(self) -> AsyncGenerator[RequestOutput, None]:
        try:
            for _ in range(self._count):
                await asyncio.sleep(0)
                yield output("x", 1)
            if self._error is not None:
                raise self._error
        finally:
            self.closed = True


@pytest.mark.parametrize("count", [1, 2, 7])
def test_merging_gives_every_output_of_every_source(count: int) -> None:
    async def main() -> None:
        sources = [Source(3 + index) for index in range(count)]
        seen = [index async for index, _ in merged([source.read() for source in sources])]
        assert sorted(seen) == sorted(index for index in range(count) for _ in range(3 + index))
        assert all(source.closed for source in sources)

    asyncio.run(main())


@pytest.mark.parametrize("others", [0, 3])
def test_one_failing_source_fails_and_closes_all(others: int) -> None:
    async def main() -> None:
        sources = [Source(1, ValueError("broken")), *(Source(10**9) for _ in range(others))]
        with pytest.raises(ValueError, match="broken"):
            async for _ in merged([source.read() for source in sources]):
                pass
        assert all(source.closed for source in sources)

    asyncio.run(main())


def test_closing_the_merged_stream_closes_the_sources() -> None:
    async def main() -> None:
        sources = [Source(10**9) for _ in range(3)]
        outputs = merged([source.read() for source in sources])
        await anext(outputs)
        await outputs.aclose()
        assert all(source.closed for source in sources)

    asyncio.run(main())
