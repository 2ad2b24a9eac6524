"""Tests of this folder need a CUDA device; elsewhere they are skipped.

Several processes may run them on one device (`pytest -n 8`). A test that measures or fills the device's memory is marked
`alone`: it waits until no other test of this folder runs, and the others wait for it.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from helpers.device import ON_CUDA, collect, wait_for_host_copies

_LOCKS = Path(tempfile.gettempdir()) / f"pagerunner-gpu-tests-{os.getuid()}"


def pytest_configure(config):
    """Make the marker known."""
    config.addinivalue_line("markers", "alone: nothing else may use the device's memory meanwhile")


def pytest_collection_modifyitems(config, items):
    """On a machine without a CUDA device each test here is skipped once, not for every case; unless the CPU is asked for (helpers/device.py)."""
    if not ON_CUDA or torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    kept, others, seen = [], [], set()
    for item in items:
        if _is_here(item):
            name = item.nodeid.partition("[")[0]
            if name in seen:
                others.append(item)
                continue
            seen.add(name)
            item.add_marker(skip)
        kept.append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=others)


@pytest.fixture(autouse=True)
def _own_seed(request):
    """Each test has random numbers of its own, the same in every run and in every order."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


def _is_here(item: pytest.Item) -> bool:
    return Path(__file__).parent in item.path.parents


@contextmanager
def _locked(name: str, how: int) -> Iterator[None]:
    with (_LOCKS / name).open("w") as file:
        fcntl.flock(file, how)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Hold the device, for this test only or together with others, while the test and its fixtures run.

    Whoever waits for the device holds the gate, so that a test that needs it alone is not passed by others for ever.
    """
    if not (_is_here(item) and ON_CUDA and torch.cuda.is_available()):
        return (yield)
    _LOCKS.mkdir(exist_ok=True)
    with _gate_then_device(alone=item.get_closest_marker("alone") is not None):
        try:
            return (yield)
        finally:
            wait_for_host_copies()  # what they take and give back is device memory too
            collect()


@contextmanager
def _gate_then_device(*, alone: bool) -> Iterator[None]:
    with _locked("gate", fcntl.LOCK_EX):
        device = (_LOCKS / "device").open("w")
        fcntl.flock(device, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
    with device:
        yield
