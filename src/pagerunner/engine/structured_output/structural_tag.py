"""Structural tags: free text in which certain marks begin a part that follows a JSON schema, such as a call.

Two notations are understood, as vLLM's clients send them: `structures` with `triggers`, and xgrammar's `format` of the type
`triggered_tags`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any


def structural_tag_grammar(
    given: str | Mapping[str, Any],
    is_special: Callable[[str], bool] = lambda text: False,
    defaults: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> str:
    """llguidance's grammar of a structural tag, given as JSON text or as its value.

    A trigger for which `is_special` is true is matched as that token, any other as text. `defaults` and
    `overrides` are llguidance's options for JSON, such as the white space that may stand in it; a schema's own "x-guidance"
    stands between them.

    Raises:
        ValueError: it is no structural tag, or one of a kind that isn't supported.
    """
    from llguidance import StructTag

    value = json.loads(given) if isinstance(given, str) else given
    if not isinstance(value, Mapping):
        raise ValueError("a structural_tag is an object")
    triggers, parts = _parts(value)
    if not parts:
        raise ValueError("a structural_tag needs at least one structure")
    tags: list[Any] = []
    for begin, schema, end in parts:
        trigger = next((one for one in triggers if one and begin.startswith(one)), None)
        if trigger is None:
            raise ValueError(f"no trigger is the beginning of {begin!r}")
        tags.append(
            StructTag(
                trigger=trigger, begin=begin, grammar=_with_options(schema, defaults or {}, overrides or {}), end=end
            )
        )
    kinds = {is_special(tag.trigger) for tag in tags}
    if len(kinds) > 1:
        raise ValueError("either all triggers are special tokens, or none is")
    return StructTag.to_grammar(tags, assume_special=kinds == {True})


def _with_options(
    schema: Mapping[str, Any], defaults: Mapping[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    own = schema.get("x-guidance", {})
    if not (defaults or overrides) or not isinstance(own, Mapping):
        return dict(schema)
    return {**schema, "x-guidance": {**defaults, **own, **overrides}}


def _parts(value: Mapping[str, Any]) -> tuple[list[str], list[tuple[str, Mapping[str, Any], str]]]:
    """The triggers, and (begin, schema, end) of each part."""
    form = value.get("format")
    if form is None:
        found = [(one.get("begin"), one.get("schema"), one.get("end")) for one in _objects(value, "structures")]
    else:
        if not isinstance(form, Mapping) or form.get("type") != "triggered_tags":
            raise ValueError("of the formats of a structural_tag, triggered_tags is supported")
        for name in ("at_least_one", "stop_after_first"):
            if form.get(name):
                raise ValueError(f"{name} of a structural_tag is not supported")
        found = []
        for one in _objects(form, "tags"):
            content = one.get("content")
            if not isinstance(content, Mapping) or content.get("type") != "json_schema":
                raise ValueError("the content of a tag must be of the type json_schema")
            found.append((one.get("begin"), content.get("json_schema"), one.get("end")))
        value = form
    triggers = value.get("triggers")
    if not isinstance(triggers, list) or not all(isinstance(one, str) for one in triggers):
        raise ValueError("a structural_tag needs a list of triggers")
    parts: list[tuple[str, Mapping[str, Any], str]] = []
    for begin, schema, end in found:
        if not (isinstance(begin, str) and isinstance(schema, Mapping) and isinstance(end, str)):
            raise ValueError("each part of a structural_tag has a begin and an end, which are texts, and a schema")
        parts.append((begin, schema, end))
    return triggers, parts


def _objects(value: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    found = value.get(name)
    if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
        raise ValueError(f"{name} of a structural_tag is a list of objects")
    return found
