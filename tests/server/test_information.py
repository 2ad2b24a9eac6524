"""The endpoints that run nothing."""

from __future__ import annotations

from pathlib import Path

import pagerunner
from helpers.serving import RunningServer, running_server
from pagerunner.config import EngineArgs


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
    for path in ("/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize"):
        reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert document["components"]["schemas"][reference.rsplit("/", 1)[1]]["additionalProperties"] is False
    assert [one["name"] for one in document["paths"]["/sleep"]["post"]["parameters"]] == ["level", "mode"]


def test_memory_is_the_plan_and_the_live_state_of_the_core(server: RunningServer) -> None:
    server.wait_idle()
    body = server.get("/memory").json()
    assert body["plan"] == server.engine.memory_plan
    assert body["state"]["num_slabs"] == 4 and body["state"]["requests"] == []
    assert body["state"]["groups"][0]["slabs"] == [[0, 1]]


def test_memory_needs_the_admin_key(text_side: Path) -> None:
    with running_server(EngineArgs(model=str(text_side)), api_keys=["k"]) as server:
        assert server.get("/memory").status_code == 401
        response = server.get("/memory", headers={"Authorization": "Bearer k"})
        assert response.status_code == 403 and "--admin-key" in response.json()["error"]["message"]
