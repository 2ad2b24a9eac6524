"""`bench serve`: what it sends, when, and that its figures are those of the server that it loads."""

from __future__ import annotations

import argparse
import json
import math
import re
import xml.dom.minidom
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from helpers.serving import MODEL, RunningServer, running_server
from pagerunner.bench.latency_plot import latency_svg
from pagerunner.bench.serve_data import custom_requests, random_requests, sharegpt_requests
from pagerunner.bench.serving import Sample, Target, arrivals, series, summarize
from pagerunner.cli import bench_serve
from pagerunner.cli.main import main
from pagerunner.config import EngineArgs
from pagerunner.demo import demo_path
from pagerunner.engine.core.client import DEFAULT_FACTORY
from pagerunner.errors import ConfigError
from pagerunner.text.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("forked")

DEMO = EngineArgs(model=str(demo_path()), num_gpu_blocks_override=256, max_num_seqs=8, device="cpu")
LENGTHS = ("--random-input-len", "20", "--random-output-len", "6")


@pytest.fixture(scope="module")
def demo() -> Iterator[RunningServer]:
    with running_server(DEMO, core_factory=DEFAULT_FACTORY) as server:
        yield server


@pytest.fixture(scope="module")
def coder() -> Tokenizer:
    return Tokenizer.from_path(demo_path())


def bench(server: RunningServer, *words: str) -> int:
    return main(["bench", "serve", "--base-url", server.url, "--quiet", *words])


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_sampling_and_lengths_are_asked_for_in_vllms_words(
    demo: RunningServer, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    sent: list[dict[str, Any]] = []

    def measured(namespace: argparse.Namespace, share: Any) -> None:
        sent.extend(json.loads(bytes(one.body)) for one in share.requests)
        raise ConfigError("seen")

    monkeypatch.setattr(bench_serve, "_measured", measured)
    words = (
        "--top-p",
        "0.5",
        "--top-k",
        "3",
        "--min-p",
        "0.1",
        "--repetition-penalty",
        "1.5",
        "--extra-body",
        '{"seed": 4}',
    )
    assert (
        bench(demo, "--num-prompts", "2", "--input-len", "20", "--output-len", "6", "--backend", backend, *words) == 2
    )
    for body in sent:
        assert {"top_p": 0.5, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5, "seed": 4}.items() <= body.items()
        assert 6 in (body.get("max_tokens"), body.get("max_completion_tokens")) and "presence_penalty" not in body
        assert backend != "openai" or len(body["prompt"]) == 20
    assert len(sent) == 2


# -- when


def test_a_rate_is_kept_over_the_run_and_gaps_vary_as_asked() -> None:
    assert arrivals(3, math.inf, 1.0, 0) == [0.0] * 3
    poisson, even = (np.array(arrivals(4000, 50.0, burstiness, 1)) for burstiness in (1.0, 100.0))
    for times in (poisson, even):
        assert times[-1] == pytest.approx(80) and np.all(np.diff(times) >= 0)
    assert np.std(np.diff(poisson)) == pytest.approx(1 / 50, rel=0.1)
    assert np.std(np.diff(even)) == pytest.approx(0.1 / 50, rel=0.1)
    assert arrivals(9, 5.0, 1.0, 2) == arrivals(9, 5.0, 1.0, 2) != arrivals(9, 5.0, 1.0, 3)


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_a_ramp_grows_from_one_rate_to_another(strategy: str) -> None:
    times = np.array(arrivals(6000, math.inf, 50.0, 0, (strategy, 10.0, 1000.0)))
    rates = 1 / np.diff(times)
    assert np.median(rates[:10]) == pytest.approx(10, rel=0.3) and np.median(rates[-50:]) == pytest.approx(
        1000, rel=0.1
    )
    middle = np.median(rates[2900:3100])
    assert middle == pytest.approx(505 if strategy == "linear" else 100, rel=0.15)


# -- what


def test_random_prompts_have_the_lengths_asked_for_and_share_a_prefix(coder: Tokenizer) -> None:
    how: dict[str, Any] = {"input_len": 40, "output_len": 10, "range_ratio": 0.5, "prefix_len": 7, "seed": 3}
    requests = random_requests(coder, 200, as_chat=False, **how)
    lengths = {request.prompt_len for request in requests}
    assert all(len(request.prompt) == request.prompt_len for request in requests)
    assert min(lengths) >= 27 and max(lengths) <= 67 and len(lengths) > 20
    assert {request.output_len for request in requests} == set(range(5, 16))
    assert len({tuple(request.prompt[:7]) for request in requests}) == 1  # type: ignore[arg-type]
    assert not {token for request in requests for token in request.prompt} & coder.special_ids  # type: ignore[arg-type]
    assert requests == random_requests(coder, 200, as_chat=False, **how)
    [message] = random_requests(coder, 1, as_chat=True, **how)[0].prompt
    assert message["role"] == "user" and message["content"]  # type: ignore[index]


def test_sharegpt_takes_first_turns_of_a_usable_length(coder: Tokenizer, tmp_path: Path) -> None:
    def talk(*values: str) -> dict[str, Any]:
        return {"conversations": [{"from": "human", "value": value} for value in values]}

    good = [talk(f"What is {n} + {n}? Tell me.", "It is quite a large number.", "more") for n in range(5)]
    file = tmp_path / "talks.json"
    file.write_text(json.dumps([talk("alone"), talk("a", "b"), talk("word " * 3000, "It is a number."), *good]))
    requests = sharegpt_requests(coder, str(file), 5, output_len=None, as_chat=False, seed=0)
    assert sorted(str(one.prompt) for one in requests) == [f"What is {n} + {n}? Tell me." for n in range(5)]
    assert requests[0].output_len == len(coder.encode("It is quite a large number."))
    assert len(sharegpt_requests(coder, str(file), 12, output_len=9, as_chat=True, seed=0)) == 12
    file.write_text('[{"conversations": [{"from": "human"}, {"value": 5}]}]')
    for text, why in (
        ("[]", "no request"),
        (file.read_text(), "no request"),
        ("[1]", r"can't be read: .* at `\$\[0\]`"),
        ("{}", "can't be read"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=why):
            sharegpt_requests(coder, str(file), 1, output_len=None, as_chat=False, seed=0)


def test_custom_prompts_are_lines_of_json(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "a", "output_tokens": 3}\n\n{"prompt": "b"}\n')
    requests = custom_requests(str(file), 3, output_len=8, as_chat=False)
    assert [(one.prompt, one.output_len) for one in requests] == [("a", 3), ("b", 8), ("a", 3)]
    assert custom_requests(str(file), 1, output_len=8, as_chat=True)[0].prompt == [{"role": "user", "content": "a"}]
    file.write_text('{"prompt": [{"role": "user", "content": "a"}]}\n')
    with pytest.raises(ConfigError, match="openai-chat"):
        custom_requests(str(file), 1, output_len=8, as_chat=False)
    file.write_text('{"prompt": 5}\n')
    for as_chat in (False, True):
        with pytest.raises(ConfigError, match="line 1: a prompt is a text or chat messages, got 5"):
            custom_requests(str(file), 1, output_len=8, as_chat=as_chat)
    file.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(ConfigError, match="line 2"):
        custom_requests(str(file), 2, output_len=8, as_chat=False)
    with pytest.raises(ConfigError, match="can't be read"):
        custom_requests(str(tmp_path / "none"), 2, output_len=8, as_chat=False)


# -- figures


def samples() -> list[Sample]:
    return [
        Sample(prompt_len=10, output_len=3, start=0.0, ttft=0.1, itl=[0.1, 0.3], latency=0.5),
        Sample(prompt_len=20, output_len=1, start=0.2, ttft=0.2, itl=[], latency=0.2),
        Sample(prompt_len=99, start=0.3, error="HTTP 500"),
    ]


def test_figures_are_what_the_samples_say() -> None:
    result = summarize(
        samples(),
        2.0,
        metrics=["ttft", "tpot", "itl", "e2el"],
        percentiles=[50, 99.9],
        goodput={"ttft": 150, "e2el": 600},
    )
    assert (result["completed"], result["failed"], result["total_input_tokens"], result["total_output_tokens"]) == (
        2,
        1,
        30,
        4,
    )
    assert (result["request_throughput"], result["output_throughput"], result["total_token_throughput"]) == (1, 2, 17)
    assert result["request_goodput"] == 0.5
    assert result["mean_ttft_ms"] == pytest.approx(150) and result["std_ttft_ms"] == pytest.approx(50)
    assert result["mean_tpot_ms"] == pytest.approx(200), "a single token has no time per token"
    assert result["median_itl_ms"] == result["p50_itl_ms"] == pytest.approx(200)
    assert result["p99.9_e2el_ms"] == pytest.approx(499.7)
    assert result["max_concurrent_requests"] == 2 and result["max_output_tokens_per_s"] == 4
    assert result["errors"] == ["", "", "HTTP 500"]


def test_nothing_answered_is_all_zeros() -> None:
    result = summarize([Sample(prompt_len=1, error="no")], 1.0, metrics=["ttft", "itl"], percentiles=[99], goodput={})
    assert result["completed"] == result["p99_itl_ms"] == result["max_concurrent_requests"] == 0
    assert result["request_goodput"] is None


def test_the_drawing_is_svg_and_rises_from_the_least_to_the_largest_value() -> None:
    values = [0.001 * 1.01**n for n in range(1000)]
    drawn = latency_svg("a <b>", {"First": values, "Same": [0.5] * 3, "None": []})
    root = xml.dom.minidom.parseString(drawn).documentElement
    assert root is not None
    curves = [line.getAttribute("points") for line in root.getElementsByTagName("polyline")]
    assert len(curves) == 2
    points = [tuple(map(float, point.split(","))) for point in curves[0].split()]
    assert points[0][0] == 56 and points[-1] == (416, 88)
    assert all(a[0] <= b[0] and a[1] >= b[1] for a, b in zip(points, points[1:], strict=False))
    assert "p50 144." in drawn and "a &lt;b&gt;" in drawn


# -- against servers


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_figures_are_those_of_the_server(demo: RunningServer, backend: str, tmp_path: Path, capsys: Any) -> None:
    demo.wait_idle()
    names = ("prompt_tokens_total", "generation_tokens_total", "request_success_total")
    before = [demo.metric(name, **({"finished_reason": "length"} if "success" in name else {})) for name in names]
    words = ["--backend", backend, "--num-prompts", "12", "--max-concurrency", "4", "--ignore-eos", *LENGTHS]
    words += ["--goodput", "e2el:60000", "--percentile-metrics", "ttft,e2el", "--metric-percentiles", "50,99"]
    words += ["--save-detailed", "--result-dir", str(tmp_path), "--plot", str(tmp_path / "latency.svg")]
    assert bench(demo, *words) == 0
    demo.wait_idle()
    after = [demo.metric(name, **({"finished_reason": "length"} if "success" in name else {})) for name in names]
    [file] = tmp_path.glob("*.json")
    assert re.fullmatch(rf"{backend}-infqps-concurrency4-{MODEL}-\d{{8}}-\d{{6}}\.json", file.name)
    result = json.loads(file.read_text())
    change = [new - old for new, old in zip(after, before, strict=True)]
    assert change == [result["total_input_tokens"], result["total_output_tokens"], result["completed"]]
    assert change[1:] == [72, 12] and (backend == "openai-chat" or change[0] == 240)
    assert (result["model_id"], result["request_rate"], result["failed"]) == (MODEL, "inf", 0)
    assert 0 < result["median_ttft_ms"] <= result["median_e2el_ms"] <= result["p99_e2el_ms"]
    assert "p99_itl_ms" not in result and result["request_goodput"] == result["request_throughput"]
    assert result["max_concurrent_requests"] <= 4
    assert len(result["generated_texts"]) == len(result["itls"]) == 12
    assert (tmp_path / "latency.svg").read_text().count("<polyline") == 4
    printed = capsys.readouterr().out
    assert re.search(r"Successful requests: +12 ", printed) and re.search(r"P99 E2EL \(ms\): +\d", printed)


def test_several_clients_send_what_one_sends(demo: RunningServer, tmp_path: Path, capsys: Any) -> None:
    words = ["--num-prompts", "9", *LENGTHS, "--random-range-ratio", "0.5", "--ignore-eos", "--save-detailed"]
    for clients in ("1", "3"):
        file = ["--result-dir", str(tmp_path), "--result-filename", clients, "--num-clients", clients]
        assert bench(demo, *words, *file, *["--ceilings"] * (clients == "3")) == 0
    one, three = (json.loads((tmp_path / clients).read_text()) for clients in ("1", "3"))
    assert one["input_lens"] == three["input_lens"] and one["output_lens"] == three["output_lens"]
    assert one["generated_texts"] == three["generated_texts"] and three["num_clients"] == 3
    assert three["failed"] == three["retried"] == 0 and three["client_ceiling"] > three["request_throughput"] > 0
    printed = capsys.readouterr().out
    assert re.search(r"Load generator's ceiling \(req/s\): +\d", printed) and re.search(r"busy \(%\): +\d", printed)


def test_requests_go_at_their_rate(demo: RunningServer, tmp_path: Path) -> None:
    words = ["--num-prompts", "10", "--request-rate", "20", *LENGTHS, "--save-detailed", "--result-filename", "r.json"]
    assert bench(demo, *words, "--result-dir", str(tmp_path), "--num-warmups", "1") == 0
    starts = json.loads((tmp_path / "r.json").read_text())["start_times"]
    assert starts[-1] == pytest.approx(0.5, abs=0.25) and starts == sorted(starts)


def test_failures_are_counted_and_all_of_them_are_an_error(demo: RunningServer, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "12 + 30 =", "output_tokens": 4}\n{"prompt": ""}\n')
    words = ["--dataset-name", "custom", "--dataset-path", str(file)]
    assert main(["bench", "serve", "--base-url", demo.url, *words, "--num-prompts", "6"]) == 0
    printed, said = capsys.readouterr()
    assert "3 of 6 requests failed: HTTP 400" in said
    assert re.search(r"Successful requests: +3 ", printed) and re.search(r"Failed requests: +3 ", printed)
    assert bench(demo, *words, "--num-prompts", "6", "--extra-body", '{"nope": 1}') == 2
    out, err = capsys.readouterr()
    assert "No request was answered; the first failed with: HTTP 400" in err and not out, "no table of zeros"
    assert bench(demo, *words, "--num-prompts", "6", "--num-clients", "2", "--first-byte-timeout", "1e-6") == 2
    said = "the first failed with: The server has not begun to answer within 1e-06 seconds (--first-byte-timeout)"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--backend", "magic"], "--backend must be one of openai, vllm, openai-chat, got 'magic'."),
        (["--dataset-name", "magic"], "--dataset-name must be one of random, sharegpt, custom, got 'magic'."),
        (["--dataset-name", "sharegpt"], "needs --dataset-path"),
        (["--model", "other"], "serves tiny, not other; say so with --served-model-name"),
        (["--request-rate", "0"], "--request-rate and --burstiness must be above 0."),
        (["--ramp-up-strategy", "linear"], "--ramp-up-start-rps and --ramp-up-end-rps"),
        (["--ramp-up-end-rps", "4"], "need --ramp-up-strategy"),
        (["--goodput", "itl:5"], "--goodput: there are ttft, tpot, e2el, not 'itl'."),
        (["--goodput", "ttft"], "--goodput like ttft:200"),
        (["--percentile-metrics", "ttft,x"], "--percentile-metrics: there are ttft, tpot, itl, e2el, not 'x'."),
        (["--metric-percentiles", "101"], "lie in [0, 100]"),
        (["--extra-body", "[1]"], "is not a JSON object"),
        (["--request-timeout", "0"], "must be more than 0 and less than 1e9 seconds, got 0"),
        (["--first-byte-timeout", "inf"], "must be more than 0 and less than 1e9 seconds, got inf"),
        (["--random-range-ratio", "1"], "--random-range-ratio must be in [0, 1), got 1.0."),
        (["--num-prompts", "3", "--num-clients", "4"], "--num-clients 4 needs at least 4 requests, got 3"),
        (["--plot", "/dev/null/a.svg"], "The result can't be written to /dev/null: Not a directory."),
        (["--save-result", "--result-dir", "/dev/null/a"], "can't be written to /dev/null/a: Not a directory."),
        (["--backend", "x", "--save-result", "--result-dir", "/dev/null/a"], "--backend must be"),
        (["--request-ratee", "4"], "did you mean --request-rate?"),
    ],
)
def test_mistakes_are_one_sentence(demo: RunningServer, words: list[str], sentence: str, capsys: Any) -> None:
    """Told before anything is measured."""
    assert bench(demo, *words) == 2
    told, printed = capsys.readouterr()
    assert sentence in printed and printed.count("\n") == 1 and not told


def test_the_tokenizer_of_an_adapter_is_its_models(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [{"id": "m", "root": "/m", "parent": None}, {"id": "sql", "root": "/a/sql", "parent": "org/m"}]
    answer = httpx.Response(200, json={"data": cards}, request=httpx.Request("GET", "http://s"))
    monkeypatch.setattr(httpx, "get", lambda *_, **__: answer)
    for asked, found in (("sql", ("sql", "/m")), ("m", ("m", "/m")), (None, ("m", "/m"))):
        namespace = argparse.Namespace(served_model_name=None, model=asked, lora_modules=["sql"])
        assert bench_serve._find_model(namespace, "http://s", {}) == found
    namespace.lora_modules = ["sql", "law"]
    with pytest.raises(ConfigError, match="--lora-modules: the server serves m, sql, not law"):
        bench_serve._find_model(namespace, "http://s", {})


def test_each_request_takes_one_of_the_adapters() -> None:
    """As with vLLM's flag: at random, by the seed. Without the flag all go to the model."""
    target = Target(url="u", model="m", chat=False, extra={})

    def models(names: list[str], seed: int = 0) -> list[str]:
        namespace = argparse.Namespace(lora_modules=names, seed=seed)
        return [one.model for one in bench_serve._targets(namespace, target, 40)]

    assert models([]) == ["m"] * 40
    one = models(["a", "b"])
    assert set(one) == {"a", "b"} and one == models(["a", "b"]) and one != models(["a", "b"], seed=1)


def test_a_server_that_is_not_there(capsys: Any) -> None:
    assert main(["bench", "serve", "--port", "9", "--quiet"]) == 2
    assert "No model server answers at http://127.0.0.1:9/v1/models" in capsys.readouterr().err
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9/v1/", "--quiet"]) == 2
    assert "No model server answers at http://127.0.0.1:9/v1/models" in capsys.readouterr().err
    assert main(["bench", "serve", "--port", "70000"]) == 2
    assert "--port: must be in [0, 65535], got 70000" in capsys.readouterr().err


def test_series_of_gaps_are_of_all_requests() -> None:
    assert series(samples(), "itl") == [0.1, 0.3]
