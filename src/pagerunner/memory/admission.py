"""Admission: what a new request finds in the prefix index or with a sibling, and whether the rest of its pages can be had.

A request is admitted for all groups at once, and with its adapter's pages, or not at all. What it still has to compute is promised to it, and the pages of its prompt's snapshots. Where these
alone lack, it waits for other prompts' snapshots and for transfers, and does without where none gives pages back. It waits for no text that is generated.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Sequence
from typing import Literal

from pagerunner.memory.books import Books
from pagerunner.memory.forks import Forks, prompt_key
from pagerunner.memory.grant import Grant
from pagerunner.memory.holdings import Holdings
from pagerunner.memory.leases import Leases
from pagerunner.memory.prefix import HitCounts, PrefixChain
from pagerunner.memory.residency import PageSampler
from pagerunner.memory.room import Room
from pagerunner.memory.rules import joint_hit
from pagerunner.memory.snapshots import Snapshots

Awaited = Literal["", "snapshot", "transfer"]


class Admission:
    """Makes grants. `awaits`: what it refused last for, if not for pages."""

    def __init__(
        self,
        books: Books,
        leases: Leases,
        holdings: Holdings,
        snapshots: Snapshots,
        forks: Forks,
        room: Room,
        sampler: PageSampler | None,
    ) -> None:
        self.awaits: Awaited = ""
        self.hit_counts = HitCounts(len(books.rules))
        self._books, self._index, self._rules = books, books.index, books.rules
        self._leases = leases
        self._holdings, self._snapshots, self._forks, self._room = holdings, snapshots, forks, room
        self._sampler = sampler
        self._lookup_order = sorted(
            range(len(self._rules)), key=lambda number: self._rules[number].forgets or self._rules[number].snapshots
        )

    def admit(
        self,
        slot: int,
        chain: PrefixChain,
        tokens: Sequence[int],
        hit_limit: int,
        *,
        shares: bool,
        parent_id: str,
        prompt_len: int,
    ) -> Grant | None:
        """See KVManager."""
        while True:
            grant, end = Grant(slot, chain, len(self._rules), self._index.epoch), "refused"
            self._books.grants[grant] = None
            try:
                end = self._fill(grant, tokens, hit_limit, shares=shares, parent_id=parent_id, prompt_len=prompt_len)
            finally:  # whatever has happened
                if end != "granted":
                    self._holdings.release(grant)
            if end != "lost":
                return grant if end == "granted" else None

    def _fill(
        self, grant: Grant, tokens: Sequence[int], hit_limit: int, *, shares: bool, parent_id: str, prompt_len: int
    ) -> Literal["granted", "refused", "lost"]:
        """Give a new grant what it asks for. "lost": making room has cost the very snapshot of its hit. The hit's other pages are of no use without it."""
        self.awaits = ""
        grant.target = len(tokens)
        chain, hit, cell = grant.chain, 0, self._books.plan.hit_granularity
        if shares:
            chain.cover(tokens, len(tokens))
            hit = self._find_hit(grant, hit_limit) if hit_limit > 0 else 0
            if self._snapshots.is_planned(chain, hit, hit_limit):
                self.awaits = "snapshot"
            elif hit_limit - hit >= cell and any(self._leases.arriving) and self._hit_to_come(chain, hit_limit) > hit:
                self.awaits = "transfer"
            if self.awaits:
                return "refused"
        fork = min(hit_limit, prompt_len)
        if shares and parent_id and fork > hit and self._fork(grant, parent_id, tokens[:prompt_len], fork):
            hit = fork
            grant.group_hits = [max(other, fork) for other in grant.group_hits]
        else:
            self._take_hit(grant, hit)
        lent = [len(numbers) for numbers in grant.borrowed] or [0] * len(self._rules)
        taken = [count - others for count, others in zip(grant.num_pages, lent, strict=True)]
        needs = [max(rule.pages_needed(len(tokens)) - count, 0) for rule, count in zip(self._rules, taken, strict=True)]
        positions = self._snapshot_positions(grant, hit) if shares else []
        beside, adapters = list(needs), self._books.adapters
        if chain.adapter is not None:
            grant.adapter = adapters.join(chain.adapter)
            beside[adapters.group] += grant.adapter.num_lacking
        waits = bool(positions) and self.snapshots_wait(self._snapshots.pages_beside(beside, len(positions)))
        promised = self._books.promises.beside(beside)
        if waits or not self._room.reserve(promised):
            return "refused"
        if hit and self._snapshots.is_lost(chain, hit):
            return "lost"
        grant.cached_tokens = hit
        if hit and self._sampler is not None:
            self._sampler.used(grant.pages)
        for group in range(len(self._rules)):
            grant.reserve[group] = taken[group] + needs[group] + lent[group]
            grant.published[group] = len(grant.pages[group]) - lent[group]
        if hit:
            self._snapshots.restore(grant, hit, promised)
        if grant.adapter is not None:  # now that the state has been copied, whose snapshot may be evicted for it
            adapters.complete(grant.adapter, promised)
        self._books.promises.update(grant)
        if shares:
            self._holdings.set_next_publish(grant)
            grant.snapshot_positions = positions
            self._snapshots.plan(grant, hit, prompt_len)
        grant.capacity = hit
        self._books.work.send_table(grant)
        return "granted"

    def cached_tokens(self, chain: PrefixChain, tokens: Sequence[int]) -> int:
        """See KVManager."""
        chain.cover(tokens, len(tokens))
        return self._find_hit(Grant(0, chain, len(self._rules), self._index.epoch), len(tokens) - 1)

    def _find_hit(self, grant: Grant, limit: int) -> int:
        """The longest prefix that all groups have.

        Notes in `grant.group_hits` what each group has, within the prefix of the groups that keep everything.
        """
        chain, indexes, rules = grant.chain, self._index.pages, self._rules
        for group in self._lookup_order:
            hit = grant.group_hits[group] = rules[group].longest_hit(indexes[group], chain, limit)
            if not rules[group].forgets and not rules[group].snapshots:
                limit = hit
        least = min(grant.group_hits)
        return least if least == max(grant.group_hits) else joint_hit(rules, indexes, chain, least)

    def _hit_to_come(self, chain: PrefixChain, limit: int) -> int:
        """As `_find_hit`, when the transfers under way have ended well."""
        indexes = [
            ChainMap(there, coming) for there, coming in zip(self._index.pages, self._leases.arriving, strict=True)
        ]
        return joint_hit(self._rules, indexes, chain, limit)

    def _take_hit(self, grant: Grant, hit: int) -> None:
        """Put the pages of a hit into the grant."""
        for group, rule in enumerate(self._rules):
            if rule.snapshots or not hit:
                continue
            start, stop = rule.hit_span(hit)
            found = self._index.pages[group]
            self._holdings.share(grant, group, start, [found[key] for key in rule.keys(grant.chain, start, stop)])

    def _fork(self, grant: Grant, parent_id: str, prompt: Sequence[int], tokens: int) -> bool:
        """Put the pages of the first `tokens` tokens of a sibling's prompt into the grant; False if no sibling has all.

        A page with room left is borrowed, as each sibling fills it otherwise. `Growth` makes it the grant's own.
        """
        key = prompt_key(parent_id, grant.chain, prompt)
        found = self._forks.find(key, tokens, self._rules, self._index, self._index.epoch)
        if found is None:
            return False
        groups, plan = found
        for group, (first, pages) in enumerate(groups):
            self._holdings.share(grant, group, first, pages)
            stop = first + len(pages)
            grant.borrowed.append(range(min(max(self._rules[group].complete(tokens), first), stop), stop))
        grant.starts = plan + 1 if any(grant.borrowed) else 0
        return True

    def _snapshot_positions(self, grant: Grant, hit: int) -> list[int]:
        """The positions where a later request may want to continue.

        The first is the last boundary of this prompt, where the same prompt hits. The second is where this prompt's hit would
        have ended if every group had as much as the best group: other requests may branch off there too.
        """
        cell = self._books.plan.hit_granularity
        wanted = {(grant.target - 1) // cell * cell, max(grant.group_hits) // cell * cell}
        return sorted(position for position in wanted if position > hit)

    def snapshots_wait(self, needs: Sequence[int]) -> bool:
        """Whether `needs`, a prompt's snapshots among them, can't be had now, and may be when others let theirs go or transfers end."""
        if not self._snapshots.has_state or self._books.promises.kept(needs):
            return False
        return self._snapshots.come_back(self._books.grants) or self._leases.would_fit(
            self._books.promises.beside(needs)
        )

    def count_query(self, grant: Grant, external: int) -> None:
        """See KVManager."""
        counts, asked = self.hit_counts, grant.target
        counts.queries += asked
        counts.hits += grant.cached_tokens - external
        for group in self._lookup_order:
            hit = grant.group_hits[group]
            counts.group_queries[group] += asked
            counts.group_hits[group] += hit
            if not self._rules[group].forgets and not self._rules[group].snapshots:
                asked = hit  # as in `_find_hit`
