"""Sums of ranks by a kernel, over rooms that all devices of a machine can write."""

from __future__ import annotations

import importlib

import torch

_PROGRAMS, _SLOT_BYTES = 128, 16 * 2**10
ONCE_BYTES = {4: 2**18}
"""Largest sums by number of ranks in which each rank sends all of its numbers to each other one; larger ones go in two rounds. Others always go in
one: two ranks would send as much in two."""


def room_bytes(size: int) -> int:
    """Of a rank's room: slots by epoch, program and sender, then a flag for each program and sender."""
    return (2 * _SLOT_BYTES + 4) * _PROGRAMS * size


class PeerSums:
    """A rank's end of the rooms. `peers` int64 [size] are the addresses of all ranks' rooms, as this rank's device has them.

    A room is zero before the first sum. All ranks make the same calls in the same order, on one stream each.
    """

    def __init__(self, peers: torch.Tensor, rank: int) -> None:
        kernels = importlib.import_module("pagerunner.ops.kernels.peer_sum")
        self._kernel, self._twice_kernel = kernels.peer_sum, kernels.peer_sum_twice
        self._peers, self._rank, self._size = peers, rank, peers.shape[0]
        self._epochs = torch.zeros(_PROGRAMS, dtype=torch.int32, device=peers.device)

    def add_(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        *,
        send: bool = True,
        relay: bool = True,
        take: bool = True,
    ) -> None:
        """See Comm.all_reduce_. Sums are made in the order of the ranks in float32, and are rounded once.

        Tests of one process first `send` of all ranks, then `relay` of all, and then `take` of all.
        """
        out, add = x if residual is None else residual, residual is not None
        part = max(512, 1 << (-(-x.numel() // (_PROGRAMS * self._size)) - 1).bit_length())
        if x.nbytes > ONCE_BYTES.get(self._size, x.nbytes) and part * x.itemsize <= _SLOT_BYTES:
            self._run_twice(x, out, part, ADD=add, SEND=send, RELAY=relay, TAKE=take)
        elif send or take:
            self._run(x, out, ADD=add, GATHER=False, SEND=send, TAKE=take)

    def gather(self, x: torch.Tensor, out: torch.Tensor, *, send: bool = True, take: bool = True) -> None:
        """See Comm.all_gather. `out` is [size, *x.shape], of any dtype."""
        words = torch.int32 if x.nbytes % 4 == 0 else torch.uint8
        x, out = (one.view(-1).view(torch.uint8).view(words) for one in (x, out))
        self._run(x, out, ADD=False, GATHER=True, SEND=send, TAKE=take)

    def _run(self, x: torch.Tensor, out: torch.Tensor, **kind: bool) -> None:
        num = x.numel()
        chunk = 1024 if num <= 64 * 1024 else 4096
        self._kernel[(min(_PROGRAMS, -(-num // chunk)),)](
            x, out, self._peers, self._epochs, num, self._rank,
            N=self._size, PADDED=1 << (self._size - 1).bit_length(), CHUNK=chunk, PROGRAMS=_PROGRAMS, SLOT=_SLOT_BYTES // x.itemsize,
            FLAGS=2 * _SLOT_BYTES * _PROGRAMS * self._size, WAIT=x.is_cuda, num_warps=4 if chunk == 1024 else 16, **kind,
        )  # fmt: skip

    def _run_twice(self, x: torch.Tensor, out: torch.Tensor, part: int, **kind: bool) -> None:
        num = x.numel()
        self._twice_kernel[(-(-num // (part * self._size)),)](
            x, out, self._peers, self._epochs, num, self._rank, N=self._size, PART=part, PROGRAMS=_PROGRAMS, SLOT=_SLOT_BYTES // x.itemsize,
            FLAGS=2 * _SLOT_BYTES * _PROGRAMS * self._size, WAIT=x.is_cuda, num_warps=max(4, part // 256), **kind,
        )  # fmt: skip
