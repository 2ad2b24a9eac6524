"""What a scheduler and its memory count."""

from __future__ import annotations

import msgspec

from pagerunner.memory.residency import Residency
from pagerunner.sched.live import Wait


class GroupUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of one memory group; `pages_free` lie in slabs that it occupies, `queries_total` are tokens of prompts that it was
    asked for, `hits_total` those that it had cached.

    `usage` is its share of the page memory's bytes, `fragmentation` the share of all slabs that packing its pages would give
    back, `waste` the share of a slab of its that can hold no state.
    """

    name: str
    pages_in_use: int
    pages_cached: int
    evictions: int
    pages_free: int = 0
    queries_total: int = 0
    hits_total: int = 0
    usage: float = 0.0
    fragmentation: float = 0.0
    waste: float = 0.0


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts at one moment; those named `_total` only grow. Prefix queries and hits are in tokens.

    `waiting_for` is why the first of those that wait does. `busy_seconds` of the device are the engine's to fill in. `residency`
    is there where pages are sampled.
    """

    running: int
    waiting: int
    kv_usage: float
    groups: list[GroupUsage]
    prefix_queries_total: int
    prefix_hits_total: int
    preemptions_total: int
    steps_total: int
    prompt_tokens_total: int
    generation_tokens_total: int
    last_step_tokens: int
    waiting_for: Wait = ""
    busy_seconds: float = 0.0
    kv_fragmentation: float = 0.0
    kv_waste: float = 0.0
    residency: Residency | None = None
