"""GlooComm: ranks on CPUs of one machine, or of several.

Ranks of one machine find each other by a file in a directory that only this user may read, and gloo connects them over loopback. Those of
several find each other at rank 0, and connect by their machines' addresses. The kernel chooses all ports.
No process group of torch's is made the default one, so several groups may stand beside each other in a process.

Ranks that call with different shapes are a bug of ours. Gloo ends the process then (SIGABRT), and says which sizes met.
"""

from __future__ import annotations

import datetime
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions
from torch.distributed import BroadcastOptions, FileStore, PrefixStore, ProcessGroupGloo, Store, TCPStore

from pagerunner.children import LOOPBACK, host_ip
from pagerunner.dist.base import Comm, CommError, sum_in_order

FOR_EVER_SECONDS = 86_400.0
_FOR_EVER = datetime.timedelta(seconds=FOR_EVER_SECONDS)
STREAM, TOKENS = 0, 1  # tags
_OptionsT = TypeVar("_OptionsT", AllgatherOptions, AllToAllOptions, BroadcastOptions)


def gloo_group(store: Store, rank: int, size: int, seconds: float, address: str = LOOPBACK) -> ProcessGroupGloo:
    """Join a group that meets in `store`, with a socket at `address`, on a port that the kernel chooses. Raises RuntimeError."""
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = datetime.timedelta(seconds=seconds)
    return ProcessGroupGloo(store, rank, size, options)


def listen(host: str, seconds: float) -> tuple[str, Store]:
    """Rank 0's store, where ranks of several machines meet, and its address: this machine's `host`, on a port that the kernel chooses.

    Raises OSError, RuntimeError.
    """
    listener = socket.create_server((host, 0))
    address = f"{host}:{listener.getsockname()[1]}"
    return address, joined(address, seconds, master_listen_fd=listener.detach())


def joined(address: str, seconds: float, **own: int) -> Store:
    """The store at this address. Raises RuntimeError. `own`: this process has it."""
    host, _, port = address.rpartition(":")
    limit = datetime.timedelta(seconds=seconds)
    return TCPStore(host, int(port), is_master=bool(own), timeout=limit, wait_for_workers=False, **own)


class GlooComm(Comm):
    """See Comm."""

    def __init__(self, where: Path | Store, rank: int, size: int, seconds: float, name: str = "ranks") -> None:
        """Meet the other ranks in a directory, which was empty before its groups, or in a store, which other machines reach.

        Each group has a `name`. No sum waits longer than `seconds`, which may be changed between two.

        Raises:
            CommError: not all of the `size` ranks have come in time.
            ValueError: the directory is open to other users, or `rank` isn't one of `size`.
        """
        if not 0 <= rank < size:
            raise ValueError(f"there is no rank {rank} among {size}")
        if isinstance(where, Path) and (mode := where.stat().st_mode & 0o777) & 0o077:
            raise ValueError(f"{where} is open to other users (mode {mode:o}), who could take a rank's place")
        self.rank, self.size, self.seconds = rank, size, seconds
        self.calls = 0
        """How many calls this rank has begun. A rank that has begun fewer than the others is the one that they wait for."""
        self.waits = False
        """Whether this rank is in a call, and so may wait for others."""
        address = LOOPBACK if isinstance(where, Path) else host_ip()
        self.store: Store = FileStore(str(where / name), size) if isinstance(where, Path) else PrefixStore(name, where)
        self.store.set_timeout(datetime.timedelta(seconds=seconds))
        with self._told("meeting the others"):
            self._group = gloo_group(self.store, rank, size, seconds, address)

    def all_reduce_(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """See Comm. Each rank gets all parts and adds them up itself."""
        total = sum_in_order(self._gathered(x, "all_reduce"))
        x.copy_(total) if residual is None else residual.add_(total)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See Comm."""
        return self._gathered(x, "all_gather")

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """See Comm."""
        found = x.new_empty(x.shape)
        if x.numel():
            with self._told("all_to_all"):
                self._group.alltoall_base(
                    _bytes(found), _bytes(x.contiguous()), [], [], self._timed(AllToAllOptions())
                ).wait()
        return found

    def broadcast_bytes(self, data: bytes | None, root: int = 0) -> bytes:
        """See Comm."""
        if (data is not None) != (self.rank == root):
            raise ValueError(
                f"rank {self.rank} has {'bytes' if data is not None else 'no bytes'}, and rank {root} tells them"
            )
        size = torch.tensor([len(data or b"")])
        self._broadcast(size, root)
        held = torch.empty(int(size), dtype=torch.uint8)
        if data:
            held.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        if len(held):
            self._broadcast(held, root)
        return data if data is not None else held.numpy().tobytes()

    def send(self, x: torch.Tensor, to: int, tag: int) -> Any:
        """Begin to give `x` to a rank. What is returned is kept, with `x`, until `finish` is called with it."""
        with self._told("send"):
            return self._group.send([_bytes(x)], to, tag)

    def finish(self, sent: Any) -> None:
        """Wait until what was sent has been received."""
        with self._told("send"):
            sent.wait()

    def receive(self, x: torch.Tensor, source: int, tag: int) -> None:
        """Fill `x` with what a rank has sent with this tag. Waits for as long as that rank is there."""
        with self._told("receive"):
            self._group.recv([_bytes(x)], source, tag).wait(_FOR_EVER)

    def _gathered(self, x: torch.Tensor, name: str) -> torch.Tensor:
        found = x.new_empty((self.size, *x.shape))
        if x.numel():
            own = x.contiguous().reshape(-1).view(torch.uint8)  # bytes: gloo doesn't know all dtypes
            rows = found.view(self.size, -1).view(torch.uint8)
            with self._told(name):
                self._group.allgather([list(rows.unbind(0))], [own], self._timed(AllgatherOptions())).wait()
        return found

    def _broadcast(self, x: torch.Tensor, root: int) -> None:
        options = self._timed(BroadcastOptions())
        options.rootRank, options.rootTensor = root, 0
        with self._told("broadcast"):
            self._group.broadcast([x], options).wait()

    def _timed(self, options: _OptionsT) -> _OptionsT:
        options.timeout = datetime.timedelta(seconds=self.seconds)
        return options

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Errors of gloo as sentences with the rank, the call and the limit."""
        self.calls += 1
        self.waits = True
        try:
            yield
        except RuntimeError as error:
            late = "time" in str(error).lower() and "out" in str(error).lower()
            why = f"waited {self.seconds:g} seconds for another rank" if late else "lost another rank"
            reason = str(error).splitlines()[0].rpartition("] ")[2]
            raise CommError(f"Rank {self.rank} of {self.size} has {why} in {what} ({reason}).") from error
        finally:
            self.waits = False


class GlooStage:
    """See Stage. What has been sent is kept until `depth` steps later the next one takes its place."""

    in_graphs = False

    def __init__(self, world: GlooComm, ranks: int, depth: int) -> None:
        """Each stage has so many `ranks`. At most `depth` steps are under way at once: so of the step so long ago all has been received."""
        self.world, self.ranks, self.depth = world, ranks, depth
        self.number, self.count = world.rank // ranks, world.size // ranks
        self.is_first, self.is_last = self.number == 0, self.number == self.count - 1
        self._most = (depth, depth * (self.count - 1))
        self._sent: tuple[deque[tuple[Any, torch.Tensor]], deque[tuple[Any, torch.Tensor]]] = (deque(), deque())
        """By tag what is kept, `_most` at most."""

    def begin_layer(self) -> None:
        """See Stage."""
        self.world.calls += 1

    def send(self, x: torch.Tensor) -> None:
        """See Stage."""
        self._give(x, self.world.rank + self.ranks, STREAM)

    def receive(self, x: torch.Tensor) -> None:
        """See Stage."""
        self._take(x, self.world.rank - self.ranks, STREAM)

    def tell(self, tokens: torch.Tensor) -> None:
        """See Stage."""
        for rank in range(self.world.rank % self.ranks, self.world.rank, self.ranks):
            self._give(tokens, rank, TOKENS)

    def hear(self, tokens: torch.Tensor) -> None:
        """See Stage."""
        self._take(tokens, self.world.size - self.ranks + self.world.rank % self.ranks, TOKENS)

    def let_go(self) -> None:
        """See Stage. Tokens stay, which other stages may not have heard yet: some KiB."""
        while self._sent[STREAM]:
            self.world.finish(self._sent[STREAM].popleft()[0])

    def _give(self, x: torch.Tensor, to: int, tag: int) -> None:
        sent = self._sent[tag]
        if len(sent) == self._most[tag]:
            self.world.finish(sent.popleft()[0])
        sent.append((self.world.send(x, to, tag), x))

    def _take(self, x: torch.Tensor, source: int, tag: int) -> None:
        self.world.receive(x, source, tag)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """Gloo doesn't know all dtypes."""
    return x.view(-1).view(torch.uint8)
