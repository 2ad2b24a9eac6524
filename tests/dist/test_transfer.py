"""The way of new weights: memory is taken before the first piece, and who leaves ends what the trainer waits for."""

from __future__ import annotations

import contextlib
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.patience import patient
from helpers.scripts import script
from pagerunner import children
from pagerunner.dist import settings, transfer
from pagerunner.dist.transfer import TransferGroup
from pagerunner.errors import CapacityError, InvalidRequestError

CPU = torch.device("cpu")


def joined() -> tuple[Any, TransferGroup]:
    """A trainer, and the one rank of its server."""
    ranks: list[TransferGroup] = []

    def call(path: str, body: Any = None, method: str = "POST") -> Any:
        if path == "/init_weight_transfer_engine":
            info = body["init_info"]
            place = (info["master_address"], info["master_port"], 1, info["world_size"])
            ranks.append(TransferGroup(*place, "gloo", CPU, 200))
        return {"world_size": 1}

    return script("rl_trainer").Sender(call, seconds=200), ranks[0]


def test_pieces_come_into_memory_that_was_taken_before() -> None:
    sender, rank = joined()
    with pytest.raises(
        CapacityError, match=r"^The largest piece of new weights takes 1048576.00 TiB, and .* Send smaller"
    ):
        rank.reserve(2**60)
    rank.reserve(100)
    with ThreadPoolExecutor(1) as thread:
        for size in (100, 64):
            sent = thread.submit(sender._broadcast, torch.full((size,), size, dtype=torch.uint8), Future())
            piece = rank.receive(size)
            assert piece.tolist() == [size] * size and piece.data_ptr() == rank._room.data_ptr()
            sent.result()
    rank.release()
    assert rank._room.nbytes == 0


@pytest.mark.parametrize(
    ("comes", "declared", "said"),
    [
        (
            60,
            100,
            "sends a piece of 60 bytes, where update_weights has declared a piece of 100 bytes. dtype_names, shapes, packed",
        ),
        (2**20, 100, "sends a piece of 1,048,576 bytes, where update_weights has declared a piece of 100 bytes"),
        (0, 100, "has sent its last piece, where update_weights has declared a piece of 100 bytes"),
        (60, 0, "sends a piece of 60 bytes, where update_weights has declared no more pieces"),
    ],
)
def test_a_piece_of_another_length_is_refused_before_a_byte_of_it_is_taken(
    comes: int, declared: int, said: str
) -> None:
    sender, rank = joined()
    rank.reserve(100)
    rank._room.fill_(7)
    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(sender._broadcast, torch.ones(comes, dtype=torch.uint8), Future())
        with pytest.raises(InvalidRequestError, match=said):
            rank.receive(declared)
        assert rank._room.tolist() == [7] * 100
        rank.leave()
        with contextlib.suppress(RuntimeError):  # a short piece was sent before the rank left
            sent.result(patient(5))


def test_a_trainer_that_does_not_announce_lengths_is_refused_when_it_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "ANNOUNCED", "another key")
    with pytest.raises(
        InvalidRequestError, match=r"doesn't say how long its pieces are: its store has no key 'another key'"
    ):
        joined()


def test_who_leaves_ends_what_the_trainer_waits_for() -> None:
    sender, rank = joined()
    began = time.monotonic()
    work = sender._group.broadcast(torch.ones(2**24, dtype=torch.uint8), 0)
    rank.leave()
    with pytest.raises(RuntimeError, match=r"closed|reset|refused"):
        work.wait()
    assert time.monotonic() - began < patient(5), "not the 200 seconds that it waits for a rank that is there"


def test_a_trainer_does_not_wait_for_ever() -> None:
    sender, rank = joined()
    rank.leave()
    sender._seconds, sender._group = (
        0.2,
        SimpleNamespace(broadcast=lambda *_: SimpleNamespace(is_completed=lambda: False)),
    )
    with pytest.raises(RuntimeError, match=r"the server hasn't taken 4 bytes in 0\.2 seconds"):
        sender.send([("model.norm.weight", torch.ones(1))])
    assert sender._group is None


def test_nccls_sockets_are_where_the_engines_are(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"10.0.0.1": "eth3", "127.0.0.1": "lo"}
    monkeypatch.setattr(settings, "interface", found.get)
    for address, name in ((None, "lo"), ("127.0.0.1", "lo"), ("10.0.0.1", "=eth3"), ("10.0.0.7", None)):
        said = settings.nccl_settings({} if address is None else {"PAGERUNNER_HOST_IP": address})
        assert (said.get("NCCL_SOCKET_IFNAME"), said["NCCL_NVLS_ENABLE"]) == (name, "0")
    assert children.interface("127.0.0.1") == "lo" and children.interface("203.0.113.7") is None


def test_nccl_is_told_what_it_needs_and_the_users_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_SOCKET_IFNAME", "NCCL_NVLS_ENABLE", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    before, seen = dict(os.environ), []

    class Group:
        def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
            seen.append(dict(os.environ))
            return self

        def wait(self) -> None:
            pass

    def group(*_: Any) -> Group:
        seen.append(dict(os.environ))
        return Group()

    monkeypatch.setattr(transfer, "TCPStore", lambda *given, **options: SimpleNamespace(check=lambda keys: True))
    monkeypatch.setattr(transfer, "nccl_group", group)
    rank = TransferGroup("127.0.0.1", 1, 1, 2, "nccl", CPU, 20)
    assert dict(os.environ) == before
    rank.receive(0)  # NCCL connects here
    rank.receive(0)
    assert dict(os.environ) == before
    assert [(one["NCCL_SOCKET_IFNAME"], one["NCCL_NVLS_ENABLE"]) for one in seen[:2]] == [("lo", "1")] * 2
    assert seen[0]["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0", (
        "else the log has a trace each second once the trainer has gone"
    )
    assert seen[2] == before, "setting a variable beside threads that read one isn't safe"
