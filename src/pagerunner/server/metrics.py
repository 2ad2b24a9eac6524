"""Prometheus metrics under the names that dashboards for vLLM read."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, repeat
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pagerunner.engine.core.messages import STEP_PLACES, WAIT_REASONS, SchedulerStats, SpecCounts, StartUp, StepSizes
from pagerunner.engine.frontend.observer import EngineObserver, FinishedSequence
from pagerunner.memory.residency import BOUNDS, Residency, SecondsCount
from pagerunner.tiers.stats import TierStats
from pagerunner.types import EngineRequest, LoraStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABELS = ("model_name", "engine")
SHARED_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
"""The variable of the environment by which prometheus_client counts for several processes."""


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
}
_STEP_TOKENS = tuple(2**power for power in range(STEP_PLACES - 1))
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
    "prefix_hits_total": (
        "vllm:prefix_cache_hits",
        "Prompt tokens found in the prefix cache of the device at admission.",
    ),
    "busy_seconds": ("pagerunner:device_busy_seconds", "Time that the device has worked on steps."),
    "steps_total": ("pagerunner:steps", "Engine steps."),
}
_COSTS = {
    "predicted_seconds_total": ("pagerunner:step_seconds_predicted", "What the model of costs said that steps take."),
    "measured_seconds_total": ("pagerunner:step_seconds_measured", "What these steps took by the device's clock."),
    "error_seconds_total": ("pagerunner:step_seconds_error", "By how much each prediction was wrong, added up."),
}
_LORA_MOMENTS = {
    "registered": ("pagerunner:lora_adapters", "Adapters that requests may name."),
    "resident": ("pagerunner:lora_adapters_on_device", "Adapters that are in pages of the device whole."),
    "num_bytes": ("pagerunner:lora_bytes", "Bytes of the page memory that hold adapters."),
    "used_bytes": ("pagerunner:lora_used_bytes", "Those of adapters that running requests use; the others are cache."),
}
_LORA_TOTALS = {
    "hits_total": ("pagerunner:lora_hits", "Admitted requests whose adapter was on the device, or on its way."),
    "fills_total": (
        "pagerunner:lora_fills",
        "Times that an adapter, or missing pages of one, was brought to the device.",
    ),
    "fill_bytes_total": ("pagerunner:lora_fill_bytes", "Their bytes."),
}
_TIER_MOMENTS = {
    "usage": (
        "vllm:kv_offload_cpu_cache_usage_perc",
        "Share of the host memory for pages that holds some, 1 is all of it.",
    ),
    "num_bytes": ("pagerunner:kv_offload_bytes", "Host memory for pages, of each rank."),
    "ready_bytes": ("pagerunner:kv_offload_ready_bytes", "Host memory for pages that is page-locked by now."),
    "quarantined_bytes": (
        "pagerunner:kv_offload_quarantined_bytes",
        "Device memory that loads which were given up may still write.",
    ),
}
_EXCHANGE_MOMENTS = {
    "loans": ("pagerunner:kv_peer_loans", "Prompts whose pages other engines may read now."),
    "pulls": ("pagerunner:kv_peer_pulls", "Prompts whose pages are being pulled from other engines."),
    "bytes_per_second": ("pagerunner:kv_peer_bytes_per_second", "The rate at which pages come from other engines."),
}
_EXCHANGE_TOTALS = {
    "lent_total": ("pagerunner:kv_peer_lent", "Prompts whose pages were lent to other engines."),
    "expired_total": ("vllm:nixl_num_kv_expired_reqs", "Prompts whose pages were lent and not given back in time."),
    "pulled_total": ("pagerunner:kv_peer_pulled", "Prompts whose pages have come from other engines."),
    "failed_total": (
        "vllm:nixl_num_failed_transfers",
        "Prompts whose pages have not come, or not all of them, or had no room.",
    ),
    "pulled_bytes_total": ("pagerunner:kv_peer_pulled_bytes", "Bytes of pages that have come from other engines."),
}
_TIER_TOTALS = {
    "queries_total": (
        "vllm:external_prefix_cache_queries",
        "Prompt tokens not on the device that were looked up in host memory.",
    ),
    "hits_total": ("vllm:external_prefix_cache_hits", "Prompt tokens whose pages were loaded from host memory."),
    "load_bytes_total": ("vllm:kv_offload_load_bytes", "Bytes loaded from host memory, of each rank."),
    "store_bytes_total": ("vllm:kv_offload_store_bytes", "Bytes stored in host memory, of each rank."),
    "load_seconds_total": ("pagerunner:kv_offload_load_seconds", "Time that loads took."),
    "store_seconds_total": ("pagerunner:kv_offload_store_seconds", "Time that stores took."),
    "stores_skipped_total": (
        "vllm:kv_offload_stores_skipped",
        "Prompts that were not stored, as too many waited or no room was left.",
    ),
    "failed_total": ("pagerunner:kv_offload_failed_transfers", "Transfers that went wrong."),
    "given_up_total": ("pagerunner:kv_offload_loads_given_up", "Loads that took too long and weren't waited for."),
}
_DISK_MOMENTS = {
    "bytes": ("pagerunner:kv_disk_bytes", "Bytes of all files of the disk tier's directory."),
    "pages": ("pagerunner:kv_disk_pages", "Pages that the disk tier has of this model."),
    "pages_of_some": (
        "pagerunner:kv_disk_pages_of_some",
        "Pages that some ranks' disk tiers have and not all: nobody finds them.",
    ),
    "read_rate": ("pagerunner:kv_disk_read_bytes_per_second", "How fast the disk tier reads, as measured."),
    "waiting": ("pagerunner:kv_disk_requests_waiting", "Requests that wait for pages from the disk."),
}
_DISK_TOTALS = {
    "hits": ("pagerunner:kv_disk_hits", "Prompt tokens whose pages were read from the disk."),
    "read_bytes": ("pagerunner:kv_disk_read_bytes", "Bytes of pages read from the disk."),
    "write_bytes": ("pagerunner:kv_disk_write_bytes", "Bytes of pages written to the disk."),
    "failures": ("pagerunner:kv_disk_failed_pages", "Pages of the disk that were wrong or couldn't be read."),
    "skipped": ("pagerunner:kv_disk_skipped_pages", "Pages that were not written, as there was no room or no time."),
    "given_up": (
        "pagerunner:kv_disk_reads_given_up",
        "Requests that were computed since pages from the disk took too long, or had no room in host memory.",
    ),
}
_SPEC_TOTALS = {
    "num_drafts": ("vllm:spec_decode_num_drafts", "Drafts: of one row in one step each."),
    "num_draft_tokens": ("vllm:spec_decode_num_draft_tokens", "Drafted tokens."),
    "num_accepted_tokens": ("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted."),
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


class _WithOlderNames(CollectorRegistry):
    """The families of a registry, and some of them again under the names that they had in older versions of vLLM."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        for family in self._registry.collect():
            yield family
            if (name := _OLDER_NAMES.get(family.name)) is not None:
                copy = Metric(name, f"{family.name} under its older name.", family.type)
                copy.samples = [one._replace(name=one.name.replace(family.name, name)) for one in family.samples]
                yield copy


class Figures(Collector):
    """Gauges and counters of which the cores say the values. Every process that a core tells them shows the same.

    So far each process says itself whether an engine is up, how idle its device is and how it sleeps.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[type[Any], str]] = {}
        self._values: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}

    def set(self, name: str, text: str, labels: dict[str, str], value: float) -> None:
        """The value of a gauge."""
        self._of(name, text, GaugeMetricFamily)[tuple(labels.items())] = value

    def raise_to(self, name: str, text: str, labels: dict[str, str], value: float) -> None:
        """The value of a counter, which never goes down."""
        values, key = self._of(name, text, CounterMetricFamily), tuple(labels.items())
        values[key] = max(values.get(key, 0.0), value)

    def forget(self, name: str, labels: dict[str, str]) -> None:
        """Show a value no more."""
        self._values[name].pop(tuple(labels.items()), None)

    def collect(self) -> Iterator[Metric]:
        """The families."""
        for name, (kind, text) in self._kinds.items():
            values = self._values[name]
            family = kind(name, text, labels=[label for label, _ in next(iter(values))])
            for key, value in values.items():
                family.add_metric([of for _, of in key], value)
            yield family

    def _of(self, name: str, text: str, kind: type[Any]) -> dict[tuple[tuple[str, str], ...], float]:
        if name not in self._kinds:
            self._kinds[name], self._values[name] = (kind, text), {}
        return self._values[name]


class CoreHistograms(Collector):
    """Histograms that the cores keep: what each counted last."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._families: dict[str, tuple[str, Sequence[float], dict[str, SecondsCount | StepSizes]]] = {}

    def set(
        self, name: str, text: str, bounds: Sequence[float], engine: int, counted: SecondsCount | StepSizes
    ) -> None:
        """What an engine has counted: below each of the bounds, and beyond them."""
        self._families.setdefault(name, (text, bounds, {}))[2][str(engine)] = counted

    def collect(self) -> Iterator[Metric]:
        """The families."""
        for name, (text, bounds, engines) in self._families.items():
            family = HistogramMetricFamily(name, text, labels=_LABELS)
            for engine, counted in engines.items():
                pairs = zip((*bounds, math.inf), accumulate(counted.counts), strict=True)
                buckets = [(bound_text(bound), float(below)) for bound, below in pairs]
                family.add_metric((self._model_name, engine), buckets, counted.total)
            yield family


_GROUP_GAUGES = {
    "usage": ("pagerunner:group_usage_ratio", "Share of the page memory's bytes that requests hold in this group."),
    "pages_in_use": ("pagerunner:group_pages_in_use", "Pages of the group that requests hold."),
    "pages_cached": ("pagerunner:group_pages_cached", "Pages of the group that only the prefix index knows."),
    "pages_free": ("pagerunner:group_pages_free", "Free pages in slabs that the group occupies."),
    "fragmentation": ("pagerunner:group_fragmentation_ratio", "Share of all slabs that packing the group would free."),
    "waste": ("pagerunner:group_waste_ratio", "Share of a slab of the group in which no state fits."),
}
_GROUP_TOTALS = {
    "evictions": ("pagerunner:group_evictions", "Cached pages of the group that made room for others."),
    "queries_total": ("pagerunner:group_prefix_queries", "Prompt tokens that the group was looked up for."),
    "hits_total": ("pagerunner:group_prefix_hits", "Prompt tokens that the group alone had in the prefix cache."),
}


class EqualHistogram(Histogram):
    """A histogram that takes equal values at once. In files that processes share, each value costs 5 us."""

    def observe_equal(self, amount: float, count: int) -> None:
        """As `observe(amount)`, so many times."""
        self._sum.inc(amount * count)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(count)


class Latencies:
    """The latest latencies of an engine, kept while it is `open`."""

    def __init__(self) -> None:
        self.open = False
        self.first_token: deque[float] = deque(maxlen=1_024)
        self.inter_token: deque[float] = deque(maxlen=4_096)


class Registered:
    """What the metrics of all engines share: the registry, families by their names, and the registry that this process counts in."""

    def __init__(self, model_name: str, directory: str | None = None) -> None:
        """`directory`: all processes of the server count in files there, and each shows the sums."""
        self.directory = directory
        self.registry = self.counted = CollectorRegistry()
        if directory is not None:
            self.counted = CollectorRegistry()
            MultiProcessCollector(self.registry, directory)  # type: ignore[no-untyped-call]
        self.figures = Figures()
        self.registry.register(self.figures)
        self.histograms = CoreHistograms(model_name)
        self.registry.register(self.histograms)
        self._families: dict[str, Any] = {}

    def family(self, kind: type[Any], name: str, text: str, *labels: str, **options: Any) -> Any:
        """A family that this process counts in; made once."""
        if name not in self._families:
            self._families[name] = kind(name, text, (*_LABELS, *labels), registry=self.counted, **options)
        return self._families[name]


class Metrics(EngineObserver):
    """What is measured of engine 0, in a registry for all engines; `of_engine` has the others.

    `render` gives the text that /metrics serves, `spans` is told about sequences too. `last` are the core's latest stats, `tokens` the
    prompt tokens and generated tokens so far.
    """

    def __init__(
        self, model_name: str, spans: EngineObserver | None = None, *, engine: int = 0, shared: Registered | None = None
    ) -> None:
        self.engine = engine
        self.last = SchedulerStats()
        self._shown_adapters: dict[str, str] | None = None
        self.tokens = (0, 0)
        self.latencies = Latencies()
        self._others: dict[int, Metrics] = {}
        self._spans = spans or EngineObserver()
        self._shared = shared = shared or Registered(model_name)
        self.registry, self.counted, self.directory = shared.registry, shared.counted, shared.directory
        self._values = values = {"model_name": model_name, "engine": str(engine)}

        def labelled(kind: type[Any], name: str, text: str, label: str, keys: Iterable[str]) -> dict[str, Any]:
            family = shared.family(kind, name, text, label)
            return {key: family.labels(**values, **{label: key}) for key in keys}

        self._tokens = {
            name: shared.family(Counter, f"vllm:{name}", text).labels(**values) for name, text in _TOKENS.items()
        }
        self._histograms = {
            name: shared.family(EqualHistogram, f"vllm:{name}", text, buckets=buckets).labels(**values)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        text = "Finished sequences by reason."
        reasons = ("stop", "length", "abort", "error")
        self._finished = labelled(Counter, "vllm:request_success", text, "finished_reason", reasons)
        text = "Prompt tokens by where their state came from."
        sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
        self._sources = labelled(Counter, "vllm:prompt_tokens_by_source", text, "source", sources)
        self.set_idle(0.0)
        self._set_up(1)
        self.on_stats(self.last)
        self.on_sleep(None)

    def of_engine(self, index: int) -> Metrics:
        """Those of engine `index`."""
        if index == self.engine:
            return self
        if index not in self._others:
            model = self._values["model_name"]
            self._others[index] = Metrics(model, self._spans, engine=index, shared=self._shared)
        return self._others[index]

    def _set(self, name: str, text: str, value: float, **labels: str) -> None:
        self._shared.figures.set(name, text, {**self._values, **labels}, value)

    def describe_cache(self, **facts: object) -> None:
        """Set cache_config_info: a gauge of 1 whose labels hold the cache's facts."""
        values = {"engine": str(self.engine), **{name: str(value) for name, value in facts.items()}}
        self._shared.figures.set("vllm:cache_config_info", "How the KV cache is configured.", values, 1)

    def show_residency(self) -> None:
        """Publish how long sampled pages stay: only for engines that sample them."""
        self._set_residency(Residency())

    def _set_residency(self, residency: Residency) -> None:
        for field, text in _RESIDENCY.items():
            name, counted = f"vllm:kv_block_{field}_seconds", getattr(residency, field)
            self._shared.histograms.set(name, text, BOUNDS, self.engine, counted)

    def describe_start(self, startup: StartUp) -> None:
        """Publish what the start took: seconds by phase, and bytes of device memory by use, graphs among them."""
        for phase, taken in startup.seconds.items():
            self._set("pagerunner:startup_seconds", "Seconds of each phase of the start.", taken, phase=phase)
        for use, size in startup.memory.items():
            self._set("pagerunner:device_memory_bytes", "Device memory after the start, by use.", size, use=use)
        text = "Device memory that captured graphs take."
        self._set("pagerunner:graph_memory_bytes", text, startup.memory.get("graphs", 0))

    def render(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(_WithOlderNames(self.registry))

    def set_idle(self, share: float) -> None:
        """Publish the share of the last seconds in which the device did not work on a step."""
        text = "Share of the last seconds that the device spent between steps."
        for own in self._of_teams():
            own._set("pagerunner:device_idle_ratio", text, share)

    def on_stats(self, stats: SchedulerStats) -> None:
        """Set the gauges and counters that the core keeps. A core's teams of ranks are shown as engines."""
        self.last = stats
        for own, of_team in zip(self._of_teams(), stats.teams or [stats], strict=True):
            own._show(of_team)

    def _show_adapters(self, lora: LoraStats) -> None:
        figures, text = self._shared.figures, "Adapters of requests that run and that wait. The value is the time."
        name, before = "vllm:lora_requests_info", self._shown_adapters
        labels = {
            **self._values,
            "max_lora": str(lora.max_loras),
            "waiting_lora_adapters": ",".join(lora.waiting),
            "running_lora_adapters": ",".join(lora.running),
        }
        figures.set(name, text, labels, time.time())
        if before is not None and before != labels:
            figures.forget(name, before)
        self._shown_adapters = labels
        self._show_figures(lora, _LORA_MOMENTS, _LORA_TOTALS)

    def _of_teams(self) -> list[Metrics]:
        return [self.of_engine(self.engine + team) for team in range(max(len(self.last.teams), 1))]

    def _show(self, stats: SchedulerStats) -> None:
        self._show_figures(stats, _MOMENTS, _TOTALS)
        name = "num_requests_waiting_by_reason"
        text = "Requests that wait: for capacity, or for something that passes by itself."
        for reason, waiting in (("capacity", stats.waiting), ("deferred", 0)):
            self._set(f"vllm:{name}", text, waiting, reason=reason)
        text = "Requests that wait, under what the first of them waits for."
        for reason in WAIT_REASONS:
            self._set(f"pagerunner:{name}", text, stats.waiting if reason == stats.waiting_for else 0, reason=reason)
        for group in stats.groups:
            self._show_figures(group, _GROUP_GAUGES, _GROUP_TOTALS, group=group.name)
        if stats.residency is not None:
            self._set_residency(stats.residency)
        if stats.costs is not None:
            self._show_figures(stats.costs, {}, _COSTS)
        if stats.lora is not None:
            self._show_adapters(stats.lora)
        if stats.tier is not None:
            self._show_tier(stats.tier)
        if stats.exchange is not None:
            self._show_figures(stats.exchange, _EXCHANGE_MOMENTS, _EXCHANGE_TOTALS)
        if stats.spec is not None:
            self._show_drafts(stats.spec)
        text = "Tokens per engine step."
        self._shared.histograms.set("vllm:iteration_tokens_total", text, _STEP_TOKENS, self.engine, stats.step_sizes)

    def _show_drafts(self, spec: SpecCounts) -> None:
        self._show_figures(spec, {}, _SPEC_TOTALS)
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        text = "Drafted tokens that were accepted, by their place in the draft."
        for place, count in enumerate(spec.accepted_per_pos):
            self._shared.figures.raise_to(name, text, {**self._values, "position": str(place)}, count)

    def _show_tier(self, tier: TierStats) -> None:
        self._show_figures(tier, _TIER_MOMENTS, _TIER_TOTALS)
        if tier.disk is not None:
            self._show_figures(tier.disk, _DISK_MOMENTS, _DISK_TOTALS)
        text = "Transfers of pages between the device and host memory that are under way."
        for kind, count in (("load", tier.loads), ("store", tier.stores)):
            self._set("pagerunner:kv_offload_transfers", text, count, kind=kind)

    def _show_figures(
        self, stats: object, moments: dict[str, tuple[str, str]], totals: dict[str, tuple[str, str]], **labels: str
    ) -> None:
        figures, values = self._shared.figures, {**self._values, **labels}
        for field, (name, text) in moments.items():
            figures.set(name, text, values, getattr(stats, field))
        for field, (name, text) in totals.items():
            figures.raise_to(name, text, values, getattr(stats, field))

    def on_step(self, prompt_tokens: int, cached_tokens: int, generation_tokens: int, external_tokens: int = 0) -> None:
        """Count one step's tokens."""
        self.tokens = (self.tokens[0] + prompt_tokens, self.tokens[1] + generation_tokens)
        self._tokens["prompt_tokens"].inc(prompt_tokens)
        self._tokens["prompt_tokens_cached"].inc(cached_tokens)
        self._tokens["generation_tokens"].inc(generation_tokens)
        self._sources["local_compute"].inc(prompt_tokens - cached_tokens)
        self._sources["local_cache_hit"].inc(cached_tokens - external_tokens)
        self._sources["external_kv_transfer"].inc(external_tokens)

    def on_first_token(self, seconds: float) -> None:
        """Observe a time to first token."""
        self._histograms["time_to_first_token_seconds"].observe(seconds)
        if self.latencies.open:
            self.latencies.first_token.append(seconds)

    def on_inter_token(self, seconds: float, count: int = 1) -> None:
        """Observe a time between two tokens, of so many sequences."""
        self._histograms["inter_token_latency_seconds"].observe_equal(seconds, count)
        if self.latencies.open:
            self.latencies.inter_token.extend(repeat(seconds, count))

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
        text = "1 for the state that the engine is in."
        for own in self._of_teams():
            for state, of in _SLEEP_STATES.items():
                own._set("vllm:engine_sleep_state", text, of == level, sleep_state=state)

    def on_health(self, well: bool) -> None:
        """Set engine_up."""
        self._set_up(well)

    def on_death(self) -> None:
        """Set engine_up, and the gauges of what a dead engine has no more: requests, pages and a state of sleep."""
        self._set_up(0)
        self.on_stats(_ended(self.last))
        self.on_sleep(-1)

    def _set_up(self, value: int) -> None:
        text = "1 while the engine makes progress, 0 when it hangs or is gone."
        for own in self._of_teams():
            own._set("pagerunner:engine_up", text, value)


def _ended(stats: SchedulerStats) -> SchedulerStats:
    """What is left of an engine's counts when it has ended."""
    groups = [msgspec.structs.replace(group, **dict.fromkeys(_GROUP_GAUGES, 0)) for group in stats.groups]
    gone: dict[str, Any] = {**dict.fromkeys(_MOMENTS, 0), "waiting_for": ""}
    return msgspec.structs.replace(stats, **gone, groups=groups, teams=[_ended(team) for team in stats.teams])
