"""Sums, norms and gathers of ranks by our own kernels on devices: eagerly, in graphs, and between replays of these, with ranks that come at different times."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers.device import ON_CUDA
from helpers.effort import effort

pytestmark = pytest.mark.skipif(not ON_CUDA, reason="needs a CUDA device")


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_random_calls_have_the_twins_bits(ranks: int, tmp_path: Path) -> None:
    """Ranks share a device if there is only one; eight would take turns on it for minutes."""
    if torch.cuda.device_count() < ranks and (torch.cuda.device_count() > 1 or ranks > 4):
        pytest.skip(f"needs {ranks} CUDA devices, or a single one, which up to four ranks share")
    meeting = tmp_path / "meeting"
    meeting.mkdir(mode=0o700)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["tests", os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "helpers.peer_program", str(meeting)]
    calls = ["150", str(effort(33, 200)), str(random.randrange(2**31))]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), *calls],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=150)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [text.split("\n")[-2:] for text in said] == [["well", ""]] * ranks, "\n".join(said)
