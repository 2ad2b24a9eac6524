"""Prometheus metrics under the names that dashboards for vLLM read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pagerunner.engine.core.messages import WAIT_REASONS, SchedulerStats, StartUp
from pagerunner.engine.frontend.observer import EngineObserver, FinishedSequence
from pagerunner.memory.residency import BOUNDS, Residency
from pagerunner.types import EngineRequest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABELS = ("model_name", "engine")


def bounds(text: str) -> tuple[float, ...]:
    """Upper bounds of a histogram's buckets: "0.1 0.5 1" -> (0.1, 0.5, 1.0)."""
    return tuple(map(float, text.split()))


# vLLM's bounds, and finer bounds below them for small models.
_SECONDS = bounds("0.001 0.0025 0.005 0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80")
_FIRST_TOKEN = bounds("0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560")
_REQUEST = bounds("0.001 0.005 0.01 0.05 0.1 0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680")
_LENGTHS = (*(digit * 10**power for power in range(6) for digit in (1, 2, 5)), 1_000_000)
_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Arrival to first token.", _FIRST_TOKEN),
    "inter_token_latency_seconds": ("Token to token.", _SECONDS),
    "request_time_per_output_token_seconds": ("Mean time per token after the first, by sequence.", _SECONDS),
    "e2e_request_latency_seconds": ("Arrival to end.", _REQUEST),
    "request_queue_time_seconds": ("Arrival to the first step that ran it.", _REQUEST),
    "request_prefill_time_seconds": ("First step to first token.", _REQUEST),
    "request_decode_time_seconds": ("First token to last token.", _REQUEST),
    "request_inference_time_seconds": ("First step to last token.", _REQUEST),
    "request_prompt_tokens": ("Prompt lengths.", _LENGTHS),
    "request_generation_tokens": ("Answer lengths.", _LENGTHS),
    "request_num_preemptions": ("Times that a sequence was preempted.", (0, 1, 2, 5, 10, 20, 50, 100)),
    "request_params_n": ("Answers asked for by a request.", (1, 2, 5, 10, 20)),
    "request_params_max_tokens": ("Most tokens that a sequence may generate.", _LENGTHS),
    "iteration_tokens_total": ("Tokens per engine step.", tuple(2**power for power in range(15))),
}
# The core's gauges, by the field of its stats: name and text.
_MOMENTS = {
    "running": ("vllm:num_requests_running", "Requests in the running batch."),
    "waiting": ("vllm:num_requests_waiting", "Requests that wait to be run."),
    "kv_usage": ("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 1 is all of it."),
    "kv_fragmentation": (
        "pagerunner:kv_fragmentation_ratio",
        "Share of all slabs that packing every group would free.",
    ),
    "kv_waste": ("pagerunner:kv_waste_ratio", "Share of a slab in which no state fits, of the worst group."),
}
# The core's counts.
_TOTALS = {
    "preemptions_total": ("vllm:num_preemptions", "Requests preempted, to be computed again."),
    "prefix_queries_total": ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_hits_total": ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache at admission."),
    "busy_seconds": ("pagerunner:device_busy_seconds", "Time that the device has worked on steps."),
    "steps_total": ("pagerunner:steps", "Engine steps."),
}
_TOKENS = {
    "prompt_tokens": "Prompt tokens processed.",
    "prompt_tokens_cached": "Prompt tokens found in the prefix cache.",
    "generation_tokens": "Tokens generated.",
}
_OLDER_NAMES = {
    "vllm:kv_cache_usage_perc": "vllm:gpu_cache_usage_perc",
    "vllm:prefix_cache_queries": "vllm:gpu_prefix_cache_queries",
    "vllm:prefix_cache_hits": "vllm:gpu_prefix_cache_hits",
    "vllm:inter_token_latency_seconds": "vllm:time_per_output_token_seconds",
}
bound_text: Callable[[float], str] = floatToGoString
_RESIDENCY = {
    "lifetime": "Allocation to eviction of sampled pages.",
    "idle_before_evict": "Last use to eviction of sampled pages.",
    "reuse_gap": "Use to use of sampled pages, the latest ones before their eviction.",
}
_SLEEP_STATES = {"awake": None, "weights_offloaded": 1, "discard_all": 2}


class _OlderName(Collector):
    """Repeats a family of metrics under the name that it had in older versions of vLLM."""

    def __init__(self, family: Any, name: str) -> None:
        self._family = family
        self._name = name

    def collect(self) -> Iterator[Metric]:
        """The family's samples, renamed."""
        for metric in self._family.collect():
            copy = Metric(self._name, f"{metric.name} under its older name.", metric.type)
            copy.samples = [one._replace(name=one.name.replace(metric.name, self._name)) for one in metric.samples]
            yield copy


class ResidencyMetrics(Collector):
    """How long sampled pages stay, in the histograms that the core keeps."""

    def __init__(self, values: dict[str, str]) -> None:
        self.latest = Residency()
        self._values = values

    def collect(self) -> Iterator[Metric]:
        """`vllm:kv_block_*_seconds` as the core counted last."""
        for field, text in _RESIDENCY.items():
            counted = getattr(self.latest, field)
            family = HistogramMetricFamily(f"vllm:kv_block_{field}_seconds", text, labels=tuple(self._values))
            sums = accumulate(counted.counts)
            buckets = [
                (bound_text(bound), float(below)) for bound, below in zip((*BOUNDS, math.inf), sums, strict=True)
            ]
            family.add_metric(tuple(self._values.values()), buckets, counted.total)
            yield family


class GroupMetrics:
    """The pages and the waste of each memory group: `pagerunner:*`, labelled with the group's name."""

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
            "waste": gauge("group_waste_ratio", "Share of a slab of the group in which no state fits."),
        }
        self._counters = {
            "evictions": counter("group_evictions", "Cached pages of the group that were evicted."),
            "queries_total": counter("group_prefix_queries", "Prompt tokens that the group was looked up for."),
            "hits_total": counter("group_prefix_hits", "Prompt tokens that the group alone had in the prefix cache."),
        }

    def update(self, stats: SchedulerStats, last: SchedulerStats) -> None:
        """Set the gauges and move the counters from `last` to `stats`."""
        before = {group.name: group for group in last.groups}
        for group in stats.groups:
            labels = {**self._values, "group": group.name}
            for field, family in self._gauges.items():
                family.labels(**labels).set(getattr(group, field))
            for field, total in self._counters.items():
                old = getattr(before.get(group.name), field, 0)
                total.labels(**labels).inc(max(0, getattr(group, field) - old))


class Metrics(EngineObserver):
    """Fills a registry of its own. `render` gives the text that /metrics serves, `spans` is told about sequences too.

    `last` are the core's latest stats, `tokens` the prompt tokens and generated tokens so far.
    """

    def __init__(self, model_name: str, spans: EngineObserver | None = None) -> None:
        self.registry = CollectorRegistry()
        self.last = SchedulerStats()
        self.tokens = (0, 0)
        self._spans = spans or EngineObserver()
        self._values = values = {"model_name": model_name, "engine": "0"}
        self._moments = {field: self._family(Gauge, *what).labels(**values) for field, what in _MOMENTS.items()}
        self._totals = {field: self._family(Counter, *what).labels(**values) for field, what in _TOTALS.items()}
        self._tokens = {n: self._family(Counter, f"vllm:{n}", text).labels(**values) for n, text in _TOKENS.items()}
        text = "Share of the last seconds that the device spent between steps."
        self._idle = self._family(Gauge, "pagerunner:device_idle_ratio", text).labels(**values)
        self._histograms = {
            name: self._family(Histogram, f"vllm:{name}", text, buckets=buckets).labels(**values)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._groups = GroupMetrics(self.registry, values)
        self._residency = ResidencyMetrics(values)

        def labelled(kind: type[Any], name: str, text: str, label: str, keys: Iterable[str]) -> dict[str, Any]:
            family = self._family(kind, name, text, label)
            return {key: family.labels(**values, **{label: key}) for key in keys}

        text = "Finished sequences by reason."
        reasons = ("stop", "length", "abort", "error")
        self._finished = labelled(Counter, "vllm:request_success", text, "finished_reason", reasons)
        text = "Prompt tokens by where their state came from."
        sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
        self._sources = labelled(Counter, "vllm:prompt_tokens_by_source", text, "source", sources)
        name = "num_requests_waiting_by_reason"
        text = "Requests that wait: for capacity, or for something that passes by itself."
        self._waiting = labelled(Gauge, f"vllm:{name}", text, "reason", ("capacity", "deferred"))
        text = "Requests that wait, under what the first of them waits for."
        self._reasons = labelled(Gauge, f"pagerunner:{name}", text, "reason", WAIT_REASONS)
        text = "1 for the state that the engine is in."
        self._sleep = labelled(Gauge, "vllm:engine_sleep_state", text, "sleep_state", _SLEEP_STATES)
        self.on_sleep(None)

    def _family(self, kind: type[Any], name: str, text: str, *labels: str, **options: Any) -> Any:
        family = kind(name, text, (*_LABELS, *labels), registry=self.registry, **options)
        if name in _OLDER_NAMES:
            self.registry.register(_OlderName(family, _OLDER_NAMES[name]))
        return family

    def describe_cache(self, **facts: object) -> None:
        """Set cache_config_info: a gauge of 1 whose labels hold the cache's facts."""
        values = {name: str(value) for name, value in facts.items()}
        info = Gauge(
            "vllm:cache_config_info", "How the KV cache is configured.", ("engine", *values), registry=self.registry
        )
        info.labels(engine="0", **values).set(1)

    def show_residency(self) -> None:
        """Publish how long sampled pages stay: only for engines that sample them."""
        self.registry.register(self._residency)

    def describe_start(self, startup: StartUp) -> None:
        """Publish what the start took: seconds by phase, and bytes of device memory by use, graphs among them."""
        seconds = self._family(Gauge, "pagerunner:startup_seconds", "Seconds of each phase of the start.", "phase")
        for phase, taken in startup.seconds.items():
            seconds.labels(**self._values, phase=phase).set(taken)
        memory = self._family(Gauge, "pagerunner:device_memory_bytes", "Device memory after the start, by use.", "use")
        for use, size in startup.memory.items():
            memory.labels(**self._values, use=use).set(size)
        graphs = self._family(Gauge, "pagerunner:graph_memory_bytes", "Device memory that captured graphs take.")
        graphs.labels(**self._values).set(startup.memory.get("graphs", 0))

    def render(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(self.registry)

    def set_idle(self, share: float) -> None:
        """Publish the share of the last seconds in which the device did not work on a step."""
        self._idle.set(share)

    def on_stats(self, stats: SchedulerStats) -> None:
        """Set the gauges and move the counters that the core keeps."""
        for field, gauge in self._moments.items():
            gauge.set(getattr(stats, field))
        for field, counter in self._totals.items():
            counter.inc(max(0, getattr(stats, field) - getattr(self.last, field)))
        self._waiting["capacity"].set(stats.waiting)
        for reason, gauge in self._reasons.items():
            gauge.set(stats.waiting if reason == stats.waiting_for else 0)
        self._groups.update(stats, self.last)
        if stats.residency is not None:
            self._residency.latest = stats.residency
        self.last = stats

    def on_step(self, prompt_tokens: int, cached_tokens: int, generation_tokens: int) -> None:
        """Count one step's tokens."""
        self.tokens = (self.tokens[0] + prompt_tokens, self.tokens[1] + generation_tokens)
        self._tokens["prompt_tokens"].inc(prompt_tokens)
        self._tokens["prompt_tokens_cached"].inc(cached_tokens)
        self._tokens["generation_tokens"].inc(generation_tokens)
        self._sources["local_compute"].inc(prompt_tokens - cached_tokens)
        self._sources["local_cache_hit"].inc(cached_tokens)
        self._histograms["iteration_tokens_total"].observe(prompt_tokens + generation_tokens)

    def on_first_token(self, seconds: float) -> None:
        """Observe a time to first token."""
        self._histograms["time_to_first_token_seconds"].observe(seconds)

    def on_inter_token(self, seconds: float) -> None:
        """Observe a time between two tokens."""
        self._histograms["inter_token_latency_seconds"].observe(seconds)

    def on_started(self, request: EngineRequest) -> None:
        """Tell the spans."""
        self._spans.on_started(request)

    def on_dropped(self, request: EngineRequest) -> None:
        """Tell the spans."""
        self._spans.on_dropped(request)

    def on_finished(self, sequence: FinishedSequence) -> None:
        """Count a finished sequence and observe its lengths and times."""
        self._spans.on_finished(sequence)
        self._finished[sequence.reason].inc()
        tokens = sequence.generation_tokens
        values: dict[str, float] = {
            "e2e_request_latency_seconds": sequence.end - sequence.arrival,
            "request_prompt_tokens": sequence.prompt_tokens,
            "request_generation_tokens": tokens,
            "request_num_preemptions": sequence.preemptions,
            "request_params_max_tokens": sequence.request.max_tokens,
        }
        if sequence.is_first:
            values["request_params_n"] = sequence.request.params.n
        if tokens:
            values |= {f"request_{name}_time_seconds": seconds for name, seconds in sequence.times().items()}
        if tokens > 1:
            decode = sequence.last_token - sequence.first_token
            values["request_time_per_output_token_seconds"] = decode / (tokens - 1)
        for name, value in values.items():
            self._histograms[name].observe(value)

    def on_sleep(self, level: int | None) -> None:
        """Set engine_sleep_state."""
        for state, of in _SLEEP_STATES.items():
            self._sleep[state].set(of == level)
