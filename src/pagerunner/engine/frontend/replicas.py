"""The engines behind a frontend: each is a core in a process of its own, and one of them takes a request.

A request goes to the engine with the least to do, and rather to one that has computed the beginning of its prompt. Example: engine 0
runs 6 requests and engine 1 runs 4. A prompt goes to engine 1. But if engine 0 was sent another prompt with the same first 2,048 tokens,
it goes to engine 0: 2,048 tokens count as much as 4 requests that run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from pagerunner import limits
from pagerunner.engine.core import messages as wire
from pagerunner.engine.core.client import CoreClient, LoadedCore
from pagerunner.engine.frontend.desk import OutputDesk
from pagerunner.engine.frontend.observer import EngineObserver
from pagerunner.engine.frontend.output_processor import OutputProcessor
from pagerunner.engine.frontend.stream import OutputStream
from pagerunner.errors import EngineDeadError, InvalidRequestError, PagerunnerError
from pagerunner.memory.affinity import MOST_UNITS, UNITS_OF_A_REQUEST, SentUnits
from pagerunner.memory.prefix import UNIT_TOKENS, PrefixChain, RecentPrompts, chain_seed
from pagerunner.sched.scheduler import WAITING_WEIGHT
from pagerunner.types import EngineRequest
from pagerunner.types.checks import check_rank
from pagerunner.types.lora import AdapterInfo, LoRARequest
from pagerunner.types.weights import WeightChange

Result = TypeVar("Result")


class Replica:
    """One engine core as a frontend sees it: the way to it, the requests that it runs, and its level of sleep (-1 is awake).

    `asked` is its own part of `EngineObserver`. `died` is called when the core ends. A core that is silent for more than `stall_seconds`, and
    has something to do or was asked for a sign of life, hangs.
    """

    def __init__(
        self,
        core: LoadedCore,
        outputs: OutputProcessor,
        asked: EngineObserver,
        died: Callable[[], None],
        stall_seconds: float,
    ) -> None:
        self.desk = OutputDesk(outputs, asked)
        self.client = CoreClient(core, receive=self._receive, died=self._core_died)
        self.level = -1
        self._weights_fault = ""
        self.adapters: dict[str, AdapterInfo] = {}
        self._stall_seconds = stall_seconds
        self._long_calls = 0
        self._observer, self._died = asked, died
        self.sent = SentUnits()

    @property
    def memory_plan(self) -> dict[str, Any]:
        """The core's memory plan as plain JSON values."""
        plan: dict[str, Any] = msgspec.json.decode(self.client.ready.memory_plan)
        return plan

    @property
    def load(self) -> int:
        """How much it has to do: requests that run, and more for those that wait."""
        stats, progress = self.desk.stats, self.desk.progress
        waiting = max(progress.queued, stats.waiting)  # the core also knows those of other frontends
        return WAITING_WEIGHT * waiting + max(progress.unfinished - progress.queued, stats.running)

    def submit(
        self, request_id: str, text: str | None, requests: list[EngineRequest], arrival: float, hashes: Sequence[bytes]
    ) -> OutputStream:
        """Send a request's sequences. Raises InvalidRequestError, or EngineDeadError when the core is gone."""
        try:
            message = wire.Add.of(requests)
        except (OverflowError, TypeError, ValueError) as error:
            raise InvalidRequestError(f"The request holds a value that cannot be sent: {error}.") from error
        stream = self.desk.add(request_id, text, requests, arrival)
        try:
            self.client.send(message)
        except EngineDeadError:
            self.desk.leave(request_id)
            self.desk.progress.dropped([one.request_id for one in requests])
            raise
        self.sent.add(hashes)
        return stream

    def abort(self, sequence_ids: Sequence[str]) -> None:
        """Have the core end these sequences, if it lives."""
        if sequence_ids and self.client.death is None:
            self.client.send(wire.Abort(list(sequence_ids)))

    async def sleep(self, level: int, mode: str) -> None:
        """Have the core sleep. Raises its error."""
        if level:
            self.sent.clear()
        await self._long_call(lambda call_id: wire.Sleep(call_id, level, mode))

    async def prepare_sleep(self, level: int, mode: str) -> None:
        """Raise now what `sleep` would raise. Requests go on."""
        await self._long_call(lambda call_id: wire.PrepareSleep(call_id, level, mode))

    async def sleep_level(self) -> int | None:
        """The level that the core says it sleeps at. Raises what `answer` raises."""
        return await self.answer(self.client.sleep_level())

    async def answer(self, call: Coroutine[Any, Any, Result]) -> Result:
        """The answer to a call that the core answers between two steps. Raises EngineDeadError if the core hangs, at once if that is known.

        While a call is under way that may take longer, such as the wait for a trainer, this one has the time that it takes.
        """
        patient = self._long_calls > 0
        if not patient:
            if self.client.death is None and (fault := self.fault):
                call.close()
                raise EngineDeadError(fault)
            self.desk.progress.ask()
        try:
            found = await asyncio.wait_for(call, None if patient else self._stall_seconds)
        except TimeoutError:
            said = f"{self.client.who} has not answered a call for {self._stall_seconds:g} seconds."
            raise EngineDeadError(said) from None
        self.desk.progress.touch()
        return found

    def look(self, seconds: float) -> None:
        """Ask for a sign of life if there was none for so many seconds, and tell the observer whether the core hangs.

        So it is known of a core that has nothing to do for this frontend. Its stats, which come with the answer, go to all frontends.
        """
        if self.client.death is not None:
            return
        if self.level < 0 and not self._long_calls and self.desk.progress.is_unheard(seconds):
            self.desk.progress.ask()
            self.client.send(wire.ReadSleepLevel(0))
        self._observer.on_health(not self.fault)

    async def return_to(self, level: int) -> None:
        """Be at the level of sleep that it was at before. Raises the core's error."""
        if self.level != level and (self.level > 0 or level < 0):
            await self.wake_up(None)
        if self.level != level:
            await self.sleep(level, "keep")

    async def wake_up(self, tags: Sequence[str] | None) -> None:
        """Have the core wake up. Raises its error."""
        await self._long_call(lambda call_id: wire.WakeUp(call_id, None if tags is None else list(tags)))

    async def change_weights(self, change: WeightChange) -> None:
        """Have the core do a part of an update of its weights. Raises its error."""
        self.sent.clear()
        await self._long_call(lambda call_id: wire.ChangeWeights(call_id, change))

    async def read_adapter(self, request: LoRARequest) -> str:
        """Have the core read an adapter, which has no name yet; its digest. Raises its error."""
        return str(await self._long_call(lambda call_id: wire.LoadAdapter(call_id, request)))

    async def name_adapter(self, name: str, *, drop: bool = False) -> None:
        """Have the core give the name to what it has read for it, or forget that. Raises its error."""
        await self.answer(self.client.call(lambda call_id: wire.NameAdapter(call_id, name, drop)))

    async def unload_adapter(self, name: str) -> None:
        """Have the core forget an adapter's name. Raises its error."""
        await self.answer(self.client.call(lambda call_id: wire.UnloadAdapter(call_id, name)))

    async def _long_call(self, make: Callable[[int], wire.Call]) -> wire.Answer:
        self._long_calls += 1
        try:
            return await self.client.call(make)
        finally:
            self._long_calls -= 1

    async def reset_prefix_cache(self) -> bool:
        """Have the core forget all cached prompt pages. False when some belong to running requests."""
        self.sent.clear()
        return bool(await self.answer(self.client.call(wire.ResetPrefixCache)))

    @property
    def fault(self) -> str:
        """Why it can't serve: it is dead, or hangs. "" if it can."""
        if self.client.death is not None:
            return str(self.client.death)
        silent, unfinished = self.stalled_seconds(), self.desk.progress.unfinished
        if silent <= self._stall_seconds:
            return ""
        who, most = (
            self.client.who,
            f"more than {self._stall_seconds:g} count as a stall {limits.knob('STALL_SECONDS')}",
        )
        if unfinished:
            return f"{who} has {unfinished} unfinished requests and has made no step for {silent:.0f} seconds; {most}."
        return f"{who} has given no sign of life for {silent:.0f} seconds; {most}."

    @property
    def flaw(self) -> str:
        """Why it can't serve as the others do, though it runs: an update of its weights has failed. "" if it can."""
        return self._weights_fault

    def stalled_seconds(self) -> float:
        """Seconds without a sign of life while one is due."""
        return 0.0 if self.level >= 0 else self.desk.progress.stalled_seconds()

    def _receive(self, message: wire.FromCore) -> None:
        if isinstance(message, wire.Adapters):
            self.adapters = {info.name: info for info in message.infos}
            return
        # A sleep that fails may change the level too, and so may a call of another frontend.
        if isinstance(message, wire.Updates) and message.stats is not None:
            self._weights_fault = message.weights_fault
            if message.level != self.level:
                self.level = message.level
                self.desk.progress.touch()
                self._observer.on_sleep(None if self.level < 0 else self.level)
        self.abort(self.desk.receive(message))

    def _core_died(self, error: EngineDeadError) -> None:
        self.desk.fail_all(error)
        self._observer.on_death()
        self._died()


class Chooser:
    """Finds the engine for a request."""

    def __init__(self, replicas: Sequence[Replica], *, prefixes: bool, teams: int = 1) -> None:
        """`prefixes`: the engines keep what they have computed of prompts. Each has so many `teams`."""
        self._replicas, self._teams = replicas, teams
        self._prefixes = prefixes and len(replicas) > 1
        self._recent = RecentPrompts()
        self._turn = 0

    def hashes(self, request: EngineRequest) -> list[bytes]:
        """Those of the units at the beginning of a prompt; none where there is nothing to choose."""
        if not self._prefixes:
            return []
        chain = PrefixChain(chain_seed(request.cache_salt, adapter=request.lora), self._recent)
        chain.cover(request.prompt_token_ids, MOST_UNITS * UNIT_TOKENS)
        return chain.hashes

    def choose(self, hashes: Sequence[bytes], rank: int | None) -> Replica:
        """The engine for a prompt with such hashes, or the one with the number `rank`, or with this team, whatever it has to do.

        Raises:
            InvalidRequestError: there is no engine, or team, with this number.
            EngineDeadError: no engine is left, or this one is gone or hangs.
        """
        count = len(self._replicas) * self._teams
        if rank is not None:
            check_rank("data_parallel_rank", rank, count)
            return check_able([self._replicas[rank // self._teams]])[0]
        able = check_able(self._replicas)
        fine = [one for one in able if one.level <= 0 and not one.flaw]
        fine = [one for one in fine if one.level < 0] or fine or able  # a paused one serves later
        self._turn = (self._turn + 1) % len(fine)  # of equal ones each has its turn
        return min(
            fine[self._turn :] + fine[: self._turn],
            key=lambda one: one.load - one.sent.leading(hashes) / UNITS_OF_A_REQUEST,
        )


def named(asked: Sequence[Replica], errors: Mapping[Replica, BaseException]) -> list[BaseException]:
    """Errors of calls, which say whose they are if there are several engines, unless all that were asked have the same one.

    Example: `Engine 1 of 2: Rank 0 of 2: ...`.
    """
    if len(errors) == len(asked) and len(set(map(str, errors.values()))) == 1:
        return [*errors.values()]
    for one, error in errors.items():
        engine = one.client.who.removeprefix("The process of ")
        if isinstance(error, PagerunnerError) and engine != one.client.who and engine not in str(error):
            error.args = (f"{engine.capitalize()}: {error}", *error.args[1:])
    return [*errors.values()]


def check_alive(replicas: Sequence[Replica]) -> list[Replica]:
    """Those that are alive. Raises EngineDeadError with their reasons if none is."""
    living = [one for one in replicas if one.client.death is None]
    if not living:
        raise EngineDeadError(" ".join(dict.fromkeys(str(one.client.death) for one in replicas)))
    return living


def check_able(replicas: Sequence[Replica]) -> list[Replica]:
    """Those that are alive and don't hang. Raises EngineDeadError with the faults of all if there is none."""
    faults = [one.fault for one in replicas]
    if all(faults):
        raise EngineDeadError(" ".join(dict.fromkeys(faults)))
    return [one for one, fault in zip(replicas, faults, strict=True) if not fault]


async def answers(replicas: Sequence[Replica], call: Callable[[Replica], Coroutine[Any, Any, Result]]) -> list[Result]:
    """The answers of all that live. Raises the error of the first that can't answer and lives on."""
    asked = check_alive(replicas)
    given = await asyncio.gather(*map(call, asked), return_exceptions=True)
    check_alive(replicas)
    failed = {
        one: answer
        for one, answer in zip(asked, given, strict=True)
        if isinstance(answer, BaseException) and one.client.death is None
    }
    for error in named(asked, failed):
        raise error
    return [answer for answer in given if not isinstance(answer, BaseException)]
