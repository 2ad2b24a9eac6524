"""Exit codes and messages of the command itself."""

from __future__ import annotations

import errno
import sys
import types

import pytest
import torch

from pagerunner import limits
from pagerunner.cli import collect_env
from pagerunner.cli import main as cli
from pagerunner.engine.startup import cluster
from pagerunner.errors import ConfigError


def plant(monkeypatch, action):
    """Make `pagerunner planted` run `action`."""
    from pagerunner.cli.options import Parser, add_common_options

    def build_parser():
        parser = Parser("pagerunner planted", "")
        add_common_options(parser)
        return parser

    module = types.ModuleType("planted")
    module.build_parser = build_parser
    module.run = lambda namespace: action()
    monkeypatch.setitem(sys.modules, "planted", module)
    monkeypatch.setitem(cli.VERBS, "planted", ("planted", "a test"))


def raiser(error):
    def action():
        raise error

    return action


def test_help_lists_every_verb(capsys):
    assert cli.main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(verb in printed for verb in cli.VERBS)


@pytest.mark.parametrize("words", [[], ["-h"], ["help"], ["--debug"]])
def test_nothing_to_do_prints_the_help(words, capsys):
    assert cli.main(words) == 0
    assert "usage: pagerunner" in capsys.readouterr().out


def test_version(capsys):
    import pagerunner

    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"pagerunner {pagerunner.__version__}\n"


@pytest.mark.parametrize("verb", cli.VERBS)
def test_verb_help(verb, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main([verb, "--help"])
    assert left.value.code == 0
    assert f"pagerunner {verb}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["generat"], "unknown verb 'generat'; did you mean generate?"),
        (["xyzzy"], "unknown verb 'xyzzy'; the verbs are generate, chat,"),
        (["generate", "--topp", "1"], "unknown flag --topp; did you mean --top-p?"),
        (["bench", "speed"], "bench measures throughput, latency, startup or sleep, not 'speed'."),
        (["bench"], "required: throughput|latency"),
        (["bench", "latency", "--workload", "W1"], "--workload is for bench throughput"),
        (["bench", "sleep", "--num-iters", "2"], "--num-iters doesn't apply to bench sleep"),
        (["bench", "startup", "--workload", "W1"], "--workload doesn't apply to bench startup"),
        (
            ["bench", "latency", "--input-len", "999999999", "--quiet"],
            "make 1,000,000,127 tokens, more than max_model_len, which is",
        ),
        (["bench", "latency", "--ceilings", "4,700"], "--ceilings doesn't apply to bench latency"),
        (["bench", "throughput", "--shape", "none", "--ceilings", "4"], "--ceilings takes TB/s and TFLOP/s"),
        (["bench", "throughput", "--shape", "none", "--ceilings", "nan,700"], "--ceilings must be positive"),
        (["bench", "throughput", "--model", "a", "--shape", "b"], "--model a and --shape b name two models"),
        (["bench", "throughput", "--workload", "W9"], "unknown workload 'W9'; there are W1, W2, W3, mixed256,"),
        (["bench", "throughput", "--workload", "W1", "--input-len", "4"], "leave out --input-len"),
        (["bench", "latency", "--num-prompts", "4"], "--num-prompts doesn't apply to bench latency; use --batch-size"),
        (["bench", "throughput", "--top-k", "4"], "--top-p and --top-k need a --temperature above 0"),
        (["bench", "throughput", "--temperature", "1", "--top-p", "2"], "top_p must be in (0, 1], got 2.0"),
        (["bench", "startup", "--temperature", "1"], "--temperature doesn't apply to bench startup"),
        (["bench", "throughput", "--shape", "huge"], "unknown shape 'huge'; there are tiny, small, qwen3-0.6b,"),
        (["serve", "a", "--model", "b"], "two models are named"),
        (["serve", "--port", "70000"], "--port: must be in [0, 65535], got 70000"),
        (["serve", "--shutdown-timeout", "soon"], "--shutdown-timeout: 'soon' is not a number such as 0.9 or 30"),
        (
            ["serve", "--shutdown-timeout", "0"],
            "--shutdown-timeout: must be more than 0 and less than 1e9 seconds, got 0",
        ),
        (
            ["serve", "--gpu-memory-utilization", "90%"],
            "--gpu-memory-utilization: '90%' is not a number such as 0.9 or 30",
        ),
        (
            ["bench", "serve", "--request-timeout", "nan"],
            "--request-timeout: must be more than 0 and less than 1e9 seconds, got nan",
        ),
        (["proxy", "--prefill-timeout-secs", "1m"], "--prefill-timeout-secs: '1m' is not a number such as 0.9 or 30"),
        (["generate", "--temperature", "nan"], "temperature must be a finite number"),
        (["generate", "--n", "0"], "n must be in [1, 128], got 0"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(words, sentence, capsys):
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("pagerunner: error: ")
    assert captured.err.count("\n") == 1
    assert sentence in captured.err


def test_our_errors_lose_their_line_breaks(monkeypatch, capsys):
    plant(monkeypatch, raiser(ConfigError("two\n  lines")))
    assert cli.main(["planted"]) == 2
    assert capsys.readouterr().err == "pagerunner: error: two lines\n"


@pytest.mark.parametrize("words", [["planted", "--debug"], ["--debug", "planted"]])
def test_debug_shows_the_traceback(words, monkeypatch, capsys):
    plant(monkeypatch, raiser(ConfigError("no")))
    assert cli.main(words) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_limit_of_the_environment_that_is_no_number_is_said_before_the_verb_runs(monkeypatch, capsys):
    plant(monkeypatch, raiser(AssertionError("the verb ran")))
    monkeypatch.setattr(limits, "FAULTS", ["PAGERUNNER_LIMIT_MAX_N must be an integer, got 'x'."])
    assert cli.main(["planted"]) == 2
    assert "PAGERUNNER_LIMIT_MAX_N must be an integer, got 'x'." in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:  # help needs no limits
        cli.main(["plan", "--help"])
    assert caught.value.code == 0


def test_a_bug_is_exit_code_1_and_points_to_debug(monkeypatch, capsys):
    plant(monkeypatch, raiser(KeyError("slot")))
    assert cli.main(["planted"]) == 1
    assert "internal error: KeyError: 'slot' (--debug shows where)" in capsys.readouterr().err


def test_an_output_that_is_closed_or_full_is_no_bug(monkeypatch, capsys):
    plant(monkeypatch, lambda: 0)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)  # as Python has it where the process was started without one
        assert cli.main(["planted"]) == 0
    with monkeypatch.context() as patch:
        full = raiser(OSError(errno.ENOSPC, "No space left on device"))
        patch.setattr(sys, "stdout", types.SimpleNamespace(write=len, flush=full))
        assert cli.main(["--version"]) == 2
    assert capsys.readouterr().err == "pagerunner: error: [Errno 28] No space left on device.\n"


def test_a_model_that_may_not_be_read_or_has_no_possible_name_is_no_bug(monkeypatch, capsys):
    assert cli.main(["plan", "--model", "a" * 5_000]) == 2
    assert "pagerunner: error: [Errno 36] File name too long" in capsys.readouterr().err
    plant(monkeypatch, raiser(PermissionError(errno.EACCES, "Permission denied", "/models/a/config.json")))
    assert cli.main(["planted"]) == 2
    assert capsys.readouterr().err == "pagerunner: error: [Errno 13] Permission denied: '/models/a/config.json'.\n"


def test_ctrl_c_is_130(monkeypatch, capsys):
    plant(monkeypatch, raiser(KeyboardInterrupt()))
    assert cli.main(["planted"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_collect_env(capsys):
    import json

    assert cli.main(["collect-env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["packages"]["msgspec"] != "not installed"
    assert report["system"]["cores"] >= 1


def test_collect_env_tells_of_several_devices_whether_they_reach_each_other(monkeypatch):
    properties = types.SimpleNamespace(name="NVIDIA X", total_memory=80 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setenv("PAGERUNNER_RANKS_SHARE_DEVICES", "0")
    for name in ("PAGERUNNER_API_KEY", "NCCL_FOO_PASS", "TORCH_S3_CREDENTIALS"):
        monkeypatch.setenv(name, "secret")
    for reach, said in ((lambda a, b: True, "all pairs"), (lambda a, b: (a, b) != (2, 0), "all pairs but 0 and 2")):
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", reach)
        report = collect_env.collect()
        assert report["torch"]["gpu 2"] == "NVIDIA X, 80.0 GiB, sm_90" and report["torch"]["peer access"] == said
    assert "PAGERUNNER_RANKS_SHARE_DEVICES" in report["environment"] and "secret" not in report["environment"].values()


def test_collect_env_lists_the_machines_of_a_ray_cluster_that_is_named(monkeypatch):
    monkeypatch.setattr(cluster, "machines", lambda: ["10.0.0.1: 8 CPUs, 1 GPUs; pagerunner 0.1.0", "10.0.0.2: none"])
    assert "ray cluster" not in collect_env.collect()
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert collect_env.collect()["ray cluster"]["machine 1"] == "10.0.0.2: none"
    monkeypatch.undo()
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: None)
    assert "needs the package ray" in collect_env.collect()["ray cluster"]["status"]


def test_collect_env_without_torch(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert cli.main(["collect-env"]) == 0
    assert "can't be imported" in capsys.readouterr().out
