"""Sums of ranks by writing into each other's memory: here all rooms are one process's, and a launch sends before another one takes."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers import interpreter_floats
from pagerunner.dist import peer
from pagerunner.dist.base import sum_in_order

pytest.importorskip("triton")
from pagerunner.ops import peer_sums
from pagerunner.ops.peer_sums import PeerSums, room_bytes


interpreter_floats.install()


@pytest.mark.parametrize(("ranks", "calls"), [(2, 8), (3, 5), (4, 4)])
def test_sums_of_mixed_sizes_are_the_twins_bits(ranks: int, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few programs, so that a program has two rounds; rooms keep what earlier calls have left."""
    monkeypatch.setattr(peer_sums, "_PROGRAMS", 3)
    rooms = [torch.zeros(room_bytes(ranks), dtype=torch.uint8) for _ in range(ranks)]
    peers = torch.tensor([room.data_ptr() for room in rooms])
    ends = [PeerSums(peers, rank) for rank in range(ranks)]
    choose = random.Random(ranks)
    for call in range(calls):
        torch.manual_seed(call)
        dtype = choose.choice([torch.bfloat16, torch.float16, torch.float32])
        shape = choose.choice([(1,), (3, 40), (2, 1024), (5, 1000), (17, 256), (1, 5000)])
        x = (torch.randn(ranks, *shape) * 10.0 ** torch.arange(ranks).view(-1, *[1] * len(shape))).to(dtype)
        residual = torch.randn(shape).to(dtype) if choose.random() < 0.5 else None
        total = sum_in_order(x)
        wanted = total if residual is None else residual + total
        parts = list(x.clone().unbind(0))
        residuals = [None if residual is None else residual.clone() for _ in range(ranks)]
        for phase in ({"take": False}, {"send": False}):
            for end, part, own in zip(ends, parts, residuals, strict=True):
                end.add_(part, own, **phase)
        for part, own in zip(parts, residuals, strict=True):
            assert torch.equal(part if own is None else own, wanted), (call, shape, dtype)
        for room in rooms:  # on devices a rank waits until all flags of a program are its epoch
            flags = room[-4 * 3 * ranks :].view(torch.int32).view(3, ranks)
            assert torch.equal(flags, ends[0]._epochs[:, None].expand(3, ranks))
    assert all(end._epochs.tolist() == ends[0]._epochs.tolist() for end in ends)
    assert ends[0]._epochs[0] > calls, "a program has had several rounds"


def test_what_the_kernel_can_not_do_is_left_to_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}

    class Memory:
        @staticmethod
        def set_group_info(name: str, rank: int, size: int, store: object) -> None:
            made["group"] = (name, rank, size)

        @staticmethod
        def empty_strided_p2p(size: tuple[int], stride: tuple[int], dtype: Any, device: Any, group: str) -> torch.Tensor:
            return torch.ones(size, dtype=dtype)

        @staticmethod
        def rendezvous(room: torch.Tensor, group: str) -> Any:
            assert not room.any(), "rooms are zero before others may write"
            return SimpleNamespace(buffer_ptrs=[4096, 8192])

    done: list[tuple[str, int]] = []
    named = lambda name: SimpleNamespace(  # noqa: E731
        rank=1, size=2, add_=lambda x, _: done.append((name, x.nbytes)), all_reduce_=lambda x, _: done.append((name, x.nbytes))
    )

    def sums(peers: torch.Tensor, rank: int) -> Any:
        assert (peers.tolist(), rank) == ([4096, 8192], 1)
        return named("peers")

    monkeypatch.setattr(peer, "_SymmetricMemory", Memory)
    monkeypatch.setattr(peer, "PrefixStore", lambda name, store: store)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    host: Any = SimpleNamespace(store=None, calls=0)
    looking = [False]
    nccl: Any = named("nccl")
    nccl.rehearsing = lambda: looking[0]
    comm = peer.PeerComm(host, nccl, torch.device("cpu"), lambda ranks: 64 * ranks, sums)
    assert made["group"] == ("pagerunner-ranks", 1, 2)
    most = peer.MOST_BYTES[2]
    for x, residual in (
        (torch.empty(most // 2, dtype=torch.bfloat16), None),
        (torch.empty(most // 2 + 1, dtype=torch.bfloat16), None),
        (torch.empty(4, 4), torch.empty(4, 4).T),
        (torch.empty(4, 4).T, None),
        (torch.empty(4, dtype=torch.float64), None),
        (torch.empty(0, 4), None),
        (torch.empty(4, 4), torch.empty(4, 4)),
    ):
        comm.all_reduce_(x, residual)
    names = ["peers", "nccl", "nccl", "nccl", "nccl", "nccl", "peers"]
    assert [name for name, _ in done] == names and host.calls == names.count("peers")
    looking[0] = True
    comm.all_reduce_(torch.empty(4, 4))
    assert len(done) == len(names) + 1 and host.calls == names.count("peers"), "another rank may have nothing to compile"
