"""Pages pulled from another engine: what comes is what was lent, or it is refused, whatever the other side and the way between do."""

from __future__ import annotations

import contextlib
import itertools
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import page_owner
from helpers.effort import TEST_DAY, effort
from helpers.page_owner import FIELDS, SECRET, content, key
from helpers.page_pulls import LENT, PAGES, SIZE, Owner, check, news, pull, read
from helpers.patience import LONG, patient, stretched, until
from helpers.ports import free_port
from pagerunner.errors import ConfigError, InvalidRequestError
from pagerunner.tiers import peers, wire
from pagerunner.tiers.page_server import PageServer
from pagerunner.tiers.peers import PeerStore


@pytest.fixture
def hasty(monkeypatch) -> None:
    """Deadlines of tenths of a second."""
    monkeypatch.setattr(peers, "GRACE_SECONDS", stretched(0.15))
    monkeypatch.setattr(PageServer, "GRACE_SECONDS", stretched(0.3))


# -- what works


def test_pages_come_as_they_were_lent_and_the_loan_is_released(owner, make) -> None:
    store = make()
    token = owner.loans.lend(LENT, 30)
    store.visit(7, owner.server.address, token, owner.server.boot)
    assert store.lent(7) == {}
    assert news(store, 7) == ""
    assert sorted((group, key) for group, keys in store.lent(7).items() for key in keys) == sorted(LENT)
    pages = read(store, 7, [(0, key(5)), (0, key(PAGES)), (1, key(2)), (0, key(2))])
    assert read(store, 7, [(0, key(1))], SIZE - 1) == [None], "a page of another size is a miss"
    assert pages == [content(5, SIZE), None, None, content(2, SIZE)]
    assert read(store, 7, []) == []
    assert 0 < store.seconds(10**9) < 100 and store.bytes_read == 2 * SIZE
    store.leave(7)
    assert read(store, 7, [(0, key(5))]) == [None], "it was left"
    until(lambda: owner.ends == [(token, "released")])


def test_many_pages_are_listed_and_pulled_some_at_a_time(owner, make, monkeypatch) -> None:
    monkeypatch.setattr(peers, "PULL_PAGES", 5)
    monkeypatch.setattr(peers, "PULL_BYTES", 3 * SIZE)
    monkeypatch.setattr("pagerunner.tiers.wire.MAX_PAGES", 5)
    assert check(pull(make(), owner)) == PAGES


def test_all_connections_pull_a_prompt_and_as_much_each(monkeypatch) -> None:
    def sizes(count: int, connections: int) -> list[int]:
        pages = [(number, (0, key(number), memoryview(bytes(30)))) for number in range(count)]
        return [sum(len(page[2]) for _, page in part) for part in peers._divided(pages, connections)]

    monkeypatch.setattr(peers, "LEAST_PULL_BYTES", 60)
    monkeypatch.setattr(peers, "PULL_BYTES", 150)
    assert sizes(12, 4) == [90] * 4 and sizes(20, 4) == [150] * 4 and sizes(24, 4) == [90] * 8
    assert sizes(3, 4) == [60, 30], "so little isn't divided further"
    monkeypatch.setattr(peers, "PULL_BYTES", 100)
    monkeypatch.setattr(peers, "PULL_PAGES", 7)
    for count, size, connections in itertools.product((0, 1, 3, 4, 5, 13, 64), (1, 30, 100, 170), (1, 4)):
        pages = [(number, (0, key(number), memoryview(bytes(size)))) for number in range(count)]
        parts = peers._divided(pages, connections)
        assert [one for part in parts for one in part] == pages
        assert all(0 < len(part) <= 7 for part in parts)
        assert all(sum(len(page[2]) for _, page in part) < 100 + size for part in parts)


def test_loans_are_renewed_while_they_are_needed(owner, make) -> None:
    store = make()
    token = owner.loans.lend(LENT, seconds := 1.5)
    loan = owner.loans._loans[token]
    over = loan.until
    store.visit(1, owner.server.address, token, owner.server.boot)
    assert news(store, 1) == ""
    until(lambda: loan.until > over + seconds)  # it would be over by now
    assert check(read(store, 1, list(LENT))) == PAGES
    store.leave(1)
    until(lambda: owner.ends == [(token, "released")])


def test_two_loans_with_the_same_page_are_told_apart(owner, make) -> None:
    store = make()
    for number in (1, 2):
        store.visit(number, owner.server.address, owner.loans.lend(LENT, 30), owner.server.boot)
        assert news(store, number) == ""
    store.leave(1)
    assert check(read(store, 2, list(LENT))) == PAGES, "a request reads by its own loan"
    store.leave(2)


# -- what is refused


def test_engines_with_other_pages_are_refused_by_name(owner, make) -> None:
    reason = pull(make(fields={**FIELDS, "kv_cache_dtype": "fp8_e4m3", "layout": "NHD"}), owner)
    assert "kv_cache_dtype is bfloat16 there and fp8_e4m3 here" in reason
    assert "layout is absent there and NHD here" in reason and "page_bytes" not in reason
    several = {f"digest {number}": "f" * 32 for number in range(9)}
    assert "digest 8 is absent there and ffff" in pull(make(fields=FIELDS | several), owner)


def test_who_does_not_know_the_secret_gets_nothing(owner, make, caplog) -> None:
    assert "doesn't know the secret" in pull(make(secret=b"t" * 32), owner)


def test_a_loan_that_is_not_there_and_a_server_that_has_started_anew(owner, make) -> None:
    store = make()
    store.visit(1, owner.server.address, b"\0" * 16, owner.server.boot)
    assert news(store, 1) == "holds no such loan (any more)"
    store.visit(2, owner.server.address, owner.loans.lend(LENT, 30), b"\1" * 16)
    assert news(store, 2) == "has been started anew since"
    owner.loans.end_all("end")


def test_requests_cannot_send_an_engine_anywhere(make) -> None:
    store = make(allowed=["10.1.0.0/16", "10.2.0.1:9000"])
    for host, port in [
        ("127.0.0.1", 80),
        ("10.2.0.1", 9001),
        ("localhost", 80),
        ("169.254.169.254", 80),
        ("10.1.0.1.x", 1),
    ]:
        with pytest.raises(InvalidRequestError, match="isn't among the peers"):
            store.visit(1, (host, port), b"\0" * 16, b"")
    with pytest.raises(ConfigError, match=r"peers holds 'example.org'"):
        make(allowed=["example.org"])


def test_requests_that_name_many_engines_take_few_threads(make, monkeypatch) -> None:
    monkeypatch.setattr(peers, "MAX_PEERS", 5)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(12)]
        store = make()
        for number, server in enumerate(silent):
            store.visit(number, server.getsockname(), b"t" * 16, b"b" * 16)
        assert sum(thread.name == "pages of a peer" for thread in threading.enumerate()) <= 5
        assert "isn't asked: 5 others are already" in news(store, 11)


def test_clients_from_elsewhere_are_turned_away(owner, make, caplog) -> None:
    server = PageServer(owner.loans, SECRET, allowed=["10.0.0.1"])
    server.open(FIELDS)
    store = make()
    store.visit(1, server.address, b"\0" * 16, b"")
    assert news(store, 1)
    assert "127.0.0.1 was turned away: it isn't among the peers" in caplog.text
    server.close("end")
    with pytest.raises(ConfigError, match="kv_ip='192.0.2.1', kv_port=5: this machine can't listen there"):
        PageServer(owner.loans, SECRET, "192.0.2.1", 5).open(FIELDS)


# -- hostile clients


def greeted(owner: Owner) -> wire.Line:
    line = wire.Line(socket.create_connection(owner.server.address))
    wire.greet(line, SECRET, owner.server.address, FIELDS, time.monotonic() + LONG)
    return line


def hostile_bytes(draw: random.Random) -> Iterator[bytes]:
    yield b"GET / HTTP/1.1\r\n\r\n"
    yield struct.pack("<I", 2**32 - 1)
    yield struct.pack("<I", wire.MAX_GREETING + 1) + b"x" * 100
    yield struct.pack("<I", 3) + b"\xc1\xc1\xc1"
    yield struct.pack("<I", 200) + b"\x91" * 200
    yield struct.pack("<I", 0)
    for _ in range(effort(15, 300)):
        size = draw.randrange(200)
        yield struct.pack("<I", size) + draw.randbytes(size)


def test_no_bytes_harm_the_owner(owner, make) -> None:
    draw = random.Random(1)
    for greet in (False, True):
        for data in hostile_bytes(draw):
            sock = socket.create_connection(owner.server.address)
            line = wire.Line(sock)
            if greet:
                wire.greet(line, SECRET, owner.server.address, FIELDS, time.monotonic() + LONG)
                data = struct.pack("<I", wire.MAX_MESSAGE + 1) if data[:4] == b"\0\0\0\0" else data
            with contextlib.suppress(OSError):
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
            sock.settimeout(LONG)
            with contextlib.suppress(ConnectionError):
                while sock.recv(4096):
                    pass
            line.close()
    assert check(pull(make(), owner)) == PAGES
    until(lambda: len(owner.server._lines) <= 2)


def test_a_client_asks_only_for_what_it_was_lent(owner) -> None:
    line = greeted(owner)
    deadline = time.monotonic() + LONG
    token = owner.loans.lend(LENT, 30)
    for wrong, names in [
        (b"\0" * 16, list(LENT)),
        (token, [(1, key(0)), (0, b"x" * 64)]),
    ]:
        line.send(wire.Pull(wrong, [(*name, SIZE) for name in names]), deadline)
        assert line.receive(wire.Sending, deadline).there == [False] * len(names)
        sent = line.receive(wire.Sent, deadline)
        assert sent.sums == [] and sent.held == (wrong == token)
    line.send(wire.Release(token), deadline)
    assert line.receive(wire.Done, deadline).well
    line.close()


def test_who_takes_pages_too_slowly_is_cut_off(owner, monkeypatch) -> None:
    monkeypatch.setattr(PageServer, "GRACE_SECONDS", 2.0)
    monkeypatch.setattr(PageServer, "MIN_RATE", 1e12)
    big = {(0, key(0)): memoryview(bytes(64 << 20))}
    token = owner.loans.lend(big, 30)
    line = greeted(owner)
    line.send(wire.Pull(token, [(0, key(0), 64 << 20)]), time.monotonic() + LONG)
    until(lambda: owner.loans._loans[token].readers)
    owner.loans.release(token)
    assert not owner.ends, "the page is being sent"
    until(lambda: owner.ends == [(token, "released")])
    line.close()


def test_sending_ends_by_its_deadline_though_a_little_is_taken_all_the_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.socket()
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        far.connect(listener.getsockname())
        near = listener.accept()[0]
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    over = threading.Event()

    def take() -> None:
        while not over.wait(0.05):
            far.recv(2048)

    thread = threading.Thread(target=take)
    thread.start()
    line, begun = wire.Line(near), time.monotonic()
    try:
        with pytest.raises(wire.WireError, match="takes its bytes too slowly"):
            line.send_bytes(bytes(4_000_000), begun + 0.3)  # 40 kB a second would take a hundred
        assert time.monotonic() - begun < patient(1.5)
    finally:
        over.set()
        thread.join()
    line.close()
    far.close()


def test_a_loan_that_ends_while_it_is_sent_is_not_believed(owner) -> None:
    big = {(0, key(0)): memoryview(bytes(64 << 20))}
    token = owner.loans.lend(big, 30)
    line = greeted(owner)
    deadline = time.monotonic() + LONG
    line.send(wire.Pull(token, [(0, key(0), 64 << 20)]), deadline)
    line.receive(wire.Sending, deadline)
    assert owner.loans.release(token)
    line.receive_into(memoryview(bytearray(64 << 20)), deadline)
    assert not line.receive(wire.Sent, deadline).held
    line.close()


def test_sleep_ends_loans_and_readers_before_it_returns(owner, make) -> None:
    store = make()
    big = {(0, key(0)): memoryview(bytes(64 << 20))}
    token = owner.loans.lend(big, 30)
    store.visit(1, owner.server.address, token, owner.server.boot)
    assert news(store, 1) == ""
    line = greeted(owner)
    line.send(wire.Pull(token, [(0, key(0), 64 << 20)]), time.monotonic() + LONG)  # and takes nothing of it
    until(lambda: owner.loans._loans[token].readers)
    owner.server.close("sleep")
    assert owner.ends == [(token, "sleep")]
    assert check(read(store, 1, [(0, key(0))], 64 << 20)) == 0
    assert news(store, 1)
    line.close()
    owner.server.open(FIELDS)
    assert check(pull(store, owner)) == PAGES, "the same store, the same port, after the sleep"


# -- the way between


class Between:
    """Hands bytes on between a client and a server: of the server's connection number `which`, only the first `most`."""

    def __init__(self, port: int, which: int, most: int, then: str) -> None:
        self._port, self._which, self._most, self._then = port, which, most, then
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.passed = [0, 0, 0, 0, 0]
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        number = 0
        while not self._over.is_set():
            if select.select([self._listener], [], [], 0.02)[0]:
                near = self._listener.accept()[0]
                far = socket.create_connection(("127.0.0.1", self._port))
                self._threads.append(threading.Thread(target=self._pass, args=(near, far, min(number, 4)), daemon=True))
                self._threads[-1].start()
                number += 1

    def _pass(self, near: socket.socket, far: socket.socket, number: int) -> None:
        with near, far, contextlib.suppress(OSError):
            while not self._over.is_set():
                for source in select.select([near, far], [], [], 0.02)[0]:
                    if not (data := source.recv(1 << 16)):
                        return
                    if source is near:
                        far.sendall(data)
                        continue
                    begin = self.passed[number]
                    self.passed[number] += len(data)
                    if number == self._which and self.passed[number] > self._most:
                        at = self._most - begin
                        if self._then == "flip":
                            if at >= 0:
                                data = data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
                        else:
                            near.sendall(data[: max(at, 0)])
                            if self._then == "hang":
                                self._over.wait()
                            return
                    near.sendall(data)

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()


def lengths(owner: Owner, store: PeerStore) -> list[int]:
    """How many bytes the server sends on the asking and on the pulling connection."""
    between = Between(owner.port, -1, 0, "")
    assert check(pull(store, owner, between.port)) == PAGES
    until(lambda: between.passed[0] and between.passed[1] > PAGES * SIZE)
    between.close()
    return between.passed[:2]


def test_who_relays_the_handshake_from_elsewhere_proves_nothing(owner, make) -> None:
    between = Between(owner.port, -1, 0, "")
    store = make()
    store.visit(1, ("127.0.0.1", between.port), owner.loans.lend(LENT, 30), owner.server.boot)
    assert "doesn't know the secret, or has another kv_ip and kv_port than those dialled" in news(store, 1)
    between.close()


def test_who_stands_between_can_put_in_no_page_message_or_checksum(owner) -> None:
    """He knows all that is said, and no key."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far, near = socket.create_connection(listener.getsockname()), listener.accept()[0]
    line, deadline = wire.Line(near), time.monotonic() + LONG
    line.seal(b"o" * 32, b"t" * 32)
    other, thief = wire.Line(far), wire.Line(far)
    other.seal(b"t" * 32, b"o" * 32)
    other.send(wire.Done(True), deadline)
    told = near.recv(100, socket.MSG_PEEK)
    assert line.receive(wire.Done, deadline).well
    evil = wire.Sent(True, [wire.checksum(memoryview(b"evil"))])
    for attack in (lambda: far.sendall(told), lambda: thief.send(evil, deadline) or far.sendall(told[-16:])):
        attack()
        with pytest.raises(wire.WireError, match="was changed on its way"):
            line.receive(wire.Done | wire.Sent, deadline)
    line.close()
    other.close()


@pytest.mark.parametrize("then", ["close", "flip"])
def test_a_peer_may_die_or_lie_at_any_byte(owner, make, then) -> None:
    asked, pulled = lengths(owner, make())
    draw = random.Random(f"{then} {TEST_DAY}")
    places = [(0, draw.randrange(asked)) for _ in range(effort(5, 60))]
    places += [(1, draw.randrange(pulled)) for _ in range(effort(8, 150))]
    places += [(1, draw.randrange(300)) for _ in range(effort(3, 40))]
    lost = 0
    for which, most in places:
        between = Between(owner.port, which, most, then)
        store = make()
        lost += check(pull(store, owner, between.port)) < PAGES
        store.close()
        between.close()
    assert lost > len(places) // 2, "the planted fault does nothing"
    assert check(pull(make(), owner)) == PAGES


@pytest.mark.parametrize(("which", "most"), [(0, 10), (0, 140), (1, 10), (1, 200), (1, 5 * SIZE), (1, 12 * SIZE)])
def test_a_peer_that_hangs_fails_within_its_deadline(owner, make, hasty, which, most) -> None:
    between = Between(owner.port, which, most, "hang")
    begun = time.monotonic()
    assert check(pull(make(), owner, between.port)) < PAGES
    assert time.monotonic() - begun < patient(3)
    between.close()
    owner.loans.end_all("end")


def test_a_slow_peer_ends_a_pull_however_steadily_it_sends(make, monkeypatch) -> None:
    def drip() -> None:
        sock = listener.accept()[0]
        line = wire.Line(sock)
        wire.welcome(line, SECRET, listener.getsockname(), FIELDS, b"b" * 16, time.monotonic() + LONG)
        line.receive(wire.Request, time.monotonic() + LONG)
        line.send(wire.Listed([(0, key(0))], 1, 30.0), time.monotonic() + LONG)
        other = wire.Line(listener.accept()[0])
        wire.welcome(other, SECRET, listener.getsockname(), FIELDS, b"b" * 16, time.monotonic() + LONG)
        other.receive(wire.Request, time.monotonic() + LONG)
        other.send(wire.Sending([True]), time.monotonic() + LONG)
        with contextlib.suppress(wire.WireError):
            while True:
                other.send_bytes(b"x", time.monotonic() + LONG)
                time.sleep(0.01)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        store = make()
        store.visit(1, listener.getsockname(), b"t" * 16, b"b" * 16)
        assert news(store, 1) == ""
        monkeypatch.setattr(peers, "GRACE_SECONDS", 0.5)
        begun = time.monotonic()
        assert read(store, 1, [(0, key(0))]) == [None]
        assert time.monotonic() - begun < patient(3)
        assert "is too slow" in news(store, 1)
        thread.join()


def test_a_visit_that_is_left_writes_nothing_any_more(owner, make, monkeypatch) -> None:
    for name in ("PULL_BYTES", "LEAST_PULL_BYTES"):  # one page after the other
        monkeypatch.setattr(peers, name, 1 << 30)
    size = 64 << 20
    big = {(0, key(at)): memoryview(bytes(size)) for at in range(2)}
    store = make()
    store.visit(1, owner.server.address, token := owner.loans.lend(big, 30), owner.server.boot)
    assert news(store, 1) == ""
    room = [bytearray(b"\xee" * size) for _ in big]
    store.read(1, [(0, name, memoryview(view)) for (_, name), view in zip(big, room, strict=True)])
    until(lambda: room[0][0] == 0)
    store.leave(1)
    ended: list[tuple[int, list[bool]]] = []
    until(lambda: ended.extend(store.ended()) or ended)
    before = room[1].count(0xEE)
    assert not ended[0][1][1] and before > 0, "it was left before the second page"
    until(lambda: owner.ends == [(token, "released")])
    assert room[1].count(0xEE) == before


# -- another process


class Other:
    """An owner in a process of its own."""

    def __init__(self, port: int = 0, pages: int = PAGES, size: int = SIZE, seconds: float = 30) -> None:
        command = [sys.executable, page_owner.__file__, *map(str, (port, 1, pages, size, seconds))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        told = self.process.stdout.readline().split()
        self.port, self.boot, self.token = int(told[0]), bytes.fromhex(told[1]), bytes.fromhex(told[2])

    def say(self, line: str) -> str:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def test_an_engine_is_stopped_killed_and_started_again(make, monkeypatch) -> None:
    assert Path(page_owner.__file__).exists()
    size, names = 4 << 20, [(0, key(number)) for number in range(4)]
    other = Other(free_port(), pages=4, size=size)
    try:
        store = make()
        store.visit(1, ("127.0.0.1", other.port), other.token, other.boot)
        assert news(store, 1) == ""
        assert all(read(store, 1, names, size))
        other.process.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        with monkeypatch.context() as hasty:
            hasty.setattr(peers, "GRACE_SECONDS", 0.15)
            assert not any(read(store, 1, names, size))
        assert "is too slow" in news(store, 1)
        other.process.send_signal(signal.SIGCONT)
        store.leave(1)

        token = bytes.fromhex(other.say("lend"))
        store.visit(2, ("127.0.0.1", other.port), token, other.boot)
        assert news(store, 2) == ""
        room = [bytearray(size) for _ in names]
        store.read(2, [(*name, memoryview(view)) for name, view in zip(names, room, strict=True)])
        until(lambda: room[0][0] or room[1][0])
        other.process.kill()
        other.process.wait()
        ended: list[tuple[int, list[bool]]] = []
        until(lambda: ended.extend(store.ended()) or ended)
        assert all(
            bytes(view) == content(at, size)
            for at, (view, well) in enumerate(zip(room, ended[0][1], strict=True))
            if well
        )
        assert time.monotonic() - begun < patient(8)
        store.leave(2)
        port, boot = other.port, other.boot
        other.end()
        other = Other(port)
        store.visit(3, ("127.0.0.1", port), token, boot)
        assert news(store, 3) == "has been started anew since"
        store.visit(4, ("127.0.0.1", port), other.token, other.boot)
        assert news(store, 4) == "" and check(read(store, 4, list(LENT))) == PAGES
    finally:
        other.end()
