"""Byte counts for people."""

from __future__ import annotations


def human_bytes(size: int) -> str:
    """A byte count with a binary unit: 1536 -> "1.50 KiB"."""
    if size < 1024:
        return f"{size} B"
    value = float(size)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1024 or unit == "TiB":
            break
    return f"{value:.2f} {unit}"
