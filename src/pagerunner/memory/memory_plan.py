"""What a memory plan says: groups, pages, slabs, and the capacity that follows from them.

Bytes -> equal slabs -> pages. A slab belongs to one group at a time and holds `pages_per_slab` of that group's pages.
One page holds all the layers of its group: page -> layer -> K, then V -> tokens -> kv heads -> dim.
`MemoryPlan.slabs_needed` is the one capacity formula: start-up check, auto-fit, admission and report all use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

from pagerunner.memory.rules import GroupRule
from pagerunner.memory.specs import Spec


@dataclass(frozen=True, slots=True)
class LayerSlice:
    """Where one layer lives inside a page: `offset` bytes from the page's start."""

    layer: int
    spec: Spec
    offset: int


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The pages of all layers of one lifetime.

    A page table entry is the page's byte offset // `unit`; `unit` divides the slab and the page. `table_width` is the
    entries of a request of max_model_len. With `zero_fresh` a page must be zeroed in the step that hands it out. Each of several `stages` has pages with its own
    layers only; the others' layers lie at the same places in theirs.
    """

    name: str
    kind: str
    layers: tuple[LayerSlice, ...]
    page_tokens: int
    page_bytes: int
    pages_per_slab: int
    unit: int
    table_width: int
    zero_fresh: bool
    rule: GroupRule
    stages: int = 1

    def pages_needed(self, tokens: int) -> int:
        """The most pages that a request holds at once on its way to `tokens` tokens."""
        return self.rule.pages_needed(tokens)

    def request_bytes(self, tokens: int) -> int:
        """Bytes of the most pages that a request holds at once on its way to `tokens` tokens."""
        return self.pages_needed(tokens) * self.page_bytes

    @property
    def useful_page_bytes(self) -> int:
        """Bytes of a page that hold state, on average over stages; the rest is alignment, and what a stage with more layers needs."""
        return sum(part.spec.page_bytes(self.page_tokens) for part in self.layers) // self.stages


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Every byte of the page memory and, by name, what is allocated outside it (`other`). `host_bytes` of host memory hold pages too, and
    `disk_bytes` of a disk; both are those of a rank. An adapter of the highest rank and of all matrices takes `adapter_pages` pages of the largest group.
    Host memory keeps copies of adapters in up to `adapter_copies` bytes.
    """

    groups: tuple[GroupPlan, ...]
    slab_bytes: int
    num_slabs: int
    max_model_len: int
    max_num_seqs: int
    budget_bytes: int
    other: tuple[tuple[str, int], ...] = ()
    host_bytes: int = 0
    disk_bytes: int = 0
    adapter_pages: int = 0
    adapter_copies: int = 0

    @property
    def kv_bytes(self) -> int:
        """Bytes of the page memory: what the arena must hold."""
        return self.slab_bytes * self.num_slabs

    @property
    def first_bytes(self) -> int:
        """The least memory that holds a page of any group: one slab.

        With one group, whose slabs can still be cut in another way: one page.
        """
        return self.slab_bytes if len(self.groups) > 1 else self.groups[0].page_bytes

    @property
    def host_tokens(self) -> int:
        """Tokens of prompts of about max_model_len whose pages fit into the host memory: of each prompt what a prefix hit takes."""
        return self._tokens_in(self.host_bytes)

    @property
    def disk_tokens(self) -> int:
        """The same of the disk."""
        return self._tokens_in(self.disk_bytes)

    def _tokens_in(self, num_bytes: int) -> int:
        length = max((self.max_model_len - 1) // self.hit_granularity * self.hit_granularity, 1)
        spans = (group.rule.hit_span(length) for group in self.groups)
        each = sum((stop - first) * group.page_bytes for (first, stop), group in zip(spans, self.groups, strict=True))
        return num_bytes * length // max(each, 1)

    @property
    def other_bytes(self) -> int:
        """Bytes allocated outside the page memory."""
        return sum(size for _, size in self.other)

    def num_pages(self, group: int) -> int:
        """Pages of one group if every slab were its own; page ids of the group are below this."""
        return self.num_slabs * self.groups[group].pages_per_slab

    @property
    def largest_group(self) -> int:
        """The group with the largest pages, the one that num_gpu_blocks_override counts."""
        return max(range(len(self.groups)), key=lambda group: self.groups[group].page_bytes)

    @property
    def num_gpu_blocks(self) -> int:
        """Pages of the largest group if every slab were its own: what num_gpu_blocks_override would say."""
        return self.num_pages(self.largest_group)

    @property
    def hit_granularity(self) -> int:
        """Prefix hits are at multiples of this many tokens."""
        return lcm(*(group.rule.cell for group in self.groups))

    def page_offset(self, group: int, page: int) -> int:
        """Byte offset of a page in the page memory."""
        return self.page_offsets(group, [page])[0]

    def page_offsets(self, group: int, pages: Iterable[int]) -> list[int]:
        """Byte offsets of pages in the page memory."""
        slab, size, per_slab = self.slab_bytes, self.groups[group].page_bytes, self.groups[group].pages_per_slab
        return [page // per_slab * slab + page % per_slab * size for page in pages]

    def table_entries(self, group: int, pages: Sequence[int]) -> list[int]:
        """What a page table holds for these pages: byte offset // unit; -1 for NO_PAGE (-1)."""
        plan = self.groups[group]
        if -1 in pages:
            held = [page for page in pages if page != -1]
            entries = iter(self.table_entries(group, held))
            return [-1 if page == -1 else next(entries) for page in pages]
        per_slab = plan.pages_per_slab
        slab_units, page_units = self.slab_bytes // plan.unit, plan.page_bytes // plan.unit
        if slab_units == per_slab * page_units:
            return list(pages) if page_units == 1 else [page * page_units for page in pages]
        return [page // per_slab * slab_units + page % per_slab * page_units for page in pages]

    def slabs_needed(self, tokens: int, adapter_pages: int = 0) -> int:
        """Slabs that one request of `tokens` tokens takes when it is alone, with so many pages of the largest group for its adapter."""
        needs = [group.pages_needed(tokens) for group in self.groups]
        if adapter_pages:
            needs[self.largest_group] += adapter_pages
        return sum(-(-need // group.pages_per_slab) for need, group in zip(needs, self.groups, strict=True))

    def request_bytes(self, tokens: int) -> int:
        """Bytes of the pages that one request of `tokens` tokens must be able to get.

        Its last slabs may also hold other requests' pages.
        """
        return sum(group.request_bytes(tokens) for group in self.groups)

    def longest(self, most: int, adapter_pages: int = 0) -> int:
        """The greatest length in tokens, at most `most`, that one request can have, with so many pages for its adapter."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high) if self.slabs_needed(middle, adapter_pages) <= self.num_slabs else (low, middle - 1)
            )
        return low

    @property
    def max_concurrency(self) -> float:
        """How many requests of max_model_len fit at once; a slab may be shared by requests."""
        return float(self._concurrency(self.max_model_len))

    @property
    def tokens(self) -> int:
        """Tokens that fit when they are spread over requests of about max_model_len (whole pages)."""
        cell = lcm(*(group.page_tokens for group in self.groups))
        length = -(-self.max_model_len // cell) * cell
        return int(self._concurrency(length) * length)

    def _concurrency(self, length: int) -> Fraction:
        shares = (Fraction(group.pages_needed(length), group.pages_per_slab) for group in self.groups)
        return self.num_slabs / sum(shares, Fraction(0))

    def group_waste(self, group: int) -> float:
        """The share of a slab of the group in which no state fits, 0 to 1: the slab's remainder, and alignment inside pages."""
        plan = self.groups[group]
        return 1 - plan.pages_per_slab * plan.useful_page_bytes / self.slab_bytes

    @property
    def waste(self) -> float:
        """The largest `group_waste` of all groups, 0 to 1."""
        return max(self.group_waste(group) for group in range(len(self.groups)))
