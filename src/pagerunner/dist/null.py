"""NullComm: a group of one rank."""

from __future__ import annotations

import torch

from pagerunner.dist.base import Comm


class NullComm(Comm):
    """Nothing is sent, and nothing changes. See Comm for the methods."""

    rank = 0
    size = 1

    def all_reduce_(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """See Comm."""
        if residual is not None:
            residual.add_(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See Comm. A view of `x`."""
        return x.unsqueeze(0)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """See Comm. `x` itself."""
        return x

    def broadcast_bytes(self, data: bytes | None, root: int = 0) -> bytes:
        """See Comm."""
        if data is None or root:
            raise ValueError(f"a group of one rank has no rank {root} with bytes")
        return data
