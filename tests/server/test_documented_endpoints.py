"""Every endpoint that the server describes is in the documents that users look it up in."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.serving import RunningServer

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("name", ["server.md", "coming-from-vllm.md"])
def test_endpoints_are_in_the_document(server: RunningServer, name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    paths = {path.partition("/{")[0] for path in server.get("/openapi.json").json()["paths"]}
    assert len(paths) > 10
    assert (
        sorted(path for path in paths if f"{path}`" not in text and f"{path}?" not in text and f"{path} " not in text)
        == []
    )
