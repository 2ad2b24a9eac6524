"""bench startup measures fresh processes; bench sleep measures every way of sleeping, and that answers stay the same."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from pagerunner.bench import sleep
from pagerunner.bench.sleep import ROUNDS, measure_sleep
from pagerunner.bench.startup import measure_startup
from pagerunner.cli.main import main
from pagerunner.errors import PagerunnerError

pytestmark = pytest.mark.days(3)  # each starts processes

SMALL = ["--num-gpu-blocks-override", "64", "--max-model-len", "128", "--device", "cpu", "--quiet", "--json"]


def test_starts_are_measured_from_import_to_ready_in_their_own_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "startup", *SMALL]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [start["caches"] for start in report["starts"]] == ["cold", "warm"]
    for start in report["starts"]:
        assert {"import", "config", "model", "weights", "pages", "other"} <= start["phases"].keys()
        assert start["ready"] == pytest.approx(sum(start["phases"].values()), abs=0.02)
        assert start["phases"]["import"] > 0.05 and start["first_token"] > 0


def test_a_start_that_fails_says_why() -> None:
    with pytest.raises(PagerunnerError, match=r"a start with cold caches failed: .*nowhere"):
        measure_startup({"model": "/nowhere"}, label="x", repetitions=1)


def test_every_level_is_measured_on_the_cpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sleep.time, "sleep", lambda seconds: None)
    assert main(["bench", "sleep", *SMALL]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [nap["name"] for nap in report["naps"]] == [name for name, *_ in ROUNDS]
    assert all(nap["sleep"] >= 0 and nap["wake"] and nap["same_answer"] for nap in report["naps"])


class _Sleeper:
    """Answers differently after its third sleep."""

    def __init__(self) -> None:
        self.log: list[object] = []

    def generate(self, prompts: object, params: object = None, use_tqdm: bool = True) -> list[SimpleNamespace]:
        assert self.log.pop() == "reset", "answers are compared without the prefix cache"
        token = 1 if self.log.count("sleep") < 3 else 2
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[token])])]

    def sleep(self, level: int = 1) -> None:
        self.log.append("sleep")

    def wake_up(self, tags: object = None) -> None:
        self.log.append(tags)

    def reset_prefix_cache(self) -> bool:
        self.log.append("reset")
        return True


def test_free_memory_and_changed_answers_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(sleep.time, "sleep", naps.append)
    values = iter([5, 50, 6] * len(ROUNDS))
    llm = _Sleeper()
    report = measure_sleep(llm, lambda: next(values) * sleep.MIB, label="shape")  # type: ignore[arg-type]
    assert all((nap.free_before, nap.free_asleep, nap.free_after) == (5, 50, 6) for nap in report.naps)
    assert [nap.same_answer for nap in report.naps] == [True, True, *[False] * 5]
    lines = report.text().splitlines()
    assert "free 5 -> 50 -> 6  same answer" in lines[1] and "THE ANSWER HAS CHANGED" in lines[3]
    assert "wake kv_cache" in lines[6]
    assert llm.log[:8] == ["sleep", None, "sleep", None, "sleep", None, "sleep", ("weights",)]
    assert naps == [seconds for _, _, seconds, _ in ROUNDS] and 0.0 in naps
