"""The bodies and events of /v1/responses, as OpenAI's clients parse them. Conventions are those of fields.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from pagerunner import limits
from pagerunner.errors import InvalidRequestError
from pagerunner.server.protocol.answers import TokenLogprob
from pagerunner.server.protocol.fields import Neutral, Unsupported
from pagerunner.server.protocol.requests import ContentPart, ReasoningEffort, SampledRequest, text_of
from pagerunner.server.protocol.tools import FunctionCall, FunctionSpec, Tool, ToolCall
from pagerunner.types import show

LOGPROBS_ITEM = "message.output_text.logprobs"
INCLUDED = (LOGPROBS_ITEM, "reasoning.encrypted_content")
"""What `include` may hold. Reasoning is never encrypted here: its text comes with its item."""
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


Content = str | list[ContentPart]


class InputItem(msgspec.Struct, kw_only=True):
    """One item of a conversation: a message, a call that the model made, what it gave, or reasoning."""

    type: str = "message"
    role: str | None = None
    content: Content | None = None
    summary: list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None


class FunctionTool(msgspec.Struct, kw_only=True):
    """One entry of `tools`; only functions are understood."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    """A `tool_choice` that names one function, or that allows some of the tools."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[FunctionTool] = []


class TextFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the text must be: any "text", a "json_object", or JSON by a "json_schema"."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The format of the text, and a hint about its length for templates that read it."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(msgspec.Struct, kw_only=True):
    """How long to think. Summaries may be asked for; the reasoning itself is what comes."""

    effort: ReasoningEffort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(SampledRequest, kw_only=True):
    """Body of POST /v1/responses."""

    input: str | list[InputItem]
    include: list[str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    store: bool | None = None
    text: TextConfig | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=limits.MAX_TOOLS)] | None = None
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # accepted: they don't change the answer
    max_tool_calls: Any = None  # limits only tools that a server runs
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    user: Any = None
    # refused unless neutral
    background: Annotated[Any, Neutral(False)] = None
    context_management: Annotated[Any, Neutral([])] = None
    conversation: Unsupported = None
    previous_response_id: Unsupported = None
    prompt: Unsupported = None

    def messages(self) -> list[dict[str, Any]]:
        """The conversation as templates take it, instructions first. Raises InvalidRequestError."""
        messages = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        if not self.input:
            raise InvalidRequestError("input is empty; give a text or at least one message.", param="input")
        for index, item in enumerate(self.input):
            _append(messages, item, f"input[{index}]")
        return messages

    def functions(self) -> list[Tool]:
        """The tools that may be called, in the form of the chat API. Raises InvalidRequestError for other kinds."""
        found: list[Tool] = []
        for index, tool in enumerate(self.tools or ()):
            if tool.type != "function" or not tool.name:
                raise InvalidRequestError(
                    f"tools[{index}] is of type {show(tool.type)}; this server runs no tools of its own, only functions "
                    "with a name are supported.",
                    param="tools",
                )
            spec = FunctionSpec(tool.name, tool.description, tool.parameters, tool.strict)
            found.append(Tool(function=spec))
        choice = self.tool_choice
        if isinstance(choice, ToolChoice) and choice.type == "allowed_tools":
            allowed = {tool.name for tool in choice.tools}
            found = [tool for tool in found if tool.function.name in allowed]
        return found


def _append(messages: list[dict[str, Any]], item: InputItem, where: str) -> None:
    """Add an item to the conversation. An assistant's reasoning, text and calls in a row become one message."""
    match item.type:
        case "message":
            if item.role is None or item.content is None:
                raise InvalidRequestError(f"{where} needs a role and a content.", where)
            text = _text(item.content, f"{where}.content")
            if item.role == "assistant":
                last = _assistant(messages, new=_said)
                last["content"] = text
            else:
                messages.append({"role": item.role, "content": text})
        case "reasoning":
            text = _text(item.content or item.summary or [], where)
            if text:
                last = _assistant(messages, new=lambda one: _said(one) or "reasoning" in one)
                last |= {"reasoning": text, "reasoning_content": text, "thinking": text}
        case "function_call":
            if not item.call_id or not item.name or item.arguments is None:
                raise InvalidRequestError(f"{where} needs a call_id, a name and arguments.", where)
            call = ToolCall(id=item.call_id, function=FunctionCall(item.name, item.arguments))
            last = _assistant(messages, new=lambda one: False)
            last.setdefault("tool_calls", []).append(call.render(where))
        case "function_call_output":
            if not item.call_id or item.output is None:
                raise InvalidRequestError(f"{where} needs a call_id and an output.", where)
            content = _text(item.output, f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        case _:
            raise InvalidRequestError(
                f"{where} is of type {show(item.type)}; messages, reasoning, function_call and function_call_output are "
                "supported, and nothing is kept that could be referred to.",
                where,
            )


def _assistant(messages: list[dict[str, Any]], new: Any) -> dict[str, Any]:
    """The assistant's message at the end of the conversation. A new message if `new` is true of the last one."""
    if not messages or messages[-1]["role"] != "assistant" or new(messages[-1]):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _said(message: dict[str, Any]) -> bool:
    return bool(message["content"] or message.get("tool_calls"))


def _text(content: Content, where: str) -> str:
    return content if isinstance(content, str) else text_of(content, where, _TEXT_PARTS)


class OutputText(msgspec.Struct, kw_only=True):
    """The text of an answer."""

    type: str = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(msgspec.Struct, kw_only=True):
    """The text of a reasoning."""

    type: str = "reasoning_text"
    text: str


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """What the model says."""

    id: str
    status: str
    role: str = "assistant"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thinks."""

    id: str
    status: str
    summary: list[Any] = []
    content: list[ReasoningText]


class FunctionCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call that the model makes."""

    id: str
    status: str
    call_id: str
    name: str
    arguments: str


class ResponseBody(msgspec.Struct, kw_only=True):
    """Answer of /v1/responses, and what its first and last events carry."""

    id: str
    object: str = "response"
    created_at: int
    status: str
    background: bool = False
    model: str
    output: list[OutputMessage | ReasoningItem | FunctionCallItem] = []
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    reasoning: dict[str, Any] | UnsetType = UNSET
    store: bool = False
    temperature: float
    text: TextConfig
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[FunctionTool] = []
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    usage: dict[str, Any] | None = None
