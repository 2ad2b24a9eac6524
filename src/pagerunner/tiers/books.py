"""What the policy of host memory notes: requests that wait, transfers under way, and what is set aside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pagerunner.memory.grant import Grant
from pagerunner.memory.leases import Lease
from pagerunner.memory.prefix import PageKey, PrefixChain
from pagerunner.tiers.pieces import Wish


class Waiting(Protocol):
    """What the tier asks of a request that waits. `looked_up`: it needs no look into the tier any more; `fetched`: none below it.

    `found` is what the look has found: how many tokens of a hit the device had, and how many there are with what is loaded.
    """

    chain: PrefixChain
    tokens: list[int]
    shares: bool
    grant: Grant | None
    finished: bool
    looked_up: bool
    fetched: bool
    found: tuple[int, int]

    def hit_limit(self) -> int:
        """How many leading tokens may come from pages that are there."""


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
    front: Wish | None = None
    """The prompt whose last piece this is."""


@dataclass(slots=True)
class Ahead:
    """What is set aside for a request that waits: what is loaded and kept, and the pages by group that it needs beside when it is its turn. So many
    `tokens` are computed then.
    """

    needs: list[int]
    leases: list[Lease]
    tokens: int


@dataclass(slots=True, eq=False)
class Refused:
    """For this request, which waits, there was no room at this version of the books. It needs so many pages by group. It needs no fewer before one
    of the keys comes that its prompt `lacks`, or another request shares its pages.
    """

    request: Waiting
    version: int
    needs: list[int]
    lacks: list[set[PageKey]]
