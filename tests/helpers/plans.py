"""Small memory plans for tests."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.memory.planner import plan_memory
from pagerunner.memory.specs import ChunkedKV, FullKV, LatentKV, RecurrentState, Spec, WindowKV
from pagerunner.types import PageTransfer

MOST_IN_FLIGHT = 3


def transfer(number: int, loads: bool, pages: list[tuple[int, int, int]]) -> PageTransfer:
    """A transfer of pages (group, offset, place)."""
    groups = [
        [page for page in pages if page[0] == group]
        for group in range(max((page[0] for page in pages), default=-1) + 1)
    ]
    return PageTransfer(
        number, loads, [[page[1] for page in some] for some in groups], [[page[2] for page in some] for some in groups]
    )


@dataclass(frozen=True)
class OtherFull(FullKV):
    """Full attention in a group of its own, to have two groups of different page sizes."""

    @property
    def lifetime(self) -> tuple[str]:
        return ("other",)

    @property
    def kind(self) -> str:
        return "full"


def mixed(
    kinds: Mapping[str, tuple[int, int]],
    budget_bytes: int,
    *,
    batched: int = 64,
    model_max_len: int = 160,
    chunked_prefill: bool = True,
    num_drafts: int = 0,
) -> MemoryPlan:
    """One group per kind of memory: kind -> (page tokens, heads that make its pages larger), and the sizes in its name.

    Kinds: "full", "window-40", "chunked-32", "latent-4", "recurrent".
    """
    specs: list[Spec] = []
    sizes: dict[Hashable, int] = {}
    for name, (page_tokens, heads) in kinds.items():
        kind, _, number = name.partition("-")
        made: dict[str, Callable[[], Spec]] = {
            "full": lambda heads=heads: FullKV(heads, 4, "float32"),
            "window": lambda heads=heads, number=number: WindowKV(heads, 4, "float32", window=int(number)),
            "chunked": lambda heads=heads, number=number: ChunkedKV(heads, 4, "float32", chunk=int(number)),
            "latent": lambda heads=heads, number=number: LatentKV(16 * heads, 16, "float32", compression=int(number)),
            "recurrent": lambda heads=heads: RecurrentState(((heads, 40), (3,)), ("float32", "bfloat16")),
        }
        specs.append(made[kind]())
        sizes[specs[-1].lifetime] = page_tokens
    return plan_memory(
        specs,
        page_tokens=sizes,
        budget_bytes=budget_bytes,
        max_model_len="auto",
        model_max_len=model_max_len,
        max_num_seqs=8,
        max_num_batched_tokens=batched,
        chunked_prefill=chunked_prefill,
        max_in_flight=MOST_IN_FLIGHT,
        num_drafts=num_drafts,
    )


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
