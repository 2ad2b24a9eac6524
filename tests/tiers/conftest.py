"""A store of pages on a disk; a server of pages in this process, and engines that pull from it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.disk_pages import opened
from helpers.page_owner import FIELDS, SECRET
from helpers.page_pulls import Owner
from helpers.patience import until
from pagerunner.tiers import wire
from pagerunner.tiers.disk import DiskStore
from pagerunner.tiers.peers import PeerStore


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def store(root: Path) -> Iterator[DiskStore]:
    made = opened(root)
    yield made
    made.close()


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.server.close("end")
    assert not len(owner.loans)


@pytest.fixture
def make() -> Iterator[Callable[..., PeerStore]]:
    made: list[PeerStore] = []

    def one(secret: bytes = SECRET, fields: dict = FIELDS, allowed=wire.LOOPBACK) -> PeerStore:
        made.append(PeerStore(secret, fields, allowed, lambda: None))
        return made[-1]

    yield one
    for store in made:
        store.close()
    until(lambda: not any(thread.name == "pages of a peer" for thread in threading.enumerate()))
