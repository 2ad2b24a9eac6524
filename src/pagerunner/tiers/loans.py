"""Loans: pages in host memory that other engines may read for a time. Each has a secret token, which only those know who were told.

A loan ends when it is released, when its time is up, or when the engine ends all. Its pages are given back when, besides, nobody reads them
any more: `on_end` is called then. Example: a loan of 30 s is being sent at its 30th second. It ends when the last byte is sent, and nobody
else can read it from then on.
"""

from __future__ import annotations

import contextlib
import heapq
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from pagerunner.tiers import wire
from pagerunner.tiers.wire import Name

MakePages = Callable[[], dict[Name, memoryview]]
"""Makes the pages of a loan. The thread of the first reader calls it: of 8,000 pages on 8 ranks that takes some 50 ms."""


class Loan:
    """Pages by group and key. `until` is when it ends by itself, and never later than `last`."""

    __slots__ = ("_lock", "_make", "_pages", "_sums", "ended", "last", "readers", "seconds", "token", "until")

    def __init__(self, token: bytes, make: MakePages, seconds: float, now: float, most: float) -> None:
        self.token = token
        self._make, self._lock = make, threading.Lock()
        self._pages: dict[Name, memoryview] | None = None
        self.seconds = seconds
        self.until = now + seconds
        self.last = now + most
        self.readers = 0
        self.ended = ""
        self._sums: dict[Name, bytes] = {}

    @property
    def pages(self) -> dict[Name, memoryview]:
        """Every page, in the order in which they are listed."""
        with self._lock:
            if self._pages is None:
                self._pages = self._make()
            return self._pages

    def checksum(self, name: Name) -> bytes:
        """Checksum of a page, as it was when it was first asked for."""
        if (found := self._sums.get(name)) is None:
            found = self._sums[name] = wire.checksum(self.pages[name])
        return found


class Loans:
    """All loans of an engine. Every method may be called from any thread."""

    MOST = 20
    """A loan that is renewed again and again ends after so many times its length."""

    def __init__(self, on_end: Callable[[bytes, str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`on_end(token, why)` is called once for each loan, when nobody reads its pages any more: "released", "expired" or why all ended."""
        self._on_end, self._clock = on_end, clock
        self._lock = threading.Lock()
        self._loans: dict[bytes, Loan] = {}
        self._times: list[tuple[float, bytes]] = []
        self.num_lent = self.num_expired = 0

    def __len__(self) -> int:
        """Those whose pages haven't been given back yet."""
        return len(self._loans)

    def lend(self, pages: Mapping[Name, memoryview] | MakePages, seconds: float) -> bytes:
        """Lend pages, or those that are made when they are first asked for. Returns the token. They have to stay as they are until `on_end`."""
        make = pages if callable(pages) else partial(dict, pages)
        token = secrets.token_bytes(16)
        with self._lock:
            loan = self._loans[token] = Loan(token, make, seconds, self._clock(), self.MOST * seconds)
            heapq.heappush(self._times, (loan.until, token))
            self.num_lent += 1
        return token

    def renew(self, token: bytes) -> bool:
        """Let it last as long again from now on. False if there is no such loan any more."""
        with self._lock:
            if (loan := self._live(token)) is None:
                return False
            loan.until = min(self._clock() + loan.seconds, loan.last)
            return True

    def release(self, token: bytes, why: str = "released") -> bool:
        """End it. False if there is no such loan any more."""
        with self._lock:
            if (loan := self._live(token)) is None:
                return False
            gone = self._end(loan, why)
        self._tell(gone)
        return True

    def end_all(self, why: str) -> None:
        """End every loan."""
        with self._lock:
            gone = [loan for loan in list(self._loans.values()) for loan in self._end(loan, why)]
        self._tell(gone)

    def tick(self) -> None:
        """End those whose time is up."""
        gone: list[Loan] = []
        with self._lock:
            now = self._clock()
            while self._times and self._times[0][0] <= now:
                token = heapq.heappop(self._times)[1]
                if (loan := self._loans.get(token)) is None or loan.ended:
                    continue
                if loan.until > now:  # it was renewed
                    heapq.heappush(self._times, (loan.until, token))
                    continue
                self.num_expired += 1
                gone += self._end(loan, "expired")
        self._tell(gone)

    @contextlib.contextmanager
    def reading(self, token: bytes) -> Iterator[Loan | None]:
        """The loan, whose pages stay as they are inside; None if it has ended."""
        with self._lock:
            if (loan := self._live(token)) is not None:
                loan.readers += 1
        try:
            yield loan
        finally:
            gone: list[Loan] = []
            if loan is not None:
                with self._lock:
                    loan.readers -= 1
                    gone = self._end(loan, loan.ended) if loan.ended else []
            self._tell(gone)

    def _live(self, token: bytes) -> Loan | None:
        loan = self._loans.get(token)
        return None if loan is None or loan.ended or loan.until <= self._clock() else loan

    def _end(self, loan: Loan, why: str) -> list[Loan]:
        """Those that are to be told of: this loan, if nobody reads it."""
        loan.ended = loan.ended or why
        if loan.readers:
            return []
        return [loan] if self._loans.pop(loan.token, None) is not None else []

    def _tell(self, gone: list[Loan]) -> None:
        for loan in gone:
            self._on_end(loan.token, loan.ended)
