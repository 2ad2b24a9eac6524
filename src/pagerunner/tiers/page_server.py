"""The page server: lets other engines read lent pages, on threads of its own, one for each connection.

Whoever connects is a stranger until he has proven that he knows the secret. Strangers are few at a time, the oldest of too many is sent
away, and they can't make the server hold more than some hundred bytes. An engine's first bytes show that it knows the secret, and a connection is
taken when they are there. So an engine isn't sent away, however many strangers come and however late its thread runs. Nothing that a client sends is believed: lengths, keys and tokens are looked up here.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence

from pagerunner.errors import ConfigError
from pagerunner.logs import SparingLog
from pagerunner.tiers import wire
from pagerunner.tiers.loans import Loan, Loans
from pagerunner.tiers.nixl import Shared, address_of
from pagerunner.tiers.wire import Line, WireError

log = logging.getLogger(__name__)


def listening(host: str, port: int, waiting: int) -> socket.socket:
    """A socket that listens there, with so many clients `waiting`. Raises ConfigError where that can't be."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 1)  # who is silent is taken after a second
        listener.listen(waiting)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"kv_transfer_config: kv_ip={host!r}, kv_port={port}: this machine can't listen there ({error})."
        ) from error
    return listener


class PageServer:
    """Serves the pages of `loans`. It listens from `open` on, until `close`, and may be opened again.

    `allowed` are addresses and networks of clients: "10.0.0.7", "10.0.0.7:14579" (whose port says nothing here), "10.0.0.0/24".
    """

    STRANGERS, CLIENTS = 16, 1024
    """Connections that haven't proven that they know the secret, and those that have. An engine has num_threads + 1, 5 by default."""
    HANDSHAKE_SECONDS, FIRST_SECONDS, IDLE_SECONDS = 5.0, 2.0, 120.0
    """For all of the handshake, for a client's first message, and between two questions of one that is known."""
    GRACE_SECONDS, MIN_RATE = 5.0, 20e6
    """A message and its pages are sent within 5 s, and at 20 MB/s besides; a client that takes longer is cut off."""

    def __init__(
        self,
        loans: Loans,
        secret: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        allowed: Sequence[str] = wire.LOOPBACK,
    ) -> None:
        self._loans, self._secret, self._host, self._port = loans, secret, host, port
        self._allowed = [wire.place(entry)[0] for entry in allowed]
        self._fields: Mapping[str, str] = {}
        self._shared: Shared | None = None
        self._lock = threading.Lock()
        self._lines: dict[Line, threading.Thread] = {}
        self._strangers: dict[Line, bool] = {}  # the oldest first, and whether they have begun as an engine does
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._refusals = SparingLog(log, most=5)
        self.boot = b""

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        return self._host, self._port

    def open(self, fields: Mapping[str, str], shared: Shared | None = None) -> None:
        """Listen, for engines whose pages have equal `fields`. Those with NIXL may read `shared`. Raises ConfigError where that can't be."""
        listener = listening(self._host, self._port, 4 * self.STRANGERS)  # no more: an engine would wait behind them
        listener.settimeout(0.5)
        self._port = listener.getsockname()[1]  # the same one after a sleep
        self._shared = shared
        self._fields, self._listener, self.boot = dict(fields), listener, secrets.token_bytes(16)
        self._thread = threading.Thread(target=self._accept, args=(listener,), name="page server", daemon=True)
        self._thread.start()

    def close(self, why: str) -> None:
        """Answer nobody any more, and end all loans. When it returns, no page is read."""
        listener, self._listener = self._listener, None
        if listener is not None and self._thread is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
            self._thread.join()
            listener.close()
        with self._lock:
            threads = dict(self._lines)
        for line, thread in threads.items():
            line.stop()
            thread.join()
        self._loans.end_all(why)

    def _accept(self, listener: socket.socket) -> None:
        while self._listener is listener:
            self._loans.tick()
            try:
                sock, (host, *_) = listener.accept()
            except TimeoutError:
                continue
            except OSError:  # closed; or no file descriptors are left, which may pass
                time.sleep(0.05)
                continue
            if reason := self._turn_away(host):
                self._refusals.warn("Page server: %s was turned away: %s", host, reason)
                sock.close()
                continue
            line = Line(sock)
            begun = wire.begins_well(line.peek(), self._secret, self.address)  # before the next one is taken
            thread = threading.Thread(target=self._serve, args=(line, host), name="page server client", daemon=True)
            with self._lock:
                try:
                    thread.start()
                except RuntimeError as error:  # no more threads can be had, which may pass
                    self._refusals.warn("Page server: %s was turned away: %s", host, error)
                    line.close()
                    continue
                self._strangers[line] = begun
                self._lines[line] = thread
            self._end_oldest()

    def _end_oldest(self) -> None:
        """The door never stays full: who has just come goes first, and who has begun as an engine does before all strangers."""
        with self._lock:
            many = list(self._strangers.values()).count(False) > self.STRANGERS
            if not many and len(self._lines) <= self.CLIENTS + self.STRANGERS:
                return
            oldest = min(self._strangers, key=self._strangers.__getitem__)
            thread, count = self._lines[oldest], len(self._strangers)
        self._refusals.warn(
            "Page server: the oldest of %d connections that haven't proven that they know the secret was closed", count
        )
        oldest.stop()
        thread.join()

    def _turn_away(self, host: str) -> str:
        address = ipaddress.ip_address(host.split("%")[0])
        address = getattr(address, "ipv4_mapped", None) or address
        if not any(address in network for network in self._allowed):
            return "it isn't among the peers of kv_connector_extra_config"
        known = len(self._lines) - len(self._strangers)
        return (
            f"it would be connection number {self.CLIENTS + 1} of engines; set a lower num_threads there"
            if known >= self.CLIENTS
            else ""
        )

    def _serve(self, line: Line, host: str) -> None:
        stranger = True
        try:
            try:
                first, deadline = (
                    time.monotonic() + seconds for seconds in (self.FIRST_SECONDS, self.HANDSHAKE_SECONDS)
                )
                wire.welcome(line, self._secret, self.address, self._fields, self.boot, deadline, first)
            finally:
                with self._lock:
                    del self._strangers[line]
            stranger = False
            while self._listener is not None:
                self._answer(line, line.receive(wire.Request, time.monotonic() + self.IDLE_SECONDS))  # type: ignore[arg-type]
        except WireError as error:
            (self._refusals.warn if stranger else log.info)("Page server: %s %s", host, error)
        except Exception:  # a client's, not the engine's
            log.exception("Page server: the connection of %s is closed", host)
        finally:
            line.close()
            with self._lock:
                del self._lines[line]

    def _answer(self, line: Line, request: wire.Request) -> None:
        deadline = time.monotonic() + self.GRACE_SECONDS
        match request:
            case wire.List(token, start):
                with self._loans.reading(token) as loan:
                    names, seconds = ([], 0.0) if loan is None else (list(loan.pages), loan.seconds)
                    line.send(wire.Listed(names[start : start + wire.MAX_PAGES], len(names), seconds), deadline)
            case wire.Renew(token):
                line.send(wire.Done(self._loans.renew(token)), deadline)
            case wire.Release(token):
                line.send(wire.Done(self._loans.release(token)), deadline)
            case wire.Locate(token, asked):
                with self._loans.reading(token) as loan:
                    found = [None if loan is None else _page(loan, group, key, size) for group, key, size in asked]
                    agent = self._shared.metadata if self._shared is not None else b""
                    line.send(
                        wire.Located(agent, [address_of(view) if view else 0 for view in found if agent]), deadline
                    )
            case wire.Check(token, read):
                with self._loans.reading(token) as loan:
                    known = [] if loan is None else [name for name in read if name in loan.pages]
                    sums = [loan.checksum(name) for name in known] if loan is not None else []
                    line.send(wire.Sent(loan is not None and known == read, sums), deadline)
            case wire.Pull():
                self._send(line, request, deadline)

    def _send(self, line: Line, pull: wire.Pull, deadline: float) -> None:
        with self._loans.reading(pull.token) as loan:
            found = [None if loan is None else _page(loan, group, key, size) for group, key, size in pull.pages]
            deadline += sum(len(view) for view in found if view) / self.MIN_RATE
            line.send(wire.Sending([view is not None for view in found]), deadline)
            sums = []
            for (group, key, _), view in zip(pull.pages, found, strict=True):
                if loan is not None and view is not None:
                    sums.append(loan.checksum((group, key)))
                    line.send_bytes(view, deadline)
            held = loan is not None and not loan.ended
        line.send(wire.Sent(held, sums), deadline)


def _page(loan: Loan, group: int, key: bytes, size: int) -> memoryview | None:
    """A page of the loan, if it has so many bytes."""
    view = loan.pages.get((group, key))
    return view if view is not None and len(view) == size > 0 else None
