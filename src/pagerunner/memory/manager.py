"""The one place that decides who gets which pages, for all groups at once.

A running request holds a `Grant`. `admit` reserves the pages of everything the request has to compute, minus what the
prefix index has; `grow` hands pages out as steps need them; `publish` makes complete pages findable; `release` returns them.

Steps run in the order of their plans, on one stream. Hence pages that a step in flight still writes may be handed out
again at once, and a page may be found in the index as soon as the row that writes it is in a plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import lcm

from pagerunner.memory.forks import Forks, prompt_key
from pagerunner.memory.grant import HOLE, Grant, Refusal, fill
from pagerunner.memory.planner import MemoryPlan
from pagerunner.memory.prefix import UNIT_TOKENS, HitCounts, PrefixChain, PrefixIndex, RecentPrompts, chain_seed
from pagerunner.memory.residency import PageSampler, make_pool
from pagerunner.memory.rules import FOREVER, SHORT_CHUNK, GroupRule, joint_hit
from pagerunner.memory.snapshots import Snapshots
from pagerunner.types import PageCopy, StateSave, TableWrite

UNTIDY = 0.04  # share of the slabs that may be lost to scattered pages


class KVManager:
    """Pages of all groups, and the prefix index over them.

    Without `enable_prefix_caching` pages are only shared among siblings while one of them runs.
    `list_fresh_pages` puts the fresh pages of every group into the step's zero lists, not only of those that need it.
    A `sampler` times how long pages stay.
    `version` changes whenever pages were given back: a request that didn't fit need not be tried again before.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        *,
        enable_prefix_caching: bool = True,
        list_fresh_pages: bool = False,
        sampler: PageSampler | None = None,
    ) -> None:
        groups = len(plan.groups)
        self.plan = plan
        self.enable_prefix_caching = enable_prefix_caching
        self.version = 0
        self.awaits_snapshot = False  # why `admit` refused last
        self.hit_counts = HitCounts(groups)
        self.index = PrefixIndex(groups)
        self.sampler = sampler
        self.pool = make_pool(plan, self.index, keep_cached=enable_prefix_caching, sampler=sampler)
        self._rules = [group.rule for group in plan.groups]
        self._forgetting = [number for number, rule in enumerate(self._rules) if rule.forgets]
        self._shortens = all(rule.shortens for rule in self._rules)
        self._lookup_order = sorted(
            range(groups), key=lambda number: self._rules[number].forgets or self._rules[number].snapshots
        )
        states = [number for number, rule in enumerate(self._rules) if rule.snapshots]
        assert len(states) <= 1, "all recurrent layers share one group"
        self._state = states[0] if states else -1  # the group of recurrent layers
        self.hit_granularity = lcm(*(rule.cell for rule in self._rules))
        self._lists_fresh = [group.zero_fresh or list_fresh_pages for group in plan.groups]
        self._fresh: list[dict[int, None]] = [{} for _ in range(groups)]  # pages handed out since the last take_fresh
        self._copies: list[PageCopy] = []
        self._grants: dict[Grant, None] = {}
        self._dirty: dict[Grant, None] = {}  # grants with table entries to send
        self._swollen: dict[Grant, int] = {}  # grants with pages that no position from .. on reads
        self._promised = [0] * groups
        self._snapshots = Snapshots(
            self._state, plan, self.pool, self.index, self._promised, keep=enable_prefix_caching
        )
        self._epoch = 0
        self._plans = 0  # that were ended
        self._forks = Forks()
        self._recent = RecentPrompts()

    # -- admission

    def refusal(self, tokens: int) -> Refusal | None:
        """Why a request of `tokens` tokens could not finish even alone; None if it could."""
        if self.plan.slabs_needed(tokens) <= self.plan.num_slabs:
            return None
        if len(self.plan.groups) == 1:
            return Refusal(tokens, self.plan.groups[0].pages_needed(tokens), self.plan.num_pages(0), "pages")
        return Refusal(tokens, self.plan.slabs_needed(tokens), self.plan.num_slabs, "slabs")

    def chain(self, cache_salt: str = "", parent_id: str = "") -> PrefixChain:
        """The prefix chain of a new request; requests with equal arguments may share pages."""
        return PrefixChain(chain_seed(cache_salt, "" if self.enable_prefix_caching else parent_id), self._recent)

    def admit(
        self,
        slot: int,
        chain: PrefixChain,
        tokens: Sequence[int],
        hit_limit: int,
        *,
        shares: bool = True,
        parent_id: str = "",
        prompt_len: int = 0,
    ) -> Grant | None:
        """Reserve the pages to compute `tokens`, of which at most the first `hit_limit` may come from the index.

        None if they don't fit beside what running requests hold and were promised, or if a running request is about to
        take a snapshot that saves this one work. Without `shares` the request neither looks into the index nor publishes.
        With a `parent_id`, the first `prompt_len` tokens may come from a sibling that holds them (`offer`): all but the last.
        """
        grant = Grant(slot, chain, len(self._rules), self._epoch)
        self.awaits_snapshot = False
        grant.target = len(tokens)
        hit = 0
        if shares:
            chain.cover(tokens, len(tokens))
            hit = self._find_hit(grant, hit_limit) if hit_limit > 0 else 0
            if self._state >= 0 and self._snapshots.is_planned(chain, hit, hit_limit):
                self.awaits_snapshot = True
                return None
        fork = min(hit_limit, prompt_len)
        if shares and parent_id and fork > hit and self._fork(grant, parent_id, tokens[:prompt_len], fork):
            hit = fork
            grant.group_hits = [max(other, fork) for other in grant.group_hits]
        else:
            self._take_hit(grant, hit)
        lent = [len(numbers) for numbers in grant.borrowed] or [0] * len(self._rules)
        taken = [count - others for count, others in zip(grant.held, lent, strict=True)]
        needs = [max(rule.pages_needed(len(tokens)) - count, 0) for rule, count in zip(self._rules, taken, strict=True)]
        wanted = [need + promised for need, promised in zip(needs, self._promised, strict=True)]
        self._grants[grant] = None
        fits = self.pool.slack(wanted) >= 0 or self._make_room_for(wanted)
        lost = fits and hit > 0 and self._state >= 0 and self._snapshots.find(chain, hit) == HOLE
        if not fits or lost:
            del self._grants[grant]
            self._dirty.pop(grant, None)
            for group, pages in enumerate(grant.pages):
                self.pool.release(group, pages[grant.first[group] :][::-1])
            # Making room may have cost the very snapshot; what else was a hit is of no use then.
            return self.admit(slot, chain, tokens, hit_limit, shares=shares) if lost else None
        grant.cached_tokens = hit
        if hit and self.sampler is not None:
            self.sampler.used(grant.pages)
        for group in range(len(self._rules)):
            grant.reserve[group] = taken[group] + needs[group] + lent[group]
            grant.published[group] = len(grant.pages[group]) - lent[group]
        if hit and self._state >= 0:
            self._continue_from_snapshot(grant, hit)
        self._update_promises(grant)
        if shares:
            grant.next_publish = min(map(_next_publish, self._rules, grant.published))
            self._plan_marks(grant, hit)
        grant.capacity = hit
        self._dirty[grant] = None
        return grant

    def _find_hit(self, grant: Grant, limit: int) -> int:
        """The longest prefix that all groups have; notes what each has, as far as those that keep everything reach."""
        chain, indexes, rules = grant.chain, self.index.pages, self._rules
        for group in self._lookup_order:
            hit = grant.group_hits[group] = rules[group].longest_hit(indexes[group], chain, limit)
            if not rules[group].forgets and not rules[group].snapshots:
                limit = hit
        return joint_hit(rules, indexes, chain, min(grant.group_hits)) if len(rules) > 1 else grant.group_hits[0]

    def _take_hit(self, grant: Grant, hit: int) -> None:
        """Put the pages of a hit into the grant."""
        for group, rule in enumerate(self._rules):
            if group == self._state or not hit:
                continue
            start, stop = rule.hit_span(hit)
            found = self.index.pages[group]
            self._hold(grant, group, start, [found[key] for key in rule.keys(grant.chain, start, stop)])

    def _hold(self, grant: Grant, group: int, first: int, pages: list[int]) -> None:
        """Put pages that are in use or cached into the grant, as its pages `first` .. ."""
        self.pool.share(group, pages)
        grant.pages[group] = [HOLE] * first + pages
        grant.first[group] = first
        grant.held[group] = len(pages)

    def _continue_from_snapshot(self, grant: Grant, hit: int) -> None:
        """Hand out the request's state page, filled with the snapshot after `hit` tokens.

        The snapshot need not outlive this: in a full pool its own page may become the state.
        """
        group = self._state
        source = self._snapshots.find(grant.chain, hit)
        self.pool.touch(group, source)
        fresh = self.pool.allocate([int(number == group) for number in range(len(self._rules))])
        assert fresh is not None, "admission made sure of this page"
        (page,) = fresh[group]
        if page != source:
            offset = self.plan.page_offset
            self._copies.append(PageCopy(group, offset(group, source), offset(group, page)))
        self._fresh[group].pop(page, None)
        grant.pages[group] = [page]
        grant.held[group] = 1

    def _update_promises(self, grant: Grant) -> None:
        for group, reserve in enumerate(grant.reserve):
            left = max(reserve - grant.held[group], 0)
            self._promised[group] += left - grant.promise[group]
            grant.promise[group] = left

    def count_query(self, grant: Grant) -> None:
        """Count a request's first look into the prefix index, in tokens."""
        counts, asked = self.hit_counts, grant.target
        counts.queries += asked
        counts.hits += grant.cached_tokens
        for group in self._lookup_order:
            hit = grant.group_hits[group]
            counts.group_queries[group] += asked
            counts.group_hits[group] += hit
            if not self._rules[group].forgets and not self._rules[group].snapshots:
                asked = hit  # as in `_find_hit`

    # -- siblings

    def offer(self, grant: Grant, parent_id: str, prompt: Sequence[int]) -> None:
        """The plan in the making computes the last of the grant's `prompt`: siblings, of the same `parent_id`, may go on from its pages.

        Not where layers have recurrent state, which is past the prompt's last token then. Siblings copy its snapshot.
        """
        if self._state < 0 and grant.epoch == self._epoch:
            self._forks.offer(prompt_key(parent_id, grant.chain, prompt), grant, self._plans)

    def must_wait(self, grant: Grant) -> bool:
        """Whether a new grant borrows pages that the plan in the making still fills: its first row is for the next plan."""
        return grant.starts == self._plans + 1

    def _fork(self, grant: Grant, parent_id: str, prompt: Sequence[int], tokens: int) -> bool:
        """Put the pages of the first `tokens` tokens of a sibling's prompt into the grant; False if no sibling has all.

        Pages that the rest of their unit may make different are borrowed: they become the grant's own in `grow`.
        """
        chain = grant.chain
        for holder, plan in self._forks.holders(prompt_key(parent_id, chain, prompt)):
            found = [self._pages_of(holder, group, chain, tokens) for group in range(len(self._rules))]
            if holder.epoch != self._epoch or not all(found):
                continue
            for group, (first, pages) in enumerate(filter(None, found)):
                self._hold(grant, group, first, pages)
                stop = first + len(pages)
                grant.borrowed.append(range(min(max(self._rules[group].complete(tokens), first), stop), stop))
            grant.starts = plan + 1 if any(grant.borrowed) else 0
            return True
        return False

    def _pages_of(self, holder: Grant, group: int, chain: PrefixChain, tokens: int) -> tuple[int, list[int]] | None:
        """The holder's pages of what position `tokens` reads, and the first one's number; None if it hasn't all any more.

        Complete ones that it has given back may still be in the index.
        """
        rule, index = self._rules[group], self.index.pages[group]
        first, stop = rule.span(tokens, tokens)
        pages = holder.pages[group][first:stop]
        if HOLE in pages:
            for number in range(first, min(stop, rule.complete(tokens))):
                if pages[number - first] == HOLE:
                    pages[number - first] = index.get(rule.key(chain, number), HOLE)
        return (first, pages) if len(pages) == stop - first and HOLE not in pages else None

    def _to_copy(self, grant: Grant, group: int) -> list[int]:
        """Numbers of the borrowed pages that others hold or may find; the other ones are the grant's own by now."""
        refs, keys, pages = self.pool.refs[group], self.index.keys[group], grant.pages[group]
        return [number for number in grant.borrowed[group] if refs[pages[number]] > 1 or pages[number] in keys]

    def _replace_borrowed(self, grant: Grant, group: int, numbers: list[int], fresh: list[int]) -> None:
        """Copy borrowed pages into `fresh` ones: the grant is about to write to them."""
        offset, pages = self.plan.page_offset, grant.pages[group]
        for number, page in zip(numbers, fresh, strict=True):
            self._copies.append(PageCopy(group, offset(group, pages[number]), offset(group, page)))
            self._fresh[group].pop(page, None)
            self.pool.release(group, (pages[number],))
            pages[number] = page
        if numbers:
            grant.sent[group] = min(grant.sent[group], numbers[0])
        grant.reserve[group] -= len(grant.borrowed[group])

    # -- growth

    def grow(self, grant: Grant, start: int, end: int) -> int:
        """Provide the pages to compute positions [start, end). Returns the end; 0, and nothing new, if they can't be had now.

        Where windows or chunks would hold more for a long step than there is, an earlier end is returned, unless the plan
        is one without chunked prefill. Pages that no position from `start` on reads are given back.
        """
        if end <= grant.capacity:
            return end
        if start >= grant.target and any(grant.reserve):  # what was reserved was for a prompt
            grant.reserve = [0] * len(grant.reserve)
            self.version += any(grant.promise)
        for group in self._forgetting:
            self._trim(grant, group, self._rules[group].span(start, end)[0])
        copied = [self._to_copy(grant, group) for group in range(len(grant.borrowed))] if grant.borrowed else []
        marks = grant.marks
        while True:
            wanted = [self._wanted(grant, group, end, marks) for group in range(len(self._rules))]
            needs = [count for count, _ in wanted]
            if copied:
                needs = [count + len(numbers) for count, numbers in zip(needs, copied, strict=True)]
            if not self._forgetting or end - start <= SHORT_CHUNK and (self._shortens or not marks):
                break
            if self._has_room(grant, needs):
                break
            if self._shortens:
                end = start + max((end - start) // 2, SHORT_CHUNK)
            elif marks:
                marks = []  # what later requests would like to find
            else:
                break
        fresh = self.pool.allocate(needs)
        if fresh is None:
            if not self._make_room_for(needs):
                return 0
            fresh = self.pool.allocate(needs)
            assert fresh is not None
        capacity = FOREVER
        if copied:
            for group, numbers in enumerate(copied):
                self._replace_borrowed(grant, group, numbers, fresh[group][: len(numbers)])
                del fresh[group][: len(numbers)]
            grant.borrowed = []
        for group, pages in enumerate(fresh):
            held = grant.pages[group]
            if wanted[group][1]:
                fill(held, pages, wanted[group][1])
            else:
                held += pages
            grant.held[group] += len(pages)
            if self._lists_fresh[group]:
                self._fresh[group].update(dict.fromkeys(pages))
            capacity = min(capacity, self._rules[group].capacity(len(held)))
        self._update_promises(grant)
        grant.capacity = capacity
        if self._forgetting:
            self._swollen[grant] = end
        self._dirty[grant] = None
        return end

    def _wanted(self, grant: Grant, group: int, end: int, marks: Sequence[int]) -> tuple[int, list[range]]:
        """How many more pages the positions below `end` and hits at `marks` need, and which, if not simply the next ones."""
        rule = self._rules[group]
        there = len(grant.pages[group])
        stop = rule.span(end, end)[1]
        if not rule.forgets or stop <= there:
            return max(stop - there, 0), []
        spans = [rule.hit_span(mark) for mark in marks if mark <= end]
        spans.append((rule.tail(end), stop))
        parts: list[range] = []
        for first, last in spans:
            first = max(first, there)
            if first < last:
                parts.append(range(first, last))
            there = max(there, last)
        return sum(map(len, parts)), [*parts, range(stop, stop)]

    def _has_room(self, grant: Grant, needs: Sequence[int]) -> bool:
        """Whether these pages can be had without touching what was promised to others."""
        return (
            self.pool.slack(
                [
                    promised + max(need - own, 0)
                    for promised, need, own in zip(self._promised, needs, grant.promise, strict=True)
                ]
            )
            >= 0
        )

    def _trim(self, grant: Grant, group: int, first: int) -> int:
        """Give back the pages before `first`, which no position from here on reads; how many there were."""
        old, pages = grant.first[group], grant.pages[group]
        if first <= old:
            return 0
        stop = min(first, len(pages))
        gone = [page for page in pages[old:stop] if page != HOLE]
        pages[old:stop] = [HOLE] * (stop - old)
        pages += [HOLE] * (first - len(pages))
        grant.first[group] = first
        grant.held[group] -= len(gone)
        self.pool.release(group, gone[::-1])
        return len(gone)

    def publish(self, grant: Grant, tokens: Sequence[int], end: int) -> None:
        """Make the complete pages of positions [0, end) findable. They must be in a plan, their `tokens` known."""
        if end < grant.next_publish:
            return
        if grant.epoch != self._epoch:
            grant.next_publish = FOREVER
            return
        chain = grant.chain
        chain.cover(tokens, end)
        for group, rule in enumerate(self._rules):
            complete = rule.complete(end)
            pages = grant.pages[group]
            for number in range(max(grant.published[group], grant.first[group]), complete):
                if pages[number] != HOLE:
                    self.index.publish(group, rule.key(chain, number), pages[number])
            grant.published[group] = complete
        grant.next_publish = min(map(_next_publish, self._rules, grant.published))
        if grant.saves:
            self._snapshots.publish(grant, current=True)

    def end_plan(self, rows: Iterable[tuple[Grant, int, int]]) -> list[StateSave]:
        """Call when a plan has all its rows (grant, start, end) and its table writes: the snapshots that the plan takes.

        From here on, pages that only this plan's rows read can be handed out: the next plan runs after it.
        """
        saves: list[StateSave] = []
        self._plans += 1
        if self._state >= 0:
            for number, (grant, start, end) in enumerate(rows):
                if end >= grant.next_save:
                    current = grant.epoch == self._epoch
                    self.version += self._snapshots.take(saves, number, grant, start, end, current=current)
        for grant, end in self._swollen.items():
            for group in self._forgetting:
                # A page for a page, as in decoding, makes no room for anybody.
                self.version += self._trim(grant, group, self._rules[group].span(end, end + 1)[0]) > 1
            self._update_promises(grant)
        self._swollen.clear()
        return saves

    def _plan_marks(self, grant: Grant, hit: int) -> None:
        """Where a later request may want to continue: at the last boundary of this prompt, so that the same prompt hits, and
        where the hit would have ended if every group had as much as the best: others may branch off there too.
        """
        cell = self.hit_granularity
        wanted = {(grant.target - 1) // cell * cell, max(grant.group_hits) // cell * cell}
        grant.marks = sorted(mark for mark in wanted if mark > hit)
        if self._state >= 0:
            self._snapshots.plan(grant, hit)

    # -- the end

    def release(self, grant: Grant) -> None:
        """Return all pages. Published ones stay findable until evicted, the request's last page first."""
        for group, pages in enumerate(grant.pages):
            held = [page for page in pages[grant.first[group] :] if page != HOLE]
            self.pool.release(group, held[::-1])
            self._promised[group] -= grant.promise[group]
        for _, page in grant.saves:
            self.pool.release(self._state, (page,))
        if self._state >= 0:
            self._snapshots.unplan(grant, FOREVER)
        self._forks.withdraw(grant)
        del self._grants[grant]
        self._dirty.pop(grant, None)
        self._swollen.pop(grant, None)
        self.version += 1

    def distrust(self, chain: PrefixChain, start: int) -> None:
        """What was computed of this chain from position `start` on is wrong: nobody may find it any more."""
        for group, rule in enumerate(self._rules):
            found = self.index.pages[group]
            known = len(chain.hashes) * UNIT_TOKENS
            pages = range(rule.complete(start), rule.complete(known))
            for number in range(start // UNIT_TOKENS, known // UNIT_TOKENS) if rule.snapshots else pages:
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
                    entries = self.plan.table_entries(group, pages[first:])
                    writes.append(TableWrite(group, grant.slot, first, entries))
                    grant.sent[group] = len(pages)
        self._dirty.clear()
        return writes

    def take_fresh(self) -> list[list[int]]:
        """Byte offsets, per group, of the pages handed out since the last call, for groups that list them."""
        if not any(self._fresh):
            return []
        offset = self.plan.page_offset
        fresh = [[offset(group, page) for page in pages] for group, pages in enumerate(self._fresh)]
        self._fresh = [{} for _ in fresh]
        return fresh

    def take_copies(self) -> list[PageCopy]:
        """Page moves decided since the last call; they must run in this order, before anything else touches pages."""
        copies, self._copies = self._copies, []
        return copies

    # -- moves

    def _make_room_for(self, needs: Sequence[int]) -> bool:
        """Do without snapshots in the making, then move pages together, if that makes room for `needs`."""
        if self._state >= 0 and self._snapshots.drop(self._grants) and self.pool.slack(needs) >= 0:
            return True
        return self._compact_for(needs)

    def _compact_for(self, needs: Sequence[int]) -> bool:
        """Move pages together if that makes room for `needs`. With one group it never can: any page will do."""
        pool = self.pool
        packed = (-(-(used + need) // count) for used, need, count in zip(pool.used, needs, pool.per_slab, strict=True))
        if len(needs) == 1 or sum(packed) > pool.num_slabs:
            return False
        self._apply_moves(pool.compact())
        return True

    def tidy(self) -> None:
        """Keep fragmentation low: once it is above `UNTIDY`, pages are moved together until half of that is left."""
        if self.pool.fragmentation > UNTIDY:
            self._apply_moves(self.pool.tidy(UNTIDY / 2))
            self.version += 1

    def _apply_moves(self, moves: list[tuple[int, int, int]]) -> None:
        moved: list[dict[int, int]] = [{} for _ in self._rules]
        for group, source, target in moves:
            moved[group][source] = target
            fresh = self._fresh[group]
            fresh.pop(target, None)
            if source in fresh:  # nothing was written to it yet
                del fresh[source]
                fresh[target] = None
            else:
                offset = self.plan.page_offset
                self._copies.append(PageCopy(group, offset(group, source), offset(group, target)))
        for grant in self._grants:
            for group, targets in enumerate(moved):
                if targets:
                    pages = grant.pages[group]
                    pages[:] = [targets.get(page, page) for page in pages]
                    grant.sent[group] = 0
            if self._state >= 0:
                targets = moved[self._state]
                grant.saves = [(position, targets.get(page, page)) for position, page in grant.saves]
                grant.turn = (grant.turn[0], targets.get(grant.turn[1], grant.turn[1]))
            self._dirty[grant] = None

    # -- numbers

    @property
    def usage(self) -> float:
        """Share of the page memory's bytes that is in use, 0 to 1."""
        groups = zip(self.plan.groups, self.pool.used, strict=True)
        return sum(group.page_bytes * used for group, used in groups) / self.plan.kv_bytes

    def check_integrity(self) -> None:
        """Recount: every page is free, cached or in use, and held by exactly as many grants as its count says.

        Raises:
            AssertionError: the books don't balance; this is a bug of the manager.
        """
        self.pool.check()
        for group, refs in enumerate(self.pool.refs):
            counts: dict[int, int] = {}
            for grant in self._grants:
                pages = [page for page in grant.pages[group][grant.first[group] :] if page != HOLE]
                assert len(pages) == grant.held[group], f"group {group}: pages held"
                pages += [page for _, page in grant.saves] if group == self._state else []
                for page in pages:
                    counts[page] = counts.get(page, 0) + 1
            assert counts == refs, f"group {group}: grants hold {counts}, the pool counts {refs}"
            promised = sum(grant.promise[group] for grant in self._grants)
            assert promised == self._promised[group], "promises"
        if self._state >= 0:
            self._snapshots.check(self._grants)


def _next_publish(rule: GroupRule, published: int) -> int:
    return rule.next_publish(published)
