"""POST /v1/chat/completions."""

from __future__ import annotations

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from pagerunner.errors import InvalidRequestError
from pagerunner.server.chat.plan import ChatPlan
from pagerunner.server.fanout import TokenCounter
from pagerunner.server.http import decode_body, read_body
from pagerunner.server.logprobs import chat_logprobs, prompt_logprobs
from pagerunner.server.params import chat_params, stream_options, template_kwargs
from pagerunner.server.protocol.answers import ChatChoice, ChatChunk, ChatCompletion, ChatLogprobs, ChunkChoice, Delta
from pagerunner.server.protocol.requests import ChatRequest
from pagerunner.server.service import Call, Service, UsageReporter, collected, json_response, streamed
from pagerunner.types import CompletionOutput, RequestOutput

_DECODER = msgspec.json.Decoder(ChatRequest)


class ChatEndpoint:
    """Answers conversations."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, http: Request) -> Response:
        """Answer one call; raises what errors.error_response turns into an HTTP status."""
        request = decode_body(await read_body(http), _DECODER)
        call = self._service.begin("chatcmpl", request.model)
        params = chat_params(request, self._service.engine.default_sampling_params)
        plan = ChatPlan(request, self._service.chat, params.structured_outputs)
        usage = UsageReporter(stream_options(request))
        token_ids = await self._render(request, plan)
        await plan.see_prompt(self._service.engine.decode, token_ids)
        params = plan.adjust(params)
        outputs = self._service.run(call, [{"prompt_token_ids": token_ids}], params, request)
        if request.stream:
            return await streamed(http, outputs, _Writer(call, request, params.n, usage, plan))
        [result] = await collected(http, outputs)
        return json_response(_answer(call, request, result, plan))

    async def _render(self, request: ChatRequest, plan: ChatPlan) -> list[int]:
        if not request.messages:
            raise InvalidRequestError("messages is empty; give at least one message.", param="messages")
        kwargs = template_kwargs(plan.template_kwargs, self._service.engine.template_variables)
        messages = [message.render(index) for index, message in enumerate(request.messages)]
        return await self._service.engine.render_chat(
            messages,
            add_generation_prompt=request.add_generation_prompt is not False,
            add_special_tokens=bool(request.add_special_tokens),
            tools=plan.template_tools,
            template_kwargs=kwargs,
        )


def _logprobs(request: ChatRequest, output: CompletionOutput) -> ChatLogprobs | None:
    if not request.logprobs:
        return None
    return chat_logprobs(output.token_ids, output.logprobs or [], request.top_logprobs or 0)


def _answer(call: Call, request: ChatRequest, result: RequestOutput, plan: ChatPlan) -> ChatCompletion:
    counter = TokenCounter()
    counter.add(0, result)
    parsers = [plan.new_parser() for _ in result.outputs]
    messages = [parser.message(output.text) for parser, output in zip(parsers, result.outputs, strict=True)]
    asked = request.prompt_logprobs is not None and result.prompt_logprobs is not None
    return ChatCompletion(
        id=call.id,
        created=call.created,
        model=call.model,
        choices=[
            ChatChoice(
                index=output.index,
                message=message,
                logprobs=_logprobs(request, output),
                finish_reason=parser.finish_reason(output.finish_reason),
                stop_reason=output.stop_reason,
                token_ids=list(output.token_ids) if request.return_token_ids else UNSET,
            )
            for output, parser, message in zip(result.outputs, parsers, messages, strict=True)
        ],
        usage=counter.usage(),
        prompt_logprobs=prompt_logprobs(result.prompt_logprobs or []) if asked else UNSET,
        prompt_token_ids=result.prompt_token_ids if request.return_token_ids else UNSET,
    )


def _tells(choice: ChunkChoice) -> bool:
    """Not while text is held back because it may become a stop string, half a character, or a call's markup."""
    return bool(choice.delta != Delta() or choice.finish_reason or choice.logprobs or choice.token_ids)


class _Writer:
    """Every answer starts with a chunk that names the role; the text follows."""

    def __init__(self, call: Call, request: ChatRequest, n: int, usage: UsageReporter, plan: ChatPlan) -> None:
        self._call = call
        self._request = request
        self._n = n
        self._usage = usage
        self._parsers = [plan.new_parser() for _ in range(n)]
        self._started = False

    def chunks(self, index: int, output: RequestOutput) -> list[ChatChunk]:
        """One chunk per answer that has something new, after the roles."""
        self._usage.add(index, output)
        chunks: list[ChatChunk] = []
        if not self._started:
            self._started = True
            chunks = [self._chunk([ChunkChoice(index=one, delta=Delta("assistant", ""))]) for one in range(self._n)]
            if self._request.return_token_ids:
                chunks[0].prompt_token_ids = output.prompt_token_ids
        choices = [self._choice(one) for one in output.outputs]
        return chunks + [self._chunk([choice]) for choice in choices if self._usage.every_chunk or _tells(choice)]

    def last(self) -> list[ChatChunk]:
        """The chunk of the counts, if it was asked for."""
        if not self._usage.include:
            return []
        chunk = self._chunk([])
        chunk.usage = self._usage.total()
        return [chunk]

    def _choice(self, output: CompletionOutput) -> ChunkChoice:
        parser = self._parsers[output.index]
        return ChunkChoice(
            index=output.index,
            delta=parser.delta(output.text, last=output.finish_reason is not None),
            logprobs=_logprobs(self._request, output),
            finish_reason=parser.finish_reason(output.finish_reason),
            stop_reason=output.stop_reason,
            token_ids=list(output.token_ids) if self._request.return_token_ids else UNSET,
        )

    def _chunk(self, choices: list[ChunkChoice]) -> ChatChunk:
        call = self._call
        return ChatChunk(
            id=call.id, created=call.created, model=call.model, choices=choices, usage=self._usage.in_chunk()
        )
