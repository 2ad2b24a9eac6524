"""`run-batch`: every line gets its answer once, whatever interrupts the run."""

from __future__ import annotations

import codecs
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import pagerunner
from helpers.adapters import random_adapter
from helpers.effort import effort
from helpers.patience import LONG
from helpers.serving import MODEL, RunningServer, running_server
from pagerunner.cli.main import main
from pagerunner.config import EngineArgs
from pagerunner.demo import demo_path
from pagerunner.engine.core.client import DEFAULT_FACTORY

pytestmark = [pytest.mark.days(2), pytest.mark.usefixtures("forked")]  # each starts a server's process

DEMO = EngineArgs(model=str(demo_path()), num_gpu_blocks_override=256, max_num_seqs=8, device="cpu")


@pytest.fixture(scope="module")
def demo() -> Iterator[RunningServer]:
    with running_server(DEMO, core_factory=DEFAULT_FACTORY) as server:
        yield server


def sum_line(number: int, model: str = MODEL, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"{number} + 30"}]
    body = {"model": model, "messages": messages, "max_tokens": 20, "temperature": 0, **body}
    return {"custom_id": f"sum-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")
    return path


def read(path: Path) -> dict[str, dict[str, Any]]:
    answers = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len({answer["custom_id"] for answer in answers}) == len(answers), "answered twice"
    return {answer["custom_id"]: answer for answer in answers}


def batch(source: Path, target: Path, *words: str) -> int:
    return main(["run-batch", "-i", str(source), "-o", str(target), *words])


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["response"]["body"]["choices"][0]["message"]["content"])


def test_every_line_is_answered_and_errors_are_of_their_line(demo: RunningServer, tmp_path: Path, capsys: Any) -> None:
    completion = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True}
    source = write(
        tmp_path / "in.jsonl",
        *(sum_line(number) for number in range(10, 30)),
        "",
        {"custom_id": "text", "method": "POST", "url": "/v1/completions", "body": completion},
        {"custom_id": "field", "method": "POST", "url": "/v1/completions", "body": {**completion, "nope": 1}},
        {"custom_id": "model", "method": "POST", "url": "/v1/completions", "body": {**completion, "model": "gpt"}},
        {"custom_id": "stream", "method": "POST", "url": "/v1/completions", "body": {**completion, "stream": True}},
        {"custom_id": "path", "method": "POST", "url": "/sleep", "body": {}},
        {"custom_id": "dots", "method": "POST", "url": "/v1/../sleep", "body": {}},
        {"custom_id": "query", "method": "POST", "url": "/v1/completions?a=1", "body": completion},
        {"custom_id": "host", "method": "POST", "url": "http://127.0.0.1:1/v1/completions", "body": completion},
        {"custom_id": "method", "method": "GET", "url": "/v1/models", "body": {}},
        "not JSON",
        {"custom_id": "line-31", "method": "POST", "url": "/v1/completions", "body": completion},
        {"custom_id": "no method", "method": 3},
        {"custom_id": "no body", "method": "POST", "url": "/v1/completions"},
        {"custom_id": "response", "method": "POST", "url": "/v1/responses", "body": {"model": MODEL, "input": "1 + 1"}},
    )
    source.write_bytes(codecs.BOM_UTF8 + source.read_bytes())
    target = tmp_path / "out.jsonl"
    assert batch(source, target, "--base-url", demo.url) == 0
    answers = read(target)
    assert len(answers) == 34 and demo.get("/is_sleeping").json() == {"is_sleeping": False}
    for number in range(10, 30):
        answer = answers[f"sum-{number}"]
        assert text_of(answer) == f"{number} + 30 = {number + 30}"
        assert answer["error"] is None and answer["response"]["status_code"] == 200
        assert answer["id"].startswith("batch_req_") and answer["response"]["request_id"].startswith("chatcmpl-")
    assert answers["text"]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert answers["field"]["response"]["status_code"] == 400 and "nope" in answers["field"]["error"]["message"]
    assert answers["model"]["response"]["status_code"] == 404
    assert answers["line-31"]["response"]["body"]["usage"]["completion_tokens"] == 3
    for name, words in (
        ("path", "not POST /sleep"),
        ("dots", "only POST to one of /v1/chat/completions"),
        ("query", "not POST /v1/completions?"),
        ("host", "not POST http"),
        ("method", "not GET"),
        ("line-31'", "malformed"),
        ("stream", "streamed"),
        ("no method", "method"),
        ("no body", "the line has no body"),
    ):
        assert answers[name]["response"] is None and words in answers[name]["error"]["message"]
    assert answers["response"]["error"] is None and answers["response"]["response"]["status_code"] == 200
    assert "34 of 34 requests have been answered, 0 were there before; 11 of all are errors." in capsys.readouterr().err


def test_a_run_goes_on_after_what_is_there(demo: RunningServer, tmp_path: Path, capsys: Any) -> None:
    source = write(tmp_path / "in.jsonl", *(sum_line(number) for number in range(10, 20)))
    target = tmp_path / "out.jsonl"
    assert batch(source, target, "--base-url", f"{demo.url}/v1", "--quiet") == 0
    lines = target.read_text().splitlines(keepends=True)
    target.write_text("".join(lines[:4]) + lines[4][:50])  # cut off in the middle of a line
    assert batch(source, target, "--base-url", demo.url) == 0
    assert "6 of 6 requests have been answered, 4 were there before; 0" in capsys.readouterr().err
    assert set(read(target)) == {f"sum-{number}" for number in range(10, 20)}
    assert target.read_text().startswith("".join(lines[:4]))
    assert batch(source, target) == 0, "nothing to do: no model is loaded, no server asked"


@pytest.mark.parametrize("text", ['{"model_type": "qwen3"}', "precious", '{"custom_id": "a", "error": null}'])
def test_a_file_of_something_else_is_left_as_it_is(tmp_path: Path, capsys: Any, text: str) -> None:
    source, target = write(tmp_path / "in.jsonl", sum_line(10)), tmp_path / "config.json"
    target.write_text(text)
    assert batch(source, target, "--base-url", "http://127.0.0.1:1") == 2
    assert f"{target}, line 1, is no answer" in capsys.readouterr().err and target.read_text() == text


def test_requests_are_no_answers(tmp_path: Path, capsys: Any) -> None:
    """With a copy of the input as output every request would pass for answered."""
    source, target = write(tmp_path / "in.jsonl", sum_line(10)), write(tmp_path / "copy.jsonl", sum_line(10))
    assert batch(source, target, "--base-url", "http://127.0.0.1:1") == 2
    assert f"{target}, line 1, is no answer" in capsys.readouterr().err
    assert target.read_bytes() == source.read_bytes()


def test_errors_are_asked_again_when_wanted(demo: RunningServer, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    target.symlink_to("real.jsonl")  # the answers stay where it leads to
    source = write(tmp_path / "in.jsonl", sum_line(10), sum_line(11, model="other"))
    assert batch(source, target, "--base-url", demo.url, "--quiet") == 0
    kept = next(line for line in target.read_text().splitlines() if '"sum-10"' in line)
    write(source, sum_line(10), sum_line(11))
    assert batch(source, target, "--base-url", demo.url, "--quiet") == 0
    assert read(target)["sum-11"]["error"]["code"] == 404, "what has an answer is not asked again"
    assert batch(source, target, "--base-url", demo.url, "--quiet", "--retry-errors") == 0
    assert text_of(read(target)["sum-11"]) == "11 + 30 = 41"
    assert target.read_text().splitlines()[0] == kept and target.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.jsonl", "real.jsonl"]


def test_a_server_that_goes_away_leaves_what_it_answered(tmp_path: Path, capsys: Any) -> None:
    class Handler(BaseHTTPRequestHandler):
        left = 5

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            Handler.left -= 1
            self.send_response(200 if Handler.left >= 0 else 503)
            self.end_headers()
            self.wfile.write(b'{"id": "x"}')

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    source = write(tmp_path / "in.jsonl", *(sum_line(number) for number in range(12)))
    target = tmp_path / "out.jsonl"
    words = ["--base-url", f"http://127.0.0.1:{server.server_port}", "--max-concurrency", "2"]
    assert batch(source, target, *words) == 2
    assert "5 of 12 requests have been answered; run it again to go on." in capsys.readouterr().err
    server.shutdown()
    server.server_close()
    assert batch(source, target, *words) == 2
    assert "The server is gone" in capsys.readouterr().err
    assert len(read(target)) == 5


def test_files_that_cannot_be_used(demo: RunningServer, tmp_path: Path, capsys: Any) -> None:
    source, target = write(tmp_path / "in.jsonl", sum_line(1), sum_line(1)), tmp_path / "out.jsonl"
    words = ["--base-url", demo.url]
    assert batch(tmp_path / "none", target, *words) == 2
    assert batch(source, target, *words) == 2
    write(source, sum_line(1))
    assert batch(source, tmp_path / "none" / "out", *words) == 2
    write(target, "something else")
    assert batch(source, target, *words) == 2
    target.write_text("")
    with target.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert batch(source, target, *words) == 2
    errors = capsys.readouterr().err
    for words_ in ("can't be read", "is there twice", "can't be written", "line 1, is no answer", "Another run"):
        assert words_ in errors


def command(source: Path, target: Path, adapter: Path) -> subprocess.Popen[str]:
    words = [
        "run-batch",
        "-i",
        str(source),
        "-o",
        str(target),
        "--num-gpu-blocks-override",
        "256",
        "--max-concurrency",
        "2",
        "--enable-lora",
        "--lora-modules",
        f"sums={adapter}",
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(pagerunner.__file__).parents[1])}
    return subprocess.Popen(
        [sys.executable, "-m", "pagerunner", *words],
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_model_of_ones_own_answers_and_ctrl_c_keeps_what_is_under_way(
    demo: RunningServer, tmp_path: Path, capsys: Any
) -> None:
    """A server, which is there already, answers what is left. That costs no second start."""
    count = effort(24, 60)
    long = [
        {"ignore_eos": True, "max_tokens": 20 if number < 8 else 100} for number in range(count)
    ]  # not done before the signal
    models = ("demo", "sums")
    source = write(
        tmp_path / "in.jsonl", *(sum_line(number, models[number % 2], **long[number]) for number in range(count))
    )
    target = tmp_path / "out.jsonl"
    running = command(source, target, random_adapter(demo_path(), tmp_path / "sums", rank=2, seed=0))
    deadline = time.monotonic() + LONG
    while not target.exists() or target.read_text().count("\n") < 5:
        assert time.monotonic() < deadline and running.poll() is None
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=LONG)
    assert running.returncode == 130 and out == "", err
    before = read(target)
    assert 5 <= len(before) < count and all(answer["error"] is None for answer in before.values())
    assert {answer["response"]["body"]["model"] for answer in before.values()} == {*models}
    write(source, *(sum_line(number) for number in range(count)))  # shorter
    assert batch(source, target, "--base-url", demo.url) == 0
    assert f"{len(before)} were there before; 0 of all are errors" in capsys.readouterr().err
    answers = read(target)
    assert len(answers) == count
    fresh = [number for number in range(10, count) if f"sum-{number}" not in before]
    assert all(text_of(answers[f"sum-{number}"]) == f"{number} + 30 = {number + 30}" for number in fresh[:20])


def test_outputs_that_are_no_files_are_refused_before_anything_is_asked(tmp_path: Path, capsys: Any) -> None:
    source = write(tmp_path / "in.jsonl", sum_line(10))
    before = source.read_bytes()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(source)
    for words in (
        ["-i", str(source), "-o", "/dev/full"],
        ["-i", str(source), "-o", "/dev/null"],
        ["-i", str(source), "-o", str(tmp_path / "pipe")],
        ["-i", str(source), "-o", str(tmp_path)],
        ["-i", str(tmp_path / "pipe"), "-o", str(tmp_path / "out")],
        ["-i", "-", "-o", str(tmp_path / "out")],
        ["-i", str(source), "-o", str(source)],
        ["-i", str(source), "-o", str(tmp_path / "link")],
        ["-i", str(source), "-o", "-", "--retry-errors"],
        ["-i", str(source), "-o", str(tmp_path / "out"), "--lora-modules", "a=b"],  # the server has adapters of its own
        ["-i", str(source), "-o", str(tmp_path / "out"), "--max-num-seqs", "3"],
    ):
        assert main(["run-batch", *words, "--base-url", "http://127.0.0.1:1"]) == 2, words
        said = capsys.readouterr().err
        assert "regular file" in said or "same file" in said or "standard" in said or "one's own" in said, said
    assert source.read_bytes() == before and not (tmp_path / "out").exists()


def test_answers_on_standard_output(demo: RunningServer, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *(sum_line(number) for number in range(10, 14)))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "pagerunner", "run-batch", "-i", str(source), "-o", "-", "--base-url", demo.url]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path, timeout=LONG)
    assert ran.returncode == 0, ran.stderr
    answers = {answer["custom_id"]: answer for answer in map(json.loads, ran.stdout.splitlines())}
    assert {text_of(answers[f"sum-{n}"]) for n in range(10, 14)} == {f"{n} + 30 = {n + 30}" for n in range(10, 14)}
    assert os.listdir(tmp_path) == ["in.jsonl"] and "4 of 4 requests" in ran.stderr


def test_a_full_disk_is_told_and_the_engine_of_ones_own_is_not_called_dead(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", sum_line(10))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [
        sys.executable,
        "-m",
        "pagerunner",
        "run-batch",
        "-i",
        str(source),
        "-o",
        "-",
        "--model",
        "demo",
        "--quiet",
    ]
    with open("/dev/full", "w") as full:
        ran = subprocess.run(command, env=env, stdout=full, stderr=subprocess.PIPE, text=True, timeout=LONG)
    assert ran.returncode == 2
    assert ran.stderr.startswith("pagerunner: error: ") and "No space left on device" in ran.stderr
    assert ran.stderr.count("\n") == 1, ran.stderr
