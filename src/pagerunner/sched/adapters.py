"""Adapters in the scheduler's books: which content a name stands for, which is in which slot of the device, and who waits for a slot.

A slot is counted by the sequences that use it, from the time when it is given to a sequence until that ends. So nothing else comes into it
meanwhile, also while the sequence waits for pages. A slot that nobody uses keeps its adapter until another one needs the room, the one unused
for longest first. A name may get another content while sequences run: they go on with the content that it had when they came.

A sequence whose adapter isn't in a slot is *held*: it stands beside the line, and others go on. Without a limit, those whose adapters are in
slots could pass it for ever. So the first of those that wait for a slot is passed `MOST_PASSED` times; then others with adapters are held
too, until it has a slot. Sequences without an adapter need none and are never held. Example: 8 slots have 8 adapters with endless requests, and a
request for a ninth comes. After 64 more requests for the eight, one of the slots runs out of requests and is the ninth's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from pagerunner.errors import InvalidRequestError
from pagerunner.memory.ownership import AdapterSlot, AdaptersState
from pagerunner.types.checks import show
from pagerunner.types.lora import AdapterEnd, AdapterFill, AdapterInfo, LoraStats

if TYPE_CHECKING:
    from pagerunner.sched.request import Sequence

MOST_PASSED = 64


@dataclass(slots=True)
class _Slot:
    digest: str = ""
    users: int = 0
    filling: int = 0  # the number of the fill that is under way
    used: int = 0  # when it was used last
    num_bytes: int = 0  # of what is in it


class Adapters:
    """The books of one engine's adapters. They outlive schedulers, which may be made again (`EngineCore.recover`)."""

    def __init__(self, max_loras: int, num_bytes: int = 0) -> None:
        """All slots together have so many bytes."""
        self._num_bytes = num_bytes
        self.names: dict[str, AdapterInfo] = {}
        self.held: dict[str, Sequence] = {}
        self.order: Callable[[Sequence], Any] = lambda sequence: sequence.key[2]
        self._slots = [_Slot() for _ in range(max_loras)]
        self._place: dict[str, int] = {}  # slots by digest
        self._unfinished = Counter[str]()  # sequences by digest
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
            slot.users -= 1
            slot.used = next(self._uses)
            self._changed = self._changed or not slot.users
            sequence.adapter_slot = -1

    def take_fills(self) -> list[AdapterFill]:
        """Fills that are to begin now, behind the steps that were planned so far."""
        fills, self._fills = self._fills, []
        return fills

    def take_failed(self) -> list[tuple[Sequence, str]]:
        """Sequences whose adapters can't be had, and why."""
        failed, self._failed = self._failed, []
        return failed

    def ended(self, end: AdapterEnd) -> bool:
        """A fill has ended. False if the number is none of a fill."""
        slot = next((one for one in self._slots if one.filling == end.number), None)
        if slot is None:
            return False
        self._fill_bytes += end.num_bytes
        if end.error:
            place = self._place.pop(slot.digest)
            slot.digest = ""
            self._failed += [(one, end.error) for one in self.held.values() if one.adapter_slot == place]
        slot.num_bytes = end.num_bytes
        slot.filling, self._changed = 0, True  # last: until then an interrupt leaves a slot that `restart` empties
        return True

    @property
    def filling(self) -> bool:
        """Whether any fill is under way, or is to begin."""
        return any(slot.filling for slot in self._slots)

    def lose_all(self, sequences: Iterable[Sequence]) -> None:
        """The device's copies are gone, and no step runs. These sequences are all there are."""
        for sequence in sequences:
            sequence.adapter_slot = -1
        self._slots = [_Slot() for _ in self._slots]
        self._place.clear()
        self._fills.clear()
        self._first, self._changed = None, True

    def restart(self) -> None:
        """Another scheduler begins, without sequences. What is in slots stays there, but for what was on its way: an interrupt may have lost it, or its end."""
        self.held.clear()
        self._failed.clear()
        self._unfinished.clear()
        self._fills.clear()
        self._slots = [_Slot() if slot.filling else slot for slot in self._slots]
        self._place = {slot.digest: place for place, slot in enumerate(self._slots) if slot.digest}
        for slot in self._slots:
            slot.users = 0
        self._first, self._changed = None, True

    def stats(self, sequences: Iterable[Sequence]) -> LoraStats:
        """Who runs and waits."""
        running: set[str] = set()
        waiting: set[str] = set()
        for one in sequences:
            if one.adapter is not None:
                (waiting if one.grant is None else running).add(one.adapter.name)
        return LoraStats(
            max_loras=len(self._slots),
            running=sorted(running),
            waiting=sorted(waiting),
            registered=len(self.names),
            resident=len(self._place),
            num_bytes=self._num_bytes,
            used_bytes=sum(slot.num_bytes for slot in self._slots),
            hits_total=self._num_hits,
            fills_total=self._num_fills,
            fill_bytes_total=self._fill_bytes,
        )

    def memory_state(self) -> AdaptersState:
        """What is in the slots now."""
        names: dict[str, list[str]] = {}
        for name, info in self.names.items():
            names.setdefault(info.digest, []).append(name)
        slots = [
            AdapterSlot(
                digest=slot.digest,
                names=names.get(slot.digest, []),
                requests=slot.users,
                num_bytes=slot.num_bytes,
                arriving=slot.filling > 0,
            )
            for slot in self._slots
        ]
        return AdaptersState(num_bytes=self._num_bytes, slots=slots)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Recount. Raises AssertionError where the books disagree with each other or with these sequences, which are all there are."""
        sequences = list(sequences)
        assert self._unfinished == Counter(one.adapter.digest for one in sequences if one.adapter is not None), (
            "digests"
        )
        users = Counter(one.adapter_slot for one in sequences if one.adapter_slot >= 0)
        assert [slot.users for slot in self._slots] == [users[place] for place in range(len(self._slots))], "users"
        in_slots = {slot.digest: place for place, slot in enumerate(self._slots) if slot.digest}
        assert self._place == in_slots, "two slots have one adapter, or one that nobody finds"
        fills = {fill.number for fill in self._fills}
        assert fills <= {slot.filling for slot in self._slots}, "a fill for nobody"
        for slot in self._slots:
            assert slot.digest or not (slot.users or slot.filling or slot.num_bytes), "an empty slot is used"
        for sequence in sequences:
            if sequence.adapter_slot >= 0 and sequence.adapter is not None:
                assert self._slots[sequence.adapter_slot].digest == sequence.adapter.digest, "another one's slot"
                assert sequence.grant is None or not self._slots[sequence.adapter_slot].filling, (
                    "runs before its adapter"
                )
            assert sequence.grant is None or sequence.adapter is None or sequence.adapter_slot >= 0, (
                "runs without a slot"
            )

    def _gives(self, sequence: Sequence) -> bool:
        """Give the sequence a slot, if it may have one. Whether it has one that is filled."""
        if sequence.adapter_slot < 0 and not self._assign(sequence):
            return False
        return not self._slots[sequence.adapter_slot].filling

    def _assign(self, sequence: Sequence) -> bool:
        assert sequence.adapter is not None
        first, digest = self._first, sequence.adapter.digest
        place = self._place.get(digest)
        found = place is not None
        if place is None:
            if first is not None and first is not sequence:
                return False  # it was before
            place = self._vacant()
            if place is None:
                self._first = sequence
                return False
            self._fill(place, sequence.adapter)
        elif first is not None and first is not sequence:
            if first.passed >= MOST_PASSED:
                return False
            first.passed += 1
        if first is sequence:
            self._first, self._changed = None, True
        self._num_hits += found
        self._slots[place].users += 1
        sequence.adapter_slot = place
        return True

    def _vacant(self) -> int | None:
        """The slot that nobody uses, or will be filled, and that was used longest ago."""
        vacant = (place for place, slot in enumerate(self._slots) if not slot.users and not slot.filling)
        return min(vacant, key=lambda place: self._slots[place].used, default=None)

    def _fill(self, place: int, adapter: AdapterInfo) -> None:
        slot = self._slots[place]
        slot.filling = self.number()  # first: see `ended`
        if slot.digest:
            del self._place[slot.digest]
        slot.digest, slot.num_bytes = adapter.digest, 0
        self._place[adapter.digest] = place
        self._fills.append(AdapterFill(slot.filling, place, adapter.digest, adapter.path))
        self._num_fills += 1
