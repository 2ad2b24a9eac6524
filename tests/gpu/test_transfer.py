"""Memory for pieces of new weights: taken from the device, given back to it, and refused with numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from helpers.device import MIB, needs_cuda
from pagerunner.dist import transfer
from pagerunner.dist.transfer import TransferGroup
from pagerunner.errors import CapacityError


@needs_cuda
def test_the_device_has_its_memory_back_after_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "TCPStore", lambda *given, **options: SimpleNamespace(check=lambda keys: True))
    monkeypatch.setattr(transfer, "nccl_group", lambda *_: None)
    rank = TransferGroup("127.0.0.1", 1, 1, 2, "nccl", torch.device("cuda", torch.cuda.current_device()), 20)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    rank.reserve(256 * MIB)
    assert torch.cuda.memory_reserved() >= before + 256 * MIB
    with pytest.raises(CapacityError, match=r"takes 1024\.00 TiB, and the device has [\d.]+ GiB\. Send smaller pieces"):
        rank.reserve(2**50)
    rank.release()
    assert torch.cuda.memory_reserved() <= before
