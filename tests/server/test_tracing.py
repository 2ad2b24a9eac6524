"""Spans: one a sequence, a child of the caller's, with vLLM's attribute names; and no OpenTelemetry unless it is asked for."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from helpers.serving import running_server
from pagerunner.config import EngineArgs
from pagerunner.engine.frontend.observer import FinishedSequence
from pagerunner.errors import ConfigError
from pagerunner.server.tracing import Spans, _carrier, sent_spans
from pagerunner.types import EngineRequest, SamplingParams

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class FakeTracer:
    def __init__(self) -> None:
        self.started: list[tuple[str, dict[str, Any]]] = []
        self.statuses: list[Any] = []
        self.ends: list[int] = []

    def start_span(self, name: str, **how: Any) -> FakeTracer:
        self.started.append((name, how))
        return self

    def set_status(self, status: Any) -> None:
        self.statuses.append(status)

    def end(self, at: int) -> None:
        self.ends.append(at)


def sequence(reason: str, tokens: int) -> FinishedSequence:
    params = SamplingParams(n=2, temperature=0.5, top_p=0.25)
    request = EngineRequest(request_id="a_0", prompt_token_ids=[5] * 10, params=params, seed=0, max_tokens=40)
    return FinishedSequence(request, reason, tokens, 4, 100.0, 100.25, 100.75, 102.75, 103.0)


def test_a_span_says_what_the_sequence_did() -> None:
    tracer: Any = FakeTracer()
    spans = Spans(tracer)
    one = sequence("stop", 21)
    token = _carrier.set({"traceparent": PARENT})
    spans.on_started(one.request)
    _carrier.reset(token)
    spans.on_finished(one)
    [(name, how)] = tracer.started
    assert name == "llm_request" and how["kind"] == trace.SpanKind.SERVER
    context = trace.get_current_span(how["context"]).get_span_context()
    assert f"{context.trace_id:032x}-{context.span_id:016x}" == PARENT[3:-3]
    assert how["attributes"] == {
        "gen_ai.request.id": "a_0",
        "gen_ai.request.n": 2,
        "gen_ai.request.max_tokens": 40,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.25,
        "gen_ai.usage.prompt_tokens": 10,
        "gen_ai.usage.completion_tokens": 21,
        "gen_ai.latency.e2e": 3.0,
        "gen_ai.latency.time_to_first_token": 0.75,
        "gen_ai.latency.time_in_queue": 0.25,
        "gen_ai.latency.time_in_model_prefill": 0.5,
        "gen_ai.latency.time_in_model_decode": 2.0,
        "gen_ai.latency.time_in_model_inference": 2.5,
        "pagerunner.usage.cached_tokens": 4,
        "pagerunner.finish_reason": "stop",
    }
    assert tracer.ends[0] - how["start_time"] == pytest.approx(3e9, abs=2)
    assert not tracer.statuses


def test_failures_are_marked_and_what_never_ran_leaves_nothing() -> None:
    tracer: Any = FakeTracer()
    spans = Spans(tracer)
    one = sequence("error", 0)
    token = _carrier.set({"traceparent": PARENT})
    spans.on_started(one.request)
    _carrier.reset(token)
    spans.on_dropped(one.request)
    assert not tracer.started
    spans.on_finished(one)
    assert "gen_ai.latency.time_in_queue" not in tracer.started[0][1]["attributes"]
    assert [status.status_code for status in tracer.statuses] == [trace.StatusCode.ERROR]
    assert not trace.get_current_span(tracer.started[0][1]["context"]).get_span_context().is_valid


def test_what_is_wrong_is_said_before_the_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="HTTP address such as"), sent_spans("localhost:4317"):
        pass
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    with pytest.raises(ConfigError, match=r"pagerunner\[tracing\]"), sent_spans("http://127.0.0.1:4318/v1/traces"):
        pass


def test_nothing_of_it_is_imported_otherwise() -> None:
    heavy = "('opentelemetry.sdk', 'opentelemetry.exporter')"
    code = f"import pagerunner.server.launch, sys; sys.exit(any(name.startswith({heavy}) for name in sys.modules))"
    path = str(Path(__file__).parents[2] / "src")
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path}, check=False).returncode == 0


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """An OTLP collector: its address and the bodies that it was sent."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", bodies
    server.shutdown()
    server.server_close()


def test_a_collector_gets_the_spans_of_what_was_answered(
    text_side: Path, collector: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, bodies = collector
    with running_server(EngineArgs(model=str(text_side)), otlp_traces_endpoint=url) as server:
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "n": 2}
        assert server.post("/v1/completions", body, headers={"traceparent": PARENT}).status_code == 200
        assert server.post("/v1/completions", {"prompt": [5] * 9000}).status_code == 400
    spans = [
        span
        for sent in bodies
        for resource in ExportTraceServiceRequest.FromString(sent).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert [span.name for span in spans] == ["llm_request"] * 2
    for span in spans:
        assert f"{span.trace_id.hex()}-{span.parent_span_id.hex()}" == PARENT[3:-3]
        values = {one.key: one.value for one in span.attributes}
        assert values["gen_ai.usage.completion_tokens"].int_value == 4
        assert values["gen_ai.usage.prompt_tokens"].int_value == 3
        assert values["gen_ai.latency.e2e"].double_value > 0
        assert span.end_time_unix_nano > span.start_time_unix_nano
