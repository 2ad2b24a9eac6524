"""Ranks' processes that are started while their core imports torch: the engine's ranks are these, and none of them is left where there is no engine."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.patience import until
from helpers.processes import is_alive
from helpers.programs import run_python
from pagerunner import LLM, SamplingParams
from pagerunner.children import helper_environment, with_path
from pagerunner.config import EngineArgs
from pagerunner.demo import demo_path
from pagerunner.engine.core.executors import places
from pagerunner.engine.core.executors.places import EarlyRanks
from pagerunner.errors import ConfigError, EngineDeadError

pytestmark = pytest.mark.usefixtures("forked")

TWO: dict[str, Any] = {"tensor_parallel_size": 2, "device": "cpu", "max_model_len": 64}


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """All processes of ranks that this test starts, on a machine with two cores."""
    processes: list[subprocess.Popen[bytes]] = []
    begin = places._begin

    def noted() -> subprocess.Popen[bytes]:
        processes.append(begin())
        return processes[-1]

    monkeypatch.setattr(places, "_begin", noted)
    monkeypatch.setattr(places, "usable_cores", lambda: 2)
    return processes


def test_ranks_are_the_processes_that_were_started_early(begun: list[subprocess.Popen[bytes]]) -> None:
    llm = LLM("demo", **TWO, use_tqdm=False)
    watched = llm._core._executor._ranks.watch._processes  # type: ignore[attr-defined]
    assert [process.pid for process in begun] == [watched[0].pid, watched[1].pid]
    [output] = llm.generate("Hello", SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2
    del llm
    assert [process.poll() for process in begun] == [-signal.SIGKILL] * 2


@pytest.mark.parametrize("fault", ["length", "exchange"])
def test_none_is_left_and_none_speaks_if_the_arguments_are_refused(
    fault: str, begun: list[subprocess.Popen[bytes]], capfd: pytest.CaptureFixture[str]
) -> None:
    wrong: dict[str, Any] = {"max_model_len": 10**9}
    if fault == "exchange":
        wrong = {"kv_transfer_config": {"kv_connector": "PeerConnector", "kv_role": "kv_producer"}, "kv_offloading_size": 0.1}  # fmt: skip
    with pytest.raises(
        ConfigError, match="max_model_len=1000000000 is more" if fault == "length" else "is for servers"
    ):
        LLM("demo", **{**TWO, **wrong}, use_tqdm=False)
    assert [process.poll() for process in begun] == [-signal.SIGKILL] * 2
    assert "rank" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "args",
    [{"tensor_parallel_size": 1}, {"tensor_parallel_size": 3}, {**TWO, "distributed_executor_backend": "ray"}],
    ids=["one rank", "more ranks than cores", "Ray's machines"],
)
def test_some_engines_have_none(args: dict[str, Any], begun: list[subprocess.Popen[bytes]]) -> None:
    with EarlyRanks(EngineArgs(model="demo", **args)) as early:
        assert early.take() is None and not begun


def test_what_can_not_be_started_early_is_said_when_it_is_needed(
    monkeypatch: pytest.MonkeyPatch, begun: list[subprocess.Popen[bytes]]
) -> None:
    def refused(*_: object, **__: object) -> subprocess.Popen[bytes]:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(places, "start", refused)
    with pytest.raises(EngineDeadError, match=r"^The ranks of tensor_parallel_size=2 can't be started: \[Errno"):
        LLM(str(demo_path()), **TWO, use_tqdm=False)
    assert not begun


def test_one_that_was_killed_while_it_waited_is_named(begun: list[subprocess.Popen[bytes]]) -> None:
    with EarlyRanks(EngineArgs(model=str(demo_path()), **TWO)) as early:
        begun[1].kill()
        begun[1].wait()
        from pagerunner.engine.startup.build import build_core

        with pytest.raises(EngineDeadError, match=r"^Rank 1 of 2 was ended by SIGKILL, perhaps by the kernel"):
            build_core(EngineArgs(model=str(demo_path()), **TWO), early=early)
    assert all(process.poll() is not None for process in begun)


def test_they_end_without_a_word_when_their_core_is_killed(tmp_path: Path) -> None:
    """Also before they have been told which ranks they are."""
    code = (
        "import sys, time\nfrom pagerunner.config import EngineArgs\nfrom pagerunner.engine.core.executors import places\n"
        "places.usable_cores = lambda: 2\n"
        "early = places.EarlyRanks(EngineArgs(model='demo', tensor_parallel_size=2))\n"
        "print(*(process.pid for process in early._waiting), flush=True)\ntime.sleep(60)\n"
    )
    said = tmp_path / "said"
    with said.open("w") as err:
        environment = with_path(helper_environment())
        core = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=err)
        assert core.stdout is not None
        ranks = [Path("/proc", pid) for pid in core.stdout.readline().decode().split()]
        assert len(ranks) == 2
        # A command line is empty in the middle of an exec.
        until(lambda: all(b"engine.rank" in (rank / "cmdline").read_bytes() for rank in ranks))
        core.kill()
        core.wait()
        core.stdout.close()
    until(lambda: not any(is_alive(int(rank.name)) for rank in ranks))
    assert said.read_text() == ""


AT_EXIT = """
import os, signal, threading
from pagerunner import LLM
from pagerunner.engine.core.executors.watch import RankWatch

signal.signal(signal.SIGINT, signal.default_int_handler)
end = RankWatch._end

def interrupted(self, reason):
    end(self, reason)
    if threading.current_thread() is threading.main_thread():  # the watch may see that the ranks end, and ends them too
        os.kill(os.getpid(), signal.SIGINT)

llm = LLM("demo", tensor_parallel_size=2, device="cpu", max_model_len=64, use_tqdm=False)
watch = llm._core._executor._ranks.watch
print(watch._directory, *(process.pid for process in watch._processes.values()))
RankWatch._end = interrupted
"""


def test_a_ctrl_c_at_the_exit_of_a_program_prints_nothing_and_leaves_nothing() -> None:
    """As a second one does, behind that which has ended the program."""
    done = run_python(AT_EXIT, (), dict(os.environ))
    assert (done.returncode, done.stderr) == (0, "")
    directory, *pids = done.stdout.split()
    assert len(pids) == 2 and not Path(directory).exists()
    until(lambda: not any(map(is_alive, map(int, pids))))
