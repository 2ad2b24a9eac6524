"""schemathesis over the OpenAPI document, with data that fits it and data that doesn't: never an answer of 5xx."""

from __future__ import annotations

import collections
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from helpers.effort import effort, share_of_the_day
from helpers.patience import LONG
from helpers.serving import MODEL, RunningServer
from pagerunner.server.protocol.fields import neutral_values
from pagerunner.server.protocol.requests import ChatRequest, CompletionRequest

CONTROL = {"/sleep", "/wake_up", "/reset_prefix_cache", "/pause", "/resume"}  # they change what the other cases meet
REFUSED = neutral_values(ChatRequest).keys() | neutral_values(CompletionRequest).keys()
EXAMPLES = {"POST": effort(8, 40), "GET": effort(4, 8)}


def operations(server: RunningServer) -> list[Any]:
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    found = [result.ok() for result in schema.get_all_operations()]
    return [operation for operation in found if operation.path not in CONTROL]


@pytest.mark.days(2)
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_no_answer_is_a_server_error(mode: str, server: RunningServer) -> None:
    statuses: collections.Counter[int] = collections.Counter()
    found = operations(server)
    assert len(found) > 8
    for number in share_of_the_day(len(found), 3, first=mode == "negative"):
        _explore(found[number], mode, server.url, statuses)
    print(f"{mode}: {dict(statuses)}")
    assert statuses[400 if mode == "negative" else 200] > 3  # it isn't everything or nothing that is refused
    server.wait_idle()
    assert server.get("/health").status_code == 200
    assert server.post("/v1/completions", {"prompt": "abc", "max_tokens": 1}).status_code == 200


def _get_further(body: dict[str, Any], number: int) -> None:
    """What the document can't say: the model's name, and on every second call fields that are refused unless neutral, and
    ranges, which are left out."""
    body["model"] = MODEL
    if number % 2:
        body["messages" if "messages" in body else "prompt"] = (
            [{"role": "user", "content": "a"}] if "messages" in body else "a"
        )
        for name, value in list(body.items()):
            if name in REFUSED or isinstance(value, (int, float)) and not isinstance(value, bool):
                del body[name]


def _explore(operation: Any, mode: str, url: str, statuses: collections.Counter[int]) -> None:
    from schemathesis import GenerationMode

    @settings(
        max_examples=EXAMPLES.get(operation.method.upper(), EXAMPLES["GET"]),
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=GenerationMode(mode)))
    def explore(case: Any) -> None:
        if mode == "positive" and isinstance(case.body, dict):
            _get_further(case.body, sum(statuses.values()))
        response = case.call(base_url=url, timeout=LONG)
        statuses[response.status_code] += 1
        assert response.status_code < 500, f"{operation.label}: {case.body!r} -> {response.text[:500]}"
        if response.status_code >= 400 and operation.method.upper() != "HEAD":
            anthropics = operation.path.startswith("/v1/messages")
            keys = {"message", "type"} if anthropics else {"message", "type", "param", "code"}
            assert set(response.json()["error"]) == keys

    try:
        explore()
    except Exception as error:
        if (
            "Unsatisfiable" not in type(error).__name__
        ):  # an operation without a body or parameters has nothing to get wrong
            raise
