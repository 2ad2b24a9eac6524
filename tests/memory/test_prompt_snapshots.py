"""The snapshots of a prompt: they are promised pages, and whoever lacks only these waits no longer than that can help."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.memory_bench import Bench
from helpers.plans import mixed
from helpers.recount import recount
from pagerunner.memory import moves
from pagerunner.memory.grant import Grant
from pagerunner.memory.manager import KVManager
from pagerunner.memory.snapshots import Snapshots
from pagerunner.types import PageCopy, StateSave
from pagerunner.types.lora import AdapterInfo

SLAB = 3216  # bytes: a state, or 96 tokens
LENGTH = 96
A, B = list(range(LENGTH)), list(range(1000, 1000 + LENGTH))


def manager_of(slabs: int) -> KVManager:
    plan = mixed({"full": (16, 1), "recurrent": (16, 20)}, slabs * SLAB, model_max_len=LENGTH)
    assert [group.pages_per_slab for group in plan.groups] == [6, 1] and plan.num_slabs == slabs
    return KVManager(plan)


def admit(manager: KVManager, prompt: list[int], slot: int = 0) -> Grant | None:
    return manager.admit(slot, manager.chain(), prompt, len(prompt) - 1, prompt_len=len(prompt))


def compute(manager: KVManager, prompt: list[int]) -> tuple[Grant, list[StateSave]]:
    """Admit a prompt and plan all of it."""
    grant = admit(manager, prompt)
    assert grant is not None and grant.cached_tokens == 0 and manager.grow(grant, 0, len(prompt))
    manager.publish(grant, prompt, len(prompt))
    saves = manager.end_plan([(grant, 0, len(prompt))])
    recount(manager)
    return grant, saves


def test_a_prompt_waits_for_its_snapshots_page_until_the_others_first_tokens() -> None:
    manager = manager_of(5)
    first, saves = compute(manager, A)
    assert len(saves) == 1 and admit(manager, B, slot=1) is None
    version = manager.version
    manager.has_first_token(first)
    assert manager.version != version, "who waits is tried again"
    grant = admit(manager, B, slot=1)
    assert grant is not None and grant.snapshot_positions == [80]
    recount(manager)


def test_a_prompt_does_not_wait_for_those_that_generate() -> None:
    """Their text may be long. So it does without its snapshot."""
    manager = manager_of(4)
    first, _ = compute(manager, A)
    assert admit(manager, B, slot=1) is None
    manager.has_first_token(first)
    assert admit(manager, B, slot=1) is not None
    recount(manager)


def test_who_has_its_first_token_without_a_snapshot_lets_others_try_again() -> None:
    manager = manager_of(4)
    first, saves = compute(manager, A)
    assert saves and manager._snapshots.drop([first])
    assert manager.pool.used[1] == 1
    version = manager.version
    manager.has_first_token(first)
    assert manager.version != version and admit(manager, B, slot=1) is not None


def test_a_prompt_waits_for_a_transfer_that_gives_its_snapshots_page_back_and_for_no_failed_one() -> None:
    def loading() -> tuple[KVManager, int]:
        manager = manager_of(3)
        chain = manager.chain()
        chain.cover(A, 16)
        lease = manager.load([chain.hashes[:1], []], [[0], []])
        assert lease is not None
        return manager, lease.number

    manager, number = loading()
    assert admit(manager, B) is None
    manager.end_transfer(number, well=True)
    assert admit(manager, B) is not None
    manager, number = loading()
    manager.quarantine(number)
    assert admit(manager, B) is not None, "nobody knows whether it ever ends"


def test_every_promised_snapshot_is_taken_where_room_is_exact() -> None:
    """One at the prompt's end, and one where it leaves the prompt before."""
    manager = manager_of(4)
    grant, _ = compute(manager, A)
    manager.has_first_token(grant)
    manager.release(grant)
    grant, saves = compute(manager, A[:48] + B[48:])
    assert [save.position for save in saves] == [48, 80]


# -- a hit's state, in a pool that just holds what is asked for


def exact(slabs: int, states: int) -> KVManager:
    """A slab has a page of 16 tokens, or so many states."""
    plan = mixed({"full": (16, 1), "recurrent": (16, 3 if states == 1 else 1)}, 1 << 16)
    groups = tuple(
        replace(group, pages_per_slab=per, unit=16) for group, per in zip(plan.groups, (1, states), strict=True)
    )
    return KVManager(replace(plan, groups=groups, slab_bytes=512, num_slabs=slabs, max_model_len=32))


def run(
    manager: KVManager, token: int, *, slot: int = 0, length: int = 17, adapter: AdapterInfo | None = None
) -> tuple[Grant, list[PageCopy]]:
    """Admit a prompt and compute all of it. An adapter that lacks pages can't be filled."""
    prompt = [token] * length
    grant = manager.admit(slot, manager.chain(adapter=adapter), prompt, length - 1, prompt_len=length)
    assert grant is not None and manager.grow(grant, grant.cached_tokens, length), "what is promised can be had"
    manager.publish(grant, prompt, length)
    manager.end_plan([(grant, grant.cached_tokens, length)])
    manager.has_first_token(grant)
    if grant.adapter is not None:
        manager.adapters.fill(grant.adapter)
        manager.end_fill(grant.adapter, well=False)
    recount(manager)
    return grant, manager.take_copies()


def test_an_adapters_pages_may_evict_the_snapshot_and_the_state_is_copied_all_the_same() -> None:
    """The adapter took its pages first. So the state was copied from page -1, which lies before the page memory."""
    manager, adapter = exact(8, states=1), AdapterInfo("a", "/", "0123", 4, num_pages=1)
    run(manager, 9, slot=1, length=16)  # goes on
    first, _ = run(manager, 1, adapter=adapter)
    manager.release(first)
    snapshot = next(iter(manager.pool.cached[1]))
    manager.release(run(manager, 2)[0])
    run(manager, 8, slot=2, length=16)  # goes on
    grant, copies = run(manager, 1, adapter=adapter)
    assert grant.cached_tokens == 16 and snapshot not in manager.pool.cached[1]
    assert [copy.source for copy in copies] == [manager.plan.page_offset(1, snapshot)]


def test_a_state_takes_no_slab_that_a_prompts_pages_are_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took a free slab, where the snapshot's place in another would do. Where a step might move no more pages, the engine died."""
    manager = exact(4, states=2)
    manager.release(run(manager, 1)[0])
    run(manager, 9, slot=1, length=16)  # goes on, in the snapshot's slab
    monkeypatch.setattr(moves, "MOVES_PER_STEP", 0)
    manager.begin_step()
    grant, copies = run(manager, 1)
    assert grant.cached_tokens == 16 and not copies, "the snapshot's own page is the state"


def test_a_request_that_meets_a_bug_in_admission_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages and what it was promised were lost to all others, for ever."""
    bench = Bench({"full": (16, 1), "recurrent": (16, 1)}, 1)
    bench.add("first", A)
    bench.step()
    bench.add("second", A, 8)
    with monkeypatch.context() as patched:
        patched.setattr(Snapshots, "restore", lambda *_: 1 // 0)
        assert bench.scheduler.schedule() is None
    (update,) = bench.scheduler.take_failed()
    assert (update.request_id, update.finish_reason) == ("second", "error") and not bench.scheduler.has_work
    recount(bench.manager)
    assert not any(bench.manager.pool.used) and not any(bench.manager._promises.by_group)
    bench.add("third", A)
    assert bench.step().rows[0].start == 80
