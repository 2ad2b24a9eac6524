"""Who holds the page memory of a live engine: slabs by group, pages by request, what is cached, shared and free.

Page and slab ids are listed as runs (first, count), so that the state of a large pool is a small value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from pagerunner.memory.grant import NO_PAGE

if TYPE_CHECKING:
    from pagerunner.memory.grant import Grant
    from pagerunner.memory.manager import KVManager
    from pagerunner.memory.memory_plan import GroupPlan

Runs = list[tuple[int, int]]


class GroupOwnership(msgspec.Struct, frozen=True, kw_only=True):
    """One group's slabs, by slab id, and pages, by the group's page id (slab * pages_per_slab + place).

    Pages `in_use` are held by requests; `shared` counts those that several requests hold. Only the prefix index holds `cached`
    pages. Nothing holds `free` pages, which lie in slabs of the group. `page_bytes` and `pages_per_slab` are the plan's.
    """

    name: str
    page_bytes: int
    pages_per_slab: int
    slabs: Runs
    in_use: int
    shared: int
    free: int
    cached: Runs


class RequestPages(msgspec.Struct, frozen=True, kw_only=True):
    """One running request: its table row, and its pages of each group, in the order of its tokens.

    A page that requests share is listed with each of them. Snapshots that a request still holds itself are listed too.
    """

    request_id: str
    slot: int
    pages: list[Runs]


class HostPagesState(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of one group in host memory: `in_use` by transfers, and `cached`. `arriving` are on their way to the device, `kept` wait there for the turn
    of the requests that they were loaded for.
    """

    name: str
    in_use: int
    cached: int
    arriving: int
    kept: int


class DiskState(msgspec.Struct, frozen=True, kw_only=True):
    """The disk tier: its pages, and those that only some ranks have; the bytes of all files in its directory, requests that wait for pages from it, and why it isn't written to, if so.

    `hits_total` are tokens of prompts whose pages were read from it and used.
    """

    pages: int
    pages_of_some: int
    num_bytes: int
    waiting: int
    read_only: str
    hits_total: int


class HostState(msgspec.Struct, frozen=True, kw_only=True):
    """The host memory of each rank: all of its bytes, those that can be used by now, and those that hold pages; transfers under way; the disk below it.

    `queries_total` are tokens of prompts that the device didn't have, and `hits_total` those of them that were loaded, also what had come from elsewhere.
    """

    num_bytes: int
    ready_bytes: int
    used_bytes: int
    loads: int
    stores: int
    groups: list[HostPagesState]
    queries_total: int
    hits_total: int
    disk: DiskState | None = None


class ExchangeState(msgspec.Struct, frozen=True, kw_only=True):
    """Pages that are lent to other engines, and pulled from them: loans that last, and prompts whose pages are waited for. By now so many prompts were lent, and have come."""

    loans: int
    pulls: int
    lent_total: int
    pulled_total: int


class AdapterPagesState(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter of which pages are on the device: its digest, the names that stand for that now, its `slot` (-1: none), requests that have this slot, and the bytes that are
    there. They are `used` by running requests, or else cache. With `arriving` they are on their way.
    """

    digest: str
    names: list[str]
    slot: int
    requests: int
    num_bytes: int
    used: bool
    arriving: bool


class AdaptersState(msgspec.Struct, frozen=True, kw_only=True):
    """Adapters in the page memory: how many may run at once, their bytes, those of them that running requests use, and the adapters that are `there`."""

    max_loras: int
    num_bytes: int
    used_bytes: int
    there: list[AdapterPagesState]


class MemoryState(msgspec.Struct, frozen=True, kw_only=True):
    """The page memory at one moment, between two steps, the `host` memory for pages if there is one, what other engines have to do with it, and the `adapters` in it.

    Of `prefix_queries_total` tokens of prompts, the page memory had `prefix_hits_total`.
    """

    num_slabs: int
    slab_bytes: int
    free_slabs: int
    groups: list[GroupOwnership]
    requests: list[RequestPages]
    prefix_queries_total: int = 0
    prefix_hits_total: int = 0
    host: HostState | None = None
    exchange: ExchangeState | None = None
    adapters: AdaptersState | None = None


def runs_of(numbers: Iterable[int]) -> Runs:
    """Adjacent ascending numbers as (first, count); NO_PAGE is left out."""
    runs: Runs = []
    first = end = NO_PAGE
    for number in numbers:
        if number != end or first == NO_PAGE:
            if first != NO_PAGE:
                runs.append((first, end - first))
            first = number
        end = number + 1
    if first != NO_PAGE:
        runs.append((first, end - first))
    return runs


def memory_state(manager: KVManager, running: Mapping[str, Grant]) -> MemoryState:
    """The manager's pages at this moment. `running` names the requests that hold them."""
    plan, pool = manager.plan, manager.pool
    slabs: list[list[int]] = [[] for _ in plan.groups]
    for slab, owner in sorted(pool.owner.items()):
        slabs[owner].append(slab)
    groups = [
        GroupOwnership(
            name=group.name,
            page_bytes=group.page_bytes,
            pages_per_slab=group.pages_per_slab,
            slabs=runs_of(slabs[number]),
            in_use=pool.used[number],
            shared=pool.shared(number),
            free=pool.free_in_slabs(number),
            cached=runs_of(sorted(pool.cached[number])),
        )
        for number, group in enumerate(plan.groups)
    ]
    return MemoryState(
        num_slabs=plan.num_slabs,
        slab_bytes=plan.slab_bytes,
        free_slabs=pool.free_slabs,
        groups=groups,
        requests=[
            RequestPages(
                request_id=name,
                slot=grant.slot,
                pages=[runs_of(held_pages(grant, number, group)) for number, group in enumerate(plan.groups)],
            )
            for name, grant in running.items()
        ],
        prefix_queries_total=manager.hit_counts.queries,
        prefix_hits_total=manager.hit_counts.hits,
    )


def held_pages(grant: Grant, number: int, group: GroupPlan) -> list[int]:
    """A request's pages of group `number`.

    In a recurrent group its state comes first, then the snapshots that it still holds.
    """
    pages = grant.pages[number]
    return (
        [*pages, *(page for _, lease in grant.saves for page in lease.pages[number])] if group.rule.snapshots else pages
    )
