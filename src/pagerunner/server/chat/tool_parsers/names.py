"""The formats of calls by vLLM's names for their parsers."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pagerunner.server.chat.tool_parsers.formats import DEEPSEEK, KIMI_K2, Hermes, Llama3Json, Marked, Mistral
from pagerunner.server.chat.tool_parsers.pythonic import Pythonic
from pagerunner.server.chat.tool_parsers.stream import StreamParser
from pagerunner.server.chat.tool_parsers.tagged import DEEPSEEK_V4, DEEPSEEK_V32, QWEN3, Schemas, Tagged


@dataclass(frozen=True)
class Format:
    """How a model writes calls.

    Args:
        make: a new parser, from the tools' schemas.
        special: whether special tokens belong to the markup, so that texts must have them.
        new_id: the id of a call without one, from its tool and the number of calls before it in the conversation. The templates of
            such models read ids.
    """

    make: Callable[[Schemas], StreamParser]
    special: bool = False
    new_id: Callable[[str, int], str] | None = None


_QWEN3 = Format(partial(Tagged, QWEN3))
_LLAMA, _PYTHONIC = Format(Llama3Json), Format(Pythonic)
_DEEPSEEK = Format(lambda _: Marked(DEEPSEEK), special=True)
FORMATS: dict[str, Format] = {
    "hermes": Format(lambda _: Hermes()),
    "qwen3_coder": _QWEN3,
    "qwen3_xml": _QWEN3,
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "llama4_pythonic": _PYTHONIC,
    "pythonic": _PYTHONIC,
    "mistral": Format(lambda _: Mistral(), special=True, new_id=lambda name, number: secrets.token_hex(5)[:9]),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "deepseek_v32": Format(partial(Tagged, DEEPSEEK_V32), special=True),
    "deepseek_v4": Format(partial(Tagged, DEEPSEEK_V4), special=True),
    "kimi_k2": Format(
        lambda _: Marked(KIMI_K2), special=True, new_id=lambda name, number: f"functions.{name}:{number}"
    ),
}
