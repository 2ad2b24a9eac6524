"""The one place that decides who gets which pages, for all groups at once.

A running request holds a `Grant`. `admit` reserves the pages of everything the request has to compute, minus what the
prefix index has; `grow` hands pages out as steps need them; `publish` makes complete pages findable; `release` returns them.

Steps run in the order of their plans, on one stream. Hence pages that a step in flight still writes may be handed out
again at once, and a page may be found in the index as soon as the row that writes it is in a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagerunner.memory.planner import MemoryPlan
from pagerunner.memory.prefix import UNIT_TOKENS, PrefixChain, PrefixIndex, chain_seed
from pagerunner.memory.rules import GroupRule, joint_hit
from pagerunner.memory.slabs import SlabPool
from pagerunner.types import PageCopy, TableWrite

_NEVER = 1 << 62
_HOLE = -1  # stands in a grant's list for a page that was given back early


class Grant:
    """One running request's pages: `pages[group][i]` is page i of the request, as a page id of the group.

    Positions below `capacity` have pages. When `next_publish` tokens are known and scheduled, `publish` has work to do.
    `cached_tokens` is how many leading tokens were found in the index.
    """

    __slots__ = (
        "cached_tokens", "capacity", "chain", "epoch", "first", "next_publish", "pages", "promise", "published", "sent",
        "slot",
    )  # fmt: skip

    def __init__(self, slot: int, chain: PrefixChain, groups: int, epoch: int) -> None:
        self.slot = slot
        self.chain = chain
        self.epoch = epoch
        self.pages: list[list[int]] = [[] for _ in range(groups)]
        self.first = [0] * groups  # pages before it are holes
        self.published = [0] * groups
        self.sent = [0] * groups  # table entries that the device has
        self.promise = [0] * groups  # pages reserved at admission and not handed out yet
        self.capacity = 0
        self.next_publish = _NEVER
        self.cached_tokens = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request can never run, in numbers; `str()` is the sentence for the user."""

    tokens: int
    needed: int
    available: int
    what: str

    def __str__(self) -> str:
        return (
            f"needs {self.needed:,} {self.what} for {self.tokens:,} tokens; the pool has {self.available:,}. "
            "Lower max_tokens or raise kv_cache_memory_bytes / num_gpu_blocks_override."
        )


@dataclass(frozen=True, slots=True)
class PageUsage:
    """One group's pages: held by requests, findable without an owner, and evicted so far."""

    group: str
    in_use: int
    cached: int
    evictions: int


class KVManager:
    """Pages of all groups, and the prefix index over them.

    Without `enable_prefix_caching` pages are only shared among requests of one family while one of them runs.
    `list_fresh_pages` puts the fresh pages of every group into the step's zero lists, not only of those that need it.
    `version` changes whenever pages were given back: a request that didn't fit need not be tried again before.
    """

    def __init__(self, plan: MemoryPlan, *, enable_prefix_caching: bool = True, list_fresh_pages: bool = False) -> None:
        groups = len(plan.groups)
        self.plan = plan
        self.enable_prefix_caching = enable_prefix_caching
        self.version = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.index = PrefixIndex(groups)
        self.pool = SlabPool(
            plan.num_slabs,
            [group.pages_per_slab for group in plan.groups],
            self.index,
            keep_cached=enable_prefix_caching,
        )
        self._rules = [group.rule for group in plan.groups]
        self._lists_fresh = [group.zero_fresh or list_fresh_pages for group in plan.groups]
        self._fresh: list[list[int]] = [[] for _ in range(groups)]  # pages handed out since the last take_fresh
        self._copies: list[PageCopy] = []
        self._grants: dict[Grant, None] = {}
        self._dirty: dict[Grant, None] = {}  # grants with table entries to send
        self._promised = [0] * groups
        self._epoch = 0

    # -- admission

    def refusal(self, tokens: int) -> Refusal | None:
        """Why a request of `tokens` tokens could not finish even alone; None if it could."""
        if self.plan.slabs_needed(tokens) <= self.plan.num_slabs:
            return None
        if len(self.plan.groups) == 1:
            return Refusal(tokens, self.plan.groups[0].pages_needed(tokens), self.plan.num_pages(0), "pages")
        return Refusal(tokens, self.plan.slabs_needed(tokens), self.plan.num_slabs, "slabs")

    def can_ever_fit(self, tokens: int) -> bool:
        """Whether a request of `tokens` tokens can finish when it is alone."""
        return self.refusal(tokens) is None

    def chain(self, cache_salt: str = "", adapter: str = "", family: str = "") -> PrefixChain:
        """The prefix chain of a new request; requests with equal arguments may share pages."""
        return PrefixChain(chain_seed(cache_salt, adapter, "" if self.enable_prefix_caching else family))

    def admit(
        self, slot: int, chain: PrefixChain, tokens: Sequence[int], hit_limit: int, *, shares: bool = True
    ) -> Grant | None:
        """Reserve the pages to compute `tokens`, of which at most the first `hit_limit` may come from the index.

        None if they don't fit beside what running requests hold and were promised. Without `shares` the request neither
        looks into the index nor publishes.
        """
        grant = Grant(slot, chain, len(self._rules), self._epoch)
        hit = 0
        if shares:
            chain.cover(tokens, len(tokens))
            hit = joint_hit(self._rules, self.index.pages, chain, hit_limit) if hit_limit > 0 else 0
        taken = self._take_hit(grant, hit)
        needs = [max(rule.pages_needed(len(tokens)) - count, 0) for rule, count in zip(self._rules, taken, strict=True)]
        wanted = [need + promised for need, promised in zip(needs, self._promised, strict=True)]
        self._grants[grant] = None
        if self.pool.slack(wanted) < 0 and not self._compact_for(wanted):
            del self._grants[grant]
            self._dirty.pop(grant, None)
            for group, pages in enumerate(grant.pages):
                self.pool.release(group, pages[grant.first[group] :][::-1])
            return None
        grant.promise = needs
        grant.cached_tokens = hit
        for group, _rule in enumerate(self._rules):
            self._promised[group] += needs[group]
            grant.published[group] = len(grant.pages[group])
        if shares:
            grant.next_publish = min(map(_next_publish, self._rules, grant.published))
        grant.capacity = hit
        self._dirty[grant] = None
        return grant

    def _take_hit(self, grant: Grant, hit: int) -> list[int]:
        """Put the pages of a hit into the grant; how many per group."""
        taken = [0] * len(self._rules)
        if not hit:
            return taken
        for group, rule in enumerate(self._rules):
            start, stop = rule.span(hit, hit)
            found = self.index.pages[group]
            pages = [found[rule.key(grant.chain, page)] for page in range(start, stop)]
            for page in pages:
                self.pool.share(group, page)
            grant.pages[group] = [_HOLE] * start + pages
            grant.first[group] = start
            taken[group] = len(pages)
        return taken

    def count_query(self, tokens: int, hit: int) -> None:
        """Count a request's first look into the prefix index, in tokens."""
        self.prefix_queries += tokens
        self.prefix_hits += hit

    # -- growth

    def grow(self, grant: Grant, start: int, end: int) -> bool:
        """Provide the pages to compute positions [start, end); False, and nothing new, if they can't be had now.

        Pages that no position from `start` on reads are given back.
        """
        if end <= grant.capacity:
            return True
        needs = []
        for group, rule in enumerate(self._rules):
            first, stop = rule.span(start, end)
            if first > grant.first[group]:
                self._trim(grant, group, first)
            needs.append(max(stop - len(grant.pages[group]), 0))
        fresh = self.pool.allocate(needs)
        if fresh is None:
            if not self._compact_for(needs):
                return False
            fresh = self.pool.allocate(needs)
            assert fresh is not None
        capacity = _NEVER
        for group, pages in enumerate(fresh):
            held = grant.pages[group]
            held += pages
            kept = min(grant.promise[group], len(pages))
            grant.promise[group] -= kept
            self._promised[group] -= kept
            if self._lists_fresh[group]:
                self._fresh[group] += pages
            capacity = min(capacity, self._rules[group].capacity(len(held)))
        grant.capacity = capacity
        self._dirty[grant] = None
        return True

    def _trim(self, grant: Grant, group: int, first: int) -> None:
        """Give back the pages before `first`: no position from here on reads them."""
        pages = grant.pages[group]
        old, stop = grant.first[group], min(first, len(pages))
        self.pool.release(group, pages[old:stop][::-1])
        pages[old:] = [_HOLE] * (first - old) + pages[stop:]
        grant.first[group] = first
        self.version += 1

    def publish(self, grant: Grant, tokens: Sequence[int], end: int) -> None:
        """Make the complete pages of positions [0, end) findable. They must be in a plan, their `tokens` known."""
        if end < grant.next_publish:
            return
        if grant.epoch != self._epoch:
            grant.next_publish = _NEVER
            return
        chain = grant.chain
        chain.cover(tokens, end)
        for group, rule in enumerate(self._rules):
            complete = rule.complete(end)
            pages = grant.pages[group]
            for number in range(max(grant.published[group], grant.first[group]), complete):
                self.index.publish(group, rule.key(chain, number), pages[number])
            grant.published[group] = complete
        grant.next_publish = min(map(_next_publish, self._rules, grant.published))

    # -- the end

    def release(self, grant: Grant) -> None:
        """Return all pages. Published ones stay findable until evicted, the request's last page first."""
        for group, pages in enumerate(grant.pages):
            self.pool.release(group, pages[grant.first[group] :][::-1])
            self._promised[group] -= grant.promise[group]
        del self._grants[grant]
        self._dirty.pop(grant, None)
        self.version += 1

    def distrust(self, chain: PrefixChain, start: int) -> None:
        """What was computed of this chain from position `start` on is wrong: nobody may find it any more."""
        for group, rule in enumerate(self._rules):
            found = self.index.pages[group]
            for number in range(rule.complete(start), rule.complete(len(chain.hashes) * UNIT_TOKENS)):
                page = found.get(rule.key(chain, number))
                if page is not None and not self.pool.evict(group, page):
                    self.index.forget(group, page)

    def reset_prefix_cache(self) -> bool:
        """Forget all content. False if pages are in use: they stay with their requests but can't be found any more."""
        self.pool.evict_all()
        self.index.clear()
        self._epoch += 1
        self.version += 1
        return not any(self.pool.used)

    # -- what a step must carry

    def take_table_writes(self) -> list[TableWrite]:
        """Page table entries that the device doesn't have yet."""
        writes: list[TableWrite] = []
        for grant in self._dirty:
            for group, pages in enumerate(grant.pages):
                first = max(grant.sent[group], grant.first[group])
                if first < len(pages):
                    writes.append(TableWrite(group, grant.slot, first, self.plan.table_entries(group, pages[first:])))
                    grant.sent[group] = len(pages)
        self._dirty.clear()
        return writes

    def take_fresh(self) -> list[list[int]]:
        """Byte offsets, per group, of the pages handed out since the last call, for groups that list them."""
        if not any(self._fresh):
            return []
        offset = self.plan.page_offset
        fresh = [[offset(group, page) for page in pages] for group, pages in enumerate(self._fresh)]
        self._fresh = [[] for _ in fresh]
        return fresh

    def take_copies(self) -> list[PageCopy]:
        """Page moves decided since the last call; they must run in this order, before anything else touches pages."""
        copies, self._copies = self._copies, []
        return copies

    # -- moves

    def _compact_for(self, needs: Sequence[int]) -> bool:
        """Move pages together if that makes room for `needs`. With one group it never can: any page will do."""
        pool = self.pool
        packed = (-(-(used + need) // count) for used, need, count in zip(pool.used, needs, pool.per_slab, strict=True))
        if len(needs) == 1 or sum(packed) > pool.num_slabs:
            return False
        moved: list[dict[int, int]] = [{} for _ in needs]
        for group, source, target in pool.compact():
            moved[group][source] = target
            fresh = self._fresh[group]
            if source in fresh:  # nothing was written to it yet
                fresh[fresh.index(source)] = target
            else:
                offset = self.plan.page_offset
                self._copies.append(PageCopy(group, offset(group, source), offset(group, target)))
        for grant in self._grants:
            for group, targets in enumerate(moved):
                if targets:
                    pages = grant.pages[group]
                    pages[:] = [targets.get(page, page) for page in pages]
                    grant.sent[group] = 0
            self._dirty[grant] = None
        return True

    # -- numbers

    @property
    def usage(self) -> float:
        """Share of the page memory's bytes that is in use, 0 to 1."""
        groups = zip(self.plan.groups, self.pool.used, strict=True)
        return sum(group.page_bytes * used for group, used in groups) / self.plan.kv_bytes

    def usage_by_group(self) -> list[PageUsage]:
        """Pages in use and cached, and evictions so far."""
        pool = self.pool
        return [
            PageUsage(group.name, pool.used[number], len(pool.cached[number]), pool.evictions[number])
            for number, group in enumerate(self.plan.groups)
        ]

    def check_integrity(self) -> None:
        """Recount: every page is free, cached or in use, and held by exactly as many grants as its count says.

        Raises:
            AssertionError: the books don't balance; this is a bug of the manager.
        """
        self.pool.check()
        for group, refs in enumerate(self.pool.refs):
            counts: dict[int, int] = {}
            for grant in self._grants:
                for page in grant.pages[group][grant.first[group] :]:
                    counts[page] = counts.get(page, 0) + 1
            held = {page: count for page, count in enumerate(refs) if count}
            assert counts == held, f"group {group}: grants hold {counts}, the pool counts {held}"
            promised = sum(grant.promise[group] for grant in self._grants)
            assert promised == self._promised[group], "promises"


def _next_publish(rule: GroupRule, published: int) -> int:
    return rule.next_publish(published)
