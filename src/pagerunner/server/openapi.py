"""The OpenAPI document: routes as FastAPI knows them, bodies and answers from our structs, and every error that may come."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from pagerunner.server.protocol.answers import ErrorBody

_REF = "#/components/schemas/{name}"
_ERRORS = {
    "400": "The request can't be served as it is; the message names the field, the value and the limit.",
    "401": "A key is missing or wrong.",
    "403": "The key doesn't open this route, or the page of another site called.",
    "404": "There is no such model.",
    "408": "The body stopped coming.",
    "413": "The body is too large.",
    "429": "Too many requests wait.",
    "500": "The server failed at this request; others go on.",
    "503": "The engine sleeps, stalls or has died.",
}
_WITHOUT_BODY = ("400", "401", "403", "404", "500", "503")


def schemas_of(types: list[type]) -> dict[str, Any]:
    """The components' schemas of bodies, answers and errors."""
    _, schemas = msgspec.json.schema_components([*types, ErrorBody], ref_template=_REF)
    return schemas


def operation(
    path: str, body: type | None, answer: type | None, queries: dict[str, tuple[str, ...]], *, streams: bool = False
) -> dict[str, Any]:
    """What the document says of one route beside its path, method and description."""
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)", path)
    ]
    parameters += [{"name": name, "in": "query", "schema": {"enum": [*values]}} for name, values in queries.items()]
    found: dict[str, Any] = {"responses": _responses(answer, body is not None, streams)}
    if parameters:
        found["parameters"] = parameters
    if body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": _reference(body)}}}
    return found


def _responses(answer: type | None, reads: bool, streams: bool) -> dict[str, Any]:
    good: dict[str, Any] = {"description": "The answer."}
    if answer is not None:
        good["content"] = {"application/json": {"schema": _reference(answer)}}
        if streams:
            good["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"application/json": {"schema": _reference(ErrorBody)}}
    codes = _ERRORS if reads else {code: _ERRORS[code] for code in _WITHOUT_BODY}
    return {"200": good, **{code: {"description": text, "content": error} for code, text in codes.items()}}


def _reference(kind: type) -> dict[str, str]:
    return {"$ref": _REF.format(name=kind.__name__)}
