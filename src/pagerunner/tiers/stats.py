"""What a tier counts. The struct travels as it is to the metrics."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pagerunner.memory.ownership import DiskState


class StoreStats(msgspec.Struct, kw_only=True):
    """What the store of a disk tier has done, and what it holds.

    `failures` are pages that were found and couldn't be read or proved; `skipped` those that weren't written. `bytes` are of all files in the
    directory, as of the last look. `read_rate` is in bytes a second, 0 before it was measured. `read_only` says why nothing is written.
    Of several ranks' stores `pages` are those that all of them have, and `pages_of_some` those that can't be found, as one hasn't its part.
    """

    pages: int = 0
    pages_of_some: int = 0
    bytes: int = 0
    reads: int = 0
    read_bytes: int = 0
    writes: int = 0
    write_bytes: int = 0
    failures: int = 0
    skipped: int = 0
    segments_dropped: int = 0
    pages_copied: int = 0
    read_rate: float = 0.0
    read_only: str = ""


class DiskStats(StoreStats, kw_only=True):
    """Besides, of requests: tokens whose pages were read and then used, requests that waited for too long, and those that wait now."""

    hits: int = 0
    given_up: int = 0
    waiting: int = 0

    def state(self) -> DiskState:
        """What of it `GET /memory` shows."""
        return DiskState(
            pages=self.pages,
            pages_of_some=self.pages_of_some,
            num_bytes=self.bytes,
            waiting=self.waiting,
            read_only=self.read_only,
            hits_total=self.hits,
        )


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a host tier; those named `_total` only grow. Queries and hits are tokens of prompts that the device didn't have.

    `num_bytes` are those of each rank's host memory, of which `ready_bytes` can be used so far. `loads` and `stores` are under way. Of loads
    that were given up and still write, `quarantined_bytes` are kept from everybody. The rates are averages, 0 if not measured yet.
    """

    num_bytes: int = 0
    ready_bytes: int = 0
    used_bytes: int = 0
    loads: int = 0
    stores: int = 0
    quarantined_bytes: int = 0
    queries_total: int = 0
    hits_total: int = 0
    load_bytes_total: int = 0
    store_bytes_total: int = 0
    load_seconds_total: float = 0.0
    store_seconds_total: float = 0.0
    stores_skipped_total: int = 0
    failed_total: int = 0
    given_up_total: int = 0
    bytes_per_second: float = 0.0
    seconds_per_token: float = 0.0
    disk: DiskStats | None = None

    @property
    def usage(self) -> float:
        """The share of the tier's bytes that hold something. Metrics read it by its name."""
        return self.used_bytes / self.num_bytes if self.num_bytes else 0.0


class ExchangeStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of pages lent to other engines and pulled from them; those named `_total` only grow. `loans` last, and `pulls` are under way."""

    loans: int = 0
    pulls: int = 0
    lent_total: int = 0
    expired_total: int = 0
    pulled_total: int = 0
    failed_total: int = 0
    pulled_bytes_total: int = 0
    bytes_per_second: float = 0.0


@dataclass(slots=True)
class TierCounts:
    """What has been counted since the beginning."""

    queries: int = 0
    hits: int = 0
    load_bytes: int = 0
    store_bytes: int = 0
    load_seconds: float = 0.0
    store_seconds: float = 0.0
    stores_skipped: int = 0
    failed: int = 0
    given_up: int = 0

    def moved(self, loads: bool, num_bytes: int, seconds: float) -> None:
        """A transfer has ended well."""
        if loads:
            self.load_bytes += num_bytes
            self.load_seconds += seconds
        else:
            self.store_bytes += num_bytes
            self.store_seconds += seconds

    def stats(self, *, disk: DiskStats | None, **moment: float) -> TierStats:
        """These counts, and those of the moment."""
        totals = {f"{name}_total": getattr(self, name) for name in self.__slots__}
        return TierStats(disk=disk, **totals, **moment)  # type: ignore[arg-type]
