"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from pagerunner.errors import InvalidRequestError
from pagerunner.server.fanout import Indexed, TokenCounter
from pagerunner.server.http import read_as
from pagerunner.server.logprobs import CompletionLogprobsWriter, joined, prompt_logprobs
from pagerunner.server.params import completion_params, scores_only, stream_options, truncation
from pagerunner.server.protocol.answers import Completion, CompletionChoice, CompletionLogprobs
from pagerunner.server.protocol.requests import CompletionRequest
from pagerunner.server.service import Call, Endpoint, StreamWriter, UsageReporter, collected, json_response, streamed
from pagerunner.types import CompletionOutput, RequestOutput, SamplingParams


class CompletionsEndpoint(Endpoint):
    """Completes texts or token ids."""

    async def __call__(self, http: Request) -> Response:
        """Answer one call; raises what errors.error_response turns into an HTTP status."""
        request = await read_as(http, CompletionRequest)
        call = self._service.begin("cmpl", request.model, http, request.request_id)
        params = completion_params(request, self._service.engine.default_sampling_params)
        options = stream_options(request)
        prompts = await self._prompts(request, params)
        echoes = await self._echoes(request, prompts)
        field = "response_format" if request.response_format is not None else "structured_outputs"
        outputs = self._service.run(
            call, prompts, params, request, names={"structured_outputs": field}, kv_transfer=request.kv_transfer_params
        )
        if scores_only(request):
            outputs = _without_answers(outputs)
        shape = _Shape(request, params, echoes)
        if request.stream:
            return await streamed(outputs, _Writer(call, shape, UsageReporter(options)), len(prompts))
        return json_response(_answer(call, shape, await collected(outputs)))

    async def _prompts(self, request: CompletionRequest, params: SamplingParams) -> list[dict[str, Any]]:
        service, special, longest = self._service, request.add_special_tokens, self._service.engine.max_model_len
        kept = truncation(request.truncate_prompt_tokens, request.truncation_side, longest, params.max_tokens)
        return [await service.prompt(one, special, kept) for one in request.prompts()]

    async def _echoes(self, request: CompletionRequest, prompts: list[dict[str, Any]]) -> list[_Echo]:
        if not request.echo:
            return []
        engine = self._service.engine

        async def echo(given: str | list[int], prompt: dict[str, Any]) -> _Echo:
            ids = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else await engine.encode(prompt["prompt"])
            if not ids:
                raise InvalidRequestError("The prompt is empty.", param="prompt")
            whole = isinstance(given, str) and request.truncate_prompt_tokens is None
            text = given if isinstance(given, str) and whole else await engine.decode(ids)
            return _Echo(text, await engine.decode(ids[:1]))

        return list(await asyncio.gather(*map(echo, request.prompts(), prompts)))


async def _without_answers(outputs: AsyncGenerator[Indexed, None]) -> AsyncGenerator[Indexed, None]:
    async with aclosing(outputs):
        async for index, output in outputs:
            for one in output.outputs:
                one.text, one.token_ids, one.logprobs = "", [], []
                if one.finish_reason == "stop":
                    one.finish_reason, one.stop_reason = "length", None
            yield index, output


class _Echo(msgspec.Struct, frozen=True):
    text: str
    first_token: str


class _Shape:
    """What a call wants in its choices, the same for streams and whole answers."""

    def __init__(self, request: CompletionRequest, params: SamplingParams, echoes: list[_Echo]) -> None:
        self.n = params.n
        self._request = request
        self._echoes = echoes
        self._writers: dict[int, CompletionLogprobsWriter] = {}

    def choice(self, prompt: int, result: RequestOutput, output: CompletionOutput) -> CompletionChoice:
        """The choice (or its next piece) for one sequence; the first piece brings the echo along."""
        request = self._request
        index = prompt * self.n + output.index
        first = index not in self._writers
        writer = self._writers.setdefault(
            index, CompletionLogprobsWriter(request.logprobs or 0, bool(request.return_tokens_as_token_ids))
        )
        text, logprobs = output.text, None
        if first and self._echoes:
            text = self._echoes[prompt].text + text
        if request.logprobs is not None:
            pieces: list[CompletionLogprobs] = []
            if first and self._echoes and result.prompt_logprobs is not None:
                ids, positions = result.prompt_token_ids, result.prompt_logprobs
                pieces.append(writer.write_prompt(ids, positions, self._echoes[prompt].first_token))
            pieces.append(writer.write(output.token_ids, output.logprobs or []))
            logprobs = pieces[0] if len(pieces) == 1 else joined(*pieces)
        asked = request.prompt_logprobs is not None and result.prompt_logprobs is not None
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=list(output.token_ids) if request.return_token_ids else UNSET,
            prompt_token_ids=result.prompt_token_ids if request.return_token_ids and first else UNSET,
            prompt_logprobs=prompt_logprobs(result.prompt_logprobs or []) if asked else UNSET,
        )


def _answer(call: Call, shape: _Shape, results: list[RequestOutput]) -> Completion:
    counter = TokenCounter()
    choices: list[CompletionChoice] = []
    for prompt, result in enumerate(results):
        counter.add(prompt, result)
        choices += [shape.choice(prompt, result, output) for output in result.outputs]
    return Completion(
        id=call.id,
        created=call.created,
        model=call.model,
        choices=choices,
        usage=counter.usage(),
        kv_transfer_params=results[0].kv_transfer_params or UNSET,
        metrics=counter.metrics(),
    )


def _tells(choice: CompletionChoice) -> bool:
    """Whether the output has something to tell.

    It has nothing while text is held back as a possible stop string or half a character.
    """
    return bool(choice.text or choice.finish_reason or choice.logprobs or choice.token_ids)


class _Writer(StreamWriter):
    def __init__(self, call: Call, shape: _Shape, usage: UsageReporter) -> None:
        self._call = call
        self._shape = shape
        self._usage = usage

    def chunks(self, index: int, output: RequestOutput) -> list[Completion]:
        """One chunk per sequence that has something new."""
        self._usage.add(index, output)
        choices = [self._shape.choice(index, output, one) for one in output.outputs]
        return [self._chunk([choice]) for choice in choices if self._usage.every_chunk or _tells(choice)]

    def last(self) -> list[Completion]:
        """The chunk of the counts, if it was asked for."""
        if not self._usage.include:
            return []
        chunk = self._chunk([])
        chunk.usage = self._usage.usage()
        chunk.metrics = self._usage.metrics()
        return [chunk]

    def _chunk(self, choices: list[CompletionChoice]) -> Completion:
        call = self._call
        return Completion(
            id=call.id, created=call.created, model=call.model, choices=choices, usage=self._usage.in_chunk()
        )
