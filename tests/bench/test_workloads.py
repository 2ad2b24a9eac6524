"""The workloads are the published ones, and a benchmark reports medians of complete runs only."""

from __future__ import annotations

import json

import pytest

from pagerunner.bench.runner import Draws, latency, throughput
from pagerunner.bench.shapes import SHAPES
from pagerunner.bench.workloads import WORKLOADS, BenchRequest, uniform_workload, workload, write_model
from pagerunner.config import EngineArgs
from pagerunner.engine.startup.resolve import resolve
from pagerunner.errors import ConfigError, PagerunnerError
from pagerunner.models.configs.reader import read_model_config
from pagerunner.sched.stats import SchedulerStats, SpecCounts
from pagerunner.types import CompletionOutput, RequestOutput

# First ids, prompt tokens, output tokens and last ids, from the program that the peers' figures were measured with.
PUBLISHED = {
    ("W1", 4096, 0): ([3484, 2057, 3043], 128, 128, [2259, 3111, 1125]),
    ("W2", 4096, 0): ([3484, 2057, 3043], 5180, 2407, [1933, 3196, 3939]),
    ("W3", 32000, 1): ([26404, 30727, 2221], 16896, 512, [9293, 17480, 31522]),
    ("mixed256", 151936, 0): ([6311, 6890, 663], 148779, 140084, [194, 7201, 277]),
    ("decode1", 151936, 0): ([2201, 9325, 1033], 128, 512, [25, 8822, 8849]),
    ("prefill8k", 151936, 0): ([3867, 4969, 1690], 65536, 8, [8900, 3724, 842]),
    ("prefix2k", 151936, 0): ([926, 1500, 1390], 532480, 16384, [2320, 4389, 3582]),
    ("decode64", 151936, 0): ([4185, 5874, 8684], 8192, 16384, [2973, 9571, 1217]),
}


class Instant:
    """A generator that returns as many tokens as asked for, `short` fewer for the last prompt."""

    def __init__(self, short=0):
        self.short = short
        self.prompts = []
        self.drafts = SpecCounts.of(2)

    def stats(self):
        return SchedulerStats(spec=SpecCounts(list(self.drafts.accepted), self.drafts.num_draft_tokens))

    def generate(self, prompts, sampling_params=None, use_tqdm=True):
        self.prompts.append(prompts)
        self.drafts.add(2, 1)
        missing = [0] * (len(prompts) - 1) + [self.short]
        return [
            RequestOutput(
                request_id="0",
                prompt=None,
                prompt_token_ids=prompt["prompt_token_ids"],
                outputs=[CompletionOutput(index=0, text="", token_ids=[5] * (params.max_tokens - less))],
                finished=True,
                num_cached_tokens=3,
            )
            for prompt, params, less in zip(prompts, sampling_params, missing, strict=True)
        ]


@pytest.mark.parametrize("key", PUBLISHED)
def test_workloads_are_the_published_ones(key):
    requests = workload(*key)
    prompts = [request.prompt_token_ids for request in requests]
    outputs = sum(request.output_len for request in requests)
    assert (prompts[0][:3], sum(map(len, prompts)), outputs, prompts[-1][-3:]) == PUBLISHED[key]


@pytest.mark.parametrize("name", WORKLOADS)
def test_repetitions_differ_in_ids_and_not_in_lengths(name):
    first, second = workload(name, 12000, 0), workload(name, 12000, 1)
    sizes = [[(len(r.prompt_token_ids), r.output_len) for r in requests] for requests in (first, second)]
    assert sizes[0] == sizes[1]
    assert first != second
    assert not {tuple(r.prompt_token_ids) for r in first} & {tuple(r.prompt_token_ids) for r in second}
    assert first == workload(name, 12000, 0)


def test_shapes_of_the_workloads():
    assert [(len(r.prompt_token_ids), r.output_len) for r in workload("W1", 4096)] == [(128, 128)]
    mixed = workload("W2", 32000)
    assert len(mixed) == 32
    assert all(16 <= len(r.prompt_token_ids) <= 256 and 32 <= r.output_len <= 128 for r in mixed)
    shared = workload("W3", 32000)
    assert len({tuple(r.prompt_token_ids[:512]) for r in shared}) == 1
    assert len({tuple(r.prompt_token_ids) for r in shared}) == 32


def test_ids_stay_in_the_vocabulary():
    for request in [*workload("W2", 4096), *uniform_workload(3, 50, 1, 301)]:
        assert all(300 <= token for token in request.prompt_token_ids)
    assert set(uniform_workload(1, 50, 1, 301)[0].prompt_token_ids) == {300}


def test_a_tiny_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="the vocabulary has only 300"):
        workload("W1", 300)
    with pytest.raises(ConfigError, match="mixed256 draws token ids up to 10000; the vocabulary has only 4096"):
        workload("mixed256", 4096)


def test_model_files_name_the_shape(tmp_path):
    config = json.loads((write_model("tiny", tmp_path / "m") / "config.json").read_text())
    assert config["model_type"] == "qwen3" and config["tie_word_embeddings"]
    assert all(config[name] == value for name, value in SHAPES["tiny"].items())
    for shape, hidden, tied in (("qwen3-0.6b", 1024, True), ("qwen3-8b", 4096, False)):
        config = json.loads((write_model(shape, tmp_path / shape) / "config.json").read_text())
        assert (config["hidden_size"], config["tie_word_embeddings"], config["vocab_size"]) == (hidden, tied, 151936)
        assert (config["max_position_embeddings"], config["torch_dtype"]) == (40960, "bfloat16")
    with pytest.raises(ConfigError, match="unknown shape"):
        write_model("huge", tmp_path)


def test_shapes_of_published_models_run_in_bfloat16(tmp_path):
    """A config.json that names no dtype is read as float32, in which the largest of them takes minutes to start."""
    for shape in set(SHAPES) - {"tiny", "small"}:
        assert read_model_config(write_model(shape, tmp_path / shape)).dtype == "bfloat16", shape


def test_throughput_uses_fresh_prompts_each_round_and_reports_the_last():
    llm = Instant()
    report = throughput(llm, lambda salt: workload("W1", 4096, salt), label="x", repetitions=3, warmups=1)
    assert len(llm.prompts) == 4 and len({str(prompts) for prompts in llm.prompts}) == 4
    assert (len(report.seconds), report.prompt_tokens, report.output_tokens, report.cached_tokens) == (3, 128, 128, 3)
    assert (report.elapsed, report.best) == (sorted(report.seconds)[1], min(report.seconds))
    measured = [prompts[0]["prompt_token_ids"] for prompts in llm.prompts[1:]]
    assert measured == [workload("W1", 4096, salt)[0].prompt_token_ids for salt in range(3)]
    assert report.output_tokens_per_second == pytest.approx(128 / report.elapsed)
    assert report.drafts == SpecCounts([0, 3, 0], 6), "those of the warm-up don't count"
    assert "Mean acceptance length: 2.00, Per-position acceptance rate: 1.000, 0.000, Avg Draft" in report.text()


def test_tokens_are_drawn_as_asked():
    class Asked(Instant):
        def generate(self, prompts, sampling_params=None, use_tqdm=True):
            asked.append(sampling_params[0])
            return super().generate(prompts, sampling_params, use_tqdm)

    asked = []
    for draws in (Draws(), Draws(0.7, 0.95, 20)):
        throughput(Asked(), lambda salt: workload("W1", 4096), label="x", repetitions=1, warmups=0, draws=draws)
    assert [(one.temperature, one.top_p, one.top_k, one.ignore_eos) for one in asked] == [
        (0.0, 1.0, 0, True),
        (0.7, 0.95, 20, True),
    ]
    assert [Draws().text(), Draws(0.7, 0.95, 20).text()] == ["greedy", "temperature 0.7, top-p 0.95, top-k 20"]


def test_a_run_that_stopped_early_gives_no_rate():
    with pytest.raises(PagerunnerError, match="127 of 128 tokens"):
        throughput(Instant(short=1), lambda salt: workload("W1", 4096), label="x", repetitions=1, warmups=0)


def test_a_request_that_failed_says_why_there_is_no_rate():
    class Failing(Instant):
        def generate(self, *asked, **given):
            outputs = super().generate(*asked, **given)
            outputs[-1].error = "Logits overflowed."
            return outputs

    with pytest.raises(PagerunnerError, match=r"has 127 of 128 tokens \(Logits overflowed\.\); no rate"):
        throughput(Failing(short=1), lambda salt: workload("W1", 4096), label="x", repetitions=1, warmups=0)


def test_latency_reports_percentiles_in_order():
    report = latency(Instant(), lambda salt: [BenchRequest([1, 2], 3)] * 2, label="x", repetitions=5, warmups=1)
    values = list(report.percentiles.values())
    assert values == sorted(values) and len(report.seconds) == 5
    assert (report.batch_size, report.input_len, report.output_len) == (2, 2, 3)
    assert report.drafts == SpecCounts([0, 5, 0], 10) and "Mean acceptance length: 2.00" in report.text()
    assert min(report.seconds) <= report.percentiles[50] <= max(report.seconds)


@pytest.mark.parametrize(
    ("shape", "quantization", "gigabytes"),
    [
        ("qwen3-8b", None, 16.38),
        ("qwen3-8b", "fp8", 9.44),
        ("qwen3-8b", "compressed-tensors", 6.09),
        ("gpt-oss-20b", "mxfp4", 13.76),
        ("qwen3-30b-a3b", "fp8", 31.23),
        ("deepseek-v2-lite", None, 31.41),
    ],
)
def test_random_weights_of_a_shape_take_what_a_checkpoint_in_that_format_takes(
    tmp_path, monkeypatch, shape, quantization, gigabytes
):
    monkeypatch.setattr("pagerunner.engine.startup.resolve.resolve_device", lambda asked: asked)
    path = write_model(shape, tmp_path / "m", quantization)
    args = EngineArgs(
        model=str(path), device="cuda", quantization=quantization, load_format="dummy", max_model_len=1024
    )
    plan = resolve(args, 80 * 2**30, plan_only=True).plan
    assert plan.other[0][1] / 1e9 == pytest.approx(gigabytes, rel=0.01)
