"""Threads that pull pages: none of them holds up who stops them, and one that can't be started costs one connection."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from helpers.page_owner import FIELDS, SECRET, key
from helpers.page_pulls import PAGES, SIZE, Owner, check, news, pull
from helpers.patience import patient, until
from pagerunner.tiers import wire
from pagerunner.tiers.peers import PeerStore


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


@pytest.mark.parametrize("accepts", [True, False])
def test_closing_waits_for_no_peer_that_hangs(make, accepts) -> None:
    """Its connection for pages isn't answered, or not even taken."""
    with socket.create_server(("127.0.0.1", 0), backlog=4 if accepts else 0) as listener:
        store = make()
        store.visit(1, listener.getsockname(), b"t" * 16, b"b" * 16)
        line = wire.Line(listener.accept()[0])
        wire.welcome(line, SECRET, listener.getsockname(), FIELDS, b"b" * 16, time.monotonic() + 5)
        line.receive(wire.List, time.monotonic() + 5)
        line.send(wire.Listed([(0, key(0))], 1, 30.0), time.monotonic() + 5)
        assert news(store, 1) == ""
        fillers = [wire.Line.connecting(listener.getsockname()) for _ in range(0 if accepts else 3)]
        store.read(1, [(0, key(0), memoryview(bytearray(SIZE)))])
        until(lambda: any(caller._line is not None for caller in store._peers[listener.getsockname()]._pulling))
        begun = time.monotonic()
        store.close()
        assert time.monotonic() - begun < patient(1)
        assert store.ended() == [(1, [False])]
        for one in (line, *fillers):
            one.close()


def test_a_thread_that_cannot_be_started_costs_one_connection(owner, make, monkeypatch, caplog) -> None:
    refused, real = ["page server client", "pages of a peer"], threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name in refused:
            refused.remove(self.name)
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    assert "can't start a thread" in pull(make(), owner)
    owner.loans.end_all("end")
    assert pull(make(), owner), "the server has turned the first one away"
    assert "was turned away: can't start new thread" in caplog.text
    owner.loans.end_all("end")
    assert not refused and check(pull(make(), owner)) == PAGES
