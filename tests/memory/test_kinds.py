"""Windows, chunks and recurrent state through manager and scheduler: what is held, what hits, what is left."""

from __future__ import annotations

import random
from collections import deque

import pytest

from helpers.effort import effort
from helpers.memory_bench import Bench, tokens
from helpers.plans import mixed
from helpers.recount import recount
from pagerunner.memory.grant import NO_PAGE, Grant
from pagerunner.memory.manager import KVManager

HYBRID = {"full": (16, 1), "recurrent": (16, 2)}
WINDOWED = {"full": (16, 1), "window-100": (16, 1)}


# -- recurrent state


def test_the_last_unit_of_a_10000_token_prompt_can_be_hit_and_costs_no_extra_step() -> None:
    bench = Bench(HYBRID)
    bench.add("a", tokens(10_000))
    steps = bench.drain()
    assert [row.num_tokens for plan in steps for row in plan.rows] == [8192, 1808]
    assert [(save.row, save.position) for plan in steps for save in plan.state_saves] == [(0, 9984)]
    assert bench.run("b", tokens(10_000)) == 9984
    assert bench.run("c", tokens(10_000) + [7, 8, 9]) == 9984


@pytest.mark.parametrize("batched", [37, 256, 1001])
@pytest.mark.parametrize("page", [1, 16, 48])
def test_a_prompt_of_any_length_is_found_to_its_last_boundary_when_it_comes_again(page: int, batched: int) -> None:
    bench = Bench({"full": (page, 1), "recurrent": (16, 2)}, batched=batched)
    cell = max(page, 16)
    lengths = random.Random(batched).sample(range(cell + 1, 700), 14) + [16 * cell, 16 * cell + 1]
    for time in ("first", "again"):
        for number, length in enumerate(lengths):  # every second one begins as the one before
            shared = min(length, lengths[number - 1]) // 2 if number % 2 else 0
            begins = tokens(shared, 1_000 * (number - 1))
            bench.add(f"{time} {number}", begins + tokens(length - shared, 1_000 * number), 3)
        bench.drain()
    found = [bench.cached[f"again {number}"] for number in range(len(lengths))]
    assert found == [(length - 1) // cell * cell for length in lengths]


def test_a_hit_copies_the_snapshot_into_a_page_that_is_not_zeroed() -> None:
    bench = Bench(HYBRID)
    bench.run("a", tokens(100))
    bench.add("b", tokens(100))
    plan = bench.step()
    (copy,) = plan.copies
    assert copy.group == 1 and plan.zero == [] and plan.rows[0].start == 96
    assert copy.source != copy.target
    bench.drain()
    assert bench.run("c", tokens(100)) == 96, "the snapshot itself is still there"


def test_a_branch_point_is_remembered_after_it_was_missed_once() -> None:
    for other, at_first in (("recurrent", 0), ("window-20", 0), ("chunked-64", 960)):  # a chunk's begin needs no page
        bench = Bench({"full": (16, 1), other: (16, 1)})
        shared = tokens(1000)
        bench.run("a", shared + tokens(500, 2000))
        assert bench.run("b", shared + tokens(500, 3000)) == at_first, "nobody knew that they would branch here"
        assert bench.run("c", shared + tokens(500, 4000)) == 992


@pytest.mark.parametrize("windows", [{}, {"window-100": (16, 1)}], ids=["", "windows"])
@pytest.mark.parametrize(("page", "hit"), [(16, 192), (48, 192), (128, 128)])
def test_the_next_turn_continues_near_the_end_of_the_generated_text(
    page: int, hit: int, windows: dict[str, tuple[int, int]]
) -> None:
    bench = Bench({"full": (page, 1), "recurrent": (16, 2), **windows})
    bench.add("a", tokens(50), 150)
    generated: list[int] = []
    while bench.scheduler.has_work:
        plan = bench.scheduler.schedule()
        assert plan is not None
        result = bench.checker.run(plan)
        generated += result.token_ids[0]
        bench.scheduler.commit(plan, result)
    assert bench.run("b", tokens(50) + generated + tokens(30, 9000)) == hit
    # One snapshot of the prompt and one of the turn; those on the way made room for each other.
    positions = [bench.manager.index.keys[1][page] for page in bench.manager.pool.cached[1]]
    assert len(positions) <= 4


def test_requests_with_a_prompt_that_is_being_computed_wait_for_its_snapshot() -> None:
    bench = Bench(HYBRID)
    for number in range(3):
        bench.add(str(number), tokens(1000), 5, parent_id="f")
    first = bench.step()
    assert len(first.rows) == 1
    second = bench.step()
    assert [row.start for row in second.rows] == [1000, 992, 992]
    bench.drain()
    assert bench.cached == {"0": 0, "1": 992, "2": 992}


def test_a_family_shares_state_without_prefix_caching_while_one_of_it_runs() -> None:
    bench = Bench(HYBRID, enable_prefix_caching=False)
    for number in range(3):
        bench.add(str(number), tokens(1000), 5, parent_id="f")
    bench.drain()
    assert bench.cached == {"0": 0, "1": 992, "2": 992}
    assert bench.manager.pool.free_slabs == bench.plan.num_slabs, "nothing outlives the family"
    bench.add("late", tokens(1000), 5, parent_id="f")
    bench.drain()
    assert bench.cached["late"] == 0


def test_who_waits_for_a_snapshot_goes_on_when_its_maker_is_aborted() -> None:
    bench = Bench(HYBRID, batched=64)
    bench.add("a", tokens(1000))
    bench.add("b", tokens(1000))
    assert len(bench.step().rows) == 1
    bench.scheduler.abort(["a"])
    bench.drain()
    assert bench.cached["b"] in (0, 48, 64)


def test_snapshots_never_keep_a_request_waiting() -> None:
    plan = mixed({"full": (16, 1), "recurrent": (16, 30)}, 1 << 20)
    alone = plan.slab_bytes * plan.slabs_needed(150)
    bench = Bench({"full": (16, 1), "recurrent": (16, 30)}, alone * 1.3 / (1 << 20), 64)
    for number in range(6):
        bench.add(str(number), tokens(bench.plan.max_model_len - 20, 1000 * number), 20)
    bench.drain()
    assert bench.scheduler.stats().preemptions_total == 0


def test_a_broken_row_takes_its_snapshots_with_it() -> None:
    bench = Bench(HYBRID)
    bench.add("a", tokens(100))
    plan = bench.scheduler.schedule()
    assert plan is not None and plan.state_saves
    bench.scheduler.commit(plan, bench.checker.run(plan, {0: "broken"}))
    assert not bench.manager.index.pages[1]
    assert bench.run("b", tokens(100)) == 0


# -- windows


def held(grant: Grant, group: int) -> list[int]:
    return [number for number, page in enumerate(grant.pages[group]) if page != NO_PAGE]


def test_a_long_chunk_holds_the_window_before_it_and_its_tail() -> None:
    manager = KVManager(mixed(WINDOWED, 4 << 20, batched=2000, model_max_len=10_000))
    prompt = tokens(4000)
    grant = manager.admit(0, manager.chain(), prompt, 0)
    assert grant is not None and manager.grow(grant, 0, 2000) == 2000
    assert held(grant, 1) == list(range((2000 - 99) // 16, 125))
    writes = {write.group: write for write in manager.take_table_writes()}
    assert writes[1].first == 0 and writes[1].entries[:118] == [-1] * 118 and -1 not in writes[1].entries[118:]
    assert -1 not in writes[0].entries
    manager.publish(grant, prompt, 2000)
    manager.end_plan([(grant, 0, 2000)])
    assert manager.grow(grant, 2000, 4000) == 4000
    assert held(grant, 1) == [*range(118, 125), *range((3984 - 99) // 16, 250)]
    manager.publish(grant, prompt, 4000)
    manager.end_plan([(grant, 2000, 4000)])
    assert len(held(grant, 1)) <= 8
    recount(manager)


def test_a_window_hits_where_its_last_pages_are() -> None:
    bench = Bench(WINDOWED, batched=2000)
    assert bench.run("a", tokens(5000)) == 0
    assert bench.run("same", tokens(5000)) == 4992
    assert bench.run("longer", tokens(6000)) == 4992
    assert bench.run("to a chunk's end", tokens(4500) + tokens(99, 9000)) == 4000
    used = bench.scheduler.stats()
    assert used.groups[0].hits_total == 4992 + 4992 + 4496
    assert used.groups[1].hits_total == used.prefix_hits_total == 4992 + 4992 + 4000
    assert used.groups[1].pages_cached < 50 < used.groups[0].pages_cached


def test_windows_stay_where_a_snapshot_is_or_may_come() -> None:
    """A window in the midst of a prompt is found by nobody without the state there."""
    bench = Bench({"full": (16, 1), "window-100": (16, 1), "recurrent": (16, 2)}, batched=200)
    shared = tokens(1000)
    assert bench.run("a", shared + tokens(500, 2000)) == 0
    assert bench.scheduler.stats().groups[1].pages_cached <= 8, "seven steps' windows, of which one can be found"
    assert bench.run("same", shared + tokens(500, 2000)) == 1488
    assert bench.run("b", shared + tokens(500, 3000)) == 0
    assert bench.run("c", shared + tokens(500, 4000)) == 992


def test_without_a_group_that_keeps_all_windows_say_where_texts_branch() -> None:
    bench = Bench({"window-100": (16, 1), "recurrent": (16, 2)}, batched=200)
    shared = tokens(1000)
    bench.run("a", shared + tokens(500, 2000))
    assert bench.run("b", shared + tokens(500, 3000)) == 0
    assert bench.run("c", shared + tokens(500, 4000)) == 992


def test_chunks_get_shorter_before_pages_run_out() -> None:
    plan = mixed({"full": (16, 1), "window-400": (16, 4)}, 16 << 20, batched=2000, model_max_len=4000)
    needed = plan.slab_bytes * plan.slabs_needed(4000)
    bench = Bench({"full": (16, 1), "window-400": (16, 4)}, needed * 1.02 / (1 << 20), 2000)
    assert bench.plan.max_model_len >= 3500
    bench.add("a", tokens(bench.plan.max_model_len - 10), 10)
    lengths = [plan.rows[0].num_tokens for plan in bench.drain()]
    assert lengths[0] == 2000 and 256 <= min(lengths[:-10]) < 2000
    assert bench.scheduler.stats().preemptions_total == 0


def test_a_request_is_let_in_when_another_has_done_its_prompt_and_needs_no_long_chunks_any_more() -> None:
    kinds = {"window-1000": (16, 1)}
    group = Bench(kinds, batched=512).plan.groups[0]
    room = 2 * group.pages_needed(3000) - 6  # two prompts at once don't fit, one beside a text that is generated does
    bench = Bench(kinds, room * group.page_bytes / (1 << 20), 512)
    bench.add("a", tokens(3000), 100)
    bench.add("b", tokens(3000, 5000), 1)
    bench.drain()
    alone = next(number for number, plan in enumerate(bench.plans) if plan.rows[0].start >= 3000)
    both = next(number for number, plan in enumerate(bench.plans) if len(plan.rows) > 1)
    assert both - alone < 16, "as soon as the first needs its next page"


# -- soak


def test_fragmentation_stays_low_over_many_random_operations() -> None:
    generator = random.Random(0)
    kinds = {"full": (16, 1), "window-40": (16, 3), "chunked-64": (16, 2), "recurrent": (16, 5), "latent-4": (16, 1)}
    manager = KVManager(mixed(kinds, 1 << 20, batched=256, model_max_len=400))
    live: deque[tuple[Grant, list[int], int]] = deque()
    slot, worst, untidy = 0, 0.0, 0.0
    for operation in range(effort(8_000, 100_000)):
        untidy = max(untidy, manager.pool.fragmentation)
        manager.begin_step()
        worst = max(worst, manager.pool.fragmentation)
        if generator.random() < 0.4 or not live:
            prompt = tokens(generator.randrange(1, 400), generator.randrange(6) * 1000)
            grant = manager.admit(slot, manager.chain(), prompt, len(prompt) - 1)
            if grant is not None:
                live.append((grant, prompt, grant.cached_tokens))
                slot += 1
            elif live:
                manager.release(live.popleft()[0])
        else:
            live.rotate(generator.randrange(len(live)))
            grant, prompt, start = live.popleft()
            end = min(start + generator.choice([1, 16, 100, 256]), len(prompt))
            end = manager.grow(grant, start, end) if end > start and generator.random() > 0.03 else 0
            if not end:
                manager.release(grant)
            else:
                manager.publish(grant, prompt, end)
                manager.take_table_writes()
                manager.end_plan([(grant, start, end)])
                live.append((grant, prompt, end))
        manager.take_copies()
        manager.take_fresh()
        if operation % 500 == 0:
            recount(manager)
    assert worst < 0.05 < untidy
    while live:
        manager.release(live.pop()[0])
    recount(manager)
    assert not any(manager.pool.used) and manager.reset_prefix_cache()
    assert manager.pool.free_slabs == manager.plan.num_slabs
