"""OpenTelemetry spans, one for each sequence, with vLLM's attribute names. Imported only when traces are asked for."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Receive, Scope, Send

from pagerunner.engine.frontend.observer import EngineObserver, FinishedSequence
from pagerunner.errors import ConfigError
from pagerunner.types import EngineRequest

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_TRACE_HEADERS = (b"traceparent", b"tracestate")
_carrier: ContextVar[dict[str, str] | None] = ContextVar("trace_headers", default=None)


class TraceHeaders:
    """Keeps an HTTP request's trace headers for the engine requests that are made in its context."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on."""
        headers = scope.get("headers", ())
        _carrier.set({name.decode(): value.decode("latin-1") for name, value in headers if name in _TRACE_HEADERS})
        await self._app(scope, receive, send)


class Spans(EngineObserver):
    """Writes a span `llm_request` for every sequence that ends, as a child of the span that its caller named."""

    def __init__(self, tracer: Tracer) -> None:
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, Status, StatusCode

        self._tracer = tracer
        self._extract = extract
        self._kind = SpanKind.SERVER
        self._error = Status(StatusCode.ERROR)
        self._parents: dict[str, dict[str, str]] = {}

    def on_started(self, request: EngineRequest) -> None:
        """Remember whose child its span will be."""
        if carrier := _carrier.get():
            self._parents[request.request_id] = carrier

    def on_dropped(self, request: EngineRequest) -> None:
        """Forget the sequence, because a sequence that never ran has no span."""
        self._parents.pop(request.request_id, None)

    def on_finished(self, sequence: FinishedSequence) -> None:
        """Write the span."""
        request, params = sequence.request, sequence.request.params
        attributes: dict[str, Any] = {
            "gen_ai.request.id": request.request_id,
            "gen_ai.request.n": params.n,
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.prompt_tokens": sequence.prompt_tokens,
            "gen_ai.usage.completion_tokens": sequence.generation_tokens,
            "gen_ai.latency.e2e": sequence.end - sequence.arrival,
            "pagerunner.usage.cached_tokens": sequence.cached_tokens,
            "pagerunner.finish_reason": sequence.reason,
        }
        if sequence.generation_tokens:
            times = sequence.times()
            attributes["gen_ai.latency.time_to_first_token"] = sequence.first_token - sequence.arrival
            attributes["gen_ai.latency.time_in_queue"] = times.pop("queue")
            attributes |= {f"gen_ai.latency.time_in_model_{name}": seconds for name, seconds in times.items()}
        since = time.time_ns() - time.monotonic_ns()  # from the monotonic clock to that of spans
        span = self._tracer.start_span(
            "llm_request",
            context=self._extract(self._parents.pop(request.request_id, {})),
            kind=self._kind,
            attributes=attributes,
            start_time=since + int(sequence.arrival * 1e9),
        )
        if sequence.reason == "error":
            span.set_status(self._error)
        span.end(since + int(sequence.end * 1e9))


@contextmanager
def sent_spans(endpoint: str | None) -> Iterator[Spans | None]:
    """Spans that are sent to an OTLP collector by HTTP, the last ones at the end; None without an endpoint.

    Raises:
        ConfigError: opentelemetry is not installed, or the endpoint is no HTTP address.
    """
    if endpoint is None:
        yield None
        return
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"--otlp-traces-endpoint must be an HTTP address such as http://127.0.0.1:4318/v1/traces, got {endpoint!r}."
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"Traces need OpenTelemetry ({error}); install it with `pip install 'pagerunner[tracing]'`, or leave out "
            "--otlp-traces-endpoint."
        ) from error
    name = os.environ.get("OTEL_SERVICE_NAME", "pagerunner")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    try:
        yield Spans(provider.get_tracer("pagerunner"))
    finally:
        provider.shutdown()
