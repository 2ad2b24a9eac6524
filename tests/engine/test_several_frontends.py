"""A core with several frontends: what becomes of requests whose API process has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import zmq

from helpers.fake_core import FakeCore, FakeOptions
from pagerunner.engine.core import messages as wire
from pagerunner.engine.core.process import CoreLoop
from pagerunner.types import EngineRequest, RequestUpdate, SamplingParams

Peers = list[zmq.Socket[bytes]]


def add(name: str, max_tokens: int) -> bytes:
    params = SamplingParams(max_tokens=max_tokens)
    one = EngineRequest(request_id=name, prompt_token_ids=[5], params=params, seed=0, max_tokens=max_tokens)
    return msgspec.msgpack.encode(wire.Add.of([one]))


class Scripted(FakeCore):
    """Each of its steps does the next part of a script."""

    def __init__(self, script: Iterator[None]) -> None:
        super().__init__(FakeOptions(), 8)
        self.script, self.known = script, list[str]()

    def add(self, request: EngineRequest) -> None:
        self.known.append(request.request_id)
        super().add(request)

    def step(self) -> list[RequestUpdate]:
        next(self.script, None)
        return super().step()


def heard(script: Callable[[Peers], Iterator[None]]) -> tuple[list[str], list[list[wire.FromCore]]]:
    """Run a core for the supervisor and one frontend: the requests that it was given, and what each has heard."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    own, peers = [[context.socket(zmq.PAIR) for _ in range(2)] for _ in range(2)]
    for number, (one, other) in enumerate(zip(own, peers, strict=True)):
        one.bind(f"inproc://{number}")
        other.connect(f"inproc://{number}")
    core = Scripted(script(peers))
    peers[1].send(msgspec.msgpack.encode(wire.Hello(1)))
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
