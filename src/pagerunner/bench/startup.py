"""How long a start takes: a fresh process each time, with kernel caches cold and then warm.

`python -m pagerunner.bench.startup ARGS` is the process that is measured; it prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from pagerunner.children import engine_environment, run_to_end
from pagerunner.errors import PagerunnerError


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """One start, in seconds by phase. `ready` is from the first import to a loaded engine; `interpreter`, what Python took
    before; `first_token`, one request of 16 tokens afterwards. `memory`: bytes of the device by use.
    """

    caches: str
    interpreter: float
    phases: dict[str, float]
    ready: float
    first_token: float
    memory: dict[str, int]


class StartupReport(msgspec.Struct, frozen=True, kw_only=True):
    """All starts, in the order in which they were made."""

    label: str
    starts: list[Start]

    def text(self) -> str:
        """A table for a person."""
        names = list(dict.fromkeys(name for start in self.starts for name in start.phases))
        heads = ["caches", "ready", *names, "first token"]
        rows = [
            [
                start.caches,
                f"{start.ready:.2f}",
                *(f"{start.phases.get(name, 0.0):.2f}" for name in names),
                f"{start.first_token:.2f}",
            ]
            for start in self.starts
        ]
        widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (heads, *rows)
        ]
        return "\n".join([f"{self.label}: seconds from import to ready, and of its phases", *lines])


def measure_startup(values: dict[str, object], *, label: str, repetitions: int) -> StartupReport:
    """Start an engine with the arguments `values` in fresh processes: once with empty kernel caches, then `repetitions`
    times with what the first left there.

    Raises PagerunnerError when a start fails, with the last line that it wrote.
    """
    with tempfile.TemporaryDirectory(prefix="pagerunner-caches-") as caches:
        environment = {
            **engine_environment(),
            "TRITON_CACHE_DIR": str(Path(caches) / "triton"),
            "CUDA_CACHE_PATH": str(Path(caches) / "cuda"),
        }
        names = ["cold", *["warm"] * repetitions]
        return StartupReport(label=label, starts=[_start(name, values, environment) for name in names])


def _start(caches: str, values: dict[str, object], environment: dict[str, str]) -> Start:
    spawned = time.time()
    process = run_to_end("pagerunner.bench.startup", json.dumps(values), environment=environment)
    if process.returncode != 0:
        last = (process.stderr.strip().splitlines() or ["it wrote nothing"])[-1]
        raise PagerunnerError(f"a start with {caches} caches failed: {last}")
    found = json.loads(process.stdout.splitlines()[-1])
    began = found.pop("began")
    return msgspec.convert({"caches": caches, "interpreter": began - spawned, **found}, Start)


def _child(arguments: str) -> None:
    began, started = time.time(), time.perf_counter()
    from pagerunner.llm import LLM
    from pagerunner.types import SamplingParams

    imported = time.perf_counter()
    llm = LLM(**json.loads(arguments), use_tqdm=False)
    ready = time.perf_counter()
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": list(range(300, 316))}], params, use_tqdm=False)
    done = time.perf_counter()
    phases = dict(llm.startup.seconds)
    phases["import"] += imported - started
    phases["other"] = max(ready - started - sum(phases.values()), 0.0)
    found = {"began": began, "phases": phases, "ready": ready - started, "first_token": done - ready}
    print(json.dumps({**found, "memory": llm.startup.memory}), flush=True)


if __name__ == "__main__":
    _child(sys.argv[1])
