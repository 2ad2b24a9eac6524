"""One server over the fake core for all tests that don't break it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.serving import RunningServer, running_server, write_text_side
from pagerunner.config import EngineArgs


@pytest.fixture(scope="session")
def text_side(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory without weights."""
    return write_text_side(tmp_path_factory.mktemp("text_side"))


@pytest.fixture(scope="session")
def server(text_side: Path) -> Iterator[RunningServer]:
    """A server whose answers repeat the prompt's tokens."""
    with running_server(EngineArgs(model=str(text_side))) as running:
        yield running
