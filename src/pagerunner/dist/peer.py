"""PeerComm: sums and gathers of ranks by kernels of our own, over memory that all devices of a machine can write; large ones of more than two ranks by NCCL.

The memory is one room of fixed size for each rank, taken once before the warm-up, outside the arena. So it stays through sleep, and graphs never
refer to memory of another rank that moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from pagerunner.dist.base import Comm, Norm, gathered_bytes
from pagerunner.dist.gloo import GlooComm
from pagerunner.errors import PagerunnerError

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Sums(Protocol):
    """One rank's end of the rooms; see PeerSums in `ops/peer_sums.py`."""

    @property
    def most_bytes(self) -> int:
        """The largest sum that it makes."""

    @property
    def most_gathered(self) -> int:
        """The largest part of a rank that it gathers."""

    def add_(self, x: torch.Tensor, residual: torch.Tensor | None, /) -> None:
        """See Comm.all_reduce_."""

    def takes_norm(self, x: torch.Tensor) -> bool:
        """See Comm."""

    def add_norm_(self, x: torch.Tensor, residual: torch.Tensor, norm: Any, /) -> torch.Tensor:
        """See Comm. Of the norm it needs what `Norm` says."""

    def takes_parts(self, tokens: int, features: int, dtype: torch.dtype) -> bool:
        """See Comm."""

    def add_parts_(self, parts: torch.Tensor, residual: torch.Tensor, norm: Any, /) -> torch.Tensor | None:
        """See Comm."""

    def add_pairs_(
        self, pairs: torch.Tensor, experts: torch.Tensor, residual: torch.Tensor, norm: Any, /
    ) -> torch.Tensor | None:
        """See Comm."""

    def gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """See Comm.all_gather."""


class Large(Comm, Protocol):
    """Who makes what the kernel doesn't."""

    rehearsing: Callable[[], bool]


class SharedMemory(Protocol):
    """Device memory that other processes can write; see CudaDriver."""

    def share(self, size: int) -> tuple[int, bytes]:
        """Take `size` bytes of zeros: their address, and the handle that opens them elsewhere."""

    def open_shared(self, handle: bytes) -> int:
        """The address of another process's memory here. Raises RuntimeError if this device can't reach it."""

    def close_shared(self, address: int) -> None:
        """Take another process's memory away from here."""

    def unshare(self, address: int) -> None:
        """Give up what was shared. Nobody has it open any more."""


class NoRoomsError(PagerunnerError):
    """Ranks can't write into each other's memory. All of them raise it, so that all go another way."""


def take_rooms(host: GlooComm, memory: SharedMemory, num_bytes: int) -> list[int]:
    """Take a room for each rank: the addresses of all rooms as this rank's device has them, in the order of the ranks.

    Raises NoRoomsError, on all ranks or on none; nothing of the rooms is left then.
    """
    own, handle, fault = 0, b"", ""
    rooms: dict[int, int] = {}
    try:
        own, handle = memory.share(num_bytes)
    except Exception as error:  # whatever it is, the others are told, or they would wait for what this rank doesn't say
        fault = str(error) or repr(error)
    handles = gathered_bytes(host, handle)
    try:
        for rank, theirs in enumerate(handles if all(handles) else []):
            rooms[rank] = own if rank == host.rank else memory.open_shared(theirs)
    except Exception as error:
        fault = str(error) or repr(error)
    faults = [one.decode() for one in gathered_bytes(host, fault.encode())]
    if not any(faults):
        return list(rooms.values())
    for rank in rooms.keys() - {host.rank}:
        memory.close_shared(rooms[rank])
    gathered_bytes(host, b"")  # now nobody has this rank's room open
    if handle:
        memory.unshare(own)
    rank, why = next((rank, one) for rank, one in enumerate(faults) if one)
    raise NoRoomsError(f"rank {rank} of {host.size} can't share memory with the others ({why}).")


class PeerComm(Comm):
    """See Comm. What the kernels can't do is done by `large`. Calls return at once, and wait on the device for as long as it takes."""

    def __init__(
        self,
        host: GlooComm,
        large: Large,
        memory: SharedMemory,
        room_bytes: Callable[[int], int],
        make_sums: Callable[[list[int], int], Sums],
    ) -> None:
        """Take the rooms of `room_bytes(ranks)` bytes. `make_sums` gets their addresses, in the order of the ranks, and this rank.

        Raises NoRoomsError on all ranks if a device can't reach another one's memory.
        """
        self.rank, self.size, self._host, self._large = large.rank, large.size, host, large
        self._sums = make_sums(take_rooms(host, memory, room_bytes(self.size)), self.rank)
        self._most, self._most_gathered = self._sums.most_bytes, self._sums.most_gathered

    def all_reduce_(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """See Comm."""
        if not x.numel():
            return
        if not self._serves(x):
            self._large.all_reduce_(x, residual)
            return
        dense = x.contiguous()
        direct = residual is not None and residual.is_contiguous()
        self._count()
        self._sums.add_(dense, residual if direct else None)
        if residual is not None and not direct:
            residual.add_(dense)
        elif residual is None and dense is not x:
            x.copy_(dense)

    def takes_norm(self, x: torch.Tensor) -> bool:
        """See Comm."""
        return self._serves(x) and x.is_contiguous() and self._sums.takes_norm(x)

    def add_norm_(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        """See Comm."""
        if not self.takes_norm(x) or not residual.is_contiguous():
            return super().add_norm_(x, residual, norm)
        self._count()
        return self._sums.add_norm_(x, residual, norm)

    def takes_parts(self, tokens: int, features: int, dtype: torch.dtype) -> bool:
        """See Comm."""
        return self._sums.takes_parts(tokens, features, dtype)

    def add_parts_(self, parts: torch.Tensor, residual: torch.Tensor, norm: Norm | None = None) -> torch.Tensor | None:
        """See Comm. `residual` is dense, as the stream is."""
        self._count()
        return self._sums.add_parts_(parts, residual, norm)

    def add_pairs_(
        self, pairs: torch.Tensor, experts: torch.Tensor, residual: torch.Tensor, norm: Norm | None = None
    ) -> torch.Tensor | None:
        """See Comm. `residual` is dense, as the stream is."""
        self._count()
        return self._sums.add_pairs_(pairs, experts, residual, norm)

    def _serves(self, x: torch.Tensor) -> bool:
        """Whether the kernel makes a sum of such numbers."""
        return 0 < x.nbytes <= self._most and x.dtype in _DTYPES

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See Comm."""
        if x.nbytes > self._most_gathered:
            return self._large.all_gather(x)
        found = x.new_empty((self.size, *x.shape))
        if not x.numel():
            return found
        self._count()
        self._sums.gather(x.contiguous(), found)
        return found

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """See Comm. Of two ranks each gets all of the other's numbers, which are twice as many bytes, and no more calls than one."""
        if self.size != 2 or x.nbytes > self._most_gathered:
            return self._large.all_to_all(x)
        return self.all_gather(x)[:, self.rank].contiguous()

    def broadcast_bytes(self, data: bytes | None, root: int = 0) -> bytes:
        """See Comm."""
        return self._large.broadcast_bytes(data, root)

    def _count(self) -> None:
        if not self._large.rehearsing():  # else another rank may not have this call, and would seem to be behind
            self._host.calls += 1
