"""The endpoints that run nothing."""

from __future__ import annotations

import pagerunner
from helpers.serving import RunningServer


def test_health_ping_and_version(server: RunningServer) -> None:
    assert server.get("/health").status_code == 200
    assert server.get("/ping").status_code == 200
    assert server.post("/ping").status_code == 200
    assert server.get("/version").json() == {"version": pagerunner.__version__}


def test_the_openapi_document_describes_the_bodies(server: RunningServer) -> None:
    document = server.get("/openapi.json").json()
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = document["components"]["schemas"][body["$ref"].rsplit("/", 1)[1]]
    assert "prompt" in schema["required"]
    assert schema["additionalProperties"] is False
