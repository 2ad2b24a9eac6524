"""What the scheduler plans for rows with drafts, whose number of tokens only the device knows."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from helpers.device_costs import KEY_BYTES, Device
from helpers.plans import one_group
from helpers.traffic import FixedLength
from pagerunner.config import SpeculativeConfig
from pagerunner.memory.grant import Grant
from pagerunner.memory.manager import KVManager
from pagerunner.memory.planner import plan_memory
from pagerunner.memory.specs import FullKV, WindowKV
from pagerunner.sched import step_planner
from pagerunner.sched.costs import CostModel
from pagerunner.sched.draft_length import AdaptiveLength, DraftLength, LengthByRows
from pagerunner.sched.scheduler import Scheduler
from pagerunner.sched.suffix import SuffixDrafter, SuffixIndex
from pagerunner.types import EngineRequest, RequestUpdate, SamplingParams, StateSave, StepPlan, StepResult


def scheduler_of(drafts: int | DraftLength = 3, pages: int = 40, **limits: int) -> Scheduler:
    length = FixedLength(drafts) if isinstance(drafts, int) else drafts
    given = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 16 * pages, "max_in_flight": 2, **limits}
    return Scheduler(KVManager(one_group(pages)), draft_length=length, **given)


def add(
    scheduler: Scheduler, prompt: int, max_tokens: int = 100, name: str = "a", tokens: list[int] | None = None
) -> EngineRequest:
    tokens = tokens or [len(name) * 1000 + at for at in range(prompt)]
    request = EngineRequest(
        request_id=name,
        prompt_token_ids=tokens,
        params=SamplingParams(max_tokens=None),
        seed=0,
        max_tokens=max_tokens,
    )
    scheduler.add(request)
    return request


def plan_of(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def commit(scheduler: Scheduler, plan: StepPlan, *tokens: list[int]) -> list[RequestUpdate]:
    drafted = {number: row.num_tokens - 1 for number, row in enumerate(plan.rows) if not row.tokens}
    return scheduler.commit(plan, StepResult(step_id=plan.step_id, token_ids=list(tokens), drafted=drafted))


def bounds(plan: StepPlan) -> list[tuple[int, int]]:
    return [(row.start, row.num_tokens) for row in plan.rows]


def test_plans_go_on_from_the_most_that_may_be_accepted_and_commits_lower_it() -> None:
    scheduler = scheduler_of()
    add(scheduler, 30)
    first, second = plan_of(scheduler), plan_of(scheduler)
    assert (bounds(first), first.num_drafts) == ([(0, 30)], 3)
    assert (bounds(second), second.num_drafts) == ([(30, 4)], 3), "the token that the first one samples, and 3 drafts"
    commit(scheduler, first, [7])
    third = plan_of(scheduler)
    assert bounds(third) == [(34, 4)], "at most: between 31 and 34"
    (update,) = commit(scheduler, second, [8, 9])
    assert update.new_token_ids == [8, 9]
    assert bounds(plan_of(scheduler)) == [(36, 4)], "two of four drafts were wrong"
    commit(scheduler, third, [10, 11, 12, 13])
    assert bounds(plan_of(scheduler)) == [(40, 4)]


def test_only_what_is_certainly_computed_is_found_by_others() -> None:
    scheduler = scheduler_of(max_in_flight=1)
    prompt = add(scheduler, 30).prompt_token_ids
    commit(scheduler, plan_of(scheduler), [7])
    commit(scheduler, plan_of(scheduler), [8])
    text = [*prompt, 7, 8, 99]
    chain = scheduler.manager.chain()
    assert scheduler.manager.cached_tokens(chain, text) == 16, "of 32 tokens the last one isn't computed yet"
    plan = plan_of(scheduler)
    commit(scheduler, plan, [99])
    assert scheduler.manager.cached_tokens(scheduler.manager.chain(), text) == 32


@pytest.mark.parametrize(("max_tokens", "wanted"), [(2, 1), (3, 2), (4, 3), (100, 4)])
def test_a_row_has_no_drafts_beyond_its_requests_end(max_tokens: int, wanted: int) -> None:
    scheduler = scheduler_of()
    add(scheduler, 30, max_tokens)
    plan_of(scheduler)
    assert bounds(plan_of(scheduler)) == [(30, wanted)]


def test_no_drafts_are_made_where_all_requests_end() -> None:
    scheduler = scheduler_of()
    add(scheduler, 30, 2, name="a")
    add(scheduler, 30, 3, name="bb")
    plans = [plan_of(scheduler) for _ in range(2)]
    assert [(bounds(plan), plan.num_drafts) for plan in plans] == [([(0, 30), (0, 30)], 3), ([(30, 1), (30, 2)], 3)]
    commit(scheduler, plans[0], [7], [8])
    commit(scheduler, plans[1], [9], [10])
    last = plan_of(scheduler)
    assert (bounds(last), last.num_drafts) == ([(31, 1)], 0)


def test_a_request_waits_where_it_may_have_ended_and_ends_where_it_has() -> None:
    scheduler = scheduler_of(max_in_flight=3)
    add(scheduler, 30, 5)
    first, second = plan_of(scheduler), plan_of(scheduler)
    third = plan_of(scheduler)
    assert bounds(third) == [(34, 1)], "the last position that the request can have"
    commit(scheduler, first, [7])
    assert scheduler.schedule() is None
    commit(scheduler, second, [8])
    commit(scheduler, third, [9])
    fourth = plan_of(scheduler)
    assert bounds(fourth) == [(32, 2)], "33 tokens are known, and 35 are the most"
    (update,) = commit(scheduler, fourth, [10, 11])
    assert (update.new_token_ids, update.finish_reason) == ([10, 11], "length")


def test_tokens_after_the_one_that_ends_a_request_are_dropped() -> None:
    scheduler = scheduler_of()
    request = EngineRequest(
        request_id="a", prompt_token_ids=[1, 2], params=SamplingParams(max_tokens=None, stop_token_ids=[9]), seed=0, max_tokens=50,
    )  # fmt: skip
    scheduler.add(request)
    first, second = plan_of(scheduler), plan_of(scheduler)
    commit(scheduler, first, [7])
    (update,) = commit(scheduler, second, [8, 9, 10, 11])
    assert (update.new_token_ids, update.finish_reason, update.stop_reason) == ([8, 9], "stop", 9)
    assert scheduler.stats().generation_tokens_total == 3


def test_drafts_are_left_out_before_anybody_is_preempted() -> None:
    scheduler = scheduler_of(pages=4, max_in_flight=1)
    add(scheduler, 31, 20, name="a")
    add(scheduler, 31, 20, name="bb")
    commit(scheduler, plan_of(scheduler), [7], [8])
    assert bounds(plan_of(scheduler)) == [(31, 1), (31, 1)]
    assert scheduler.stats().preemptions_total == 0


def test_a_row_whose_length_is_uncertain_waits_before_anybody_is_preempted() -> None:
    """Two requests fill 4 pages, and may have as many tokens as these have room for."""
    scheduler = scheduler_of(pages=4)
    add(scheduler, 28, 20, name="a")
    add(scheduler, 28, 20, name="bb")
    first, second = plan_of(scheduler), plan_of(scheduler)
    assert bounds(second) == [(28, 4), (28, 4)]
    commit(scheduler, first, [7], [8])
    assert scheduler.schedule() is None, "the next rows begin at 29 to 32, and there is no page for 32"
    commit(scheduler, second, [7], [8])
    assert bounds(plan_of(scheduler)) == [(29, 1), (29, 1)]
    assert scheduler.stats().preemptions_total == 0


def test_memory_is_told_where_rows_begin_at_the_least_and_end_for_certain() -> None:
    """Snapshots of states are taken by these bounds: one that is believed to be taken, and isn't, would be found by others."""
    told: list[list[tuple[int, int]]] = []

    class Told(KVManager):
        def end_plan(self, rows: Iterable[tuple[Grant, int, int]]) -> list[StateSave]:
            given = list(rows)
            told.append([(start, end) for _, start, end in given])
            return super().end_plan(given)

    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 640, "max_in_flight": 3}
    scheduler = Scheduler(Told(one_group(40)), draft_length=FixedLength(3), **limits)
    add(scheduler, 30)
    plans = [plan_of(scheduler) for _ in range(3)]
    assert [bounds(plan) for plan in plans] == [[(0, 30)], [(30, 4)], [(34, 4)]]
    assert told == [[(0, 30)], [(30, 31)], [(31, 35)]]


def test_rows_keep_their_drafts_where_a_drafter_has_no_pages_to_go_on() -> None:
    """Two requests fill 4 pages. The tokens behind the first one's drafts would be in a fifth."""
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64}
    scheduler = Scheduler(KVManager(one_group(4)), draft_length=FixedLength(3), looks_ahead=True, **limits)
    add(scheduler, 27, 20, "a")
    add(scheduler, 20, 20, "bb")
    commit(scheduler, plan_of(scheduler), [7], [8])
    assert bounds(plan_of(scheduler)) == [(27, 4), (20, 4)]
    assert scheduler.stats().preemptions_total == 0


def test_no_two_pages_of_a_window_share_a_column_where_a_drafter_goes_on() -> None:
    """8 drafts a row, two plans in flight, and steps of 18 tokens: bounds are further apart than a step is long."""
    plan = plan_memory(
        [FullKV(1, 4, "float32"), WindowKV(1, 4, "float32", window=8)],
        page_tokens=4,
        budget_bytes=None,
        num_pages_override=400,
        model_max_len=512,
        max_num_seqs=2,
        max_num_batched_tokens=18,
        max_in_flight=2,
        num_drafts=8,
    )
    window = next(group for group in plan.groups if group.rule.forgets)
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 18, "max_model_len": 512, "max_in_flight": 2}
    scheduler = Scheduler(KVManager(plan), draft_length=FixedLength(8), looks_ahead=True, **limits)
    add(scheduler, 9)
    most, flight, columns = 0, [], dict[int, int]()
    for _ in range(12):
        while (made := scheduler.schedule()) is not None:
            flight.append(made)
            for write in made.table_writes:
                if plan.groups[write.group] is window:
                    columns.update((write.first + at, entry) for at, entry in enumerate(write.entries))
            row = made.rows[0]
            low = row.start - 8 * (len(flight) - 1) - 7 if not row.tokens else row.start
            held = max(columns) - max(low, 0) // 4 + 1
            most = max(most, held)
            assert held <= window.table_width
        done = flight.pop(0)
        commit(scheduler, done, [5] if done.rows[0].tokens else [5] * done.rows[0].num_tokens)
    assert most > 7, "fewer than a table for steps alone would have"


def test_drafts_of_the_host_are_learned_and_priced_as_well() -> None:
    """A text that repeats itself, and goes on otherwise: drafts of the host are all wrong."""
    costs = CostModel(Device().measured((3, 7)), KEY_BYTES)
    length = AdaptiveLength(costs, (3, 7))
    words = SuffixDrafter(SpeculativeConfig(method="suffix", num_speculative_tokens=7))
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 640}
    scheduler = Scheduler(KVManager(one_group(40)), draft_length=length, costs=costs, host_drafter=words, **limits)
    request = add(scheduler, 40)
    request.prompt_token_ids[:] = [*range(1, 9)] * 5
    before, seconds = length.expected(), [costs.decode_seconds(1, 0, drafts) for drafts in (0, 3, 7)]
    for step in range(20):
        plan = plan_of(scheduler)
        drafts = max(row.num_tokens for row in plan.rows) - 1
        timed = [] if plan.rows[0].tokens else [(plan.step_id, 4 * seconds[-1] if drafts else seconds[0])]
        drafted = {0: drafts} if drafts and not plan.rows[0].tokens else {}
        tokens = [[step % 8 + 1]]
        scheduler.commit(plan, StepResult(step_id=plan.step_id, token_ids=tokens, drafted=drafted, timed=timed))
    assert length.expected()[3] < before[3] - 0.2
    assert costs.decode_seconds(1, 0) < 1.1 * seconds[0]
    assert sum(costs.decode_seconds(1, 0, drafts) for drafts in (3, 7)) > sum(seconds[1:])


def test_long_prompts_are_taken_up_by_and_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests wait meanwhile: 131,072 tokens would take 11 ms in one plan."""
    monkeypatch.setattr(step_planner, "_INDEXED_TOKENS", 16)
    taken: list[int] = []
    extend = SuffixIndex.extend
    monkeypatch.setattr(SuffixIndex, "extend", lambda text, tokens: taken.append(len(tokens)) or extend(text, tokens))
    words = SuffixDrafter(SpeculativeConfig(method="suffix", num_speculative_tokens=3))
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 96, "max_model_len": 640}
    scheduler = Scheduler(KVManager(one_group(40)), draft_length=FixedLength(3), host_drafter=words, **limits)
    for name in ("a", "bb"):
        add(scheduler, 40, name=name, tokens=[*range(len(name), len(name) + 8)] * 5)
    made = []
    for step in range(9):
        plan, next_token = plan_of(scheduler), step % 8
        made.append([len(guess.tokens) for guess in plan.guesses])
        before, taken[:] = sum(taken), []
        assert before <= 16 + 2 * 4, "what a plan takes up, and what the rows before have got"
        commit(scheduler, plan, [1 + next_token], [2 + next_token])
    assert made[:3] == [[], [], []] and made[3] == [3] and made[-1] == [3, 3], made
    for sequence in scheduler._state.running:
        text = sequence.text
        assert text is not None and list(text._text[: text.end]) == sequence.tokens


def test_rows_share_a_step_however_few_tokens_it_has() -> None:
    scheduler = scheduler_of(drafts=7, max_num_batched_tokens=8, max_in_flight=1)
    for name in ("a", "bb", "ccc"):
        add(scheduler, 2, name=name)
    commit(scheduler, plan_of(scheduler), [7], [8], [9])
    assert plan_of(scheduler).num_drafts == 1, "2 tokens for each of 3 rows"


def test_a_choice_of_drafts_counts_from_the_next_row_on() -> None:
    scheduler = scheduler_of(drafts=LengthByRows([(1, 3), (2, 0)]), max_in_flight=1)
    add(scheduler, 4, name="a")
    commit(scheduler, plan_of(scheduler), [7])
    add(scheduler, 4, name="bb")
    both = plan_of(scheduler)
    assert (bounds(both), both.num_drafts) == ([(4, 4), (0, 4)], 3), "one was running when the number was chosen"
    commit(scheduler, both, [8, 9], [7])
    without = plan_of(scheduler)
    assert (bounds(without), without.num_drafts) == ([(6, 1), (4, 1)], 0), "drafts that nobody wants any more"


@pytest.mark.parametrize(("rows", "wanted"), [(1, 4), (8, 4), (9, 2), (16, 2), (17, 2), (31, 2), (32, 0), (500, 0)])
def test_numbers_by_rows(rows: int, wanted: int) -> None:
    assert LengthByRows([(1, 4), (9, 2), (32, 0)]).choose(rows, 1000) == wanted
