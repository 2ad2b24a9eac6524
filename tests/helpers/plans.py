"""Small memory plans for tests."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from pagerunner.memory.planner import MemoryPlan, plan_memory
from pagerunner.memory.prefix import PageKey, PrefixChain
from pagerunner.memory.rules import FullRule
from pagerunner.memory.specs import FullKV


@dataclass(frozen=True)
class OtherFull(FullKV):
    """Full attention in a group of its own, to have two groups of different page sizes."""

    @property
    def lifetime(self) -> Hashable:
        return ("other",)


@dataclass(frozen=True)
class WindowRule(FullRule):
    """Only the last `window` tokens are read; pages before them are given back. Proves that rules are all a kind needs."""

    window: int
    chunk: int  # most tokens of one step

    def pages_needed(self, tokens: int) -> int:
        return min(-(-tokens // self.page_tokens), -(-(self.window - 1 + self.chunk) // self.page_tokens) + 1)

    def span(self, start: int, end: int) -> tuple[int, int]:
        return max(start - self.window + 1, 0) // self.page_tokens, -(-end // self.page_tokens)

    def longest_hit(self, index: Mapping[PageKey, int], chain: PrefixChain, limit: int) -> int:
        cell = max(self.page_tokens, 16)
        for hit in range(min(limit, len(chain.hashes) * 16) // cell * cell, 0, -cell):
            first, stop = self.span(hit, hit)
            if all(self.key(chain, page) in index for page in range(first, stop)):
                return hit
        return 0


def with_window(plan: MemoryPlan, group: int, window: int, chunk: int) -> MemoryPlan:
    """The same plan, but one of its groups forgets what is older than `window` tokens."""
    rule = WindowRule(plan.groups[group].page_tokens, window, chunk)
    groups = tuple(replace(plan, rule=rule) if at == group else plan for at, plan in enumerate(plan.groups))
    plan = replace(plan, groups=groups)
    return replace(plan, max_model_len=plan.longest(160))


def one_group(pages: int, *, page_tokens: int = 16, max_model_len: int | str = "auto", **limits: Any) -> MemoryPlan:
    """`pages` pages of two small layers."""
    return plan_memory(
        [FullKV(1, 4, "float32")] * 2,
        page_tokens=page_tokens,
        budget_bytes=None,
        num_pages_override=pages,
        max_model_len=max_model_len,
        **{"model_max_len": 4096, "max_num_seqs": 8, "max_num_batched_tokens": 64} | limits,
    )


def two_groups(
    slabs: int, sizes: tuple[int, int] = (16, 4), heads: tuple[int, int] = (1, 3), slab_bytes: int | None = None
) -> MemoryPlan:
    """Two full groups of different page bytes and page tokens over about `slabs` slabs, of the planner's size or a given one."""
    specs = [FullKV(heads[0], 4, "float32"), OtherFull(heads[1], 4, "float32"), FullKV(heads[0], 4, "float32")]
    largest = max(sizes[0] * 2 * specs[0].bytes_per_token, sizes[1] * specs[1].bytes_per_token)
    plan = plan_memory(
        specs,
        page_tokens={("full",): sizes[0], ("other",): sizes[1]},
        budget_bytes=slabs * (slab_bytes or largest),
        max_model_len="auto",
        model_max_len=160,
        max_num_seqs=8,
        max_num_batched_tokens=64,
    )
    if slab_bytes is None:
        return plan
    groups = tuple(
        replace(group, pages_per_slab=slab_bytes // group.page_bytes, unit=gcd(slab_bytes, group.page_bytes))
        for group in plan.groups
    )
    plan = replace(plan, groups=groups, slab_bytes=slab_bytes, num_slabs=slabs)
    return replace(plan, max_model_len=plan.longest(160))
