"""StagedComm and StagedStage: ranks that share one CUDA device. What they send goes through the host."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pagerunner.dist.base import Comm
from pagerunner.dist.gloo import GlooComm, GlooStage


class StagedComm(Comm):
    """See Comm. Each call waits for the device, so no graph can record one. NCCL has no ranks that share a device."""

    def __init__(self, host: GlooComm, rehearsing: Callable[[], bool]) -> None:
        """What is sent goes by `host`. Nothing is sent while `rehearsing`; see NcclComm."""
        self.rank, self.size, self._host = host.rank, host.size, host
        self.rehearsing = rehearsing

    def all_reduce_(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """See Comm."""
        if self.rehearsing():
            return
        total = x.cpu()
        self._host.all_reduce_(total)
        (x.copy_ if residual is None else residual.add_)(total.to(x.device))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See Comm."""
        if self.rehearsing():
            return x.new_empty((self.size, *x.shape))
        return self._host.all_gather(x.cpu()).to(x.device)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """See Comm."""
        return x.new_empty(x.shape) if self.rehearsing() else self._host.all_to_all(x.cpu()).to(x.device)

    def broadcast_bytes(self, data: bytes | None, root: int = 0) -> bytes:
        """See Comm."""
        return self._host.broadcast_bytes(data, root)


class StagedStage(GlooStage):
    """See Stage, and StagedComm."""

    def __init__(self, host: GlooStage, rehearsing: Callable[[], bool]) -> None:
        """The stage of `host`."""
        super().__init__(host.world, host.ranks, host.depth)
        self.rehearsing = rehearsing

    def _give(self, x: torch.Tensor, to: int, tag: int) -> None:
        if not self.rehearsing():
            super()._give(x.cpu(), to, tag)

    def _take(self, x: torch.Tensor, source: int, tag: int) -> None:
        if not self.rehearsing():
            there = torch.empty_like(x, device="cpu")
            super()._take(there, source, tag)
            x.copy_(there)
