"""What a conversation's tools, format and reasoning mean for its prompt, for sampling, and for how the answer is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from pagerunner.errors import InvalidRequestError
from pagerunner.server.chat.options import HARMONY, ChatOptions
from pagerunner.server.chat.reader import Answer, AnswerReader
from pagerunner.server.chat.reasoning import MARKS, Thinking, analysis_tokens, thinking_tokens
from pagerunner.server.chat.tool_parsers.formats import Harmony, Named, Required
from pagerunner.server.chat.tool_parsers.names import FORMATS
from pagerunner.server.chat.tool_parsers.stream import StreamParser
from pagerunner.server.protocol.tools import Tool
from pagerunner.text.tokenizer import Tokenizer
from pagerunner.types import SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from pagerunner.server.chat.turn import ChatTurn, ToolMode

_FINAL_CHANNEL = "<|channel|>final<|message|>"
_TAIL_TOKENS = 16


class ChatPlan:
    """What one turn of a conversation asks of the prompt, of sampling, and of the reader of its answer.

    Raises:
        InvalidRequestError: tools, tool_choice and formats don't go together, or aren't available here.
    """

    def __init__(self, turn: ChatTurn, options: ChatOptions) -> None:
        self._turn = turn
        self._options = options
        self._mode = _mode(turn, options)
        self._format = FORMATS.get(options.tool_parser or "")
        self._marks = MARKS.get(options.reasoning_parser or "")
        self._one_call = not turn.parallel_tool_calls
        self._structured = structured = turn.params.structured_outputs
        self._after_thoughts = False
        self._prompt_thinks = False
        if self._mode != "none" and structured is not None:
            raise InvalidRequestError(
                f"tool_choice={self._mode!r} doesn't go together with response_format or structured_outputs: a text can't be "
                "a call and have another format. Use tool_choice='none', or leave the format out.",
                param="tool_choice",
            )
        if self._mode in ("named", "required"):
            schema = _forced_schema(turn.tools, turn.tool_name if self._mode == "named" else "", self._one_call)
            self._structured = StructuredOutputsParams(json=schema, whitespace_pattern=" ?")  # endless ones are a trap

    def template_options(self, known: Collection[str]) -> dict[str, Any]:
        """The variables of the chat template, which reads those in `known`: the client's own, and what other fields mean."""
        turn = self._turn
        options = dict(turn.template_kwargs)
        if turn.reasoning_effort is not None:
            if turn.reasoning_effort != "none":
                options.setdefault("reasoning_effort", turn.reasoning_effort)
            options.setdefault("enable_thinking", turn.reasoning_effort != "none")
        if "enable_thinking" in options:  # DeepSeek's and Kimi's templates have another name for it
            options.setdefault("thinking", options["enable_thinking"])
        if turn.documents:
            options["documents"] = turn.documents
        return {name: value for name, value in options.items() if name in known}

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        """The tools as chat templates take them."""
        return [msgspec.to_builtins(tool) for tool in self._turn.tools] or None

    async def see_prompt(self, decode: Callable[[Sequence[int]], Awaitable[str]], token_ids: list[int]) -> None:
        """Learn from the prompt's end whether reasoning has begun, or is over before the answer begins."""
        marks = self._marks
        if marks is None:
            return
        begun = self._turn.messages[-1].get("content") if self._turn.continue_final_message else ""
        if begun:  # an answer that goes on with a message thinks only if the message has begun to think
            self._prompt_thinks = begun.rfind(marks.start) > begun.rfind(marks.end)
            self._after_thoughts = not self._prompt_thinks
            return
        tail = (await decode(token_ids[-_TAIL_TOKENS:])).rstrip()
        self._prompt_thinks = tail.endswith(marks.start)
        self._after_thoughts = tail.endswith(marks.end)

    def adjust(self, params: SamplingParams) -> SamplingParams:
        """The sampling parameters with the grammar of the text.

        The grammar begins after the reasoning, if there is any.
        """
        wanted, marks = self._structured, self._marks
        if wanted is not None and wanted.after is None and self.may_reason and not self._after_thoughts:
            begins = marks.start if marks is not None and not (marks.always or self._prompt_thinks) else None
            after = _FINAL_CHANNEL if marks is None else marks.end
            wanted = msgspec.structs.replace(wanted, after=after, begins=begins)
        if wanted is not params.structured_outputs:
            params = msgspec.structs.replace(params, structured_outputs=wanted)
        marked = self._mode == "auto" and self._format is not None and self._format.special
        marked = marked or (marks is not None and marks.special) or self._harmony
        return msgspec.structs.replace(params, skip_special_tokens=False) if marked else params

    def new_reader(self) -> AnswerReader:
        """What reads one answer of this turn."""
        return AnswerReader(
            [parser for parser in (self._thought_parser(), self._call_parser()) if parser is not None],
            one_call=self._one_call,
            chosen=self._mode in ("auto", "required"),
            shows_thoughts=self._turn.shows_reasoning,
            new_id=self._new_id,
        )

    def _new_id(self, name: str, number: int) -> str:
        """The id of the answer's call `number`, where the model's template reads ids; "" leaves it to the endpoint."""
        if self._format is None or self._format.new_id is None:
            return ""
        before = sum(len(message.get("tool_calls") or ()) for message in self._turn.messages)
        return self._format.new_id(name, before + number)

    @property
    def may_reason(self) -> bool:
        """Whether reasoning is told apart from the answer."""
        return self._options.reasoning_parser is not None

    def reasoning_tokens(self, reader: AnswerReader, token_ids: Sequence[int], tokenizer: Tokenizer) -> int:
        """How many of an answer's tokens were spent on reasoning, shown or not, by what has read all of it."""
        if not reader.thoughts:
            return 0
        share = reader.thoughts / (reader.thoughts + reader.others)
        if self._marks is None:
            return analysis_tokens(token_ids, tokenizer, share)
        return thinking_tokens(token_ids, tokenizer, share, self._marks.end, self._breaks)

    def tokens_before_text(self, answer: Answer, token_ids: Sequence[int], tokenizer: Tokenizer) -> int:
        """How many tokens of an answer belong to the reasoning before its text. Only if a token ends the reasoning."""
        marks = self._marks
        if marks is None or not answer.reasoning or tokenizer.token_to_id(marks.end) not in token_ids:
            return 0
        return thinking_tokens(token_ids, tokenizer, 0, marks.end)

    @property
    def format_field(self) -> str:
        """The client's field that decides what the text must be: its own for formats, or the tools of a forced call."""
        return "tools" if self._mode in ("named", "required") else self._turn.format_field

    @property
    def may_call(self) -> bool:
        """Whether the answer may hold calls."""
        return self._mode != "none"

    @property
    def _breaks(self) -> tuple[str, ...]:
        """What ends the reasoning although its mark hasn't come: a call."""
        return self._format.begins if self._mode == "auto" and self._format is not None else ()

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
        if self._marks is None or self._after_thoughts:
            return None
        return Thinking(self._marks, inside=self._prompt_thinks or self._marks.always, breaks=self._breaks)

    def _call_parser(self) -> StreamParser | None:
        if self._mode == "named":
            return Named(self._turn.tool_name)
        if self._mode == "required":
            return Required()
        if self._mode == "auto" and self._format is not None:
            return self._format.make({tool.function.name: tool.function.parameters or {} for tool in self._turn.tools})
        return None


def _mode(turn: ChatTurn, options: ChatOptions) -> ToolMode:
    """How tools are chosen, where the request leaves it open."""
    names = [tool.function.name for tool in turn.tools]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InvalidRequestError(f"tools has two functions named {twice[0]!r}; give each its own name.", param="tools")
    choice = turn.tool_choice or ("auto" if names else "none")
    if choice == "named" and turn.tool_name not in names:
        raise InvalidRequestError(
            f"tool_choice names {turn.tool_name[:100]!r}, which isn't in tools.", param="tool_choice"
        )
    if choice == "required" and not names:
        raise InvalidRequestError("tool_choice='required' needs tools.", param="tool_choice")
    if choice == "auto" and not names:
        return "none"
    if choice == "auto" and not options.auto_tools:
        raise InvalidRequestError(
            "tool_choice='auto' needs a server started with --enable-auto-tool-choice and --tool-call-parser; "
            "'required', 'none' and a tool's name work without.",
            param="tool_choice",
        )
    return choice


def _forced_schema(tools: list[Tool], named: str, one_call: bool) -> dict[str, Any]:
    """The schema of what a forced call is: the named tool's arguments, or a list of calls."""
    if named:
        return next(tool.function.schema() for tool in tools if tool.function.name == named)
    schemas, calls = [tool.function.schema() for tool in tools], []
    ids = Counter(own for schema in schemas if isinstance(own := schema.get("$id"), str))
    for number, (tool, schema) in enumerate(zip(tools, schemas, strict=True)):
        # With an id that no other tool has each schema is a root of its own, to which its references go.
        own = schema.get("$id") or ""
        if isinstance(own, str) and (ids[own] > 1 or not own.partition("#")[0]):
            schema["$id"] = f"tool://{number}/"
        schema.pop("$schema", None)  # drafts before 2019 know no id beside a reference
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
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}
