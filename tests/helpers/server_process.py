"""`run_server` over the fake core in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from helpers import fake_core
from helpers.patience import LONG

PROGRAM = """
import sys
import msgspec
from helpers import fake_core
from pagerunner.config import EngineArgs
from pagerunner.server.launch import run_server
options = dict(port=0, served_model_name="tiny", core_factory=fake_core.FACTORY, drain_seconds=float(sys.argv[2]))
options |= msgspec.json.decode(sys.argv[3]) if len(sys.argv) > 3 else {}
args = EngineArgs(model=sys.argv[1], data_parallel_size=options.pop("engines", 1))
sys.exit(run_server(args, **options))
"""


def set_options(monkeypatch: pytest.MonkeyPatch, **options: object) -> None:
    """Of the fake core, see `FakeOptions`."""
    monkeypatch.setenv(fake_core.OPTIONS_VARIABLE, msgspec.json.encode(options).decode())


@contextmanager
def server_process(
    model: Path, drain_seconds: float = 30, **options: object
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`run_server` in a process of its own, as the command line runs it, and its URL. `engines` is data_parallel_size."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", PROGRAM, str(model), str(drain_seconds), msgspec.json.encode(options).decode()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    with process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().rsplit(" ", 1)[-1].strip()
            for _ in range(200):
                try:
                    httpx.get(f"{url}/health", timeout=LONG)
                    break
                except httpx.ConnectError:
                    time.sleep(0.02)
            yield process, url
        finally:
            process.kill()


def refuses(url: str) -> bool:
    """Whether the server takes no new connections any more: it has seen a signal."""
    try:
        httpx.get(f"{url}/health", timeout=LONG)
    except httpx.ConnectError:
        return True
    except httpx.TransportError:  # closed while the request was on its way
        return False
    return False
