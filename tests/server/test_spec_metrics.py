"""What a server tells of drafts: in answers, in streams, in /metrics and in what `bench serve` reports."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.patience import LONG
from helpers.serving import RunningServer, running_server
from pagerunner.bench.drafts import read_counts
from pagerunner.cli.main import main
from pagerunner.config import EngineArgs
from pagerunner.demo import demo_path
from pagerunner.engine.core.client import DEFAULT_FACTORY

pytestmark = pytest.mark.usefixtures("forked")
DEMO = EngineArgs(
    model=str(demo_path()), num_gpu_blocks_override=256, max_num_seqs=8, device="cpu", per_request_spec_decode_metrics="detailed",
    speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "num_speculative_tokens_per_batch_size": [[1, 8, 3]]},
)  # fmt: skip
BODY = {"prompt": [5, 6, 7, 8] * 6, "max_tokens": 30, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(DEMO, core_factory=DEFAULT_FACTORY) as found:
        yield found


def check(metrics: dict[str, Any]) -> None:
    """The figures agree, as clients of vLLM expect them to."""
    histogram, accepted, drafted = (
        metrics[name] for name in ("acceptance_histogram", "per_step_accepted", "per_step_drafted")
    )
    assert metrics["num_spec_steps"] == sum(histogram) == len(accepted) == len(drafted) > 0 and len(histogram) == 4
    assert (
        metrics["num_accepted_draft_tokens"] == sum(accepted) == sum(at * count for at, count in enumerate(histogram))
    )
    assert metrics["num_draft_tokens"] == sum(drafted) > 0 and metrics["num_spec_tokens"] == 3
    assert math.isclose(metrics["mean_acceptance_length"], 1 + sum(accepted) / len(accepted))
    assert math.isclose(metrics["draft_acceptance_rate"], sum(accepted) / sum(drafted))
    assert sum(map(sum, metrics["acceptance_histogram_by_draft_length"].values())) == len(accepted)


def test_an_answer_tells_what_became_of_its_drafts(server: RunningServer) -> None:
    def post(path: str, **more: Any) -> httpx.Response:
        return httpx.post(f"{server.url}{path}", json=BODY | more, timeout=LONG).raise_for_status()

    whole = post("/v1/completions").json()
    check(whole["metrics"]["speculative_decoding"])
    streamed = post("/v1/completions", stream=True, stream_options={"include_usage": True}).text
    chunks = [json.loads(line.removeprefix("data: ")) for line in streamed.splitlines() if line.startswith("data: {")]
    assert [chunk for chunk in chunks if chunk.get("metrics")] == [chunks[-1]] and chunks[-1]["usage"]
    assert chunks[-1]["metrics"] == whole["metrics"]
    assert "metrics" not in post("/v1/completions", n=2).json()
    assert "metrics" not in post("/v1/completions", prompt=[[5, 6], [7, 8]]).json()
    chat = {"prompt": None, "messages": [{"role": "user", "content": "Sort these numbers: 1, 1, 1, 1, 1."}]}
    body = {key: value for key, value in (BODY | chat).items() if value is not None}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=LONG).raise_for_status().json()
    check(answer["metrics"]["speculative_decoding"])


def test_metrics_and_bench_count_them(server: RunningServer, tmp_path: Path, capsys: Any) -> None:
    words = ["--num-prompts", "4", "--random-input-len", "20", "--random-output-len", "12", "--ignore-eos", "--quiet"]
    save = ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
    assert main(["bench", "serve", "--base-url", server.url, *words, *save]) == 0
    assert "Acceptance length:" in (printed := capsys.readouterr().out) and "Position 2 accepted (%):" in printed
    result = json.loads((tmp_path / "r.json").read_text())
    counts = read_counts(httpx.get(f"{server.url}/metrics", timeout=LONG).text)
    assert counts is not None and counts.drafts >= result["spec_decode_num_drafts"] > 0
    assert len(counts.per_position) == 3 and sum(counts.per_position) == counts.accepted
    assert 1 <= result["spec_decode_acceptance_length"] <= 4
