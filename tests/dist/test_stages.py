"""Stages of a pipeline: what they send each other, by gloo, through the host, and by what stands for NCCL here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroupGloo

from helpers.threads_of_ranks import in_ranks
from pagerunner.dist.gloo import GlooComm, GlooStage
from pagerunner.dist.nccl import NcclStage
from pagerunner.dist.staged import StagedStage
from pagerunner.ops import ahead

DEPTH, STEPS = 2, 9


class FakeNccl:
    """As ProcessGroupNCCL for sends, of which each group has one direction: in one that had both a send would wait for ever."""

    class Options:
        _timeout: Any = None

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        own = ProcessGroupGloo._Options()
        own._devices, own._timeout = [ProcessGroupGloo.create_device(hostname="127.0.0.1")], options._timeout
        self._group, self._rank, self._up = ProcessGroupGloo(store, rank, size, own), rank, set[bool]()

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Any:
        self._up.add(to > self._rank)
        assert len(self._up) == 1
        return self._group.send(tensors, to, tag)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        self._up.add(source < self._rank)
        assert len(self._up) == 1
        return self._group.recv(tensors, source, tag)


def by_nccl(stage: GlooStage, monkeypatch: pytest.MonkeyPatch) -> NcclStage:
    monkeypatch.setitem(vars(torch.distributed), "ProcessGroupNCCL", FakeNccl)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return NcclStage(stage, torch.device("cpu"), ahead.rehearsing)


KINDS: dict[str, Any] = {
    "gloo": lambda stage, _: stage,
    "through the host": lambda stage, _: StagedStage(stage, ahead.rehearsing),
    "nccl": by_nccl,
}


@pytest.mark.parametrize("kind", KINDS)
def test_stages_pass_streams_on_and_tell_tokens_back(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks in each of three stages. The last stage is done before anybody hears its tokens. One rank looks for kernels meanwhile."""

    kept = []  # a rank that ends takes what it has sent with it

    def act(world: GlooComm) -> Any:
        stage = KINDS[kind](GlooStage(world, 2, STEPS), monkeypatch)
        kept.append(stage)
        assert (stage.number, stage.is_first, stage.is_last) == (world.rank // 2, world.rank < 2, world.rank > 3)
        if world.rank == 2 and kind != "gloo":  # which no CPU does
            token = ahead._rehearsing.set(True)
            for call in (stage.receive, stage.send, stage.hear):
                call(torch.zeros(3))
            ahead._rehearsing.reset(token)
        before, found = world.calls, []
        for step in range(STEPS):
            x = torch.full((2, 3), float(10 * step + world.rank % 2), dtype=torch.bfloat16)
            if not stage.is_first:
                stage.receive(x)
            if stage.is_last:
                stage.tell(x[:, 0].long() + 1)
            else:
                stage.send(x * 2)
        for _ in range(0 if stage.is_last else STEPS):
            tokens = torch.zeros(2, dtype=torch.int64)
            stage.hear(tokens)
            found.append(tokens.tolist())
        return found, world.calls - before

    found = in_ranks(6, tmp_path / "ranks", act)
    for rank, (tokens, _) in enumerate(found[:4]):
        assert tokens == [[4 * (10 * step + rank % 2) + 1] * 2 for step in range(STEPS)]
    assert [calls for _, calls in found] == [2 * STEPS] * 2 + [3 * STEPS] * 4, "the watch of ranks sees them"


def test_of_streams_and_tokens_those_of_so_many_steps_are_kept(tmp_path: Path) -> None:
    """And no more. The last of three stages tells two others."""
    kept = []

    def act(world: GlooComm) -> list[int]:
        kept.append(stage := GlooStage(world, 1, DEPTH))
        for _ in range(STEPS):
            x = torch.zeros(1)
            if not stage.is_first:
                stage.receive(x)
            (stage.tell if stage.is_last else stage.send)(x)
            if not stage.is_last:
                stage.hear(x)
        return [len(sent) for sent in stage._sent]

    assert in_ranks(3, tmp_path / "ranks", act) == [[DEPTH, 0], [DEPTH, 0], [0, 2 * DEPTH]]
