"""Calls whose arguments are tags with text between them. The tool's JSON schema says what a text stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from pagerunner.server.chat.tool_parsers.pythonic import ERRORS, as_json, parsed, value_of
from pagerunner.server.chat.tool_parsers.stream import MalformedError, StreamParser, Wait

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's arguments, by the tool's name."""

_NAME, _KEY = re.compile(r'[^\s<>"]*'), re.compile(r'[^\n<>"]*')
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_MOST = 1_000
_KINDS: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


@dataclass(frozen=True)
class Tags:
    """How a format marks its calls, between `section` and `section_end`.

    Example: `<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`.

    Args:
        function, name_end, function_end: before and after a call's name, and after the call.
        parameter: before an argument's name.
        key_ends: after it. True says that the value is a text, False that it is JSON, None leaves it to the schema.
        value_end: after the value.
        lines: whether a line's end at either side of the value belongs to the format.
    """

    section: str
    section_end: str
    function: str
    name_end: str
    function_end: str
    parameter: str
    key_ends: tuple[tuple[str, bool | None], ...]
    value_end: str
    lines: bool


def _dsml(section: str) -> Tags:
    mark = "｜DSML｜"
    invoke, parameter = f"{mark}invoke", f"{mark}parameter"
    key_ends = (('" string="true">', True), ('" string="false">', False), ('">', None))
    ends = f"</{mark}{section}>", f"</{invoke}>", f"</{parameter}>"
    begins = f"<{mark}{section}>", f'<{invoke} name="', f'<{parameter} name="'
    return Tags(begins[0], ends[0], begins[1], '">', ends[1], begins[2], key_ends, ends[2], lines=False)


QWEN3 = Tags(
    *("<tool_call>", "</tool_call>", "<function=", ">", "</function>", "<parameter=", ((">", None),), "</parameter>"),
    lines=True,
)
DEEPSEEK_V32, DEEPSEEK_V4 = _dsml("function_calls"), _dsml("tool_calls")


class Tagged(StreamParser):
    """Calls in `tags`. A call without its section is one if it calls a tool in `schemas`: some models leave the mark out."""

    def __init__(self, tags: Tags, schemas: Schemas) -> None:
        self._tags = tags
        self._schemas = schemas
        super().__init__()

    def parse(self) -> Wait:
        """See StreamParser."""
        tags, inside = self._tags, False
        while marker := (yield from self.until((tags.section, tags.function), self.say)):
            self.begin(marker)
            inside = inside or marker == tags.section
            try:
                yield from self.spaces()
                if marker == tags.section:
                    yield from self.expect(tags.function)
                yield from self._call(None if inside else self._schemas)
            except MalformedError:
                if self._open and not self.cut():  # an argument is malformed, and text
                    self.argue("}")
                    left = "".join(self._raw)
                    self.end_call()
                    self.say(left)
                    continue
            called = self._open
            self.end_call()
            if called:
                self.begin()
                yield from self.spaces()
            if not called or (yield from self.optional(tags.section_end)):
                inside = False
            else:
                self.end_call()

    def _call(self, names: Collection[str] | None) -> Wait:
        tags = self._tags
        name = yield from self.word(_NAME)
        yield from self.expect(tags.name_end)
        if not name or (names is not None and name not in names):
            raise MalformedError
        while True:
            yield from self.spaces()
            if (yield from self.optional(tags.parameter)):
                if self._open:
                    self.begin(tags.parameter)
                yield from self._argument(name)
                continue
            ended = (yield from self.optional(tags.function_end)) or (yield from self.at(tags.section_end))
            if not self._open and not ended:
                raise MalformedError
            if not self._open:
                self.start_call(name)
                self.argue("{")
            if ended or not self.cut():  # else more could have come
                self.argue("}")
            return

    def _argument(self, name: str) -> Wait:
        tags = self._tags
        key = yield from self.word(_KEY)
        found: bool | None
        for mark, found in tags.key_ends:
            if (yield from self.optional(mark)):
                is_text = found
                break
        else:
            raise MalformedError
        first = not self._open
        if first:
            self.start_call(name)
        self.argue(f"{'{' if first else ', '}{json.dumps(key.strip(), ensure_ascii=False)}: ")
        kinds = {"string"} if is_text else _kinds_of(self._schemas.get(name), key.strip())
        yield from self._value(kinds, any_json=is_text is False)

    def _value(self, kinds: Collection[str], *, any_json: bool) -> Wait:
        tags = self._tags
        line = "\n" if tags.lines else ""
        others = f"{line}{tags.parameter}", f"{line}{tags.function_end}"  # for models that forget to end a value
        ends = (f"{line}{tags.value_end}", tags.value_end, *others)
        yield from self.optional(line)
        if tuple(kinds) == ("string",) and not any_json:
            self.argue('"')
            end = yield from self.until(ends, lambda text: self.argue(_escaped(text)))
            self.argue('"' if end else "")
        else:
            pieces: list[str] = []
            end = yield from self.until(ends, pieces.append)
            self.argue(_json_of("".join(pieces), () if any_json else kinds, any_json=any_json))
        if not end:
            raise MalformedError
        if end in others:
            self._at -= len(end)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _kinds_of(schema: Mapping[str, Any] | None, key: str) -> set[str]:
    """JSON's types that the argument `key` may have, as far as its schema says so; none if it doesn't. Of a huge schema a part is looked at."""
    root: Any = schema if isinstance(schema, Mapping) else {}
    properties = root.get("properties")
    own = properties.get(key) if isinstance(properties, Mapping) else None
    todo = [root.get("additionalProperties") if own is None else own]
    kinds: set[str] = set()
    seen: set[int] = set()  # schemas may contain themselves
    while todo and len(seen) < _MOST:
        one = todo.pop()
        if not isinstance(one, Mapping) or id(one) in seen:
            continue
        seen.add(id(one))
        named = _listed(one.get("type", []))
        values = () if named else _listed(one.get("enum", [one["const"]] if "const" in one else []))
        kinds |= {kind for kind in named if isinstance(kind, str)} | {_kind(value) for value in values}
        for word in ("anyOf", "oneOf", "allOf"):
            todo += _listed(one.get(word, []))
        if isinstance(reference := one.get("$ref"), str) and reference.startswith("#/"):
            found = root
            for step in reference[2:].split("/"):
                found = found.get(step) if isinstance(found, Mapping) else None
            todo.append(found)
    return kinds


def _listed(value: Any) -> list[Any]:
    return value[:_MOST] if isinstance(value, list) else [value]


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "null")


def _json_of(text: str, kinds: Collection[str], *, any_json: bool) -> str:
    """The JSON that a text stands for, if it has one of these types; text otherwise, but for those that no schema allows to be text.

    Without any type an object or a list is what it looks like, and all else text.
    """
    bare = text.strip()
    word = _WORDS.get(bare.lower())
    if word is not None and (any_json or ("null" if word == "null" else "boolean") in kinds):
        return word
    try:
        kind = _kind(msgspec.json.decode(bare))
    except (msgspec.DecodeError, ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False) if "string" in kinds or not (kinds or any_json) else _literal(text)
    fits = kind in kinds or (kind == "integer" and "number" in kinds)
    if any_json or fits or (kinds and "string" not in kinds) or (not kinds and kind in ("object", "array")):
        return bare
    return json.dumps(text, ensure_ascii=False)


def _literal(text: str) -> str:
    """An object or a list that is written in Python, as JSON. Anything else is text."""
    try:
        value = value_of(parsed(text.strip()))
        if isinstance(value, list | dict):
            return as_json(value)
    except ERRORS:
        pass
    return json.dumps(text, ensure_ascii=False)
