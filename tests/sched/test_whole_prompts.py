"""Without chunked prefill every prompt runs in one step, also where windows are scarce; plan and admission count on it."""

from __future__ import annotations

import pytest

from helpers.memory_bench import Bench, tokens
from helpers.plans import mixed
from pagerunner.errors import InvalidRequestError
from pagerunner.memory.manager import KVManager
from pagerunner.memory.rules import SHORT_CHUNK

WINDOWED = {"full": (16, 1), "window-400": (16, 8)}
LENGTH = 3000


def tight(chunked: bool, share: float = 1.0) -> Bench:
    """Memory for about `share` requests of LENGTH tokens, each of which one step could take."""
    roomy = mixed(WINDOWED, 64 << 20, batched=4096, model_max_len=20_000, chunked_prefill=chunked)
    megabytes = share * roomy.slab_bytes * roomy.slabs_needed(LENGTH + 1) / (1 << 20)
    return Bench(WINDOWED, megabytes=megabytes, batched=4096, chunked_prefill=chunked)


def branches() -> list[list[int]]:
    """Prompts of LENGTH tokens, each of which leaves a known prefix further on: a step then computes from one window on, would
    like to keep another where the texts part, and needs a third at its end.
    """
    first = tokens(LENGTH)
    second = [*first[:1000], *tokens(LENGTH - 1000, 50_000)]
    return [first, second, [*second[:2000], *tokens(LENGTH - 2000, 90_000)], [*second[:2000], *tokens(900, 70_000)]]


@pytest.mark.parametrize("share", [1.0, 1.3, 2.2])
@pytest.mark.parametrize("together", [False, True])
def test_a_prompt_is_never_spread_over_steps(share: float, together: bool) -> None:
    bench = tight(False, share)
    for number, prompt in enumerate(branches()):
        bench.add(str(number), prompt)
        if not together:
            bench.drain()
    bench.drain()
    assert all(row.samples for plan in bench.plans for row in plan.rows)
    assert share > 1 or sum(bench.cached.values()) > 900


def test_a_manager_that_shortens_all_the_same_is_caught() -> None:
    bench = tight(False)
    bench.manager._growth._shortens = True
    for number, prompt in enumerate(branches()):
        bench.run(str(number), prompt)
    assert any(not row.samples for plan in bench.plans for row in plan.rows)


def test_with_chunked_prefill_steps_become_shorter_instead() -> None:
    bench = tight(True)
    for number, prompt in enumerate(branches()):
        bench.run(str(number), prompt)
    assert any(not row.samples for plan in bench.plans for row in plan.rows)


def test_plan_admission_and_scheduler_agree_on_what_a_whole_prompt_needs() -> None:
    whole, chunked = tight(False), tight(True)
    assert whole.plan.kv_bytes > chunked.plan.kv_bytes, "two windows instead of one and a short chunk"
    window = whole.plan.groups[1]
    assert window.pages_needed(LENGTH) * 16 > 400 + SHORT_CHUNK
    longest = whole.plan.longest(20_000)
    assert LENGTH < longest == whole.plan.max_model_len < 4096
    manager = KVManager(whole.plan)
    assert manager.refusal(longest) is None and manager.refusal(longest + 1) is not None
    with pytest.raises(InvalidRequestError):
        whole.add("long", tokens(longest), 1)
    whole.run("fits", tokens(longest - 1), 1)
