"""The bodies and events of /v1/messages, as Anthropic's clients parse them. Conventions are those of fields.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from pagerunner import limits
from pagerunner.errors import InvalidRequestError
from pagerunner.server.protocol.fields import Ignored, Neutral, Priority, Salt, Unsupported
from pagerunner.server.protocol.requests import ReasoningEffort
from pagerunner.server.protocol.tools import FunctionSpec, Tool
from pagerunner.types import show


class ContentBlock(msgspec.Struct, kw_only=True):
    """One block of a message: text, thinking, a call of the model (`tool_use`), or what a call gave (`tool_result`)."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | None = None


Content = str | list[ContentBlock]


class Message(msgspec.Struct, kw_only=True):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Content


class MessagesTool(msgspec.Struct, kw_only=True):
    """One entry of `tools`; only a client's own tools are understood, not those that Anthropic runs."""

    name: Annotated[str, Meta(min_length=1, max_length=limits.MAX_TOOL_NAME_CHARS)]
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class MessagesToolChoice(msgspec.Struct, kw_only=True):
    """Whether tools may (auto), must (any, or one by name) or mustn't (none) be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether to think, for templates that read `enable_thinking`. The budget is not kept to: `max_tokens` is the limit."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """How hard to think, and what the text must be."""

    effort: ReasoningEffort | None = None
    format: OutputFormat | None = None


class _Conversation(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    messages: list[Message]
    model: str | None = None
    output_config: OutputConfig | None = None
    system: Content | None = None
    thinking: Thinking | None = None
    tool_choice: MessagesToolChoice | None = None
    tools: Annotated[list[MessagesTool], Meta(max_length=limits.MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # accepted: they don't change the answer
    cache_control: Ignored = msgspec.field(default_factory=Raw)
    context_management: Ignored = msgspec.field(default_factory=Raw)
    # refused unless neutral
    mcp_servers: Annotated[Any, Neutral([])] = None

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as chat templates take them, instructions first. Raises InvalidRequestError."""
        found: list[dict[str, Any]] = []
        if self.system:
            found.append({"role": "system", "content": _text(self.system, "system")})
        for index, message in enumerate(self.messages):
            where = f"messages[{index}]"
            if isinstance(message.content, str) or message.role == "system":
                found.append({"role": message.role, "content": _text(message.content, where)})
            elif message.role == "assistant":
                found.append(_assistant(message.content, where))
            else:
                found += _user(message.content, where)
        return found

    def functions(self) -> list[Tool]:
        """The tools in the form of the chat API. Raises InvalidRequestError for those that this server would have to run."""
        found: list[Tool] = []
        for index, tool in enumerate(self.tools or ()):
            if tool.type not in (None, "custom") or tool.input_schema is None:
                raise InvalidRequestError(
                    f"tools[{index}] is of type {show(tool.type)}; this server runs no tools of its own, and a client's "
                    "own have a name and an input_schema.",
                    param="tools",
                )
            found.append(Tool(function=FunctionSpec(tool.name, tool.description, tool.input_schema)))
        return found


class MessagesRequest(_Conversation):
    """Body of POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    # the engine, under vLLM's names
    cache_salt: Salt | None = None
    priority: Priority | None = None
    # accepted: they don't change the answer
    inference_geo: Ignored = msgspec.field(default_factory=Raw)
    metadata: Ignored = msgspec.field(default_factory=Raw)
    service_tier: Ignored = msgspec.field(default_factory=Raw)
    # refused unless neutral
    container: Unsupported = None
    kv_transfer_params: Annotated[Any, Neutral({})] = None


class CountTokensRequest(_Conversation):
    """Body of POST /v1/messages/count_tokens."""


def _text(content: Content, where: str) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text" or block.text is None:
            raise InvalidRequestError(
                f"{where} holds a block of type {show(block.type)}; this model takes text only.", where
            )
    return "\n".join(block.text or "" for block in content)


def _assistant(blocks: list[ContentBlock], where: str) -> dict[str, Any]:
    texts: list[ContentBlock] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        match block.type:
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass  # encrypted by the server that sent it
            case "tool_use":
                if not block.id or not block.name:
                    raise InvalidRequestError(f"{where} holds a tool_use without an id or a name.", where)
                function = {"name": block.name, "arguments": block.input or {}}
                calls.append({"id": block.id, "type": "function", "function": function})
            case _:
                texts.append(block)
    message: dict[str, Any] = {"role": "assistant", "content": _text(texts, where)}
    if calls:
        message["tool_calls"] = calls
    if reasoning := "\n".join(thoughts):
        message |= {"reasoning": reasoning, "reasoning_content": reasoning, "thinking": reasoning}
    return message


def _user(blocks: list[ContentBlock], where: str) -> list[dict[str, Any]]:
    """A user's message. Each result of a call becomes a message of role "tool"."""
    found: list[dict[str, Any]] = []
    texts: list[ContentBlock] = []
    for block in blocks:
        if block.type == "tool_result":
            if not block.tool_use_id:
                raise InvalidRequestError(f"{where} holds a tool_result without a tool_use_id.", where)
            content = _text(block.content or "", f"{where}.content")
            found.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        else:
            texts.append(block)
    if texts or not found:
        found.append({"role": "user", "content": _text(texts, where)})
    return found


class MessagesUsage(msgspec.Struct, kw_only=True):
    """Token counts. The prompt is input_tokens and cache_read_input_tokens together."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class MessagesAnswer(msgspec.Struct, kw_only=True):
    """Answer of /v1/messages, and what its first event carries."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage
