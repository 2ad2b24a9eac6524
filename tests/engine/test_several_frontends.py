"""A core with several frontends: what becomes of requests whose API process has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import msgspec
import pytest
import zmq

from helpers.fake_core import FakeCore, FakeOptions
from helpers.plans import one_group
from pagerunner.engine.core import messages as wire
from pagerunner.engine.core.adapters import AdapterWork, Loader
from pagerunner.engine.core.process import CoreLoop
from pagerunner.errors import InvalidRequestError
from pagerunner.memory.manager import KVManager
from pagerunner.sched.adapters import Adapters
from pagerunner.types import EngineRequest, RequestUpdate, SamplingParams
from pagerunner.types.lora import AdapterEnd, LoRARequest

Peers = list[zmq.Socket[bytes]]


def add(name: str, max_tokens: int) -> bytes:
    params = SamplingParams(max_tokens=max_tokens)
    one = EngineRequest(request_id=name, prompt_token_ids=[5], params=params, seed=0, max_tokens=max_tokens)
    return msgspec.msgpack.encode(wire.Add.of([one]))


class Reads:
    """A loader that reads what it is told to when it is `open`."""

    def __init__(self) -> None:
        self.open, self._numbers = False, list[int]()

    def read(self, number: int, path: str) -> None:
        self._numbers.append(number)

    def ended(self, seconds: float) -> list[AdapterEnd]:
        found, self._numbers = (self._numbers, []) if self.open else ([], self._numbers)
        return [AdapterEnd(number, "digest", 8) for number in found]


class Scripted(FakeCore):
    """Each of its steps does the next part of a script. It refuses what it has, as the real one."""

    def __init__(self, script: Iterator[None], reads: Reads | None = None) -> None:
        super().__init__(FakeOptions(), 8)
        self.script, self.known = script, list[str]()
        books = Adapters(1)
        books.restart(KVManager(one_group(8)))
        self._work = AdapterWork(books, cast(Loader, reads), 1)

    @property
    def adapters(self) -> AdapterWork:  # type: ignore[override]
        return self._work

    def poll_adapters(self) -> bool:
        self._work.poll(0.0)
        return bool(self._work.loaded)

    def add(self, request: EngineRequest) -> None:
        if request.request_id in self.known:
            raise InvalidRequestError(f"request_id {request.request_id!r} is already in use.", "request_id")
        self.known.append(request.request_id)
        super().add(request)

    def step(self) -> list[RequestUpdate]:
        next(self.script, None)
        return super().step()


def heard(
    script: Callable[[Peers], Iterator[None]], frontends: int = 1, reads: Reads | None = None
) -> tuple[list[str], list[list[wire.FromCore]]]:
    """Run a core for the supervisor and frontends, of which the first sends one at once: the requests that it was given, and what each has heard."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    own, peers = [[context.socket(zmq.PAIR) for _ in range(1 + frontends)] for _ in range(2)]
    for number, (one, other) in enumerate(zip(own, peers, strict=True)):
        one.bind(f"inproc://{number}")
        other.connect(f"inproc://{number}")
    core = Scripted(script(peers), reads)
    for peer in peers[1:]:
        peer.send(msgspec.msgpack.encode(wire.Hello(1)))
    peers[1].send(add("first", 1000))
    try:
        CoreLoop(core, own, stall_seconds=60).run()
        found: list[list[wire.FromCore]] = []
        for peer in peers:
            found.append([])
            while peer.poll(0):
                found[-1].append(msgspec.msgpack.decode(peer.recv(), type=wire.FromCore))
        return core.known, found
    finally:
        context.destroy(0)


def tell(peer: zmq.Socket[bytes], *messages: bytes | wire.ToCore) -> None:
    for one in messages:
        peer.send(one if isinstance(one, bytes) else msgspec.msgpack.encode(one))


def test_a_core_tells_its_figures_before_the_first_request() -> None:
    """So that a scrape of a new server finds the names of groups, host memory and adapters."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    own, peer = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    own.bind("inproc://alone")
    peer.connect("inproc://alone")
    tell(peer, wire.Shutdown())
    try:
        CoreLoop(Scripted(iter(())), [own], stall_seconds=60).run()
        told = msgspec.msgpack.decode(peer.recv(), type=wire.FromCore)
        assert isinstance(told, wire.Updates) and told.stats is not None
    finally:
        context.destroy(0)


def test_a_request_that_comes_in_the_step_of_its_process_end_never_runs() -> None:
    def script(peers: Peers) -> Iterator[None]:
        tell(peers[1], add("late", 1000))
        tell(peers[0], wire.Gone(1, 1), add("another one's", 100))
        for _ in range(20):
            yield
        tell(peers[0], wire.Shutdown())

    known, (_, gone) = heard(script)
    assert known == ["first", "another one's"]
    told = [message for message in gone if isinstance(message, wire.Updates) and message.stats is not None]
    assert len(told) == 1, "stats, when it said hello; nothing is kept for a process that is gone"


def test_in_one_long_step_a_process_ends_and_the_next_one_sends_a_request() -> None:
    def script(peers: Peers) -> Iterator[None]:
        tell(peers[1], add("late", 1000), wire.Hello(2), add("new", 100))
        yield
        tell(peers[0], wire.Gone(1, 1))  # is read after what the next process has sent
        for _ in range(20):
            yield
        tell(peers[0], wire.Shutdown())

    known, (_, frontend) = heard(script)
    assert known[-1] == "new"
    updates = [one for message in frontend for one in getattr(message, "updates", ())]
    ends = {name: [one.finish_reason for one in updates if one.request_id == name] for name in ("late", "new")}
    assert "late" in known and not ends["late"] and len(ends["new"]) > 10 and not any(ends["new"])


@pytest.mark.parametrize("again", [1, 2])
def test_a_sequence_whose_id_is_sent_again_stays_with_its_process(again: int) -> None:
    """No client does that: each id has the number of its process. A fault elsewhere must not leave a reader waiting."""

    def script(peers: Peers) -> Iterator[None]:
        for _ in range(5):
            yield
        tell(peers[again], add("first", 50))
        for _ in range(20):
            yield
        tell(peers[0], wire.Shutdown())

    known, (supervisor, *frontends) = heard(script, frontends=2)
    assert known == ["first"]
    updates = [
        [one for message in told if isinstance(message, wire.Updates) for one in message.updates]
        for told in (supervisor, *frontends)
    ]
    assert len(updates[1]) > 20 and not updates[0] and not updates[2]
    refused = [[one for one in told if isinstance(one, wire.Refused)] for told in frontends]
    assert [len(one) for one in refused] == ([1, 0] if again == 1 else [0, 1])
    (error,) = [one.error.exception() for own in refused for one in own]
    assert str(error) == "request_id 'first' is already in use."


def test_an_id_that_waits_for_the_end_of_a_pause_is_used_too_and_is_free_afterwards() -> None:
    def script(peers: Peers) -> Iterator[None]:
        tell(peers[1], add("short", 6))
        yield
        tell(peers[0], wire.Abort(["first"]), wire.Sleep(1, 0, "wait"))
        yield
        tell(peers[1], add("put off", 1000))
        tell(peers[2], add("put off", 1000))
        tell(peers[0], wire.WakeUp(2, None))
        for _ in range(30):
            yield
        tell(peers[0], wire.Shutdown())

    known, (_, first, second) = heard(script, frontends=2)
    assert known == ["first", "short", "put off"]
    assert [one.request_ids for one in second if isinstance(one, wire.Refused)] == [["put off"]]
    updates = [one for message in first for one in getattr(message, "updates", ())]
    assert len([one for one in updates if one.request_id == "put off"]) > 10


@pytest.mark.parametrize("known", ["by its end", "by the next one"])
def test_an_adapter_that_is_read_for_a_process_that_has_ended_leaves_its_name_free(known: str) -> None:
    """The next process of that number is there when it has been read. Whoever loads it afterwards gets it."""
    reads, load = Reads(), LoRARequest("sql", 1, "/sql")

    def script(peers: Peers) -> Iterator[None]:
        tell(peers[1], wire.LoadAdapter(1, load))
        yield
        if known == "by its end":
            tell(peers[0], wire.Gone(1, 1))
        tell(peers[1], wire.Hello(2))
        tell(peers[0], add("another one's", 100))
        yield
        yield
        reads.open = True
        yield
        yield
        tell(peers[1], wire.LoadAdapter(2, load))
        yield
        yield
        tell(peers[1], wire.NameAdapter(3, "sql"))
        yield
        yield
        tell(peers[0], wire.Shutdown())

    _, (_, frontend) = heard(script, reads=reads)
    replies = [one for one in frontend if isinstance(one, wire.Reply)]
    assert [(one.call_id, one.value, one.error) for one in replies] == [(2, "digest", None), (3, None, None)]
    assert [info.name for one in frontend if isinstance(one, wire.Adapters) for info in one.infos] == ["sql"]
