"""From a chat request's tools, format and reasoning to what the engine is asked, and from generated text back to an answer."""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from pagerunner.config import one_of
from pagerunner.errors import ConfigError, InvalidRequestError
from pagerunner.server.chat.reasoning import END, START, Thinking
from pagerunner.server.chat.tool_parsers.formats import DeepSeekV3, Harmony, Hermes, Llama3Json, Named, Required
from pagerunner.server.chat.tool_parsers.stream import Arguments, CallEnd, CallStart, Event, StreamParser, Text, Thought
from pagerunner.server.protocol.answers import AnswerMessage, Delta
from pagerunner.server.protocol.requests import ChatRequest
from pagerunner.server.protocol.tools import FunctionCall, FunctionDelta, Tool, ToolCall, ToolCallDelta
from pagerunner.types import SamplingParams, StructuredOutputsParams

HARMONY = "openai_gptoss"
REASONING_PARSERS = ("qwen3", "deepseek_r1", HARMONY)
TOOL_PARSERS = ("hermes", "llama3_json", "deepseek_v3", "openai")
REASONING_FIELDS = ("reasoning", "reasoning_content", "both")
_KEEPS_SPECIAL = ("deepseek_v3", "openai")  # their markup consists of special tokens
_FINAL_CHANNEL = "<|channel|>final<|message|>"
_TAIL_TOKENS = 16

Mode = Literal["none", "auto", "named", "required"]


@dataclass(frozen=True)
class ChatOptions:
    """How the served model writes tool calls and reasoning, as `serve` was told; names are vLLM's.

    Raises:
        ConfigError: a name is unknown, or tools are to be chosen by a model whose calls can't be read.
    """

    tool_parser: str | None = None
    auto_tools: bool = False
    reasoning_parser: str | None = None
    reasoning_field: str = "reasoning"

    def __post_init__(self) -> None:
        if self.tool_parser is not None:
            one_of("tool_call_parser", self.tool_parser, TOOL_PARSERS)
        if self.reasoning_parser is not None:
            one_of("reasoning_parser", self.reasoning_parser, REASONING_PARSERS)
        one_of("reasoning_field", self.reasoning_field, REASONING_FIELDS)
        if self.auto_tools and self.tool_parser is None:
            raise ConfigError(f"enable_auto_tool_choice needs a tool_call_parser: one of {', '.join(TOOL_PARSERS)}.")


class ChatPlan:
    """What one chat request means for the prompt, for sampling, and for reading the answer.

    Raises:
        InvalidRequestError: tools, tool_choice and formats don't go together, or aren't available here.
    """

    def __init__(self, request: ChatRequest, options: ChatOptions, structured: StructuredOutputsParams | None) -> None:
        self._options = options
        self._tools = request.tools or []
        self._mode, self._named = _mode(request, options)
        self._one_call = request.parallel_tool_calls is False
        self._shows_thoughts = request.include_reasoning is not False
        self._structured = structured
        self.template_kwargs = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort not in (None, "none"):
            if options.reasoning_parser != HARMONY:
                raise InvalidRequestError("reasoning_effort is not supported by this model.", param="reasoning_effort")
            self.template_kwargs["reasoning_effort"] = request.reasoning_effort
        self._after_thoughts = False
        self._prompt_thinks = False
        if self._mode != "none" and structured is not None:
            raise InvalidRequestError(
                f"tool_choice={self._mode!r} doesn't go together with response_format or structured_outputs: a text can't be "
                "a call and have another format. Use tool_choice='none', or leave the format out.",
                param="tool_choice",
            )
        if self._mode in ("named", "required"):
            schema = _forced_schema(self._tools, self._named, self._one_call)
            self._structured = StructuredOutputsParams(json=schema, whitespace_pattern=" ?")  # endless ones are a trap

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        """The tools as chat templates take them."""
        return [msgspec.to_builtins(tool) for tool in self._tools] or None

    async def see_prompt(self, decode: Callable[[Sequence[int]], Awaitable[str]], token_ids: list[int]) -> None:
        """Learn from the prompt's end whether reasoning has begun, or is over before the answer begins."""
        if self._options.reasoning_parser in ("qwen3", "deepseek_r1"):
            tail = (await decode(token_ids[-_TAIL_TOKENS:])).rstrip()
            self._prompt_thinks = tail.endswith(START)
            self._after_thoughts = tail.endswith(END)

    def adjust(self, params: SamplingParams) -> SamplingParams:
        """The sampling parameters with what the text must be, behind the reasoning where there is some."""
        wanted, reasoning = self._structured, self._options.reasoning_parser
        if wanted is not None and wanted.after is None and reasoning is not None and not self._after_thoughts:
            begins = START if reasoning == "qwen3" and not self._prompt_thinks else None
            after = _FINAL_CHANNEL if reasoning == HARMONY else END
            wanted = msgspec.structs.replace(wanted, after=after, begins=begins)
        if wanted is not params.structured_outputs:
            params = msgspec.structs.replace(params, structured_outputs=wanted)
        marked = self._mode == "auto" and self._options.tool_parser in _KEEPS_SPECIAL
        return msgspec.structs.replace(params, skip_special_tokens=False) if marked or self._harmony else params

    def new_parser(self) -> AnswerParser:
        """What reads one answer of this request."""
        parsers = [parser for parser in (self._thought_parser(), self._call_parser()) if parser is not None]
        return AnswerParser(
            parsers,
            field=self._options.reasoning_field if self._shows_thoughts else None,
            one_call=self._one_call,
            chosen=self._mode in ("auto", "required"),
        )

    @property
    def _harmony(self) -> bool:
        options = self._options
        return options.reasoning_parser == HARMONY or (self._mode == "auto" and options.tool_parser == "openai")

    def _thought_parser(self) -> StreamParser | None:
        reasoning = self._options.reasoning_parser
        if self._harmony:
            return Harmony(
                thoughts=reasoning == HARMONY, tools=self._mode == "auto" and self._options.tool_parser == "openai"
            )
        if reasoning is None or self._after_thoughts:
            return None
        return Thinking(inside=self._prompt_thinks or reasoning == "deepseek_r1")

    def _call_parser(self) -> StreamParser | None:
        if self._mode == "named":
            return Named(self._named)
        if self._mode == "required":
            return Required()
        if self._mode == "auto":
            match self._options.tool_parser:
                case "hermes":
                    return Hermes()
                case "llama3_json":
                    return Llama3Json([tool.function.name for tool in self._tools])
                case "deepseek_v3":
                    return DeepSeekV3()
        return None


class AnswerParser:
    """Reads one answer, whole or in pieces.

    Args:
        parsers: each reads what the one before left as text.
        field: where reasoning goes, of REASONING_FIELDS; None leaves it out.
        one_call: leave out all calls but the first.
        chosen: whether it was the model's choice what to call.
    """

    def __init__(self, parsers: list[StreamParser], *, field: str | None, one_call: bool, chosen: bool) -> None:
        self._parsers = parsers
        self._field = field
        self._one_call = one_call
        self._chosen = chosen
        self._called = False

    def message(self, text: str) -> AnswerMessage:
        """A whole answer. A call whose arguments are no JSON object is given as text."""
        content: list[str] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        name, arguments = "", [""]
        for event in self._read(text, last=True):
            match event:
                case Text(piece):
                    content.append(piece)
                case Thought(piece):
                    thoughts.append(piece)
                case CallStart(_, name):
                    arguments = []
                case Arguments(_, piece):
                    arguments.append(piece)
                case CallEnd(_, raw):
                    if _is_object("".join(arguments)):
                        calls.append(ToolCall(id=_call_id(), function=FunctionCall(name, "".join(arguments))))
                    else:
                        content.append(raw)
        self._called = bool(calls)
        return AnswerMessage(
            content="".join(content) if content or not (calls or thoughts) else None,
            tool_calls=calls or UNSET,
            **self._reasoning(thoughts),
        )

    def delta(self, text: str, *, last: bool) -> Delta:
        """What a piece of an answer adds to the message."""
        content: list[str] = []
        thoughts: list[str] = []
        calls: dict[int, ToolCallDelta] = {}
        arguments: dict[int, list[str]] = {}
        for event in self._read(text, last=last):
            match event:
                case Text(piece):
                    content.append(piece)
                case Thought(piece):
                    thoughts.append(piece)
                case CallStart(index, name):
                    self._called = True
                    calls[index] = ToolCallDelta(
                        index=index, function=FunctionDelta(name=name), id=_call_id(), type="function"
                    )
                case Arguments(index, piece):
                    calls.setdefault(index, ToolCallDelta(index=index, function=FunctionDelta()))
                    arguments.setdefault(index, []).append(piece)
        for index, call in calls.items():
            call.function.arguments = "".join(arguments.get(index, ()))
        return Delta(
            content="".join(content) if content else UNSET,
            tool_calls=list(calls.values()) or UNSET,
            **self._reasoning(thoughts),
        )

    def finish_reason(self, reason: str | None) -> str | None:
        """ "tool_calls" for calls that the model chose; a named one ends with "stop", as OpenAI's does."""
        return "tool_calls" if reason == "stop" and self._called and self._chosen else reason

    def _read(self, text: str, *, last: bool) -> list[Event]:
        events: list[Event] = [Text(text)] if text else []
        for parser in self._parsers:
            later: list[Event] = []
            for event in events:
                later += parser.feed(event.text) if isinstance(event, Text) else [event]
            events = later + (parser.finish() if last else [])
        return [event for event in events if isinstance(event, Text | Thought) or not (self._one_call and event.index)]

    def _reasoning(self, thoughts: list[str]) -> dict[str, str]:
        names = {"both": ("reasoning", "reasoning_content"), None: ()}.get(self._field, (self._field,))
        return {name: "".join(thoughts) for name in names if name and thoughts}


def _call_id() -> str:
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _mode(request: ChatRequest, options: ChatOptions) -> tuple[Mode, str]:
    """How tools are chosen, and the name where one is."""
    choice = request.tool_choice
    names = [tool.function.name for tool in request.tools or ()]
    if choice is None:
        choice = "auto" if names else "none"
    if not isinstance(choice, str):
        name = choice.function.name
        if name not in names:
            raise InvalidRequestError(f"tool_choice names {name!r}, which isn't in tools.", param="tool_choice")
        return "named", name
    if choice == "required":
        if not names:
            raise InvalidRequestError("tool_choice='required' needs tools.", param="tool_choice")
        return "required", ""
    if choice == "none" or not names:
        return "none", ""
    if not options.auto_tools:
        raise InvalidRequestError(
            "tool_choice='auto' needs a server started with --enable-auto-tool-choice and --tool-call-parser; "
            "'required', 'none' and a tool's name work without.",
            param="tool_choice",
        )
    return "auto", ""


def _forced_schema(tools: list[Tool], named: str, one_call: bool) -> dict[str, Any]:
    """The schema of what a forced call is: the named tool's arguments, or a list of calls."""
    if named:
        return next(tool.function.schema() for tool in tools if tool.function.name == named)
    definitions: dict[str, Any] = {}
    calls = []
    for tool in tools:
        schema = tool.function.schema()
        for key in ("$defs", "definitions"):
            found = schema.pop(key, None)
            if isinstance(found, Mapping):
                _merge(definitions.setdefault(key, {}), found, tool.function.name)
        properties = {"name": {"const": tool.function.name}, "parameters": schema}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    most = {"maxItems": 1} if one_call else {}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, **definitions}


def _merge(into: dict[str, Any], found: Mapping[str, Any], name: str) -> None:
    for key, value in found.items():
        if into.setdefault(key, value) != value:
            raise InvalidRequestError(
                f"The parameters of tool {name!r} define {key!r} otherwise than another tool's do; rename one of them.",
                param="tools",
            )
