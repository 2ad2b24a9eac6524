"""Scheduler: what goes into a plan, what comes out of a result."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from helpers.page_checker import PageChecker, expected_output
from helpers.plans import one_group
from helpers.recount import recount
from pagerunner.errors import InvalidRequestError
from pagerunner.memory.admission import Admission
from pagerunner.memory.manager import KVManager
from pagerunner.sched import state as state_module
from pagerunner.sched.scheduler import Scheduler
from pagerunner.types import (
    NO_TOKEN_ALLOWED,
    EngineRequest,
    RequestUpdate,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenLogprobs,
)


def request(name: str, prompt: list[int] | int, max_tokens: int = 8, **fields: Any) -> EngineRequest:
    """A request with a prompt of its own (its length is given) or a given one."""
    own = [sum(map(ord, name)) * 1000 + at for at in range(prompt)] if isinstance(prompt, int) else prompt
    params = {key: fields.pop(key) for key in list(fields) if key in SamplingParams.__struct_fields__}
    return EngineRequest(
        request_id=name,
        prompt_token_ids=own,
        params=SamplingParams(max_tokens=None, **params),
        seed=0,
        max_tokens=max_tokens,
        **fields,
    )


class Bench:
    """A scheduler with a page-checking runner behind it."""

    def __init__(self, pages: int = 100, *, caching: bool = True, **options: Any) -> None:
        self.plan = one_group(pages)
        self.manager = KVManager(self.plan, enable_prefix_caching=caching)
        limits = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": self.plan.max_model_len}
        self.scheduler = Scheduler(self.manager, **limits | options)
        self.checker = PageChecker(self.plan, prefix_caching=caching)
        self.output: dict[str, list[int]] = {}
        self.updates: list[RequestUpdate] = []

    def add(self, *requests: EngineRequest) -> None:
        for item in requests:
            self.scheduler.add(item)

    def plan_step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan is not None
        return plan

    def commit(self, plan: StepPlan, result: StepResult | None = None) -> list[RequestUpdate]:
        updates = self.scheduler.commit(plan, result or self.checker.run(plan))
        self.updates += updates
        for update in updates:
            self.output.setdefault(update.request_id, []).extend(update.new_token_ids)
        return updates

    def step(self) -> list[RequestUpdate]:
        return self.commit(self.plan_step())

    def drain(self) -> None:
        for _ in range(5000):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work
        recount(self.manager)
        assert self.manager.pool.used == [0]


def shape(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    return [(row.slot, row.start, row.num_tokens, row.samples) for row in plan.rows]


# -- admission


def test_requests_that_can_never_run_are_refused_with_numbers() -> None:
    bench = Bench(49, max_model_len=1000)
    cases = [
        (request("a", 0), "at least 1"),
        (request("a", 1000), "1,000 tokens; max_model_len=1,000 leaves room for at most 999"),
        (request("a", 100, 5000), "needs 63 pages for 1,000 tokens; the pool has 49"),
        (request("a", 800, 1), "needs 51 pages for 801 tokens; the pool has 49"),
    ]
    for item, words in cases:
        with pytest.raises(InvalidRequestError, match=words):
            bench.add(item)
    assert not bench.scheduler.has_work
    bench.add(request("a", 100, 684))
    with pytest.raises(InvalidRequestError, match="'a' is already in use"):
        bench.add(request("a", 10))
    bench.scheduler.abort(["a"])
    bench.add(request("a", 10))
    bench.drain()


def test_slots_are_the_lowest_free_and_running_requests_never_exceed_them() -> None:
    bench = Bench(max_num_seqs=2)
    bench.add(request("a", 5), request("b", 5, 1), request("c", 5))
    plan = bench.plan_step()
    assert [(init.slot, init.request.request_id) for init in plan.admitted] == [(0, "a"), (1, "b")]
    bench.commit(plan)
    plan = bench.plan_step()
    assert [(init.slot, init.request.request_id) for init in plan.admitted] == [(1, "c")]
    assert (bench.scheduler.stats().running, bench.scheduler.stats().waiting) == (2, 0)


def test_a_blocked_request_is_looked_up_again_only_after_pages_came_back(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups = []
    original = Admission._find_hit
    monkeypatch.setattr(Admission, "_find_hit", lambda *args: lookups.append(1) or original(*args))
    bench = Bench(10)
    bench.add(request("a", 100, 40), request("b", 100))
    for _ in range(20):
        bench.step()
    assert len(lookups) == 2
    bench.drain()
    assert len(lookups) <= 4


def test_an_early_request_is_not_overtaken_by_a_small_one() -> None:
    bench = Bench(10)
    bench.add(request("a", 100, 30), request("big", 120), request("small", 5))
    plan = bench.plan_step()
    assert [init.request.request_id for init in plan.admitted] == ["a"]


def test_priority_admits_the_lowest_value_then_the_earliest() -> None:
    bench = Bench(policy="priority", max_num_seqs=1)
    bench.add(
        request("late", 5, 1, priority=1, arrival_time=2.0),
        request("early", 5, 1, priority=1, arrival_time=1.0),
        request("urgent", 5, 1, priority=-3, arrival_time=9.0),
    )
    order = [bench.step()[0].request_id for _ in range(3)]
    assert order == ["urgent", "early", "late"]


# -- prefixes


def test_requests_submitted_at_once_share_a_prefix_within_one_step() -> None:
    prefix = list(range(512))
    bench = Bench(400, max_num_seqs=32, max_num_batched_tokens=4096)
    bench.add(*(request(str(n), [*prefix, *range(1000 * n + 1000, 1000 * n + 1016)]) for n in range(32)))
    plan = bench.plan_step()
    assert [row.num_tokens for row in plan.rows] == [528] + [16] * 31
    bench.commit(plan)
    assert [update.num_cached_tokens for update in bench.updates] == [0] + [512] * 31
    bench.step()
    assert {update.num_cached_tokens for update in bench.updates[32:]} == {0}, "only the first update says it"
    stats = bench.scheduler.stats()
    assert (stats.prefix_queries_total, stats.prefix_hits_total) == (32 * 528, 31 * 512)
    bench.drain()


def test_a_chat_turn_finds_the_answer_of_the_turn_before() -> None:
    bench = Bench()
    bench.add(request("a", 20, 30))
    bench.drain()
    history = request("a", 20).prompt_token_ids + bench.output["a"]
    bench.add(request("b", [*history, 1, 2, 3]))
    bench.step()
    assert bench.updates[-1].num_cached_tokens == 48


def test_salts_do_not_share() -> None:
    bench = Bench()
    prompt = list(range(40))
    bench.add(request("a", prompt), request("b", prompt, cache_salt="s"), request("c", prompt, cache_salt="s"))
    assert [row.start for row in bench.plan_step().rows] == [0, 0, 32]


def test_siblings_share_without_prefix_caching_and_strangers_do_not() -> None:
    bench = Bench(caching=False)
    prompt = list(range(40))
    bench.add(*(request(str(n), prompt, parent_id="f") for n in range(3)), request("x", prompt), request("y", prompt))
    plan = bench.plan_step()
    assert [row.start for row in plan.rows] == [0, 0, 0]
    bench.commit(plan)
    plan = bench.plan_step()
    assert [(row.start, row.num_tokens) for row in plan.rows] == [(40, 1), (39, 1), (39, 1), (40, 1), (40, 1)]
    bench.commit(plan)
    bench.drain()
    assert bench.manager.pool.free_slabs == bench.plan.num_slabs


def test_prompt_logprobs_compute_every_token_and_still_publish() -> None:
    bench = Bench(max_num_batched_tokens=30)
    prompt = list(range(50))
    bench.add(request("a", prompt, 2))
    bench.drain()
    bench.add(request("b", prompt, 2, prompt_logprobs=0))
    starts = [bench.plan_step()]
    assert starts[0].rows[0].start == 0
    assert bench.commit(starts[0]) == []
    (update,) = bench.step()
    assert update.prompt_logprobs is not None and update.prompt_logprobs[0] is None
    assert [entry.token_id for entry in update.prompt_logprobs[1:] if entry] == prompt[1:]
    assert update.num_cached_tokens == 0
    (update,) = bench.step()
    assert update.prompt_logprobs is None and update.finish_reason == "length"
    assert bench.scheduler.stats().prefix_queries_total == 50


# -- chunks


def test_a_prompt_is_spread_over_steps_beside_decoding_requests() -> None:
    bench = Bench(max_num_batched_tokens=32)
    bench.add(request("a", 10), request("b", 60))
    shapes = []
    for _ in range(4):
        plan = bench.plan_step()
        shapes.append(shape(plan))
        bench.commit(plan)
    assert shapes == [
        [(0, 0, 10, True), (1, 0, 22, False)],
        [(0, 10, 1, True), (1, 22, 31, False)],
        [(0, 11, 1, True), (1, 53, 7, True)],
        [(0, 12, 1, True), (1, 60, 1, True)],
    ]
    assert all(row.tokens == [] for row in plan.rows), "the device knows what it sampled"


def test_without_chunking_a_prompt_runs_whole_or_waits() -> None:
    bench = Bench(max_num_batched_tokens=64, enable_chunked_prefill=False)
    bench.add(request("a", 40, 3), request("b", 40))
    assert shape(bench.plan_step()) == [(0, 0, 40, True)]
    bench = Bench(max_num_batched_tokens=64, enable_chunked_prefill=False)
    bench.add(request("a", 40, 3), request("b", 60))
    bench.step()
    assert shape(bench.plan_step()) == [(0, 40, 1, True), (1, 0, 60, True)]


def test_without_chunking_a_prompt_beyond_the_budget_still_finishes() -> None:
    bench = Bench(max_num_batched_tokens=16, enable_chunked_prefill=False)
    bench.add(request("a", 5, 20), request("b", 100, 3), request("c", 5, 3))
    bench.drain()
    assert len(bench.output["b"]) == 3 and len(bench.output["c"]) == 3


# -- preemption


@pytest.mark.parametrize(("policy", "victim"), [("fcfs", "b"), ("priority", "a")])
def test_who_cannot_grow_preempts_the_last_or_the_worst(policy: str, victim: str) -> None:
    bench = Bench(6, policy=policy)
    bench.add(request("a", 40, 40, priority=1, arrival_time=1.0), request("b", 40, 40, priority=0, arrival_time=2.0))
    while not bench.scheduler.stats().preemptions_total:
        bench.step()
    assert [item.request_id for item in bench.scheduler._state.waiting] == [victim]
    while not (plan := bench.plan_step()).admitted:
        bench.commit(plan)
    (again,) = plan.admitted
    assert again.request.request_id == victim
    assert again.output_token_ids == bench.output[victim] != []
    (row,) = [row for row in plan.rows if row.slot == again.slot]
    assert row.tokens == [*again.request.prompt_token_ids, *again.output_token_ids][row.start :]
    bench.commit(plan)
    bench.drain()
    for name in ("a", "b"):
        assert bench.output[name] == expected_output(request(name, 40, 40), bench.plan.max_model_len)[0]
    reasons = [update.finish_reason for update in bench.updates if update.finish_reason]
    assert reasons == ["length", "length"]


def test_many_preemptions_are_few_lines_that_count_them(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 50.0
    monkeypatch.setattr(state_module.time, "monotonic", lambda: now)
    bench = Bench(6)
    lines = []
    with caplog.at_level("WARNING", logger="pagerunner.sched.state"):
        for second in range(30):
            now = 50.0 + second
            bench.add(request(f"a{second}", 40, 40), request(f"b{second}", 40, 40))
            before = len(caplog.records)
            bench.drain()
            lines += [second] * (len(caplog.records) - before)
    assert lines == [0, 10, 20] and bench.scheduler.stats().preemptions_total >= 30
    since = [int(record.getMessage().split("last such line: ")[1].split(",")[0]) for record in caplog.records]
    assert since[0] == 1 and min(since[1:]) >= 10


def test_a_preemption_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(6)
    bench.add(request("a", 40, 40), request("b", 40, 40))
    with caplog.at_level("WARNING", logger="pagerunner.sched.state"):
        bench.drain()
    assert len(caplog.records) == bench.scheduler.stats().preemptions_total > 0
    message = caplog.records[0].getMessage()
    lost = 40 + len([update for update in bench.updates if update.request_id == "b"])
    assert message.startswith("Request b is preempted: up to ") and "(1 running, 0 waiting, 100.0% of" in message
    assert 40 < int(message.split("up to ")[1].split()[0]) < lost


def test_waiting_has_a_reason() -> None:
    bench = Bench(6, max_num_seqs=2)
    assert bench.scheduler.stats().waiting_for == ""
    bench.add(request("a", 40, 40), request("b", 40, 40), request("c", 40, 40))
    bench.step()
    assert bench.scheduler.stats().waiting_for == "slot"
    while bench.scheduler.stats().running == 2:
        bench.step()
    while bench.scheduler.stats().waiting_for != "pages":
        bench.step()
    bench.drain()
    assert bench.scheduler.stats().waiting_for == ""


def test_a_preempted_request_finds_its_own_pages_again() -> None:
    bench = Bench(100)
    bench.add(request("a", 64, 40))
    for _ in range(20):
        bench.step()
    bench.scheduler._state.preempt(bench.scheduler._state.running.pop())
    plan = bench.plan_step()
    assert plan.rows[0].start == 80 and len(plan.rows[0].tokens) == 84 - 80
    bench.commit(plan)
    bench.drain()
    assert [update.num_cached_tokens for update in bench.updates] == [0] * 40, "said once, about the first admission"


def test_sleep_sends_everything_back_in_order_and_forgets_the_pages(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(max_num_batched_tokens=32)
    bench.add(*(request(name, 20) for name in "abc"))
    bench.step()
    bench.step()
    bench.scheduler.preempt_all()
    assert bench.manager.pool.used == [0] and not bench.manager.pool.cached[0] and not bench.manager.index.pages[0]
    assert bench.scheduler.stats().preemptions_total == 0 and not caplog.records, "nobody lacked memory"
    assert [item.request_id for item in bench.scheduler._state.waiting] == ["a", "b", "c"]
    bench.checker.lose_pages()
    bench.drain()
    for name in "abc":
        assert bench.output[name] == expected_output(request(name, 20), bench.plan.max_model_len)[0]
    assert all(update.num_preemptions == 0 for update in bench.updates)


# -- plans in flight


def test_two_plans_in_flight_never_run_a_token_too_many() -> None:
    bench = Bench(max_in_flight=2)
    bench.add(request("a", 10, 3))
    first, second = bench.plan_step(), bench.plan_step()
    assert bench.scheduler.schedule() is None, "two are under way"
    assert shape(second) == [(0, 10, 1, True)] and second.rows[0].tokens == []
    bench.commit(first)
    third = bench.plan_step()
    assert shape(third) == [(0, 11, 1, True)]
    bench.commit(second)
    assert bench.scheduler.schedule() is None, "the last token is in flight"
    assert bench.commit(third)[0].finish_reason == "length"
    assert not bench.scheduler.has_work


def test_tokens_of_requests_that_ended_meanwhile_are_dropped() -> None:
    bench = Bench(max_in_flight=2)
    bench.add(request("a", 10, 30), request("b", 10, 30))
    first, second = bench.plan_step(), bench.plan_step()
    (update,) = bench.scheduler.abort(["a", "a", "nobody"])
    assert (update.finish_reason, update.new_token_ids) == ("abort", [])
    bench.add(request("c", 10, 3))
    assert [item.request_id for item in bench.commit(first)] == ["b"]
    third = bench.plan_step()
    assert third.admitted[0].slot == 0, "the slot is reused while a step that has it is in flight"
    assert [item.request_id for item in bench.commit(second)] == ["b"]
    bench.commit(third)
    bench.scheduler.abort(["b", "c"])
    assert not bench.scheduler.has_work


def test_late_tokens_of_a_preempted_request_count_and_it_waits_for_them() -> None:
    bench = Bench(max_in_flight=2)
    bench.add(request("a", 10, 30))
    first, second = bench.plan_step(), bench.plan_step()
    bench.scheduler._state.preempt(bench.scheduler._state.running.pop())
    results = [bench.checker.run(first), bench.checker.run(second)]
    bench.commit(first, results[0])
    assert bench.scheduler.schedule() is None, "its second token is still to come"
    bench.commit(second, results[1])
    plan = bench.plan_step()
    assert plan.admitted[0].output_token_ids == bench.output["a"] and len(bench.output["a"]) == 2
    bench.commit(plan)
    bench.drain()
    assert bench.output["a"] == expected_output(request("a", 10, 30), bench.plan.max_model_len)[0]


def test_a_preempted_request_may_finish_while_it_waits() -> None:
    bench = Bench(max_in_flight=2)
    bench.add(request("a", 10, 2))
    first, second = bench.plan_step(), bench.plan_step()
    bench.scheduler._state.preempt(bench.scheduler._state.running.pop())
    results = [bench.checker.run(first), bench.checker.run(second)]
    bench.commit(first, results[0])
    [last] = bench.commit(second, results[1])
    assert (last.finish_reason, last.num_preemptions) == ("length", 1)
    assert not bench.scheduler.has_work


# -- results


@pytest.mark.parametrize(
    ("fields", "tokens", "expected"),
    [
        ({"eos_token_ids": (2,)}, [5, 2, 7], ([5, 2], "stop", None)),
        ({"eos_token_ids": (2,), "ignore_eos": True}, [5, 2, 7], ([5, 2, 7], "length", None)),
        ({"eos_token_ids": (2,), "min_tokens": 3}, [5, 2, 2, 9], ([5, 2, 2], "stop", None)),
        ({"stop_token_ids": (7,)}, [7, 1], ([7], "stop", 7)),
        ({"stop_token_ids": (7,), "min_tokens": 2}, [7, 7], ([7, 7], "stop", 7)),
        ({"eos_token_ids": (7,), "stop_token_ids": (7,)}, [7], ([7], "stop", None)),
        ({"eos_token_ids": (7,), "stop_token_ids": (7,), "ignore_eos": True}, [7], ([7], "stop", 7)),
        ({}, [1, 1, 1, 1], ([1, 1, 1], "length", None)),
    ],
)
@pytest.mark.parametrize("at_once", [False, True])
def test_finish_rules(fields: dict[str, Any], tokens: list[int], expected: tuple[Any, ...], at_once: bool) -> None:
    bench = Bench()
    bench.add(request("a", 10, 3, **fields))
    groups = [tokens] if at_once else [[token] for token in tokens]
    got: list[int] = []
    for group in groups:
        plan = bench.plan_step()
        logprobs = [TokenLogprobs(token, -1.0, 1, [], []) for token in group]
        result = StepResult(step_id=plan.step_id, token_ids=[group], logprobs={0: logprobs})
        (update,) = bench.commit(plan, result)
        got += update.new_token_ids
        assert update.logprobs is not None and [item.token_id for item in update.logprobs] == update.new_token_ids
        if update.finish_reason:
            break
    assert (got, update.finish_reason, update.stop_reason) == expected
    assert not bench.scheduler.has_work and bench.manager.pool.used == [0]


def test_the_model_length_ends_a_request() -> None:
    bench = Bench(max_model_len=20)
    bench.add(request("a", 15, 100))
    bench.drain()
    assert len(bench.output["a"]) == 5 and bench.updates[-1].finish_reason == "length"


def test_an_error_ends_only_its_row_and_nobody_finds_what_it_computed() -> None:
    bench = Bench()
    prompt = list(range(40))
    bench.add(request("a", prompt), request("b", 40))
    plan = bench.plan_step()
    result = StepResult(step_id=plan.step_id, token_ids=[[], [4]], errors={0: "logits are not finite"})
    updates = bench.commit(plan, result)
    assert [(item.request_id, item.finish_reason, item.error) for item in updates] == [
        ("a", "error", "logits are not finite"),
        ("b", None, None),
    ]
    recount(bench.manager)
    bench.add(request("c", prompt))
    assert [row.start for row in bench.plan_step().rows] == [40, 0]


@pytest.mark.parametrize(("error", "found"), [("logits are not finite", 0), (NO_TOKEN_ALLOWED, 32)])
def test_after_an_error_no_page_is_found_that_the_row_has_read_unless_the_request_is_to_blame(
    error: str, found: int
) -> None:
    bench = Bench()
    prompt = list(range(40))
    bench.add(request("a", prompt, 9))
    bench.commit(bench.plan_step())
    plan = bench.plan_step()
    assert [row.start for row in plan.rows] == [40], "a row of one token, which reads what was computed before"
    [update] = bench.commit(plan, StepResult(step_id=plan.step_id, token_ids=[[]], errors={0: error}))
    assert (update.error, update.param) == (error, "structured_outputs" if found else None)
    bench.add(request("b", prompt))
    assert [row.start for row in bench.plan_step().rows] == [found]


def test_aborting_a_waiting_and_a_running_request_frees_their_pages() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add(request("a", 40), request("b", 40))
    bench.step()
    updates = bench.scheduler.abort(["b", "a"])
    assert [(item.request_id, item.finish_reason) for item in updates] == [("b", "abort"), ("a", "abort")]
    assert not bench.scheduler.has_work and bench.manager.pool.used == [0]
    assert bench.scheduler.abort(["a"]) == []


def test_stats_count() -> None:
    bench = Bench()
    bench.add(request("a", 40, 3), request("b", 10, 3))
    bench.step()
    stats = bench.scheduler.stats()
    assert (stats.running, stats.waiting, stats.last_step_tokens, stats.kv_usage) == (2, 0, 50, 4 / 100)
    assert (stats.groups[0].name, stats.groups[0].pages_in_use) == ("full", 4)
    bench.drain()
    stats = bench.scheduler.stats()
    assert (stats.prompt_tokens_total, stats.generation_tokens_total, stats.steps_total) == (50, 6, 3)
    assert bench.scheduler.reset_prefix_cache() is True


# -- stages


def rows_of(plans: list[StepPlan]) -> list[list[int]]:
    return [[row.slot for row in plan.rows] for plan in plans]


@pytest.mark.parametrize(
    ("requests", "stages", "slots"),
    [
        (1, 2, [[0]] * 6),
        (2, 2, [[0], [1]] * 3),
        (5, 2, [[0, 1, 2], [3, 4]] * 3),
        (2, 4, [[0], [1]] * 3),
        (4, 1, [[0, 1, 2, 3]] * 6),
    ],
)
def test_sequences_take_turns_so_that_stages_work_at_the_same_time(
    requests: int, stages: int, slots: list[list[int]]
) -> None:
    """A step goes on with sequences whose last tokens were sampled as many steps ago as there are stages, if there are enough of them."""
    bench = Bench(stages=stages, max_in_flight=stages + 1)
    asked = [request(f"r{number}", 20, 32) for number in range(requests)]
    bench.add(*asked)
    first = bench.plan_step()
    assert rows_of([first]) == [list(range(requests))], "prompts run as soon as they can"
    plans = []
    for _ in range(6):
        plans.append(bench.plan_step())
        bench.commit(first)
        first = plans[-1]
    assert rows_of(plans) == slots
    bench.commit(first)
    bench.drain()
    assert bench.output == {one.request_id: expected_output(one, bench.plan.max_model_len)[0] for one in asked}


@pytest.mark.parametrize(("in_flight", "slots"), [(1, [[0, 1, 2, 3]] * 4), (2, [[0, 1], [2, 3]] * 2)])
def test_there_are_no_more_turns_than_plans_in_flight(in_flight: int, slots: list[list[int]]) -> None:
    """With one plan in flight stages never work at the same time, so turns would only make steps smaller."""
    bench = Bench(stages=4, max_in_flight=in_flight)
    bench.add(*(request(f"r{number}", 20, 32) for number in range(4)))
    under_way, plans = deque([bench.plan_step()]), []
    for _ in range(4):
        if len(under_way) == in_flight:
            bench.commit(under_way.popleft())
        plans.append(bench.plan_step())
        under_way.append(plans[-1])
    assert rows_of(plans) == slots


def test_prompts_do_not_wait_for_a_turn() -> None:
    bench = Bench(stages=3, max_in_flight=4, max_num_batched_tokens=32)
    bench.add(request("long", 128, 4))
    plans = [bench.plan_step() for _ in range(4)]
    assert [shape(plan) for plan in plans] == [[(0, 32 * n, 32, n == 3)] for n in range(4)]
    for plan in plans:
        bench.commit(plan)
    bench.drain()
