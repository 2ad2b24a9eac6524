"""A torch-free EngineCore with predictable answers, delays and failures, for tests of everything in front of the core.

A sequence's tokens are its prompt's, repeated: prompt [5, 6] gives 5, 6, 5, 6, ... A prompt that holds SCRIPT gives what
stands between it and the next token SCRIPT_END, and then ends. A prompt is cached from the end of its first step on, as in
the real core. A pooled vector is the prompt's length, its first and last token, and 2 for a mean. `PAGERUNNER_FAKE_CORE` in
the environment may hold a JSON `FakeOptions`. Some prompt tokens cause failures: see the constants.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from pagerunner.config import EngineArgs
from pagerunner.engine.core.live import LiveState
from pagerunner.engine.core.messages import StartUp
from pagerunner.errors import CheckpointError, ConfigError, EngineSleepingError, InvalidRequestError
from pagerunner.memory.ownership import GroupOwnership, MemoryState, RequestPages
from pagerunner.memory.planner import plan_memory
from pagerunner.memory.specs import FullKV
from pagerunner.sched.stats import SchedulerStats
from pagerunner.types import EngineRequest, RequestUpdate, TokenLogprobs
from pagerunner.types.weights import WeightChange

FACTORY = "helpers.fake_core:build"
OPTIONS_VARIABLE = "PAGERUNNER_FAKE_CORE"
PAGE_TOKENS = 16

CRASH, EXIT, FAIL_ONE, HANG, BREAK_ADD = 2001, 2002, 2003, 2004, 2005
"""Prompt tokens that make a step raise, the process vanish, one request fail, a step hang, `add` raise a KeyError."""

SCRIPT, SCRIPT_END, END = 1, 3, 0
"""In the tests' tokenizers <|begin|>, <|im_end|> and <|endoftext|>: a user's message of `<|begin|>text` is answered by text."""


class FakeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the fake behaves. `start` is what building it does: "ok", "checkpoint_error", "bug" or "exit".

    With `ends` it makes this file when its process ends, and whoever frees it waits for ever.
    """

    start: str = "ok"
    load_seconds: float = 0.0
    sleeps_to_fail: int = 0
    wakes_to_fail: int = 0
    step_seconds: float = 0.0
    max_model_len: int = 2048
    num_pages: int = 1024
    ends: str = ""


class FakeCore:
    """Generates one token per running request and step."""

    def __init__(self, options: FakeOptions, max_num_seqs: int) -> None:
        self._options = options
        self._max_num_seqs = max_num_seqs
        self._requests: dict[str, EngineRequest] = {}
        self._tokens: dict[str, list[int]] = {}
        self._seen: set[tuple[int, ...]] = set()
        self._queries = self._hits = 0
        self._level: int | None = None
        self._steps = 0
        self._sleeps_to_fail = options.sleeps_to_fail
        self._wakes_to_fail = options.wakes_to_fail
        self._unreported: list[RequestUpdate] = []
        if options.ends:
            weakref.finalize(self, Path(options.ends).touch)
        self.startup = StartUp({"weights": 1.5, "capture": 0.5}, {"graphs": 4096, "free": 2**30})
        self.memory_plan = plan_memory(
            [FullKV(num_kv_heads=1, head_dim=16, dtype="float32")],
            page_tokens=PAGE_TOKENS,
            budget_bytes=None,
            num_pages_override=options.num_pages,
            max_model_len=options.max_model_len,
            model_max_len=options.max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=2048,
            max_in_flight=1,
        )

    failure_fd = update_seconds = None
    weights_fault = ""

    def __del__(self) -> None:
        if self._options.ends:
            time.sleep(3600)

    def check_alive(self) -> None:
        """It has no other processes."""

    def add(self, request: EngineRequest) -> None:
        if self._level:
            raise EngineSleepingError("The engine sleeps; call wake_up first.")
        prompt = request.prompt_token_ids
        if BREAK_ADD in prompt:
            raise KeyError("a bug in add")
        needed = -(-(len(prompt) + request.max_tokens) // PAGE_TOKENS)
        if needed > self._options.num_pages:
            raise InvalidRequestError(
                f"The request needs {needed} pages; there are {self._options.num_pages}.", param="max_tokens"
            )
        self._queries += len(prompt)
        self._hits += len(prompt) if tuple(prompt) in self._seen else 0
        self._requests[request.request_id] = request
        self._tokens[request.request_id] = []

    def abort(self, request_ids: Sequence[str]) -> list[RequestUpdate]:
        return [
            RequestUpdate(request_id=one, new_token_ids=[], finish_reason="abort")
            for one in request_ids
            if self._forget(one)
        ]

    def _forget(self, request_id: str) -> bool:
        self._tokens.pop(request_id, None)
        return self._requests.pop(request_id, None) is not None

    @property
    def has_work(self) -> bool:
        return bool(self._requests) and self._level is None

    @property
    def sleep_level(self) -> int | None:
        return self._level

    def step(self) -> list[RequestUpdate]:
        time.sleep(self._options.step_seconds)
        self._steps += 1
        running = list(self._requests.values())[: self._max_num_seqs]
        updates = [self._advance(request) for request in running]
        self._seen.update(tuple(request.prompt_token_ids) for request in running)
        return updates

    def _advance(self, request: EngineRequest) -> RequestUpdate:
        prompt, name = request.prompt_token_ids, request.request_id
        if CRASH in prompt:
            raise RuntimeError("the fake core was told to crash")
        if EXIT in prompt:
            os._exit(3)
        if HANG in prompt:
            time.sleep(3600)
        if FAIL_ONE in prompt:
            self._forget(name)
            return RequestUpdate(request_id=name, new_token_ids=[], finish_reason="error", error="NaN in its logits.")
        if request.pooling is not None:
            self._forget(name)
            vector = [float(len(prompt)), float(prompt[0]), float(prompt[-1]), 2.0 * (request.pooling == "mean")]
            return RequestUpdate(request_id=name, new_token_ids=[], finish_reason="stop", pooled=vector)
        tokens = self._tokens[name]
        first = not tokens
        cached = len(prompt) if first and tuple(prompt) in self._seen else 0
        now = time.monotonic()
        token = prompt[len(tokens) % len(prompt)]
        if SCRIPT in prompt:
            start = prompt.index(SCRIPT) + 1
            script = [*prompt[start : prompt.index(SCRIPT_END, start)], END]
            token = script[len(tokens)]
        tokens.append(token)
        reason, stop_reason = self._finish(request, token, len(tokens))
        if reason is not None:
            self._forget(name)
        wanted, params = request.params.logprobs, request.params
        return RequestUpdate(
            request_id=name,
            new_token_ids=[token],
            finish_reason=reason,
            stop_reason=stop_reason,
            logprobs=None if wanted is None else [_logprobs(token, wanted)],
            prompt_logprobs=(
                [None, *(_logprobs(one, params.prompt_logprobs) for one in prompt[1:])]
                if first and params.prompt_logprobs is not None
                else None
            ),
            num_cached_tokens=cached,
            admitted_time=now if first else 0.0,
        )

    @staticmethod
    def _finish(request: EngineRequest, token: int, count: int) -> tuple[str | None, int | None]:
        if count >= request.params.min_tokens:
            if token in request.eos_token_ids and not request.params.ignore_eos:
                return "stop", None
            if token in (request.params.stop_token_ids or ()):
                return "stop", token
        return ("length", None) if count >= request.max_tokens else (None, None)

    def stats(self) -> SchedulerStats:
        held = sum(len(request.prompt_token_ids) for request in self._requests.values())
        running = min(len(self._requests), self._max_num_seqs)
        waiting = len(self._requests) - running
        return SchedulerStats(
            running=running,
            waiting=waiting,
            waiting_for="paused" if waiting and self._level is not None else "slot" if waiting else "",
            kv_usage=held / (self._options.num_pages * PAGE_TOKENS),
            groups=[],
            prefix_queries_total=self._queries,
            prefix_hits_total=self._hits,
            preemptions_total=0,
            steps_total=self._steps,
            prompt_tokens_total=0,
            generation_tokens_total=0,
            last_step_tokens=running,
        )

    def prepare_sleep(self, level: int, mode: str) -> None:
        if level not in (0, 1, 2):
            raise ConfigError(f"sleep level must be 0, 1 or 2, got {level!r}.")
        if mode == "wait" and self._requests:
            if self._level:
                raise EngineSleepingError(
                    f"The engine sleeps and can't finish its {len(self._requests)} sequences first."
                )
            self._level = None

    def sleep(self, level: int = 1, mode: str = "abort") -> list[RequestUpdate]:
        self.prepare_sleep(level, mode)
        updates = self.abort(list(self._requests)) if mode == "abort" else []
        while mode == "wait" and self._requests:
            updates += self.step()
        self._level = level if self._level is None else max(level, self._level)
        if self._sleeps_to_fail:
            self._sleeps_to_fail -= 1
            self._unreported = updates
            raise OSError("the fake host has no memory to lock")
        return updates

    def drain(self) -> list[RequestUpdate]:
        return []  # no step is in flight

    def change_weights(self, change: WeightChange) -> None:
        raise ConfigError("The fake core has no weights.")

    @property
    def adapters(self) -> NoReturn:
        raise ConfigError("The fake core serves no adapters.")

    def poll_adapters(self) -> bool:
        return False

    def end_late_update(self) -> None:
        """No update has begun."""

    def take_unreported(self) -> list[RequestUpdate]:
        updates, self._unreported = self._unreported, []
        return updates

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        if self._wakes_to_fail:
            self._wakes_to_fail -= 1
            raise OSError("the fake device has no memory to map")
        self._level = None

    def memory_state(self, team: int = 0) -> MemoryState:
        group = GroupOwnership(
            name="full", page_bytes=64, pages_per_slab=1, slabs=[(0, 1)], in_use=1, shared=0, free=0, cached=[]
        )
        requests = [
            RequestPages(request_id=name, slot=slot, pages=[[(slot, 1)]]) for slot, name in enumerate(self._requests)
        ]
        return MemoryState(num_slabs=4, slab_bytes=64, free_slabs=3, groups=[group], requests=requests)

    def watch(self, since: int, team: int = 0) -> LiveState:
        level = -1 if self._level is None else self._level
        return LiveState(time.monotonic(), 0.0, level, self.stats(), b"", b"", [b""], [], [])

    def reset_prefix_cache(self) -> bool:
        self._seen.clear()
        return not self._requests


def _logprobs(token: int, count: int) -> TokenLogprobs:
    others = [other for other in range(40, 80) if other != token][: max(count - 1, 0)]
    top = [token, *others][:count]
    return TokenLogprobs(token, -0.5, 1, top, [-0.5 - index for index in range(len(top))])


def build(args: EngineArgs, available: int | None = None, engine: int = 0) -> FakeCore:
    """The factory that the core process calls."""
    options = msgspec.json.decode(os.environ.get(OPTIONS_VARIABLE, "{}"), type=FakeOptions)
    time.sleep(options.load_seconds)
    if options.start == "checkpoint_error":
        raise CheckpointError("model.safetensors is truncated: 10 bytes of 20.")
    if options.start == "bug":
        raise ZeroDivisionError("a bug while loading")
    if options.start == "exit":
        os._exit(7)
    return FakeCore(options, args.max_num_seqs or 256)
