"""What a memory below the host's must do to keep pages: one protocol for a disk and for other engines.

A page is bytes under a group and a key. Host memory is the way in and out: a store writes from its places and reads into them. A store
knows no layers, no backends and no devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

Page = tuple[int, bytes, memoryview]
"""A group, a key, and the bytes of a place in host memory, as many as a page of that group has."""


PlaceT = TypeVar("PlaceT", contravariant=True)


class StoreOf(Protocol[PlaceT]):
    """Pages by group and key, in another memory. Nothing here waits for that memory: `read` begins, `ended` tells.

    Every store is opened for one fingerprint (`fingerprint.py`), so that a key means the same bytes to all that use it. What a store can't
    prove to be the page that was asked for is a miss.

    The caller numbers what it begins, and tells `read` and `write` apart by the number alone. One thread calls. Of what has ended, the
    store's own threads tell the callback that the store was made with, so that the caller comes and asks.

    A place is bytes, or, where another process has them, the range of their addresses.
    """

    def read(self, number: int, pages: Sequence[tuple[int, bytes, PlaceT]]) -> None:
        """Begin to fill the places. Until `number` has ended they may be written to, whatever time has passed."""

    def ended(self) -> list[tuple[int, list[bool]]]:
        """What has ended since the last call: numbers, and for each of their pages whether it went well.

        A place that a page was not read into well holds anything. The store has forgotten a page that was there and was wrong.
        """

    def seconds(self, nbytes: int) -> float:
        """How long reading so many bytes would take now, behind what was begun before; infinite for a store that doesn't read at present."""

    def close(self) -> None:
        """Begin nothing more, and wait a limited time for what was begun. What hasn't ended then may still use its places."""


class KeepingOf(StoreOf[PlaceT], Protocol[PlaceT]):
    """A PageStore whose pages this engine writes."""

    def find(self, group: int, keys: Sequence[bytes]) -> list[bool]:
        """Which pages are there, as far as memory knows: microseconds, and never a system call. A page that is found may be gone when it is read."""

    def write(self, number: int, pages: Sequence[tuple[int, bytes, PlaceT]]) -> None:
        """Begin to keep what the places hold. They stay as they are until `number` has ended."""

    def forget(self, group: int, keys: Sequence[bytes]) -> None:
        """These pages are wrong: nobody finds them, in another life neither."""

    def clear(self) -> None:
        """Find nothing that was there until now, until the next start."""

    def cancel(self) -> None:
        """What no thread has begun yet ends soon, and not well."""


PageStore = StoreOf[memoryview]
KeepingStore = KeepingOf[memoryview]
