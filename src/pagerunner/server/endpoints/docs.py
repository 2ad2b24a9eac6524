"""GET /docs: the API on one page, made of the OpenAPI document. The page fetches nothing and runs no script."""

from __future__ import annotations

import functools
import html
from collections.abc import Callable, Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color-scheme: light dark; }
h2 { font-size: 1.05rem; margin: 2rem 0 .3rem; } code, h2 { font-family: ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; } td { border-top: 1px solid #8884; padding: .15rem .6rem .15rem 0; }
td:first-child { white-space: nowrap; } summary { cursor: pointer; } p { margin: .3rem 0; }
"""
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


class Docs:
    """Handlers. `document` makes the OpenAPI document; it is asked once."""

    def __init__(self, document: Callable[[], dict[str, Any]]) -> None:
        self._document = document

    async def page(self, request: Request) -> Response:
        """Every route with its fields."""
        return Response(self._html, media_type="text/html", headers=_HEADERS)

    async def to_page(self, request: Request) -> Response:
        """Lead to the page."""
        return RedirectResponse("/docs")

    @functools.cached_property
    def _html(self) -> str:
        document = self._document()
        schemas = document.get("components", {}).get("schemas", {})
        title = f"{document['info']['title']} {document['info']['version']}"
        parts = [
            f"<!doctype html><html lang=en><meta charset=utf-8><title>{_safe(title)}</title><style>{_STYLE}</style>"
        ]
        parts.append(f'<h1>{_safe(title)}</h1><p>Machines read <a href="openapi.json">openapi.json</a>.</p>')
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                parts += _operation(path, method, operation, schemas)
        return "".join(parts)


def _operation(path: str, method: str, operation: dict[str, Any], schemas: dict[str, Any]) -> Iterator[str]:
    yield f"<h2>{_safe(method.upper())} {_safe(path)}</h2><p>{_safe(operation.get('description', ''))}</p>"
    rows = [
        (one["name"], " or ".join(one["schema"].get("enum", ["text"])), f"in the {one['in']}")
        for one in operation.get("parameters", ())
    ]
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content is not None:
        schema = schemas[content["schema"]["$ref"].rpartition("/")[2]]
        needed = schema.get("required", ())
        for name, field in schema.get("properties", {}).items():
            rows.append((name, _kind(field), "required" if name in needed else ""))
    if rows:
        cells = "".join(f"<tr>{''.join(f'<td>{_safe(cell)}</td>' for cell in row)}</tr>" for row in rows)
        yield f"<details><summary>{len(rows)} fields</summary><table>{cells}</table></details>"


def _kind(schema: dict[str, Any]) -> str:
    """A schema in a few words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(one) for one in schema["anyOf"] if one.get("type") != "null"))
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    kind = str(schema.get("type", "anything"))
    return f"list of {_kind(schema['items'])}" if kind == "array" and isinstance(schema.get("items"), dict) else kind


def _safe(text: str) -> str:
    return html.escape(text)
