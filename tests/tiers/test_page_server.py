"""The page server's door: who doesn't know the secret takes little room there, and none from engines."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

import pytest

from helpers.page_owner import FIELDS, SECRET
from helpers.page_pulls import PAGES, check, pull
from helpers.patience import LONG, until
from pagerunner.tiers import wire
from pagerunner.tiers.page_server import PageServer


def framed(message: wire.Message) -> bytes:
    data = wire._encode(message)
    return struct.pack("<I", len(data)) + data


LENGTH, HELLO = struct.pack("<I", 40), framed(wire.Hello("pagerunner-kv", wire.VERSION, b"n" * wire.NONCE))
"""What strangers begin with: the length of a message, or one that is right but for the proof in its nonce."""


@pytest.mark.parametrize(
    ("begin", "then"), [(LENGTH, b""), (LENGTH, b"x"), (HELLO, b"")], ids=["silent", "dribbling", "hello"]
)
def test_strangers_cannot_shut_an_engine_out(owner, make, caplog, monkeypatch, begin, then) -> None:
    """They come back as soon as they are sent away, and only send the length of a message, or a byte of it now and then, or begin as an engine does."""
    monkeypatch.setattr(PageServer, "STRANGERS", 3)
    over = threading.Event()

    def stranger() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(owner.server.address) as sock:
                sock.settimeout(0.05)
                sock.sendall(begin)
                while not over.is_set():
                    try:
                        if not sock.recv(1):
                            break
                    except TimeoutError:
                        sock.sendall(then)

    strangers = [threading.Thread(target=stranger) for _ in range(5)]
    try:
        for one in strangers:
            one.start()
        until(
            lambda: (
                "the oldest of 4 connections that haven't proven that they know the secret was closed" in caplog.text
            )
        )
        for _ in range(3):
            store = make()
            assert check(pull(store, owner)) == PAGES
        assert list(owner.server._strangers.values()).count(False) <= 4
    finally:
        over.set()
        for one in strangers:
            one.join()


def test_an_engine_outlives_strangers_who_come_after_it(owner, monkeypatch) -> None:
    """However slow it is: one has only connected, and one has said hello. If too many have said so, the oldest goes."""
    monkeypatch.setattr(PageServer, "STRANGERS", 3)
    for name in ("FIRST_SECONDS", "HANDSHAKE_SECONDS"):
        monkeypatch.setattr(PageServer, name, 60.0)
    at, held = owner.server.address, owner.server._strangers
    with contextlib.ExitStack() as stack:

        def come(begin: bytes, engines: int, strangers: int) -> socket.socket:
            sock = stack.enter_context(socket.create_connection(at))
            sock.sendall(begin)
            until(lambda: sorted(held.values()) == [False] * strangers + [True] * engines)
            return sock

        engine = framed(wire.Hello("pagerunner-kv", wire.VERSION, wire.client_nonce(SECRET, at, b"f" * 16)))
        silent = come(b"", 0, 0)
        slow = come(engine, 1, 0)
        first = next(iter(held))
        for number, begin in enumerate((LENGTH, HELLO) * 4):
            come(begin, 1, min(number + 1, 3))
        wire.greet(wire.Line(silent), SECRET, at, FIELDS, time.monotonic() + LONG)
        monkeypatch.setattr(PageServer, "CLIENTS", 2)
        for number in range(3):
            come(engine, 2 + number, 2 - number)
        assert first in held
        come(engine, 4, 0)
        slow.settimeout(LONG)
        while slow.recv(200):
            pass
        until(lambda: first not in held)


def test_a_stranger_has_a_second_to_begin_and_seconds_to_prove_that_he_knows_the_secret(owner, monkeypatch) -> None:
    for patience, limits in (("FIRST_SECONDS", (0.1, 60)), ("HANDSHAKE_SECONDS", (60, 0.3))):
        monkeypatch.setattr(PageServer, "FIRST_SECONDS", limits[0])
        monkeypatch.setattr(PageServer, "HANDSHAKE_SECONDS", limits[1])
        line = wire.Line(socket.create_connection(owner.server.address))
        if patience == "HANDSHAKE_SECONDS":
            line.send(wire.Hello("pagerunner-kv", wire.VERSION, b"n" * 32), time.monotonic() + LONG)
        until(lambda: not owner.server._lines)
        line.close()
