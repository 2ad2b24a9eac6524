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
from pagerunner.errors import ConfigError
from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.memory.prefix import UNIT_TOKENS, chain_seed
from pagerunner.tiers.below import Below
from pagerunner.tiers.disk import DiskStore
from pagerunner.tiers.fingerprint import fingerprint
from pagerunner.tiers.host import HostTier
from pagerunner.tiers.stats import StoreStats

logger = logging.getLogger(__name__)
MakeBelow = Callable[[HostTier, int], Below[Any]]
"""Of a team's host tier, and the team."""
_READY_SECONDS = 10.0


def open_disk(resolved: Resolved, plan: MemoryPlan, executor: Executor) -> MakeBelow | None:
    """The disk tier that was asked for, for any host tier of the engine. Several ranks have opened their own; one's is closed when it is gone.

    Raises:
        ConfigError: the directory can't be used, or max_bytes is too small.
    """
    if resolved.config.disk_tier is None:
        return None
    page_bytes, weights = [group.page_bytes for group in plan.groups], executor.weights_digest()
    same = lambda: executor.weights_digest() == weights  # noqa: E731  asked again for new weights
    if stores := executor.page_stores:
        places = range(resolved.config.host_bytes)
        for store in stores:
            _tell(f"rank-*-of-{resolved.config.num_ranks} in {resolved.config.disk_tier.root_dir}", store.stats())
        return lambda host, team: Below(stores[team], host, places, page_bytes, stores[team].stats, same)
    [memory], disk = executor.host_views, open_store(resolved, plan, weights)
    assert disk is not None
    weakref.finalize(executor, disk.close)
    _tell(str(disk.directory.path), disk.stats())
    return lambda host, _: Below(disk, host, memory, page_bytes, disk.stats, same)


def open_store(
    resolved: Resolved, plan: MemoryPlan, weights: str, rank: int = 0, on_end: Callable[[], None] = lambda: None
) -> DiskStore | None:
    """The store of a rank, if it is to have one: of several ranks each has its own directory and its share of max_bytes. Raises ConfigError.

    `weights` tells the weights of all ranks from all others.
    """
    config, ranks = resolved.config, resolved.config.num_ranks
    asked = config.disk_tier
    if asked is None:
        return None
    root = Path(asked.root_dir).expanduser()
    try:
        store = DiskStore(
            root if ranks == 1 else root / f"rank-{rank}-of-{ranks}",
            pages_fingerprint(resolved, plan, weights, rank),
            max_bytes=asked.max_bytes // ranks,
            largest_page=max(group.page_bytes for group in plan.groups),
            on_end=on_end,
            read_threads=asked.n_read_threads,
            write_threads=asked.n_write_threads,
        )
    except ConfigError as error:
        if ranks == 1 or not str(error).startswith("max_bytes="):
            raise
        raise ConfigError(f"{error} Each of {ranks} ranks has its share of max_bytes={asked.max_bytes:,}.") from None
    store.ready.wait(_READY_SECONDS)
    return store


def _tell(where: str, stats: StoreStats) -> None:
    rate = stats.read_rate / 1e9
    logger.info("disk tier: %s has %d pages of this model, and its disk reads %.2f GB/s.", where, stats.pages, rate)


def pages_fingerprint(resolved: Resolved, plan: MemoryPlan, weights: str, rank: int = 0) -> bytes:
    """What two engines must have in common for a page's key to mean the same bytes. `weights` tells the weights from all others."""
    config = resolved.config
    facts: dict[str, object] = dict(page_fields(resolved, plan, weights))
    facts |= {"device": (config.device, config.attention_backend), "keys": (chain_seed(), UNIT_TOKENS)}
    facts["rank"] = (rank, config.num_ranks)
    if config.num_ranks > 1:
        facts["ranks"] = (config.tensor_parallel_size, config.pipeline_parallel_size, config.teams)
    return fingerprint(facts)
