"""Tools that a model may call, and the calls that it makes, in the form of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from pagerunner import limits
from pagerunner.errors import InvalidRequestError


class FunctionSpec(msgspec.Struct, omit_defaults=True):
    """A function that the model may call; `parameters` is a JSON schema of an object."""

    name: Annotated[str, Meta(min_length=1, max_length=limits.MAX_TOOL_NAME_CHARS)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    returns: Any = msgspec.field(default=None, name="return")  # some templates show it

    def schema(self) -> dict[str, Any]:
        """A copy of the schema of the arguments, which are an object; without one there are none.

        Raises InvalidRequestError for a schema that allows no object.
        """
        found = dict(self.parameters or {"properties": {}, "additionalProperties": False})
        kinds = found.get("type", "object")
        if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
            raise InvalidRequestError(
                f"The parameters of tool {self.name!r} have the type {kinds!r:.100}; a call's arguments are an object.",
                param="tools",
            )
        return {**found, "type": "object"}


class Tool(msgspec.Struct):
    """One entry of `tools`."""

    function: FunctionSpec
    type: Literal["function"] = "function"


class FunctionName(msgspec.Struct):
    """Which function."""

    name: str


class NamedToolChoice(msgspec.Struct):
    """A `tool_choice` that forces a call of one tool."""

    function: FunctionName
    type: Literal["function"] = "function"


class FunctionCall(msgspec.Struct):
    """A function's name and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    """A call that the model made."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"
    index: int | UnsetType = UNSET

    def render(self, where: str) -> dict[str, Any]:
        """The call as templates take it, with its arguments as values. Raises InvalidRequestError."""
        try:
            arguments = msgspec.json.decode(self.function.arguments or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequestError(
                f"{where} has a tool call whose arguments are no JSON object: {error}.", where
            ) from None
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    """What a chunk adds to a call's function: its name first, then pieces of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """What a chunk adds to call number `index`; id and type come once."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
