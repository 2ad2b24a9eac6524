"""What a proxy counts."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, GCCollector, PlatformCollector, ProcessCollector

from pagerunner.server.standard_metrics import HttpMetrics

_LABELS = ("server", "url")


class ServerCounts:
    """The figures of one server."""

    def __init__(self, requests: Counter, failures: Counter, labels: tuple[str, str]) -> None:
        self._requests, self._failures, self._labels = requests.labels(*labels), failures, labels

    def asked(self) -> None:
        """A request is sent to it."""
        self._requests.inc()

    def failed(self, reason: str) -> None:
        """It has not answered one as it should."""
        self._failures.labels(*self._labels, reason).inc()


class ProxyMetrics:
    """The registry of a proxy's process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self.http = HttpMetrics(self.registry)
        self._requests = self._counter("requests", "Requests sent to a server.", _LABELS)
        self._failures = self._counter(
            "failures", "Requests that a server has not answered as it should.", (*_LABELS, "reason")
        )
        self._running = self._gauge("requests_running", "Requests under way at a server.")
        self._up = self._gauge("server_up", "1 while a server takes requests.")
        self.recomputed = self._counter(
            "prefill_fallbacks", "Requests whose prompt the decode server computes itself.", ("reason",)
        )

    def of_server(self, name: str, url: str, running: Callable[[], float], up: Callable[[], float]) -> ServerCounts:
        """The counts of a server, whose state is asked for when somebody looks."""
        self._running.labels(name, url).set_function(running)
        self._up.labels(name, url).set_function(up)
        return ServerCounts(self._requests, self._failures, (name, url))

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(f"pagerunner:proxy_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"pagerunner:proxy_{name}", text, _LABELS, registry=self.registry)
