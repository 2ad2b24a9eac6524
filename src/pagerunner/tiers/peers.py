"""Pages of other engines: a store that reads what they lend. A visit is to one loan of one engine, as long as a request needs it.

Example: a request names the loan that the prefill engine has made for it. `visit` asks that engine what the loan holds. Then `names` knows
its pages, `read` pulls them into host memory, and `leave` gives the loan back. One thread asks an engine, renews and releases loans. Others
pull pages, each on a connection of its own, so a long pull doesn't let loans expire. An engine that dies, restarts, hangs or is slower than
`MIN_RATE` fails the visits to it: their pages weren't read well, and prompts are recomputed.

Bytes come into a place only while one thread stands in `_pull` for it, and a read ends after that. So nothing comes late, and no place has to
be kept back.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from pagerunner.errors import InvalidRequestError
from pagerunner.logs import SparingLog
from pagerunner.tiers import wire
from pagerunner.tiers.nixl import NixlError, Reader
from pagerunner.tiers.stores import Page
from pagerunner.tiers.wire import Kind, Line, WireError

log = logging.getLogger(__name__)

Address = tuple[str, int]
GRACE_SECONDS, MIN_RATE = 5.0, 20e6
"""An engine answers within 5 s, and sends at 20 MB/s besides."""
PULL_BYTES, PULL_PAGES = 32 << 20, 1_024
"""Of one pull at most, so that deadlines are short and a visit can end between two."""
LEAST_PULL_BYTES = 1 << 20
"""Less than that isn't divided among connections."""
Batch = list[tuple[int, Page]]
"""Pages of a read that one connection pulls at a time, each with its number in the read."""
MOST_NAMES = 1 << 20
"""Pages that a loan is believed to have, unless a visit says less."""
MAX_PEERS, MAX_IDLE_PEERS = 64, 16
"""Engines that are asked at a time, and that are remembered though nothing is asked."""


class Visit:
    """A loan of another engine, and which of its pages the store knows. `failed`: why none can be had, or ""."""

    __slots__ = ("boot", "failed", "left", "lent", "most", "number", "peer", "seconds", "token")

    def __init__(self, number: int, peer: _Peer, token: bytes, boot: bytes, most: int) -> None:
        self.number, self.peer, self.token, self.boot, self.most = number, peer, token, boot, most
        self.lent: dict[int, dict[bytes, int]] = {}
        self.seconds = math.inf
        self.failed = ""
        self.left = False


class _Read:
    """A read, and how many batches of it haven't ended; to divide it counts as one. By now so many bytes have come, since the first batch was asked for."""

    __slots__ = ("began", "nbytes", "number", "batches", "well")

    def __init__(self, number: int, pages: int) -> None:
        self.number, self.batches, self.well = number, 1, [False] * pages
        self.began, self.nbytes = math.inf, 0


class PeerStore:
    """What other engines lend, as a `PageStore`. One thread calls it.

    `allowed` says which engines a request may name: "10.0.0.7:14579", "10.0.0.7" for any port there, "10.0.0.0/24" for a network.
    """

    def __init__(
        self,
        secret: bytes,
        fields: Mapping[str, str],
        allowed: Sequence[str],
        on_end: Callable[[], None],
        num_threads: int = 2,
        nixl: Reader | None = None,
    ) -> None:
        """With `nixl` pages are read by it from engines that have it too."""
        self.secret, self.fields, self._on_end = secret, fields, on_end
        self.num_threads, self.nixl = num_threads, nixl
        self.refusals = SparingLog(log, most=5)
        self._allowed = [wire.place(entry) for entry in allowed]
        self._peers: dict[Address, _Peer] = {}
        self._visits: dict[int, Visit] = {}
        self._lock = threading.Lock()
        self._ended: list[tuple[int, list[bool]]] = []
        self._news: list[Visit] = []
        self._waiting_bytes = 0
        self.bytes_per_second = 0.0  # measured with each pull
        self.bytes_read = 0

    # -- visits

    def visit(self, number: int, address: Address, token: bytes, boot: bytes, most: int = MOST_NAMES) -> None:
        """Begin to ask what a loan holds, which can be `most` pages; `visited` says when that is known. Raises InvalidRequestError for an engine that
        isn't allowed.
        """
        if not self._may(address):
            raise InvalidRequestError(
                f"kv_transfer_params: remote_host and remote_port name {address[0]}:{address[1]}, which isn't among the peers of this "
                "engine's kv_connector_extra_config."
            )
        if (peer := self._peers.get(address)) is None:
            idle = [at for at, other in self._peers.items() if not other.visits]
            for at in idle[: max(len(self._peers) - MAX_IDLE_PEERS + 1, 0)]:
                self._peers.pop(at).end()
            peer = _Peer(self, address)
        visit = self._visits[number] = Visit(number, peer, token, boot, most)
        if address not in self._peers and len(self._peers) >= MAX_PEERS:
            return peer.fail(f"isn't asked: {MAX_PEERS} others are already", visit)
        self._peers[address] = peer
        peer.begin(visit)

    def visited(self) -> list[tuple[int, str]]:
        """Visits with news since the last call: "" says that `lent` knows their pages, other texts why they have failed."""
        with self._lock:
            news, self._news = self._news, []
        return [(visit.number, visit.failed) for visit in news if not visit.left]

    def lent(self, number: int) -> dict[int, dict[bytes, int]]:
        """The keys of a visit's pages by group. Their values say nothing."""
        return self._visits[number].lent

    def leave(self, number: int) -> None:
        """Give the loan back. Reads of it that are under way end, and not well."""
        if (visit := self._visits.pop(number, None)) is not None:
            visit.left = True
            visit.peer.leave(visit)

    # -- PageStore

    def read(self, number: int, pages: Sequence[Page]) -> None:
        """See PageStore. `number` is that of a visit, whose pages these are: a request reads by its own loan, as others may be left meanwhile."""
        self.read_later(number, len(pages), lambda: pages)

    def read_later(self, number: int, count: int, make: Callable[[], Sequence[Page]]) -> None:
        """As `read`. A thread of the peer makes the pages, so many of them."""
        reading, visit = _Read(number, count), self._visits.get(number)
        if visit is None or visit.failed:
            self.batch_ended(reading, 0)
        else:
            visit.peer.read(visit, make, reading)

    def begin(self, reading: _Read, sizes: Sequence[int]) -> None:
        """A read is divided into batches of so many bytes."""
        with self._lock:
            reading.batches += len(sizes)
            self._waiting_bytes += sum(sizes)

    def ended(self) -> list[tuple[int, list[bool]]]:
        """See PageStore."""
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def seconds(self, nbytes: int) -> float:
        """See PageStore."""
        return (self._waiting_bytes + nbytes) / (self.bytes_per_second or 1e9)

    def close(self) -> None:
        """End all visits and connections. No place is written to any more when it returns."""
        for number in list(self._visits):
            self.leave(number)
        peers, self._peers = self._peers, {}
        for peer in peers.values():
            peer.end()
        for peer in peers.values():
            peer.join()

    # -- what the threads say

    def tell(self, visit: Visit) -> None:
        """A visit has news."""
        with self._lock:
            self._news.append(visit)
        self._on_end()

    def batch_ended(self, reading: _Read, nbytes: int, right: int = 0, began: float = math.inf) -> None:
        """A visit's batch of a read has ended, of which so many bytes were `right`. It was asked for when the clock said `began`."""
        with self._lock:
            self._waiting_bytes -= nbytes
            self.bytes_read += right
            reading.nbytes += right
            reading.began = min(reading.began, began)
            reading.batches -= 1
            if done := not reading.batches:
                self._ended.append((reading.number, reading.well))
                if reading.nbytes >= 1 << 20:  # less than that measures the way back and forth
                    rate = reading.nbytes / max(time.monotonic() - reading.began, 1e-6)
                    self.bytes_per_second += (rate - self.bytes_per_second) * (0.25 if self.bytes_per_second else 1)
        if done:
            self._on_end()

    def _may(self, address: Address) -> bool:
        try:
            host = ipaddress.ip_address(address[0])
        except ValueError:  # a name would have to be looked up, and says nothing about who answers
            return False
        return any(host in network and port in (0, address[1]) for network, port in self._allowed)


class _Peer:
    """Another engine: its visits, and the threads that speak to it."""

    def __init__(self, store: PeerStore, address: Address) -> None:
        self.store, self.address = store, address
        self.visits: dict[int, Visit] = {}
        self._lock = threading.Lock()
        self._asking = _Caller(self, self._renew)
        self._pulling = [_Caller(self) for _ in range(store.num_threads)]
        self._turn = 0

    def begin(self, visit: Visit) -> None:
        """Ask what the loan holds."""
        with self._lock:
            self.visits[visit.number] = visit
        self._asking.call(visit, lambda line: self._list(line, visit))

    def leave(self, visit: Visit) -> None:
        """Let the loan go."""
        with self._lock:
            self.visits.pop(visit.number, None)
        for caller in self._pulling:
            caller.stop(visit)
        if not visit.failed:
            self._asking.call(None, lambda line: _ask(line, wire.Release(visit.token)))

    def read(self, visit: Visit, make: Callable[[], Sequence[Page]], reading: _Read) -> None:
        """Divide pages among the connections, and pull them."""

        self._turn = turn = self._turn + 1

        def divide() -> None:
            lent = {} if visit.left or visit.failed else visit.lent
            try:
                known = [(at, page) for at, page in enumerate(make()) if page[1] in lent.get(page[0], ())]
                batches = _divided(known, len(self._pulling))
                sizes = [sum(len(page[2]) for _, page in batch) for batch in batches]
                self.store.begin(reading, sizes)
                for at, (batch, nbytes) in enumerate(zip(batches, sizes, strict=True)):
                    self._pull(self._caller(turn + at), visit, batch, reading, nbytes)
            finally:
                self.store.batch_ended(reading, 0)

        self._caller(turn).call(visit, None, divide)

    def _caller(self, turn: int) -> _Caller:
        return self._pulling[turn % len(self._pulling)]

    def _pull(self, caller: _Caller, visit: Visit, batch: Batch, reading: _Read, nbytes: int) -> None:
        begun = math.inf

        def run(line: Line) -> None:
            nonlocal begun
            begun = time.monotonic()
            _pull(line, visit, batch, reading, self.store.nixl)

        def then() -> None:
            right = sum(len(page[2]) for index, page in batch if reading.well[index])
            self.store.batch_ended(reading, nbytes, right, begun)

        caller.call(visit, run, then)

    def fail(self, reason: str, only: Visit | None = None) -> None:
        """This visit has failed, or all have."""
        with self._lock:
            failed = [visit for visit in ([only] if only else self.visits.values()) if not visit.failed]
            for visit in failed:
                visit.failed = reason
        if failed:
            self.store.refusals.warn(
                "Peer %s:%d %s. Prompts whose pages it lent are recomputed (%d).", *self.address, reason, len(failed)
            )
        for visit in failed:
            self.store.tell(visit)

    def end(self) -> None:
        """Let its threads end."""
        for caller in (self._asking, *self._pulling):
            caller.end()

    def join(self) -> None:
        """Wait until nobody pulls. Who asks has no places, and gives loans back before it ends."""
        for caller in self._pulling:
            caller.join()

    def _list(self, line: Line, visit: Visit) -> None:
        count, lent = 0, dict[int, dict[bytes, int]]()
        while True:
            if visit.left:
                return
            line.send(wire.List(visit.token, count), deadline := time.monotonic() + GRACE_SECONDS)
            listed = line.receive(wire.Listed, deadline)
            count += len(listed.pages)
            if max(count, listed.total) > visit.most:
                many = f"{max(count, listed.total):,} pages, of at most {visit.most:,} that can be needed"
                return self.fail(f"lists {many}", visit)  # the request may be to blame, and the line is in step
            for group, key in listed.pages:
                lent.setdefault(group, {})[key] = 0
            if count >= listed.total or not listed.pages:
                break
        visit.seconds = listed.seconds
        if not lent:
            return self.fail("holds no such loan (any more)", visit)
        visit.lent = lent
        self.store.tell(visit)

    def _renew(self, line: Line | None) -> float:
        """Renew all loans. Returns in how many seconds that has to be done again."""
        with self._lock:
            visits = [visit for visit in self.visits.values() if visit.lent and not visit.failed]
        for visit in visits if line is not None else ():
            if not _ask(line, wire.Renew(visit.token)):  # type: ignore[arg-type]
                self.fail("has ended the loan", visit)
        return max(min((visit.seconds for visit in visits), default=math.inf) / 3, 0.05)


class _Caller:
    """A thread with one connection to an engine. Both are made when there is something to do."""

    def __init__(self, peer: _Peer, renew: Callable[[Line | None], float] | None = None) -> None:
        """A fault of the connection where loans are asked for and renewed is of all visits. Another connection's is of one."""
        self._peer, self._renew, self._asks = peer, renew or (lambda line: math.inf), renew is not None
        self._jobs: deque[tuple[Visit | None, Callable[[Line], object] | None, Callable[[], None]]] = deque()
        self._wake = threading.Condition()
        self._line: Line | None = None
        self._boot = b""
        self._busy: Visit | None = None
        self._over, self._ended, self._last = False, False, math.inf
        self._thread: threading.Thread | None = None

    def call(
        self, visit: Visit | None, job: Callable[[Line], object] | None, then: Callable[[], None] = lambda: None
    ) -> None:
        """Run `job` with the connection, unless the visit has failed or was left; then `then` in any case."""
        with self._wake:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="pages of a peer", daemon=True)
                with contextlib.suppress(RuntimeError):  # no more threads can be had
                    thread.start()
                    self._thread = thread
            if there := self._thread is not None and not self._ended:
                self._jobs.append((visit, job, then))
                self._wake.notify()
        if not there:
            if visit is not None and not visit.left:
                self._peer.fail("can't be asked: this process can't start a thread", visit)
            then()

    def stop(self, visit: Visit) -> None:
        """End what runs for a visit."""
        with self._wake:
            if self._busy is visit and self._line is not None:
                self._line.stop()

    def end(self) -> None:
        """End what runs, and the thread. Loans that were left are released first, for some seconds."""
        with self._wake:
            self._over, self._last = True, time.monotonic() + GRACE_SECONDS
            if self._busy is not None and self._line is not None:
                self._line.stop()
            self._wake.notify()

    def join(self) -> None:
        """Wait for the thread."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        renewal = time.monotonic()
        while True:
            with self._wake:
                wait = renewal + self._renew(None) - time.monotonic()
                if wait > 0:
                    self._wake.wait_for(lambda: self._jobs or self._over, None if wait == math.inf else wait)
                job = self._jobs.popleft() if self._jobs and (wait > 0 or self._over) else None
                self._ended = job is None and self._over
            if self._ended:
                break
            visit, run, then = job or (None, self._renew, lambda: None)
            renewal = renewal if job else time.monotonic()
            if run is not None:
                self._guard(partial(self._try, visit, run))
            self._guard(then)
        self._drop()

    def _guard(self, job: Callable[[], object]) -> None:
        try:
            job()
        except Exception:
            log.exception("Peer %s:%d: a call has failed", *self._peer.address)
            self._peer.fail("can't be used, for the error above")
            self._drop()

    def _try(self, visit: Visit | None, run: Callable[[Line], object]) -> None:
        """Once more with a fresh connection if an old one turns out to be closed, as after a long time without a call."""
        for old in (self._line is not None, False):
            if visit is not None and (visit.failed or visit.left) or time.monotonic() > self._last:
                return
            try:
                self._connect(visit)
                if visit is not None and visit.boot != self._boot:
                    if not old:
                        return self._peer.fail("has been started anew since", visit)
                    raise WireError("was another start of the engine")
                assert self._line is not None
                run(self._line)
                return
            except WireError as error:
                self._drop()
                if visit is not None and visit.left:
                    return
                if not old or error.late:
                    return self._peer.fail(str(error), None if self._asks else visit)
            finally:
                with self._wake:
                    self._busy = None

    def _connect(self, visit: Visit | None) -> None:
        with self._wake:
            self._busy = visit
            if visit is not None and visit.left:
                raise WireError("isn't needed any more")
            if self._line is not None:
                return
            line = self._line = Line.connecting(self._peer.address)  # which `stop` ends, too
        line.connected(deadline := time.monotonic() + GRACE_SECONDS)
        store = self._peer.store
        self._boot = wire.greet(line, store.secret, self._peer.address, store.fields, deadline)

    def _drop(self) -> None:
        with self._wake:
            line, self._line = self._line, None
        if line is not None:
            line.close()


def _divided(pages: Batch, connections: int) -> list[Batch]:
    """Parts of about as many bytes, as many of them for each connection: all work from the first byte to the last."""
    total = sum(len(page[2]) for _, page in pages)
    most = min(connections * PULL_BYTES, max(total, 1))
    rounds = max(math.ceil(total / most), math.ceil(len(pages) / (connections * PULL_PAGES)))
    share = max(total / max(rounds * connections, 1), min(LEAST_PULL_BYTES, PULL_BYTES))
    batches: list[Batch] = []
    before, last = 0, -1
    for one in pages:
        if (number := int(before / share)) != last or len(batches[-1]) == PULL_PAGES:
            batches.append([])
            last = number
        batches[-1].append(one)
        before += len(one[1][2])
    return batches


def _ask(line: Line, question: wire.Renew | wire.Release) -> bool:
    line.send(question, deadline := time.monotonic() + GRACE_SECONDS)
    return line.receive(wire.Done, deadline).well


def _pull(line: Line, visit: Visit, batch: Batch, reading: _Read, nixl: Reader | None = None) -> None:
    """Pull a visit's pages. A page is well if it was still lent after its last byte, and has its checksum."""
    deadline = time.monotonic() + GRACE_SECONDS + sum(len(view) for _, (_, _, view) in batch) / MIN_RATE
    asked = [(group, key, len(view)) for _, (group, key, view) in batch]
    if nixl is not None:
        line.send(wire.Locate(visit.token, asked), deadline)
        located = line.receive(wire.Located, deadline)
        try:
            if located.agent:
                return _read_by_nixl(line, visit, batch, reading, nixl, located, deadline)
        except NixlError as error:
            if visit.left:
                raise WireError("isn't needed any more") from None
            visit.peer.store.refusals.warn(
                "Peer %s:%d isn't read by NIXL, but over TCP: %s", *visit.peer.address, error
            )
    line.send(wire.Pull(visit.token, asked), deadline)
    there = line.receive(wire.Sending, deadline).there
    coming = [page for page, is_there in zip(batch, _as_many(there, batch), strict=True) if is_there]
    sums = []
    for _, (_, _, view) in coming:
        line.receive_into(view, deadline)
        sums.append(wire.checksum(view))
    _settle(reading, coming, sums, line.receive(wire.Sent, deadline))


def _read_by_nixl(
    line: Line, visit: Visit, batch: Batch, reading: _Read, nixl: Reader, located: wire.Located, deadline: float
) -> None:
    pairs = [pair for pair in zip(batch, _as_many(located.addresses, batch), strict=True) if pair[1]]
    coming, addresses = [page for page, _ in pairs], [address for _, address in pairs]
    views = [view for _, (_, _, view) in coming]
    if coming:
        half = (deadline + time.monotonic()) / 2  # TCP needs the rest, where NIXL doesn't end
        nixl.read(located.agent, addresses, views, half, lambda: visit.left)
    line.send(wire.Check(visit.token, [(group, key) for _, (group, key, _) in coming]), deadline)
    _settle(reading, coming, [wire.checksum(view) for view in views], line.receive(wire.Sent, deadline))


def _as_many(answers: list[Kind], batch: Batch) -> list[Kind]:
    if len(answers) != len(batch):
        raise WireError(f"answers {len(batch)} pages with {len(answers)}")
    return answers


def _settle(reading: _Read, coming: Batch, sums: list[bytes], sent: wire.Sent) -> None:
    if sent.held and len(sent.sums) != len(sums):
        raise WireError(f"has sent {len(sums)} pages, and {len(sent.sums)} checksums")
    for (index, _), ours, theirs in zip(coming, sums, sent.sums if sent.held else (), strict=sent.held):
        reading.well[index] = ours == theirs
