"""Siblings of one request share the partial last page of their prompt copy-on-write and compute one token of it."""

from __future__ import annotations

import pytest

from helpers.memory_bench import Bench, tokens
from pagerunner.memory.manager import KVManager
from pagerunner.types import StepPlan

FULL = {"full": (16, 1)}
PARTIAL = 16 * 5 + 9


def family(bench: Bench, size: int, prompt: list[int], max_tokens: int = 4) -> None:
    for number in range(size):
        bench.add(f"f_{number}", prompt, max_tokens, parent_id="f", seed=number)


def computed(plans: list[StepPlan]) -> int:
    return sum(row.num_tokens for plan in plans for row in plan.rows)


def starts(plan: StepPlan) -> list[tuple[int, int]]:
    return [(row.start, row.num_tokens) for row in plan.rows]


@pytest.mark.parametrize("caching", [True, False])
def test_siblings_compute_one_token_of_the_prompt_and_copy_one_page(caching: bool) -> None:
    bench = Bench(FULL, enable_prefix_caching=caching)
    family(bench, 4, tokens(PARTIAL))
    first = bench.step()
    assert starts(first) == [(0, PARTIAL)] and len(first.admitted) == 4
    assert bench.manager.pool.used == [6], "nobody has a page of its own before it writes"
    second = bench.step()
    assert starts(second) == [(PARTIAL, 1)] + 3 * [(PARTIAL - 1, 1)]
    assert len(second.copies) == 3 and len({copy.source for copy in second.copies}) == 1
    assert bench.manager.pool.used == [9]
    bench.drain()
    assert bench.cached == {"f_0": 0} | {f"f_{number}": PARTIAL - 1 for number in (1, 2, 3)}


@pytest.mark.parametrize(
    "kinds",
    [
        {"full": (4, 1)},
        {"full": (1, 2)},
        {"full": (128, 1), "window-100": (16, 3)},
        {"window-40": (16, 1)},
        {"window-5": (1, 1), "full": (48, 1)},
        {"chunked-50": (16, 1), "full": (16, 1)},
        {"latent-4": (64, 1), "latent-1": (16, 1), "window-40": (8, 1)},
    ],
    ids=lambda kinds: "+".join(kinds),
)
@pytest.mark.parametrize("length", [2, 17, 89, 96, 127, 128, 130, 333])
def test_any_mix_of_kinds_and_page_sizes_computes_one_token_for_each_sibling(
    kinds: dict[str, tuple[int, int]], length: int
) -> None:
    bench = Bench(kinds)
    family(bench, 3, tokens(length))
    assert computed(bench.drain()) == length + 2 + 3 * 3


def test_a_family_beyond_one_steps_budget_loses_no_step() -> None:
    bench = Bench(FULL, batched=64)
    family(bench, 3, tokens(PARTIAL + 3))
    plans = [bench.step() for _ in range(3)]
    assert [starts(plan) for plan in plans[:2]] == [[(0, 64)], [(64, PARTIAL - 61)]]
    assert starts(plans[2]) == [(PARTIAL + 3, 1), (PARTIAL + 2, 1), (PARTIAL + 2, 1)]


def test_a_latecomer_goes_on_from_a_sibling_that_has_written_on() -> None:
    bench = Bench({"full": (16, 1), "latent-4": (32, 1)})
    family(bench, 1, tokens(PARTIAL), max_tokens=40)
    for _ in range(20):  # past the end of the page
        bench.step()
    bench.add("f_late", tokens(PARTIAL), 4, parent_id="f", seed=9)
    assert starts(bench.step()) == [(PARTIAL + 19, 1), (PARTIAL - 1, 1)]
    bench.drain()


def test_a_window_that_has_moved_on_lends_nothing_and_the_index_serves() -> None:
    bench = Bench({"window-40": (16, 1)})
    family(bench, 1, tokens(PARTIAL), max_tokens=100)
    for _ in range(80):
        bench.step()
    bench.add("f_late", tokens(PARTIAL), 4, parent_id="f", seed=9)
    assert starts(bench.step())[1] == (80, 9)
    bench.drain()


def test_the_last_holder_keeps_the_page_without_a_copy() -> None:
    bench = Bench(FULL)
    bench.add("f_0", tokens(PARTIAL), 1, parent_id="f")
    bench.add("f_1", tokens(PARTIAL), 3, parent_id="f", seed=1)
    bench.step()
    second = bench.step()
    assert starts(second) == [(PARTIAL - 1, 1)] and second.copies == []
    bench.drain()


def test_a_sibling_goes_on_when_its_lender_is_aborted_before_the_copy() -> None:
    bench = Bench(FULL)
    family(bench, 3, tokens(PARTIAL))
    bench.step()
    bench.scheduler.abort(["f_0", "f_1"])
    assert starts(bench.step()) == [(PARTIAL - 1, 1)]
    bench.drain()


def test_other_families_prompts_salts_and_a_reset_share_no_partial_page() -> None:
    bench = Bench(FULL)
    family(bench, 1, tokens(PARTIAL), max_tokens=30)
    bench.step()
    bench.add("g_0", tokens(PARTIAL), 4, parent_id="g")
    bench.add("f_other", [*tokens(PARTIAL - 3), 7, 7, 7], 4, parent_id="f")
    bench.add("f_early", [9, *tokens(PARTIAL)[1:]], 4, parent_id="f")
    assert starts(bench.step())[1:] == [(80, 9), (80, 9), (0, PARTIAL)]
    bench.scheduler.reset_prefix_cache()
    bench.add("f_late", tokens(PARTIAL), 4, parent_id="f")
    assert starts(bench.step())[-1] == (0, PARTIAL)
    bench.drain()


def test_a_request_without_siblings_offers_nothing() -> None:
    bench = Bench(FULL)
    bench.add("a", tokens(PARTIAL), 4, parent_id="a")
    bench.step()
    assert len(bench.manager._forks) == 0
    family(bench, 2, tokens(40))
    bench.step()
    assert len(bench.manager._forks) == 1
    bench.drain()
    assert len(bench.manager._forks) == 0, "an ended request is no holder"


def test_a_tight_pool_preempts_and_still_finishes_every_sibling() -> None:
    bench = Bench(FULL)
    alone = bench.plan.slab_bytes * bench.plan.slabs_needed(150) / (1 << 20)
    bench = Bench(FULL, megabytes=alone * 1.2)
    family(bench, 6, tokens(PARTIAL), max_tokens=60)
    bench.drain()
    assert len(bench.cached) == 6


def test_recurrent_state_is_copied_from_the_prompts_last_snapshot_instead() -> None:
    bench = Bench({"full": (16, 1), "recurrent": (16, 2)})
    family(bench, 3, tokens(PARTIAL))
    bench.step()
    second = bench.step()
    assert starts(second) == [(PARTIAL, 1), (80, 9), (80, 9)]
    assert len(bench.manager._forks) == 0
    bench.drain()


def test_a_group_that_zeroes_its_pages_does_not_zero_the_copy() -> None:
    bench = Bench(FULL, list_fresh_pages=True)
    family(bench, 2, tokens(PARTIAL))
    bench.step()
    second = bench.step()
    assert len(second.copies) == 1 and not any(second.zero)
    assert isinstance(bench.manager, KVManager)
    bench.drain()
