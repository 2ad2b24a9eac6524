"""What each of several engines behind one server gets of the machine: memory and cores of its host, and devices. Torch-free."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from pagerunner.cgroups import control_groups
from pagerunner.config import EngineArgs
from pagerunner.errors import ConfigError
from pagerunner.threads import thread_settings

_MEMINFO = Path("/proc/meminfo")
_CACHED_FILES = ("active_file", "inactive_file")
"""Memory of a control group that its limit counts, and that others get when they want it. Example: checkpoints that were read before."""
_DEVICE_FILES = Path("/dev")
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class EngineShare:
    """The share of engine `index` of `count`: bytes of host memory (None: all there are), and environment variables for its process."""

    index: int
    count: int
    available: int | None
    environment: Mapping[str, str]


def shares(args: EngineArgs, environ: Mapping[str, str] = os.environ) -> list[EngineShare]:
    """Equal shares for the engines that `args` ask for. One core of the machine is the server's.

    An engine sees the devices of its own ranks only. Example: engine 1 with two ranks has devices 2 and 3.

    Raises ConfigError if there are devices, but not enough of them.
    """
    count = args.engines
    threads = thread_settings(environ, reserved=1, engines=count)
    if count == 1:
        return [EngineShare(0, 1, None, threads)]
    memory, devices = available_memory() // count, _devices(args, environ)
    each = args.num_ranks
    # Without devices an engine is to see none: each would take the same one, if CUDA knew of one all the same.
    return [
        EngineShare(index, count, memory, {**threads, VISIBLE: ",".join(devices[index * each : (index + 1) * each])})
        for index in range(count)
    ]


def _devices(args: EngineArgs, environ: Mapping[str, str]) -> list[str]:
    """The CUDA devices that the engines divide, as CUDA_VISIBLE_DEVICES names them; none where they run on the CPU, or where Ray places them."""
    if args.device == "cpu" or args.distributed_executor_backend == "ray":
        return []
    if VISIBLE in environ:
        names = [name.strip() for name in environ[VISIBLE].split(",") if name.strip()]
        found = list(takewhile(lambda name: not name.startswith("-"), names))  # CUDA's list ends there
    else:
        files = [path for path in _DEVICE_FILES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
        found = [str(number) for number in range(len(files))]
    wanted = args.engines * args.num_ranks
    unknown = VISIBLE not in environ and (_DEVICE_FILES / "dxg").exists()  # WSL2 has CUDA devices without such files
    if len(found) >= wanted or (not found and args.device == "auto" and not unknown):
        return found
    ranks = f", each of {args.num_ranks} ranks," if args.num_ranks > 1 else ""
    raise ConfigError(
        f"data_parallel_size={args.data_parallel_size}{ranks} takes {wanted} CUDA devices, and {len(found)} can be seen "
        f'({VISIBLE} says which ones). Lower it, or take device="cpu".'
    )


def available_memory() -> int:
    """Bytes of host memory that this process may still take, the limits of its control groups included."""
    available = 1024 * _numbers(_MEMINFO).get("MemAvailable:", 8 * 2**20)
    for group in control_groups():
        try:
            left = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        found = _numbers(group / "memory.stat")
        available = min(available, left + sum(found.get(name, 0) for name in _CACHED_FILES))
    return max(available, 0)


def _numbers(path: Path) -> dict[str, int]:
    """The first number of each line that has a name before it; nothing if the file can't be read."""
    try:
        lines = (line.split() for line in path.read_text(errors="replace").splitlines())
        return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}
    except OSError:
        return {}
