"""The verbs on the real demo model: what a new user sees, and what bad input leads to."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import pagerunner
from helpers.patience import LONG
from pagerunner.bench.workloads import write_model
from pagerunner.cli.main import main
from pagerunner.demo import demo_path

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(pagerunner.__file__).parents[1])}
SMALL_POOL = ("--num-gpu-blocks-override", "256", "--max-num-seqs", "16")


def one_sentence(captured):
    assert captured.out == ""
    assert captured.err.startswith("pagerunner: error: ") and captured.err.count("\n") == 1, captured.err
    return captured.err


def test_generate_shows_the_demo_models_tasks(capsys):
    assert main(["generate"]) == 0
    out, err = capsys.readouterr()
    assert "demo model" in err
    assert "127 + 58 = 185" in out
    assert "12, 38, 55, 71, 94" in out
    assert "Leo was lost" in out.rsplit("Why did Leo do that?", 1)[1]
    assert "tokens/s" in err and "prefix cache" in err and "pages" in err


def test_generate_tells_what_became_of_drafts(capsys):
    table = '{"num_speculative_tokens_per_batch_size": [[1, 256, 3]]}'
    words = ["--spec-method", "eagle3", "--spec-model", "demo-eagle3", "--spec-tokens", "3", "-sc", table]
    assert main(["generate", "Once upon a time", *words]) == 0
    said = capsys.readouterr().err.splitlines()[-1]
    assert (
        said.startswith(("Drafts: 2.", "Drafts: 3."))
        and "tokens a step with drafts. Per-position acceptance rate: 0." in said
    )


def test_chat_takes_turns_from_stdin(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 12 + 30?\nSort: 40, 31, 22, 67\n"))
    assert main(["chat", "--quiet"]) == 0
    assert capsys.readouterr() == ("12 + 30 = 42\n22, 31, 40, 67\n", "")


def test_chat_quick(capsys):
    assert main(["chat", "--quick", "12 + 30", *SMALL_POOL]) == 0
    assert capsys.readouterr().out == "12 + 30 = 42\n"


def test_same_text_in_a_pool_so_small_that_requests_wait_for_each_other(capsys):
    prompts = [f"{n} + 17" for n in (110, 204, 381)]
    outputs = []
    for pages in ("256", "4"):
        words = [
            "generate",
            *prompts,
            "--num-gpu-blocks-override",
            pages,
            "--max-model-len",
            "64",
            "--max-tokens",
            "30",
        ]
        assert main([*words, "--json", "--quiet", "--poison-fresh-pages"]) == 0
        outputs.append([json.loads(line)["outputs"] for line in capsys.readouterr().out.splitlines()])
    assert outputs[0] == outputs[1] and len(outputs[0]) == 3


def test_plan_of_the_demo_model_and_of_a_config_alone(tmp_path, capsys):
    assert main(["plan", "--json", "--memory", "1GiB", "--quiet"]) == 0
    demo = json.loads(capsys.readouterr().out)
    assert demo["max_model_len"] == 2048 and demo["groups"][0]["page_tokens"] == 16

    config = write_model("small", tmp_path / "m") / "config.json"
    (tmp_path / "anything.json").write_text(config.read_text())
    plans = []
    for named in (config, config.parent, tmp_path / "anything.json"):
        words = ["plan", str(named), "--memory", "8GiB", "--max-model-len", "auto", "--block-size", "32", "--json"]
        assert main(words) == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert plans[0] == plans[1] == plans[2]
    # 16 layers x (keys, values) x 4 heads x 64 x 4 bytes
    assert plans[0]["groups"][0]["page_bytes"] == 32 * 16 * 2 * 4 * 64 * 4
    assert plans[0]["kv_bytes"] + plans[0]["other"][0]["bytes"] <= 8 * 2**30


def test_plan_as_a_table(capsys):
    assert main(["plan", "--memory", "1GiB"]) == 0
    out = capsys.readouterr().out
    assert "page bytes" in out and "max_model_len" in out and "waste" in out


def test_a_plan_that_cannot_be_made_says_what_would_fit(capsys):
    assert main(["plan", str(demo_path()), "--kv-cache-memory-bytes", "1MiB"]) == 2
    sentence = one_sentence(capsys.readouterr())
    assert "max_model_len" in sentence and "kv_cache_memory_bytes" in sentence


def test_bench_throughput_reports_json(capsys):
    words = ["--num-prompts", "3", "--input-len", "20", "--output-len", "5", "--num-iters", "2", "--json", "--quiet"]
    assert main(["bench", "throughput", *words, "--num-iters-warmup", "1", *SMALL_POOL]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_requests"], report["prompt_tokens"], report["output_tokens"]) == (3, 60, 15)
    assert len(report["seconds"]) == 2 and report["output_tokens_per_second"] > 0


def test_bench_workload_with_a_common_prefix_hits_it(capsys):
    words = ["--workload", "W3", "--num-iters", "1", "--num-iters-warmup", "0", "--json", "--quiet"]
    assert main(["bench", "throughput", *words]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["output_tokens"] == 32 * 16
    assert report["cached_tokens"] == 31 * 512


def test_bench_latency(capsys):
    words = [
        "--batch-size",
        "2",
        "--input-len",
        "8",
        "--output-len",
        "3",
        "--num-iters",
        "2",
        "--num-iters-warmup",
        "0",
    ]
    assert main(["bench", "latency", *words, *SMALL_POOL]) == 0
    assert "99% percentile" in capsys.readouterr().out


def test_eval_prints_the_scores(capsys):
    words = ["eval", "--tasks", "addition,sorting", "--num-examples", "8", "--json", "--quiet", *SMALL_POOL]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert {score["task"] for score in report["scores"]} == {"addition", "sorting"}
    assert all(score["accuracy"] >= 0.75 for score in report["scores"])


def test_demos_go_by_their_names(capsys):
    words = ["--model", "demo-hybrid", "--quiet", *SMALL_POOL]
    assert main(["eval", "--tasks", "addition", "--num-examples", "6", "--json", *words]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"] == "demo-hybrid" and report["scores"][0]["accuracy"] >= 0.8
    assert main(["chat", "--quick", "Sort: 40, 31, 22, 67", *words]) == 0
    assert capsys.readouterr().out == "22, 31, 40, 67\n"
    assert main(["generate", *words[:2], *SMALL_POOL]) == 0
    captured = capsys.readouterr()
    assert "127 + 58 = 185" in captured.out and "pages" in captured.err
    assert main(["plan", "demo-hybrid", "--json", "--memory", "1GiB"]) == 0
    assert len(json.loads(capsys.readouterr().out)["groups"]) == 3


def test_a_directory_comes_before_the_demo_of_its_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert main(["generate", "--model", "demo", "--quiet"]) == 2
    assert "config.json" in one_sentence(capsys.readouterr())


@pytest.mark.parametrize("verb", ["generate", "chat", "plan", "eval"])
def test_a_model_that_is_not_there(verb, tmp_path, capsys):
    assert main([verb, "--model", str(tmp_path / "nowhere"), "--quiet"]) == 2
    assert "nowhere" in one_sentence(capsys.readouterr())


def test_a_directory_that_is_no_model(tmp_path, capsys):
    assert main(["generate", "--model", str(tmp_path), "--quiet"]) == 2
    assert "config.json" in one_sentence(capsys.readouterr())


def test_an_unknown_model_type(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "novel", "architectures": ["NovelForCausalLM"]}))
    assert main(["generate", "--model", str(tmp_path), "--quiet"]) == 2
    assert "novel" in one_sentence(capsys.readouterr()).lower()


def test_an_empty_prompt(capsys):
    assert main(["generate", "", "--quiet", *SMALL_POOL]) == 2
    assert "prompt" in one_sentence(capsys.readouterr())


def test_a_prompt_longer_than_the_model(capsys):
    assert main(["generate", "word " * 300, "--max-model-len", "64", "--quiet", *SMALL_POOL]) == 2
    assert "64" in one_sentence(capsys.readouterr())


def test_a_port_in_use_is_found_before_the_model_loads(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", "--port", str(taken.getsockname()[1]), "--quiet"]) == 2
    assert "in use" in one_sentence(capsys.readouterr())


def test_ctrl_c_ends_a_loaded_engine_with_130():
    process = subprocess.Popen(
        [sys.executable, "-m", "pagerunner", "chat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    process.stdin.write("12 + 30\n")
    process.stdin.flush()
    assert process.stdout.readline() == "12 + 30 = 42\n"
    process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)  # Python may be about to end
    _, err = process.communicate(timeout=LONG)
    assert process.returncode == 130
    assert "interrupted" in err and "Traceback" not in err


def test_ctrl_c_in_the_code_of_a_text_ends_with_130_too(tmp_path):
    """As of a dataclass, while libraries are imported: Python would end by the signal."""
    text = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(100)"
    program = (
        f"from pagerunner.cli import main as m; m._dispatch = lambda words: exec({text!r}); raise SystemExit(m.main())"
    )
    (tmp_path / "interrupted.py").write_text(program, encoding="utf-8")
    command = [sys.executable, "-m", "interrupted"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=LONG, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, "pagerunner: interrupted.\n")


def test_plan_draws_the_arena_as_text_and_into_a_file(tmp_path, capsys):
    file = tmp_path / "arena.svg"
    assert main(["plan", "--memory", "1GiB", "--svg", str(file), "--quiet"]) == 0
    assert "arena: each character is" in capsys.readouterr().out
    assert file.read_text().startswith("<svg") and "request 1" in file.read_text()
    assert main(["plan", "--memory", "1GiB", "--svg", str(tmp_path / "nowhere" / "x.svg")]) == 2
    assert "can't be written" in capsys.readouterr().err
    assert main(["plan", "--json", "--memory", "1GiB", "--quiet", "--kv-cache-dtype", "fp8"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["groups"][0]["zero_fresh"] and plan["groups"][0]["page_bytes"] == 81_920 // 4 + 5 * 32
