"""How the served model writes tool calls and reasoning, as `serve` was told."""

from __future__ import annotations

from dataclasses import dataclass

from pagerunner.config import one_of
from pagerunner.errors import ConfigError
from pagerunner.server.chat.reasoning import MARKS
from pagerunner.server.chat.tool_parsers.names import FORMATS

HARMONY = "openai_gptoss"
REASONING_PARSERS = (*MARKS, HARMONY)
TOOL_PARSERS = (*FORMATS, "openai")
REASONING_FIELDS = ("reasoning", "reasoning_content", "both")


@dataclass(frozen=True)
class ChatOptions:
    """The server's flags about tools and reasoning; names are vLLM's.

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
