"""What NcclComm asks of torch's process group of NCCL, for which one of gloo stands here; the same code runs on devices in tests/gpu."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroupGloo

from helpers.threads_of_ranks import in_ranks
from pagerunner.dist import nccl
from pagerunner.dist.base import Comm, union
from pagerunner.dist.gloo import GlooComm
from pagerunner.dist.nccl import NcclComm
from pagerunner.ops import ahead

CPU = torch.device("cpu")


class FakeNccl:
    """As ProcessGroupNCCL. Each call must be one that blocks its stream; such a call returns None."""

    class Options:
        _timeout: Any = None

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        own = ProcessGroupGloo._Options()
        own._devices, own._timeout = [ProcessGroupGloo.create_device(hostname="127.0.0.1")], options._timeout
        self._group = ProcessGroupGloo(store, rank, size, own)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
        assert not options.asyncOp and all(tensor.is_contiguous() for tensor in tensors)
        self._group.allreduce(tensors, options).wait()

    def _allgather_base(self, found: torch.Tensor, own: torch.Tensor, options: Any) -> None:
        assert not options.asyncOp and found.numel() % own.numel() == 0
        self._group.allgather([list(found.view(-1, own.numel()).unbind(0))], [own]).wait()

    def alltoall_base(self, out: torch.Tensor, own: torch.Tensor, _: list[int], __: list[int], options: Any) -> None:
        assert not options.asyncOp
        self._group.alltoall_base(out, own, [], []).wait()


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(torch.distributed), "ProcessGroupNCCL", FakeNccl)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(nccl, "_WARM_UP_BYTES", (64, 1024))


def test_sums_and_gathers_of_all_ranks(tmp_path: Path) -> None:
    def act(host: GlooComm) -> list[Any]:
        comm = NcclComm(host, CPU, ahead.rehearsing)
        rows = torch.arange(12.0).view(3, 4) + 100 * comm.rank
        columns = rows.T
        comm.all_reduce_(columns)
        empty = torch.empty(0, 4)
        comm.all_reduce_(empty)
        eights = torch.tensor([1.5, comm.rank]).to(torch.float8_e4m3fn)
        gathered = comm.all_gather(eights)
        swapped = comm.all_to_all(torch.tensor([[10.0 * comm.rank + to] for to in range(3)]).to(torch.bfloat16))
        assert swapped.tolist() == [[10.0 * giver + comm.rank] for giver in range(3)]
        return [rows.tolist(), gathered.float().tolist(), comm.all_gather(empty).shape, host.calls]

    first, *others = in_ranks(3, tmp_path / "ranks", act)
    assert first[0] == (3 * torch.arange(12.0).view(3, 4) + 300).tolist()
    assert first[1:3] == [[[1.5, 0], [1.5, 1], [1.5, 2]], (3, 0, 4)]
    assert all(other == first for other in others)
    assert first[3] == 1 + 2 * 3 + 3, "the watch of ranks sees calls"


def test_nothing_is_sent_while_one_rank_looks_which_kernels_it_must_compile(tmp_path: Path) -> None:
    def act(host: GlooComm) -> int:
        comm: Comm = NcclComm(host, CPU, ahead.rehearsing)
        if comm.rank == 1:
            token = ahead._rehearsing.set(True)
            comm.all_reduce_(torch.ones(4))
            comm.all_gather(torch.ones(4))
            comm.all_to_all(torch.ones(2, 2))
            ahead._rehearsing.reset(token)
        x = torch.ones(4)
        comm.all_reduce_(x)
        return int(x[0])

    assert in_ranks(2, tmp_path / "ranks", act) == [2, 2]


def test_ranks_whose_parts_need_other_kernels_warm_up_with_the_same_steps(tmp_path: Path) -> None:
    found = in_ranks(3, tmp_path / "ranks", lambda comm: union(comm, [[1024], [], [96, 1024]][comm.rank]))
    assert found == [[96, 1024]] * 3
