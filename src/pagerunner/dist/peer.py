"""PeerComm: small sums of ranks by a kernel of our own, over memory that all devices of a machine can write; the rest by NCCL.

The memory is one room of fixed size for each rank, taken once before the warm-up, outside the arena. So it stays through sleep, and graphs never
refer to memory of another rank that moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed import PrefixStore

from pagerunner.dist.gloo import GlooComm
from pagerunner.dist.nccl import NcclComm

MOST_BYTES = {2: 2**20, 3: 2**19, 4: 2**18}
"""Largest sums by number of ranks that the kernel makes: each rank sends all of its numbers to each other one. Others are NCCL's."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_GROUP = "pagerunner-ranks"


class Sums(Protocol):
    """One rank's end of the rooms; see PeerSums in `ops/peer_sums.py`."""

    def add_(self, x: torch.Tensor, residual: torch.Tensor | None) -> None:
        """See Comm.all_reduce_."""
        ...


class PeerComm:
    """See Comm. What the kernel can't do is done by `nccl`."""

    def __init__(
        self,
        host: GlooComm,
        nccl: NcclComm,
        device: torch.device,
        room_bytes: Callable[[int], int],
        make_sums: Callable[[torch.Tensor, int], Sums],
    ) -> None:
        """Take the rooms of `room_bytes(ranks)` bytes. `make_sums` gets their addresses, int64 [ranks], and this rank.

        Raises RuntimeError if a device can't reach another one's memory.
        """
        self.rank, self.size, self._host, self._nccl = nccl.rank, nccl.size, host, nccl
        _SymmetricMemory.set_group_info(_GROUP, self.rank, self.size, PrefixStore("peers", host.store))
        self._room = _SymmetricMemory.empty_strided_p2p((room_bytes(self.size),), (1,), torch.uint8, device, _GROUP)
        self._room.zero_()
        torch.cuda.synchronize(device)
        self._handle = _SymmetricMemory.rendezvous(self._room, _GROUP)
        self._sums = make_sums(torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=device), self.rank)
        self._most = MOST_BYTES.get(self.size, 2**17)

    def all_reduce_(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """See Comm."""
        dense = x.is_contiguous() and (residual is None or residual.is_contiguous())
        if not 0 < x.nbytes <= self._most or x.dtype not in _DTYPES or not dense:
            self._nccl.all_reduce_(x, residual)
            return
        if not self._nccl.rehearsing():  # else another rank may not have this call, and would seem to be behind
            self._host.calls += 1
        self._sums.add_(x, residual)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See Comm."""
        return self._nccl.all_gather(x)

    def broadcast_bytes(self, data: bytes | None, root: int = 0) -> bytes:
        """See Comm."""
        return self._nccl.broadcast_bytes(data, root)
