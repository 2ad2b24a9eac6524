"""What the manager gives out and says: a running request's pages, promises of more, a refusal's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagerunner.memory.prefix import PrefixChain
from pagerunner.memory.rules import FOREVER
from pagerunner.memory.slabs import SlabPool

if TYPE_CHECKING:
    from pagerunner.memory.adapters import AdapterLease
    from pagerunner.memory.leases import Lease

NO_PAGE = -1  # stands in a grant's list, and in a table write, for a page that was given back or never allocated


class Grant:
    """One running request's pages: `pages[group][i]` is page i of the request, as a page id of the group, or NO_PAGE.

    Positions below `capacity` have pages. When `next_publish` tokens are known and scheduled, `publish` has work to do.
    `cached_tokens` is how many leading tokens were found in the index. `target` is the number of tokens known at admission.
    `snapshot_positions` are the positions among them at which later requests will probably want to continue.
    """

    __slots__ = (
        "adapter", "asks_again", "borrowed", "cached_tokens", "capacity", "chain", "epoch", "first", "group_hits", "holds_snapshots", "latest_snapshot",
        "next_publish", "next_save", "num_pages", "pages", "passed", "promise", "published", "reserve", "saves", "sent", "slot",
        "snapshot_positions", "starts", "superseded", "target",
    )  # fmt: skip

    def __init__(self, slot: int, chain: PrefixChain, groups: int, epoch: int) -> None:
        self.slot = slot
        self.adapter: AdapterLease | None = None
        self.chain = chain
        self.epoch = epoch
        self.pages: list[list[int]] = [[] for _ in range(groups)]
        self.first = [0] * groups  # pages before it are NO_PAGE
        self.published = [0] * groups
        self.sent = [0] * groups  # table entries that the device has
        self.num_pages = [0] * groups  # pages that it has
        self.reserve = [0] * groups  # pages that admission promised it may hold at once
        self.promise = [0] * groups  # promised pages that it doesn't hold now
        self.capacity = 0
        self.next_publish = FOREVER
        self.borrowed: list[range] = []  # by group, numbers of a sibling's pages, to be copied before the first write
        self.starts = 0  # the first plan that may have a row of this request
        self.cached_tokens = 0
        self.group_hits = [0] * groups  # tokens that each group alone could have supplied
        self.target = 0
        self.snapshot_positions: list[int] = []
        self.next_save = FOREVER  # where the next snapshot is due
        self.saves: list[tuple[int, Lease]] = []  # (position, lease) of snapshots in the making
        self.holds_snapshots = False  # until its first token is known
        self.passed = 0  # where the state is at least when all plans have run
        self.asks_again = False  # the next plan, too, may be the one that passes a snapshot
        # (position, lease) of the last snapshot asked for in generated text, and of the one that it replaces
        self.latest_snapshot: tuple[int, Lease | None] = (0, None)
        self.superseded: tuple[int, Lease | None] = (0, None)


class Promises:
    """Pages by group that running requests don't hold yet and may still take from `pool`.

    All other requests must leave `by_group` pages alone.
    """

    def __init__(self, pool: SlabPool) -> None:
        self._pool = pool
        self.by_group = [0] * len(pool.per_slab)

    def kept(self, needs: Sequence[int], grant: Grant | None = None) -> bool:
        """Whether every promise can still be kept when `needs` are handed out, to `grant` or to nobody who was promised any."""
        return self._pool.slack(self.beside(needs, grant)) >= 0

    def update(self, grant: Grant) -> None:
        """The grant's reserve, or what it holds, has changed."""
        for group, reserve in enumerate(grant.reserve):
            left = max(reserve - grant.num_pages[group], 0)
            self.by_group[group] += left - grant.promise[group]
            grant.promise[group] = left

    def withdraw(self, grant: Grant) -> None:
        """The grant takes nothing any more."""
        for group, promise in enumerate(grant.promise):
            self.by_group[group] -= promise

    def beside(self, needs: Sequence[int], grant: Grant | None = None) -> list[int]:
        """Pages by group that must be free to hand out `needs` and keep every promise.

        The grant's own promise covers its needs first.
        """
        if grant is None:
            return [promised + need for promised, need in zip(self.by_group, needs, strict=True)]
        return [
            promised + max(need - own, 0)
            for promised, need, own in zip(self.by_group, needs, grant.promise, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request can never run, in numbers; `str()` is the sentence for the user. `adapter`: of what is needed, the pages that its adapter takes."""

    tokens: int
    needed: int
    available: int
    what: str
    adapter: int = 0

    def __str__(self) -> str:
        adapter = f", {self.adapter:,} pages of its adapter among them" if self.adapter else ""
        return (
            f"needs {self.needed:,} {self.what} for {self.tokens:,} tokens{adapter}; the pool has {self.available:,}. "
            "Lower max_tokens or raise kv_cache_memory_bytes / num_gpu_blocks_override."
        )


def fill(held: list[int], pages: list[int], parts: list[range]) -> None:
    """Append `pages` at the page numbers in `parts`. Numbers before and between the parts get NO_PAGE."""
    taken = 0
    for part in parts:
        held += [NO_PAGE] * (part.start - len(held))
        held += pages[taken : taken + len(part)]
        taken += len(part)
