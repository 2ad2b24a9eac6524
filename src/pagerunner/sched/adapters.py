"""Adapters in the scheduler's books: which content a name stands for, which is in which slot of the device's table, and who waits for a slot.

A slot says where an adapter's blocks lie; the pages are the memory manager's (`memory/adapters.py`). A slot is counted by the sequences that use it, from the time when it
is given to a sequence until that ends. So no other adapter comes into it meanwhile, also while the sequence waits for pages. A slot that nobody uses keeps its adapter until another one
needs the room, the one unused for longest first. A name may get another content while sequences run: they go on with the content that it had when they came.

A sequence goes three steps with its adapter. First it is given a slot. Then host memory must have a copy, unless all pages are there: without, the directory is
read. Until then it is *held*: it stands beside the line, and others go on. Last, it is admitted, with the pages of its adapter. If some of these are missing they are filled, and its first row
waits for that. Example: a copy of 87 MB takes 2 ms. A directory takes 35 ms or an hour, and meanwhile the sequence has no pages at all.

Without a limit, those whose adapters are in slots could pass one that waits for a slot for ever. So the first of these is passed `MOST_PASSED` times; then others with adapters are held
too, until it has a slot. Sequences without an adapter need none and are never held. Example: 8 slots have 8 adapters with endless requests, and a
request for a ninth comes. After 64 more requests for the eight, one of the slots runs out of requests and is the ninth's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from pagerunner.errors import InvalidRequestError
from pagerunner.memory.ownership import AdapterPagesState, AdaptersState
from pagerunner.types.checks import show
from pagerunner.types.lora import AdapterEnd, AdapterFill, AdapterInfo, AdapterMove, LoraStats

if TYPE_CHECKING:
    from pagerunner.memory.adapters import AdapterLease
    from pagerunner.memory.grant import Grant
    from pagerunner.memory.manager import KVManager
    from pagerunner.sched.request import Sequence

MOST_PASSED = 64
CHANGED = (
    "The adapter in {path} has changed since it was loaded; load it again (load_inplace=true). "
    "Of those that aren't on the device, host memory keeps max_cpu_loras."
)


@dataclass(slots=True)
class _Slot:
    digest: str = ""
    path: str = ""
    users: dict[str, Sequence] = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)  # directories that haven't its adapter any more
    reading: int = 0  # the number of the read that is under way
    filling: int = 0  # or of the fill
    lease: AdapterLease | None = None  # that it fills
    used: int = 0  # when it was used last
    pages: list[int] = field(default_factory=list)  # where the device's table has its adapter


class Adapters:
    """The books of one engine's adapters. They outlive schedulers, which may be made again (`EngineCore.recover`)."""

    manager: KVManager
    """Has the pages. A scheduler sets it."""

    def __init__(self, max_loras: int) -> None:
        self.names: dict[str, AdapterInfo] = {}
        self.held: dict[str, Sequence] = {}
        self.order: Callable[[Sequence], Any] = lambda sequence: sequence.key[2]
        self.copies: Collection[str] = ()
        """The digests of which host memory has copies."""
        self._slots = [_Slot() for _ in range(max_loras)]
        self._place: dict[str, int] = {}  # slots by digest
        self._unfinished = Counter[str]()  # sequences by digest
        self._reads: list[tuple[int, str]] = []
        self._fills: list[AdapterFill] = []
        self._first: Sequence | None = None  # the first of those that wait for a slot
        self._changed = False
        self._numbers, self._uses = count(1), count(1)
        self._num_hits = self._num_fills = self._fill_bytes = 0
        self._failed: list[tuple[Sequence, str]] = []

    # -- names

    def number(self) -> int:
        """A new number for work on adapters."""
        return next(self._numbers)

    def of(self, name: str) -> AdapterInfo:
        """What a name stands for. Raises InvalidRequestError."""
        found = self.names.get(name)
        if found is None:
            raise InvalidRequestError(
                f"There is no adapter {show(name)}; load it first (/v1/load_lora_adapter, --lora-modules, or LLM's lora_request).",
                "lora_request",
            )
        return found

    def came(self, sequence: Sequence) -> None:
        """The sequence is unfinished from now on, until it is let go."""
        if sequence.adapter is not None:
            self._unfinished[sequence.adapter.digest] += 1

    def without_name(self) -> set[str]:
        """Digests of unfinished sequences that no name stands for any more. What has them may be nowhere but in memory."""
        return self._unfinished.keys() - {info.digest for info in self.names.values()}

    # -- slots

    def take(self, sequence: Sequence) -> bool:
        """Whether the sequence, whose turn it is, may be admitted now. Otherwise it is held, and its caller takes it out of the line."""
        if sequence.adapter is None or self._gives(sequence):
            return True
        self.held[sequence.request_id] = sequence
        return False

    def settle(self) -> list[Sequence]:
        """Sequences that were held and go back to the line, in their order."""
        if not self._changed:
            return []
        self._changed = False
        self._first, free = None, []
        for sequence in sorted(self.held.values(), key=self.order):
            if self._gives(sequence):
                free.append(sequence)
        for sequence in free:
            del self.held[sequence.request_id]
        return free

    def let_go(self, sequence: Sequence) -> None:
        """The sequence has ended: it uses no slot."""
        self.held.pop(sequence.request_id, None)
        if sequence.adapter is not None:
            left = self._unfinished.pop(sequence.adapter.digest)
            if left > 1:
                self._unfinished[sequence.adapter.digest] = left - 1
        if sequence is self._first:
            self._first, self._changed = None, True
        if sequence.adapter_slot >= 0:
            slot = self._slots[sequence.adapter_slot]
            del slot.users[sequence.request_id]
            slot.used = next(self._uses)
            self._changed = self._changed or not slot.users
            sequence.adapter_slot = -1

    # -- pages

    def must_wait(self, sequence: Sequence, grant: Grant) -> bool:
        """Whether a sequence that is admitted with this grant has to wait until its adapter is filled: pages are missing, or the device doesn't know how blocks lie in them."""
        lease = grant.adapter
        return lease is not None and (
            lease.filling or bool(lease.missing) or not self._slots[sequence.adapter_slot].pages
        )

    def admitted(self, sequence: Sequence, grant: Grant) -> None:
        """The sequence runs with the pages of its adapter, which are filled if they have to be."""
        slot, lease = self._slots[sequence.adapter_slot], grant.adapter
        if lease is None:
            return
        self._num_hits += not lease.missing or lease.filling
        sequence.awaits_adapter = self.must_wait(sequence, grant)
        if lease.filling:
            return
        if not sequence.awaits_adapter:
            if slot.pages != lease.pages:
                self.manager.adapters.moving[lease] = None
            return
        slot.filling, slot.lease = self.number(), lease
        offsets = self.manager.adapters.fill(lease)
        slot.pages = list(lease.pages)
        self._fills.append(AdapterFill(slot.filling, sequence.adapter_slot, lease.digest, offsets, list(lease.missing)))
        self._num_fills += bool(lease.missing)

    def take_moves(self) -> list[AdapterMove]:
        """What the device's table is to be told of pages that this plan moves."""
        moves = []
        for lease in self.manager.adapters.take_moved():
            place = self._place.get(lease.digest, -1)
            slot = self._slots[place]
            if place >= 0 and not slot.filling and slot.pages and slot.pages != lease.pages:
                slot.pages = list(lease.pages)
                moves.append(AdapterMove(place, self.manager.adapters.offsets(lease)))
        return moves

    def take_reads(self) -> list[tuple[int, str]]:
        """Numbers and directories of reads that are to begin."""
        reads, self._reads = self._reads, []
        return reads

    def to_fill(self) -> set[str]:
        """Digests whose slots sequences have that don't run: they may have to be filled."""
        leased = self.manager.adapters.is_leased
        return {slot.digest for slot in self._slots if slot.users and not leased(slot.digest)}

    def in_use(self) -> set[str]:
        """Digests whose slots sequences have."""
        return {slot.digest for slot in self._slots if slot.users}

    def take_fills(self) -> list[AdapterFill]:
        """Fills that are to begin now, behind the steps that were planned so far."""
        fills, self._fills = self._fills, []
        return fills

    def take_failed(self) -> list[tuple[Sequence, str]]:
        """Sequences whose adapters can't be had, and why."""
        failed, self._failed = self._failed, []
        return failed

    def ended(self, end: AdapterEnd) -> bool:
        """A read or a fill has ended. False if the number is of none that anybody waits for."""
        slot = next((one for one in self._slots if end.number in (one.reading, one.filling)), None)
        if slot is None:
            return False
        error, self._changed = end.error, True
        if slot.lease is not None:
            self._end_fill(slot, slot.lease, well=not error)
        else:
            if not error and end.digest != slot.digest:
                error = CHANGED.format(path=slot.path)
            slot.tried = slot.tried | {slot.path} if error else set()
            if error and self._read(slot):
                return True
        slot.reading = slot.filling = 0
        if error:
            self._failed += [(one, error) for one in slot.users.values()]
            del self._place[slot.digest]
            slot.digest, slot.pages = "", []
        return True

    def _end_fill(self, slot: _Slot, lease: AdapterLease, *, well: bool) -> None:
        pages = self.manager.adapters
        self._fill_bytes += well * len(lease.missing) * self.manager.plan.groups[pages.group].page_bytes
        self.manager.end_fill(lease, well=well)
        slot.lease = None
        for one in slot.users.values():
            one.awaits_adapter = False

    @property
    def busy(self) -> bool:
        """Whether any read or fill is under way, or is to begin."""
        return any(slot.reading or slot.filling for slot in self._slots)

    def lose_all(self, sequences: Iterable[Sequence]) -> None:
        """The device's copies are gone, and no step runs. These sequences are all there are."""
        for sequence in sequences:
            sequence.adapter_slot = -1
        self.manager.adapters.lose()
        self._forget_slots()

    def restart(self, manager: KVManager) -> None:
        """Another scheduler begins, without sequences, and with another manager, which has no pages of adapters."""
        self.manager = manager
        self.held.clear()
        self._failed.clear()
        self._unfinished.clear()
        self._forget_slots()

    def _forget_slots(self) -> None:
        self._slots = [_Slot() for _ in self._slots]
        self._place.clear()
        self._reads.clear()
        self._fills.clear()
        self._first, self._changed = None, True

    def stats(self, sequences: Iterable[Sequence]) -> LoraStats:
        """Who runs and waits."""
        running: set[str] = set()
        waiting: set[str] = set()
        for one in sequences:
            if one.adapter is not None:
                (waiting if one.grant is None else running).add(one.adapter.name)
        pages = self.manager.adapters
        page_bytes, counts = self.manager.plan.groups[pages.group].page_bytes, pages.counts()
        return LoraStats(
            max_loras=len(self._slots),
            running=sorted(running),
            waiting=sorted(waiting),
            registered=len(self.names),
            resident=len({one.digest for one in self.names.values() if counts.get(one.digest) == one.num_pages}),
            num_bytes=pages.num_there * page_bytes,
            used_bytes=pages.num_used * page_bytes,
            hits_total=self._num_hits,
            fills_total=self._num_fills,
            fill_bytes_total=self._fill_bytes,
        )

    def memory_state(self) -> AdaptersState:
        """What is on the device now, and which slots it has."""
        names: dict[str, list[str]] = {}
        for name, info in self.names.items():
            names.setdefault(info.digest, []).append(name)
        pages = self.manager.adapters
        page_bytes = self.manager.plan.groups[pages.group].page_bytes
        there = [
            AdapterPagesState(
                digest=digest,
                names=names.get(digest, []),
                slot=(place := self._place.get(digest, -1)),
                requests=len(self._slots[place].users) if place >= 0 else 0,
                num_bytes=count * page_bytes,
                used=pages.is_leased(digest),
                arriving=place >= 0 and self._slots[place].filling > 0,
            )
            for digest, count in sorted(pages.counts().items())
        ]
        return AdaptersState(
            max_loras=len(self._slots),
            num_bytes=pages.num_there * page_bytes,
            used_bytes=pages.num_used * page_bytes,
            there=there,
        )

    def _gives(self, sequence: Sequence) -> bool:
        """Give the sequence a slot, if it may have one. Whether it may be admitted then: its adapter is there, or in host memory."""
        if sequence.adapter_slot < 0 and not self._assign(sequence):
            return False
        slot, adapter = self._slots[sequence.adapter_slot], sequence.adapter
        assert adapter is not None
        if slot.reading:
            return False
        pages = self.manager.adapters
        if adapter.digest in self.copies or pages.is_leased(adapter.digest) or slot.pages == pages.find(adapter):
            return True
        self._read(slot)
        return False

    def _read(self, slot: _Slot) -> bool:
        """Begin to read the adapter of a slot, whose users may know it by several names. False if all directories have been tried."""
        named = (info for info in self.names.values() if info.digest == slot.digest)
        known = (one.adapter for one in slot.users.values() if one.adapter is not None)
        for adapter in (*named, *known):
            if adapter.path not in slot.tried:
                slot.reading, slot.path = self.number(), adapter.path
                self._reads.append((slot.reading, slot.path))
                return True
        return False

    def _assign(self, sequence: Sequence) -> bool:
        assert sequence.adapter is not None
        first, digest = self._first, sequence.adapter.digest
        place = self._place.get(digest)
        if place is None:
            if first is not None and first is not sequence:
                return False  # it was before
            place = self._vacant()
            if place is None:
                self._first = sequence
                return False
            slot = self._slots[place]
            if slot.digest:
                del self._place[slot.digest]
            self._slots[place] = _Slot(digest, used=slot.used)
            self._place[digest] = place
        elif first is not None and first is not sequence:
            if first.passed >= MOST_PASSED:
                return False
            first.passed += 1
        if first is sequence:
            self._first, self._changed = None, True
        self._slots[place].users[sequence.request_id] = sequence
        sequence.adapter_slot = place
        return True

    def _vacant(self) -> int | None:
        """The slot that nobody uses, or will be filled, and that was used longest ago. Nobody waits for what is being read for it."""
        vacant = (place for place, slot in enumerate(self._slots) if not slot.users and not slot.filling)
        return min(vacant, key=lambda place: self._slots[place].used, default=None)
