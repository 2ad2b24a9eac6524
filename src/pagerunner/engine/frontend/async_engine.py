"""AsyncEngine: many requests at once against engine cores in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from pagerunner import limits
from pagerunner.config import EngineArgs
from pagerunner.engine.core import messages as wire
from pagerunner.engine.core.client import DEFAULT_FACTORY, STALL_SECONDS, LoadedCore, launch_cores
from pagerunner.engine.core.forks import HomeProcess
from pagerunner.engine.core.live import LiveState
from pagerunner.engine.frontend.adapters import EngineAdapters
from pagerunner.engine.frontend.frontend import Frontend, build_frontend, check_options, check_tokenizer
from pagerunner.engine.frontend.input_processor import (
    Prompt,
    Truncation,
    check_queueable,
    own_params,
    shown_text,
    up_to_mark,
    with_marked_end,
)
from pagerunner.engine.frontend.observer import EngineObserver
from pagerunner.engine.frontend.replicas import Chooser, Replica, answers, check_able, check_alive, named
from pagerunner.engine.frontend.source import SOURCE
from pagerunner.engine.frontend.stream import OutputStream
from pagerunner.engine.startup.hub import fetch_checkpoint
from pagerunner.errors import EngineDeadError, InvalidRequestError, PagerunnerError, QueueFullError
from pagerunner.models.configs.pooling import Pooler
from pagerunner.text.stop_strings import automaton
from pagerunner.text.template_pool import TemplateRenderer
from pagerunner.text.tokenizer import Tokenizer
from pagerunner.types import Pooling, RequestOutput, SamplingParams
from pagerunner.types.checks import check_rank
from pagerunner.types.kv_transfer import KVTransferParams
from pagerunner.types.lora import LoRARequest
from pagerunner.types.weights import AbortUpdate, InitTransfer, UpdateWeights, WeightChange

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_INLINE_CHARS = 4_096
"""Texts up to this length are tokenised at once; longer ones in a thread."""
_CHARS_OF_A_STOP_CHAR = 8
"""A character of a stop string takes as long as this many of a prompt."""
_TEXT_THREADS = 4
_LARGE_CHARS = 500_000
"""Texts longer than this are tokenised one after another: each takes 300 bytes of memory a character."""


class AsyncEngine:
    """A loaded engine for asyncio programs; `await AsyncEngine.from_args(args)` makes one, `shutdown` ends it.

    The core runs in a process of its own. Tokenising and detokenising happen here, long texts in threads.
    All methods are for the event loop that made the engine; in another one, and in a fork of its process, they raise RuntimeError. `dead` is set when the
    core has ended, whatever the reason.

    With `data_parallel_size` there are several cores, in `replicas`, each with the whole model. A request runs on one of them
    (engine/frontend/replicas.py says which). The end of one is the end of its requests, and the others go on. `stats`, `startup` and
    `memory_plan` are those of the first. With `enable_expert_parallel`, too, there is one core, which has as many teams of ranks.
    `places` are the replicas and teams, by the numbers that requests may ask for. `adapters` are those that requests may name.
    """

    def __init__(
        self,
        cores: Sequence[LoadedCore],
        frontend: Frontend,
        observer: EngineObserver,
        stall_seconds: float,
        *,
        prefixes: bool,
        ranks: int,
        teams: int = 1,
    ) -> None:
        self._home, self._ranks = HomeProcess("AsyncEngine", asyncio.get_running_loop()), ranks
        self._frontend = frontend
        self.dead = asyncio.Event()
        self.replicas = [
            Replica(core, frontend.outputs, observer.of_engine(index), self._core_died, stall_seconds)
            for index, core in enumerate(cores)
        ]
        self.places = [(one, team) for one in self.replicas for team in range(teams)]
        self._chooser = Chooser(self.replicas, prefixes=prefixes, teams=teams)
        self.adapters = EngineAdapters(self.replicas, self._whole)
        self._numbers = itertools.count()
        self._name = f"c{cores[0].client}-" if cores[0].client else ""  # of several frontends
        self._stall_seconds = stall_seconds
        self._stopped = False
        self._changes: set[asyncio.Future[None]] = set()  # sleeps and wakes under way
        self._renderer = None if frontend.tokenizer is None else TemplateRenderer(frontend.tokenizer)
        self._template_variables: frozenset[str] = frozenset()
        self._threads = ThreadPoolExecutor(_TEXT_THREADS, thread_name_prefix="pagerunner-text")
        self._one_thread = ThreadPoolExecutor(1, thread_name_prefix="pagerunner-large-text")
        self._watchdog = asyncio.create_task(self._watch(), name="pagerunner-watchdog")

    @classmethod
    async def from_args(
        cls,
        args: EngineArgs,
        *,
        observer: EngineObserver | None = None,
        core_factory: str = DEFAULT_FACTORY,
        frontend_factory: Callable[[EngineArgs, int], Frontend] = build_frontend,
        stall_seconds: float = STALL_SECONDS,
        cores: Sequence[LoadedCore] | None = None,
    ) -> AsyncEngine:
        """Start the core's process, wait until the model is loaded, and prepare the text side.

        Args:
            args: what a user asks of the engine.
            observer: is told times and counts; see EngineObserver.
            core_factory: `module:function` that builds the core in the new process.
            frontend_factory: builds the text side from the arguments and the resolved length.
            cores: those that another process of the server has started, instead of new ones.
            stall_seconds: silence after which a core counts as hung: it gets no new requests, and `check_health` fails.

        Raises:
            ConfigError, CheckpointError, CapacityError: the engine cannot be built as asked.
            EngineDeadError: the core's process ended while loading.
        """
        await asyncio.to_thread(check_options, args)
        args = check_tokenizer(await asyncio.to_thread(fetch_checkpoint, args))
        cores = cores or await launch_cores(args, core_factory, stall_seconds)
        try:
            length = min(core.ready.max_model_len for core in cores)
            frontend = await asyncio.to_thread(frontend_factory, args, length)
        except BaseException:
            for core in cores:
                core.kill()
            raise
        observer, prefixes = observer or EngineObserver(), args.enable_prefix_caching
        ranks, teams = args.num_ranks, args.teams
        engine = cls(cores, frontend, observer, stall_seconds, prefixes=prefixes, ranks=ranks, teams=teams)
        try:
            if engine._renderer is not None:
                engine._template_variables = await engine._renderer.variables()
        except BaseException:
            await engine.shutdown()
            raise
        return engine

    @property
    def max_model_len(self) -> int:
        """The most tokens, prompt and answer together, that one request may have."""
        return min(one.client.ready.max_model_len for one in self.replicas)

    @property
    def memory_plan(self) -> dict[str, Any]:
        """The core's memory plan as plain JSON values."""
        return self.replicas[0].memory_plan

    @property
    def startup(self) -> wire.StartUp:
        """Seconds and device memory that the core's start took."""
        return self.replicas[0].client.ready.startup

    @property
    def default_sampling_params(self) -> SamplingParams:
        """The checkpoint's generation_config.json over the defaults."""
        return own_params(self._frontend.default_sampling_params)

    @property
    def pooler(self) -> Pooler | None:
        """How the model's hidden states become embeddings. None if neither the checkpoint nor the user says."""
        return self._frontend.pooler

    @property
    def template_variables(self) -> frozenset[str]:
        """The names that the chat template reads beside special tokens; none without a template."""
        return self._template_variables

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ConfigError when the engine has none."""
        return self._frontend.require_tokenizer()

    @property
    def sleep_level(self) -> int:
        """The level at which the engine sleeps: 0 only pauses it, -1 is awake."""
        return max(one.level for one in self.replicas)

    @property
    def stats(self) -> wire.SchedulerStats:
        """The core's gauges and running totals, at most a moment old."""
        return self.replicas[0].desk.stats

    @property
    def num_unfinished(self) -> int:
        """How many sequences are waiting or running."""
        return sum(one.desk.progress.unfinished for one in self.replicas)

    @property
    def lost(self) -> dict[int, str]:
        """Which cores can't serve, and why: they are gone, hang, or have weights that are half new."""
        faults = {index: one.fault or one.flaw for index, one in enumerate(self.replicas)}
        return {index: fault for index, fault in faults.items() if fault}

    async def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        cache_salt: str = "",
        pooling: Pooling | None = None,
        data_parallel_rank: int | None = None,
        kv_transfer: KVTransferParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> OutputStream:
        """Start a request and return its outputs' stream, to be read with `await stream.get()` until one is `finished`.

        The request runs to its end unless `abort(request_id)` ends it. (`generate` aborts by itself.) Arguments and errors
        are those of `generate`.
        """
        self._home.check()
        params, arrival = own_params(params), time.monotonic()
        check_able(self.replicas)
        if self._stopped:
            raise EngineDeadError("The server is shutting down and takes no more requests.")
        self._check_queue(params.n, 0)
        lora = await self.adapters.named(lora_request)
        text = shown_text(prompt)
        inputs = self._frontend.inputs
        grammar = await inputs.prepare(params)
        # Siblings' ids are made of this id, and must not equal an id that another caller has chosen.
        own_id = f"{request_id}-{self._name}{next(self._numbers)}"
        stop = tuple(params.stop or ())
        size = len(text or "")
        size += sum(map(len, params.bad_words or ())) + _CHARS_OF_A_STOP_CHAR * sum(map(len, stop))
        # The search for stop strings is made there too, and kept until the output takes it.
        requests, _held = await self._text_work(
            size,
            lambda: (
                inputs.process(
                    prompt, params, own_id, priority, cache_salt, pooling=pooling, grammar=grammar, lora=lora
                ),
                automaton(stop) if stop else None,
            ),
        )
        if self._stopped:  # meanwhile
            raise EngineDeadError("The server is shutting down and takes no more requests.")
        self._check_queue(len(requests), len(requests[0].prompt_token_ids))
        if any(request_id in one.desk for one in self.replicas):
            raise InvalidRequestError(f"A request with the id {request_id!r} is running.", param="request_id")
        hashes = self._chooser.hashes(requests[0])
        replica = self._chooser.choose(hashes, data_parallel_rank)
        if data_parallel_rank is not None:
            team = self.places[data_parallel_rank][1]
            requests[0] = msgspec.structs.replace(requests[0], data_parallel_rank=team)
        if kv_transfer:
            requests[0] = msgspec.structs.replace(requests[0], kv_transfer=kv_transfer)
        return replica.submit(request_id, text, requests, arrival, hashes)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        pooling: Pooling | None = None,
        data_parallel_rank: int | None = None,
        kv_transfer: KVTransferParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt; yields outputs of `sampling_params.output_kind` until one is `finished`.

        Leaving the iterator early (`aclose`, cancellation) aborts the request and frees its pages. A slow reader
        gets several steps' outputs as one.

        Args:
            prompt: text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`.
            sampling_params: how to sample.
            request_id: unique among unfinished requests.
            priority: lower runs first under scheduling_policy="priority".
            cache_salt: only requests with the same salt share cached pages.
            pooling: ends the request with its prompt; its one output then has `pooled` and no tokens.
            data_parallel_rank: the number of the core, or team of ranks, that is to run it, of several.
            kv_transfer: where the prompt's pages are to come from, or that they are to be lent to another engine.
            lora_request: the adapter to generate with, which is loaded if its name isn't known.

        Raises:
            InvalidRequestError: this request can never run.
            QueueFullError: too many requests wait already.
            RequestFailedError: it failed inside the engine.
            EngineSleepingError, EngineDeadError: nothing can run now, or ever, or the engine hangs. While the engine is only paused, requests wait.
        """
        asked, where = (sampling_params, priority, cache_salt, pooling), (data_parallel_rank, kv_transfer, lora_request)
        stream = await self.add_request(request_id, prompt, *asked, *where)
        try:
            while True:
                self._home.check()
                output = await stream.get()
                yield output
                if output.finished:
                    return
        finally:
            for one in self._running(request_id):
                self._home.check()
                one.abort(one.desk.leave(request_id))

    async def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        truncation: Truncation | None = None,
    ) -> list[int]:
        """The token ids of a conversation in the checkpoint's chat template, which writes its special tokens itself.

        With `continue_final_message` the prompt ends where the last message's text ends, so that the answer continues that
        message. `truncation` says how many of the tokens stay.

        Raises:
            PromptTooLongError: it is far longer than a prompt may be.
            InvalidRequestError: it has too many messages, or the template refuses it or takes too long for it.
            ConfigError: there is no tokenizer or no template.
        """
        self._home.check()
        self._frontend.require_tokenizer()
        if len(messages) > limits.MAX_MESSAGES:
            raise InvalidRequestError(
                f"The conversation has {len(messages)} messages; at most {limits.MAX_MESSAGES} are allowed "
                f"{limits.knob('MAX_MESSAGES')}.",
                param="messages",
            )
        if self._renderer is None:
            raise RuntimeError("there is a tokenizer and no renderer")
        options = {**(template_kwargs or {}), "add_generation_prompt": add_generation_prompt}
        if tools:
            options["tools"] = list(tools)
        shown = with_marked_end(messages) if continue_final_message else messages
        text = await self._renderer.render(shown, options, SOURCE.get())
        if continue_final_message:
            text = up_to_mark(text)
        return await self.encode(text, add_special_tokens=add_special_tokens, truncation=truncation)

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, truncation: Truncation | None = None
    ) -> list[int]:
        """The token ids of a text; `truncation` says how many of them stay.

        Raises:
            PromptTooLongError: it is far longer than a prompt may be.
            InvalidRequestError: it is no valid Unicode, or has too many characters.
            ConfigError: the engine has no tokenizer.
        """
        self._home.check()
        self._frontend.require_tokenizer()
        inputs = self._frontend.inputs
        return await self._text_work(len(text), lambda: inputs.encode(text, add_special_tokens, truncation))

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids.

        Raises:
            InvalidRequestError: an id is outside the vocabulary.
            ConfigError: the engine has no tokenizer.
        """
        self._home.check()
        tokenizer = self._frontend.require_tokenizer()
        self._frontend.inputs.check_token_ids("tokens", token_ids)
        return await self._text_work(
            len(token_ids), lambda: tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        )

    def abort(self, request_id: str) -> None:
        """End a request: its reader gets the text so far, with finish_reason "abort". Unknown ids are ignored."""
        self._home.check()
        for one in self._running(request_id):
            one.abort(one.desk.sequences(request_id))

    def stop(self, error: EngineDeadError | None = None) -> None:
        """End every request and take no others.

        The readers get the text so far, with finish_reason "abort", or `error`.
        """
        self._home.check()
        self._stopped = True
        for one in self.replicas:
            running = one.desk.all_sequences()
            if error is not None:
                one.desk.fail_all(error)
            one.abort(running)

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Free memory until `wake_up`; level 0 only pauses, and requests that come meanwhile wait for `wake_up`.

        A caller who is cancelled stops waiting; the engine falls asleep all the same.

        Raises:
            ConfigError: sleep mode is off, or an argument is wrong.
        """
        self._home.check()
        await self._whole(self._sleep(level, mode))

    async def _sleep(self, level: int, mode: str) -> None:
        if len(self.replicas) == 1:
            await self._of_all(lambda one: one.sleep(level, mode))
            return
        before = [(one, one.level) for one in self.replicas]
        try:
            await self._of_all(lambda one: one.prepare_sleep(level, mode))  # if one refuses, no request has been ended
            await self._of_all(lambda one: one.sleep(level, mode))
        except PagerunnerError:
            changed = [(one, old) for one, old in before if one.level != old and one.client.death is None]
            await asyncio.gather(*(one.return_to(old) for one, old in changed), return_exceptions=True)
            raise

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory back: "weights", "kv_cache", or all (None). A caller who is cancelled stops waiting only."""
        self._home.check()
        await self._whole(self._of_all(lambda one: one.wake_up(tags)))

    async def change_weights(self, change: WeightChange) -> None:
        """Do a part of an update of the weights, as LLM's methods for it do; requests wait from its start to its finish.

        A caller who is cancelled stops waiting only.
        """
        self._home.check()
        await self._whole(self._change_weights(change))

    async def _change_weights(self, change: WeightChange) -> None:
        alive = check_alive(self.replicas)
        if isinstance(change, InitTransfer) and change.world_size < (least := change.rank_offset + self.world_size):
            raise InvalidRequestError(
                f"world_size={change.world_size} is too small: rank_offset={change.rank_offset} and the {self.world_size} ranks of all "
                f"engines make {least}.",
                param="world_size",
            )

        def own(one: Replica) -> WeightChange:
            if not isinstance(change, InitTransfer):
                return change
            return msgspec.structs.replace(change, rank_offset=change.rank_offset + alive.index(one) * self._ranks)

        await self._answers(lambda one: one.sleep_level())
        calls = {self._begun(one.change_weights(own(one))): one for one in alive}
        by_trainer = isinstance(change, (InitTransfer, UpdateWeights))  # only these may wait for the trainer
        ended, _ = await asyncio.wait(
            calls, return_when=asyncio.FIRST_EXCEPTION if by_trainer else asyncio.ALL_COMPLETED
        )
        errors = named(
            alive, {one: error for call, one in calls.items() if call in ended and (error := call.exception())}
        )
        if errors and len(alive) > 1:  # the others don't go on alone; one that waits for the trainer is told later
            abort = AbortUpdate(str(errors[0]))
            told = {self._begun(one.change_weights(abort)): call for call, one in calls.items()}
            await asyncio.wait([one for one, call in told.items() if call in ended])
        if errors:
            raise errors[0]

    @property
    def world_size(self) -> int:
        """The number of ranks of all cores that live."""
        return self._ranks * len(check_alive(self.replicas))

    @property
    def place_size(self) -> int:
        """The number of ranks of a core, or of one of its teams."""
        return self._ranks * len(self.replicas) // len(self.places)

    async def _of_all(self, call: Callable[[Replica], Coroutine[Any, Any, Result]]) -> list[Result]:
        """The answers of all cores that live. Raises the error of the first that can't answer.

        Each has to give a sign of life first. So a core that hangs is an error, and leaves the others as they are.
        """
        await self._answers(lambda one: one.sleep_level())
        return await self._answers(call)

    async def _answers(self, call: Callable[[Replica], Coroutine[Any, Any, Result]]) -> list[Result]:
        return await answers(self.replicas, call)

    async def _whole(self, change: Coroutine[Any, Any, Any]) -> None:
        """Run a change of state to its end, whatever becomes of the caller: the core carries it out in any case."""
        await asyncio.shield(self._begun(change))

    def _begun(self, change: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        task = asyncio.ensure_future(change)
        self._changes.add(task)
        task.add_done_callback(self._changed)
        return task

    def _changed(self, task: asyncio.Future[None]) -> None:
        self._changes.discard(task)
        if not task.cancelled():
            task.exception()  # its caller has it, or has gone

    async def is_sleeping(self) -> bool:
        """Whether the engine is parked."""
        self._home.check()
        levels = await self._answers(lambda one: one.sleep_level())
        return any(level is not None for level in levels)

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prompt pages. False when some belong to running requests."""
        self._home.check()
        return all(await self._of_all(lambda one: one.reset_prefix_cache()))

    async def memory_state(self, engine: int = 0) -> dict[str, Any]:
        """Who holds the page memory of a place between two steps, as plain JSON values; see `memory/ownership.py`."""
        self._home.check()
        one, team = self._place(engine)
        held = await one.answer(one.client.call(lambda call_id: wire.ReadMemory(call_id, team)))
        state: dict[str, Any] = msgspec.to_builtins(held)
        return state

    async def watch(self, since: int, engine: int = 0) -> LiveState:
        """What a place runs and holds between two steps, with the steps after `since`; see `engine/core/live.py`."""
        self._home.check()
        one, team = self._place(engine)
        return await one.answer(one.client.watch(since, team))

    def _place(self, engine: int) -> tuple[Replica, int]:
        return self.places[check_rank("engine", engine, len(self.places))]

    def check_health(self) -> None:
        """Raise EngineDeadError when the core is gone, hangs, or has half new weights; of several, when all are lost."""
        self._home.check()
        lost = self.lost
        if len(lost) == len(self.replicas):
            raise EngineDeadError(" ".join(dict.fromkeys(lost.values())))

    async def shutdown(self) -> None:
        """End the core's process; readers that are still there get EngineDeadError. Idempotent."""
        self._home.check()
        self._watchdog.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watchdog
        for threads in (self._threads, self._one_thread):
            threads.shutdown(wait=False, cancel_futures=True)
        self._frontend.inputs.close()
        if self._renderer is not None:
            await self._renderer.close()
        await asyncio.gather(*(one.client.close() for one in self.replicas))

    def _running(self, request_id: str) -> list[Replica]:
        """The one that runs this request; none if it has ended."""
        return [one for one in self.replicas if request_id in one.desk]

    def _check_queue(self, n: int, tokens: int) -> None:
        """Raise QueueFullError while the queue has no room for `n` answers to a prompt of `tokens` tokens.

        Raises InvalidRequestError when it never will have.
        """
        check_queueable(n, 1, tokens)
        lines = [one.desk.progress for one in self.replicas]
        for queued, more, name, what in (
            (sum(line.queued for line in lines), n, "MAX_QUEUED_REQUESTS", "answers"),
            (sum(line.queued_tokens for line in lines), n * tokens, "MAX_QUEUED_TOKENS", "prompt tokens"),
        ):
            most = getattr(limits, name)
            if queued + more > most:
                raise QueueFullError(
                    f"The queue is full: {queued} {what} wait for their first token, and with this request's {more} there "
                    f"would be more than {most} {limits.knob(name)}. Try again later."
                )

    def _core_died(self) -> None:
        if all(one.client.death is not None for one in self.replicas):
            self.dead.set()

    async def _text_work(self, size: int, work: Callable[[], Result]) -> Result:
        if size <= _INLINE_CHARS:
            return work()
        threads = self._threads if size <= _LARGE_CHARS else self._one_thread
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    async def _watch(self) -> None:
        """Look after the cores, and print a core's stacks once per stall.

        The core's own watchdog logs them too, unless the step keeps the interpreter's lock.
        """
        reported: set[int] = set()
        period = min(self._stall_seconds / 4, 5.0)
        while not self.dead.is_set():
            await asyncio.sleep(period)
            for index, one in enumerate(self.replicas):
                one.look(period)
                if one.client.death is not None or one.stalled_seconds() <= 2 * self._stall_seconds:
                    reported.discard(index)
                elif index not in reported:
                    reported.add(index)
                    logger.error("%s makes no progress; its stacks follow on standard error.", one.client.who)
                    one.client.dump_stacks()
