"""Threads that pull pages: none of them holds up who stops them, and one that can't be started costs one connection."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.page_owner import FIELDS, SECRET, key
from helpers.page_pulls import LENT, PAGES, SIZE, check, news, pull, read
from helpers.patience import LONG, patient, until
from pagerunner.tiers import peers, wire


@pytest.mark.parametrize("accepts", [True, False])
def test_closing_waits_for_no_peer_that_hangs(make, accepts, monkeypatch) -> None:
    """Its connection for pages isn't answered, or not even taken."""
    monkeypatch.setattr(peers, "GRACE_SECONDS", 300.0)
    with socket.create_server(("127.0.0.1", 0), backlog=4 if accepts else 0) as listener:
        store = make()
        store.visit(1, listener.getsockname(), b"t" * 16, b"b" * 16)
        line = wire.Line(listener.accept()[0])
        wire.welcome(line, SECRET, listener.getsockname(), FIELDS, b"b" * 16, time.monotonic() + LONG)
        line.receive(wire.Request, time.monotonic() + LONG)
        line.send(wire.Listed([(0, key(0))], 1, 30.0), time.monotonic() + LONG)
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


@pytest.mark.parametrize("says", ["more", "without end"])
def test_a_peer_that_lists_more_pages_than_can_be_needed_is_not_listened_to(make, says) -> None:
    asked = []

    def answer() -> None:
        line = wire.Line(listener.accept()[0])
        wire.welcome(line, SECRET, listener.getsockname(), FIELDS, b"b" * 16, time.monotonic() + LONG)
        with contextlib.suppress(wire.WireError):
            while True:
                asked.append(line.receive(wire.Request, time.monotonic() + LONG))
                pages = [(0, f"{len(asked)} {at}".encode().ljust(32)) for at in range(8)]
                line.send(wire.Listed(pages, 21 if says == "more" else 20, 30.0), time.monotonic() + LONG)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        store = make()
        store.visit(1, listener.getsockname(), b"t" * 16, b"b" * 16, 20)
        lists = 21 if says == "more" else 24
        assert f"lists {lists} pages, of at most 20 that can be needed" in news(store, 1)
        assert len(asked) == (1 if says == "more" else 3)
        store.close()
        thread.join()


def test_a_loan_that_lists_more_pages_than_its_visit_can_need_fails_no_other_visit(owner, make) -> None:
    store = make()
    store.visit(1, owner.server.address, owner.loans.lend(LENT, 30), owner.server.boot, PAGES)
    assert news(store, 1) == ""
    store.visit(2, owner.server.address, owner.loans.lend(LENT, 30), owner.server.boot, 3)
    store.visit(3, owner.server.address, owner.loans.lend(LENT, 30), owner.server.boot, PAGES)
    said: dict[int, str] = {}
    until(lambda: said.update(store.visited()) or {2, 3} <= said.keys())
    assert said == {2: f"lists {PAGES} pages, of at most 3 that can be needed", 3: ""}
    assert [check(read(store, number, list(LENT))) for number in (1, 3)] == [PAGES, PAGES]


def test_what_a_peer_refuses_with_is_one_line_of_the_log(make, caplog) -> None:
    def refuse() -> None:
        line = wire.Line(listener.accept()[0])
        line.receive(wire.Hello, time.monotonic() + LONG)
        line.send(
            wire.Refused("no\n2026-01-01 ERROR pagerunner: \x1b[31mfalse\x1b[0m" + "!" * 100), time.monotonic() + LONG
        )

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=refuse, daemon=True)
        thread.start()
        store = make()
        store.visit(1, listener.getsockname(), b"t" * 16, b"b" * 16)
        assert "refuses: no 2026-01-01 ERROR" in news(store, 1)
        thread.join()
    [said] = [record.getMessage() for record in caplog.records]
    assert said.isprintable() and len(said) < 400


def test_the_rate_is_that_of_a_read_over_all_connections(make, monkeypatch) -> None:
    """From the first batch that is asked for until the last has come."""
    store, now = make(), [0.0]
    monkeypatch.setattr(peers, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def read(nbytes: int, begins: float, ends: float) -> None:
        reading = peers._Read(1, 2)
        store.begin(reading, [nbytes, nbytes])
        store.batch_ended(reading, 0)  # divided
        for began in (begins + 0.5, begins):
            now[0] = ends
            store.batch_ended(reading, nbytes, nbytes, began)

    assert store.seconds(10**9) == 1.0, "until one is measured"
    read(4 << 20, 10.0, 12.0)
    assert store.bytes_per_second == 4 << 20 and store.seconds(8 << 20) == 2.0
    read(8 << 20, 20.0, 22.0)
    assert store.bytes_per_second == 5 << 20, "a quarter of what is new"
    read(1 << 18, 30.0, 39.0)
    assert store.bytes_per_second == 5 << 20, "so little measures the way back and forth"
    assert store.bytes_read == (24 << 20) + (1 << 19) and store._waiting_bytes == 0


def test_pages_of_a_read_are_made_and_divided_by_a_thread_of_the_peer(owner, make) -> None:
    store, threads = make(), []
    store.visit(1, owner.server.address, owner.loans.lend(LENT, 30), owner.server.boot)
    assert news(store, 1) == ""
    pages = [(group, key, memoryview(bytearray(len(view)))) for (group, key), view in LENT.items()]

    def made() -> list[Any]:
        threads.append(threading.current_thread())
        return pages

    store.read_later(1, len(pages), made)
    until(lambda: store._ended)
    assert store.ended() == [(1, [True] * len(pages))] and threading.current_thread() not in threads
    assert [bytes(view) for _, _, view in pages] == [bytes(view) for view in LENT.values()]


def test_the_pages_of_a_loan_are_made_by_the_first_reader(owner, make) -> None:
    threads = []

    def made() -> Any:
        threads.append(threading.current_thread())
        return dict(LENT)

    store = make()
    store.visit(1, owner.server.address, owner.loans.lend(made, 30), owner.server.boot)
    assert not [one for one in threads if one is threading.current_thread()]
    assert news(store, 1) == "" and len(threads) == 1 and threading.current_thread() not in threads
