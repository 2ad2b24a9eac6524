"""What the manager gives out and says: a running request's pages, a refusal's numbers."""

from __future__ import annotations

from dataclasses import dataclass

from pagerunner.memory.prefix import PrefixChain
from pagerunner.memory.rules import FOREVER

HOLE = -1  # stands in a grant's list, and in a table write, for a page that was given back or never allocated


class Grant:
    """One running request's pages: `pages[group][i]` is page i of the request, as a page id of the group, or HOLE.

    Positions below `capacity` have pages. When `next_publish` tokens are known and scheduled, `publish` has work to do.
    `cached_tokens` is how many leading tokens were found in the index. `marks` are the positions within the first
    `target` tokens, those known at admission, at which later requests will probably want to continue.
    """

    __slots__ = (
        "borrowed", "cached_tokens", "capacity", "chain", "epoch", "first", "group_hits", "held", "marks",
        "next_publish", "next_save", "pages", "promise", "published", "reserve", "saves", "sent", "slot", "starts",
        "target", "turn",
    )  # fmt: skip

    def __init__(self, slot: int, chain: PrefixChain, groups: int, epoch: int) -> None:
        self.slot = slot
        self.chain = chain
        self.epoch = epoch
        self.pages: list[list[int]] = [[] for _ in range(groups)]
        self.first = [0] * groups  # pages before it are holes
        self.published = [0] * groups
        self.sent = [0] * groups  # table entries that the device has
        self.held = [0] * groups  # pages that are not holes
        self.reserve = [0] * groups  # pages that admission promised it may hold at once
        self.promise = [0] * groups  # of them, not held now
        self.capacity = 0
        self.next_publish = FOREVER
        self.borrowed: list[range] = []  # by group, numbers of a sibling's pages, to be copied before the first write
        self.starts = 0  # the first plan that may have a row of it
        self.cached_tokens = 0
        self.group_hits = [0] * groups  # tokens that each group alone could have supplied
        self.target = 0
        self.marks: list[int] = []
        self.next_save = FOREVER  # where the next snapshot is due
        self.saves: list[tuple[int, int]] = []  # snapshots (position, page) that it holds itself
        self.turn: tuple[int, int] = (0, HOLE)  # the latest snapshot of the text it generates


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request can never run, in numbers; `str()` is the sentence for the user."""

    tokens: int
    needed: int
    available: int
    what: str

    def __str__(self) -> str:
        return (
            f"needs {self.needed:,} {self.what} for {self.tokens:,} tokens; the pool has {self.available:,}. "
            "Lower max_tokens or raise kv_cache_memory_bytes / num_gpu_blocks_override."
        )


def fill(held: list[int], pages: list[int], parts: list[range]) -> None:
    """Append `pages` as the page numbers of `parts`, with holes between and before them."""
    taken = 0
    for part in parts:
        held += [HOLE] * (part.start - len(held))
        held += pages[taken : taken + len(part)]
        taken += len(part)
