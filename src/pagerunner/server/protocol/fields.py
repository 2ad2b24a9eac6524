"""What the fields of request bodies have in common: which are refused, and which are accepted because they change nothing.

A field of a body that isn't declared is an error that names it. A declared field of type `Unsupported` is one that some
clients always send: it is refused with any value but null and, if it has a `Neutral`, values with which it asks for nothing.
A field of type `Ignored` doesn't change the answer, whatever it holds. Inside messages, their parts, tools and calls, unknown
fields are passed over, as vLLM does: clients send back what other servers gave them.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
from msgspec import Meta

from pagerunner import limits
from pagerunner.errors import InvalidRequestError
from pagerunner.types import show


class Neutral:
    """Values with which an unsupported field asks for nothing."""

    def __init__(self, *values: Any) -> None:
        self.values = values


Unsupported = Annotated[Any, Neutral()]
Ignored = msgspec.Raw
Priority = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
Salt = Annotated[str, Meta(max_length=limits.MAX_SALT_CHARS)]

WHY: dict[str, str] = {
    "best_of": "send n, and choose among the answers",
    "chat_template": "the server has one (--chat-template)",
    "functions": "send tools",
    "function_call": "send tool_choice",
    "length_penalty": "there is no beam search",
    "prediction": "nothing is drafted here, and the answer is the same without it",
    "store": "this server keeps no answers",
    "suffix": "models here continue a text, and fill no gap",
    "thinking_token_budget": "max_tokens limits reasoning and answer together",
    "use_beam_search": "send n, with a temperature",
}
"""What to do instead, at the end of a refusal."""

RENAMED = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}
"""Fields of older vLLM releases, and what they are called within `structured_outputs`."""


@functools.cache
def neutral_values(kind: type[msgspec.Struct]) -> dict[str, tuple[Any, ...]]:
    """The unsupported fields of a body, each with the values beside null with which it asks for nothing."""
    hints = get_type_hints(kind, include_extras=True).items()
    return {name: one.values for name, hint in hints for one in get_args(hint)[1:] if isinstance(one, Neutral)}


def check_supported(request: msgspec.Struct) -> None:
    """Raise InvalidRequestError that names the first field asking for something this server can't do."""
    neutral = neutral_values(type(request))
    for name in request.__struct_fields__:
        value = getattr(request, name)
        if value is not None and name in RENAMED:
            raise InvalidRequestError(
                f'{name} is now written structured_outputs={{"{RENAMED[name]}": ...}}.', param=name
            )
        if value is None or name not in neutral:
            continue
        if name == "best_of" and value == (getattr(request, "n", None) or 1):
            continue
        if value not in neutral[name]:
            instead = f": {WHY[name]}" if name in WHY else ""
            raise InvalidRequestError(f"{name}={show(value)} is not supported by this server{instead}.", param=name)
