"""POST /v1/messages and /v1/messages/count_tokens: the API that Anthropic's clients speak."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pydantic_core
from starlette.requests import Request
from starlette.responses import Response

from pagerunner.errors import InvalidRequestError, RequestFailedError
from pagerunner.server.chat.blocks import BlockWriter
from pagerunner.server.chat.reader import Block, Change
from pagerunner.server.chat.turn import ChatRun, ChatTurn, ToolMode, prompt_of, run_chat
from pagerunner.server.errors import anthropic_body
from pagerunner.server.http import read_as
from pagerunner.server.params import same_named
from pagerunner.server.protocol.fields import check_supported
from pagerunner.server.protocol.messages import CountTokensRequest, MessagesAnswer, MessagesRequest, MessagesUsage
from pagerunner.server.service import Call, Endpoint, collected, json_response, streamed
from pagerunner.types import CompletionOutput, RequestOutput, SamplingParams, StructuredOutputsParams

_CHOICES: dict[str, ToolMode] = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}
_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class MessagesEndpoint(Endpoint):
    """Answers one call at a time."""

    async def __call__(self, http: Request) -> Response:
        """Answer a conversation in Anthropic's form; streamed, in its events."""
        request = await read_as(http, MessagesRequest)
        check_supported(request)
        service = self._service
        call = service.begin("msg", request.model, http)
        turn = _turn(request, _params(request, service.engine.default_sampling_params))
        run = await run_chat(service, call, turn)
        message = _Message(call, request, run)
        if request.stream:
            return await streamed(run.outputs, message)
        [result] = await collected(run.outputs)
        message.add(result)
        return json_response(message.whole())

    async def count_tokens(self, http: Request) -> Response:
        """How many tokens a conversation has as a prompt."""
        request = await read_as(http, CountTokensRequest)
        check_supported(request)
        self._service.check_model(request.model)
        turn = _turn(request, self._service.engine.default_sampling_params)
        return json_response({"input_tokens": len(await prompt_of(self._service, turn))})


def _turn(request: MessagesRequest | CountTokensRequest, params: SamplingParams) -> ChatTurn:
    choice, thinking, config = request.tool_choice, request.thinking, request.output_config
    if choice is not None and choice.type == "tool" and not choice.name:
        raise InvalidRequestError("tool_choice of type 'tool' needs a name.", param="tool_choice")
    messages = request.conversation()
    last = messages[-1] if messages else {}
    goes_on = last.get("role") == "assistant" and bool(last["content"].strip()) and "tool_calls" not in last
    hint = {} if thinking is None or thinking.type == "adaptive" else {"enable_thinking": thinking.type == "enabled"}
    return ChatTurn(
        messages=messages,
        params=params,
        format_field="output_config.format",
        tools=request.functions(),
        tool_choice=None if choice is None else _CHOICES[choice.type],
        tool_name=(choice.name if choice is not None else None) or "",
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        shows_reasoning=thinking is None or thinking.display != "omitted",
        reasoning_effort=None if config is None else config.effort,
        template_kwargs={**hint, **(request.chat_template_kwargs or {})},
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
        priority=getattr(request, "priority", None),
        cache_salt=getattr(request, "cache_salt", None),
    )


def _params(request: MessagesRequest, defaults: SamplingParams) -> SamplingParams:
    form = request.output_config.format if request.output_config is not None else None
    return SamplingParams(
        **same_named(request, defaults),
        stop=tuple(request.stop_sequences or ()),
        structured_outputs=None if form is None else StructuredOutputsParams(json=form.schema),
    )


class _Message(BlockWriter):
    """The answer, in Anthropic's blocks."""

    def __init__(self, call: Call, request: MessagesRequest, run: ChatRun) -> None:
        super().__init__(run)
        self._call = call
        self._stops = request.stop_sequences or []
        self._ids: dict[int, str] = {}  # of the calls, by block
        self._stop_sequence: str | None = None

    def _take(self, output: CompletionOutput) -> None:
        if isinstance(output.stop_reason, str) and output.stop_reason in self._stops:
            self._stop_sequence = output.stop_reason

    def _name(self, changes: list[Change]) -> None:
        for change in changes:
            if change.kind == "open" and change.block.kind == "call":
                self._ids[change.number] = change.block.id or f"toolu_{uuid.uuid4().hex}"

    def whole(self) -> MessagesAnswer:
        """The answer."""
        reason = self._stop_reason()
        blocks = [self._block(index, block) for index, block in enumerate(self._answer.blocks)]
        return self._message(blocks, reason)

    def _message(self, blocks: list[dict[str, Any]], reason: str | None) -> MessagesAnswer:
        return MessagesAnswer(
            id=self._call.id,
            model=self._call.model,
            content=blocks,
            stop_reason=reason,
            stop_sequence=self._stop_sequence,
            usage=self._usage(),
        )

    def _stop_reason(self) -> str:
        if self._finish_reason == "length":
            return "max_tokens"
        if self._finish_reason != "stop":
            raise RequestFailedError("The answer was ended before it was complete.")
        if self._stop_sequence is not None:  # a call that it cut must not be made
            return "stop_sequence"
        return "tool_use" if self._answer.calls else "end_turn"

    def _usage(self) -> MessagesUsage:
        usage = self._counter.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return MessagesUsage(
            input_tokens=usage.prompt_tokens - cached,
            output_tokens=usage.completion_tokens,
            cache_read_input_tokens=cached,
        )

    def _block(self, index: int, block: Block, *, empty: bool = False) -> dict[str, Any]:
        text = "" if empty else block.text
        if block.kind == "call":
            return {"type": "tool_use", "id": self._ids[index], "name": block.name, "input": _object(text)}
        if block.kind == "reasoning":
            return {"type": "thinking", "thinking": text, "signature": ""}
        return {"type": "text", "text": text, "citations": None}

    def first(self, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """The events before the answer, whose prompt is known by its first output."""
        counts = RequestOutput(
            request_id="",
            prompt=None,
            prompt_token_ids=output.prompt_token_ids,
            outputs=[],
            finished=False,
            num_cached_tokens=output.num_cached_tokens,
        )
        self._counter.add(0, counts)
        yield {"type": "message_start", "message": self._message([], None)}
        yield {"type": "ping"}

    def last(self) -> list[dict[str, Any]]:
        """The events after the answer."""
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": self._stop_sequence}
        return [
            *self._tell(self._answer.close()),
            {"type": "message_delta", "delta": delta, "usage": self._usage()},
            {"type": "message_stop"},
        ]

    def failed(self, error: Exception) -> dict[str, Any]:
        """The event of an answer that failed on the way."""
        return anthropic_body(error)

    def _told(self, change: Change) -> Iterator[dict[str, Any]]:
        kind, index, block, piece = change
        if kind == "open":
            empty = self._block(index, block, empty=True)
            yield {"type": "content_block_start", "index": index, "content_block": empty}
        elif kind == "close":
            yield {"type": "content_block_stop", "index": index}
        else:
            name, field = _DELTAS[block.kind]
            yield {"type": "content_block_delta", "index": index, "delta": {"type": name, field: piece}}


def _object(arguments: str) -> dict[str, Any]:
    """A call's arguments as values.

    Of arguments that were cut, the values that are complete, as Anthropic's client reads a stream.
    """
    try:
        value = pydantic_core.from_json(arguments, allow_partial=True) if arguments else {}
    except ValueError:
        value = {}
    return value if isinstance(value, dict) else {}
