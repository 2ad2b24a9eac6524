"""/metrics is Prometheus text under vLLM's names, and its figures are right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from helpers.serving import MODEL, RunningServer
from pagerunner.bench.drafts import DraftCounts, read_counts
from pagerunner.cli.main import main
from pagerunner.engine.core.messages import SchedulerStats
from pagerunner.engine.frontend.observer import FinishedSequence
from pagerunner.logs import SparingLog
from pagerunner.memory.residency import Residency
from pagerunner.memory.stats import GroupUsage
from pagerunner.sched.costs import CostStats
from pagerunner.sched.stats import SpecCounts, StepSizes
from pagerunner.sched.teams import _together
from pagerunner.server import app, launch, stats_log
from pagerunner.server.metrics import Metrics
from pagerunner.server.stats_log import StatsLog
from pagerunner.tiers.stats import DiskStats, ExchangeStats, TierStats
from pagerunner.types import EngineRequest, SamplingParams
from pagerunner.types.lora import LoraStats

NAMES = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "gpu_cache_usage_perc": "gauge",
    "cache_config_info": "gauge",
    "prompt_tokens": "counter",
    "prompt_tokens_cached": "counter",
    "generation_tokens": "counter",
    "request_success": "counter",
    "num_preemptions": "counter",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "iteration_tokens_total": "histogram",
    "num_requests_waiting_by_reason": "gauge",
    "engine_sleep_state": "gauge",
    "prompt_tokens_by_source": "counter",
    "time_per_output_token_seconds": "histogram",
    "request_time_per_output_token_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_inference_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "request_num_preemptions": "histogram",
    "request_params_n": "histogram",
    "request_params_max_tokens": "histogram",
}


def test_every_core_name_is_there_with_its_type_and_labels(server: RunningServer) -> None:
    response = server.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    for name, kind in NAMES.items():
        family = families[f"vllm:{name}"]
        assert family.type == kind
        assert all(sample.labels["engine"] == "0" for sample in family.samples)
        if name != "cache_config_info":
            assert all(sample.labels["model_name"] == MODEL for sample in family.samples)


def test_counts_follow_requests(server: RunningServer) -> None:
    server.wait_idle()
    names = ("prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_count")
    names += ("inter_token_latency_seconds_count", "e2e_request_latency_seconds_count", "request_prompt_tokens_sum")
    before = {name: server.metric(name) for name in names}
    length = server.metric("request_success_total", finished_reason="length")
    server.post("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 4, "n": 2})
    server.wait_idle()
    change = {name: server.metric(name) - before[name] for name in names}
    assert list(change.values()) == [6, 8, 2, 6, 2, 6]
    assert server.metric("request_success_total", finished_reason="length") - length == 2


def test_groups_have_gauges_and_counters_of_their_own() -> None:
    def group(name: str, scale: int) -> GroupUsage:
        return GroupUsage(
            name=name,
            pages_in_use=3 * scale,
            pages_cached=2 * scale,
            evictions=5 * scale,
            pages_free=7 * scale,
            hits_total=32 * scale,
            usage=0.125 * scale,
            fragmentation=0.0625 * scale,
            waste=0.01 * scale,
        )

    metrics = Metrics("m")
    metrics.on_stats(SchedulerStats(groups=[group("full", 1), group("window-128", 2)], kv_fragmentation=0.25))
    metrics.on_stats(
        SchedulerStats(groups=[group("full", 3), group("window-128", 1)], kv_fragmentation=0.5, kv_waste=0.02)
    )
    text = metrics.render().decode()
    labels = '{engine="0",group="full",model_name="m"}'
    for name, value in {
        "usage_ratio": 0.375,
        "pages_in_use": 9.0,
        "pages_cached": 6.0,
        "pages_free": 21.0,
        "fragmentation_ratio": 0.1875,
        "waste_ratio": 0.03,
        "evictions_total": 15.0,
        "prefix_hits_total": 96.0,
    }.items():
        assert f"pagerunner:group_{name}{labels} {value}" in text
    assert 'pagerunner:group_evictions_total{engine="0",group="window-128",model_name="m"} 10.0' in text, "never down"
    assert 'pagerunner:kv_fragmentation_ratio{engine="0",model_name="m"} 0.5' in text
    assert 'pagerunner:kv_waste_ratio{engine="0",model_name="m"} 0.02' in text


def test_a_stop_string_counts_as_stop(server: RunningServer) -> None:
    server.wait_idle()
    before = server.metric("request_success_total", finished_reason="stop")
    server.post("/v1/completions", {"prompt": "hello, world", "max_tokens": 500, "stop": "lo"})
    server.wait_idle()
    assert server.metric("request_success_total", finished_reason="stop") - before == 1


def test_running_totals_of_the_core_become_counters() -> None:
    metrics = Metrics("m")
    metrics.on_stats(SchedulerStats(running=2, waiting=1, kv_usage=0.5, preemptions_total=3, prefix_hits_total=16))
    metrics.on_stats(SchedulerStats(running=1, waiting=0, kv_usage=0.25, preemptions_total=4, prefix_hits_total=32))
    request = EngineRequest(
        request_id="a_1", parent_id="a", prompt_token_ids=[5] * 10, params=SamplingParams(n=2), seed=0, max_tokens=40
    )
    metrics.on_finished(FinishedSequence(request, "stop", 21, 4, 100.0, 100.25, 100.75, 102.75, 103.0, preemptions=3))
    text = metrics.render().decode()
    assert 'vllm:num_requests_running{engine="0",model_name="m"} 1.0' in text
    assert 'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25' in text
    assert 'vllm:num_preemptions_total{engine="0",model_name="m"} 4.0' in text
    assert 'vllm:prefix_cache_hits_total{engine="0",model_name="m"} 32.0' in text
    for name, value in {
        "generation_tokens_sum": 21,
        "queue_time_seconds_sum": 0.25,
        "prefill_time_seconds_sum": 0.5,
        "decode_time_seconds_sum": 2,
        "inference_time_seconds_sum": 2.5,
        "time_per_output_token_seconds_sum": 0.1,
        "params_max_tokens_sum": 40,
        "num_preemptions_sum": 3,
        "params_n_count": 0,  # the first of the two sequences stands for the request
    }.items():
        assert f'vllm:request_{name}{{engine="0",model_name="m"}} {float(value)}' in text, name
    assert 'vllm:e2e_request_latency_seconds_sum{engine="0",model_name="m"} 3.0' in text


def test_what_steps_were_thought_to_cost_is_shown_beside_what_they_took() -> None:
    metrics = Metrics("m")
    metrics.on_stats(SchedulerStats())
    assert b"step_seconds" not in metrics.render(), "without a target nothing is priced"
    metrics.on_stats(SchedulerStats(costs=CostStats(2.0, 2.25, 0.5)))
    text = metrics.render().decode()
    for name, value in (("predicted", 2.0), ("measured", 2.25), ("error", 0.5)):
        assert f'pagerunner:step_seconds_{name}_total{{engine="0",model_name="m"}} {value}' in text


def test_what_an_engine_has_besides_is_shown_by_its_names() -> None:
    """The tables name fields and properties of what a core counts, which no other code may read."""
    metrics = Metrics("m")
    tier = TierStats(num_bytes=400, used_bytes=100, disk=DiskStats(pages=7))
    lora = LoraStats(
        4, [], [], registered=3, resident=2, num_bytes=9, used_bytes=8, hits_total=7, fills_total=6, fill_bytes_total=5
    )
    metrics.on_stats(SchedulerStats(tier=tier, exchange=ExchangeStats(loans=2), lora=lora))
    text = metrics.render().decode()
    shown = {"vllm:kv_offload_cpu_cache_usage_perc": 0.25, "pagerunner:kv_offload_bytes": 400}
    shown |= {"pagerunner:kv_disk_pages": 7, "pagerunner:kv_peer_loans": 2, "pagerunner:lora_adapters": 3}
    for name, value in shown.items():
        assert f'{name}{{engine="0",model_name="m"}} {float(value)}' in text, name


def test_the_start_is_broken_down(server: RunningServer) -> None:
    families = {family.name: family for family in text_string_to_metric_families(server.get("/metrics").text)}

    def by(name: str, label: str) -> dict[str, float]:
        return {sample.labels[label]: sample.value for sample in families[f"pagerunner:{name}"].samples}

    seconds = by("startup_seconds", "phase")
    assert seconds.pop("process and imports") > -2  # the fake core says it took 2 s
    assert seconds == {"weights": 1.5, "capture": 0.5}
    assert by("device_memory_bytes", "use") == {"graphs": 4096, "free": 2**30}
    assert by("graph_memory_bytes", "model_name") == {MODEL: 4096}


def test_older_names_say_the_same() -> None:
    metrics = Metrics("m")
    metrics.on_stats(SchedulerStats(kv_usage=0.5, prefix_queries_total=64, prefix_hits_total=16))
    metrics.on_inter_token(0.03)
    families = {one.name: one for one in text_string_to_metric_families(metrics.render().decode())}
    for new, old in (
        ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
        ("prefix_cache_queries", "gpu_prefix_cache_queries"),
        ("prefix_cache_hits", "gpu_prefix_cache_hits"),
        ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    ):
        a, b = families[f"vllm:{new}"], families[f"vllm:{old}"]
        assert a.type == b.type and any(sample.value for sample in a.samples)
        assert [(s.name.replace(new, old), s.labels, s.value) for s in a.samples] == [
            (s.name, s.labels, s.value) for s in b.samples
        ]


def test_waiting_requests_count_under_what_the_first_waits_for() -> None:
    metrics = Metrics("m")
    metrics.on_stats(SchedulerStats(waiting=5, waiting_for="pages"))
    metrics.on_stats(SchedulerStats(waiting=3, waiting_for="slot"))
    text = metrics.render().decode()
    assert 'vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 3.0' in text
    assert 'pagerunner:num_requests_waiting_by_reason{engine="0",model_name="m",reason="slot"} 3.0' in text
    assert 'pagerunner:num_requests_waiting_by_reason{engine="0",model_name="m",reason="pages"} 0.0' in text


def test_tokens_of_steps_are_those_that_the_core_counted() -> None:
    metrics = Metrics("m")
    sizes = StepSizes()
    for tokens in (1, 2, 3, 4, 20_000):
        sizes.add(tokens)
    metrics.on_stats(SchedulerStats(step_sizes=sizes))
    metrics.on_step(100, 0, 1)  # what this process has of a step
    text = metrics.render().decode()
    for name, value in {
        'bucket{engine="0",le="2.0",model_name="m"}': 2,
        'bucket{engine="0",le="4.0",model_name="m"}': 4,
        'bucket{engine="0",le="16384.0",model_name="m"}': 4,
        'count{engine="0",model_name="m"}': 5,
        'sum{engine="0",model_name="m"}': 20_010,
    }.items():
        assert f"vllm:iteration_tokens_total_{name} {value:.1f}" in text


def test_prompt_tokens_are_counted_by_where_they_came_from_as_vllm_does() -> None:
    metrics = Metrics("m")
    metrics.on_step(100, 80, 1, 48)
    metrics.on_step(100, 80, 1)
    text = metrics.render().decode()
    for source, tokens in (("local_compute", 40), ("local_cache_hit", 112), ("external_kv_transfer", 48)):
        name = f'vllm:prompt_tokens_by_source_total{{engine="0",model_name="m",source="{source}"}}'
        assert f"{name} {tokens:.1f}" in text
    assert 'vllm:prompt_tokens_cached_total{engine="0",model_name="m"} 160.0' in text


def test_the_load_of_several_processes_is_read_of_their_own_files_alone(tmp_path: Path) -> None:
    program = """
import os
from prometheus_client import CollectorRegistry
from pagerunner.server.standard_metrics import HttpMetrics
http = HttpMetrics(CollectorRegistry())
http.running += 2
http.serving.inc(2)
http.count({"method": "POST", "headers": []}, 200, 1, 0.1)
print(http.load(None), http.load(os.environ["PROMETHEUS_MULTIPROC_DIR"]))
"""
    environ = {
        **os.environ,
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    for _ in range(2):
        got = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert got.stdout == "2 4\n"


def test_a_directory_of_the_users_for_several_processes_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "/nowhere")
    metrics = Metrics("m")
    metrics.on_step(100, 0, 1)
    assert 'vllm:prompt_tokens_total{engine="0",model_name="m"} 100.0' in metrics.render().decode()
    monkeypatch.setattr(launch, "run_server", lambda *args, **options: int("PROMETHEUS_MULTIPROC_DIR" in os.environ))
    assert main(["serve", "demo", "--quiet"]) == 0


def test_how_long_pages_stay_is_shown_as_the_core_counted_it() -> None:
    metrics = Metrics("m")
    assert "kv_block" not in metrics.render().decode(), "vLLM has these only when asked"
    metrics.show_residency()
    assert 'vllm:kv_block_lifetime_seconds_count{engine="0",model_name="m"} 0.0' in metrics.render().decode()
    residency = Residency()
    for seconds in (0.0005, 3, 4, 5000):
        residency.lifetime.add(seconds)
    residency.reuse_gap.add(1)
    metrics.on_stats(SchedulerStats(residency=residency))
    families = {one.name: one for one in text_string_to_metric_families(metrics.render().decode())}
    lifetime = families["vllm:kv_block_lifetime_seconds"]
    assert lifetime.type == "histogram"
    values = {(one.name.rpartition("_")[2], one.labels.get("le")): one.value for one in lifetime.samples}
    assert values["bucket", "0.001"] == values["bucket", "2.0"] == 1 and values["bucket", "5.0"] == 3
    assert values["bucket", "1800.0"] == 3 and values["bucket", "+Inf"] == values["count", None] == 4
    assert values["sum", None] == 5007.0005
    assert all(one.labels["model_name"] == "m" and one.labels["engine"] == "0" for one in lifetime.samples)
    gaps = families["vllm:kv_block_reuse_gap_seconds"]
    assert {one.value for one in gaps.samples if one.labels.get("le") in ("0.5", "1.0")} == {0, 1}
    assert "vllm:kv_block_idle_before_evict_seconds" in families


def test_a_groups_hit_rate_has_its_queries() -> None:
    def stats(queries: int, hits: int) -> SchedulerStats:
        group = GroupUsage(
            name="full", pages_in_use=0, pages_cached=0, evictions=0, queries_total=queries, hits_total=hits
        )
        return SchedulerStats(groups=[group])

    metrics = Metrics("m")
    metrics.on_stats(stats(100, 16))
    metrics.on_stats(stats(300, 112))
    text = metrics.render().decode()
    assert 'pagerunner:group_prefix_queries_total{engine="0",group="full",model_name="m"} 300.0' in text
    assert 'pagerunner:group_prefix_hits_total{engine="0",group="full",model_name="m"} 112.0' in text


def test_sleep_is_a_state() -> None:
    def states(metrics: Metrics) -> dict[str, float]:
        families = text_string_to_metric_families(metrics.render().decode())
        family = next(one for one in families if one.name == "vllm:engine_sleep_state")
        return {sample.labels["sleep_state"]: sample.value for sample in family.samples}

    metrics = Metrics("m")
    assert states(metrics) == {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
    metrics.on_sleep(2)
    assert states(metrics) == {"awake": 0, "weights_offloaded": 0, "discard_all": 1}
    metrics.on_sleep(None)
    assert states(metrics)["awake"] == 1


def test_the_log_line_has_the_rates_since_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 110.0, 120.0, 130.0])
    monkeypatch.setattr(stats_log, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    metrics = Metrics("m")
    log = StatsLog(metrics)
    metrics.on_step(500, 100, 1000)
    metrics.on_stats(
        SchedulerStats(
            running=2,
            waiting=1,
            waiting_for="slot",
            kv_usage=0.25,
            prefix_queries_total=400,
            prefix_hits_total=100,
            busy_seconds=9,
        )
    )
    [line] = log.lines()
    assert line == (
        "Engine 000: Avg prompt throughput: 50.0 tokens/s, Avg generation throughput: 100.0 tokens/s, Running: 2 reqs, "
        "Waiting: 1 reqs (for slot), GPU KV cache usage: 25.0%, Prefix cache hit rate: 25.0%, Device idle: 10.0%"
    )
    assert 'pagerunner:device_idle_ratio{engine="0",model_name="m"} 0.09' in metrics.render().decode()
    assert "generation throughput: 0.0" in log.lines()[0], "still running"
    metrics.on_stats(SchedulerStats(busy_seconds=9))
    assert log.lines() == []
    assert 'pagerunner:device_idle_ratio{engine="0",model_name="m"} 1.0' in metrics.render().decode()


def test_the_log_line_has_what_was_loaded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics("m")
    metrics.on_stats(
        SchedulerStats(running=1, prefix_queries_total=100, tier=TierStats(queries_total=100, hits_total=100))
    )
    log = StatsLog(metrics)
    later = TierStats(queries_total=500, hits_total=300)
    metrics.on_stats(SchedulerStats(running=1, prefix_queries_total=500, prefix_hits_total=0, tier=later))
    assert "Prefix cache hit rate: 0.0%, External prefix cache hit rate: 50.0%, Device idle" in log.lines()[0]


def test_drafts_have_vllms_metrics_and_its_line_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 110.0, 120.0])
    monkeypatch.setattr(stats_log, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    metrics = Metrics("m")
    assert "spec_decode" not in metrics.render().decode()
    metrics.on_stats(SchedulerStats(spec=SpecCounts([10, 0, 0], 20)))
    log = StatsLog(metrics)
    spec = SpecCounts([10, 0, 0], 20)
    for drafted, accepted in [(2, 2)] * 5 + [(2, 1)] * 3 + [(2, 0)] * 2:
        spec.add(drafted, accepted)
    metrics.on_stats(SchedulerStats(running=1, spec=spec))
    text = metrics.render().decode()
    labels = 'engine="0",model_name="m"'
    for sample in (
        f"vllm:spec_decode_num_drafts_total{{{labels}}} 20.0",
        f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} 40.0",
        f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} 13.0",
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="0"}} 8.0',
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="1"}} 5.0',
    ):
        assert sample in text
    [_, line] = log.lines()
    assert line == (
        "Engine 000: SpecDecoding metrics: Mean acceptance length: 2.30, Accepted throughput: 1.30 tokens/s, Drafted throughput: 2.00 tokens/s, "
        "Accepted: 13 tokens, Drafted: 20 tokens, Per-position acceptance rate: 0.800, 0.500, Avg Draft acceptance rate: 65.0%"
    )
    assert len(log.lines()) == 1  # nothing was drafted since
    counts = read_counts(text)
    assert counts == DraftCounts(20, 40, 13, [8, 5])
    assert counts.since(DraftCounts(10, 20, 0, [0, 0])).result() == {
        "spec_decode_acceptance_rate": 65.0, "spec_decode_acceptance_length": 2.3, "spec_decode_num_drafts": 10, "spec_decode_draft_tokens": 20,
        "spec_decode_accepted_tokens": 13, "spec_decode_per_position_acceptance_rates": [0.8, 0.5],
    }  # fmt: skip
    assert read_counts(Metrics("m").render().decode()) is None


def test_teams_are_engines_and_the_log_line_has_the_fullest_ones_usage() -> None:
    metrics = Metrics("m")
    log = StatsLog(metrics)
    teams = [SchedulerStats(kv_usage=1.0, waiting=12, waiting_for="pages"), SchedulerStats(running=1)]
    metrics.on_stats(msgspec.structs.replace(_together("", teams), teams=teams))
    assert "Running: 1 reqs, Waiting: 12 reqs (for pages), GPU KV cache usage: 100.0%" in log.lines()[0]
    text = metrics.render().decode()
    for engine, usage in enumerate((1.0, 0.0)):
        assert f'vllm:kv_cache_usage_perc{{engine="{engine}",model_name="m"}} {usage}' in text
        assert f'pagerunner:device_idle_ratio{{engine="{engine}",model_name="m"}} 1.0' in text


def test_a_dead_engine_holds_nothing_and_is_not_in_the_log() -> None:
    metrics = Metrics("m").of_engine(1)
    log = StatsLog(metrics)
    group = GroupUsage(name="full", usage=0.5, pages_in_use=3, pages_cached=2, evictions=7)
    metrics.on_stats(
        SchedulerStats(running=3, waiting=2, waiting_for="slot", kv_usage=0.5, steps_total=9, groups=[group])
    )
    assert log.lines()
    metrics.on_death()
    assert log.lines() == []
    text = metrics.render().decode()
    for name, value in (
        ('vllm:num_requests_running{engine="1",model_name="m"}', 0),
        ('vllm:num_requests_waiting{engine="1",model_name="m"}', 0),
        ('vllm:kv_cache_usage_perc{engine="1",model_name="m"}', 0),
        ('pagerunner:num_requests_waiting_by_reason{engine="1",model_name="m",reason="slot"}', 0),
        ('vllm:engine_sleep_state{engine="1",model_name="m",sleep_state="awake"}', 0),
        ('pagerunner:group_pages_in_use{engine="1",group="full",model_name="m"}', 0),
        ('pagerunner:group_evictions_total{engine="1",group="full",model_name="m"}', 7),
        ('pagerunner:steps_total{engine="1",model_name="m"}', 9),
        ('pagerunner:engine_up{engine="1",model_name="m"}', 0),
    ):
        assert f"{name} {float(value)}\n" in text, name


def test_a_refusal_is_one_line_in_the_log(
    server: RunningServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = SparingLog(app.logger, most=20, seconds=600)
    monkeypatch.setattr(app, "_refusals", log)
    with caplog.at_level("WARNING", logger="pagerunner.server.app"):
        server.post("/v1/completions", {"prompt": "a", "no\x1b[31m\nsuch": 1})
        server.post("/v1/completions", {"prompt": [5] * 3000, "max_tokens": 4})
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2 and all(message.isprintable() for message in messages)
    assert all(message.startswith("POST /v1/completions is refused with status 400: ") for message in messages)
    caplog.clear()
    with caplog.at_level("WARNING", logger="pagerunner.server.app"):
        for _ in range(25):  # a client that sends bad requests can't fill the disk
            assert server.post("/v1/completions", {"prompt": "a", "nope": 1}).status_code == 400
        log._begin -= 600
        server.post("/v1/completions", {"prompt": "a", "nope": 1})
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 19 and lines[-1].endswith("(7 lines of this kind were left out before.)")


def test_equal_times_between_tokens_count_as_if_each_came_alone() -> None:
    several, single = Metrics("m"), Metrics("m")
    for seconds, count in ((0.25, 3), (0.075, 1), (4096.0, 2), (0.0, 1)):
        several.on_inter_token(seconds, count)
        for _ in range(count):
            single.on_inter_token(seconds)
    name = "vllm:inter_token_latency_seconds"
    found, expected = (
        [
            (sample.name, sample.labels, sample.value)
            for one in text_string_to_metric_families(metrics.render().decode())
            for sample in one.samples
            if sample.name.startswith(name) and not sample.name.endswith("_created")
        ]
        for metrics in (several, single)
    )
    assert found == expected and (f"{name}_count", {"model_name": "m", "engine": "0"}, 7.0) in found
