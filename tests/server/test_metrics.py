"""/metrics is Prometheus text under vLLM's names, and its figures are right."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from helpers.serving import MODEL, RunningServer
from pagerunner.engine.messages import EngineStats
from pagerunner.engine.observer import FinishedSequence
from pagerunner.sched.scheduler import GroupUsage
from pagerunner.server.metrics import Metrics

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
    metrics.on_stats(EngineStats(groups=[group("full", 1), group("window-128", 2)], kv_fragmentation=0.25))
    metrics.on_stats(
        EngineStats(groups=[group("full", 3), group("window-128", 1)], kv_fragmentation=0.5, kv_waste=0.02)
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
    metrics.on_stats(EngineStats(running=2, waiting=1, kv_cache_usage=0.5, preemptions=3, prefix_hits=16))
    metrics.on_stats(EngineStats(running=1, waiting=0, kv_cache_usage=0.25, preemptions=4, prefix_hits=32))
    metrics.on_finished(FinishedSequence("stop", 10, 20, 1.5))
    text = metrics.render().decode()
    assert 'vllm:num_requests_running{engine="0",model_name="m"} 1.0' in text
    assert 'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25' in text
    assert 'vllm:num_preemptions_total{engine="0",model_name="m"} 4.0' in text
    assert 'vllm:prefix_cache_hits_total{engine="0",model_name="m"} 32.0' in text
    assert 'vllm:request_generation_tokens_sum{engine="0",model_name="m"} 20.0' in text
