"""Teams of ranks on CPUs whose steps run in graphs: sums and gathers are operations of torch here, which helpers/graphs.py records."""

from __future__ import annotations

from typing import Any

import torch

from helpers.device import as_on_cuda
from pagerunner.config import EngineArgs
from pagerunner.dist.base import Comm
from pagerunner.dist.gloo import GlooComm
from pagerunner.engine.core.core import EngineCore
from pagerunner.engine.core.executors.process import load_ranks
from pagerunner.engine.startup.build import build_on
from pagerunner.engine.startup.resolve import Resolved, resolve
from pagerunner.engine.worker.worker import load_worker

_comms: list[Comm] = []


class RecordedComm:
    """Ranks whose calls graphs can record."""

    def __init__(self, own: Comm) -> None:
        self.rank, self.size, self.broadcast_bytes = own.rank, own.size, own.broadcast_bytes
        self._number = len(_comms)
        _comms.append(own)

    def all_reduce_(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """See Comm."""
        torch.ops.pagerunner_teams.sum(x, self._number)
        if residual is not None:
            residual.add_(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See Comm."""
        return torch.ops.pagerunner_teams.gathered(x, self._number)  # type: ignore[no-any-return]


def _sum(x: torch.Tensor, comm: int) -> None:
    _comms[comm].all_reduce_(x)


def _gathered(x: torch.Tensor, comm: int) -> torch.Tensor:
    return _comms[comm].all_gather(x)


_ops = torch.library.Library(
    "pagerunner_teams", "DEF"
)  # `custom_op` would import torch's compiler, 1.4 s of computing in each rank
_ops.define("sum(Tensor(a!) x, int comm) -> ()")
_ops.define("gathered(Tensor x, int comm) -> Tensor")
_ops.impl("sum", _sum, "CPU")
_ops.impl("gathered", _gathered, "CPU")


def load(resolved: Resolved, progress: Any, *, comm: Comm, stage: None, teams: Comm) -> Any:
    """As `load_worker`."""
    own = RecordedComm(comm) if isinstance(comm, GlooComm) else comm
    with as_on_cuda():
        return load_worker(resolved, progress, comm=own, teams=RecordedComm(teams))


def build(args: EngineArgs) -> EngineCore:
    """A core over such ranks."""
    resolved = resolve(args)
    return build_on(resolved, load_ranks(resolved, loader="helpers.graph_teams:load"))
