"""The one place that decides who gets which pages, for all groups at once.

A running request holds a `Grant`. `admit` reserves the pages of everything the request has to compute, minus what the
prefix index has; `grow` hands pages out as steps need them; `publish` makes complete pages findable; `release` returns them.

Steps run in the order of their plans, on one stream. Two things follow. A page that a step in flight still writes may be
handed out again at once. And a page may be found in the index as soon as the row that writes it is in a plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import lcm

from pagerunner.memory.forks import Forks, pages_to_copy, prompt_key, replace_borrowed
from pagerunner.memory.grant import NO_PAGE, Grant, Promises, Refusal, fill
from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.memory.moves import PageMoves
from pagerunner.memory.prefix import UNIT_TOKENS, HitCounts, PrefixChain, PrefixIndex, RecentPrompts, chain_seed
from pagerunner.memory.residency import PageSampler, make_pool
from pagerunner.memory.rules import FOREVER, SHORT_CHUNK, GroupRule, joint_hit
from pagerunner.memory.snapshots import Snapshots
from pagerunner.memory.step_work import StepWork
from pagerunner.types import PageCopy, StateSave, TableWrite


class KVManager:
    """Pages of all groups, and the prefix index over them.

    Without `enable_prefix_caching` pages are only shared among siblings while one of them runs.
    `list_fresh_pages` puts the fresh pages of every group into the step's zero lists, not only of those that need it.
    A `sampler` times how long pages stay.
    `version` changes whenever pages were given back. Until it changes, a request that didn't fit need not be tried again.
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
        self.hit_granularity = lcm(*(rule.cell for rule in self._rules))
        self._grants: dict[Grant, None] = {}
        self._swollen: dict[Grant, int] = {}  # grants, and the position from which on some of their pages aren't read
        self._promises = Promises(groups)
        self._work = StepWork(plan, list_fresh_pages=list_fresh_pages)
        self._moves = PageMoves(plan, self.pool, self._grants, self._work)
        self._snapshots = Snapshots(plan, self.pool, self.index, self._promises, self._work, keep=enable_prefix_caching)
        self._forks_prompts = not any(rule.snapshots for rule in self._rules)
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

        None if the pages don't fit beside what running requests hold and were promised. None, too, if a running request is
        about to take a snapshot that saves this request work. Without `shares` the request neither looks into the index nor
        publishes. With a `parent_id`, all but the last of the first `prompt_len` tokens may come from a sibling (`offer`).
        """
        grant = Grant(slot, chain, len(self._rules), self._epoch)
        self.awaits_snapshot = False
        grant.target = len(tokens)
        hit = 0
        if shares:
            chain.cover(tokens, len(tokens))
            hit = self._find_hit(grant, hit_limit) if hit_limit > 0 else 0
            if self._snapshots.is_planned(chain, hit, hit_limit):
                self.awaits_snapshot = True
                return None
        fork = min(hit_limit, prompt_len)
        if shares and parent_id and fork > hit and self._fork(grant, parent_id, tokens[:prompt_len], fork):
            hit = fork
            grant.group_hits = [max(other, fork) for other in grant.group_hits]
        else:
            self._take_hit(grant, hit)
        lent = [len(numbers) for numbers in grant.borrowed] or [0] * len(self._rules)
        taken = [count - others for count, others in zip(grant.num_pages, lent, strict=True)]
        needs = [max(rule.pages_needed(len(tokens)) - count, 0) for rule, count in zip(self._rules, taken, strict=True)]
        wanted = self._promises.beside(needs)
        self._grants[grant] = None
        fits = self.pool.slack(wanted) >= 0 or self._make_room_for(wanted)
        lost = fits and hit > 0 and self._snapshots.is_lost(chain, hit)
        if not fits or lost:
            del self._grants[grant]
            self._work.drop(grant)
            for group, pages in enumerate(grant.pages):
                self.pool.release(group, pages[grant.first[group] :][::-1])
            if not lost:
                return None
            # Making room has cost the very snapshot. The hit's other pages are of no use without it.
            return self.admit(slot, chain, tokens, hit_limit, shares=shares, parent_id=parent_id, prompt_len=prompt_len)
        grant.cached_tokens = hit
        if hit and self.sampler is not None:
            self.sampler.used(grant.pages)
        for group in range(len(self._rules)):
            grant.reserve[group] = taken[group] + needs[group] + lent[group]
            grant.published[group] = len(grant.pages[group]) - lent[group]
        if hit:
            self._snapshots.restore(grant, hit)
        self._promises.update(grant)
        if shares:
            grant.next_publish = min(map(_next_publish, self._rules, grant.published))
            self._plan_snapshots(grant, hit)
        grant.capacity = hit
        self._work.send_table(grant)
        return grant

    def _find_hit(self, grant: Grant, limit: int) -> int:
        """The longest prefix that all groups have.

        Notes in `grant.group_hits` what each group has, within the prefix of the groups that keep everything.
        """
        chain, indexes, rules = grant.chain, self.index.pages, self._rules
        for group in self._lookup_order:
            hit = grant.group_hits[group] = rules[group].longest_hit(indexes[group], chain, limit)
            if not rules[group].forgets and not rules[group].snapshots:
                limit = hit
        return joint_hit(rules, indexes, chain, min(grant.group_hits)) if len(rules) > 1 else grant.group_hits[0]

    def _take_hit(self, grant: Grant, hit: int) -> None:
        """Put the pages of a hit into the grant."""
        for group, rule in enumerate(self._rules):
            if rule.snapshots or not hit:
                continue
            start, stop = rule.hit_span(hit)
            found = self.index.pages[group]
            self._hold(grant, group, start, [found[key] for key in rule.keys(grant.chain, start, stop)])

    def _hold(self, grant: Grant, group: int, first: int, pages: list[int]) -> None:
        """Put pages that are in use or cached into the grant, as its pages `first` .. ."""
        self.pool.share(group, pages)
        grant.pages[group] = [NO_PAGE] * first + pages
        grant.first[group] = first
        grant.num_pages[group] = len(pages)
        self._moves.placed(grant, group, first, pages)

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

    def count_on(self, earlier: KVManager) -> None:
        """Go on with the counts of an earlier manager of the same plan."""
        self.hit_counts = earlier.hit_counts
        self.pool.evictions = earlier.pool.evictions
        if self.sampler is not None and earlier.sampler is not None:
            self.sampler.count_on(earlier.sampler)

    # -- siblings

    def offer(self, grant: Grant, parent_id: str, prompt: Sequence[int]) -> None:
        """Let siblings go on from the grant's pages: the plan in the making computes the last token of its `prompt`.

        Siblings are requests with the same `parent_id`. With recurrent state nothing is offered, because the grant's state is
        past the prompt's last token then. Siblings copy a snapshot instead.
        """
        if self._forks_prompts and grant.epoch == self._epoch:
            self._forks.offer(prompt_key(parent_id, grant.chain, prompt), grant, self._plans)

    def must_wait(self, grant: Grant) -> bool:
        """Whether a new grant borrows pages that the plan in the making still fills.

        If so, its first row waits for the next plan.
        """
        return grant.starts == self._plans + 1

    def _fork(self, grant: Grant, parent_id: str, prompt: Sequence[int], tokens: int) -> bool:
        """Put the pages of the first `tokens` tokens of a sibling's prompt into the grant; False if no sibling has all.

        A page with room left is borrowed, as each sibling fills it otherwise. `grow` makes it the grant's own.
        """
        key = prompt_key(parent_id, grant.chain, prompt)
        found = self._forks.find(key, tokens, self._rules, self.index, self._epoch)
        if found is None:
            return False
        groups, plan = found
        for group, (first, pages) in enumerate(groups):
            self._hold(grant, group, first, pages)
            stop = first + len(pages)
            grant.borrowed.append(range(min(max(self._rules[group].complete(tokens), first), stop), stop))
        grant.starts = plan + 1 if any(grant.borrowed) else 0
        return True

    def _to_copy(self, grant: Grant, group: int) -> list[int]:
        """Numbers of the borrowed pages that the grant must copy before it writes to them."""
        return pages_to_copy(grant, group, self.pool, self.index)

    def _replace_borrowed(self, grant: Grant, group: int, numbers: list[int], fresh: list[int]) -> None:
        """Copy borrowed pages into `fresh` ones: the grant is about to write to them."""
        replace_borrowed(grant, group, numbers, fresh, self.pool, self._work)
        for number, page in zip(numbers, fresh, strict=True):
            self._moves.placed(grant, group, number, (page,))

    # -- growth

    def grow(self, grant: Grant, start: int, end: int) -> int:
        """Provide the pages to compute positions [start, end), and return the end.

        Returns 0 and changes nothing if the pages can't be had now.

        If windows or chunks need more pages for a long step than there are, an earlier end is returned. A plan without
        chunked prefill never returns an earlier end. Pages that no position from `start` on reads are given back.
        """
        if end <= grant.capacity:
            return end
        if start >= grant.target and any(grant.reserve):  # what was reserved was for a prompt
            grant.reserve = [0] * len(grant.reserve)
            self.version += any(grant.promise)
        for group in self._forgetting:
            self._trim(grant, group, self._rules[group].span(start, end)[0])
        copied = [self._to_copy(grant, group) for group in range(len(grant.borrowed))]
        end, wanted, needs = self._fitting(grant, start, end, copied)
        fresh = self.pool.allocate(needs)
        if fresh is None:
            if not self._make_room_for(needs):
                return 0
            fresh = self.pool.allocate(needs)
            assert fresh is not None
        for group, numbers in enumerate(copied):
            own = fresh[group][: len(numbers)]
            del fresh[group][: len(numbers)]
            self._replace_borrowed(grant, group, numbers, own)
        grant.borrowed = []
        self._append(grant, fresh, [parts for _, parts in wanted])
        if self._forgetting:
            self._swollen[grant] = end
        self._work.send_table(grant)
        return end

    def _fitting(
        self, grant: Grant, start: int, end: int, copied: Sequence[Sequence[int]]
    ) -> tuple[int, list[tuple[int, list[range]]], list[int]]:
        """How far the grant can grow at once: the end, and by group what `_wanted` says and how many pages are needed.

        When memory is short, steps of groups that forget are halved, down to `SHORT_CHUNK` tokens. If a step can't be halved,
        pages are given up that later requests would have liked to find.
        """
        positions = grant.snapshot_positions
        while True:
            wanted = [self._wanted(grant, group, end, positions) for group in range(len(self._rules))]
            needs = [count for count, _ in wanted]
            for group, numbers in enumerate(copied):
                needs[group] += len(numbers)
            if not self._forgetting or end - start <= SHORT_CHUNK and (self._shortens or not positions):
                break
            if self.pool.slack(self._promises.beside(needs, grant)) >= 0:
                break
            if self._shortens:
                end = start + max((end - start) // 2, SHORT_CHUNK)
            elif positions:
                positions = []
            else:
                break
        return end, wanted, needs

    def _append(self, grant: Grant, fresh: Sequence[list[int]], parts: Sequence[list[range]]) -> None:
        """Put fresh pages behind the grant's pages. Where a group has `parts`, they say the fresh pages' numbers."""
        capacity = FOREVER
        for group, pages in enumerate(fresh):
            held = grant.pages[group]
            if parts[group]:
                taken = 0
                for part in parts[group]:
                    self._moves.placed(grant, group, part.start, pages[taken : taken + len(part)])
                    taken += len(part)
                fill(held, pages, parts[group])
            else:
                self._moves.placed(grant, group, len(held), pages)
                held += pages
            grant.num_pages[group] += len(pages)
            self._work.add_fresh(group, pages)
            capacity = min(capacity, self._rules[group].capacity(len(held)))
        self._promises.update(grant)
        grant.capacity = capacity

    def _wanted(self, grant: Grant, group: int, end: int, positions: Sequence[int]) -> tuple[int, list[range]]:
        """How many more pages the positions below `end` and hits at `positions` need.

        Also the pages' numbers, if these aren't simply the next ones.
        """
        rule = self._rules[group]
        there = len(grant.pages[group])
        stop = rule.span(end, end)[1]
        if not rule.forgets or stop <= there:
            return max(stop - there, 0), []
        spans = [rule.hit_span(position) for position in positions if position <= end]
        spans.append((rule.tail(end), stop))
        parts: list[range] = []
        for first, last in spans:
            first = max(first, there)
            if first < last:
                parts.append(range(first, last))
            there = max(there, last)
        return sum(map(len, parts)), [*parts, range(stop, stop)]

    def _trim(self, grant: Grant, group: int, first: int) -> int:
        """Give back the pages before `first`, which no later position reads. Returns how many pages that were."""
        old, pages = grant.first[group], grant.pages[group]
        if first <= old:
            return 0
        stop = min(first, len(pages))
        gone = [page for page in pages[old:stop] if page != NO_PAGE]
        pages[old:stop] = [NO_PAGE] * (stop - old)
        pages += [NO_PAGE] * (first - len(pages))
        grant.first[group] = first
        grant.num_pages[group] -= len(gone)
        self.pool.release(group, gone[::-1])
        return len(gone)

    def publish(self, grant: Grant, tokens: Sequence[int], end: int) -> None:
        """Make the complete pages of positions [0, end) findable.

        The positions must be in a plan, and their `tokens` must be known.
        """
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
                if pages[number] != NO_PAGE:
                    self.index.publish(group, rule.key(chain, number), pages[number])
            grant.published[group] = complete
        grant.next_publish = min(map(_next_publish, self._rules, grant.published))
        if grant.saves:
            self._snapshots.publish(grant, current=True)

    def end_plan(self, rows: Iterable[tuple[Grant, int, int]]) -> list[StateSave]:
        """Call when a plan has all its rows (grant, start, end) and its table writes. Returns the snapshots that the plan takes.

        From now on pages that only this plan's rows read can be handed out, because the next plan runs after this one.
        """
        self._plans += 1
        saves, unplanned = self._snapshots.take_all(rows, self._epoch)
        self.version += unplanned
        for grant, end in self._swollen.items():
            for group in self._forgetting:
                # Decoding with a window gives back one page and takes one, which makes no room for other requests.
                self.version += self._trim(grant, group, self._rules[group].span(end, end + 1)[0]) > 1
            self._promises.update(grant)
        self._swollen.clear()
        return saves

    def _plan_snapshots(self, grant: Grant, hit: int) -> None:
        """The positions where a later request may want to continue.

        The first is the last boundary of this prompt, where the same prompt hits. The second is where this prompt's hit would
        have ended if every group had as much as the best group: other requests may branch off there too.
        """
        cell = self.hit_granularity
        wanted = {(grant.target - 1) // cell * cell, max(grant.group_hits) // cell * cell}
        grant.snapshot_positions = sorted(position for position in wanted if position > hit)
        self._snapshots.plan(grant, hit)

    # -- the end

    def release(self, grant: Grant) -> None:
        """Return all pages. Published ones stay findable until evicted, the request's last page first."""
        for group, pages in enumerate(grant.pages):
            held = [page for page in pages[grant.first[group] :] if page != NO_PAGE]
            self.pool.release(group, held[::-1])
        self._promises.withdraw(grant)
        self._snapshots.release(grant)
        self._forks.withdraw(grant)
        del self._grants[grant]
        self._work.drop(grant)
        self._swollen.pop(grant, None)
        self.version += 1

    def distrust(self, chain: PrefixChain, start: int) -> None:
        """Make this chain unfindable from position `start` on, because what was computed there is wrong."""
        for group, rule in enumerate(self._rules):
            known = len(chain.hashes) * UNIT_TOKENS
            pages = range(rule.complete(start), rule.complete(known))
            for number in range(start // UNIT_TOKENS, known // UNIT_TOKENS) if rule.snapshots else pages:
                page = self.index.find(group, rule.key(chain, number))
                if page is not None and not self.pool.evict(group, page):
                    self.index.forget(group, page)

    def reset_prefix_cache(self) -> bool:
        """Forget all content.

        False if pages are in use: these pages stay with their requests, but can't be found any more.
        """
        self.pool.evict_all()
        self.index.clear()
        self._epoch += 1
        self.version += 1
        return not any(self.pool.used)

    # -- what a step must carry

    def take_table_writes(self) -> list[TableWrite]:
        """Page table entries that the device doesn't have yet."""
        return self._work.take_table_writes()

    def take_fresh(self) -> list[list[int]]:
        """Byte offsets, per group, of the pages handed out since the last call, for groups that list them."""
        return self._work.take_fresh()

    def take_copies(self) -> list[PageCopy]:
        """Page copies decided since the last call.

        The copies must run in this order, before anything else touches pages.
        """
        return self._work.take_copies()

    # -- moves

    def begin_step(self) -> None:
        """Begin a plan. It may move pages, and moves some at once if pages lie too scattered."""
        self.version += self._moves.unfinished
        self._moves.begin_step()
        self.version += self._moves.tidy()

    @property
    def moves_unfinished(self) -> bool:
        """Whether something didn't fit only because this step may move no more pages. The next step moves more."""
        return self._moves.unfinished

    def _make_room_for(self, needs: Sequence[int]) -> bool:
        """Make room for `needs`: give up snapshots in the making, then move pages together. Whether that was enough."""
        if self._snapshots.drop(self._grants) and self.pool.slack(needs) >= 0:
            return True
        return self._moves.make_room_for(needs)

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
                pages = [page for page in grant.pages[group][grant.first[group] :] if page != NO_PAGE]
                assert len(pages) == grant.num_pages[group], f"group {group}: pages held"
                pages += [page for _, page in grant.saves] if self._rules[group].snapshots else []
                for page in pages:
                    counts[page] = counts.get(page, 0) + 1
            assert counts == refs, f"group {group}: grants hold {counts}, the pool counts {refs}"
            promised = sum(grant.promise[group] for grant in self._grants)
            assert promised == self._promises.by_group[group], "promises"
        self._snapshots.check(self._grants)
        self._moves.check()


def _next_publish(rule: GroupRule, published: int) -> int:
    return rule.next_publish(published)
