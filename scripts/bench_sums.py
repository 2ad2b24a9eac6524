"""What sums of ranks cost on the devices of one machine, by size: NCCL's, and our own kernels' (`dist/peer.py`).

    python scripts/bench_sums.py [--ranks 2] [--features 4096] [--rows 1,4,16,64,256,1024,8192]

Each sum is of [rows, features] in bfloat16 and adds to a residual. A CUDA graph has `--repeat` of them, one behind the other. The table has
microseconds for each sum, of the slowest rank, the median of `--rounds` replays. Ranks' devices begin a replay together, behind a sum of their own, as
hosts launch tens of microseconds apart. "ours" is what an engine takes; the others are the ways of it. "+ norm" has a norm behind the sum: behind bare words as
a kernel of its own, behind flags and where programs have a token each in the same one. Results are compared, bit by bit, with sums in the order of the ranks. NCCL may round after each
rank: the table says by how much its sums of more than two ranks differ at most.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from pagerunner.dist.base import sum_in_order
from pagerunner.dist.gloo import GlooComm
from pagerunner.dist.nccl import NcclComm, nccl_environment
from pagerunner.dist.peer import PeerComm
from pagerunner.ops.linear import Norm
from pagerunner.ops.peer_sums import PeerSums, limits_of, room_bytes
from pagerunner.runner.cuda_driver import CudaDriver

Sum = Callable[[torch.Tensor, torch.Tensor], None]


def comms(host: GlooComm, device: torch.device) -> tuple[NcclComm, PeerComm, PeerSums]:
    """NCCL, our own kernels, and the end of the rooms that launches them, whose limits may be set."""
    ends: list[PeerSums] = []
    usual = limits_of(host.size)._replace(most=2**40)
    every = usual._replace(bare=2**31, once=0)  # rooms for all ways

    def sums(rooms: list[int], rank: int) -> PeerSums:
        ends.append(PeerSums(torch.tensor(rooms, device=device), rank, every))
        ends[0].limits = usual
        return ends[0]

    with nccl_environment():
        nccl = NcclComm(host, device, rehearsing=lambda: False)
        peer = PeerComm(host, nccl, CudaDriver(device.index), partial(room_bytes, limits=every), sums)
    return nccl, peer, ends[0]


def ways(host: GlooComm, device: torch.device) -> dict[str, Sum]:
    """What is measured, by name."""
    nccl, peer, end = comms(host, device)
    usual = end.limits

    def forced(add: Sum, bare: int, once: int = 0, whole: int = 2**31) -> Sum:
        def run(x: torch.Tensor, residual: torch.Tensor) -> None:
            end.limits = usual._replace(bare=bare, once=once, whole=whole)
            add(x, residual)
            end.limits = usual

        return run

    def with_norm(x: torch.Tensor, residual: torch.Tensor) -> None:
        peer.add_norm_(x, residual, Norm(torch.ones_like(x[0]), 1e-6))

    found: dict[str, Sum] = {"NCCL": nccl.all_reduce_, "ours": peer.all_reduce_}
    found["flags"], found["bare"] = forced(peer.all_reduce_, 0), forced(peer.all_reduce_, 2**31, 2**31)
    if host.size & (host.size - 1) == 0:
        found["twice"] = forced(peer.all_reduce_, 2**31)
    found["bare + norm"], found["flags + norm"] = forced(with_norm, 2**31, 2**31), forced(with_norm, 0)
    if not usual.twice:
        found["token + norm"] = forced(with_norm, 2**31, 2**31, 0)  # up to 256 rows
    return found


def captured(add: Sum, x: torch.Tensor, residual: torch.Tensor, repeat: int) -> torch.cuda.CUDAGraph:
    """A graph of so many sums, whose kernels have run before."""
    add(x, residual)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(repeat):
            add(x, residual)
    return graph


def microseconds(graph: torch.cuda.CUDAGraph, meet: Callable[[], None], rounds: int) -> list[float]:
    """Of each replay. `meet` is a sum of ranks."""
    times = []
    for _ in range(rounds + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(2 * 10**6)  # a millisecond, in which all hosts launch what follows
        meet()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return times[2:]


def differs(found: torch.Tensor, parts: torch.Tensor, may_round: bool) -> str:
    """What is to be said of a sum of `parts`: nothing if it is that in the order of the ranks. A rank more may be a rounding more if it `may_round`."""
    most = (found.float() - sum_in_order(parts).float()).abs()
    if not most.any():
        return ""
    near = most <= len(parts) * torch.finfo(parts.dtype).eps * parts.float().abs().sum(0)
    return f" (rounded otherwise, by up to {most.max().item():.3g})" if may_round and near.all() else " WRONG"


def measure(args: argparse.Namespace) -> None:
    """One rank: all ways, all sizes. Rank 0 prints."""
    torch.cuda.set_device(args.rank)
    device = torch.device("cuda", args.rank)
    host = GlooComm(Path(args.directory), args.rank, args.ranks, 60)
    every = ways(host, device)
    together = torch.zeros(1, 4096, device=device, dtype=torch.bfloat16)
    for rows in (int(one) for one in args.rows.split(",")):
        line = f"{rows:6} rows {rows * args.features * 2 / 1024:9.0f} KiB"
        for name, add in every.items():
            torch.manual_seed(args.rank)
            x = torch.randn(rows, args.features, device=device).to(torch.bfloat16)
            residual = torch.zeros_like(x)
            graph = captured(add, x.clone(), residual, args.repeat)
            times = torch.tensor(sorted(microseconds(graph, lambda: every["ours"](together, together), args.rounds)))
            slowest = host.all_gather(times).amax(0).median().item() / args.repeat
            residual.zero_()
            parts = host.all_gather(x.cpu())
            add(x, residual)
            line += f"   {name} {slowest:7.2f}{differs(residual.cpu(), parts, name == 'NCCL')}"
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
