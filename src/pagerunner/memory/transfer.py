"""What connectors see of the page memory: byte ranges with a name, nothing of layers, layouts or block sizes.

The planner side lives with the scheduler and decides; the mover side lives with the runner and copies. A connector (host
memory, disk, another engine) implements both; without one the null objects stand in, so that no caller asks whether
there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from pagerunner.memory.grant import Grant
from pagerunner.memory.manager import KVManager
from pagerunner.memory.prefix import PageKey


class PageRange(msgspec.Struct, frozen=True, array_like=True):
    """One page: `num_bytes` at byte `offset` of the page memory, holding `tokens` tokens' state of `group`.

    `key` names the content: equal keys of one group mean equal tokens before them and so equal state, between engines
    of one model, dtype, kv_cache_dtype and page size; a connector that lends pages to others must compare these itself.
    """

    group: int
    offset: int
    num_bytes: int
    key: PageKey
    tokens: int


class Transfers(msgspec.Struct, frozen=True, kw_only=True):
    """What a mover does around one step: fill `loads` before it, copy `stores` out after it."""

    loads: list[PageRange] = []
    stores: list[PageRange] = []


class TransferPlanner(Protocol):
    """The scheduler's side of a connector."""

    def available(self, keys: Sequence[PageKey]) -> int:
        """How many of the leading `keys` the connector could load."""

    def load(self, request_id: str, pages: Sequence[PageRange]) -> None:
        """Fill these pages, which belong to the request, before it runs."""

    def published(self, pages: Sequence[PageRange]) -> None:
        """These pages are complete once the step under way has run; the connector may keep their content."""

    def take(self) -> Transfers:
        """What was decided since the last call."""


class PageMover(Protocol):
    """The runner's side of a connector."""

    def before_step(self, transfers: Transfers) -> None:
        """Start the loads; the step's forward waits for them on the device."""

    def after_step(self, transfers: Transfers) -> None:
        """Start the stores, in order after the step's writes."""

    def close(self) -> None:
        """Finish what is under way and forget the page memory's addresses: it may be unmapped."""


class NullTransferPlanner:
    """No connector: has nothing and keeps nothing."""

    def available(self, keys: Sequence[PageKey]) -> int:
        """Nothing."""
        return 0

    def load(self, request_id: str, pages: Sequence[PageRange]) -> None:
        """Never has pages to fill, since nothing is available."""

    def published(self, pages: Sequence[PageRange]) -> None:
        """Keeps nothing."""

    def take(self) -> Transfers:
        """Nothing to move."""
        return _NOTHING


class NullPageMover:
    """No connector: moves nothing."""

    def before_step(self, transfers: Transfers) -> None:
        """Nothing to load."""

    def after_step(self, transfers: Transfers) -> None:
        """Nothing to store."""

    def close(self) -> None:
        """Nothing to finish."""


def complete_pages(manager: KVManager, grant: Grant) -> list[PageRange]:
    """The pages of a running request whose content is named, in order, group by group."""
    plan = manager.plan
    return [
        PageRange(
            number,
            plan.page_offset(number, page),
            group.page_bytes,
            manager.index.keys[number][page],
            group.page_tokens,
        )
        for number, group in enumerate(plan.groups)
        for page in grant.pages[number][grant.first[number] : grant.published[number]]
        if page in manager.index.keys[number]
    ]


_NOTHING = Transfers()
