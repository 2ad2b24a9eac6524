"""The control groups (cgroup v2) whose limits hold for this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def control_groups() -> Iterator[Path]:
    """Directories: this process's own group, and those around it. In a container the outermost is often the container's."""
    try:
        line = next(line for line in _OWN.read_text(errors="surrogateescape").splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        line = "0::/"
    group = _ROOT / line.removeprefix("0::").strip("/")
    yield from (one for one in (group, *group.parents) if one.is_relative_to(_ROOT))
