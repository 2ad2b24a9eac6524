"""Proof of the books of the memory manager, of its pool and of adapters: everything is counted again, from who holds what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from pagerunner.memory.adapters import AdapterLease, AdapterPages, adapter_keys
from pagerunner.memory.grant import NO_PAGE
from pagerunner.memory.leases import Leases
from pagerunner.memory.manager import KVManager
from pagerunner.memory.prefix import PageKey
from pagerunner.memory.slabs import SlabPool
from pagerunner.memory.snapshots import _planned
from pagerunner.sched.adapters import Adapters
from pagerunner.sched.request import Sequence as Request


def recount(manager: KVManager) -> None:
    """Every page is free, cached or in use, and held by exactly as many grants and leases as its count says.

    Raises:
        AssertionError: the books don't balance; this is a bug of the manager.
    """
    recount_pool(manager.pool)
    grants, leases = manager._books.grants, manager._leases
    snapshots = _recount_snapshots(manager)
    for group, refs in enumerate(manager.pool.refs):
        counts: dict[int, int] = dict(_holders(leases, group))
        for grant in grants:
            pages = [page for page in grant.pages[group][grant.first[group] :] if page != NO_PAGE]
            assert len(pages) == grant.num_pages[group], f"group {group}: pages held"
            for page in pages:
                counts[page] = counts.get(page, 0) + 1
        assert counts == refs, f"group {group}: grants and leases hold {counts}, the pool counts {refs}"
        promised = snapshots[group] + sum(grant.promise[group] for grant in grants)
        assert promised == manager._promises.by_group[group], "promises"
    _recount_moves(manager)
    _recount_leases(leases)


def recount_pool(pool: SlabPool) -> None:
    """Slabs and pages of a pool. Raises AssertionError with what disagrees."""
    free = [*pool._free_slabs, *range(pool._unused_slabs, pool.num_slabs)]
    assert len(free) == len(set(free)) == pool.free_slabs, "free slabs"
    assert not pool.owner.keys() & set(free), "a free slab is owned"
    assert pool.owner.keys() == pool._slab_free.keys() == pool._slab_used.keys(), "slab books"
    for group, per_slab in enumerate(pool.per_slab):
        refs, cached = pool.refs[group], pool.cached[group]
        assert min(refs.values(), default=1) > 0, "reference count below 1"
        assert pool.used[group] == len(refs), "pages in use"
        assert len(pool.index.keys[group]) == len(pool.index.pages[group]), "index sides differ"
        for key, page in pool.index.pages[group].items():
            assert pool.index.keys[group][page] == key, "index sides differ"
            assert page in refs or page in cached, f"page {page} is findable but free"
        owned = [slab for slab, owner in pool.owner.items() if owner == group]
        assert pool._owned[group] == len(owned), "owned slabs"
        loose = sum(pool._num_free(group, slab) for slab in pool._open[group])
        assert pool.free_in_slabs(group) == loose, "free pages"
        assert all(page in refs for page in pool.pinned[group]), "a pinned page isn't in use"
        for page in (*refs, *cached):
            assert pool.owner.get(page // per_slab) == group, f"page {page} lies in a slab of another group"
        _recount_slabs(pool, group, owned)


def _recount_slabs(pool: SlabPool, group: int, owned: Sequence[int]) -> None:
    refs, cached, per_slab = pool.refs[group], pool.cached[group], pool.per_slab[group]
    busy = 0
    for slab in owned:
        pages = range(slab * per_slab, (slab + 1) * per_slab)
        used = sum(page in refs for page in pages)
        kept = sum(page in cached for page in pages)
        loose = [*pool._slab_free[slab], *range(pool._unlisted.get(slab, pages.stop), pages.stop)]
        assert all(page not in refs and page not in cached for page in loose), "a free page is also held"
        assert used + kept + len(set(loose)) == per_slab and len(set(loose)) == len(loose), "pages lost"
        assert used == pool._slab_used[slab] and (slab in pool._open[group]) == bool(loose), "slab state"
        assert used or kept, "an empty slab is still owned"
        assert (slab in pool._idle[group]) == (used == 0), "idle slabs"
        busy += used > 0
    assert busy == pool._busy[group], "busy slabs"


def _recount_snapshots(manager: KVManager) -> list[int]:
    """The pages by group that are promised to snapshots: those that grants will take are those that are planned."""
    snapshots = manager._snapshots
    planned: Counter[tuple[int, PageKey]] = Counter()
    for grant in manager._books.grants:
        planned += _planned(grant) if snapshots.has_state else Counter()
    assert planned == snapshots._planned, "planned snapshots"
    return [planned.total() * one for one in snapshots._one]


def _holders(leases: Leases, group: int) -> Counter[int]:
    """How many leases each page of the group is in."""
    held = (*leases._saving, *leases._kept, *leases._transfers.values())
    return Counter(page for lease in held for page in lease.pages[group]) + leases._adapters.holders(group)


def _recount_leases(leases: Leases) -> None:
    """No page is pinned that no transfer uses, and no key arrives that none brings."""
    for group, arriving in enumerate(leases.arriving):
        pinned = Counter(page for one in (*leases._kept, *leases._transfers.values()) for page in one.pages[group])
        adapters = leases._adapters
        if group == adapters.group:
            pinned += Counter(page for lease in adapters._leases if lease.filling for page in lease.pages)
        assert pinned == leases._pool.pinned[group], "pinned pages"
        brought = {key for one in leases._transfers.values() if one.state == "arriving" for key in one.keys[group]}
        assert brought == arriving.keys(), "arriving keys"


def _recount_moves(manager: KVManager) -> None:
    """The holders of every page are found. Where one group has all pages none is moved, and nobody is looked for."""
    moves = manager._moves
    if len(manager.pool.refs) == 1:
        return
    for group, refs in enumerate(manager.pool.refs):
        leased = _holders(manager._leases, group)
        held = [{page for page in grant.pages[group] if page >= 0} for grant in manager._books.grants]
        for page, count in refs.items():
            expected = sum(page in pages for pages in held)
            found = moves.holders(group, page, count)
            assert len(found) == expected == count - leased[page], f"holders of page {page}"


def recount_adapters(adapters: Adapters, sequences: Iterable[Request]) -> None:
    """Slots and leases of adapters. Raises AssertionError where they disagree with each other or with these sequences, which are all there are."""
    sequences = list(sequences)
    pages = adapters.manager.adapters
    assert adapters._unfinished == Counter(one.adapter.digest for one in sequences if one.adapter is not None), (
        "digests"
    )
    for place, slot in enumerate(adapters._slots):
        users = {one.request_id: one for one in sequences if one.adapter_slot == place}
        assert slot.users == users, "users"
        assert slot.digest or not (users or slot.filling or slot.reading or slot.pages), "an empty slot is used"
        assert (slot.lease is not None) is (slot.filling > 0), "a fill of nothing"
    in_slots = {slot.digest: place for place, slot in enumerate(adapters._slots) if slot.digest}
    assert adapters._place == in_slots, "two slots have one adapter, or one that nobody finds"
    assert {fill.number for fill in adapters._fills} <= {slot.filling for slot in adapters._slots}, "a fill for nobody"
    _recount_adapter_pages(
        pages, Counter(one.grant.adapter for one in sequences if one.grant is not None and one.adapter is not None)
    )
    for sequence in sequences:
        if sequence.adapter is None:
            assert sequence.adapter_slot < 0 and not sequence.awaits_adapter, "it has no adapter"
            continue
        assert sequence.grant is None or sequence.adapter_slot >= 0, "runs without a slot"
        if sequence.adapter_slot >= 0:
            slot = adapters._slots[sequence.adapter_slot]
            assert slot.digest == sequence.adapter.digest, "another one's slot"
            assert sequence.awaits_adapter is (sequence.grant is not None and slot.filling > 0), "waits for nothing"
            if sequence.grant is not None and sequence.grant.adapter is not None:
                lease = sequence.grant.adapter
                assert slot.pages == lease.pages or lease in pages.moving, "the table says another place"


def _recount_adapter_pages(pages: AdapterPages, users: Counter[AdapterLease | None]) -> None:
    """The books agree with the leases that sequences have."""
    there, adapters = pages._index.pages[pages.group], pages._index.adapters[pages.group]
    assert pages._index.num_of_adapter == Counter(adapters.values()), "how many pages an adapter has"
    assert all(there.get(pages._index.keys[pages.group][page]) == page for page in adapters), "a page that nobody finds"
    for lease in pages._leases:
        assert lease.users == users.pop(lease, 0), "users of a lease"
        assert lease.users or lease.filling, "a lease of nobody"
        keys = adapter_keys(lease.digest, len(lease.pages))
        assert not any(there.get(keys[number]) == lease.pages[number] for number in lease.missing), "found too early"
        assert not lease.missing or lease.filling, "nobody fills what is missing"
    assert not users, "a lease that has ended"
