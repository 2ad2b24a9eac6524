"""Which pages go to host memory and come back: stores of finished prompts, loads for requests that wait.

Prompts are stored as hits. Of a prompt, those pages go that the same prompt would find on the device now: all pages of full
attention, the last window of a window, the snapshot of a recurrence. They are taken and given up as one set: one transfer
brings them, and whoever uses one page uses all of them.

A request that waits is looked up once, in the device's index and the host's together. If the host makes its hit longer, and
loading is faster than computing, the missing pages are loaded while the request waits. It isn't looked up again until it was
preempted. So what requests bring can't push each other out for ever. Example: 8,192 tokens of an 8B model are 1.2 GB: 22 ms
over a bus of 55 GB/s, where computing takes 220.
"""

from __future__ import annotations

import time
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from math import isinf
from typing import NamedTuple, Protocol

from pagerunner.memory.grant import Grant
from pagerunner.memory.leases import Lease
from pagerunner.memory.manager import KVManager
from pagerunner.memory.ownership import DiskState, HostPagesState, HostState
from pagerunner.memory.prefix import UNIT_TOKENS, PageKey, PrefixChain
from pagerunner.memory.rules import joint_hit
from pagerunner.tiers.below import Below, lacking
from pagerunner.tiers.host import HostTier
from pagerunner.tiers.lookup import found, hit_keys, prompt_keys, within, without
from pagerunner.tiers.rates import Rates
from pagerunner.tiers.stats import TierCounts, TierStats
from pagerunner.types import TransferEnd

MOST_WISHES = 256
"""Prompts that wait to be stored. One more is passed over, and counted."""
LOOK_AHEAD = 32
"""Requests of the waiting line that are looked up before it is their turn."""
MOST_SNAPSHOTS = 4
"""Of a prompt with recurrent state, the prefixes that are stored: its end, and where others branched off."""
STORED_AT_ONCE = 0.5
"""The share of the page memory that stores may keep from being evicted. A store ends three or four steps after its prompt, if two steps are in flight: with
pages for seven prompts and one computed in each step, a quarter would store two of three.
"""
MOST_LOST = 3
"""So often what was set aside for a request may be taken by running ones before it is computed."""
PATIENCE = 10.0
LEAST_PATIENCE = 2.0
"""A load that takes PATIENCE times as long as expected, and at least so many seconds, is given up."""


class Waiting(Protocol):
    """What the tier asks of a request that waits. `looked_up`: it needs no look into the tier any more; `fetched`: none below it."""

    chain: PrefixChain
    tokens: list[int]
    shares: bool
    grant: Grant | None
    finished: bool
    looked_up: bool
    fetched: bool

    def hit_limit(self) -> int:
        """How many leading tokens may come from pages that are there."""


class Wish(NamedTuple):
    """The first `tokens` of a prompt are to be stored. Of these the device had `hit` when it was wished."""

    chain: PrefixChain
    tokens: int
    hit: int


@dataclass(slots=True, eq=False)
class Transfer:
    """A transfer under way: its pages of host memory, by group, in the order of tokens. `fresh` of them get keys when it has ended well."""

    lease: Lease
    loads: bool
    pages: list[list[int]]
    fresh: list[dict[PageKey, int]]
    num_bytes: int
    until: float
    request: Waiting | None = None


@dataclass(slots=True)
class Ahead:
    """What is set aside for a request that waits: what is loaded and kept, and the pages by group that it needs beside when it is its turn."""

    needs: list[int]
    leases: list[Lease]


class Tiering:
    """Decides and books the transfers between a manager's pages and a host tier. `failed` has requests whose load went wrong.

    `fetching` are those that wait for pages from `below`, a store below host memory, with their tokens. `prompts_only`: what requests have generated is stored only when they are preempted.
    """

    def __init__(
        self,
        manager: KVManager,
        host: HostTier,
        below: Below[Waiting] | None = None,
        *,
        prompts_only: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.host, self.prompts_only = host, prompts_only
        self.rates, self.counts = Rates(), TierCounts()
        self.failed: list[Waiting] = []
        self.below, self.fetching = below, dict[Waiting, int]()
        self._manager, self._clock = manager, clock
        groups = manager.plan.groups
        self._rules = tuple(group.rule for group in groups)
        self._page_bytes = [group.page_bytes for group in groups]
        self._has_state = any(rule.snapshots for rule in self._rules)
        self._most_stored = int(STORED_AT_ONCE * manager.plan.kv_bytes)
        self._wishes: dict[bytes, Wish] = {}
        self._put_by: dict[bytes, Wish] = {}
        self._under_way: dict[int, Transfer] = {}
        self._ahead: dict[Waiting, Ahead] = {}
        self._lost: Counter[Waiting] = Counter()
        self._seen: tuple[int, int] = (-1, -1)
        self._refused: tuple[Waiting | None, int] = (None, -1)
        self._refused_at = -1

    # -- what is asked for

    @property
    def busy(self) -> bool:
        """Whether something is to be stored or is kept, or a transfer is under way."""
        return bool(self._wishes or self._under_way or self._ahead or self.fetching)

    @property
    def num_transfers(self) -> int:
        """Transfers that haven't ended, and reads that requests wait for."""
        return len(self._under_way) + (0 if self.below is None else self.below.num_reads)

    def settle(self) -> None:
        """Take what has come from below."""
        if self.below is not None:
            self.below.settle()

    def grow(self, ready_bytes: int) -> None:
        """So many bytes of host memory can be used by now."""
        before = self.host.ready_bytes
        self.host.grow(ready_bytes)
        if self.host.ready_bytes > before:
            self._refused_at = -1
            self._wishes = self._put_by | self._wishes
            self._put_by = {}

    def wish(self, chain: PrefixChain, tokens: int) -> None:
        """Store what the device has of a chain's first `tokens` tokens, as soon as there is room."""
        units = min(tokens // UNIT_TOKENS, len(chain.hashes))
        if not units:
            return
        if len(self._wishes) >= MOST_WISHES:
            self.counts.stores_skipped += 1
        else:
            hit = joint_hit(self._rules, self._manager.index.pages, chain, tokens)
            self._wishes[chain.hashes[units - 1]] = Wish(chain, tokens, hit)

    def storing(self, chain: PrefixChain, tokens: int) -> bool:
        """Whether what the device has of a chain's first `tokens` tokens waits to be stored, or is on its way."""
        units = min(tokens // UNIT_TOKENS, len(chain.hashes))
        if units and chain.hashes[units - 1] in self._wishes:
            return True
        stores = [transfer.fresh for transfer in self._under_way.values() if not transfer.loads]
        hit = joint_hit(self._rules, self._manager.index.pages, chain, tokens) if stores else 0
        return any(
            not fresh[group].keys().isdisjoint(rule.keys(chain, *rule.hit_span(hit)))
            for group, rule in enumerate(self._rules)
            for fresh in stores
        )

    def begin(self, waiting: Iterable[Waiting], arrivals: int, *, idle: bool) -> None:
        """Begin what can be begun with the plan in the making. `waiting` are in the order of their turns; `arrivals` counts those that ever came.

        `idle`: no request is there, so what can't be stored now never can.
        """
        self._give_up(self._clock())
        self._look_after()
        if self.below is not None:
            self.below.arrivals(self._arrived)
        if self._wishes and self._refused_at != self._manager.version:
            self._begin_stores()
        if idle and not self._under_way:
            self.counts.stores_skipped += len(self._wishes) + len(self._put_by)
            self._wishes.clear()
            self._put_by.clear()
        if self._seen != (self._manager.version, arrivals):
            behind = dict.fromkeys(self._ahead)
            for request in islice((one for one in waiting if one not in self.fetching), LOOK_AHEAD):
                behind.pop(request, None)
                if request not in self._ahead and not self.look_up(request, behind):
                    break
            self._seen = (self._manager.version, arrivals)

    def _look_after(self) -> None:
        """Set nothing aside for who is gone. Who has lost it, as a running request needed the pages, is looked up again, but not for ever."""
        for request, ahead in list(self._ahead.items()):
            if request.finished:
                self.let_go(request)
            elif any(lease.state == "ended" for lease in ahead.leases):
                self.let_go(request)
                self._lost[request] += 1
                request.looked_up = self._lost[request] > MOST_LOST
        for request in [one for one in self._lost if one.grant is not None or one.finished]:
            del self._lost[request]

    # -- stores

    def _begin_stores(self) -> None:
        stored = sum(transfer.num_bytes for transfer in self._under_way.values() if not transfer.loads)
        while self._wishes and stored < self._most_stored:
            last, wish = next(iter(self._wishes.items()))
            begun = self._store(last, wish)
            if begun is None:
                self._refused_at = self._manager.version
                return
            stored += begun
            del self._wishes[last]

    def _store(self, last: bytes, wish: Wish) -> int | None:
        """Begin to store a prompt. Returns its bytes, 0 if there is nothing to do, None if that isn't possible yet."""
        host, there, chain = self.host, self._manager.index.pages, wish.chain
        hits = self._hits(chain, wish.tokens)
        if max(hits, default=0) < wish.hit and not self._has(chain, wish.hit):
            self.counts.stores_skipped += 1  # evicted meanwhile, at least in part
            wish = wish._replace(hit=max(hits, default=0))
        wanted: list[dict[PageKey, None]] = [{} for _ in self._rules]
        for hit in reversed(hits):
            for group, rule in enumerate(self._rules):
                wanted[group].update(dict.fromkeys(rule.keys(chain, *rule.hit_span(hit))))
        known = [[key for key in keys if key in held] for keys, held in zip(wanted, host.index.pages, strict=True)]
        coming = self._coming()
        missing = [
            [key for key in keys if not (key in held or key in others) and key in found]
            for keys, held, others, found in zip(wanted, host.index.pages, coming, there, strict=True)
        ]
        pages = [host.share(group, keys) for group, keys in enumerate(known)]  # used now, so not what makes room
        fresh = host.take([len(keys) for keys in missing]) if any(missing) else None
        if fresh is None:
            if self.below is not None:
                self.below.keep(pages)
            host.release(pages)
            if any(missing) and host.ready_bytes < host.num_bytes:
                self._put_off(last, wish)
            else:
                self.counts.stores_skipped += any(missing)
            return 0
        lease = self._manager.store(missing, [host.places(group, some) for group, some in enumerate(fresh)])
        if lease is None:
            host.release([[*some, *new] for some, new in zip(pages, fresh, strict=True)])
            return None
        named = [dict(zip(keys, some, strict=True)) for keys, some in zip(missing, fresh, strict=True)]
        in_order = [
            [held[key] if key in held else new[key] for key in keys if key in held or key in new]
            for keys, held, new in zip(wanted, host.index.pages, named, strict=True)
        ]
        return self._begun(lease, in_order, named, loads=False)

    def _has(self, chain: PrefixChain, hit: int) -> bool:
        """Whether host memory and the device have so many tokens together."""
        keys = prompt_keys(self._rules, chain, hit)
        return joint_hit(self._rules, found(keys, self.host.index.pages, self._manager.index.pages), chain, hit) == hit

    def _put_off(self, last: bytes, wish: Wish) -> None:
        """Try again to store this when more host memory can be used. Others go on meanwhile, as it may be that no more ever can."""
        if len(self._put_by) >= MOST_WISHES:
            self.counts.stores_skipped += 1
        else:
            self._put_by[last] = wish

    def _hits(self, chain: PrefixChain, tokens: int) -> list[int]:
        """Lengths of prefixes that the device can supply, longest first: one, or those of the last snapshots."""
        found: list[int] = []
        limit = tokens
        while len(found) < (MOST_SNAPSHOTS if self._has_state else 1):
            limit = joint_hit(self._rules, self._manager.index.pages, chain, limit)
            if not limit:
                break
            found.append(limit)
            limit -= 1
        return found

    def _coming(self) -> list[set[PageKey]]:
        """Keys that stores under way bring to the host."""
        stores = [transfer.fresh for transfer in self._under_way.values() if not transfer.loads]
        return [set().union(*(fresh[group] for fresh in stores)) for group in range(len(self._rules))]

    # -- loads

    def provides(self, request: Waiting) -> bool:
        """Whether the room that a waiting request needs is set aside, and its pages are there or on their way."""
        return request in self._ahead

    def look_up(self, request: Waiting, behind: Iterable[Waiting] | None = None) -> bool:
        """Set aside what a waiting request needs. What the device has of its prompt is kept, what the host has beside is loaded, if that pays, and the
        room of the rest is counted, so that nobody behind it takes it.

        What is set aside for requests `behind` it (None: for all others) is given up for it, the last one's first. False if room is lacking all the
        same. The request is to be looked up again then.
        """
        manager, chain, limit = self._manager, request.chain, request.hit_limit()
        if self._refused == (request, manager.version):
            return False
        hit = have = 0
        near: list[set[PageKey]] = [set() for _ in self._rules]
        if request.shares and limit > 0:
            chain.cover(request.tokens, len(request.tokens))
            every = prompt_keys(self._rules, chain, limit)
            near = found(every, manager.index.pages, manager.arriving)
            hit = have = joint_hit(self._rules, near, chain, limit)
            if not request.looked_up:
                far = [here | some for here, some in zip(near, found(every, self.host.index.pages), strict=True)]
                could = joint_hit(self._rules, far, chain, limit)
                if self._fetch(request, far, could, limit):
                    return True
                hit = could if could > have and self._pays(chain, near, have, could) else have
        wanted = hit_keys(self._rules, chain, hit)
        keys, pages = list(map(without, wanted, near)), manager.pages_of(list(map(within, wanted, near)))
        more = [
            max(rule.pages_needed(len(request.tokens)) - (0 if rule.snapshots else len(some)), 0)
            for rule, some in zip(self._rules, wanted, strict=True)
        ]
        fits = self._make_room(pages, [len(some) for some in keys], more, self._ahead if behind is None else behind)
        leases = self._load(request, keys, pages) if fits else None
        if leases is None:
            self._refused = request, manager.version
            return False
        self._ahead[request] = Ahead(more, leases)
        if not request.looked_up:
            self.counts.queries += limit - have
            self.counts.hits += hit - have
        request.looked_up = True
        return True

    def _pays(self, chain: PrefixChain, near: list[set[PageKey]], have: int, could: int) -> bool:
        """Whether what a hit of `could` tokens lacks on the device is there sooner than computed."""
        keys = map(without, hit_keys(self._rules, chain, could), near)
        return self.rates.pays(self._bytes_of(keys), self._loading(), could - have)

    def _loading(self) -> int:
        """Bytes that loads under way bring."""
        return sum(transfer.num_bytes for transfer in self._under_way.values() if transfer.loads)

    def _make_room(self, pages: list[list[int]], loaded: list[int], more: list[int], behind: Iterable[Waiting]) -> bool:
        """Whether pages of the device can be kept, so many loaded, and so many more taken, beside what is set aside for others."""
        manager = self._manager
        behind = [one for one in behind if one in self._ahead]
        while True:
            needs = [idle + new + rest for idle, new, rest in zip(manager.num_idle(pages), loaded, more, strict=True)]
            others = (ahead.needs for ahead in self._ahead.values())
            if manager.has_room([sum(column) for column in zip(needs, *others, strict=True)]):
                return True
            if not behind:
                return False
            self.let_go(last := behind.pop())
            last.looked_up = False

    def _load(self, request: Waiting, keys: list[list[PageKey]], pages: list[list[int]]) -> list[Lease] | None:
        """Keep pages of the device, and begin to load what has these keys."""
        manager, before = self._manager, self._loading()
        leases = [manager.keep(pages)] if any(pages) else []
        if any(keys):
            shared = [self.host.share(group, some) for group, some in enumerate(keys)]
            places = [self.host.places(group, some) for group, some in enumerate(shared)]
            lease = manager.load(keys, places)
            if lease is None:
                self.host.release(shared)
                for kept in leases:
                    manager.let_go(kept)
                return None
            leases.append(lease)
            self._begun(lease, shared, [], loads=True, request=request, before=before)
        return leases

    def _fetch(self, request: Waiting, far: list[set[PageKey]], could: int, limit: int) -> bool:
        """Begin to read what the store below has more than host memory, if that pays. A request does so once."""
        below, chain, rate = self.below, request.chain, self.rates.seconds_per_token
        if below is None or request.fetched:
            return False
        deep = [ChainMap(dict.fromkeys(held, 0), others) for held, others in zip(far, below.index, strict=True)]
        hit = joint_hit(self._rules, deep, chain, limit)
        if hit <= could:
            return False
        keys, beside = lacking(self._rules, chain, hit, far, self.host.index.pages)
        seconds = below.seconds(keys) + self.rates.seconds(self._bytes_of(keys))  # and to the device
        if isinf(seconds) or (rate and seconds >= rate * (hit - could)):
            return False
        if not below.fetch(request, keys, beside):
            return False
        self.fetching[request] = hit - could
        return True

    def _arrived(self, request: Waiting) -> bool:
        """What was read for a request is in host memory, or won't come. It is looked up once, now."""
        tokens, before = self.fetching.pop(request, 0), self.counts.hits
        request.fetched, request.looked_up = True, False
        if request.grant is None and not request.finished:
            self.look_up(request)
        if self.below is not None:
            self.below.hits += min(tokens, self.counts.hits - before)
        return True

    def _bytes_of(self, pages: Iterable[Iterable[object]]) -> int:
        return sum(size * len(list(some)) for size, some in zip(self._page_bytes, pages, strict=True))

    def _begun(
        self,
        lease: Lease,
        pages: list[list[int]],
        fresh: list[dict[PageKey, int]],
        *,
        loads: bool,
        request: Waiting | None = None,
        before: int = 0,
    ) -> int:
        num_bytes = self._bytes_of(lease.keys)
        patience = max(LEAST_PATIENCE, PATIENCE * self.rates.seconds(num_bytes + before))
        until = self._clock() + patience
        self._under_way[lease.number] = Transfer(lease, loads, pages, fresh, num_bytes, until, request)
        return num_bytes

    def _give_up(self, now: float) -> None:
        """Nobody waits any more for loads that take too long."""
        for number, transfer in self._under_way.items():
            if transfer.loads and transfer.lease.state == "arriving" and now > transfer.until:
                self._manager.quarantine(number)
                self.counts.given_up += 1
                self._fail(transfer)

    def _fail(self, transfer: Transfer) -> None:
        request = transfer.request
        if request in self._ahead:
            self.let_go(request)
            self.failed.append(request)

    def let_go(self, request: Waiting) -> None:
        """Set nothing aside for a request: it runs, is gone, or comes after others."""
        for lease in self._ahead.pop(request, Ahead([], [])).leases:
            if lease.state == "kept":
                self._manager.let_go(lease)

    def let_all_go(self) -> None:
        """Keep nothing for requests that wait."""
        for request in list(self._ahead):
            self.let_go(request)
        self._seen = (-1, -1)

    # -- ends

    def end(self, end: TransferEnd) -> None:
        """A transfer has ended on all ranks."""
        transfer = self._under_way.pop(end.number)
        doubtful = transfer.lease.state == "quarantined"
        ahead = None if transfer.request is None else self._ahead.get(transfer.request)
        keep = ahead is not None and transfer.lease in ahead.leases  # not one that it was let go of before
        stood = self._manager.end_transfer(end.number, well=end.well, keep=keep)
        self._refused_at = -1
        host, counts = self.host, self.counts
        if end.well:
            self.rates.moved(transfer.num_bytes, end.seconds)
            counts.moved(transfer.loads, transfer.num_bytes, end.seconds)
        else:
            counts.failed += 1
        if transfer.loads and not end.well:  # what it was loaded from isn't to be trusted either
            for group, keys in enumerate(transfer.lease.keys):
                for key in keys:
                    host.forget(group, key)
            if not doubtful:
                self._fail(transfer)
        for group, fresh in enumerate(transfer.fresh):
            for key in stood[group]:
                host.index.publish(group, key, fresh[key])
        if self.below is not None and not transfer.loads and end.well:
            self.below.keep(transfer.pages)
        host.release(transfer.pages)

    def distrust(self, chain: PrefixChain, start: int) -> None:
        """What was computed of this chain from position `start` on is wrong."""
        for group, key in self._manager.keys_from(chain, start):
            self.host.forget(group, key)
            if self.below is not None:
                self.below.distrust(group, key)

    def count_on(self, earlier: Tiering) -> None:
        """Go on with the counts and rates of an earlier one, of which nothing else stays."""
        self.counts, self.rates = earlier.counts, earlier.rates
        if self.below is not None and earlier.below is not None:
            earlier.below.drain()
            self.below.count_on(earlier.below)
        self.host.grow(earlier.host.ready_bytes)

    def clear(self, *, new_weights: bool = False) -> None:
        """Forget everything. What is under way ends, and counts for nothing. With `new_weights` nothing comes from below until `attach`."""
        self.host.clear()
        if self.below is not None:
            (self.below.detach if new_weights else self.below.clear)()
        self._wishes.clear()
        self._put_by.clear()
        self.let_all_go()

    def attach(self) -> None:
        """The weights are known again."""
        if self.below is not None:
            self.below.attach()

    def memory_state(self) -> HostState:
        """What lies in host memory now."""
        stats, pool = self.stats(), self.host.pool
        disk = stats.disk
        return HostState(
            disk=None
            if disk is None
            else DiskState(pages=disk.pages, num_bytes=disk.bytes, waiting=disk.waiting, read_only=disk.read_only),
            num_bytes=stats.num_bytes,
            ready_bytes=stats.ready_bytes,
            used_bytes=stats.used_bytes,
            loads=stats.loads,
            stores=stats.stores,
            groups=[
                HostPagesState(
                    name=group.name,
                    in_use=pool.used[number],
                    cached=len(pool.cached[number]),
                    arriving=len(self._manager.arriving[number]),
                    kept=self._manager.num_kept(number),
                )
                for number, group in enumerate(self._manager.plan.groups)
            ],
        )

    def stats(self) -> TierStats:
        """Counts for the log and the metrics."""
        states = [transfer.lease.state for transfer in self._under_way.values()]
        return self.counts.stats(
            num_bytes=self.host.num_bytes,
            ready_bytes=self.host.ready_bytes,
            used_bytes=self.host.used_bytes,
            loads=states.count("arriving"),
            stores=states.count("held"),
            quarantined_bytes=sum(
                self._bytes_of(one.lease.pages) for one in self._under_way.values() if one.lease.state == "quarantined"
            ),
            bytes_per_second=self.rates.bytes_per_second,
            seconds_per_token=self.rates.seconds_per_token,
            disk=None if self.below is None else self.below.stats(),
        )
