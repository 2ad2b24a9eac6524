"""A rank of `tests/gpu/test_peer_sums.py`: random sums, norms and gathers by our own kernels, compared bit by bit with what gloo gathers.

python -m helpers.peer_program DIRECTORY RANK RANKS CALLS KINDS SEED

Calls are of so many kinds, as each is another kernel, whose compilation takes half a second with four ranks.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import torch

from pagerunner.dist.base import sum_in_order
from pagerunner.dist.gloo import GlooComm
from pagerunner.dist.peer import PeerComm
from pagerunner.dist.staged import StagedComm
from pagerunner.ops.linear import Norm
from pagerunner.ops.peer_sums import PeerSums, limits_of, room_bytes
from pagerunner.runner.cuda_driver import CudaDriver

SHAPES = [
    (1, 4096),
    (1, 2),
    (3, 1000),
    (16, 2048),
    (64, 4096),
    (65, 4096),
    (128, 2880),
    (300, 4096),
    (1, 5000),
    (700, 2048),
    (33, 7168),
]
DTYPES = [torch.bfloat16, torch.bfloat16, torch.float16, torch.float32]


class Calls:
    """Random calls of so many kinds, the same ones on all ranks, each with numbers of the rank's own."""

    def __init__(self, comm: PeerComm, host: GlooComm, device: torch.device, choose: random.Random, count: int) -> None:
        self.comm, self.host, self.device = comm, host, device
        self.kinds = [
            (
                choose.choice(["add", "sum", "norm", "parts", "pairs", "gather"]),
                SHAPES[number % len(SHAPES)],
                choose.choice(DTYPES),
            )
            for number in range(count)
        ]

    def make(self, choose: random.Random) -> tuple[str, list[torch.Tensor]]:
        """What is called, and with what."""
        kind, shape, dtype = choose.choice(self.kinds)
        torch.manual_seed(choose.randrange(2**31) + self.host.rank)
        x = torch.randn(shape, device=self.device).mul_(10.0**self.host.rank).to(dtype)
        torch.manual_seed(0)
        return kind, [
            x,
            torch.randn(shape, device=self.device).to(dtype),
            torch.randn(shape[1], device=self.device).to(dtype),
        ]

    def run(self, kind: str, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The result, or what follows from it."""
        if kind == "gather":
            return self.comm.all_gather(x)
        if kind == "sum":
            self.comm.all_reduce_(x)
            return x
        if kind == "norm" and self.comm.takes_norm(x):
            return torch.cat([self.comm.add_norm_(x, residual, Norm(weight, 1e-6)), residual])
        if kind == "parts" and self.comm.takes_parts(*x.shape, x.dtype):
            parts = torch.full((3, len(x) + 7, x.shape[1]), torch.nan, device=self.device)
            parts[:, : len(x)] = torch.stack([x.float() * share for share in (0.5, 0.25, 0.25)])
            normed = self.comm.add_parts_(parts, residual, Norm(weight, 1e-6))
            assert normed is not None
            return torch.cat([normed, residual])
        if kind == "pairs" and self.comm.takes_pairs(*x.shape, x.dtype):
            other = x.flip(0)  # which is taken away again, with no rounding
            pairs = torch.stack([x, torch.full_like(x, torch.nan), other, -other], 1).flatten(0, 1)
            experts = torch.stack([torch.full_like(x[:, 0], number, dtype=torch.int32) for number in (3, -1, 0, 1)], 1)
            normed = self.comm.add_pairs_(pairs, experts, residual, Norm(weight, 1e-6))
            assert normed is not None
            return torch.cat([normed, residual])
        self.comm.all_reduce_(x, residual)
        return residual

    def check(
        self, kind: str, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, found: torch.Tensor
    ) -> None:
        """`x` and `residual` as they were before."""
        parts = self.host.all_gather(x.cpu())
        assert (
            len(
                {
                    bytes(one.contiguous().view(torch.uint8).numpy().tobytes())
                    for one in self.host.all_gather(found.cpu())
                }
            )
            == 1
        ), (kind, x.shape, x.dtype)
        if kind == "gather":
            assert torch.equal(found.cpu(), parts), (kind, x.shape, x.dtype)
            return
        total = sum_in_order(parts)
        wanted = total if kind == "sum" else residual.cpu() + total
        if found.shape[0] == 2 * x.shape[0]:
            normed, found = found.chunk(2)
            near = Norm(weight, 1e-6)(wanted.to(self.device))
            step = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 1e-5}[x.dtype]
            assert torch.allclose(normed.float(), near.float(), rtol=step, atol=1e-5), (kind, x.shape, x.dtype)
        assert torch.equal(found.cpu(), wanted), (kind, x.shape, x.dtype)


def main() -> None:
    directory, rank, ranks, calls, kinds, seed = Path(sys.argv[1]), *map(int, sys.argv[2:])
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    host = GlooComm(directory, rank, ranks, 60)

    def sums(rooms: list[int], rank: int) -> PeerSums:
        return PeerSums(torch.tensor(rooms, device=device), rank, limits_of(ranks)._replace(most=2**31))

    comm = PeerComm(host, StagedComm(host, lambda: False), CudaDriver(device.index), room_bytes, sums)
    choose, own = random.Random(seed), random.Random(rank)
    every = Calls(comm, host, device, choose, kinds)
    for _ in range(calls):
        kind, arguments = every.make(choose)
        torch.cuda._sleep(own.choice([0, 10**4, 10**6]))  # one rank comes before the other, and the other way round
        every.check(kind, *arguments, every.run(kind, *(one.clone() for one in arguments)))
    for rows in (1024, 4096):  # far more than a room holds, 8 and 32 MiB
        x = torch.full((rows, 4096), 1.0 + rank, device=device, dtype=torch.bfloat16)
        arguments = [x, x.new_full(x.shape, 0.25), torch.ones(4096, device=device, dtype=torch.bfloat16)]
        every.check("add", *arguments, every.run("add", *(one.clone() for one in arguments)))
    many = [every.make(choose) for _ in range(24)]
    inputs = [[one.clone() for one in arguments] for _, arguments in many]
    for (kind, _), arguments in zip(many, inputs, strict=True):
        every.run(kind, *arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for (_, source), arguments in zip(many, inputs, strict=True):
            for one, other in zip(arguments, source, strict=True):
                one.copy_(other)
        found = [every.run(kind, *arguments) for (kind, _), arguments in zip(many, inputs, strict=True)]
    first: list[torch.Tensor] = []
    for replay in range(calls):
        torch.cuda._sleep(own.choice([0, 10**5]))
        graph.replay()
        if replay % 8 == 5:  # rounds are counted on, whoever begins them
            kind, arguments = every.make(choose)
            every.check(kind, *arguments, every.run(kind, *(one.clone() for one in arguments)))
        if replay % 16 == 0:
            torch.cuda.synchronize()
            first = first or [one.clone() for one in found]
            assert all(
                torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(first, found, strict=True)
            ), replay
    torch.cuda.synchronize()
    for (kind, arguments), one in zip(many, found, strict=True):
        every.check(kind, *arguments, one)
    print("well", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
