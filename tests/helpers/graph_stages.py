"""Stages on CPUs whose steps run in graphs: what they send and receive is an operation of torch here, which helpers/graphs.py records."""

from __future__ import annotations

from typing import Any

import torch

from helpers.device import as_on_cuda
from pagerunner.config import EngineArgs
from pagerunner.dist.base import Comm, Stage
from pagerunner.dist.gloo import GlooStage
from pagerunner.engine.core.core import EngineCore
from pagerunner.engine.core.executors.process import load_ranks
from pagerunner.engine.startup.build import build_on
from pagerunner.engine.startup.resolve import Resolved, resolve
from pagerunner.engine.worker.worker import load_worker

_stages: list[GlooStage] = []


def _send(x: torch.Tensor) -> torch.Tensor:
    GlooStage.send(_stages[0], x.clone())  # as on a device, the next replay comes behind the send
    return torch.empty(0)


def _receive(x: torch.Tensor) -> None:
    GlooStage.receive(_stages[0], x)


_ops = torch.library.Library(
    "pagerunner_stages", "DEF"
)  # `custom_op` would import torch's compiler, 1.4 s of computing in each rank
_ops.define("send(Tensor x) -> Tensor")
_ops.define("receive(Tensor(a!) x) -> ()")
_ops.impl("send", _send, "CPU")
_ops.impl("receive", _receive, "CPU")


class GraphStage(GlooStage):
    """A stage that graphs can record."""

    in_graphs = True

    def send(self, x: torch.Tensor) -> None:
        torch.ops.pagerunner_stages.send(x)

    def receive(self, x: torch.Tensor) -> None:
        torch.ops.pagerunner_stages.receive(x)


def load(resolved: Resolved, progress: Any, *, comm: Comm, stage: Stage, teams: None) -> Any:
    """As `load_worker`."""
    assert isinstance(stage, GlooStage)
    _stages.append(GraphStage(stage.world, stage.ranks, stage.depth))  # type: ignore[arg-type]
    with as_on_cuda():
        return load_worker(resolved, progress, comm=comm, stage=_stages[0])


def build(args: EngineArgs) -> EngineCore:
    """A core over such stages."""
    resolved = resolve(args)
    return build_on(resolved, load_ranks(resolved, loader="helpers.graph_stages:load"))
