"""The benchmarks of host memory and of the disk compare tokens: they end well, and not where pages are others."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from helpers.scripts import script
from pagerunner import LLM
from pagerunner.runner.transfers import Transfers
from pagerunner.types import PageTransfer

Bench = Callable[..., Any]
SIZES = ("--prompts", 4, "--tokens", 256, "--pages-gib", 0.003, "--host-gib", 0.06)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    def run(name: str, *options: object) -> None:
        monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
        monkeypatch.setattr(sys, "argv", [name, *map(str, (*options, *SIZES))])
        script(name).main()

    return run


DECODING = ("tiny", "--decoding", 2, "--seqs", 2, "--move-gib", 0.0005)


def test_host_memory(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench("bench_host_tier", *DECODING)
    said = capsys.readouterr().out
    assert "24 tokens equal those from pages that never left the device: 4 of 4" in said
    for moves in ("loading", "computed", "storing"):
        assert re.search(rf"2 requests decode, {moves} *: .* of those before and after", said)


@pytest.mark.days(2)
def test_steps_of_requests_that_have_ended_are_no_measurement(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a slot beside theirs, a new prompt is computed when the first of them has ended."""
    make = LLM.__init__
    monkeypatch.setattr(LLM, "__init__", lambda *args, **given: make(*args, **(given | {"max_num_seqs": 2})))
    with pytest.raises(SystemExit, match="2 requests have ended, so these steps say nothing"):
        bench("bench_host_tier", *DECODING)


@pytest.mark.days(2)
@pytest.mark.parametrize("which", [0, 1], ids=["the first page", "the last page"])
def test_host_memory_whose_pages_are_others(bench: Bench, monkeypatch: pytest.MonkeyPatch, which: int) -> None:
    load = Transfers.load

    def load_other(self: Transfers, transfers: Iterable[PageTransfer]) -> None:
        wrong = []
        for one in transfers:
            places = [list(some) for some in one.places]
            next(some for some in (places[::-1] if which else places) if some)[-which] += 1 << 20
            wrong.append(one._replace(places=places) if one.loads else one)
        load(self, wrong)

    monkeypatch.setattr(Transfers, "load", load_other)
    with pytest.raises(SystemExit, match="TOKENS ARE OTHERS"):
        bench("bench_host_tier", "tiny", "--decoding", 0)


def test_a_disk(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = ("--root", tmp_path, "--shape", "tiny", "--max-gib", 0.1)
    bench("bench_disk_tier", "write", *disk)
    bench("bench_disk_tier", "read", *disk)
    assert "tokens equal: 4 of 4" in capsys.readouterr().out
    kept = json.loads((tmp_path / "tokens.json").read_text())
    kept["tokens"][2][3] = 77
    (tmp_path / "tokens.json").write_text(json.dumps(kept))
    with pytest.raises(SystemExit, match="prompt 2: token 3 is 77"):
        bench("bench_disk_tier", "read", *disk)
