"""Equal servers: which of them takes a request, which are dead, and what each of them does.

The rule is that of engine/frontend/replicas.py: a request goes to the server with the fewest of this proxy's requests under way, and rather to
one that was sent the beginning of its prompt. A proxy has no tokenizer. Four bytes of a prompt's JSON stand for a token, which is what they are
in English text.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Sequence

from pagerunner import limits
from pagerunner.logs import SparingLog
from pagerunner.memory.affinity import UNITS_OF_A_REQUEST, SentUnits
from pagerunner.server.errors import HttpError
from pagerunner.server.proxy.metrics import ProxyMetrics
from pagerunner.server.proxy.options import ProxyOptions
from pagerunner.server.proxy.upstream import Call, Link, Upstream, UpstreamError

logger = logging.getLogger(__name__)
_troubles = SparingLog(logger, most=20)


_BUSY = (429, 503)
_MOST_SENT = 2
"""How often a request may be sent where it may be worked on. A request that kills servers so kills two."""
_HEALTH = Call(b"GET", b"/health", [], b"")


class Server:
    """A server: `fault` says why it takes no requests, "" if it does. `running` counts this proxy's requests."""

    def __init__(self, name: str, url: str, options: ProxyOptions, metrics: ProxyMetrics) -> None:
        self.name, self.upstream = name, Upstream(url)
        self.sent = SentUnits()
        self.running = self._failures = 0
        self._failed_at = -math.inf
        self.fault = "has not answered yet"
        self._options = options
        self._metrics, self._labels = metrics, (name, self.upstream.url)
        metrics.running.labels(*self._labels).set_function(lambda: self.running)
        metrics.up.labels(*self._labels).set_function(lambda: not self.fault)

    async def ask(self, call: Call, hashes: Sequence[bytes]) -> Link:
        """Send it a request. `done` must be called with the answer. Raises what `Upstream.ask` raises."""
        self.running += 1
        self._metrics.requests.labels(*self._labels).inc()
        self.sent.add(hashes)
        try:
            return await self.upstream.ask(call)
        except BaseException:
            self.running -= 1
            raise

    def done(self, answer: Link) -> None:
        """Nobody reads on."""
        self.running -= 1
        answer.close()

    def failed(self, reason: str, error: UpstreamError | None = None) -> None:
        """It has not answered a request as it should."""
        self._metrics.failures.labels(*self._labels, reason).inc()
        if error is not None:
            _troubles.warn("A request has failed at the %s (%s): it %s.", *self._labels, error)

    async def watch(self) -> None:
        """Check its health for ever, first after a while."""
        while True:
            await asyncio.sleep(self._options.health_check_interval_secs)
            await self.check()

    async def check(self) -> None:
        """Ask for its health."""
        fault, seconds = "", self._options.health_check_timeout_secs
        try:
            async with asyncio.timeout(seconds):
                answer = await self.upstream.ask(_HEALTH)
                try:
                    await answer.whole(limits.MAX_BODY_BYTES)
                finally:
                    answer.close()
            if answer.status >= 300:
                fault = f"answers /health with status {answer.status}"
        except TimeoutError:
            fault = f"has not answered /health within {seconds:g} seconds (--health-check-timeout-secs)"
        except UpstreamError as error:
            return self.heard(str(error), refused=error.refused)
        except HttpError:  # this process has no room for a connection, which is not the server's fault
            return
        self.heard(fault)

    def heard(self, fault: str, *, refused: bool = False) -> None:
        """How a check has ended, or that it can't be reached. "" is health. What many requests find at once counts once."""
        interval, threshold = self._options.health_check_interval_secs, self._options.health_failure_threshold
        now = time.monotonic()
        if fault and not self.fault and not refused and now < self._failed_at + interval / 2:
            return
        self._failures, self._failed_at = (self._failures + 1, now) if fault else (0, -math.inf)
        if not fault and self.fault:
            logger.info("The %s (%s) takes requests.", *self._labels)
            self.fault = ""
        elif self.fault:
            self.fault = fault
        elif refused or self._failures >= threshold:
            logger.warning("The %s (%s) takes no more requests: it %s.", *self._labels, fault)
            self.fault = fault
            self.upstream.close()
        if refused:  # its process has ended, and what it had kept
            self.sent.clear()


class Pool:
    """Servers that can take each other's requests."""

    def __init__(self, servers: Sequence[Server], policy: str) -> None:
        self.servers, self._policy = servers, policy
        self._turn = 0

    @property
    def chooses_by_prefix(self) -> bool:
        """Whether it makes a difference what a prompt begins with."""
        return len(self.servers) > 1 and self._policy == "cache_aware"

    @property
    def faults(self) -> dict[str, str]:
        """Why servers take no requests, by their names."""
        return {one.name: one.fault for one in self.servers if one.fault}

    def _able(self, without: set[Server]) -> list[Server]:
        return [one for one in self.servers if not one.fault and one not in without]

    def choose(self, hashes: Sequence[bytes], without: set[Server]) -> Server | None:
        """The server for a prompt with these units."""
        able = self._able(without)
        if not able:
            return None
        self._turn += 1
        turn = self._turn % len(able)
        if self._policy == "round_robin":
            return able[turn]
        return min(  # of equal ones each has its turn
            able[turn:] + able[:turn], key=lambda one: one.running - one.sent.leading(hashes) / UNITS_OF_A_REQUEST
        )

    @contextlib.asynccontextmanager
    async def asked(self, call: Call, hashes: Sequence[bytes]) -> AsyncIterator[Link]:
        """The answer of one of them. Another one is asked if it can't be reached, is too busy, or dies before it answers.

        Raises:
            HttpError: no server is left that can be asked. 502 if the last one had taken the request.
            UpstreamError: the answer breaks off. The message has the server's name.
        """
        server, answer = await self._first_answer(call, hashes)
        try:
            yield answer
        except UpstreamError as error:
            server.failed("broken off", error)
            raise UpstreamError(f"the {server.name} {error}") from error
        finally:
            server.done(answer)

    async def _first_answer(self, call: Call, hashes: Sequence[bytes]) -> tuple[Server, Link]:
        tried: set[Server] = set()
        fault, taken, passed_on = "", 0, False
        while taken < _MOST_SENT and (server := self.choose(hashes, tried)) is not None:
            try:
                answer = await server.ask(call, hashes)
            except UpstreamError as error:
                fault = f"the {server.name} {error}"
                taken += error.sent
                if not error.stale:
                    tried.add(server)
                    server.failed("no answer" if error.sent else "not reached", error)
                if not error.sent:
                    server.heard(str(error), refused=error.refused)
                continue
            tried.add(server)
            if passed_on or answer.status not in _BUSY or not self._able(tried):
                return server, answer
            passed_on = True
            server.failed("busy")
            server.done(answer)
        if taken:
            raise HttpError(502, f"No answer has come: {fault}.")
        faults = "; ".join(f"the {name} {why}" for name, why in self.faults.items()) or fault
        raise HttpError(503, f"No server takes requests now: {faults}.", retry=True)
