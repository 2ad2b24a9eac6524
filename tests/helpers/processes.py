"""What Linux says of processes that may end at any moment: between two questions, and between opening a file and reading it."""

from __future__ import annotations

from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether it runs: one that has ended, and whose parent hasn't asked for that, doesn't."""
    return _read(Path(f"/proc/{pid}/stat")).rpartition(b")")[2].split()[:1] not in ([], [b"Z"])


def children_of(pid: int, running: bytes = b"") -> list[int]:
    """Processes that any of its threads has started, and that have this in their command line."""
    found = [int(one) for task in Path(f"/proc/{pid}/task").glob("*/children") for one in _read(task).split()]
    return sorted({one for one in found if running in _read(Path(f"/proc/{one}/cmdline"))})


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
