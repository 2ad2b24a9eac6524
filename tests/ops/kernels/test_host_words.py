"""Copies of words: what the kernel's launches are given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from pagerunner.ops.kernels import host_words


@pytest.mark.parametrize("compiled", [False, True])
def test_what_isnt_whole_words_is_refused_by_every_launch(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device, launches = torch.device("cpu"), list[Any]()
    kernel = SimpleNamespace(run=lambda *args: launches.append(args), function=0, packed_metadata=())
    current = SimpleNamespace(get_current_stream=lambda index: 0)
    monkeypatch.setattr(host_words, "driver", SimpleNamespace(active=current))
    monkeypatch.setattr(host_words, "_compiled", {(device.index, True): kernel} if compiled else {})
    with pytest.raises(AssertionError, match="6 bytes are not whole words"):
        host_words._launch(device, True, (torch.ones(6, dtype=torch.uint8), torch.zeros(6, dtype=torch.uint8)))
    assert not launches
    if compiled:
        host_words._launch(device, True, (torch.ones(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)))
        assert launches[0][11] == 2, "two words"
