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
from collections.abc import Callable, Iterable, Sized
from itertools import islice
from math import isinf

from pagerunner.memory.leases import Lease
from pagerunner.memory.manager import KVManager
from pagerunner.memory.ownership import HostPagesState, HostState
from pagerunner.memory.prefix import UNIT_TOKENS, PageKey, PrefixChain
from pagerunner.memory.rules import joint_hit
from pagerunner.tiers import bounds, lookup
from pagerunner.tiers.below import Below, lacking
from pagerunner.tiers.books import Ahead, Refused, Transfer, Waiting
from pagerunner.tiers.host import HostTier
from pagerunner.tiers.pieces import Pieces, Wish
from pagerunner.tiers.rates import Rates
from pagerunner.tiers.stats import TierCounts, TierStats
from pagerunner.types import TransferEnd

LOAD_FAILED = 'The pages of its prompt could not be loaded, and kv_load_failure_policy is "fail"; "recompute" computes them instead.'


class Tiering:
    """Decides and books the transfers between a manager's pages and a host tier.

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
        self.host = host
        self.below = below
        self.prompts_only = prompts_only
        self.rates = Rates()
        self.counts = TierCounts()
        self.ended = 0  # transfers
        self.fetching: dict[Waiting, int] = {}
        self._manager = manager
        self._clock = clock
        self._rules = tuple(group.rule for group in manager.plan.groups)
        self._page_bytes = [group.page_bytes for group in manager.plan.groups]
        self._most_stored = int(bounds.STORED_AT_ONCE * manager.plan.kv_bytes)
        self._pieces = Pieces(manager.plan)
        self._coming = [dict[PageKey, int]() for _ in self._rules]  # pages -> the store that brings them to the host
        self._bringing: dict[bytes, set[int]] = {}  # the last hash of a prompt -> numbers of the stores that bring it
        self._wishes: dict[bytes, Wish] = {}
        self._put_by: dict[bytes, Wish] = {}  # until more host memory can be used
        self._refused_at = -1  # the version of the manager's books at which a store found no room
        self._under_way: dict[int, Transfer] = {}
        self._pages_begun = 0  # by loads that begin with the plan in the making
        self._computing = 0  # tokens of all who run
        self._ahead: dict[Waiting, Ahead] = {}
        self._refused: Refused | None = None
        self._failed: list[Waiting] = []
        self._lost: Counter[Waiting] = Counter()  # how often what was set aside had to be given up
        self._seen = (-1, -1)  # the version and the arrivals at the last look along the line
        self._line: set[Waiting] = set()  # of `fetching` those that wait for room in host memory
        self._no_room_at = -1  # how many reads had ended when there was none
        self._come: dict[Waiting, int] = {}  # of `fetching` what has come, until it is looked up

    # -- what is asked for

    @property
    def busy(self) -> bool:
        """Whether something is to be stored or is kept, or a transfer is under way."""
        return bool(self._wishes or self._under_way or self._ahead or self.fetching)

    @property
    def num_transfers(self) -> int:
        """Transfers that haven't ended, and reads that requests wait for."""
        return len(self._under_way) + (0 if self.below is None else self.below.num_reads)

    @property
    def loads(self) -> bool:
        """Whether loads are under way that nobody has given up: room in host memory comes back from them."""
        return any(one.loads and one.lease.state == "arriving" for one in self._under_way.values())

    @property
    def keeps_bus_busy(self) -> bool:
        """Whether the loads under way take long enough for as many as a plan begins beside requests that run."""
        return self.rates.seconds(self._loading()) >= bounds.BUS_SECONDS

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

    def wish(self, chain: PrefixChain, tokens: int, loaded: int = 0) -> None:
        """Store what the device has of a chain's first `tokens` tokens, as soon as there is room. Host memory has the first `loaded` of them: they
        have just come from there.
        """
        units = min(tokens // UNIT_TOKENS, len(chain.hashes))
        known = loaded if self.below is None else 0
        hit = joint_hit(self._rules, self._manager.index.pages, chain, tokens, known) if units else 0
        if not units or (known and hit <= known):
            return
        if len(self._wishes) >= bounds.MOST_WISHES:
            self.counts.stores_skipped += 1
        else:
            self._wishes[chain.hashes[units - 1]] = Wish(chain, tokens, hit)

    def storing(self, chain: PrefixChain, tokens: int) -> bool:
        """Whether what the device has of a chain's first `tokens` tokens waits to be stored, or is on its way."""
        units = min(tokens // UNIT_TOKENS, len(chain.hashes))
        last = chain.hashes[units - 1] if units else b""
        return last in self._wishes or last in self._put_by or last in self._bringing

    def begin(
        self, waiting: Iterable[Waiting], arrivals: int, *, idle: bool, runs: bool = True, computing: int = 0
    ) -> None:
        """Begin what can be begun with the plan in the making. `waiting` are in the order of their turns; `arrivals` counts those that ever came.

        `idle`: no request is there, so what is wished and can't be stored now never can. `runs`: some of them run, and so many tokens are `computing` before a new one's.
        """
        self._pages_begun, self._computing = 0, computing
        self._look_after()
        if self.below is not None:
            self.below.arrivals(self._arrived)
        if self._wishes and self._refused_at != self._manager.version:
            self._begin_stores()
        if idle and not self._under_way:
            self.counts.stores_skipped += len(self._wishes)  # what is put by waits for memory that isn't locked yet
            self._wishes.clear()
        if self._seen != (self._manager.version, arrivals) or self._line and self._room_may_be():
            done = self._look_ahead(waiting, runs)
            self._seen = (self._manager.version, arrivals) if done else (-1, -1)

    def _look_ahead(self, waiting: Iterable[Waiting], runs: bool) -> bool:
        """Look up the first of the line. False if some are left for the next plan, as this one begins loads enough."""
        behind = dict.fromkeys(self._ahead)
        for request in islice(filter(self._to_look_up, waiting), bounds.LOOK_AHEAD):
            behind.pop(request, None)
            if request in self._ahead:
                continue
            if self._pages_begun >= bounds.LOADED_AT_ONCE and (not runs or self.keeps_bus_busy):
                return False
            if not self.look_up(request, behind):
                break
        return True

    def _look_after(self) -> None:
        """Set nothing aside for who is gone. Who has lost it, as a running request needed the pages, is looked up again, but not for ever."""
        for request, ahead in list(self._ahead.items()):
            if request.finished:
                self.let_go(request)
            elif any(lease.state == "ended" for lease in ahead.leases):
                self.let_go(request)
                self._lost[request] += 1
                request.looked_up = self._lost[request] > bounds.MOST_LOST
        for request in [one for one in self._lost if one.grant is not None or one.finished]:
            del self._lost[request]
        for request in [one for one in self._line if one.finished]:
            self._leave_line(request)

    # -- stores

    def _begin_stores(self) -> None:
        """Begin to store as many pages as a plan may. A prompt that has more of them stays first in line."""
        stored, pages = sum(one.num_bytes for one in self._under_way.values() if not one.loads), self._pieces.most
        while self._wishes and stored < self._most_stored and pages > 0:
            last, wish = next(iter(self._wishes.items()))
            wanted, end = self._next_piece(wish, pages)
            begun = self._store(last, wish, wanted, end)
            if begun is None:
                self._refused_at = self._manager.version
                return
            if end and begun >= 0:
                self._wishes[last] = wish._replace(done=end)
            else:
                del self._wishes[last]
            stored += max(begun, 0)
            pages -= max(sum(map(len, wanted)), 1)

    def _next_piece(self, wish: Wish, pages: int) -> tuple[list[list[PageKey]], int]:
        """Keys of the next piece, and the token that it ends at: 0 if that is all that can be stored."""
        held = self._manager.index.pages, self.host.index.pages
        if end := self._pieces.end(wish, pages):
            wanted = self._pieces.keys(wish, [end], last=False)
            needed = zip(wanted, self._pieces.tail(wish), *held, strict=True)
            if not any(lookup.without(lookup.without([*keys, *ends], near), far) for keys, ends, near, far in needed):
                return wanted, end
        hits = lookup.hits_of(self._rules, held[0], wish.chain, wish.tokens)
        if max(hits, default=0) < wish.hit and not lookup.hold(held, self._rules, wish.chain, wish.hit):
            self.counts.stores_skipped += 1  # evicted meanwhile, at least in part
        return self._pieces.keys(wish, reversed(hits)), 0

    def _store(self, last: bytes, wish: Wish, wanted: list[list[PageKey]], end: int) -> int | None:
        """Begin to store a piece of a prompt that ends at token `end`, or all of the rest (0). Returns its bytes, 0 if there is nothing to do, -1 if it
        can't be had now nor later, None if that isn't possible yet.
        """
        host, there = self.host, self._manager.index.pages
        known = list(map(lookup.within, wanted, host.index.pages))
        elsewhere = map(lookup.without, map(lookup.without, wanted, host.index.pages), self._brought(last, wanted))
        if not any(missing := list(map(lookup.within, elsewhere, there))):
            pages = host.held(known)
            if self.below is not None:
                self.below.keep(pages)
            host.touch(pages)
            if not end:
                self._touch_front(wish)
            return 0
        pages = [host.share(group, keys) for group, keys in enumerate(known)]  # used now, so not what makes room
        spans = [rule.hit_span(wish.hit) for rule in self._rules]
        fits = not end or host.pool.could_hold([stop - start for start, stop in spans])
        fresh = host.take([len(keys) for keys in missing]) if fits else None
        if fresh is None:
            if self.below is not None:
                self.below.keep(pages)
            host.release(pages)
            # tried again when more host memory can be used; others go on meanwhile, as it may be that no more ever can
            if host.ready_bytes < host.num_bytes and len(self._put_by) < bounds.MOST_WISHES:
                self._put_by[last] = wish
            else:
                self.counts.stores_skipped += 1
            return -1
        lease = self._manager.store(missing, [host.places(group, some) for group, some in enumerate(fresh)])
        if lease is None:
            host.release([[*some, *new] for some, new in zip(pages, fresh, strict=True)])
            return None
        named = [dict(zip(keys, some, strict=True)) for keys, some in zip(missing, fresh, strict=True)]
        places = [new | dict(zip(keys, some, strict=True)) for new, keys, some in zip(named, known, pages, strict=True)]
        in_order = [[held[key] for key in keys if key in held] for keys, held in zip(wanted, places, strict=True)]
        self._bringing.setdefault(last, set()).add(lease.number)
        return self._begun(lease, in_order, named, loads=False, front=None if end else wish)

    def _touch_front(self, wish: Wish) -> None:
        """All of a prompt is stored. Its front is needed most, and given away last."""
        if wish.done:
            self.host.touch(self.host.held(self._pieces.keys(wish._replace(done=0), [wish.done], last=False)))

    def _brought(self, last: bytes, keys: list[list[PageKey]]) -> list[set[PageKey]]:
        """Which of these keys of a prompt stores under way bring to the host."""
        coming = [brought.keys() & some for brought, some in zip(self._coming, keys, strict=True)]
        for brought, some in zip(self._coming, coming, strict=True):
            if some:
                self._bringing.setdefault(last, set()).update(map(brought.__getitem__, some))
        return coming

    # -- loads

    def provides(self, request: Waiting) -> bool:
        """Whether the room that a waiting request needs is set aside, and its pages are there or on their way."""
        return request in self._ahead

    def fills(self, request: Waiting) -> bool:
        """Whether pages are on their way for a request: into host memory, or from there to the device. It isn't tried before these have come."""
        ahead = self._ahead.get(request)
        return request in self.fetching or ahead is not None and any(one.state == "arriving" for one in ahead.leases)

    def look_up(self, request: Waiting, behind: Iterable[Waiting] | None = None) -> bool:
        """Set aside what a waiting request needs. What the device has of its prompt is kept, what the host has beside is loaded, if that pays, and the
        room of the rest is counted, so that nobody behind it takes it.

        What is set aside for requests `behind` it (None: for all others, those before it too) is given up for it, the last one's first. False if room is lacking all the
        same. The request is to be looked up again then.
        """
        manager, chain, limit = self._manager, request.chain, request.hit_limit()
        behind = [one for one in (self._ahead if behind is None else behind) if one in self._ahead]
        if self._still_refused(request, behind):
            return False
        hit = have = 0
        device = manager.index.pages, manager.arriving
        near, shares = lookup.together(*device), request.shares and limit > 0
        before = self._computing + sum(ahead.tokens for ahead in self._ahead.values())
        if shares:
            chain.cover(request.tokens, len(request.tokens))
            hit = have = joint_hit(self._rules, near, chain, limit)
            if not request.looked_up:
                hit = joint_hit(self._rules, lookup.together(self.host.index.pages, *device), chain, limit)
                if self._fetch(request, hit, limit, before):
                    return True
        wanted = lookup.hit_keys(self._rules, chain, hit)
        there, keys = lookup.split(wanted, near)
        if hit > have and not self.rates.pays(self._bytes_of(keys), self._loading(), before + hit - have):
            hit, wanted = have, lookup.hit_keys(self._rules, chain, have)
            there, keys = lookup.split(wanted, near)
        pages = manager.pages_of(there)
        tokens, cell = len(request.tokens), manager.plan.hit_granularity
        takes_snapshot = request.shares and hit < (tokens - 1) // cell * cell
        more = lookup.pages_beside(self._rules, wanted, tokens, takes_snapshot)
        fits, needs = self._make_room(pages, keys, more, behind)
        # without that snapshot it goes when it is its turn
        if not fits and takes_snapshot and not (self._ahead or manager.snapshot_waits(needs)):
            more = lookup.pages_beside(self._rules, wanted, tokens, False)
            fits, needs = self._make_room(pages, keys, more, behind)
        leases = self._load(request, keys, pages) if fits else None
        if leases is None:
            every = lookup.prompt_keys(self._rules, chain, limit if shares else 0)
            lacks = [some.difference(here).difference(come) for some, here, come in zip(every, *device, strict=True)]
            least = [need - (rule.snapshots and takes_snapshot) for need, rule in zip(needs, self._rules, strict=True)]
            self._refused = Refused(request, manager.version, least, lacks)
            return False
        self._ahead[request], self._refused = Ahead(more, leases, len(request.tokens) - hit), None
        if not request.looked_up:
            self.counts.queries += limit - have
            self.counts.hits += hit - have
            if self.below is not None:
                self.below.hits += min(self._come.pop(request, 0), hit - have)
            request.found = have, hit
        request.looked_up = True
        return True

    def _loading(self) -> int:
        """Bytes that loads under way bring."""
        return sum(transfer.num_bytes for transfer in self._under_way.values() if transfer.loads)

    def _still_refused(self, request: Waiting, behind: list[Waiting]) -> bool:
        """Whether a request that had no room has none now, as little has changed. Hashes and pages aren't looked at: a prompt may have 8,000 of them."""
        refused, manager = self._refused, self._manager
        if refused is None or refused.request is not request:
            return False
        if refused.version != manager.version:
            come = lookup.found(refused.lacks, manager.index.pages, manager.arriving)
            if behind or any(come) or self._fits(refused.needs):
                return False
            refused.version = manager.version
        return True

    def _fits(self, needs: list[int]) -> bool:
        """Whether so many pages can be had beside what is set aside."""
        others = (ahead.needs for ahead in self._ahead.values())
        return self._manager.has_room([sum(column) for column in zip(needs, *others, strict=True)])

    def _make_room(
        self, pages: list[list[int]], keys: list[list[PageKey]], more: list[int], behind: list[Waiting]
    ) -> tuple[bool, list[int]]:
        """Whether pages of the device can be kept and `more` be taken beside those of `keys`, and how many that are in all. What is set aside for others
        stays, but for those `behind`.
        """
        while True:
            idle = self._manager.num_idle(pages)
            needs = [kept + len(some) + rest for kept, some, rest in zip(idle, keys, more, strict=True)]
            if (fits := self._fits(needs)) or not behind:
                return fits, needs
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
            self._pages_begun += sum(map(len, lease.keys))
            self._begun(lease, shared, [], loads=True, request=request, before=before)
        return leases

    def _fetch(self, request: Waiting, could: int, limit: int, before: int) -> bool:
        """Begin to read what the store below has more than host memory, if that pays where so many tokens are computed `before`. A request does so once, and waits for room in its turn."""
        below, chain = self.below, request.chain
        self._leave_line(request)
        if below is None or request.fetched:
            return False
        every, device = lookup.prompt_keys(self._rules, chain, limit), self._manager
        far = lookup.found(every, device.index.pages, device.arriving, self.host.index.pages)
        deep = [ChainMap(dict.fromkeys(held, 0), others) for held, others in zip(far, below.index, strict=True)]
        hit = joint_hit(self._rules, deep, chain, limit)
        if hit <= could:
            return False
        keys, beside = lacking(self._rules, chain, hit, far, self.host.index.pages)
        seconds = below.seconds(keys) + self.rates.seconds(self._bytes_of(keys))  # and to the device
        request.fetched = isinf(seconds) or not self.rates.sooner(seconds, hit - could, before)
        if request.fetched:
            return False
        if (self._line and not self._room_may_be()) or not below.fetch(request, keys, beside):
            if not self._frees() or below.too_large(keys):
                below.give_up()
                return False
            self._line.add(request)
            self._no_room_at, self._refused = below.released, None
        self.fetching[request] = hit - could
        return True

    def _frees(self) -> bool:
        """Whether room in host memory is sure to come back: from reads, or from loads, all of which are given up in time."""
        return self.below is not None and (self.below.frees or self.loads)

    def _room_may_be(self) -> bool:
        """Whether those that wait for room in host memory may be tried again: some has come back, or none will."""
        return self.below is None or self.below.released != self._no_room_at or not self._frees()

    def _to_look_up(self, request: Waiting) -> bool:
        """Whether a request isn't one that waits for pages from below. Of those without room, one after the other may be tried."""
        return request not in self.fetching or request in self._line and self._room_may_be()

    def _leave_line(self, request: Waiting) -> None:
        if request in self._line:
            self._line.remove(request)
            del self.fetching[request]

    def _arrived(self, request: Waiting) -> bool:
        """What was read for a request is in host memory, or won't come. It is kept there until the request has been looked up in its turn."""
        if request in self._line:  # what came before it was sent back would keep its room from it
            return True
        if request in self.fetching:
            self._come[request] = self.fetching.pop(request)
            request.fetched, request.looked_up, self._refused, self._seen = True, False, None, (-1, -1)
        served = request.looked_up or request.grant is not None or request.finished
        if served:
            self._come.pop(request, None)
        return served

    def _bytes_of(self, pages: Iterable[Sized]) -> int:
        return sum(size * len(some) for size, some in zip(self._page_bytes, pages, strict=True))

    def _begun(
        self,
        lease: Lease,
        pages: list[list[int]],
        fresh: list[dict[PageKey, int]],
        *,
        loads: bool,
        request: Waiting | None = None,
        before: int = 0,
        front: Wish | None = None,
    ) -> int:
        num_bytes = self._bytes_of(lease.keys)
        for coming, new in zip(self._coming, fresh, strict=False):  # a load has none
            coming.update(dict.fromkeys(new, lease.number))
        patience = max(bounds.LEAST_PATIENCE, bounds.PATIENCE * self.rates.seconds(num_bytes + before))
        until = self._clock() + patience
        self._under_way[lease.number] = Transfer(lease, loads, pages, fresh, num_bytes, until, request, front)
        return num_bytes

    def take_failed(self) -> list[Waiting]:
        """Requests whose loads have failed since the last call, or take too long: nobody waits for those any more. A plan computes what isn't loaded."""
        now = self._clock()
        for number, transfer in self._under_way.items():
            if transfer.loads and transfer.lease.state == "arriving" and now > transfer.until:
                self._manager.quarantine(number)
                self.counts.given_up += 1
                self._fail(transfer)
        failed, self._failed = self._failed, []
        return failed

    def _fail(self, transfer: Transfer) -> None:
        request = transfer.request
        if request in self._ahead:
            self.let_go(request)
            self._failed.append(request)

    def let_go(self, request: Waiting) -> None:
        """Set nothing aside for a request: it runs, is gone, or comes after others."""
        self._refused = None
        for lease in self._ahead.pop(request, Ahead([], [], 0)).leases:
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
        self._refused_at = self._no_room_at = -1
        self.ended += 1
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
            for key in fresh:
                del self._coming[group][key]
            for key in stood[group]:
                host.index.publish(group, key, fresh[key])
        if self.below is not None and not transfer.loads and end.well:
            self.below.keep(transfer.pages)
        host.release(transfer.pages)
        if transfer.front is not None:
            self._touch_front(transfer.front)
        self._bringing = {last: left for last, some in self._bringing.items() if (left := some - {end.number})}

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
        """What lies in host memory now. An idle engine makes no step that would take what has ended below."""
        self.settle()
        stats, pool = self.stats(), self.host.pool
        return HostState(
            disk=None if stats.disk is None else stats.disk.state(), num_bytes=stats.num_bytes, ready_bytes=stats.ready_bytes, used_bytes=stats.used_bytes,
            loads=stats.loads, stores=stats.stores, queries_total=stats.queries_total, hits_total=stats.hits_total,
            groups=[
                HostPagesState(
                    name=group.name, in_use=pool.used[number], cached=len(pool.cached[number]),
                    arriving=len(self._manager.arriving[number]), kept=self._manager.num_kept(number),
                )
                for number, group in enumerate(self._manager.plan.groups)
            ],
        )  # fmt: skip

    def stats(self) -> TierStats:
        """Counts for the log and the metrics."""
        states = [transfer.lease.state for transfer in self._under_way.values()]
        return self.counts.stats(
            num_bytes=self.host.num_bytes, ready_bytes=self.host.ready_bytes, used_bytes=self.host.used_bytes, loads=states.count("arriving"), stores=states.count("held"),
            quarantined_bytes=sum(self._bytes_of(one.lease.pages) for one in self._under_way.values() if one.lease.state == "quarantined"),
            bytes_per_second=self.rates.bytes_per_second, seconds_per_token=self.rates.seconds_per_token,
            disk=None if self.below is None else self.below.stats(),
        )  # fmt: skip
