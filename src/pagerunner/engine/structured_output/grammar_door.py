"""The door for grammars: a bad one is refused before its request is queued.

A client's grammar can take any time to be read. A grammar that nests deeply enough ends the process that compiles it. So each
grammar is tried in a process of its own (engine/structured_output/grammar_worker.py), several side by side. This module decides
which grammar may begin: one of the client with the fewest at work, and of these the smallest. A grammar that no request waits
for any more is given up.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import queue
import signal
import subprocess
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future

import msgspec

from pagerunner import limits
from pagerunner.children import helper_environment, start
from pagerunner.engine.structured_output.grammar import KEPT, TOKENIZER_SECONDS, plain_reason
from pagerunner.engine.structured_output.grammar_worker import Order, Reply, Setup
from pagerunner.errors import InvalidRequestError, PagerunnerError, RequestFailedError
from pagerunner.types import Grammar, StructuredOutputsParams

_PARAM = "structured_outputs"
_AT_ONCE = 8
_LARGE_AT_ONCE = 4
_LARGE_BYTES = 4_096
_FOR_OTHERS = 2  # places that only a client without a grammar at work may take
_ATTEMPTS = 2  # a process that is killed from outside says nothing about the grammar


def _unusable(fault: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"structured_outputs is nothing that can be followed: {plain_reason(fault).rstrip('.')}.", param=_PARAM
    )


class _Job:
    """One grammar that is waited for, queued or at work."""

    def __init__(self, number: int, key: bytes, wanted: StructuredOutputsParams, size: int, source: str) -> None:
        self.number = number
        self.key = key
        self.wanted = wanted
        self.size = size
        self.source = source
        self.waiting = 0
        self.started = False
        self.attempts = 0
        self.future: Future[Grammar] = Future()


class GrammarDoor:
    """Checks structured outputs for one tokenizer (its tokenizer.json), model vocabulary and end tokens.

    With `disable_any_whitespace` JSON is compact unless a request names its own `whitespace_pattern`. Safe to use from
    several threads and event loops.
    """

    def __init__(
        self, tokenizer_json: str, size: int, eos_token_ids: Iterable[int], *, disable_any_whitespace: bool = False
    ) -> None:
        self._compact = disable_any_whitespace
        self._setup = msgspec.json.encode(Setup(tokenizer_json, size, list(eos_token_ids)))
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._settled: OrderedDict[bytes, Grammar | str] = OrderedDict()  # by digest; a text is the compiler's refusal
        self._jobs: dict[bytes, _Job] = {}
        self._process: _Process | None = None
        self._refusal: InvalidRequestError | None = None  # of the tokenizer, for good
        self._closed = False

    def check(self, wanted: StructuredOutputsParams) -> Grammar:
        """The grammar for the core of a text that must be as `wanted`. Waits for the check. The compiler's answer is remembered.

        Raises:
            InvalidRequestError: it is malformed, too large, or takes more than limits.MAX_GRAMMAR_SECONDS.
            RequestFailedError: it can't be checked now.
        """
        job = self._join(wanted, "")
        if isinstance(job, Grammar):
            return job
        try:
            return job.future.result()
        finally:
            self._leave(job)

    async def prepare(self, wanted: StructuredOutputsParams, source: str = "") -> Grammar:
        """As `check`, for an event loop, and a client that has the name `source`: clients get equal shares.

        A caller that is cancelled gives its grammar up. Raises what `check` raises.
        """
        job = self._join(wanted, source)
        if isinstance(job, Grammar):
            return job
        try:
            return await asyncio.shield(asyncio.wrap_future(job.future))
        finally:
            self._leave(job)

    def close(self) -> None:
        """End the process. Callers that still wait get RequestFailedError. Doesn't wait. Idempotent."""
        with self._lock:
            self._closed = True
            self._fail_all(RequestFailedError("The engine is shutting down; the grammar was not checked."))
            if self._process is not None:
                self._process.kill()

    def _join(self, wanted: StructuredOutputsParams, source: str) -> _Job | Grammar:
        is_json = wanted.json is not None or bool(wanted.json_object) or wanted.structural_tag is not None
        if self._compact and is_json and wanted.whitespace_pattern is None:
            wanted = msgspec.structs.replace(wanted, disable_any_whitespace=True)
        try:
            line = msgspec.json.encode(wanted)
        except (TypeError, ValueError, RecursionError) as error:
            raise _unusable(str(error)) from None
        most = limits.MAX_GRAMMAR_CHARS
        # A schema given as text has been measured already. Everything beside a schema is short.
        given = wanted.json if wanted.json is not None else wanted.structural_tag
        if isinstance(given, dict) and len(line) > most and len(line.decode()) > most:
            raise InvalidRequestError(
                f"structured_outputs has {len(line.decode()):,} characters; at most {most:,} are allowed "
                f"{limits.knob('MAX_GRAMMAR_CHARS')}.",
                param=_PARAM,
            )
        key = hashlib.sha256(line).digest()
        with self._lock:
            if self._closed:
                raise RequestFailedError("The engine is shutting down; no grammar is checked any more.")
            if self._refusal is not None:
                raise InvalidRequestError(str(self._refusal), param=_PARAM)
            known = self._settled.get(key)
            if known is not None:
                self._settled.move_to_end(key)
                if isinstance(known, str):
                    raise _unusable(known)
                return known
            job = self._jobs.get(key)
            if job is None:
                job = self._jobs[key] = _Job(next(self._numbers), key, wanted, len(line), source)
            job.waiting += 1
            self._start_jobs()
            return job

    def _leave(self, job: _Job) -> None:
        with self._lock:
            job.waiting -= 1
            if job.waiting or self._jobs.get(job.key) is not job:
                return
            del self._jobs[job.key]
            job.future.cancel()
            if job.started and self._process is not None:
                self._process.send(Order(job.number))
            self._start_jobs()

    def _start_jobs(self) -> None:
        """Send the jobs that may begin. Call it with the lock held."""
        while (job := self._next_job()) is not None:
            if self._process is None:
                self._process = _Process(self._setup, weakref.WeakMethod(self._receive), weakref.WeakMethod(self._died))
                weakref.finalize(self, self._process.kill)
            job.started = True
            job.attempts += 1
            self._process.send(Order(job.number, limits.MAX_GRAMMAR_SECONDS, job.wanted))

    def _next_job(self) -> _Job | None:
        running = [job for job in self._jobs.values() if job.started]
        shares = Counter(job.source for job in running)
        large = sum(job.size > _LARGE_BYTES for job in running)
        if len(running) >= _AT_ONCE:
            return None
        queued = [
            job
            for job in self._jobs.values()
            if not job.started
            and (job.size <= _LARGE_BYTES or large < _LARGE_AT_ONCE)
            and (len(running) < _AT_ONCE - _FOR_OTHERS or not shares[job.source])
        ]
        return min(queued, key=lambda job: (shares[job.source], job.size, job.number), default=None)

    def _receive(self, reply: Reply) -> None:
        """A child has ended; or, as job -1, the tokenizer can't be read."""
        with self._lock:
            if reply.job < 0:
                self._refusal = _unusable(f"this model's tokenizer is of another kind: {reply.fault}")
                self._fail_all(self._refusal)
                return
            job = next((job for job in self._jobs.values() if job.started and job.number == reply.job), None)
            if job is None:
                return  # given up
            if reply.end == "killed" and job.attempts < _ATTEMPTS:
                job.started = False
            else:
                del self._jobs[job.key]
                self._settle(job, reply)
            self._start_jobs()

    def _settle(self, job: _Job, reply: Reply) -> None:
        if reply.end == "killed":
            job.future.set_exception(RequestFailedError("The process that checked the grammar was killed."))
            return
        if reply.end:
            job.future.set_exception(
                _unusable(
                    f"it is too deep, too large, or takes more than {limits.MAX_GRAMMAR_SECONDS:g} seconds to compile "
                    f"{limits.knob('MAX_GRAMMAR_SECONDS')}"
                )
            )
            return
        wanted = job.wanted
        found = reply.fault or Grammar(reply.text, wanted.after or "", wanted.begins or "")
        self._settled[job.key] = found
        if len(self._settled) > KEPT:
            self._settled.popitem(last=False)
        if isinstance(found, str):
            job.future.set_exception(_unusable(found))
        else:
            job.future.set_result(found)

    def _died(self, process: _Process, reason: str) -> None:
        """The process has ended by itself: its jobs are tried once more in another one."""
        with self._lock:
            if process is not self._process or self._closed:
                return
            self._process = None
            for job in [job for job in self._jobs.values() if job.started]:
                job.started = False
                if job.attempts >= _ATTEMPTS:
                    del self._jobs[job.key]
                    job.future.set_exception(RequestFailedError(f"The process that checks grammars {reason}."))
            self._start_jobs()

    def _fail_all(self, error: PagerunnerError) -> None:
        for job in self._jobs.values():
            if not job.future.done():
                job.future.set_exception(error)
        self._jobs.clear()


class _Process:
    """The worker process, and two threads that write to it and read from it. Neither the door nor Python's exit waits for them.

    `died` is called once when it ends by itself.
    """

    def __init__(
        self,
        setup: bytes,
        receive: Callable[[], Callable[[Reply], None] | None],
        died: Callable[[], Callable[[_Process, str], None] | None],
    ) -> None:
        self._receive = receive
        self._died = died
        self._orders: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._orders.put(setup + b"\n")
        self._child: subprocess.Popen[bytes] | None = None
        self._killed = threading.Event()
        threading.Thread(target=self._run, name="pagerunner-grammar", daemon=True).start()

    def send(self, order: Order) -> None:
        """Send an order to the worker. Returns at once."""
        self._orders.put(msgspec.json.encode(order) + b"\n")

    def kill(self) -> None:
        """End it and its children."""
        self._killed.set()
        self._orders.put(None)
        if self._child is not None:
            _kill_group(self._child)

    @property
    def pid(self) -> int | None:
        """The process id once it has been started."""
        return None if self._child is None else self._child.pid

    def _run(self) -> None:
        reason = "can't be started"
        try:
            child = self._child = self._launch()
            if self._killed.is_set():
                _kill_group(child)
            threading.Thread(target=self._write, args=(child,), name="pagerunner-grammar-out", daemon=True).start()
            late = threading.Timer(TOKENIZER_SECONDS, _kill_group, [child])
            late.daemon = True
            late.start()
            reason = f"didn't start within {TOKENIZER_SECONDS:g} seconds, or died of the tokenizer"
            assert child.stdout is not None
            for line in child.stdout:
                late.cancel()
                reason = "was killed"
                reply = msgspec.json.decode(line, type=Reply)
                receive = self._receive()
                if receive is None or self._killed.is_set():
                    break
                if reply.job >= 0 or reply.fault:
                    receive(reply)
                del receive
            late.cancel()
            _kill_group(child)
        except OSError as error:
            reason = f"can't be started: {error}"
        finally:
            self._orders.put(None)
            died = self._died()
            if died is not None:
                died(self, reason)

    def _launch(self) -> subprocess.Popen[bytes]:
        return start(
            "pagerunner.engine.structured_output.grammar_worker",
            helper_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            own_session=True,
        )

    def _write(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdin is not None
        try:
            while (line := self._orders.get()) is not None:
                child.stdin.write(line)
                child.stdin.flush()
            child.stdin.close()
        except OSError:
            pass  # the process has ended, and the thread that reads from it reports that


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    child.wait()
