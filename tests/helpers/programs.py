"""Programs in processes of their own that needn't import torch: they are forked from a process that has."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

PRELOADED = ("httpx", "torch", "pagerunner.cli.main", "pagerunner.llm", "pagerunner.engine.startup.build")
"""What every program would import, 2 s of computing."""
READ_AT_IMPORT = ("PAGERUNNER_LIMIT_", "OMP_", "GOMP_", "MKL_", "TORCH", "PYTORCH_", "TRITON_", "PYTHON")
"""Beginnings of the variables that Python reads when it starts, and those modules when they are imported."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(list(PRELOADED))


def run_python(
    code: str, words: Sequence[str], env: dict[str, str], timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """What `python -c code words` prints and ends with, in this environment.

    Raises:
        ValueError: the environment has other variables of READ_AT_IMPORT than this process, which a module that is imported already
            wouldn't see.
        TimeoutError: it has not ended within `timeout` seconds.
    """
    changed = {name for name, _ in env.items() ^ os.environ.items() if name.startswith(READ_AT_IMPORT)}
    if changed:
        raise ValueError(f"{sorted(changed)} are read before the program starts: start it by subprocess.run.")
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = _context.Process(target=_run, args=(code, list(words), env, str(out), str(err)))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise TimeoutError(f"not within {timeout} seconds: {err.read_text()}")
        assert process.exitcode is not None
        return subprocess.CompletedProcess([code, *words], process.exitcode, out.read_text(), err.read_text())


def _run(code: str, words: list[str], env: dict[str, str], out: str, err: str) -> None:
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["-c", *words]
    for number, path in ((1, out), (2, err)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, number)
        os.close(opened)
    exec(compile(code, "-c", "exec"), {"__name__": "__main__"})
