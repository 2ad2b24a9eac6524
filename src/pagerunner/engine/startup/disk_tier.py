"""Opens the disk tier of an engine: under the fingerprint of all that decides what its pages hold."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pagerunner.engine.core.executors.base import Executor
from pagerunner.engine.startup.exchange import page_fields
from pagerunner.engine.startup.resolve import Resolved
from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.memory.prefix import UNIT_TOKENS, chain_seed
from pagerunner.tiers.below import Below
from pagerunner.tiers.disk import DiskStore
from pagerunner.tiers.fingerprint import fingerprint
from pagerunner.tiers.host import HostTier

logger = logging.getLogger(__name__)
MakeBelow = Callable[[HostTier], Below[Any]]
_READY_SECONDS = 10.0


def open_disk(resolved: Resolved, plan: MemoryPlan, executor: Executor) -> MakeBelow | None:
    """The disk tier that was asked for, for any host tier of the engine. It is closed when the executor is gone.

    Raises:
        ConfigError: the directory can't be used, or max_bytes is too small.
    """
    asked = resolved.config.disk_tier
    if asked is None or (memory := executor.host_view) is None:
        return None
    page_bytes = [group.page_bytes for group in plan.groups]
    store = DiskStore(
        Path(asked.root_dir).expanduser(),
        pages_fingerprint(resolved, plan, executor.weights_digest()),
        max_bytes=asked.max_bytes,
        largest_page=max(page_bytes),
        read_threads=asked.n_read_threads,
        write_threads=asked.n_write_threads,
    )
    weakref.finalize(executor, store.close)
    store.ready.wait(_READY_SECONDS)
    stats = store.stats()
    logger.info(
        "disk tier: %s has %d pages of this model, and its disk reads %.2f GB/s.",
        store.directory.path,
        stats.pages,
        stats.read_rate / 1e9,
    )
    return lambda host: Below(store, host, memory, page_bytes, store.stats)


def pages_fingerprint(resolved: Resolved, plan: MemoryPlan, weights: str) -> bytes:
    """What two engines must have in common for a page's key to mean the same bytes. `weights` tells the weights from all others."""
    config = resolved.config
    facts: dict[str, object] = dict(page_fields(resolved, plan, weights))
    facts |= {"device": (config.device, config.attention_backend), "rank": (0, 1), "keys": (chain_seed(), UNIT_TOKENS)}
    return fingerprint(facts)
