"""On the CPU kernels run in Triton's interpreter, made faster. Every test here runs under a memory checker, and what runs is compiled, too."""

from __future__ import annotations

import contextlib
import importlib.util
import zlib
from collections.abc import Iterator

import pytest
import torch

from helpers.effort import TEST_DAY

if importlib.util.find_spec("triton") is not None:
    from helpers import fast_interpreter

    fast_interpreter.install()


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """A test's random numbers are the same in every run of a day, whatever runs before it, and others on the next day."""
    torch.manual_seed(TEST_DAY + zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(scope="session", autouse=True)
def launches(compiled_too: None) -> None:
    """See tests/conftest.py."""


@pytest.fixture(autouse=True)
def memory_checker() -> Iterator[None]:
    """See helpers.kernel_bounds."""
    with contextlib.ExitStack() as stack:
        if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
            from helpers.kernel_bounds import checked

            stack.enter_context(checked())
        yield
