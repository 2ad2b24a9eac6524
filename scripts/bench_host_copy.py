"""How fast page-locked host memory of several kinds is locked, copied to the device and unlocked: what bounds waking from sleep.

    python scripts/bench_host_copy.py [--gib 8]

A table: seconds to lock and to unlock, GB/s to the device in one stream and in two. `shared` is memory as `mmap` gives it by
default, `private` the same with large pages asked for (what the host copy of the weights is), `driver` what CUDA allocates.
"""

from __future__ import annotations

import argparse
import mmap
import time
from collections.abc import Callable

import torch

PIECE = 256 * 2**20


def mapped(flags: int) -> Callable[[int], torch.Tensor]:
    """Makes host memory of its own pages."""

    def make(size: int) -> torch.Tensor:
        memory = mmap.mmap(-1, size, flags=flags | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8)

    return make


def lock(buffer: torch.Tensor) -> None:
    """Touch the pages, then register them with CUDA."""
    buffer.zero_()
    status = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)
    if int(status) != 0:
        raise RuntimeError(f"cudaHostRegister failed: {status}")


def rate(pieces: list[torch.Tensor], target: torch.Tensor, streams: list[torch.cuda.Stream]) -> float:
    """GB/s of copying all pieces, in turn on the streams; the best of three."""
    best = 0.0
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for index, piece in enumerate(pieces):
            with torch.cuda.stream(streams[index % len(streams)]):
                target[index * PIECE : (index + 1) * PIECE].copy_(piece, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, len(pieces) * PIECE / (time.perf_counter() - started) / 1e9)
    return best


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=int, default=8)
    count = parser.parse_args().gib * 4
    target = torch.empty(count * PIECE, dtype=torch.uint8, device="cuda")
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    kinds: dict[str, Callable[[int], torch.Tensor] | None] = {
        "shared": mapped(mmap.MAP_SHARED),
        "private": mapped(mmap.MAP_PRIVATE),
        "driver": None,
    }
    print(f"{count * PIECE / 1e9:.1f} GB       lock s  1 stream  2 streams  unlock s")
    for name, make in kinds.items():
        started = time.perf_counter()
        if make is None:
            pieces = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(count)]
        else:
            pieces = [make(PIECE) for _ in range(count)]
            for piece in pieces:
                lock(piece)
        locked = time.perf_counter() - started
        one, two = rate(pieces, target, streams[:1]), rate(pieces, target, streams)
        started = time.perf_counter()
        for piece in pieces if make is not None else ():
            torch.cuda.cudart().cudaHostUnregister(piece.data_ptr())
        del pieces
        unlocked = time.perf_counter() - started
        print(f"{name:10} {locked:10.2f} {one:9.1f} {two:10.1f} {unlocked:9.2f}", flush=True)


if __name__ == "__main__":
    main()
