"""The one place that decides who gets which pages, for all groups at once.

A running request holds a `Grant`. `admit` reserves the pages of everything the request has to compute, minus what the
prefix index has; `grow` hands pages out as steps need them; `publish` makes complete pages findable; `release` returns them.

Steps run in the order of their plans, on one stream. Two things follow. A page that a step in flight still writes may be
handed out again at once. And a page may be found in the index as soon as the row that writes it is in a plan.

The manager has three parts: `Admission` makes grants, `Growth` gives them pages, and `PageMoves` moves pages together. `Holdings`
has the pages that grants hold, `Leases` those that snapshots in the making and transfers hold. `Room` decides what is given up when pages are short.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pagerunner.memory.adapters import AdapterLease, AdapterPages
from pagerunner.memory.admission import Admission, Awaited
from pagerunner.memory.books import Books
from pagerunner.memory.events import BlockLog, LoggedIndex
from pagerunner.memory.forks import Forks, prompt_key
from pagerunner.memory.grant import Grant, Promises, Refusal
from pagerunner.memory.growth import Growth
from pagerunner.memory.holdings import Holdings
from pagerunner.memory.leases import Lease, Leases
from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.memory.moves import PageMoves
from pagerunner.memory.prefix import (
    UNIT_TOKENS,
    HitCounts,
    PageKey,
    PrefixChain,
    PrefixIndex,
    RecentPrompts,
    chain_seed,
)
from pagerunner.memory.residency import PageSampler, make_pool
from pagerunner.memory.room import Room
from pagerunner.memory.rules import FOREVER
from pagerunner.memory.snapshots import Snapshots
from pagerunner.memory.step_work import StepWork
from pagerunner.types import AdapterInfo, PageCopy, PageTransfer, StateSave, TableWrite


class KVManager:
    """Pages of all groups, and the prefix index over them.

    Without `enable_prefix_caching` pages are only shared among siblings while one of them runs.
    `list_fresh_pages` puts the fresh pages of every group into the step's zero lists, not only of those that need it.
    A `sampler` times how long pages stay. With `log_events`, `events` has what prompts can find, and what not any more.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        *,
        enable_prefix_caching: bool = True,
        list_fresh_pages: bool = False,
        sampler: PageSampler | None = None,
        log_events: bool = False,
    ) -> None:
        self.plan = plan
        self.enable_prefix_caching = enable_prefix_caching
        self.events = events = BlockLog(plan) if log_events else None
        groups = len(plan.groups)
        self.index = PrefixIndex(groups) if events is None else LoggedIndex(groups, events, "GPU")
        self.sampler = sampler
        self.pool = make_pool(plan, self.index, keep_cached=enable_prefix_caching, sampler=sampler)
        self._work = StepWork(plan, list_fresh_pages=list_fresh_pages)
        self._promises = Promises(self.pool)
        rules = tuple(group.rule for group in plan.groups)
        self.adapters = AdapterPages(plan, self.pool, self.index, self._work)
        self._books = books = Books(plan, self.index, self.pool, self._work, self._promises, rules, self.adapters)
        self._leases = leases = Leases(books)
        self._moves = PageMoves(books, leases)
        self._snapshots = Snapshots(books, leases, self._moves, keep=enable_prefix_caching)
        self._forks = Forks()
        self._room = Room(books, leases, self._snapshots, self._moves)
        self._holdings = Holdings(books, self._moves)
        self._admission = Admission(books, leases, self._holdings, self._snapshots, self._forks, self._room, sampler)
        self._growth = Growth(books, self._holdings, self._room)
        self._recent = RecentPrompts()

    # -- admission

    @property
    def version(self) -> int:
        """Changes whenever pages were given back. Until then, a request that didn't fit need not be tried again."""
        return self._room.version

    def refusal(self, tokens: int, adapter: AdapterInfo | None = None) -> Refusal | None:
        """Why a request of `tokens` tokens could not finish even alone with its `adapter`; None if it could."""
        plan, pages = self.plan, 0 if adapter is None else adapter.num_pages
        needed = plan.slabs_needed(tokens, pages)
        if needed <= plan.num_slabs:
            return None
        if len(plan.groups) == 1:
            return Refusal(tokens, plan.groups[0].pages_needed(tokens) + pages, plan.num_pages(0), "pages", pages)
        return Refusal(tokens, needed, plan.num_slabs, "slabs", pages)

    def chain(self, cache_salt: str = "", parent_id: str = "", adapter: AdapterInfo | None = None) -> PrefixChain:
        """The prefix chain of a new request. Requests may share pages if salts, parents and the digests of their adapters are equal."""
        digest = "" if adapter is None else adapter.digest
        seed = chain_seed(cache_salt, "" if self.enable_prefix_caching else parent_id, digest)
        return PrefixChain(seed, self._recent, cache_salt, adapter)

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
        about to take a snapshot that saves this request work, or if a transfer brings pages that do.

        Without `shares` the request neither looks into the index nor publishes. With a `parent_id`, all but the last of the first
        `prompt_len` tokens may come from a sibling (`offer`).
        """
        grant = self._admission.admit(
            slot, chain, tokens, hit_limit, shares=shares, parent_id=parent_id, prompt_len=prompt_len
        )
        if grant is not None and self.events is not None:
            self.events.name(chain, tokens, grant.cached_tokens)
        return grant

    def cached_tokens(self, chain: PrefixChain, tokens: Sequence[int]) -> int:
        """How many of the first `tokens` the index has, but for the last one."""
        return self._admission.cached_tokens(chain, tokens) if self.enable_prefix_caching else 0

    @property
    def awaits(self) -> Awaited:
        """What `admit` refused last for, if not for pages."""
        return self._admission.awaits

    @property
    def hit_counts(self) -> HitCounts:
        """Tokens that were looked up in the prefix index, and those that were there."""
        return self._admission.hit_counts

    def count_query(self, grant: Grant, external: int = 0) -> None:
        """Count a request's first look into the prefix index, in tokens. So many `external` ones are there since they were loaded for it."""
        self._admission.count_query(grant, external)

    def count_on(self, earlier: KVManager) -> None:
        """Go on with the counts of an earlier manager of the same plan."""
        self._admission.hit_counts = earlier.hit_counts
        self.pool.evictions = earlier.pool.evictions
        if self.sampler is not None and earlier.sampler is not None:
            self.sampler.count_on(earlier.sampler)

    # -- siblings

    def offer(self, grant: Grant, parent_id: str, prompt: Sequence[int]) -> None:
        """Let siblings go on from the grant's pages: the plan in the making computes the last token of its `prompt`.

        Siblings are requests with the same `parent_id`. With recurrent state nothing is offered, because the grant's state is
        past the prompt's last token then. Siblings copy a snapshot instead.
        """
        if not self._snapshots.has_state and grant.epoch == self.index.epoch:
            self._forks.offer(prompt_key(parent_id, grant.chain, prompt), grant)

    def must_wait(self, grant: Grant) -> bool:
        """Whether a new grant borrows pages that the plan in the making still fills.

        If so, its first row waits for the next plan.
        """
        return grant.starts == self._forks.plans + 1

    # -- growth

    def grow(self, grant: Grant, start: int, end: int, low: int | None = None) -> int:
        """Provide the pages to compute positions [start, end), and return the end.

        Returns 0 and changes nothing if the pages can't be had now. With drafts in flight the step may begin earlier than `start`, but not
        before `low`: whatever positions it computes then have pages.

        If windows or chunks need more pages for a long step than there are, an earlier end is returned. A plan without
        chunked prefill never returns an earlier end. Pages that no position from `start` on reads are given back.
        """
        return end if end <= grant.capacity else self._growth.grow(grant, start, end, low)

    def publish(self, grant: Grant, tokens: Sequence[int], end: int) -> None:
        """Make the complete pages of positions [0, end) findable.

        The positions must be in a plan, and their `tokens` must be known.
        """
        if end < grant.next_publish:
            return
        if grant.epoch != self.index.epoch:
            grant.next_publish = FOREVER
            return
        grant.chain.cover(tokens, end)
        self._holdings.publish(grant, end)
        if grant.saves:
            self._snapshots.publish(grant, current=True)
        if self.events is not None:
            self.events.name(grant.chain, tokens, end)

    def end_plan(self, rows: Iterable[tuple[Grant, int, int]]) -> list[StateSave]:
        """Call when a plan has all its rows (grant, start, end) and its table writes. Returns the snapshots that the plan takes.

        From now on pages that only this plan's rows read can be handed out, because the next plan runs after this one.
        """
        self._forks.plans += 1
        saves: list[StateSave] = []
        if self._snapshots.has_state:
            saves, unplanned = self._snapshots.take_all(rows, self.index.epoch)
            self._room.version += unplanned > 0
        if self._growth.swollen:
            self._growth.end_plan()
        return saves

    def has_first_token(self, grant: Grant) -> None:
        """The prompt has been computed, and what is to be stored of it is known."""
        self._room.version += self._snapshots.let_go(grant)

    # -- the end

    def release(self, grant: Grant) -> None:
        """Return all pages. Published ones stay findable until evicted, the request's last page first."""
        self._holdings.release(grant)
        self._snapshots.release(grant)
        self._forks.withdraw(grant)
        self._growth.release(grant)
        self._room.version += 1

    def distrust(self, chain: PrefixChain, start: int) -> None:
        """Make this chain unfindable from position `start` on, because what was computed there is wrong."""
        for group, key in self.keys_from(chain, start):
            self._leases.distrust(group, key)
            page = self.index.find(group, key)
            if page is not None and not self.pool.evict(group, page):
                self.index.forget(group, page)

    def keys_from(self, chain: PrefixChain, start: int) -> Iterator[tuple[int, PageKey]]:
        """Groups and keys of all that this chain may have after position `start`, or holds it."""
        for group, rule in enumerate(self._books.rules):
            known = len(chain.hashes) * UNIT_TOKENS
            pages = range(rule.complete(start), rule.complete(known))
            for number in range(start // UNIT_TOKENS, known // UNIT_TOKENS) if rule.snapshots else pages:
                yield group, rule.key(chain, number)

    def reset_prefix_cache(self) -> bool:
        """Forget all content.

        False if pages are in use: these pages stay with their requests, but can't be found any more.
        """
        while self._leases.give_up_kept():
            pass
        self.pool.evict_all()
        self.index.clear()
        self._room.version += 1
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

    # -- adapters

    def end_fill(self, lease: AdapterLease, *, well: bool) -> None:
        """An adapter's pages are filled, or couldn't be."""
        self._room.version += 1
        self.adapters.filled(lease, well=well)

    # -- transfers

    def store(self, keys: Sequence[Sequence[PageKey]], places: Sequence[Sequence[int]]) -> Lease | None:
        """Copy pages to `places` of another memory, beginning with the next plan. Both lists are by group.

        Keys that aren't findable are left out. None if none is, or if running requests need these pages.
        """
        return None if self.waits else self._leases.hold(keys, places)

    def load(self, keys: Sequence[Sequence[PageKey]], places: Sequence[Sequence[int]]) -> Lease | None:
        """Fill pages from `places` of another memory, beginning with the next plan. They can be found when `end_transfer` says so.

        Keys that are findable or on their way are left out. None if none is left, or if running requests need the pages.
        """
        return None if self.waits else self._leases.expect(keys, places)

    def end_transfer(self, number: int, *, well: bool, keep: bool = False) -> list[list[PageKey]]:
        """The transfer neither reads nor writes any more. Returns, by group, the keys whose pages are right now.

        What was loaded isn't evicted if it is to be kept: not before `let_go`, or before a request would have to be preempted.
        """
        self._room.version += 1
        return self._leases.end(number, well=well, keep=keep)

    def keep(self, pages: list[list[int]]) -> Lease:
        """Keep pages that are there or arriving, by group, in the same way."""
        return self._leases.keep(pages)

    def let_go(self, lease: Lease) -> None:
        """The request for which pages were kept has them, or is gone."""
        self._room.version += 1
        self._leases.let_go(lease)

    def quarantine(self, number: int) -> None:
        """The transfer has failed but hasn't ended: until `end_transfer` its pages aren't given back, and nobody waits for them.

        Pages that it loads are found by nobody, then or later.
        """
        self._room.version += 1
        self._leases.quarantine(number)

    @property
    def arriving(self) -> list[dict[PageKey, int]]:
        """By group, the keys that transfers bring, and the pages that they fill."""
        return self._leases.arriving

    def num_kept(self, group: int) -> int:
        """Pages of the group that are kept for requests that wait."""
        return self._leases.num_kept(group)

    def has_room(self, needs: Sequence[int]) -> bool:
        """Whether so many pages can be had that nobody was promised and no running request waits for."""
        return not self.waits and self._promises.kept(needs)

    def pages_of(self, keys: Sequence[Sequence[PageKey]]) -> list[list[int]]:
        """The pages, by group, that have these keys or are to have them, when what fills them has ended."""
        both = zip(keys, self.index.pages, self._leases.arriving, strict=True)
        return [[there[key] if key in there else coming[key] for key in some] for some, there, coming in both]

    def snapshot_waits(self, needs: Sequence[int]) -> bool:
        """Whether a new request waits for `needs`, of which one page is for its prompt's snapshot. Otherwise it does without, or needs more than that."""
        return self._admission.snapshots_wait(needs)

    def num_idle(self, pages: Sequence[Sequence[int]]) -> list[int]:
        """How many of these pages, by group, only the index keeps."""
        return [len(cached.keys() & set(some)) for some, cached in zip(pages, self.pool.cached, strict=True)]

    @property
    def num_transfers(self) -> int:
        """Transfers that haven't ended."""
        return len(self._leases)

    @property
    def transfers_wait(self) -> bool:
        """Whether a transfer waits for a plan to begin with."""
        return self._work.transfers_wait

    def take_transfers(self) -> list[PageTransfer]:
        """Transfers decided since the last call."""
        return self._work.take_transfers()

    # -- moves

    def begin_step(self) -> None:
        """Begin a plan. It may move pages, and moves some at once if pages lie too scattered."""
        room, moves = self._room, self._moves
        room.awaits_transfer = False
        if moves.unfinished:
            room.version += 1
        moves.begin_step()
        if moves.tidy():
            room.version += 1

    @property
    def moves_unfinished(self) -> bool:
        """Whether something didn't fit only because this step may move no more pages. The next step moves more."""
        return self._moves.unfinished

    @property
    def waits(self) -> bool:
        """Whether a running request waits for pages that this step may not move, or that a transfer gives back.

        Nobody else takes pages meanwhile.
        """
        return self._moves.unfinished or self._room.awaits_transfer

    # -- numbers

    @property
    def usage(self) -> float:
        """Share of the page memory's bytes that is in use, 0 to 1."""
        groups = zip(self.plan.groups, self.pool.used, strict=True)
        return sum(group.page_bytes * used for group, used in groups) / self.plan.kv_bytes
