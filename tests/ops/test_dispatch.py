"""Operations run their twin or their kernel by where the tensor is."""

from __future__ import annotations

import types

import torch

from pagerunner.ops import dispatch
from pagerunner.ops.dispatch import gpu_kernel


class FakeCudaTensor:
    is_cuda = True


def plus_one(x):
    return "twin"


def test_cpu_tensors_go_to_the_twin_and_nothing_is_imported(monkeypatch):
    monkeypatch.setattr(dispatch.importlib, "import_module", lambda name: 1 / 0)
    assert gpu_kernel("nowhere")(plus_one)(torch.zeros(1)) == "twin"


def test_cuda_tensors_go_to_the_kernel_of_the_same_name(monkeypatch):
    imported = []

    def load(name):
        imported.append(name)
        return types.SimpleNamespace(plus_one=lambda x: "kernel")

    monkeypatch.setattr(dispatch.importlib, "import_module", load)
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    op = gpu_kernel("some")(plus_one)
    assert [op(FakeCudaTensor()), op(FakeCudaTensor())] == ["kernel", "kernel"]
    assert imported == ["pagerunner.ops.kernels.some"]


def test_without_triton_the_twin_serves_cuda(monkeypatch):
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    assert gpu_kernel("nowhere")(plus_one)(FakeCudaTensor()) == "twin"
