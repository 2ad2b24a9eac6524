"""What the machine has to offer: device and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pagerunner.errors import ConfigError

_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED = Path("/sys/fs/cgroup/memory.current")


def resolve_device(asked: str) -> Literal["cpu"]:
    """The device to run on. Raises ConfigError for one that this version does not run on."""
    if asked == "cuda":
        raise ConfigError('device="cuda" is not supported by this version, which runs on the CPU; use device="cpu".')
    return "cpu"


def available_memory() -> int:
    """Bytes of host memory that this process may still take, the container's limit included."""
    available = 8 * 2**30
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    if _CGROUP_LIMIT.exists():
        limit = _CGROUP_LIMIT.read_text().strip()
        if limit != "max":
            available = min(available, int(limit) - int(_CGROUP_USED.read_text()))
    return max(available, 0)
