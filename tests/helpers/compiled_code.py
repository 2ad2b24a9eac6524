"""Runs a program that compiles kernels for a card that isn't there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts"

SCAN = """
from check_compiled import disassembled, faults, overwritten

def scanned(kernel):
    \"\"\"The instructions of a compiled kernel, in which scripts/check_compiled.py finds no fault.\"\"\"
    cubin = Path("kernel.cubin")
    cubin.write_bytes(kernel.asm["cubin"])
    code = disassembled(cubin)
    found = [*faults(code), *overwritten(code)]
    assert not found, found
    return code
"""
"""What such a program begins with, after it has imported Path."""


def run_compiling(program: str, folder: Path, *arguments: object) -> None:
    """Run it in `folder`, which keeps what Triton compiles, without Triton's interpreter. Raises CalledProcessError."""
    (folder / "program.py").write_text(program)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join((str(SCRIPTS), env.get("PYTHONPATH", "")))
    env |= {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": path}
    command = [sys.executable, "program.py", *map(str, arguments)]
    subprocess.run(command, env=env, cwd=folder, check=True, timeout=1200)
