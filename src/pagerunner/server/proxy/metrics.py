"""What a proxy counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, GCCollector, PlatformCollector, ProcessCollector

from pagerunner.server.standard_metrics import HttpMetrics

_LABELS = ("server", "url")


class ProxyMetrics:
    """The registry of a proxy's process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self.http = HttpMetrics(self.registry)
        self.requests = self._counter("requests", "Requests sent to a server.", _LABELS)
        self.failures = self._counter("failures", "Answers that a server has not given whole.", (*_LABELS, "reason"))
        self.running = self._gauge("requests_running", "Requests under way at a server.")
        self.up = self._gauge("server_up", "1 while a server takes requests.")
        self.fallbacks = self._counter(
            "prefill_fallbacks", "Prompts that a decode server computes itself.", ("reason",)
        )

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(f"pagerunner:proxy_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"pagerunner:proxy_{name}", text, _LABELS, registry=self.registry)
