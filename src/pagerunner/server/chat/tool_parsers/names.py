"""The formats of calls by vLLM's names for their parsers."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pagerunner.server.chat.tool_parsers.formats import DEEPSEEK, KIMI_K2, Hermes, Llama3Json, Marked, Marks, Mistral
from pagerunner.server.chat.tool_parsers.pythonic import Pythonic
from pagerunner.server.chat.tool_parsers.stream import StreamParser
from pagerunner.server.chat.tool_parsers.tagged import DEEPSEEK_V4, DEEPSEEK_V32, QWEN3, Schemas, Tagged, Tags


@dataclass(frozen=True)
class Format:
    """How a model writes calls.

    Args:
        make: a new parser, from the tools' schemas.
        begins: marks with which calls begin, and nothing else does. Models that forget to end their reasoning call in the midst of it.
        special: whether special tokens belong to the markup, so that texts must have them.
        new_id: the id of a call without one, from its tool and the number of calls before it in the conversation. The templates of
            such models read ids.
    """

    make: Callable[[Schemas], StreamParser]
    begins: tuple[str, ...] = ()
    special: bool = False
    new_id: Callable[[str, int], str] | None = None


def _tagged(tags: Tags, *, special: bool = False) -> Format:
    return Format(partial(Tagged, tags), (tags.section,), special)


def _marked(marks: Marks, new_id: Callable[[str, int], str] | None = None) -> Format:
    return Format(lambda _: Marked(marks), (marks.section, marks.call), True, new_id)


_QWEN3, _DEEPSEEK = _tagged(QWEN3), _marked(DEEPSEEK)
_LLAMA, _PYTHONIC = Format(Llama3Json), Format(Pythonic)
FORMATS: dict[str, Format] = {
    "hermes": Format(lambda _: Hermes(), ("<tool_call>",)),
    "qwen3_coder": _QWEN3,
    "qwen3_xml": _QWEN3,
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "llama4_pythonic": _PYTHONIC,
    "pythonic": _PYTHONIC,
    "mistral": Format(lambda _: Mistral(), ("[TOOL_CALLS]",), True, lambda name, number: secrets.token_hex(5)[:9]),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "deepseek_v32": _tagged(DEEPSEEK_V32, special=True),
    "deepseek_v4": _tagged(DEEPSEEK_V4, special=True),
    "kimi_k2": _marked(KIMI_K2, lambda name, number: f"functions.{name}:{number}"),
}
