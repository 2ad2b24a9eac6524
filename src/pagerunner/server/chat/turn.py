"""One conversation that is to be answered, whatever the API, and the one way from there to the engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Literal, NamedTuple

import msgspec

from pagerunner.engine.frontend.input_processor import check_continues
from pagerunner.errors import InvalidRequestError, PromptTooLongError
from pagerunner.server.chat.options import ChatOptions
from pagerunner.server.chat.plan import ChatPlan
from pagerunner.server.chat.reader import Answer, AnswerReader
from pagerunner.server.fanout import Indexed
from pagerunner.server.params import check_template_kwargs, truncation
from pagerunner.server.protocol.tools import Tool
from pagerunner.server.service import Call, Service, blaming
from pagerunner.types import SamplingParams
from pagerunner.types.kv_transfer import KVTransferParams

ToolMode = Literal["none", "auto", "required", "named"]
_INSTRUCTIONS = ("system", "developer")
_ANY_TOOLS = ChatOptions(tool_parser="hermes", auto_tools=True)


class ChatTurn(msgspec.Struct, kw_only=True):
    """What /v1/chat/completions, /v1/responses and /v1/messages come down to; each endpoint makes one of its own body.

    Args:
        messages: the conversation as chat templates take it.
        params: how to sample, with the format of the text if one is wanted.
        prompt_field, format_field: the client's own fields that hold the conversation, and that say the format of the text.
        tools: what may be called.
        tool_choice: whether a tool may or must be called; None is "auto" where there are tools. "named" goes with `tool_name`.
        parallel_tool_calls: whether more than one call may be made.
        shows_reasoning: whether the reasoning is part of the answer.
        reasoning_effort: how long to think, for templates that read it; "none" asks for no reasoning.
        template_kwargs: what the client sets for the template.
        documents: texts, for templates that read them.
        continue_final_message: the last message is the beginning of the answer.
        truncate_prompt_tokens: keep so many of the prompt's tokens; -1 as many as fit. See params.truncation.
        truncation_side: "left" drops the first ones, "right" the last ones.
        drop_oldest: leave out the oldest messages of a conversation that is too long.
        priority, cache_salt, kv_transfer_params: see AsyncEngine.generate.
    """

    messages: list[dict[str, Any]]
    params: SamplingParams
    prompt_field: str = "messages"
    format_field: str = "structured_outputs"
    tools: list[Tool] = []
    tool_choice: ToolMode | None = None
    tool_name: str = ""
    parallel_tool_calls: bool = True
    shows_reasoning: bool = True
    reasoning_effort: str | None = None
    template_kwargs: dict[str, Any] = {}
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    continue_final_message: bool = False
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    drop_oldest: bool = False
    priority: int | None = None
    cache_salt: str | None = None
    kv_transfer_params: KVTransferParams | None = None


class ChatRun(NamedTuple):
    """A turn on its way through the engine.

    `outputs` starts the request when it is iterated. `params` are the turn's with what the text must be.
    """

    plan: ChatPlan
    params: SamplingParams
    outputs: AsyncGenerator[Indexed, None]


async def run_chat(service: Service, call: Call, turn: ChatTurn) -> ChatRun:
    """Render a conversation, say what its answer must be, and make it ready to run.

    Raises:
        InvalidRequestError: the conversation, its tools or its format can't be served.
    """
    plan = ChatPlan(turn, service.chat)
    prompt = await _render(service, turn, plan)
    await plan.see_prompt(service.engine.decode, prompt)
    params = plan.adjust(turn.params)
    names = {"prompt": turn.prompt_field, "structured_outputs": plan.format_field}
    outputs = service.run(
        call, [{"prompt_token_ids": prompt}], params, turn, names=names, kv_transfer=turn.kv_transfer_params
    )
    return ChatRun(plan, params, outputs)


async def prompt_of(service: Service, turn: ChatTurn) -> list[int]:
    """The prompt alone, whatever tools the model can call. Raises like `run_chat`."""
    return await _render(service, turn, ChatPlan(turn, _ANY_TOOLS))


def read_whole(reader: AnswerReader, text: str) -> Answer:
    """Read an answer that is there as a whole. The result is what its stream would add up to."""
    answer = Answer()
    answer.add(reader.read(text, last=True))
    return answer


async def _render(service: Service, turn: ChatTurn, plan: ChatPlan) -> list[int]:
    if not turn.messages:
        raise InvalidRequestError("messages is empty; give at least one message.", param="messages")
    check_continues(turn.continue_final_message, turn.add_generation_prompt)
    engine = service.engine
    known = engine.template_variables
    check_template_kwargs(turn.template_kwargs, engine.tokenizer.special_tokens)
    options = plan.template_options(known)

    longest, max_tokens = engine.max_model_len, turn.params.max_tokens
    kept = truncation(turn.truncate_prompt_tokens, turn.truncation_side, longest, max_tokens)
    templates = engine.tokenizer.chat_template.templates.values() if engine.tokenizer.chat_template is not None else ()
    # "developer" is OpenAI's newer name of the role "system", which all templates know
    newer = () if any("developer" in text for text in templates) else ("developer",)

    async def render(messages: list[dict[str, Any]]) -> list[int]:
        return await engine.render_chat(
            [message | {"role": "system"} if message["role"] in newer else message for message in messages],
            add_generation_prompt=turn.add_generation_prompt,
            add_special_tokens=turn.add_special_tokens,
            continue_final_message=turn.continue_final_message,
            tools=plan.template_tools,
            template_kwargs=options,
            truncation=kept,
        )

    with blaming({"prompt": turn.prompt_field}):
        if turn.drop_oldest:
            return await _shortened(turn.messages, engine.max_model_len - max(turn.params.max_tokens or 1, 1), render)
        return await render(turn.messages)


async def _shortened(
    messages: list[dict[str, Any]], room: int, render: Callable[[list[dict[str, Any]]], Awaitable[list[int]]]
) -> list[int]:
    """The prompt, without the oldest messages if it would not fit otherwise.

    After the instructions, the first message that stays is a user's.

    Raises:
        PromptTooLongError: the last question alone is far too long. A prompt that is a little too long is returned as it is.
    """

    async def fits(shown: list[dict[str, Any]]) -> list[int] | None:
        try:
            found = await render(shown)
        except PromptTooLongError:
            return None
        return found if len(found) <= room else None

    whole = await fits(messages)
    if whole is not None:
        return whole
    shortened = None
    begin = next((index for index, one in enumerate(messages) if one["role"] not in _INSTRUCTIONS), len(messages))
    cuts = [index for index in range(begin + 1, len(messages)) if messages[index]["role"] == "user"]
    low, high = 0, len(cuts)  # the first cut that fits is in [low, high]
    while low < high:
        middle = (low + high) // 2
        shorter = await fits([*messages[:begin], *messages[cuts[middle] :]])
        if shorter is not None:
            shortened, high = shorter, middle
        else:
            low = middle + 1
    return shortened if shortened is not None else await render(messages)
