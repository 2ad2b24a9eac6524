"""Prometheus metrics under the names that dashboards for vLLM read."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pagerunner.engine.messages import EngineStats
from pagerunner.engine.observer import FinishedSequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABELS = ("model_name", "engine")
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_INTER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_REQUEST = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

_LENGTHS = (*(digit * 10**power for power in range(6) for digit in (1, 2, 5)), 1_000_000)


class GroupMetrics:
    """What each memory group holds and loses: `pagerunner:*`, labelled with the group's name."""

    def __init__(self, registry: CollectorRegistry, values: dict[str, str]) -> None:
        self._values = values

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"pagerunner:{name}", text, (*_LABELS, "group"), registry=registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"pagerunner:{name}", text, (*_LABELS, "group"), registry=registry)

        self._gauges = {
            "usage": gauge("group_usage_ratio", "Share of the page memory's bytes that requests hold in this group."),
            "pages_in_use": gauge("group_pages_in_use", "Pages of the group that requests hold."),
            "pages_cached": gauge("group_pages_cached", "Pages of the group that only the prefix index knows."),
            "pages_free": gauge("group_pages_free", "Free pages in slabs that the group occupies."),
            "fragmentation": gauge(
                "group_fragmentation_ratio", "Share of all slabs that packing the group would free."
            ),
            "waste": gauge("group_waste_ratio", "Share of a slab of the group that can hold no state."),
        }
        self._counters = {
            "evictions": counter("group_evictions", "Cached pages of the group that were evicted."),
            "hits_total": counter("group_prefix_hits", "Prompt tokens that the group alone had in the prefix cache."),
        }
        self._all = [
            (Gauge(f"pagerunner:{name}", text, _LABELS, registry=registry).labels(**values), field)
            for name, text, field in (
                (
                    "kv_fragmentation_ratio",
                    "Share of all slabs that packing every group would free.",
                    "kv_fragmentation",
                ),
                ("kv_waste_ratio", "Share of a slab that can hold no state, of the worst group.", "kv_waste"),
            )
        ]

    def update(self, stats: EngineStats, last: EngineStats) -> None:
        """Set the gauges and move the counters from `last` to `stats`."""
        for gauge, field in self._all:
            gauge.set(getattr(stats, field))
        before = {group.name: group for group in last.groups}
        for group in stats.groups:
            labels = {**self._values, "group": group.name}
            for field, family in self._gauges.items():
                family.labels(**labels).set(getattr(group, field))
            for field, total in self._counters.items():
                old = getattr(before.get(group.name), field, 0)
                total.labels(**labels).inc(max(0, getattr(group, field) - old))


class Metrics:
    """An EngineObserver that fills a registry of its own. `render` gives the text that /metrics serves."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._values = {"model_name": model_name, "engine": "0"}
        self._last = EngineStats()
        self._running = self._gauge("num_requests_running", "Requests in the running batch.")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait to be run.")
        self._usage = [
            self._gauge(name, "Share of the KV cache in use, 1 is all of it.")
            for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc")
        ]
        self._prompt = self._counter("prompt_tokens", "Prompt tokens processed.")
        self._cached = self._counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache.")
        self._generated = self._counter("generation_tokens", "Tokens generated.")
        self._preemptions = self._counter("num_preemptions", "Requests preempted, to be computed again.")
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache at admission.")
        self._groups = GroupMetrics(self._registry, self._values)
        self._finished = Counter(
            "vllm:request_success",
            "Finished sequences by reason.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self._finished.labels(**self._values, finished_reason=reason)
        self._first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN)
        self._inter_token = self._histogram("inter_token_latency_seconds", "Token to token.", _INTER_TOKEN)
        self._latency = self._histogram("e2e_request_latency_seconds", "Arrival to end.", _REQUEST)
        self._prompt_length = self._histogram("request_prompt_tokens", "Prompt lengths.", _LENGTHS)
        self._answer_length = self._histogram("request_generation_tokens", "Answer lengths.", _LENGTHS)
        self._step = self._histogram("iteration_tokens_total", "Tokens per engine step.", _STEP_TOKENS)

    def describe_cache(self, **facts: object) -> None:
        """Set cache_config_info: a gauge of 1 whose labels hold the cache's facts."""
        values = {name: str(value) for name, value in facts.items()}
        info = Gauge(
            "vllm:cache_config_info",
            "How the KV cache is configured.",
            ("engine", *values),
            registry=self._registry,
        )
        info.labels(engine="0", **values).set(1)

    def render(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(self._registry)

    def on_stats(self, stats: EngineStats) -> None:
        """Set the gauges and move the counters that the core keeps."""
        self._running.set(stats.running)
        self._waiting.set(stats.waiting)
        for gauge in self._usage:
            gauge.set(stats.kv_cache_usage)
        self._preemptions.inc(max(0, stats.preemptions - self._last.preemptions))
        self._queries.inc(max(0, stats.prefix_queries - self._last.prefix_queries))
        self._hits.inc(max(0, stats.prefix_hits - self._last.prefix_hits))
        self._groups.update(stats, self._last)
        self._last = stats

    def on_step(self, prompt_tokens: int, cached_tokens: int, generation_tokens: int) -> None:
        """Count one step's tokens."""
        self._prompt.inc(prompt_tokens)
        self._cached.inc(cached_tokens)
        self._generated.inc(generation_tokens)
        self._step.observe(prompt_tokens + generation_tokens)

    def on_first_token(self, seconds: float) -> None:
        """Observe a time to first token."""
        self._first_token.observe(seconds)

    def on_inter_token(self, seconds: float) -> None:
        """Observe a time between two tokens."""
        self._inter_token.observe(seconds)

    def on_finished(self, sequence: FinishedSequence) -> None:
        """Count a finished sequence and observe its lengths and time."""
        self._finished.labels(**self._values, finished_reason=sequence.reason).inc()
        self._latency.observe(sequence.seconds)
        self._prompt_length.observe(sequence.prompt_tokens)
        self._answer_length.observe(sequence.generation_tokens)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, _LABELS, registry=self._registry).labels(**self._values)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, _LABELS, registry=self._registry).labels(**self._values)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"vllm:{name}", text, _LABELS, buckets=buckets, registry=self._registry).labels(**self._values)
