"""POST /v1/chat/completions."""

from __future__ import annotations

import uuid
from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from pagerunner.server.chat.reader import Answer, AnswerReader
from pagerunner.server.chat.tool_parsers.stream import Arguments, CallStart, Event, Text, Thought
from pagerunner.server.chat.turn import ChatRun, ChatTurn, read_whole, run_chat
from pagerunner.server.fanout import TokenCounter
from pagerunner.server.http import read_as
from pagerunner.server.logprobs import chat_logprobs, prompt_logprobs
from pagerunner.server.params import chat_params, stream_options
from pagerunner.server.protocol.answers import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    CompletionTokensDetails,
    Delta,
    Usage,
)
from pagerunner.server.protocol.requests import ChatRequest
from pagerunner.server.protocol.tools import FunctionCall, FunctionDelta, NamedToolChoice, ToolCall, ToolCallDelta
from pagerunner.server.service import Call, Endpoint, StreamWriter, UsageReporter, collected, json_response, streamed
from pagerunner.text.tokenizer import Tokenizer
from pagerunner.types import CompletionOutput, RequestOutput, SamplingParams


class ChatEndpoint(Endpoint):
    """Answers conversations."""

    async def __call__(self, http: Request) -> Response:
        """Answer one call; raises what errors.error_response turns into an HTTP status."""
        request = await read_as(http, ChatRequest)
        call = self._service.begin("chatcmpl", request.model, http, request.request_id)
        usage = UsageReporter(stream_options(request))
        turn = chat_turn(request, chat_params(request, self._service.engine.default_sampling_params))
        run = await run_chat(self._service, call, turn)
        shape = _Shape(call, request, run, self._service.chat.reasoning_field, self._service.engine.tokenizer)
        if request.stream:
            return await streamed(run.outputs, _Writer(shape, usage))
        [result] = await collected(run.outputs)
        return json_response(shape.whole(result))


def chat_turn(request: ChatRequest, params: SamplingParams) -> ChatTurn:
    """The conversation of a request."""
    choice = request.tool_choice
    hint = {} if request.verbosity is None else {"verbosity": request.verbosity}
    return ChatTurn(
        messages=[message.render(index) for index, message in enumerate(request.messages)],
        params=params,
        format_field="response_format" if request.response_format is not None else "structured_outputs",
        tools=request.tools or [],
        tool_choice="named" if isinstance(choice, NamedToolChoice) else choice,
        tool_name=choice.function.name if isinstance(choice, NamedToolChoice) else "",
        parallel_tool_calls=request.parallel_tool_calls is not False,
        shows_reasoning=request.include_reasoning is not False,
        reasoning_effort=request.reasoning_effort,
        template_kwargs={**hint, **(request.chat_template_kwargs or {})},
        documents=request.documents,
        add_generation_prompt=request.add_generation_prompt is not False,
        add_special_tokens=bool(request.add_special_tokens),
        continue_final_message=bool(request.continue_final_message),
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        truncation_side=request.truncation_side,
        priority=request.priority,
        cache_salt=request.cache_salt,
        kv_transfer_params=request.kv_transfer_params,
    )


class _Shape:
    """What a call wants in its choices, the same for streams and whole answers."""

    def __init__(
        self, call: Call, request: ChatRequest, run: ChatRun, reasoning_field: str, tokenizer: Tokenizer
    ) -> None:
        self.call = call
        self.request = request
        self.n = run.params.n
        self._fields = ("reasoning", "reasoning_content") if reasoning_field == "both" else (reasoning_field,)
        last = request.messages[-1]
        self.role = last.role if request.add_generation_prompt is False else "assistant"
        self.echo = last.render(len(request.messages) - 1)["content"] if request.echo and last.role == self.role else ""
        self.readers = [run.plan.new_reader() for _ in range(self.n)]
        self._plan = run.plan
        self._tokenizer = tokenizer
        self._token_ids: list[list[int]] = [[] for _ in range(self.n)]  # kept where reasoning is counted

    def whole(self, result: RequestOutput) -> ChatCompletion:
        """The answer."""
        request, call = self.request, self.call
        counter = TokenCounter()
        counter.add(0, result)
        choices = [self._choice(output, self.readers[output.index]) for output in result.outputs]
        asked = request.prompt_logprobs is not None and result.prompt_logprobs is not None
        return ChatCompletion(
            id=call.id,
            created=call.created,
            model=call.model,
            choices=choices,
            usage=self.detailed(counter.usage()),
            prompt_logprobs=prompt_logprobs(result.prompt_logprobs or []) if asked else UNSET,
            prompt_token_ids=result.prompt_token_ids if request.return_token_ids else UNSET,
            kv_transfer_params=result.kv_transfer_params or UNSET,
            metrics=counter.metrics(),
        )

    def keep(self, output: CompletionOutput) -> None:
        """Remember an output's tokens, of which the reasoning's will be counted."""
        if self._plan.may_reason:
            self._token_ids[output.index] += output.token_ids

    def detailed(self, usage: Usage) -> Usage:
        """The counts of whole answers, with how many tokens were spent on reasoning where that is told apart."""
        if self._plan.may_reason:
            pairs = zip(self.readers, self._token_ids, strict=True)
            spent = sum(self._plan.reasoning_tokens(reader, ids, self._tokenizer) for reader, ids in pairs)
            usage.completion_tokens_details = CompletionTokensDetails(spent)
        return usage

    def _choice(self, output: CompletionOutput, reader: AnswerReader) -> ChatChoice:
        self.keep(output)
        message = self._message(read_whole(reader, output.text))
        return ChatChoice(
            index=output.index,
            message=message,
            logprobs=self.logprobs(output),
            finish_reason=reader.finish_reason(output.finish_reason, output.stop_reason),
            stop_reason=output.stop_reason,
            token_ids=list(output.token_ids) if self.request.return_token_ids else UNSET,
        )

    def _message(self, answer: Answer) -> AnswerMessage:
        calls = [ToolCall(id=one.id or _call_id(), function=FunctionCall(one.name, one.text)) for one in answer.calls]
        content = answer.content
        return AnswerMessage(
            content=self.echo + (content or "") if self.echo else content,
            role=self.role,
            tool_calls=calls or UNSET,
            **self._reasoning(answer.reasoning),
        )

    def delta(self, events: list[Event]) -> Delta:
        """What events of one answer add to its message."""
        content: list[str] = []
        thoughts: list[str] = []
        calls: dict[int, ToolCallDelta] = {}
        for event in events:
            match event:
                case Text(piece):
                    content.append(piece)
                case Thought(piece):
                    thoughts.append(piece)
                case CallStart(index, name, id_):
                    function = FunctionDelta(name=name, arguments="")
                    calls[index] = ToolCallDelta(index=index, function=function, id=id_ or _call_id(), type="function")
                case Arguments(index, piece):
                    call = calls.setdefault(index, ToolCallDelta(index=index, function=FunctionDelta(arguments="")))
                    call.function.arguments = f"{call.function.arguments}{piece}"
        return Delta(
            content="".join(content) if content else UNSET,
            tool_calls=list(calls.values()) or UNSET,
            **self._reasoning("".join(thoughts)),
        )

    def logprobs(self, output: CompletionOutput) -> ChatLogprobs | None:
        """The log-probabilities of an output's tokens, if they were asked for."""
        request = self.request
        if not request.logprobs:
            return None
        as_ids = bool(request.return_tokens_as_token_ids)
        return chat_logprobs(output.token_ids, output.logprobs or [], request.top_logprobs or 0, as_ids)

    def _reasoning(self, thoughts: str) -> dict[str, Any]:
        return {name: thoughts for name in self._fields if thoughts}


def _call_id() -> str:
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


def _tells(choice: ChunkChoice) -> bool:
    """Whether the output has something to tell.

    It has nothing while text is held back as a possible stop string or call's markup.
    """
    return bool(choice.delta != Delta() or choice.finish_reason or choice.logprobs or choice.token_ids)


class _Writer(StreamWriter):
    """Every answer starts with a chunk that names the role; the text follows."""

    def __init__(self, shape: _Shape, usage: UsageReporter) -> None:
        self._shape = shape
        self._usage = usage
        self._started = False

    def chunks(self, index: int, output: RequestOutput) -> list[ChatChunk]:
        """One chunk per answer that has something new, after the roles."""
        self._usage.add(index, output)
        chunks: list[ChatChunk] = []
        if not self._started:
            self._started = True
            chunks = self._first()
            if self._shape.request.return_token_ids:
                chunks[0].prompt_token_ids = output.prompt_token_ids
        choices = [self._choice(one) for one in output.outputs]
        return chunks + [self._chunk([choice]) for choice in choices if self._usage.every_chunk or _tells(choice)]

    def last(self) -> list[ChatChunk]:
        """The chunk of the counts, if it was asked for."""
        if not self._usage.include:
            return []
        chunk = self._chunk([])
        chunk.usage = self._shape.detailed(self._usage.usage())
        chunk.metrics = self._usage.metrics()
        return [chunk]

    def _first(self) -> list[ChatChunk]:
        shape = self._shape
        deltas = [Delta(shape.role, "")] + ([Delta(content=shape.echo)] if shape.echo else [])
        return [self._chunk([ChunkChoice(index=one, delta=delta)]) for one in range(shape.n) for delta in deltas]

    def _choice(self, output: CompletionOutput) -> ChunkChoice:
        shape = self._shape
        shape.keep(output)
        reader = shape.readers[output.index]
        return ChunkChoice(
            index=output.index,
            delta=shape.delta(reader.read(output.text, last=output.finish_reason is not None)),
            logprobs=shape.logprobs(output),
            finish_reason=reader.finish_reason(output.finish_reason, output.stop_reason),
            stop_reason=output.stop_reason,
            token_ids=list(output.token_ids) if shape.request.return_token_ids else UNSET,
        )

    def _chunk(self, choices: list[ChunkChoice]) -> ChatChunk:
        call = self._shape.call
        return ChatChunk(
            id=call.id, created=call.created, model=call.model, choices=choices, usage=self._usage.in_chunk()
        )
