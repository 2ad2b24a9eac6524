"""NcclComm and NcclStage: ranks on CUDA devices, of one machine or several, each on the device of its own number.

torch's process group of NCCL makes the calls. They run on the stream that is current, so CUDA graphs record them as they record kernels.
Nothing is taken down at the end: the end of a communicator waits for the other ranks, and for graphs. A rank leaves by `os._exit`.
"""

from __future__ import annotations

import datetime
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions
from torch.distributed import PrefixStore, Store

from pagerunner.dist.base import Comm
from pagerunner.dist.gloo import STREAM, TOKENS, GlooComm, GlooStage
from pagerunner.dist.settings import nccl_settings

_WARM_UP_BYTES = (2**10, 2**16, 2**20, 2**24)
"""NCCL takes memory when it first uses an algorithm, which it chooses by size."""


@contextmanager
def nccl_environment() -> Iterator[None]:
    """What NCCL is told stands in the environment inside; afterwards it is the user's again. NCCL reads it at a group's first call."""
    added = {name: value for name, value in nccl_settings().items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def nccl_group(store: Store, rank: int, size: int, seconds: float) -> Any:
    """Join a group that meets in `store`, each rank with its current device. The environment has `nccl_settings`. Raises RuntimeError."""
    nccl: Any = vars(torch.distributed)["ProcessGroupNCCL"]  # builds of torch without CUDA have none
    options = nccl.Options()
    options._timeout = datetime.timedelta(seconds=seconds)
    return nccl(store, rank, size, options)


class NcclComm(Comm):
    """See Comm. Sums of two ranks are made in float32 and rounded once; with more ranks NCCL rounds after each addition.

    While kernels are compiled ahead (`ops/ahead.py`) nothing is sent, as another rank may have no need to compile any.
    """

    def __init__(self, host: GlooComm, device: torch.device, rehearsing: Callable[[], bool]) -> None:
        """Join the ranks of `host`, by which bytes go, each with its own `device`. Nothing is sent while `rehearsing`.

        Makes a call of each kind and size, so that its memory is taken. Raises RuntimeError as NCCL does.
        """
        self.rank, self.size, self._host = host.rank, host.size, host
        self.rehearsing = rehearsing
        self._group = _group(host, "nccl")
        self._sum, self._gather, self._exchange = AllreduceOptions(), AllgatherOptions(), AllToAllOptions()
        self._sum.asyncOp = self._gather.asyncOp = self._exchange.asyncOp = False  # on the current stream
        for num_bytes in _WARM_UP_BYTES:
            x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device)
            self.all_reduce_(x)
            self.all_gather(x[: x.numel() // self.size])
            self.all_to_all(x[: x.numel() // self.size * self.size].view(self.size, -1))
        torch.cuda.synchronize(device)

    def all_reduce_(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """See Comm."""
        if self.rehearsing() or not x.numel():
            return
        self._host.calls += 1
        whole = x.contiguous()
        self._group.allreduce([whole], self._sum)
        if residual is not None:
            residual.add_(whole)
        elif whole.data_ptr() != x.data_ptr():
            x.copy_(whole)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See Comm."""
        found = x.new_empty((self.size, *x.shape))
        if x.numel() and not self.rehearsing():
            self._host.calls += 1
            own = x.contiguous().view(-1).view(torch.uint8)  # bytes: NCCL doesn't know all dtypes
            self._group._allgather_base(found.view(-1).view(torch.uint8), own, self._gather)
        return found

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """See Comm."""
        found = x.new_empty(x.shape)
        if x.numel() and not self.rehearsing():
            self._host.calls += 1
            own, out = (one.view(-1).view(torch.uint8) for one in (x.contiguous(), found))
            self._group.alltoall_base(out, own, [], [], self._exchange)
        return found

    def broadcast_bytes(self, data: bytes | None, root: int = 0) -> bytes:
        """See Comm. From host to host."""
        return self._host.broadcast_bytes(data, root)


class NcclStage(GlooStage):
    """See Stage. Tokens go through a group of their own: in one group a send would wait for what is sent the other way.

    While kernels are compiled ahead nothing is sent; see NcclComm.
    """

    in_graphs = True

    def __init__(self, host: GlooStage, device: torch.device, rehearsing: Callable[[], bool]) -> None:
        """The stage of `host`. Sends something each way, as NCCL connects two ranks when they first speak, which no graph can record."""
        super().__init__(host.world, host.ranks, host.depth)
        self._rehearsing = rehearsing
        self._groups = [_group(host.world, name) for name in ("stream", "tokens")]
        self._told: deque[tuple[Any, torch.Tensor]] = deque(maxlen=self._most[TOKENS])
        x = torch.zeros(2, dtype=torch.int64, device=device)
        if not self.is_first:
            self.receive(x)
        if not self.is_last:
            self.send(x)
            self.hear(x)
        else:
            self.tell(x)
        torch.cuda.synchronize(device)

    def _give(self, x: torch.Tensor, to: int, tag: int) -> None:
        if self._rehearsing():
            return
        self.world.calls += 1
        sent = self._groups[tag].send([x.view(-1).view(torch.uint8)], to, tag)
        if tag == STREAM:
            sent.wait()  # the stream of kernels waits, and not the host: a graph ends with what it has begun
        else:
            self._told.append((sent, x))

    def _take(self, x: torch.Tensor, source: int, tag: int) -> None:
        if not self._rehearsing():
            self.world.calls += 1
            self._groups[tag].recv([x.view(-1).view(torch.uint8)], source, tag).wait()


def _group(host: GlooComm, name: str) -> Any:
    return nccl_group(PrefixStore(name, host.store), host.rank, host.size, host.seconds)
