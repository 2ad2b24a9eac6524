"""What KV events cost the scheduler: steps without them, and with them, in turns. No model, no torch. Prints microseconds.

python scripts/bench_kv_events.py
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from bench_scheduler import make_mixed_plan, make_plan
from pagerunner.config import KVEventsConfig
from pagerunner.engine.core.kv_events import Publisher
from pagerunner.memory.events import BlockShape
from pagerunner.memory.manager import KVManager
from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.sched.scheduler import Scheduler
from pagerunner.types import EngineRequest, SamplingParams, StepResult

STEP_TOKENS = 8192


class Engine:
    """A scheduler and, with events, their publisher. `spent`: seconds of this thread, and of all threads."""

    def __init__(self, plan: MemoryPlan, events: bool, num_seqs: int) -> None:
        self.manager = KVManager(plan, log_events=events)
        self.scheduler = Scheduler(
            self.manager, max_num_seqs=num_seqs, max_num_batched_tokens=STEP_TOKENS, max_model_len=plan.max_model_len
        )
        config = KVEventsConfig(enable_kv_cache_events=True, endpoint="tcp://127.0.0.1:*")
        self.publisher = Publisher(config, BlockShape.of(plan)) if events else None
        self.spent = [0.0, 0.0]
        self.names = 0

    def add(self, prompt: list[int], max_tokens: int) -> None:
        self.names += 1
        params = SamplingParams(max_tokens=None)
        self.scheduler.add(
            EngineRequest(
                request_id=str(self.names), prompt_token_ids=prompt, params=params, seed=0, max_tokens=max_tokens
            )
        )

    def step(self) -> None:
        before = time.thread_time(), time.process_time()
        plan = self.scheduler.schedule()
        assert plan is not None
        result = StepResult(step_id=plan.step_id, token_ids=[[7] if row.samples else [] for row in plan.rows])
        self.scheduler.commit(plan, result)
        if self.publisher is not None and self.manager.events is not None:
            self.publisher.tell(self.manager.events)
        self.spent[0] += time.thread_time() - before[0]
        if self.publisher is not None:
            while self.publisher._queue.qsize():  # the thread's work counts, too
                time.sleep(0.0005)
        self.spent[1] += time.process_time() - before[1]


def decode(events: bool) -> list[float]:
    """Of a decode step of 64 requests."""
    engine, steps = Engine(make_plan(64 * 40, 640, 64, STEP_TOKENS), events, 64), 320
    for number in range(64):
        engine.add([number * 1000 + at for at in range(100)], 500)
    engine.step()
    engine.spent = [0.0, 0.0]
    for _ in range(steps):
        engine.step()
    return [spent / steps * 1e6 for spent in engine.spent]


def prefill(events: bool, plan: MemoryPlan | None = None) -> list[float]:
    """Of each 16 tokens of prompts of 8,192 tokens, in a pool in which their pages are evicted for each other."""
    engine, prompts = Engine(plan or make_plan(1200, 16_384, 1, STEP_TOKENS), events, 1), 12
    for number in range(prompts):
        engine.add(list(range(number * STEP_TOKENS, (number + 1) * STEP_TOKENS)), 1)
        if number == 2:
            engine.spent = [0.0, 0.0]
        while engine.scheduler.has_work:
            engine.step()
    return [spent / ((prompts - 2) * STEP_TOKENS // 16) * 1e6 for spent in engine.spent]


def main() -> None:
    hybrid = make_mixed_plan("full + recurrent")
    measures: dict[str, Callable[[bool], list[float]]] = {
        "decode step of 64 requests": decode,
        "16 tokens of a prompt, 16 evicted": prefill,
        "16 tokens of a prompt of a hybrid": lambda events: prefill(events, hybrid),
    }
    gc.disable()
    print(f"{'microseconds':36}{'without':>10}{'with':>10}{'ratio':>8}{'all threads':>14}")
    for name, measure in measures.items():
        found: dict[bool, list[list[float]]] = {False: [], True: []}
        for turn in range(8):
            for events in (turn % 2 == 0, turn % 2 == 1):
                found[events].append(measure(events))
                gc.collect()
        (without, _), (own, every) = (
            [min(part) for part in zip(*found[events], strict=True)] for events in (False, True)
        )
        print(f"{name:36}{without:10.2f}{own:10.2f}{own / without:8.2f}{every:14.2f}")


if __name__ == "__main__":
    main()
