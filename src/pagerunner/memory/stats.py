"""What the page memory counts. These structs travel as they are to the metrics, so a new count is a field here and a row there."""

from __future__ import annotations

import msgspec

from pagerunner.memory.manager import KVManager
from pagerunner.memory.residency import Residency


class GroupUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of one memory group.

    `pages_in_use` are held by requests, `pages_cached` only by the prefix index, `pages_free` lie in slabs of the group and
    belong to nobody. `evictions` counts cached pages that made room. `queries_total` are the tokens of prompts that the group
    was asked for: all of them, or as many as the groups that keep everything had. `hits_total` are those that it had cached,
    also what was loaded for the request.

    Three fields are shares from 0 to 1. `usage`: of the page memory's bytes, those of the group's pages in use. `fragmentation`:
    of all slabs, those that packing the group's pages together would give back. `waste`: of each slab of the group, the bytes in
    which no state fits. Example: a slab of 100 bytes that is cut into 3 pages of 32 bytes has a waste of 0.04.
    """

    name: str
    pages_in_use: int
    pages_cached: int
    evictions: int
    pages_free: int = 0
    queries_total: int = 0
    hits_total: int = 0
    usage: float = 0.0
    fragmentation: float = 0.0
    waste: float = 0.0


class MemoryStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts at one moment; those named `_total` only grow. Prefix queries and hits are in tokens of prompts.

    `kv_usage` is the share of the page memory's bytes in use, `kv_fragmentation` and `kv_waste` are the shares of all slabs
    that the groups lose together. `residency` is there where pages are sampled.
    """

    kv_usage: float = 0.0
    groups: list[GroupUsage] = []
    prefix_queries_total: int = 0
    prefix_hits_total: int = 0
    kv_fragmentation: float = 0.0
    kv_waste: float = 0.0
    residency: Residency | None = None


def memory_stats(manager: KVManager) -> MemoryStats:
    """The manager's counts."""
    plan, pool, found = manager.plan, manager.pool, manager.hit_counts
    return MemoryStats(
        kv_usage=manager.usage,
        groups=[
            GroupUsage(
                name=group.name,
                pages_in_use=pool.used[number],
                pages_cached=len(pool.cached[number]),
                evictions=pool.evictions[number],
                pages_free=pool.free_in_slabs(number),
                queries_total=found.group_queries[number],
                hits_total=found.group_hits[number],
                usage=pool.used[number] * group.page_bytes / plan.kv_bytes,
                fragmentation=pool.group_fragmentation(number),
                waste=plan.group_waste(number),
            )
            for number, group in enumerate(plan.groups)
        ],
        prefix_queries_total=found.queries,
        prefix_hits_total=found.hits,
        kv_fragmentation=pool.fragmentation,
        kv_waste=plan.waste,
        residency=None if manager.sampler is None else manager.sampler.residency(),
    )
