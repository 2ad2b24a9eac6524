"""What sums of ranks cost on the devices of one machine, by size: NCCL's, and our own kernel's (`dist/peer.py`).

    python scripts/bench_sums.py [--ranks 2] [--features 4096] [--rows 1,4,16,64,256,1024,8192]

Each sum is of [rows, features] in bfloat16 and adds to a residual. A CUDA graph has `--repeat` of them, one behind the other. The table has
microseconds for each sum, of the slowest rank, the median of `--rounds` replays. All ranks' results are compared with each other, bit by bit.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from pagerunner.dist.base import Comm
from pagerunner.dist.gloo import GlooComm
from pagerunner.dist.nccl import NcclComm, nccl_environment
from pagerunner.dist.peer import PeerComm
from pagerunner.ops.peer_sums import PeerSums, room_bytes
from pagerunner.runner.cuda_driver import CudaDriver

Sum = Callable[[torch.Tensor, torch.Tensor], None]


def comms(host: GlooComm, device: torch.device) -> dict[str, Comm]:
    """The ways to add up, by name."""

    def sums(rooms: list[int], rank: int) -> PeerSums:
        return PeerSums(torch.tensor(rooms, device=device), rank)

    with nccl_environment():
        nccl = NcclComm(host, device, rehearsing=lambda: False)
        peer = PeerComm(host, nccl, CudaDriver(device.index), room_bytes, sums, most_bytes=2**40)
    return {"NCCL": nccl, "our kernel": peer}


def captured(add: Sum, x: torch.Tensor, residual: torch.Tensor, repeat: int) -> torch.cuda.CUDAGraph:
    """A graph of so many sums, whose kernels have run before."""
    add(x, residual)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(repeat):
            add(x, residual)
    return graph


def microseconds(graph: torch.cuda.CUDAGraph, host: GlooComm, rounds: int) -> list[float]:
    """Of each replay."""
    times = []
    for _ in range(rounds + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        host.broadcast_bytes(b"" if host.rank == 0 else None)  # all ranks begin together
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return times[2:]


def measure(args: argparse.Namespace) -> None:
    """One rank: all ways, all sizes. Rank 0 prints."""
    torch.cuda.set_device(args.rank)
    device = torch.device("cuda", args.rank)
    host = GlooComm(Path(args.directory), args.rank, args.ranks, 60)
    ways = comms(host, device)
    for rows in (int(one) for one in args.rows.split(",")):
        line = f"{rows:6} rows {rows * args.features * 2 / 1024:9.0f} KiB"
        for name, comm in ways.items():
            torch.manual_seed(args.rank)
            x = torch.randn(rows, args.features, device=device).to(torch.bfloat16)
            residual = torch.zeros_like(x)
            graph = captured(comm.all_reduce_, x.clone(), residual, args.repeat)
            times = torch.tensor(sorted(microseconds(graph, host, args.rounds)))
            slowest = host.all_gather(times).amax(0).median().item() / args.repeat
            residual.zero_()
            comm.all_reduce_(x, residual)
            same = len(set(host.all_gather(residual.float().sum(0).cpu()).sum(1).tolist())) == 1
            line += f"   {name} {slowest:8.2f} us{'' if same else ' DIFFER'}"
        if args.rank == 0:
            print(line, flush=True)
    os._exit(0)


def main() -> int:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--features", type=int, default=4096)
    parser.add_argument("--rows", default="1,4,16,32,64,128,256,512,1024,2048,8192")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--directory")
    args = parser.parse_args()
    if args.rank is not None:
        measure(args)
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, __file__, *sys.argv[1:], "--directory", directory, "--rank"]
        processes = [subprocess.Popen([*command, str(rank)]) for rank in range(args.ranks)]
        return max(process.wait() for process in processes)


if __name__ == "__main__":
    sys.exit(main())
