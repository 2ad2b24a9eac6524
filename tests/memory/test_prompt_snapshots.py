"""The snapshots of a prompt: they are promised pages, and whoever lacks only these waits no longer than that can help."""

from __future__ import annotations

from helpers.plans import mixed
from helpers.recount import recount
from pagerunner.memory.grant import Grant
from pagerunner.memory.manager import KVManager
from pagerunner.types import StateSave

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
