"""Pages read by NIXL, where it is installed: the same promises as over TCP."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.page_owner import FIELDS, SECRET, content, key
from helpers.patience import LONG, until
from pagerunner.errors import ConfigError
from pagerunner.tiers import nixl, wire
from pagerunner.tiers.loans import Loans
from pagerunner.tiers.page_server import PageServer
from pagerunner.tiers.peers import PeerStore

SIZE, PAGES = 65_536, 8
try:
    nixl.check_installed()
    INSTALLED = True
except ConfigError:
    INSTALLED = False
needs_nixl = pytest.mark.skipif(not INSTALLED, reason='NIXL isn\'t installed: pip install "pagerunner[nixl]"')


def test_the_sentence_without_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "_WHEELS", ("no_such_nixl",))
    with pytest.raises(ConfigError, match=r'pip install "pagerunner\[nixl\]"\. PeerConnector takes the same fields'):
        nixl.check_installed()


class FakeNixl:
    """An agent that copies within this process, when `state` says so."""

    agents: dict[str, FakeNixl] = {}

    def __init__(self, name: str, config: Any) -> None:
        self.name, self.state, self.registered = name, "DONE", 0
        self.pending: list[tuple[int, int, int]] = []
        self.agents[name] = self

    def register_memory(self, ranges: list[Any], kind: str) -> str:
        self.registered += 1
        return "registered"

    def deregister_memory(self, what: str) -> None:
        self.registered -= 1

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        if not self.agents[metadata.decode()].registered:
            raise ValueError("stale metadata")
        return metadata.decode()

    def remove_remote_agent(self, name: str) -> None:
        pass

    def get_xfer_descs(self, ranges: list[Any], kind: str) -> list[Any]:
        return ranges

    def initialize_xfer(self, what: str, ours: list[Any], theirs: list[Any], name: str) -> list[tuple[int, int, int]]:
        return [(to, at, size) for (to, size, _), (at, _, _) in zip(ours, theirs, strict=True)]

    def transfer(self, handle: list[tuple[int, int, int]]) -> str:
        if self.state == "DONE":
            self.write(handle)
        return self.state

    def check_xfer_state(self, handle: list[tuple[int, int, int]]) -> str:
        return self.state

    def release_xfer_handle(self, handle: Any) -> None:
        pass

    def write(self, handle: list[tuple[int, int, int]]) -> None:
        for to, at, size in handle:
            ctypes.memmove(to, at, size)


class FakeApi:
    nixl_agent = FakeNixl

    @staticmethod
    def nixl_agent_config(backends: list[str]) -> None:
        assert backends == ["UCX"]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "_api", lambda: FakeApi)


class World:
    """A server and a store in this process."""

    def __init__(self, *, owner_has_it: bool = True) -> None:
        self.memory = bytearray(b"".join(content(number, SIZE) for number in range(PAGES)))
        view = memoryview(self.memory)
        self.lent = {(0, key(at)): view[at * SIZE : (at + 1) * SIZE] for at in range(PAGES)}
        self.ends: list[tuple[bytes, str]] = []
        self.loans = Loans(lambda token, why: self.ends.append((token, why)))
        self.server = PageServer(self.loans, SECRET)
        self.shared = nixl.Shared(view) if owner_has_it else None
        self.server.open(FIELDS, self.shared)
        self.reader = nixl.Reader(2 * PAGES * SIZE)
        self.store = PeerStore(SECRET, FIELDS, wire.LOOPBACK, lambda: None, 1, self.reader)
        self.number = 0

    def visit(self) -> str:
        self.token = self.loans.lend(self.lent, 30)
        self.store.leave(self.number)
        self.number += 1
        self.store.visit(self.number, self.server.address, self.token, self.server.boot)
        news: list[tuple[int, str]] = []
        until(lambda: news.extend(self.store.visited()) or any(number == self.number for number, _ in news))
        return news[-1][1]

    def read(self) -> tuple[list[bool], list[bytearray]]:
        room = [bytearray(b"\xee" * SIZE) for _ in self.lent]
        self.store.read(self.number, [(*name, memoryview(view)) for name, view in zip(self.lent, room, strict=True)])
        ended: list[tuple[int, list[bool]]] = []
        until(lambda: ended.extend(self.store.ended()) or ended)
        return ended[0][1], room

    def close(self) -> None:
        self.store.close()
        self.server.close("end")
        if self.shared is not None:
            self.shared.close()


@pytest.fixture
def world(fake: None) -> Iterator[World]:
    made = World()
    yield made
    made.close()


def test_pages_are_read_and_checked(world: World) -> None:
    assert world.visit() == ""
    well, room = world.read()
    assert all(well) and [bytes(page) for page in room] == [content(at, SIZE) for at in range(PAGES)]
    world.memory[3 * SIZE] ^= 1  # after its checksum was taken
    assert world.read()[0] == [True] * 3 + [False] + [True] * 4
    world.store.leave(world.number)
    until(lambda: world.ends == [(world.token, "released")])


def test_an_engine_without_it_sends_over_tcp(fake: None) -> None:
    world = World(owner_has_it=False)
    assert world.visit() == "" and all(world.read()[0])
    world.close()


def test_a_loan_that_ended_while_it_was_read_is_not_believed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert world.visit() == ""
    real = nixl.Reader.read

    def slow(self: nixl.Reader, *given: Any) -> None:
        real(self, *given)
        world.loans.end_all("expired")

    monkeypatch.setattr(nixl.Reader, "read", slow)
    assert world.read()[0] == [False] * PAGES


def test_a_transfer_without_an_end_writes_to_no_place_and_its_pages_come_over_tcp(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usual = nixl.Reader.read

    def hasty(reader: nixl.Reader, agent: Any, addresses: Any, views: Any, deadline: float, *rest: Any) -> None:
        usual(reader, agent, addresses, views, time.monotonic() + 0.05, *rest)

    monkeypatch.setattr(nixl.Reader, "read", hasty)
    agent = world.reader.nixl
    handles = []
    real = agent.initialize_xfer
    monkeypatch.setattr(agent, "initialize_xfer", lambda *given: handles.append(real(*given)) or handles[-1])
    agent.state = "PROC"
    for number in range(nixl.MOST_PUT_ASIDE):
        assert world.visit() == ""
        well, room = world.read()
        [remote] = world.reader._remotes.values()
        assert all(well) and len(remote.aside) == number + 1
    assert "isn't read by NIXL, but over TCP: a transfer hasn't ended in time" in caplog.text
    assert world.visit() == "" and all(world.read()[0])
    assert len(handles) == nixl.MOST_PUT_ASIDE, "too many are put aside, so nothing more is begun"
    world.memory[:] = b"\xee" * len(world.memory)
    before = [bytes(page) for page in room]
    for handle in handles:
        agent.write(handle)  # late
    assert [bytes(page) for page in room] == before
    agent.state = "DONE"
    world.reader.read(next(iter(world.reader._remotes)), [], [], time.monotonic() + 1)
    assert not remote.aside and agent.registered == 1, "the buffers have come back, and one is in use"


def test_an_engine_that_hangs_holds_up_no_other(fake: None, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = nixl.Reader(SIZE)
    source, room = memoryview(bytearray(content(1, SIZE))), memoryview(bytearray(SIZE))
    owners = [nixl.Shared(source) for _ in range(3)]
    over, real = threading.Event(), reader.nixl.transfer

    def transfer(handle: Any) -> str:
        return "PROC" if handle[0][2] == 10 else real(handle)

    monkeypatch.setattr(reader.nixl, "transfer", transfer)
    monkeypatch.setattr(reader.nixl, "check_xfer_state", lambda handle: "PROC")

    def hang() -> None:
        with contextlib.suppress(nixl.NixlError):
            at = [nixl.address_of(source)]
            reader.read(owners[0].metadata, at, [memoryview(bytearray(10))], time.monotonic() + 60, over.is_set)

    thread = threading.Thread(target=hang, daemon=True)
    thread.start()
    until(lambda: any(remote.lock.locked() for remote in reader._remotes.values()))
    reader.read(owners[1].metadata, [nixl.address_of(source)], [room], time.monotonic() + LONG)
    assert room == source
    with pytest.raises(nixl.NixlError, match="the transfer before it hasn't ended"):
        reader.read(owners[0].metadata, [nixl.address_of(source)], [room], time.monotonic() + 0.05)
    monkeypatch.setattr(nixl, "MOST_REMOTES", 2)
    reader.read(owners[2].metadata, [nixl.address_of(source)], [room], time.monotonic() + LONG)
    assert owners[1].metadata not in reader._remotes, "the one that isn't being read makes room"
    over.set()
    thread.join()


OWNER = """
import mmap, sys, zlib
from pagerunner.tiers.nixl import Shared, address_of
memory = memoryview(mmap.mmap(-1, 8 << 20))
memory[:] = bytes(range(256)) * (8 << 12)
shared = Shared(memory)
print("owner", shared.metadata.hex(), address_of(memory), zlib.crc32(memory), flush=True)
sys.stdin.readline()
shared.close()
print("owner closed", flush=True)
sys.stdin.read()
"""


@needs_nixl
def test_two_processes(tmp_path: Any) -> None:
    """The wheel itself, on this machine's memory: read, closed, stopped, killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )

    def told() -> list[str]:
        while not (line := process.stdout.readline()).startswith("owner "):
            assert line, "it has ended"
        return line.split()[1:]

    try:
        metadata, address, checksum = told()
        reader = nixl.Reader(8 << 20)
        room = memoryview(bytearray(8 << 20))
        addresses, views = [int(address), int(address) + (4 << 20)], [room[: 4 << 20], room[4 << 20 :]]
        reader.read(bytes.fromhex(metadata), addresses, views, time.monotonic() + LONG)
        assert zlib.crc32(room) == int(checksum)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with pytest.raises(nixl.NixlError):
            reader.read(bytes.fromhex(metadata), addresses, views, time.monotonic() + LONG)
    finally:
        process.kill()
        process.communicate()
