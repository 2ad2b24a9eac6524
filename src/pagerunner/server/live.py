"""What the page at /ui is told about the engine. All viewers share one sampling, and without viewers nothing is sampled.

A frame is a JSON object. The first one a viewer gets is whole; later ones leave out what has not changed since the frame
before it. A viewer who reads too slowly to get every frame gets a whole one again.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np

from pagerunner.engine.core.live import LiveState, LiveStep
from pagerunner.engine.frontend.async_engine import AsyncEngine
from pagerunner.errors import PagerunnerError
from pagerunner.server.errors import HttpError
from pagerunner.server.metrics import Latencies
from pagerunner.server.service import sse

PERIOD_SECONDS = 0.2
COST_SHARE = 0.005
"""Most of the core's time that looking at it may take: where a look is dear, looks are rarer."""
MAX_VIEWERS = 32
_HISTORY_STEPS = 240
_RANKED_FRAMES = 5  # percentiles cost as much as the rest of a frame, and no person reads them five times a second
_PERCENTILES = (0.5, 0.9, 0.99)
logger = logging.getLogger(__name__)


def percentiles(values: deque[float]) -> list[float]:
    """The 50th, 90th and 99th percentile, nearest rank; empty without values."""
    ranked = sorted(values)
    return [ranked[min(int(share * len(ranked)), len(ranked) - 1)] for share in _PERCENTILES] if ranked else []


def bitmap(pages: bytes) -> str:
    """A set of int32 page ids as base64: bit p % 8 of byte p // 8 is set for page p, up to the highest."""
    ids = np.frombuffer(pages, np.int32)
    flags = np.zeros(int(ids.max(initial=-1)) + 1, np.bool_)
    flags[ids] = True
    return _base64(np.packbits(flags, bitorder="little").tobytes())


def splice(old: bytes, new: bytes) -> tuple[int, str] | None:
    """How a list of int32 pages changed: how many leading pages stay, and the pages after them.

    None if nothing changed.
    """
    if old == new:
        return None
    if new.startswith(old):
        return len(old) // 4, _base64(new[len(old) :])
    return 0, _base64(new)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def frame(state: LiveState, last: LiveState | None) -> dict[str, Any]:
    """The state as changes since `last`, or as a whole if `last` is None. page/model.js reads it."""
    old_cached = [None] * len(state.cached) if last is None else last.cached
    old_pages = {} if last is None else {one.request_id: one.pages for one in last.requests}
    changed: dict[str, Any] = {"clock": state.clock, "sleep": state.sleep_level, "stats": state.stats}
    if last is None or (state.slabs, state.owners) != (last.slabs, last.owners):
        changed["slabs"] = [_base64(state.slabs), _base64(state.owners)]
    changed["cached"] = [None if new == old else bitmap(new) for new, old in zip(state.cached, old_cached, strict=True)]
    changed["requests"] = [
        [
            one.request_id,
            one.slot,
            round(state.clock - one.arrival, 2),
            one.prompt,
            one.tokens,
            one.computed,
            one.cached,
            one.limit,
            one.wait,
            # A request that was preempted has no pages, and the page forgets what it had.
            [
                splice(old, new)
                for old, new in zip(
                    old_pages.get(one.request_id) or [b""] * len(one.pages), one.pages, strict=bool(one.pages)
                )
            ],
        ]
        for one in state.requests
    ]
    return changed


def _crowded() -> HttpError:
    return HttpError(429, f"{MAX_VIEWERS} viewers watch the engine already; no more are served.")


class LiveFeed:
    """Samples an engine, of several that with this `number`, for its viewers. Each of its `ranks` has the same pages.

    `viewers` is how many there are. `closing` ends every stream: the server is about to stop. `can_sleep` says whether the engine was started with
    enable_sleep_mode; the page offers to put it to sleep only then.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        latencies: Latencies,
        closing: asyncio.Event,
        *,
        can_sleep: bool,
        number: int = 0,
        ranks: int = 1,
    ) -> None:
        self._engine, self._ranks = engine, ranks
        self._engine_number = number
        self._can_sleep = can_sleep
        self._latencies = latencies
        self._closing = closing
        self.viewers = 0
        self._sampler: asyncio.Task[None] | None = None
        self._tick: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._number = 0  # of the latest frame
        self._state: LiveState | None = None
        self._summary: dict[str, Any] = {}
        self._delta = self._whole = b""
        self._steps: deque[LiveStep] = deque(maxlen=_HISTORY_STEPS)
        self._failure = ""

    def view(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events until the viewer leaves. Raises HttpError 429 when there are too many viewers already."""
        if self.viewers >= MAX_VIEWERS:
            raise _crowded()
        return self._events()

    async def _events(self) -> AsyncGenerator[bytes, None]:
        if self.viewers >= MAX_VIEWERS:  # several have come between `view` and this
            yield sse({"error": str(_crowded())})
            return
        self.viewers += 1
        seen = -1
        closing = asyncio.ensure_future(self._closing.wait())
        if self._sampler is None or self._sampler.done():
            self._failure = ""
            self._sampler = asyncio.create_task(self._sample(), name="pagerunner-live")
        try:
            while not closing.done():
                if self._state is not None and self._number != seen:
                    event = self._delta if seen == self._number - 1 else self._as_whole(self._state)
                    seen = self._number
                    yield event
                elif self._failure:
                    yield sse({"error": self._failure})
                    return
                else:
                    events: list[asyncio.Future[Any]] = [self._tick, closing]
                    await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        finally:
            closing.cancel()
            self.viewers -= 1
            if not self.viewers:
                self._sampler.cancel()
                self._sampler = None
                self._forget()

    async def _sample(self) -> None:
        clock = asyncio.get_running_loop().time
        self._latencies.open = True
        try:
            while True:
                started = clock()
                state = await self._engine.watch(self._steps[-1].number if self._steps else 0, self._engine_number)
                self._publish(state)
                period = max(PERIOD_SECONDS, state.cost / COST_SHARE)
                await asyncio.sleep(max(period - clock() + started, PERIOD_SECONDS / 4))
        except PagerunnerError as error:
            self._fail(str(error))
        except Exception as error:
            logger.exception("The engine cannot be watched.")
            self._fail(f"The engine cannot be watched: {error!r}.")

    def _publish(self, state: LiveState) -> None:
        last, self._state = self._state, state
        taps = self._latencies
        if last is None or self._number % _RANKED_FRAMES == 0:
            self._summary = {"first_token": percentiles(taps.first_token), "inter_token": percentiles(taps.inter_token)}
        self._steps.extend(state.steps)
        self._number += 1
        self._whole = b""
        self._delta = sse({**frame(state, last), **self._summary, "steps": state.steps}) if last is not None else b""
        self._wake()

    def _as_whole(self, state: LiveState) -> bytes:
        if not self._whole:
            whole = {**frame(state, None), **self._summary, "steps": list(self._steps)}
            engines = [len(self._engine.places), self._engine_number]
            plan = self._engine.places[self._engine_number][0].memory_plan
            facts = {"plan": plan, "ranks": self._ranks, "can_sleep": self._can_sleep, "engines": engines}
            self._whole = sse({**whole, **facts})
        return self._whole

    def _fail(self, reason: str) -> None:
        self._forget()
        self._failure = reason
        self._wake()

    def _wake(self) -> None:
        self._tick.set_result(None)
        self._tick = asyncio.get_running_loop().create_future()

    def _forget(self) -> None:
        """Forget the latest frame: there are no viewers any more, or there is nothing to see."""
        self._latencies.open = False
        self._state = None
        self._steps.clear()
        self._latencies.first_token.clear()
        self._latencies.inter_token.clear()
