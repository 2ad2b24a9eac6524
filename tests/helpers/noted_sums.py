"""A rank alone whose sums go to nobody, and which notes what it would launch: ranks that launch unlike kernels wait for each other for ever."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from pagerunner.dist.peer import PeerComm
from pagerunner.ops.peer_sums import Limits, PeerSums


class _Kernel:
    def __init__(self, name: str, launched: list[tuple[Any, ...]]) -> None:
        self._name, self._launched = name, launched

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(x: torch.Tensor, out: torch.Tensor, *more: Any, **how: Any) -> None:
            num = next(one for one in more if isinstance(one, int))
            kept = {name: value for name, value in how.items() if name not in ("WAIT", "PDL")}
            self._launched.append((self._name, grid, num, x.dtype, *kept.items()))
            if how.get("GATHER"):
                out.zero_()
            if how.get("NORM"):
                more[1].copy_(out)

        return launch


def noting(rank: int, size: int, limits: Limits) -> tuple[PeerComm, list[tuple[Any, ...]]]:
    """One of several ranks, and the list of its launches: the kernel, its programs, how many numbers, and what it is compiled for."""
    launched: list[tuple[Any, ...]] = []

    def sums(rooms: list[int], rank: int) -> PeerSums:
        end = PeerSums(torch.tensor(rooms), rank, limits)
        end._kernels = SimpleNamespace(
            DTYPES=end._kernels.DTYPES,
            **{name: _Kernel(name, launched) for name in ("peer_words", "peer_units", "peer_bare", "peer_bare_twice")},
        )
        return end

    host: Any = SimpleNamespace(rank=rank, size=size, calls=0)
    answers = iter([b"handle"] * size + [b""] * size)
    host.broadcast_bytes = lambda data, root: next(answers)
    memory: Any = SimpleNamespace(share=lambda _: (8, b"handle"), open_shared=lambda _: 16)
    large: Any = SimpleNamespace(rank=rank, size=size, rehearsing=lambda: False)
    return PeerComm(host, large, memory, lambda _: 64, sums), launched
