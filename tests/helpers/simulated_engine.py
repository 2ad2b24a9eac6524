"""An engine whose scheduler is real and whose device exists in numbers only: latencies and throughput of a load, in simulated seconds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from helpers.device_costs import KEY_BYTES, Device
from helpers.traffic import FixedLength
from pagerunner.memory.manager import KVManager
from pagerunner.memory.planner import plan_memory
from pagerunner.memory.specs import FullKV
from pagerunner.sched.costs import CostModel
from pagerunner.sched.draft_length import AdaptiveLength, DraftLength
from pagerunner.sched.scheduler import Scheduler
from pagerunner.types import EngineRequest, SamplingParams, StepResult, StepRow
from pagerunner.types.steps import StepShape

HOST_SECONDS = 0.0004  # to commit a step and launch another


@dataclass
class Arrival:
    """A request of a load."""

    at: float
    prompt: int
    output: int


@dataclass
class Outcome:
    """What a load's requests have seen, in seconds."""

    first_token: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    error: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second, from the first arrival to the last token."""
        return self.tokens / self.seconds

    def __str__(self) -> str:
        between, first = self.between, self.first_token
        return (
            f"between tokens p50 {1e3 * at(between, 0.5):.1f} p99 {1e3 * at(between, 0.99):.1f} worst {1e3 * at(between, 1):.0f} ms; first token "
            f"p50 {1e3 * at(first, 0.5):.0f} p99 {1e3 * at(first, 0.99):.0f} ms; {self.tokens_per_second:.0f} tokens/s, {self.steps} steps, "
            f"predictions {100 * self.error:.1f} % off"
        )


def at(values: Sequence[float], share: float) -> float:
    """A percentile."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def poisson(rate: float, count: int, prompt: int, output: int, seed: int = 5) -> list[Arrival]:
    """`count` requests that arrive independently of each other, `rate` a second."""
    generator, now = random.Random(seed), 0.0
    arrivals = []
    for _ in range(count):
        now += generator.expovariate(rate)
        arrivals.append(Arrival(now, prompt, output))
    return arrivals


def make_scheduler(costs: CostModel | None, target: float | None, length: DraftLength | None = None) -> Scheduler:
    """A scheduler with pages for all that these loads have at once."""
    rows, tokens = 256, 8192
    plan = plan_memory(
        [FullKV(8, 128, "bfloat16")] * 36,
        page_tokens=16,
        budget_bytes=100 << 30,
        max_model_len=40_960,
        model_max_len=40_960,
        max_num_seqs=rows,
        max_num_batched_tokens=tokens,
        max_in_flight=2,
        num_drafts=length.most if length is not None else 0,
    )
    return Scheduler(
        KVManager(plan),
        max_num_seqs=rows,
        max_num_batched_tokens=tokens,
        max_model_len=40_960,
        max_in_flight=2,
        costs=costs,
        target_itl=target,
        draft_length=length,
    )


def simulate(
    arrivals: Sequence[Arrival],
    device: Device,
    target: float | None,
    *,
    measured: bool = True,
    rate: float | None = None,
    fixed: int | None = None,
) -> Outcome:
    """Run a load with two plans in flight. `target`: seconds of target_itl_ms. `measured`: the start has measured steps. `rate`: how often a draft
    is right if those before it were; None: there are none. Their number is `fixed`, or adapts itself.
    """
    choices = (1, 3, 7) if rate is not None else ()
    costs = CostModel(device.measured(choices) if measured else None, KEY_BYTES)
    length = FixedLength(fixed or 0) if rate is None or fixed is not None else AdaptiveLength(costs, choices)
    scheduler = make_scheduler(costs, target, length)
    out, last, waiting = Outcome(), {}, list(arrivals)[::-1]
    now = free = 0.0
    in_flight: list[tuple[object, float, float]] = []
    while waiting or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, waiting[-1].at)
        while waiting and waiting[-1].at <= now:
            arrival = waiting.pop()
            name = str(len(waiting))
            scheduler.add(request(name, arrival))
            last[name] = (arrival.at, True)
        while (plan := scheduler.schedule()) is not None:
            seconds = device.run(StepShape.of(plan))
            free = max(free, now) + seconds
            in_flight.append((plan, free, seconds))
            out.steps += 1
        if not in_flight:
            continue
        plan, done, seconds = in_flight.pop(0)
        now = max(now, done)
        tokens = [[7] * (row.samples + _accepted(row, rate or 0.0, device.random)) for row in plan.rows]
        drafted = {number: row.num_tokens - 1 for number, row in enumerate(plan.rows) if not row.tokens}
        timed = [(plan.step_id, seconds)]
        result = StepResult(step_id=plan.step_id, token_ids=tokens, drafted=drafted, timed=timed)
        for update in scheduler.commit(plan, result):
            if update.new_token_ids:
                before, first = last[update.request_id]
                (out.first_token if first else out.between).append(now - before)
                last[update.request_id] = (now, False)
                out.tokens += len(update.new_token_ids)
        now += HOST_SECONDS
    out.seconds = now
    out.error = costs.stats.error_seconds_total / costs.stats.measured_seconds_total
    return out


def _accepted(row: StepRow, rate: float, generator: random.Random) -> int:
    """How many of a row's drafts are right."""
    drafts = 0 if row.tokens else row.num_tokens - 1
    return next((place for place in range(drafts) if generator.random() >= rate), drafts)


def request(name: str, arrival: Arrival) -> EngineRequest:
    """A request with a prompt of its own."""
    generator = random.Random(name)
    prompt = [generator.randrange(150_000) for _ in range(arrival.prompt)]
    params = SamplingParams(max_tokens=arrival.output, ignore_eos=True)
    return EngineRequest(request_id=name, prompt_token_ids=prompt, params=params, seed=0, max_tokens=arrival.output)
