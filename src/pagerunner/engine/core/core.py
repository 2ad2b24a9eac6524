"""EngineCore: the step loop. Requests in, token updates out; everything about text is the frontend's."""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from pagerunner.config import one_of
from pagerunner.engine.core.adapters import NO_LORA, AdapterWork
from pagerunner.engine.core.executors.base import Executor, Pending
from pagerunner.engine.core.faults import step_fault
from pagerunner.engine.core.kv_events import Publisher
from pagerunner.engine.core.live import LiveState, StepLog
from pagerunner.engine.core.messages import StartUp
from pagerunner.engine.core.updates import WeightUpdates
from pagerunner.errors import ConfigError, EngineDeadError, EngineSleepingError, InvalidRequestError, PagerunnerError
from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.memory.ownership import MemoryState
from pagerunner.ops.device_errors import device_failure, never_free
from pagerunner.sched.adapters import Adapters
from pagerunner.sched.live import page_books
from pagerunner.sched.scheduler import Scheduler
from pagerunner.sched.stats import SchedulerStats
from pagerunner.sched.teams import TeamsScheduler
from pagerunner.tiers.exchange import Exchange
from pagerunner.types import EngineRequest, RequestUpdate, StepPlan
from pagerunner.types.checks import check_rank, in_vocabulary
from pagerunner.types.lora import AdapterInfo, LoRARequest
from pagerunner.types.weights import FinishUpdate, StartUpdate, WeightChange

SleepMode = Literal["abort", "wait", "keep"]
GUIDE_WAIT_SECONDS = 0.01  # how long a step that has nothing to run leaves other requests unread
TRANSFER_WAIT_SECONDS = 0.01  # the same
SHORT_STEP_TOKENS = 512


class EngineCore:
    """Schedules, launches and commits steps, with up to `max_in_flight` of them launched before the first is read."""

    def __init__(
        self,
        make_scheduler: Callable[[], Scheduler | TeamsScheduler],
        executor: Executor,
        memory_plan: MemoryPlan,
        *,
        vocab_size: int,
        max_in_flight: int,
        stages: int = 1,
        enable_sleep_mode: bool,
        host_tier: bool = False,
        make_exchange: Callable[[Scheduler], Exchange] | None = None,
        startup: StartUp | None = None,
        publishers: Sequence[Publisher] = (),
        adapters: Adapters | None = None,
        max_cpu_loras: int = 1,
    ) -> None:
        """`adapters` are the books that schedulers are made with, if requests may have adapters. Host memory keeps `max_cpu_loras` of them."""
        self._make_scheduler = make_scheduler
        self._scheduler = make_scheduler()
        self._executor = executor
        self._weights = WeightUpdates(executor)
        self._adapters: AdapterWork | None = None
        if adapters is not None:
            assert executor.adapters is not None, "the executor loads no adapters"
            self._adapters = AdapterWork(adapters, executor.adapters, max_cpu_loras)
        self._vocab_size = vocab_size
        self._max_in_flight, self._stages = max_in_flight, stages
        self._enable_sleep_mode = enable_sleep_mode
        self._host_tier, self._committed = host_tier, 0.0
        self._death: str | None = None
        self._checked_ids: tuple[object, object, object] = (None, None, None)  # of the last request
        self._exchange = make_exchange(self._one_scheduler()) if make_exchange is not None else None
        self._in_flight: deque[tuple[StepPlan, Pending, float]] = deque()
        self._unreported: list[RequestUpdate] = []
        self._step_log = StepLog()
        self._publishers = publishers  # one for each team, or none
        self.memory_plan = memory_plan
        self.startup = startup if startup is not None else StartUp()

    def add(self, request: EngineRequest, *, ids_checked: bool = False) -> None:
        """Queue a request. While the engine is paused (level 0) it waits for `wake_up`. `ids_checked`: all its ids are known to be the vocabulary's,
        as a frontend of this very process has looked at them. A look at 8,192 takes 0.06 ms, and no step runs before all prompts of a call were added.

        Raises:
            InvalidRequestError: it could never run; the message has the numbers.
            EngineSleepingError: the engine sleeps at level 1 or 2, or its weights are half new.
            EngineDeadError: a step has failed.
        """
        self.check_alive()
        if self.sleep_level != 0 or self.weights_fault:
            self.check_awake()
        if not ids_checked:
            self._check_ids(request)
        if self._exchange is not None and request.request_id in self._exchange.request_ids:
            raise InvalidRequestError(f"request_id {request.request_id!r} is already in use.", "request_id")
        if request.kv_transfer:
            if self._exchange is None:
                raise InvalidRequestError(
                    'kv_transfer_params: this engine neither lends nor pulls pages; start it with a kv_transfer_config such as {"kv_connector": '
                    '"PeerConnector", "kv_role": "kv_both"}.',
                    "kv_transfer_params",
                )
            self._one_scheduler().check(request)
            if self._exchange.take(request, self._adapter_of(request)):
                return
        self._scheduler.add(request)
        if self._exchange is not None:
            self._exchange.queued(request, self._adapter_of(request))

        self._begin_loads()

    def _begin_loads(self) -> None:
        """Begin to load for what was just queued, unless a step runs, which is followed by another one soon. More requests may be queued before the next
        step: a hundred prompts of 8,192 tokens take 30 ms, in which a bus moves seven of them.
        """
        if not self._host_tier or self.is_sleeping or any(plan.rows for plan, _, _ in self._in_flight):
            return
        try:
            self._end_transfers(0.0)
            while len(self._in_flight) >= self._max_in_flight:
                self._commit_oldest()
            if (plan := self._scheduler.schedule_loads()) is not None:
                self._launch(plan)
        except Exception as error:
            raise self._die(error) from error

    def _adapter_of(self, request: EngineRequest) -> AdapterInfo | None:
        return self.adapters.books.of(request.lora) if request.lora else None

    def _check_ids(self, request: EngineRequest) -> None:
        """Check the ids of another process's request: an id outside the vocabulary would end the device's context.

        Siblings share their lists, and there may be many siblings. So a list is checked once.
        """
        ids = (request.prompt_token_ids, request.params, request.bad_words_ids)
        if all(map(operator.is_, ids, self._checked_ids)):
            return
        words = [token for word in request.bad_words_ids for token in word]
        params = request.params
        for name, numbers in (
            ("prompt", request.prompt_token_ids),
            ("stop_token_ids", params.stop_token_ids or ()),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("logit_bias", params.logit_bias or ()),
            ("bad_words", words),
        ):
            in_vocabulary(name, numbers, self._vocab_size)
        self._checked_ids = ids

    def abort(self, request_ids: Iterable[str]) -> list[RequestUpdate]:
        """End requests now, wherever they are; returns their last updates. Unknown ids are ignored."""
        ids = list(request_ids)
        return self._scheduler.abort(ids) + (self._exchange.abort(ids) if self._exchange is not None else [])

    def recover(self, running: Iterable[tuple[EngineRequest, list[int]]]) -> None:
        """Start again after an interrupt that left a call halfway: KeyboardInterrupt, or another one that isn't an Exception.

        The books of requests and pages may contradict each other then, so both are made again. Every page is free, and the
        prefix cache is empty. `running` are the requests that go on, each after the output tokens that it has reported. All
        other requests are gone. Steps that were launched run to their end on the device before any new step.
        """
        before = self._scheduler
        scheduler = self._make_scheduler()
        try:
            scheduler.count_on(before)  # type: ignore[arg-type]  # one of the same kind
            for request, output in running:
                scheduler.resume(request, output, before.adapter_of(request.request_id))
            self._scheduler.close_guides()
        except BaseException:  # another interrupt: the next call of this method begins again
            scheduler.close_guides()
            raise
        self._executor.drain_transfers()
        if self._adapters is not None:
            self._adapters.restart()
        self._in_flight.clear()
        self._scheduler = scheduler
        self._publish_events()

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        if self._death is not None or self.is_sleeping:
            return False
        held = self._exchange is not None and self._exchange.busy
        return bool(self._in_flight) or self._scheduler.has_work or held

    def step(self) -> list[RequestUpdate]:
        """Launch what may be launched, then commit the oldest step in flight.

        Raises EngineDeadError when a step fails, and at every later call. The device and the scheduler may no longer agree
        on what was computed. Raises EngineSleepingError while the engine sleeps or is paused; no request is harmed by that.
        """
        self.check_alive()
        self.check_awake()
        try:
            updates = self._step()
            self._publish_events()
            return updates
        except Exception as error:
            raise self._die(error) from error

    def _step(self) -> list[RequestUpdate]:
        if (exchange := self._exchange) is None:
            return self._run_step()
        self._end_transfers(0.0)
        updates, arrived = exchange.poll(self._one_scheduler().needs_pages)
        updates += self._queue(arrived)
        if self._in_flight or self._scheduler.has_work:
            return updates + exchange.hold(self._run_step())
        if not updates:
            exchange.wait(TRANSFER_WAIT_SECONDS)
        return updates

    def _one_scheduler(self) -> Scheduler:
        assert isinstance(self._scheduler, Scheduler)  # teams don't exchange pages
        return self._scheduler

    def _stop_exchange(self, why: str) -> list[RequestUpdate]:
        """Lend and pull nothing any more. Requests that wait for pages of other engines are queued."""
        if self._exchange is None:
            return []
        updates, requests = self._exchange.stop(why, unregister=why == "sleep")
        return updates + self._queue(requests)

    def _queue(self, requests: Iterable[EngineRequest]) -> list[RequestUpdate]:
        """Queue requests that were kept back. Returns the last updates of those that can't be."""
        updates = []
        for request in requests:
            try:
                self._scheduler.add(request)
            except InvalidRequestError as error:
                name, said = request.request_id, str(error)
                updates.append(
                    RequestUpdate(
                        request_id=name, new_token_ids=[], finish_reason="error", error=said, param=error.param
                    )
                )
        return updates

    def _run_step(self) -> list[RequestUpdate]:
        self._end_transfers(0.0)
        self.poll_adapters()
        updates = self._scheduler.take_failed()
        while self._may_launch():
            updates += self._scheduler.settle_guides()
            plan = self._scheduler.schedule()
            if plan is not None:
                self._launch(plan)
            if self._adapters is not None:
                self._adapters.fill()
            if plan is None:
                break
        updates += self._scheduler.take_failed()
        if self._in_flight:
            updates += self._commit_oldest()
            if self._adapters is not None:
                self._adapters.forget_some()
            return updates
        if self._scheduler.num_transfers:
            self._end_transfers(0.0 if updates else TRANSFER_WAIT_SECONDS)
        elif self._adapters is not None and self._adapters.busy:
            self.poll_adapters(0.0 if updates else TRANSFER_WAIT_SECONDS)
        elif self._scheduler.has_work and not updates and not self._scheduler.wait_for_guide(GUIDE_WAIT_SECONDS):
            raise RuntimeError("the scheduler has requests but nothing to run: its invariant is broken")
        return updates

    def _may_launch(self) -> bool:
        """Whether one more step may be under way. A new request waits for all of them, so more than each stage's and one are short ones."""
        ahead = len(self._in_flight)
        short = ahead <= self._stages or all(plan.num_tokens <= SHORT_STEP_TOKENS for plan, _, _ in self._in_flight)
        return ahead < self._max_in_flight and short

    def _launch(self, plan: StepPlan) -> None:
        launched = time.monotonic()
        self._in_flight.append((plan, self._executor.run(plan), launched))

    def _end_transfers(self, seconds: float) -> None:
        """Tell the scheduler which transfers have ended. With none, wait for one for up to so many seconds."""
        if self._host_tier:
            self._scheduler.host_ready(self._executor.host_ready)
            for end in self._executor.ended_transfers(seconds):
                self._scheduler.end_transfer(end)

    def _drain_transfers(self) -> None:
        """Wait until no transfer is under way."""
        while self._scheduler.num_transfers:
            self._end_transfers(TRANSFER_WAIT_SECONDS)

    @property
    def adapters(self) -> AdapterWork:
        """Loads adapters and knows their names. Raises ConfigError if requests may have none."""
        if self._adapters is None:
            raise ConfigError(NO_LORA)
        return self._adapters

    def poll_adapters(self, seconds: float = 0.0) -> bool:
        """Take what has become of adapters, for which up to so many seconds are waited. Whether any load has ended that nobody has taken."""
        if self._adapters is None:
            return False
        self._adapters.poll(seconds)
        return bool(self._adapters.loaded)

    def begin_adapters(self, requests: Iterable[LoRARequest]) -> list[int]:
        """Begin to load adapters, of which `loaded_adapters` tells. Nobody waits for earlier ones any more. Raises InvalidRequestError; then none is begun.

        One that was begun for a wait that was interrupted isn't begun again.
        """
        work, requests = self.adapters, list(requests)
        work.loaded.clear()
        begun = list(map(work.under_way, requests))
        for place, request in enumerate(requests):
            if begun[place] is None:
                work.check(request, requests[:place])
        return [work.begin(one) if number is None else number for one, number in zip(requests, begun, strict=True)]

    def loaded_adapters(self, numbers: Sequence[int]) -> list[AdapterInfo] | None:
        """What was loaded, None if that takes longer than a moment. Raises what is wrong with the first that can't be loaded."""
        work = self.adapters
        if not work.loaded.keys() >= set(numbers):
            work.poll(TRANSFER_WAIT_SECONDS)
        if not work.loaded.keys() >= set(numbers):
            return None
        found = [work.loaded.pop(number) for number in numbers]
        infos = [one for one in found if not isinstance(one, ConfigError)]
        for one in found:
            if isinstance(one, ConfigError):
                raise one
        return infos

    def _publish_events(self) -> None:
        """Tell those who read KV events what prompts can find by now, if anybody may read them."""
        for number, publisher in enumerate(self._publishers):
            log = self._of_team(number).manager.events
            assert log is not None
            publisher.tell(log)

    def _commit_oldest(self) -> list[RequestUpdate]:
        plan, pending, launched = self._in_flight.popleft()
        result = pending.result()
        if self._host_tier:
            now = time.monotonic()
            self._scheduler.note_step(plan, now - max(launched, self._committed))
            self._committed = now
        if self._step_log.watched:
            self._step_log.note(plan, launched, pending.in_graph)
        return self._scheduler.commit(plan, result)

    def drain(self) -> list[RequestUpdate]:
        """Wait for the steps in flight; returns their updates. Raises EngineDeadError when one fails."""
        updates: list[RequestUpdate] = []
        try:
            while self._in_flight:
                updates += self._commit_oldest()
        except Exception as error:
            raise self._die(error) from error
        return updates if self._exchange is None else self._exchange.hold(updates)

    def _die(self, error: Exception) -> EngineDeadError:
        # ranks in processes of their own have the devices, and to ask one here would take memory of it
        failure = device_failure() if self._executor.failure_fd is None else None
        if failure is not None:
            never_free(error, self._executor, *self._in_flight)
        self._death = step_fault(error, failure)
        self._in_flight.clear()
        if self._exchange is not None:
            self._exchange.close()
        self._executor.close()
        return EngineDeadError(self._death)

    @property
    def failure_fd(self) -> int | None:
        """See Executor.failure_fd."""
        return self._executor.failure_fd

    def check_alive(self) -> None:
        """Raise EngineDeadError with the reason if a step, or another process of the engine, has failed."""
        if self._death is not None:
            raise EngineDeadError(self._death)
        try:
            self._executor.check_alive()
        except PagerunnerError as error:  # of any kind: the process that has met it has ended
            raise self._die(EngineDeadError(str(error))) from None

    def stats(self) -> SchedulerStats:
        """Counters and gauges of the scheduler, the memory manager and the device."""
        stats, busy = self._stats_of(self._scheduler), self._executor.busy_seconds
        teams = [msgspec.structs.replace(one, busy_seconds=busy) for one in stats.teams]
        return msgspec.structs.replace(stats, busy_seconds=busy, teams=teams)

    def _stats_of(self, scheduler: Scheduler | TeamsScheduler) -> SchedulerStats:
        stats = scheduler.stats(paused=self.is_sleeping)
        if self._exchange is None:
            return stats
        held = self._exchange.stats()
        waiting_for = stats.waiting_for or ("transfer" if held.pulls else "")
        return msgspec.structs.replace(
            stats, exchange=held, waiting=stats.waiting + held.pulls, waiting_for=waiting_for
        )

    def memory_state(self, team: int = 0) -> MemoryState:
        """Who holds the page memory now: slabs by group, pages by request, what is cached, shared and free.

        Raises InvalidRequestError if there is no such team.
        """
        if (exchange := self._exchange) is None:
            return self._of_team(team).memory_state()
        exchange.take_back()
        return msgspec.structs.replace(self._of_team(team).memory_state(), exchange=exchange.state())

    def _of_team(self, team: int) -> Scheduler:
        teams = self._scheduler.teams if isinstance(self._scheduler, TeamsScheduler) else [self._scheduler]
        return teams[check_rank("team", team, len(teams))]

    def watch(self, since: int, team: int = 0) -> LiveState:
        """What runs, what waits and why, who holds which pages, and the steps after `since` (0: none yet). Steps are those of all teams.

        Steps are kept only while somebody asks at least every few seconds.
        """
        started = time.monotonic()
        scheduler = self._of_team(team)
        slabs, owners, cached = page_books(scheduler.manager)
        requests = scheduler.live(paused=self.is_sleeping)
        level = self.sleep_level
        return LiveState(
            started,
            time.monotonic() - started,
            -1 if level is None else level,
            self._stats_of(scheduler),
            slabs,
            owners,
            cached,
            requests,
            self._step_log.after(since),
        )

    def reset_prefix_cache(self) -> bool:
        """Forget every cached page.

        False when pages of running requests had to stay. No prompt finds those any more either.
        """
        self._scheduler.clear_tiers()
        done = self._scheduler.reset_prefix_cache()
        self._publish_events()
        return done

    @property
    def is_sleeping(self) -> bool:
        """Whether the engine is parked at any level."""
        return self.sleep_level is not None

    @property
    def sleep_level(self) -> int | None:
        """The level the engine sleeps at, None while it runs. While its weights are being updated it is paused (0)."""
        level = self._executor.sleep_level
        return 0 if level is None and self._weights.held else level

    def check_awake(self) -> None:
        """Raise EngineSleepingError while the engine sleeps or is paused."""
        level = self.sleep_level
        if level is not None:
            self.check_alive()  # an engine whose ranks have ended in its sleep doesn't sleep
            paused = self._weights.held or "The engine is paused; wake_up lets it go on."
            raise EngineSleepingError(f"The engine sleeps (level {level}); call wake_up first." if level else paused)

    def prepare_sleep(self, level: int, mode: str) -> None:
        """Raise now what `sleep` would raise, and make sure that the weights will outlive the sleep. Requests go on.

        With `mode` "wait" the requests of a paused engine go on too, since they are to be finished.
        """
        if not self._enable_sleep_mode and level != 0:  # a pause moves no memory
            raise ConfigError("Sleep needs an engine started with enable_sleep_mode=True (--enable-sleep-mode).")
        one_of("sleep mode", mode, ("abort", "wait", "keep"))
        self.check_alive()
        self._weights.check_sleep(level)
        to_finish = len(self._scheduler.request_ids) if mode == "wait" and self.is_sleeping else 0
        if to_finish and self.sleep_level != 0:
            raise EngineSleepingError(
                f"The engine sleeps (level {self.sleep_level}) and can't finish its {to_finish} unfinished sequences first, "
                'as mode "wait" asks. Call wake_up before, or use mode "keep" or "abort".'
            )
        if to_finish and self._weights.held:
            raise EngineSleepingError(self._weights.held)
        self._executor.prepare_sleep(level)
        if to_finish:
            self._executor.wake_up(None)

    def sleep(self, level: int = 1, mode: str = "abort") -> list[RequestUpdate]:
        """Park the engine and free memory; see runner/sleep.py for the levels.

        `mode` says what becomes of unfinished requests. "abort" ends them. "wait" finishes them first, those of a paused
        engine too. "keep" takes their pages, if pages are freed, and goes on with them after waking. Returns the updates
        that this caused. The prefix index is reset whenever pages are freed.

        Raises EngineSleepingError when the engine sleeps at level 1 or 2, so that "wait" can't finish what is unfinished.
        Raises CapacityError when the weights can't be kept in host memory. After both, requests go on as if nothing had been asked.
        Freeing memory may fail in other ways. The engine then counts as asleep; `sleep` and `wake_up` can be tried again,
        and `take_unreported` has the updates that this call would have returned.
        """
        self.prepare_sleep(level, mode)
        updates: list[RequestUpdate] = []
        try:
            if mode == "wait":
                while self.has_work:
                    updates += self.step()
            updates += self.drain()
            if mode == "abort":
                held = self._exchange.request_ids if self._exchange is not None else []
                updates += self.abort(self._scheduler.request_ids + held)
            if level > 0:
                updates += self._stop_exchange("sleep")
                self._drain_transfers()
                self._scheduler.preempt_all()
                self._scheduler.reset_prefix_cache()
            if level > 1:  # the weights are read again, and may be others
                self._scheduler.clear_tiers(new_weights=True)
            self._publish_events()
            self._executor.sleep(level)
            self._weights.slept(level)
        except Exception:
            if self._executor.sleep_level == level:  # it drops weights before all that may fail
                self._weights.slept(level)
            self._unreported += updates
            raise
        return updates

    def take_unreported(self) -> list[RequestUpdate]:
        """The updates that a failed `sleep`, or the start of an update of the weights, has caused. Each is given once."""
        updates, self._unreported = self._unreported, []
        return updates

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory back; the engine runs again when every region is mapped.

        Raises EngineSleepingError if an update of the weights has failed. The memory is there then, and no step runs. Without `tags` it is
        raised in the middle of an update too, and nothing has been done.
        """
        self.check_alive()
        self._weights.check_wake(tags)
        self._executor.wake_up(tags)
        self._weights.check_whole()
        if self.sleep_level is None:
            self._open_tiers()

    def _open_tiers(self) -> None:
        """The weights are known again: find what the disk has of these, lend and pull."""
        self._scheduler.attach_tiers()
        if self._exchange is not None:
            self._exchange.open()

    def change_weights(self, change: WeightChange) -> None:
        """Do a part of an update of the weights; see `types/weights.py`.

        From its start to its finish no step runs. Requests that were running go on afterwards, with the keys and values that the old
        weights have made; prompts find none of these. `take_unreported` has what the steps in flight have made.

        Raises what is wrong. If weights are half new then, `weights_fault` says so, and no step runs until all of them have come.
        """
        self.check_alive()
        if isinstance(change, StartUpdate):
            self._unreported += self.drain()
        self._weights.change(change)
        if isinstance(change, FinishUpdate):
            self._scheduler.clear_tiers(new_weights=True)
            self.reset_prefix_cache()
            if self._exchange is not None:
                self._unreported += self._stop_exchange("new weights")
            self._open_tiers()
        self._publish_events()

    @property
    def weights_fault(self) -> str:
        """Why the weights are half new, and what to do; "" if they aren't."""
        return self._weights.fault

    @property
    def update_seconds(self) -> float | None:
        """How long an update of the weights may still wait for its trainer's next call; None if none is open."""
        return self._weights.seconds_left

    def end_late_update(self) -> None:
        """End an update that has waited too long for its trainer's next call."""
        self._weights.end_late()
