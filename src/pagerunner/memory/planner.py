"""Decides how the bytes for pages are cut: pure functions from specs and limits to a frozen `MemoryPlan`.

Bytes -> equal slabs -> pages. A slab belongs to one group at a time and holds `pages_per_slab` of that group's pages.
One page holds all the layers of its group: page -> layer -> K, then V -> tokens -> kv heads -> dim.
`MemoryPlan.slabs_needed` is the one capacity formula: start-up check, auto-fit, admission and report all use it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import gcd, lcm

from pagerunner.errors import CapacityError, ConfigError
from pagerunner.memory.prefix import UNIT_TOKENS
from pagerunner.memory.rules import GroupRule, make_rule
from pagerunner.memory.slab_size import SlabCut, cut_groups, cut_one_group
from pagerunner.memory.specs import Spec
from pagerunner.memory.units import human_bytes

ALIGNMENT = 16  # bytes; every page and every layer within it starts on a multiple, for vector loads
MAX_ALIGNMENT_WASTE = 0.02  # of a compressed group's page; above it the page takes more slots
_KNOBS = "raise kv_cache_memory_bytes, gpu_memory_utilization or num_gpu_blocks_override"


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
    entries of a request of max_model_len. With `zero_fresh` a page must be zeroed in the step that hands it out.
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

    def pages_needed(self, tokens: int) -> int:
        """The most pages that a request holds at once on its way to `tokens` tokens."""
        return self.rule.pages_needed(tokens)

    def request_bytes(self, tokens: int) -> int:
        """Bytes of the most pages that a request holds at once on its way to `tokens` tokens."""
        return self.pages_needed(tokens) * self.page_bytes

    @property
    def useful_page_bytes(self) -> int:
        """Bytes of a page that hold state; the rest is alignment."""
        return sum(part.spec.page_bytes(self.page_tokens) for part in self.layers)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Every byte of the page memory and, by name, what is allocated outside it (`other`)."""

    groups: tuple[GroupPlan, ...]
    slab_bytes: int
    num_slabs: int
    max_model_len: int
    max_num_seqs: int
    budget_bytes: int
    other: tuple[tuple[str, int], ...] = ()

    @property
    def kv_bytes(self) -> int:
        """Bytes of the page memory: what the arena must hold."""
        return self.slab_bytes * self.num_slabs

    @property
    def first_bytes(self) -> int:
        """The least memory that holds a page of any group: a slab, or where slabs can still be cut anew, a page."""
        return self.slab_bytes if len(self.groups) > 1 else self.groups[0].page_bytes

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
        plan = self.groups[group]
        slab, place = divmod(page, plan.pages_per_slab)
        return slab * self.slab_bytes + place * plan.page_bytes

    def table_entries(self, group: int, pages: Sequence[int]) -> list[int]:
        """What a page table holds for these pages: byte offset // unit; -1 for a hole (-1)."""
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

    def slabs_needed(self, tokens: int) -> int:
        """Slabs that one request of `tokens` tokens takes when it is alone."""
        return sum(-(-group.pages_needed(tokens) // group.pages_per_slab) for group in self.groups)

    def request_bytes(self, tokens: int) -> int:
        """Bytes of the pages that one request of `tokens` tokens must be able to get; its last slabs may hold others'."""
        return sum(group.request_bytes(tokens) for group in self.groups)

    def longest(self, most: int) -> int:
        """The longest length, at most `most`, that one request can have."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.slabs_needed(middle) <= self.num_slabs else (low, middle - 1)
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
        """Share of a slab of the group that can hold no state: its remainder, and alignment inside pages."""
        plan = self.groups[group]
        return 1 - plan.pages_per_slab * plan.useful_page_bytes / self.slab_bytes

    @property
    def waste(self) -> float:
        """The worst group's share of a slab that can hold no state."""
        return max(self.group_waste(group) for group in range(len(self.groups)))


def plan_memory(
    specs: Sequence[Spec],
    *,
    page_tokens: int | Mapping[Hashable, int],
    budget_bytes: int | None,
    num_pages_override: int | None = None,
    max_model_len: int | str | None = None,
    model_max_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_in_flight: int = 1,
    chunked_prefill: bool = True,
    other: Sequence[tuple[str, int]] = (),
) -> MemoryPlan:
    """Cut the budget into slabs and pages for the layers `specs` (one per piece of memory, in layer order).

    `page_tokens` is one size or one per lifetime; one size is rounded up in groups whose slots stand for several tokens.
    `budget_bytes` is what pages may take; `num_pages_override` replaces it by exactly that many pages of the group whose
    pages are largest. `max_model_len` None takes the model's length, "auto" or -1 the longest that one request can have.
    Without `chunked_prefill` a step of `max_num_batched_tokens` is never shortened, so windows are promised what it takes.
    `max_in_flight` costs no pages: steps run in order, so what one gives back the next may take.

    Raises:
        CapacityError: one request of max_model_len (for "auto": of 2 tokens) doesn't fit.
        ConfigError: a limit is out of range.
    """
    _check_positive(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_in_flight=max_in_flight,
        num_gpu_blocks_override=1 if num_pages_override is None else num_pages_override,
    )
    groups = _form_groups(specs, page_tokens, max_num_batched_tokens, not chunked_prefill)
    auto = max_model_len in ("auto", -1)
    wanted = _wanted_length(model_max_len if auto or max_model_len is None else max_model_len, model_max_len)
    if num_pages_override is not None:
        budget_bytes = num_pages_override * max(group.page_bytes for group in groups)
    if budget_bytes is None:
        raise ConfigError("the memory for pages is unknown: give kv_cache_memory_bytes or num_gpu_blocks_override.")
    budget_bytes = max(budget_bytes, 0)
    plan = _cut(groups, budget_bytes, num_pages_override, wanted, max_num_seqs, tuple(other))
    longest = plan.longest(wanted)
    if longest >= wanted:
        return plan
    if auto and longest >= 2:
        return replace(plan, groups=tuple(_with_width(group, longest) for group in plan.groups), max_model_len=longest)
    raise _too_small(plan, 2 if auto else wanted, longest)


def refit(plan: MemoryPlan, budget_bytes: int, other: Sequence[tuple[str, int]], *, auto: bool) -> MemoryPlan:
    """The same pages, units and tables in at most `budget_bytes` of the plan's memory, with `other` beside it.

    Several groups keep their slabs. One group alone is cut into slabs anew, which changes no address. With `auto`,
    max_model_len becomes the longest that fits.

    Raises:
        CapacityError: one request of max_model_len (with `auto`: of 2 tokens) doesn't fit.
    """
    budget = max(budget_bytes, 0)
    slab_bytes, slabs = plan.slab_bytes, min(plan.num_slabs, budget // plan.slab_bytes)
    groups = plan.groups
    if len(groups) == 1:
        page = groups[0].page_bytes
        slab_bytes, slabs = cut_one_group(page, min(plan.num_pages(0), budget // page))
        groups = (replace(groups[0], pages_per_slab=slab_bytes // page),)
    fitted = replace(
        plan, groups=groups, slab_bytes=slab_bytes, num_slabs=slabs, budget_bytes=budget, other=tuple(other)
    )
    longest = fitted.longest(plan.max_model_len)
    if longest >= plan.max_model_len:
        return fitted
    if auto and longest >= 2:
        return replace(fitted, max_model_len=longest)
    raise _too_small(fitted, 2 if auto else plan.max_model_len, longest)


def _wanted_length(wanted: int | str, model_max_len: int) -> int:
    if not isinstance(wanted, int) or wanted < 1:
        raise ConfigError(
            f'max_model_len must be at least 1, or "auto" or -1 for the longest that fits, got {wanted!r}.'
        )
    if wanted > model_max_len:
        raise ConfigError(
            f"max_model_len={wanted:,} is more than the model's {model_max_len:,} positions; lower it to {model_max_len}."
        )
    return wanted


def _check_positive(**limits: int) -> None:
    for name, value in limits.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}.")


def _form_groups(
    specs: Sequence[Spec],
    page_tokens: int | Mapping[Hashable, int],
    step_tokens: int,
    whole_steps: bool,
) -> list[GroupPlan]:
    """Layers of one lifetime become a group; their slices follow each other in layer order. Slabs are not chosen yet."""
    if not specs:
        raise ConfigError("the model has no layer that keeps state.")
    members: dict[Hashable, list[tuple[int, Spec]]] = {}
    for layer, spec in enumerate(specs):
        members.setdefault(spec.lifetime, []).append((layer, spec))
    groups: list[GroupPlan] = []
    cell = _least_page(page_tokens, specs) if isinstance(page_tokens, int) and page_tokens > 0 else 1
    for lifetime, layers in members.items():
        size = page_tokens if isinstance(page_tokens, int) else page_tokens[lifetime]
        if size not in (1, 2, 4, 8) and (size < UNIT_TOKENS or size % UNIT_TOKENS):
            raise ConfigError(f"block_size must be 1, 2, 4, 8 or a multiple of {UNIT_TOKENS}, got {size}.")
        if isinstance(page_tokens, int):
            size = _page_tokens(size, [spec for _, spec in layers], cell)
        slices, end = _slices(layers, size)
        first = layers[0][1]
        groups.append(
            GroupPlan(
                name=_name(lifetime),
                kind=first.kind,
                layers=slices,
                page_tokens=size,
                page_bytes=end,
                pages_per_slab=1,
                unit=end,
                table_width=1,
                zero_fresh=any(spec.zero_fresh for _, spec in layers),
                rule=make_rule(first, size, step_tokens, whole_steps),
            )
        )
    return groups


def _page_tokens(block_size: int, specs: Sequence[Spec], cell: int) -> int:
    """The group's own page size: the block size, unless slots stand for several tokens.

    Then the least number of whole slots, doubled while rounding layers up to the alignment wastes more than a little, or
    while it has fewer slots than the block size has tokens and prefix hits are no coarser for it: other groups allow them
    only at multiples of `cell` tokens anyway.
    """
    if all(spec.token_multiple == 1 for spec in specs):
        return block_size
    size = _least_page(block_size, specs)
    for _ in range(3):
        useful = sum(spec.page_bytes(size) for spec in specs)
        if useful >= (1 - MAX_ALIGNMENT_WASTE) * sum(_align(spec.page_bytes(size)) for spec in specs):
            break
        size *= 2
    slot = max(spec.token_multiple for spec in specs)
    while size // slot < block_size and cell % (2 * size) == 0:
        size *= 2
    return size


def _least_page(block_size: int, specs: Sequence[Spec]) -> int:
    """The least page size in tokens, at least the block size, that holds whole slots."""
    size = lcm(block_size, *(spec.token_multiple for spec in specs))
    return size if size in (1, 2, 4, 8) else lcm(size, UNIT_TOKENS)


def _slices(layers: Sequence[tuple[int, Spec]], page_tokens: int) -> tuple[tuple[LayerSlice, ...], int]:
    """The layers' places in a page, and the page's bytes."""
    slices, end = [], 0
    for layer, spec in layers:
        slices.append(LayerSlice(layer, spec, end))
        end += _align(spec.page_bytes(page_tokens))
    return tuple(slices), end


def _name(lifetime: Hashable) -> str:
    return "-".join(str(part) for part in lifetime) if isinstance(lifetime, tuple) else str(lifetime)


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _cut(
    groups: Sequence[GroupPlan],
    budget: int,
    exact_pages: int | None,
    max_model_len: int,
    max_num_seqs: int,
    other: tuple[tuple[str, int], ...],
) -> MemoryPlan:
    """The plan with the best slab size; it may hold less than one request of max_model_len."""

    def made(cut: SlabCut) -> MemoryPlan:
        slab_bytes, num_slabs = cut
        return MemoryPlan(
            groups=tuple(
                replace(
                    group,
                    pages_per_slab=slab_bytes // group.page_bytes,
                    unit=gcd(slab_bytes, group.unit),
                    table_width=group.rule.table_width(max_model_len),
                )
                for group in groups
            ),
            slab_bytes=slab_bytes,
            num_slabs=num_slabs,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            budget_bytes=budget if exact_pages is None else slab_bytes * num_slabs,
            other=other,
        )

    if len(groups) == 1:
        return made(cut_one_group(groups[0].page_bytes, budget // groups[0].page_bytes))
    needs = [(group.pages_needed(max_model_len), group.page_bytes) for group in groups]
    cut = cut_groups(
        [group.page_bytes for group in groups],
        budget_bytes=budget,
        exact_pages=exact_pages,
        slabs_needed=lambda slab: sum(-(-pages // (slab // size)) for pages, size in needs),
        longest=lambda cut: made(cut).longest(max_model_len),
    )
    return made(cut)


def _with_width(group: GroupPlan, max_model_len: int) -> GroupPlan:
    return replace(group, table_width=group.rule.table_width(max_model_len))


def _too_small(plan: MemoryPlan, wanted: int, longest: int) -> CapacityError:
    enough = smallest_plan(plan, wanted)
    need = enough.budget_bytes
    pages = ", ".join(f"{group.pages_needed(wanted):,} {group.name} pages" for group in plan.groups)
    knobs = f"{_KNOBS} (to {enough.num_gpu_blocks})"
    fits = (
        f'The longest length that fits is {longest:,}: lower max_model_len to it (or pass "auto"), or {knobs}.'
        if longest > 1
        else f"No length fits: {knobs} until there are {need} bytes."
    )
    return CapacityError(
        f"A request of {wanted:,} tokens needs {human_bytes(need)} ({need:,} bytes: {pages}), but there are "
        f"{human_bytes(plan.budget_bytes)} ({plan.budget_bytes:,} bytes) for pages. {fits}"
    )


def smallest_plan(plan: MemoryPlan, tokens: int) -> MemoryPlan:
    """The same groups in about as little memory as one request of `tokens` tokens can have.

    The choice of slabs depends on the budget, so budgets are tried upwards from the bytes of the request's pages.
    """
    budget = plan.request_bytes(tokens)
    while True:
        attempt = _cut(plan.groups, budget, None, tokens, plan.max_num_seqs, ())
        if attempt.slabs_needed(tokens) <= attempt.num_slabs:
            return attempt
        budget += max(budget // 256, min(group.page_bytes for group in plan.groups))
