"""Decides how the bytes for pages are cut: pure functions from specs and limits to a frozen `MemoryPlan`.

`plan_memory` forms groups, chooses page and slab sizes, and refuses what can't fit. `memory/memory_plan.py` has what a plan
says, and the one capacity formula.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import gcd, lcm

from pagerunner.errors import CapacityError, ConfigError
from pagerunner.memory.memory_plan import GroupPlan, LayerSlice, MemoryPlan
from pagerunner.memory.prefix import UNIT_TOKENS
from pagerunner.memory.rules import GroupRule, make_rule
from pagerunner.memory.slab_size import SlabCut, cut_groups, cut_one_group
from pagerunner.memory.specs import Spec
from pagerunner.memory.units import human_bytes

ALIGNMENT = 16  # bytes; every page and every layer within it starts on a multiple, for vector loads
MAX_ALIGNMENT_WASTE = 0.02  # of a compressed group's page; above it the page takes more slots
_KNOBS = "raise kv_cache_memory_bytes, gpu_memory_utilization or num_gpu_blocks_override"


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
    num_drafts: int = 0,
    chunked_prefill: bool = True,
    other: Sequence[tuple[str, int]] = (),
    stages: Sequence[int] = (),
    page_unit: int = ALIGNMENT,
) -> MemoryPlan:
    """Cut the budget into slabs and pages for the layers `specs` (one per piece of memory, in layer order).

    `page_tokens` is one size or one per lifetime; one size is rounded up in groups whose slots stand for several tokens.
    `budget_bytes` is what pages may take; `num_pages_override` replaces it by exactly that many pages of the group whose
    pages are largest. `max_model_len` None takes the model's length, "auto" or -1 the longest that one request can have.
    Without `chunked_prefill` a step of `max_num_batched_tokens` is never shortened, and windows are promised the pages of such a
    step. `stages` says by which stage of a pipeline each of the layers is run, if there are several; each stage has pages of its own, of the
    same sizes, at the same places. `max_in_flight` costs no pages: steps run in order, so a step may take the pages that the step before gave back.
    With `num_drafts` guessed tokens a row, windows are wider by what the steps in flight may accept. A page has a multiple of `page_unit` bytes.

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
    # what the steps in flight and this one may take, and what a drafter computes ahead
    open_tokens = (max_in_flight + 1) * (1 + num_drafts) if num_drafts else 1
    make = partial(
        make_rule, step_tokens=max_num_batched_tokens, whole_steps=not chunked_prefill, open_tokens=open_tokens
    )
    groups = _form_groups(specs, page_tokens, make, stages or (0,) * len(specs), page_unit)
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
        wide = tuple(replace(group, table_width=group.rule.table_width(longest)) for group in plan.groups)
        return replace(plan, groups=wide, max_model_len=longest)
    raise _too_small(plan, 2 if auto else wanted, longest)


def refit(plan: MemoryPlan, budget_bytes: int, other: Sequence[tuple[str, int]], *, auto: bool) -> MemoryPlan:
    """The plan with the same pages, units and tables, in at most `budget_bytes` of its memory, with `other` beside the pages.

    Several groups keep their slabs. One group alone gets new slabs, which changes no address. With `auto`,
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
    if auto and longest >= 2:
        return with_adapter(replace(fitted, max_model_len=longest), auto=auto)
    if longest >= plan.max_model_len:
        return fitted
    raise _too_small(fitted, 2 if auto else plan.max_model_len, longest)


def with_adapter(plan: MemoryPlan, *, auto: bool) -> MemoryPlan:
    """With `auto`, the plan with the longest max_model_len that a request can have beside an adapter of the highest rank; else, or if no such adapter fits, the same plan."""
    longest = plan.longest(plan.max_model_len, plan.adapter_pages)
    return replace(plan, max_model_len=longest) if auto and longest >= 2 else plan


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
    make: Callable[[Spec, int], GroupRule],
    stages: Sequence[int],
    page_unit: int,
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
        slices, end = _slices(layers, size, stages)
        end = -(-end // page_unit) * page_unit
        first = layers[0][1]
        groups.append(
            GroupPlan(
                name=_name(lifetime),
                kind=first.kind,
                layers=slices,
                page_tokens=size,
                page_bytes=end,
                stages=max(stages) + 1,
                pages_per_slab=1,
                unit=end,
                table_width=1,
                zero_fresh=any(spec.zero_fresh for _, spec in layers),
                rule=make(first, size),
            )
        )
    return groups


def _page_tokens(block_size: int, specs: Sequence[Spec], cell: int) -> int:
    """The group's own page size: the block size, unless slots stand for several tokens.

    Slots that stand for several tokens start with the least number of whole slots. That number is doubled for two reasons: while
    rounding layers up to the alignment wastes more than a little; and while the page has fewer slots than the block size has
    tokens, if prefix hits get no coarser. Other groups allow hits only at multiples of `cell` tokens anyway.
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


def least_page(tokens: int) -> int:
    """The least page size of at least so many tokens that pages may have."""
    return next((size for size in (1, 2, 4, 8) if size >= tokens), -(-tokens // UNIT_TOKENS) * UNIT_TOKENS)


def _least_page(block_size: int, specs: Sequence[Spec]) -> int:
    """The least page size in tokens, at least the block size, that holds whole slots."""
    size = lcm(block_size, *(spec.token_multiple for spec in specs))
    return size if size in (1, 2, 4, 8) else lcm(size, UNIT_TOKENS)


def _slices(
    layers: Sequence[tuple[int, Spec]], page_tokens: int, stages: Sequence[int]
) -> tuple[tuple[LayerSlice, ...], int]:
    """The layers' places in a page, and the page's bytes: those of the stage with most."""
    slices, ends = [], dict.fromkeys(stages, 0)
    for layer, spec in layers:
        slices.append(LayerSlice(layer, spec, ends[stages[layer]]))
        ends[stages[layer]] += _align(spec.page_bytes(page_tokens))
    return tuple(slices), max(ends.values())


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
