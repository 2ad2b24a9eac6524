"""/metrics is Prometheus text under vLLM's names, and its figures are right."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from helpers.serving import MODEL, RunningServer
from pagerunner.engine.messages import EngineStats
from pagerunner.engine.observer import FinishedSequence
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
