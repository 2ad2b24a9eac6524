"""POST /v1/responses: one text answer to a text or a conversation. Nothing is stored between calls."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pagerunner import limits
from pagerunner.errors import InvalidRequestError, PagerunnerError
from pagerunner.server.errors import error_body
from pagerunner.server.fanout import Indexed, TokenCounter
from pagerunner.server.http import decode_body, read_body
from pagerunner.server.logprobs import chat_logprobs
from pagerunner.server.params import MODEL_DEFAULTS, template_kwargs
from pagerunner.server.protocol.answers import TokenLogprob
from pagerunner.server.protocol.fields import check_supported
from pagerunner.server.protocol.responses import (
    LOGPROBS_ITEM,
    NEUTRAL,
    OutputMessage,
    OutputText,
    ResponseBody,
    ResponsesRequest,
)
from pagerunner.server.service import Call, Service, collected, json_response, streamed
from pagerunner.types import CompletionOutput, RequestOutput, SamplingParams

logger = logging.getLogger(__name__)

_DECODER = msgspec.json.Decoder(ResponsesRequest)
_encode = msgspec.json.Encoder().encode
_SAME_NAME = tuple(name for name in SamplingParams.__struct_fields__ if name in ResponsesRequest.__struct_fields__)


class ResponsesEndpoint:
    """Answers one call at a time."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, http: Request) -> Response:
        """Answer one call; raises what errors.error_response turns into an HTTP status."""
        request = decode_body(await read_body(http), _DECODER)
        service, engine = self._service, self._service.engine
        call = service.begin("resp", request.model)
        params = _params(request, engine.default_sampling_params)
        kwargs = template_kwargs(request.chat_template_kwargs, engine.template_variables)
        prompt = {"prompt_token_ids": await engine.render_chat(request.messages(), template_kwargs=kwargs)}
        outputs = service.run(call, [prompt], params, request)
        answer = _Answer(call, request, params)
        if request.stream:
            return await streamed(http, outputs, answer, _events)
        [result] = await collected(http, outputs)
        answer.add(result)
        return json_response(answer.body())


def _params(request: ResponsesRequest, defaults: SamplingParams) -> SamplingParams:
    if request.store:
        raise InvalidRequestError(
            "store=true is not supported: this server keeps no answers. Send store=false, or leave it out.",
            param="store",
        )
    if request.previous_response_id is not None:
        raise InvalidRequestError(
            "previous_response_id is not supported: this server keeps no answers. Send the conversation as input.",
            param="previous_response_id",
        )
    check_supported(request, NEUTRAL)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options needs stream=true.", param="stream_options")
    if unknown := [item for item in request.include or () if item != LOGPROBS_ITEM]:
        raise InvalidRequestError(f"include holds {unknown[0]!r}; supported is {LOGPROBS_ITEM}.", param="include")
    top = request.top_logprobs
    if top is not None and not 0 <= top <= limits.MAX_LOGPROBS:
        raise InvalidRequestError(
            f"top_logprobs must be in [0, {limits.MAX_LOGPROBS}], got {top}.", param="top_logprobs"
        )
    if top and not request.include:
        raise InvalidRequestError(f"top_logprobs needs include=[{LOGPROBS_ITEM!r}].", param="top_logprobs")
    values: dict[str, Any] = {name: getattr(defaults, name) for name in MODEL_DEFAULTS}
    values |= {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    values["max_tokens"] = request.max_output_tokens
    values["logprobs"] = (top or 0) if request.include else None
    values["output_kind"] = "delta" if request.stream else "final_only"
    try:
        return SamplingParams(**values)
    except InvalidRequestError as error:
        if error.param != "max_tokens":
            raise
        raise InvalidRequestError(str(error).replace("max_tokens", "max_output_tokens"), "max_output_tokens") from None


class _Answer:
    """What is known of the answer: grows with outputs, whole or deltas, and shows itself as a body or as events."""

    def __init__(self, call: Call, request: ResponsesRequest, params: SamplingParams) -> None:
        self._call = call
        self._request = request
        self._params = params
        self._counter = TokenCounter()
        self._message_id = call.id.replace("resp", "msg", 1)
        self._text = ""
        self._logprobs: list[TokenLogprob] = []
        self._finish_reason: str | None = None
        self._error: str | None = None
        self._sequence = 0

    def add(self, result: RequestOutput) -> tuple[str, list[TokenLogprob]]:
        """Take an output; returns what it added."""
        self._counter.add(0, result)
        text, logprobs = "", []
        for output in result.outputs:
            text += output.text
            logprobs += self._logprobs_of(output)
            self._finish_reason = output.finish_reason
        self._text += text
        self._logprobs += logprobs
        return text, logprobs

    def _logprobs_of(self, output: CompletionOutput) -> list[TokenLogprob]:
        if self._params.logprobs is None:
            return []
        return chat_logprobs(output.token_ids, output.logprobs or [], self._params.logprobs).content

    def body(self, status: str | None = None) -> ResponseBody:
        """The answer as it is now, or as it is before its first token (`status` in_progress)."""
        status = status or self._status()
        request, begun = self._request, status != "in_progress"
        error = "The answer was ended before it was complete." if status == "failed" else None
        return ResponseBody(
            id=self._call.id,
            created_at=self._call.created,
            status=status,
            model=self._call.model,
            output=[self._message()] if begun else [],
            error=None if error is None else {"code": "server_error", "message": self._error or error},
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            temperature=self._params.temperature,
            top_logprobs=request.top_logprobs or 0,
            top_p=self._params.top_p,
            usage=self._usage() if begun else None,
        )

    def _status(self) -> str:
        return {"stop": "completed", "length": "incomplete"}.get(self._finish_reason or "", "failed")

    def _message(self) -> OutputMessage:
        status = "completed" if self._finish_reason == "stop" else "incomplete"
        return OutputMessage(id=self._message_id, status=status, content=[self._part()])

    def _part(self) -> OutputText:
        return OutputText(text=self._text, logprobs=self._logprobs)

    def _usage(self) -> dict[str, Any]:
        usage = self._counter.usage()
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.total_tokens,
        }

    def first(self) -> Iterator[bytes]:
        """The events before the text."""
        body = self.body("in_progress")
        yield self._event("response.created", response=body)
        yield self._event("response.in_progress", response=body)
        message = OutputMessage(id=self._message_id, status="in_progress", content=[])
        yield self._event("response.output_item.added", output_index=0, item=message)
        yield self._text_event("response.content_part.added", part=OutputText(text=""))

    def chunks(self, index: int, output: RequestOutput) -> list[bytes]:
        """The event of one output; none while text is held back because it may become a stop string."""
        text, logprobs = self.add(output)
        if not (text or logprobs):
            return []
        return [self._text_event("response.output_text.delta", delta=text, logprobs=logprobs)]

    def last(self) -> list[bytes]:
        """The events after the text."""
        status = self._status()
        return [
            self._text_event("response.output_text.done", text=self._text, logprobs=self._logprobs),
            self._text_event("response.content_part.done", part=self._part()),
            self._event("response.output_item.done", output_index=0, item=self._message()),
            self._event(f"response.{status}", response=self.body(status)),
        ]

    def failed(self, error: Exception) -> bytes:
        """The event of an answer that failed on the way."""
        self._error = error_body(error).error.message
        return self._event("response.failed", response=self.body("failed"))

    def _text_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._message_id, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._sequence
        self._sequence += 1
        data = _encode({"type": kind, "sequence_number": number, **fields})
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


async def _events(
    first: Indexed, outputs: AsyncGenerator[Indexed, None], answer: _Answer
) -> AsyncGenerator[bytes, None]:
    try:
        for event in answer.first():
            yield event
        for event in answer.chunks(*first):
            yield event
        async for index, output in outputs:
            for event in answer.chunks(index, output):
                yield event
        for event in answer.last():
            yield event
    except Exception as error:  # the headers are out: the stream is the only place left to say so
        if not isinstance(error, PagerunnerError):
            logger.exception("A stream failed.")
        yield answer.failed(error)
