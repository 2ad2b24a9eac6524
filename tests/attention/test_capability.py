"""What is said about devices that kernels can't run on, and what serves them then."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pagerunner.attention import capability
from pagerunner.attention.paged_mla import PagedLatentBackend
from pagerunner.attention.paged_recurrent import PagedRecurrentBackend
from pagerunner.memory import specs

LATENT = specs.LatentKV(512, 64, "bfloat16")
STATE = specs.RecurrentState(((3, 8), (2, 4, 4)), ("bfloat16", "float32"))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    found = SimpleNamespace(capability=(9, 0), shared_memory_per_block_optin=232_448, triton=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: found.capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: found)
    monkeypatch.setattr(capability, "has_triton", lambda: found.triton)
    return found


@pytest.mark.parametrize(("backend", "spec"), [(PagedLatentBackend(), LATENT), (PagedRecurrentBackend(), STATE)])
def test_reasons(
    device: SimpleNamespace, backend: PagedLatentBackend | PagedRecurrentBackend, spec: specs.Spec
) -> None:
    half = torch.bfloat16
    assert backend.capabilities.refusal(spec, "cuda", half) is None
    device.shared_memory_per_block_optin = 65_536  # less than either takes
    assert "65536" in str(backend.capabilities.refusal(spec, "cuda", half))
    device.capability = (7, 5)
    assert "7.5" in str(backend.capabilities.refusal(spec, "cuda", half))
    device.triton = False
    assert "Triton" in str(backend.capabilities.refusal(spec, "cuda", half))
    assert backend.capabilities.refusal(spec, "cpu", half) is None
