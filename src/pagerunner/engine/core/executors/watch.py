"""RankWatch: a thread that knows how the ranks are, and ends all of them when one has failed.

A rank that is gone leaves the others waiting in a sum, so what its process says can't be trusted to come from the thread that waits.
This thread looks at four things: that a process has ended; that a rank says it has failed; that a rank is silent; and that nothing moves though
there is something to do, be it a start, a call or a step. All that ranks do ends in a wait for the others. So one that hangs stops all of them, and
as long as one moves, none hangs.
The first of these that is found becomes the engine's reason. Then all ranks are killed, which frees whoever waits for them.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import zmq

from pagerunner.children import Process, end, exit_reason, remove_directory
from pagerunner.engine.core.executors.doors import Doors
from pagerunner.engine.core.executors.pages import RanksStore
from pagerunner.engine.core.messages import WireError
from pagerunner.engine.worker import orders
from pagerunner.errors import EngineDeadError, PagerunnerError
from pagerunner.limits import knob
from pagerunner.types import AdapterEnd, TransferEnd

logger = logging.getLogger(__name__)

_FoundT = TypeVar("_FoundT")
LOST = 1 << 16
"""Instead of an exit status: whoever held the process is gone, and nobody knows how it ended."""
_LOOK_MS = 100
_CALL_FACTOR = 10  # a start or a call may be without a move for so many times as long as a step: FlashInfer builds kernels for minutes
_CAUSE_SECONDS = 1.0  # after a rank has lost another one, and before that is taken for the reason
_LAST_WORDS_SECONDS = 0.3
_KILLED_SECONDS = 0.02  # the same of a rank that was killed, which can't have said anything about it
_STOPPED_SECONDS = 2.0  # this process itself was stopped if a look takes longer


class _Known:
    """What is known of a rank: how far it has come, and when it was last heard."""

    __slots__ = ("alive", "heard_at")

    def __init__(self, rank: int) -> None:
        self.alive = orders.Alive(rank, 0)
        self.heard_at: float | None = None


class _Asked(NamedTuple):
    """A start or a call, which takes until `found` has something of all ranks. Then they have `done` it. It may be without a move for so many `seconds`."""

    found: Callable[[], Container[int]]
    done: str
    seconds: float


class RankWatch:
    """Knows how the ranks are. Its methods are for the thread that runs the engine."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], directory: Path, ranks: int, seconds: float, doors: Doors
    ) -> None:
        """`seconds` is how long a rank may be silent, and how long a step may be without a move. Binds the socket for reports by `doors`."""
        self.team_ranks = ranks
        """Ranks that carry out the same transfers: those of a team."""
        self.machines: Sequence[str] = ()
        """Where each rank is, if they are on several machines."""
        self._ranks, self._directory, self._seconds = ranks, directory, seconds
        self._process = os.getpid()
        self._reports: zmq.Socket[bytes] = context.socket(zmq.PULL)
        self._reports.setsockopt(zmq.RCVHWM, 0)
        doors.bind(self._reports, orders.REPORTS)
        self._decoder = msgspec.msgpack.Decoder(orders.Report)
        self._processes: dict[int, Process] = {}
        self._known = {rank: _Known(rank) for rank in range(ranks)}
        self._moved_at = time.monotonic()
        """When a rank last moved, or none had anything to do."""
        self._asked: _Asked | None = None
        self.given = 0
        """The steps that all ranks have been sent."""
        self._said: dict[int, PagerunnerError] = {}  # what ranks say has failed
        self._lost: dict[int, PagerunnerError] = {}  # the same of ranks that have lost another one
        self._lost_at: float | None = None
        self._changed = threading.Condition()
        self._ending = False
        self._error: PagerunnerError | None = None
        self.failure_fd, self._failure = os.pipe()
        self.here: dict[int, dict[str, str]] = {}
        self.meeting = ""
        """See orders.Join."""
        self.read: orders.Read | None = None
        self.loaded: dict[int, orders.Loaded] = {}
        self.done: dict[int, dict[int, orders.Done]] = {}
        """Answers to calls, by call and rank."""
        self._ended: dict[tuple[int, int], dict[int, TransferEnd]] = {}  # by team and number, then by rank
        self._of_adapters: dict[int, dict[int, AdapterEnd]] = {}  # by number, then by rank
        self._ready: dict[int, int] = {}
        self.page_stores: Sequence[RanksStore] = ()
        """Those of the teams, if ranks have stores of pages."""
        self._thread = threading.Thread(target=self._watch, name="pagerunner-ranks", daemon=True)

    def begin(self, processes: Sequence[Process]) -> None:
        """Watch the processes of ranks 0, 1, ..., which have just been started."""
        self._processes = dict(enumerate(processes))
        self._thread.start()

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is the thread that watches, which may be collecting garbage: it can't wait for ranks."""
        return self._thread is threading.current_thread()

    def check(self) -> None:
        """Raise why the ranks are gone, if they are."""
        if self._error is not None:
            raise type(self._error)(str(self._error))  # a new one: an error that was raised refers to its callers

    def wait(self, read: Callable[[], _FoundT | None], late: Callable[[], str], seconds: float) -> _FoundT:
        """What `read` returns as soon as that isn't None. After `seconds` the ranks are ended, with the sentence `late()`.

        Raises why the ranks are gone, if they are.
        """
        until = time.monotonic() + seconds
        with self._changed:
            while True:
                self.check()
                found = read()
                if found is not None:
                    return found
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
        raise self.fail(late())

    def from_all(
        self,
        found: Callable[[], Mapping[int, _FoundT]],
        done: str,
        seconds: float = 0.0,
        told: Callable[[], None] | None = None,
    ) -> Mapping[int, _FoundT]:
        """What `found` has of all ranks. They may take their time for it, as long as one of them moves; at least so many seconds without a move.

        What they have `done` then is part of a sentence. `told` is called after each report. Raises why the ranks are gone, if they are.
        """
        with self._changed:
            self._asked = _Asked(found, done, max(seconds, _CALL_FACTOR * self._seconds))
            try:
                while True:
                    self.check()
                    if told is not None:
                        told()
                    if len(found()) == self._ranks:
                        return dict(found())
                    self._changed.wait()
            finally:
                self._asked = None

    @property
    def busy_seconds(self) -> float:
        """How long rank 0's device has worked."""
        return self._known[0].alive.busy_seconds

    @property
    def host_ready(self) -> int:
        """The bytes of host memory that all ranks can use for pages."""
        return min(self._ready.values()) if len(self._ready) == self._ranks else 0

    def ended_transfers(self, seconds: float) -> list[TransferEnd]:
        """Transfers that all ranks of a team have ended, each given once. With none, wait for one for up to so many seconds.

        Raises why the ranks are gone, if they are.
        """

        def ended() -> list[TransferEnd]:
            done = {name: one for name, one in self._ended.items() if len(one) == self.team_ranks}
            for name in done:
                del self._ended[name]
            return [
                TransferEnd(
                    number, all(end.well for end in one.values()), max(end.seconds for end in one.values()), team
                )
                for (team, number), one in done.items()
            ]

        return self._soon(ended, seconds)

    def ended_adapters(self, seconds: float) -> Mapping[int, Mapping[int, AdapterEnd]]:
        """Work on adapters that all ranks have ended, each given once. With none, wait for some for up to so many seconds.

        Raises why the ranks are gone, if they are.
        """

        def ended() -> dict[int, dict[int, AdapterEnd]]:
            done = [number for number, of_ranks in self._of_adapters.items() if len(of_ranks) == self._ranks]
            return {number: self._of_adapters.pop(number) for number in done}

        return self._soon(ended, seconds)

    def _soon(self, ended: Callable[[], _FoundT], seconds: float) -> _FoundT:
        with self._changed:
            self.check()
            found = ended()
            if not found and seconds > 0:
                self._changed.wait(seconds)
                self.check()
                found = ended()
            return found

    def cause(self) -> PagerunnerError | None:
        """Why the ranks are gone, if that becomes known in a moment."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None, _CAUSE_SECONDS + 2 * _LAST_WORDS_SECONDS + 1.0)
        return self._error

    def fail(self, sentence: str) -> PagerunnerError:
        """End all ranks with this reason, if there is none yet. Returns the reason."""
        self._end(EngineDeadError(sentence))
        assert self._error is not None
        return self._error

    def close(self) -> None:
        """End all ranks, and remove what they used."""
        if os.getpid() != self._process:  # a fork, whose ranks they aren't
            return
        try:
            self._end(EngineDeadError("The engine has been shut down."))
            if not self.is_own_thread:
                if self._thread.ident is None:  # the processes couldn't be watched, and nobody else closes this
                    self._reports.close(0)
                else:
                    self._thread.join()
                for fd in (self.failure_fd, self._failure):
                    os.close(fd)
        finally:  # a user who presses Ctrl-C again ends the wait for the processes
            remove_directory(self._directory)

    def _watch(self) -> None:
        try:
            self._look()
        except Exception as error:
            logger.exception("The ranks can't be watched any more.")
            self._end(EngineDeadError(f"The ranks can't be watched any more ({error!r})."))
        finally:
            self._reports.close(0)

    def _look(self) -> None:
        while not self._ending:
            began = time.monotonic()
            self._reports.poll(_LOOK_MS)
            self._read_reports()
            now = time.monotonic()
            if now - began > _STOPPED_SECONDS:
                self._forgive(now)
            ended = [rank for rank, process in self._processes.items() if process.poll() is not None]
            reason = self._why_ended(ended) or self._why_failed(now) or self._why_late(now)
            if reason is not None:
                self._end(reason)

    def _read_reports(self) -> None:
        with self._changed:
            while True:
                try:
                    report = self._decoder.decode(self._reports.recv(zmq.NOBLOCK))
                except zmq.Again:
                    break
                self._take(report)
            self._changed.notify_all()

    def _take(self, report: orders.Report) -> None:
        known, now = self._known[report.rank], time.monotonic()
        known.heard_at = now
        match report:
            case orders.Here(rank, runs):
                self.here[rank] = runs
                self.meeting = self.meeting or report.meeting
            case orders.Read():
                self.read = report
            case orders.Loaded(rank):
                self.loaded[rank], self._moved_at = report, now
            case orders.Done(rank, call_id):
                self.done.setdefault(call_id, {})[rank], self._moved_at = report, now
            case orders.Alive():
                if (report.moved, report.done) != (known.alive.moved, known.alive.done):
                    self._moved_at = now
                known.alive = report
            case orders.Moved(rank, ended, ready):
                self._ready[rank] = ready
                for one in ended:
                    self._ended.setdefault((rank // self.team_ranks, one.number), {})[rank] = one
            case orders.Kept(rank):
                self.page_stores[rank // self.team_ranks].take(rank % self.team_ranks, report)
            case orders.AdapterEnded(rank, end):
                self._of_adapters.setdefault(end.number, {})[rank] = end
            case orders.Failed(rank, error, follows):
                (self._lost if follows else self._said).setdefault(rank, self.named(rank, error))
                self._lost_at = self._lost_at or now

    def named(self, rank: int, error: WireError) -> PagerunnerError:
        """An error of a rank, with the rank's number."""
        found, who = error.exception(), f"Rank {rank} of {self._ranks}"
        said = str(found).removeprefix(who)
        return type(found)(f"{self.who(rank)}{said if said != str(found) else f': {found}'}")

    def _why_ended(self, ended: Sequence[int]) -> PagerunnerError | None:
        for rank in ended:
            status = self._processes[rank].wait()
            until = time.monotonic() + (_LAST_WORDS_SECONDS if status != -signal.SIGKILL else _KILLED_SECONDS)
            while rank not in self._said | self._lost and (left := until - time.monotonic()) > 0:
                self._reports.poll(int(1000 * left) + 1)
                self._read_reports()
            if rank not in self._said | self._lost:
                who = self.who(rank)
                gone = f"{who} is gone with its Ray actor, which was killed or has lost its machine."
                return EngineDeadError(gone if status == LOST else exit_reason(who, status))
        return None

    def _why_failed(self, now: float) -> PagerunnerError | None:
        if self._said:
            return next(iter(self._said.values()))
        if self._lost and self._lost_at is not None and now - self._lost_at > _CAUSE_SECONDS:
            return next(iter(self._lost.values()))
        return None

    def _why_late(self, now: float) -> PagerunnerError | None:
        """Whether a rank is silent, or nothing has moved, for too long."""
        for rank, known in self._known.items():
            if known.heard_at is not None and now - known.heard_at > self._seconds:
                return self._hung(rank, f"{self.who(rank)} has given no sign of life for {self._limit(self._seconds)}.")
        asked = self._asked
        if asked is None:
            behind = [rank for rank, known in self._known.items() if known.alive.done < self.given]
        else:
            behind = [rank for rank in self._known if rank not in asked.found()]
        if not behind:
            self._moved_at = now
        most = self._seconds if asked is None else asked.seconds
        if now - self._moved_at <= most:
            return None
        # the one that waits for none of the others, or has begun least
        rank = min(behind, key=lambda rank: self._known[rank].alive.place)
        who, alive, limit = self.who(rank), self._known[rank].alive, self._limit(most)
        if asked is not None:
            return self._hung(rank, f"{who} hangs: no rank has come further for {limit}, and it hasn't {asked.done}.")
        step = f"step {alive.done + 1:,} of {self.given:,} that it was given"
        if alive.steps == self.given:
            return self._hung(rank, f"{who}: its device has worked for {limit} on {step}, and hangs.")
        return self._hung(rank, f"{who} hangs: no rank has come further for {limit}, and it is at {step}.")

    def who(self, rank: int) -> str:
        """The rank in a sentence, with its machine if there are several."""
        return f"Rank {rank} of {self._ranks}{f' on {self.machines[rank]}' if self.machines else ''}"

    def _limit(self, seconds: float) -> str:
        return f"{seconds:g} seconds {knob('RANK_SECONDS')}"

    def _hung(self, rank: int, sentence: str) -> PagerunnerError:
        logger.error("%s Its threads say on standard error where they are.", sentence)
        self._processes[rank].send_signal(signal.SIGUSR1)
        time.sleep(_LAST_WORDS_SECONDS)
        return EngineDeadError(sentence)

    def _forgive(self, now: float) -> None:
        """This process was stopped for a while, so it couldn't hear anybody."""
        self._moved_at = now
        for known in self._known.values():
            known.heard_at = known.heard_at and now

    def _end(self, reason: PagerunnerError) -> None:
        """Kill all ranks, and then tell why, and which of them don't end. The first reason counts."""
        with self._changed:
            if self._ending:
                self._changed.wait_for(lambda: self._error is not None)
                return
            self._ending = True
        try:
            stuck = end({f"rank {rank} of {self._ranks}": process for rank, process in self._processes.items()})
            if stuck:
                reason = type(reason)(f"{reason}{stuck}")
        finally:
            with self._changed:
                self._error = reason
                os.write(self._failure, b"!")
                self._changed.notify_all()
