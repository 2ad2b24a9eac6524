"""POST /v1/responses: one answer to a text or a conversation, with reasoning and calls. Nothing is stored between calls."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pagerunner import limits
from pagerunner.errors import InvalidRequestError
from pagerunner.server.chat.blocks import BlockWriter
from pagerunner.server.chat.reader import Block, Change, is_json
from pagerunner.server.chat.turn import ChatRun, ChatTurn, ToolMode, run_chat
from pagerunner.server.errors import error_body
from pagerunner.server.http import read_as
from pagerunner.server.logprobs import chat_logprobs
from pagerunner.server.params import same_named
from pagerunner.server.protocol.answers import TokenLogprob
from pagerunner.server.protocol.fields import check_supported
from pagerunner.server.protocol.responses import (
    INCLUDED,
    LOGPROBS_ITEM,
    FunctionCallItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseBody,
    ResponsesRequest,
    TextConfig,
    TextFormat,
    ToolChoice,
)
from pagerunner.server.service import Call, Endpoint, collected, json_response, streamed
from pagerunner.text.tokenizer import Tokenizer
from pagerunner.types import CompletionOutput, RequestOutput, SamplingParams, StructuredOutputsParams

_PREFIX = {"text": "msg", "reasoning": "rs", "call": "fc"}
Item = OutputMessage | ReasoningItem | FunctionCallItem


class ResponsesEndpoint(Endpoint):
    """Answers one call at a time."""

    async def __call__(self, http: Request) -> Response:
        """Answer one call; raises what errors.error_response turns into an HTTP status."""
        request = await read_as(http, ResponsesRequest)
        service = self._service
        call = service.begin("resp", request.model, http, request.request_id)
        turn = _turn(request, _params(request, service.engine.default_sampling_params))
        run = await run_chat(service, call, turn)
        if run.params.logprobs is not None and run.plan.may_call:
            raise InvalidRequestError(f"include={[LOGPROBS_ITEM]} doesn't go together with tools.", param="include")
        answer = _Response(call, request, run, service.engine.tokenizer)
        if request.stream:
            return await streamed(run.outputs, answer)
        [result] = await collected(run.outputs)
        answer.add(result)
        answer.close()
        return json_response(answer.body())


def _turn(request: ResponsesRequest, params: SamplingParams) -> ChatTurn:
    choice, mode, name = request.tool_choice, "auto", ""
    if isinstance(choice, ToolChoice):
        if choice.type == "allowed_tools":
            mode = choice.mode
        elif choice.type == "function" and choice.name:
            mode, name = "named", choice.name
        else:
            raise InvalidRequestError(
                f"tool_choice is of type {choice.type!r}; a function with its name, or allowed_tools, is supported.",
                param="tool_choice",
            )
    verbosity = request.text.verbosity if request.text is not None else None
    wanted: ToolMode | None = mode if isinstance(choice, ToolChoice) else choice  # type: ignore[assignment]
    return ChatTurn(
        messages=request.messages(),
        params=params,
        prompt_field="input",
        format_field="structured_outputs" if request.structured_outputs is not None else "text.format",
        tools=request.functions(),
        tool_choice=wanted,
        tool_name=name,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning_effort=request.reasoning.effort if request.reasoning is not None else None,
        template_kwargs={**({"verbosity": verbosity} if verbosity else {}), **(request.chat_template_kwargs or {})},
        drop_oldest=request.truncation == "auto",
        priority=request.priority,
        cache_salt=request.cache_salt,
    )


def _params(request: ResponsesRequest, defaults: SamplingParams) -> SamplingParams:
    if request.previous_response_id is not None:
        raise InvalidRequestError(
            "previous_response_id is not supported: this server keeps no answers. Send the conversation as input.",
            param="previous_response_id",
        )
    check_supported(request)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options needs stream=true.", param="stream_options")
    if unknown := [item for item in request.include or () if item not in INCLUDED]:
        raise InvalidRequestError(
            f"include holds {unknown[0]!r}; supported is {' and '.join(INCLUDED)}.", param="include"
        )
    top, shows = request.top_logprobs, LOGPROBS_ITEM in (request.include or ())
    if top is not None and not 0 <= top <= limits.MAX_LOGPROBS:
        raise InvalidRequestError(
            f"top_logprobs must be in [0, {limits.MAX_LOGPROBS}], got {top}.", param="top_logprobs"
        )
    if top and not shows:
        raise InvalidRequestError(f"top_logprobs needs include=[{LOGPROBS_ITEM!r}].", param="top_logprobs")
    values = same_named(request, defaults)
    values["max_tokens"] = request.max_output_tokens
    values["logprobs"] = (top or 0) if shows else None
    values["structured_outputs"] = _structured(request)
    try:
        return SamplingParams(**values)
    except InvalidRequestError as error:
        if error.param != "max_tokens":
            raise
        raise InvalidRequestError(str(error).replace("max_tokens", "max_output_tokens"), "max_output_tokens") from None


def _structured(request: ResponsesRequest) -> StructuredOutputsParams | None:
    form = request.text.format if request.text is not None else None
    if form is None or form.type == "text":
        return request.structured_outputs
    if request.structured_outputs is not None:
        raise InvalidRequestError("Give text.format or structured_outputs, not both.", param="text.format")
    if form.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if form.schema is None:
        raise InvalidRequestError("text.format has no schema.", param="text.format")
    return StructuredOutputsParams(json=form.schema)


class _Response(BlockWriter):
    """The answer, in OpenAI's items."""

    def __init__(self, call: Call, request: ResponsesRequest, run: ChatRun, tokenizer: Tokenizer) -> None:
        super().__init__(run)
        self._call = call
        self._request = request
        self._run = run
        self._tokenizer = tokenizer
        self._ids: list[tuple[str, str]] = []  # of the items; a call has a second one, for what it gives
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._before_text: int | None = None  # tokens, known once there is text
        self._shown = 0  # tokens whose log-probabilities events have told
        self._error: str | None = None
        self._sequence = 0

    def _take(self, output: CompletionOutput) -> None:
        self._token_ids += output.token_ids
        if (count := self._run.params.logprobs) is not None:
            self._logprobs += chat_logprobs(output.token_ids, output.logprobs or [], count).content

    def close(self) -> list[Change]:
        """Nothing more comes. An answer that says nothing at all is an empty message."""
        changes = self._answer.close() if self._answer.blocks else self._answer.empty()
        self._name(changes)
        return changes

    def _name(self, changes: list[Change]) -> None:
        for change in changes:
            if change.kind == "open":
                prefix = _PREFIX[change.block.kind]
                self._ids.append((f"{prefix}_{uuid.uuid4().hex}", change.block.id or f"call_{uuid.uuid4().hex}"))

    def body(self, status: str | None = None) -> ResponseBody:
        """The answer as it is now, or as it is before its first token (`status` in_progress)."""
        status = status or self._status()
        request, params, begun = self._request, self._run.params, status != "in_progress"
        error = self._error or "The answer was ended before it was complete."
        choice, reasoning = request.tool_choice, request.reasoning
        return ResponseBody(
            id=self._call.id,
            created_at=self._call.created,
            status=status,
            model=self._call.model,
            output=[self._item(index) for index in range(len(self._answer.blocks))] if begun else [],
            error={"code": "server_error", "message": error} if status == "failed" else None,
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            parallel_tool_calls=request.parallel_tool_calls is not False,
            reasoning={"effort": reasoning.effort, "summary": reasoning.summary} if reasoning is not None else {},
            temperature=params.temperature,
            text=TextConfig(
                format=(request.text and request.text.format) or TextFormat(type="text"),
                verbosity=request.text.verbosity if request.text is not None else None,
            ),
            tool_choice=msgspec.to_builtins(choice) if isinstance(choice, ToolChoice) else choice or "auto",
            tools=request.tools or [],
            top_logprobs=request.top_logprobs or 0,
            top_p=params.top_p,
            truncation=request.truncation or "disabled",
            usage=self._usage() if begun else None,
        )

    def _status(self) -> str:
        return {"stop": "completed", "length": "incomplete"}.get(self._finish_reason or "", "failed")

    def _item(self, index: int, status: str | None = None, *, empty: bool = False) -> Item:
        block = self._answer.blocks[index]
        status = status or ("incomplete" if self._is_cut(index, block) else "completed")
        own, call_id = self._ids[index]
        text = "" if empty else block.text
        if block.kind == "call":
            return FunctionCallItem(id=own, status=status, call_id=call_id, name=block.name, arguments=text)
        if block.kind == "reasoning":
            return ReasoningItem(id=own, status=status, content=[] if empty else [ReasoningText(text=text)])
        return OutputMessage(id=own, status=status, content=[] if empty else [self._part(block, index)])

    def _is_cut(self, index: int, block: Block) -> bool:
        """Whether the end of the answer came before the end of an item. A call ends where its arguments are whole."""
        if block.kind == "call":
            return not is_json(block.text)
        return index == len(self._answer.blocks) - 1 and self._finish_reason != "stop"

    def _part(self, block: Block, index: int) -> OutputText:
        first = next(number for number, one in enumerate(self._answer.blocks) if one.kind == "text")
        return OutputText(text=block.text, logprobs=self._logprobs[self._skipped() :] if index == first else [])

    def _skipped(self) -> int:
        if self._before_text is None:
            self._before_text = self._run.plan.tokens_before_text(self._answer, self._token_ids, self._tokenizer)
        return self._before_text

    def _usage(self) -> dict[str, Any]:
        usage = self._counter.usage()
        thoughts = self._run.plan.reasoning_tokens(self._reader, self._token_ids, self._tokenizer)
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": thoughts},
            "total_tokens": usage.total_tokens,
        }

    def first(self, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """The events before the answer."""
        body = self.body("in_progress")
        yield self._event("response.created", response=body)
        yield self._event("response.in_progress", response=body)

    def last(self) -> list[dict[str, Any]]:
        """The events after the answer."""
        events = self._tell(self.close())
        status = self._status()
        return [*events, self._event(f"response.{status}", response=self.body(status))]

    def failed(self, error: Exception) -> dict[str, Any]:
        """The event of an answer that failed on the way."""
        self._error = error_body(error).error.message
        return self._event("response.failed", response=self.body("failed"))

    def _told(self, change: Change) -> Iterator[dict[str, Any]]:
        kind, index, block, piece = change
        where = {"item_id": self._ids[index][0], "output_index": index}
        if kind == "open":
            item = self._item(index, "in_progress", empty=True)
            yield self._event("response.output_item.added", output_index=index, item=item)
        elif kind == "close":
            yield from self._closing(index, block)
            yield self._event("response.output_item.done", output_index=index, item=self._item(index))
        elif block.kind == "call":
            yield self._event("response.function_call_arguments.delta", **where, delta=piece)
        elif block.kind == "reasoning":
            yield self._event("response.reasoning_text.delta", **where, content_index=0, delta=piece)
        else:
            fresh = self._logprobs[max(self._shown, self._skipped()) :]
            self._shown = len(self._logprobs)
            yield self._event("response.output_text.delta", **where, content_index=0, delta=piece, logprobs=fresh)
        if kind == "open" and block.kind != "call":
            part = OutputText(text="") if block.kind == "text" else ReasoningText(text="")
            yield self._event("response.content_part.added", **where, content_index=0, part=part)

    def _closing(self, index: int, block: Block) -> Iterator[dict[str, Any]]:
        where = {"item_id": self._ids[index][0], "output_index": index}
        if block.kind == "call":
            yield self._event("response.function_call_arguments.done", **where, name=block.name, arguments=block.text)
            return
        if block.kind == "reasoning":
            part: OutputText | ReasoningText = ReasoningText(text=block.text)
            yield self._event("response.reasoning_text.done", **where, content_index=0, text=block.text)
        else:
            part = text = self._part(block, index)
            yield self._event(
                "response.output_text.done", **where, content_index=0, text=block.text, logprobs=text.logprobs
            )
        yield self._event("response.content_part.done", **where, content_index=0, part=part)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        number = self._sequence
        self._sequence += 1
        return {"type": kind, "sequence_number": number, **fields}
