"""The metrics that every HTTP service has: `http_*` as prometheus-fastapi-instrumentator names them, and `process_*`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    Metric,
    PlatformCollector,
    ProcessCollector,
    Summary,
)
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagerunner.server.gate import ROUTE
from pagerunner.server.http import CLIENT_LINK
from pagerunner.server.metrics import bounds

UNCOUNTED = frozenset(("/metrics", "/health", "/load", "/ping", "/version", "/ui/live"))
"""Probes, which would drown what clients do (vLLM leaves out the same), and a stream that lasts as long as somebody looks."""
NO_PROCESS = -1
SERVING = "pagerunner:http_calls_running"
_FINE = bounds("0.01 0.025 0.05 0.075 0.1 0.25 0.5 0.75 1 1.5 2 2.5 3 3.5 4 4.5 5 7.5 10 30 60")
_COARSE: tuple[float, ...] = (0.1, 0.5, 1)
_METHODS = frozenset(("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"))


class CoreProcesses(Collector):
    """Memory, CPU time and open files of the engines' processes. Each of `pids` gives a number, or NO_PROCESS once it has ended."""

    def __init__(self, pids: Sequence[Callable[[], int]]) -> None:
        self._engines = [ProcessCollector("pagerunner_core", pid, registry=None) for pid in pids]

    def collect(self) -> Iterator[Metric]:
        """Families by the label `engine`."""
        found: dict[str, Metric] = {}
        for index, engine in enumerate(self._engines):
            for family in engine.collect():
                samples = [one._replace(labels={**one.labels, "engine": str(index)}) for one in family.samples]
                family.samples = []
                found.setdefault(family.name, family).samples.extend(samples)
        yield from found.values()


def add_process_metrics(registry: CollectorRegistry, cores: Sequence[Callable[[], int]], *, alone: bool = True) -> None:
    """Memory, CPU time and open files of this process, and under `pagerunner_core_` of the engines' own processes.

    Nothing of this process if it isn't the server's only one: which one answers is chance.
    """
    if not alone:
        registry.register(CoreProcesses(cores))
        return
    ProcessCollector(registry=registry)
    registry.register(CoreProcesses(cores))
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)


class HttpMetrics:
    """Counts and times requests by route. `serving` is how many calls of clients run now."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.running = 0
        text = "Calls of clients that are being answered."
        self.serving = Gauge(SERVING, text, registry=registry, multiprocess_mode="livesum")
        handler, both = ("handler",), ("handler", "method")

        def summary(name: str, text: str) -> Summary:
            return Summary(f"http_{name}_size_bytes", text, handler, registry=registry)

        def histogram(name: str, names: tuple[str, ...], buckets: tuple[float, ...]) -> Histogram:
            text = "Request to end of answer."
            return Histogram(f"http_request_duration_{name}seconds", text, names, buckets=buckets, registry=registry)

        text = "Requests by method, status and handler."
        self._requests = Counter("http_requests", text, ("handler", "status", "method"), registry=registry)
        self._sent = summary("request", "Bodies of requests, as announced.")
        self._got = summary("response", "Bodies of answers.")
        self._fine = histogram("highr_", (), _FINE)
        self._coarse = histogram("", both, _COARSE)

    def load(self, directory: str | None) -> int:
        """How many calls of clients run: in this process, or in all that count in files of a directory."""
        if directory is None:
            return self.running
        found = MultiProcessCollector.merge(Path(directory).glob("gauge_livesum_*.db"))  # type: ignore[no-untyped-call]
        return int(sum(one.value for family in found if family.name == SERVING for one in family.samples))

    def count(self, scope: Scope, status: int, size: int, seconds: float) -> None:
        """A request has been answered with `size` bytes in so many seconds."""
        handler = scope.get(ROUTE, "none")
        if handler in UNCOUNTED:
            return
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._requests.labels(handler=handler, status=f"{status // 100}xx", method=method).inc()
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        self._sent.labels(handler=handler).observe(int(announced) if announced.isdigit() else 0)
        self._got.labels(handler=handler).observe(size)
        self._fine.observe(seconds)
        self._coarse.labels(handler=handler, method=method).observe(seconds)


class CountedRequests:
    """ASGI middleware that tells `metrics` of every request when its answer has been sent."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, size = 500, 0
        started = time.perf_counter()

        async def counted(message: Message) -> None:
            nonlocal status, size
            status = message.get("status", status)
            size += len(message.get("body", b""))
            await send(message)

        metrics = self._metrics
        calls = scope["method"] == "POST" and scope["path"].startswith(("/v1/", "/invocations"))
        metrics.running += calls
        metrics.serving.inc(calls)
        try:
            await self._app(scope, receive, counted)
        finally:
            metrics.running -= calls
            metrics.serving.dec(calls)
            if (link := scope.get(CLIENT_LINK)) is not None:
                size += link.size
            metrics.count(scope, status, size, time.perf_counter() - started)
