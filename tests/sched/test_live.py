"""What a running engine says of itself: why requests wait, which pages they have, and what saying it costs."""

from __future__ import annotations

import random
import time

import msgspec
import numpy as np

from helpers.memory_bench import Bench, tokens
from helpers.plans import one_group
from pagerunner.memory.manager import KVManager
from pagerunner.sched.live import LiveRequest, page_books
from pagerunner.sched.scheduler import Scheduler
from pagerunner.types import EngineRequest, SamplingParams


def bench_of(pages: int, *, seqs: int = 8, batched: int = 64, in_flight: int = 1, page_tokens: int = 16) -> Scheduler:
    manager = KVManager(one_group(pages, page_tokens=page_tokens, max_num_batched_tokens=batched))
    return Scheduler(
        manager,
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        max_model_len=manager.plan.max_model_len,
        max_in_flight=in_flight,
    )


def add(scheduler: Scheduler, name: str, prompt: list[int], max_tokens: int = 8) -> None:
    params = SamplingParams(max_tokens=None)
    scheduler.add(EngineRequest(request_id=name, prompt_token_ids=prompt, params=params, seed=0, max_tokens=max_tokens))


def waits(scheduler: Scheduler) -> dict[str, str]:
    return {one.request_id: one.wait for one in scheduler.live()}


def test_requests_wait_for_a_slot_and_behind_others() -> None:
    scheduler = bench_of(64, seqs=1)
    for number in range(3):
        add(scheduler, f"r{number}", tokens(20, number * 100))
    assert scheduler.schedule() is not None
    assert waits(scheduler) == {"r0": "", "r1": "slot", "r2": "line"}


def test_a_request_waits_for_pages() -> None:
    scheduler = bench_of(4)
    add(scheduler, "large", tokens(48))
    add(scheduler, "next", tokens(40, 500))
    assert scheduler.schedule() is not None
    assert waits(scheduler) == {"large": "", "next": "pages"}


def test_a_request_waits_for_the_next_steps_tokens() -> None:
    scheduler = bench_of(64, batched=32)
    add(scheduler, "long", tokens(100))
    add(scheduler, "next", tokens(40, 500))
    assert scheduler.schedule() is not None
    assert waits(scheduler) == {"long": "", "next": "budget"}
    long, _ = scheduler.live()
    assert (long.prompt, long.tokens, long.computed) == (100, 100, 32)


def test_a_request_waits_for_a_snapshot_that_another_is_about_to_leave() -> None:
    bench = Bench({"full": (16, 1), "recurrent": (16, 2)}, batched=150)
    bench.add("first", tokens(200), 4)
    bench.step()
    bench.add("second", tokens(200), 4)
    bench.step()
    assert waits(bench.scheduler)["second"] == "snapshot"
    bench.drain()


def test_a_sibling_waits_for_the_pages_it_goes_on_from() -> None:
    bench = Bench({"full": (16, 1)})
    for number in range(2):
        bench.add(f"a_{number}", tokens(40), 4, parent_id="a", seed=number)
    bench.step()
    assert waits(bench.scheduler) == {"a_0": "", "a_1": "sibling"}
    bench.step()
    assert waits(bench.scheduler) == {"a_0": "", "a_1": ""}


def test_nobody_waits_for_the_engine_alone_when_nobody_waits() -> None:
    scheduler = bench_of(64)
    assert scheduler.stats(paused=True).waiting_for == "" and scheduler.live(paused=True) == []


def test_only_the_first_of_a_long_line_are_listed() -> None:
    scheduler = bench_of(64, seqs=1)
    for number in range(400):
        add(scheduler, f"r{number}", tokens(5, number))
    assert scheduler.schedule() is not None
    assert len(scheduler.live()) == 257 and scheduler.stats().waiting == 399


def full_engine(pages: int, requests: int, *, scattered: bool) -> Scheduler:
    """`requests` running requests that hold all of `pages` pages but what is cached: a third of them."""
    scheduler = bench_of(pages, seqs=requests, batched=pages * 16, page_tokens=16)
    length = pages * 2 // 3 // requests * 16 - 8
    gone = 0
    for number in range(requests // 2):
        add(scheduler, f"gone-{number}", [number, *tokens(length - 1)], max_tokens=1)
        gone += 1
    assert scheduler.schedule() is not None
    scheduler.abort([f"gone-{number}" for number in range(gone)])
    for number in range(requests):
        add(scheduler, f"chatcmpl-{number:032}", [number, *tokens(length - 1, 7)], max_tokens=4)
    while scheduler.live() and any(one.slot < 0 for one in scheduler.live()):
        assert scheduler.schedule() is not None or scheduler._state.in_flight
        scheduler._state.in_flight.clear()
    generator = random.Random(0)
    if scattered:
        for sequence in scheduler._state.running:
            assert sequence.grant is not None
            generator.shuffle(sequence.grant.pages[0])
    return scheduler


def cost(scheduler: Scheduler) -> float:
    started = time.thread_time()
    msgspec.msgpack.encode([page_books(scheduler.manager), scheduler.live(), scheduler.stats()])
    return time.thread_time() - started


def test_the_state_of_50000_pages_and_256_requests_is_cheap() -> None:
    """It is read between two steps of a busy engine; the bound is far above the 2 ms that were measured."""
    scheduler = full_engine(50_000, 256, scattered=True)
    pool = scheduler.manager.pool
    assert pool.used[0] > 30_000 and len(pool.cached[0]) > 10_000
    live: list[LiveRequest] = scheduler.live()
    held = np.concatenate([np.frombuffer(one.pages[0], np.int32) for one in live])
    assert len(live) == 256 and set(held.tolist()) == set(pool.refs[0])
    assert min(cost(scheduler) for _ in range(5)) < 0.05
