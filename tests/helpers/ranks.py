"""Runs a function in several processes, the ranks of a group: `python -m helpers.ranks` is one of them."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pagerunner.children import engine_environment, read_first_line, start


class Ranks:
    """Processes that run `work(rank, size, directory)` each; what it returns is the rank's last line, as JSON."""

    def __init__(self, work: Callable[[int, int, Path], Any], size: int, directory: Path) -> None:
        directory.chmod(0o700)
        orders = [
            {"module": work.__module__, "name": work.__name__, "rank": rank, "size": size, "directory": str(directory)}
            for rank in range(size)
        ]
        self.processes = [
            start(
                "helpers.ranks",
                engine_environment(),
                first_line=json.dumps(order).encode() + b"\n",
                stdout=subprocess.PIPE,
                own_session=True,
            )
            for order in orders
        ]

    def line(self, rank: int) -> Any:
        """A rank's next line."""
        stdout = self.processes[rank].stdout
        assert stdout is not None
        return json.loads(stdout.readline())

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()


def say(value: Any) -> None:
    """Write a line for `Ranks.line`."""
    print(json.dumps(value), flush=True)


def _main() -> None:
    order = json.loads(read_first_line("helpers.ranks"))
    work = getattr(importlib.import_module(order["module"]), order["name"])
    say(work(order["rank"], order["size"], Path(order["directory"])))


if __name__ == "__main__":
    _main()
    sys.exit(0)
