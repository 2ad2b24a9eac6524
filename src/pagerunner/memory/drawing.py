"""Draws the page memory: slabs by group as text, and slabs by group with pages by owner as SVG.

Pure functions of a plan and of who holds what. A plan alone is drawn filled: as many requests of its longest length as fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from pagerunner.memory.units import human_bytes

if TYPE_CHECKING:
    from pagerunner.memory.memory_plan import MemoryPlan

FREE = -1
CACHED = "cached"
_TEXT_CELLS = 480  # at most; beyond, one character stands for several slabs
_FEW_CELLS = 120  # with fewer slabs, each is several characters
_LINE = 60
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SVG_CELLS = 1_024
_SVG_RUNS = 20_000  # rectangles of owners in one drawing
_COLUMNS = 32
_CELL = 24
_COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bb5500", "#777777")


@dataclass(frozen=True, slots=True)
class ArenaState:
    """Who holds the page memory at one moment.

    `slab_group[s]` is the group that slab s belongs to, or -1. `page_owner[g]` names the holder of pages of group g, by
    page id: a request's id, or "cached" for a page that only the prefix index knows. A page without an owner is left out.
    """

    slab_group: tuple[int, ...]
    page_owner: tuple[Mapping[int, str], ...]


def packed_state(plan: MemoryPlan) -> ArenaState:
    """As many whole requests of max_model_len as fit at once (and may run), each taking its pages in order."""
    requests = max(min(int(plan.max_concurrency), plan.max_num_seqs), 1)
    while requests > 1 and _slabs(plan, requests) > plan.num_slabs:
        requests -= 1
    slab_group: list[int] = []
    owners: list[dict[int, str]] = []
    for number, group in enumerate(plan.groups):
        need = group.pages_needed(plan.max_model_len)
        first = len(slab_group) * group.pages_per_slab
        slab_group += [number] * -(-requests * need // group.pages_per_slab)
        owners.append({first + page: f"request {page // need + 1}" for page in range(requests * need)})
    slab_group += [FREE] * (plan.num_slabs - len(slab_group))
    return ArenaState(tuple(slab_group), tuple(owners))


def _slabs(plan: MemoryPlan, requests: int) -> int:
    needs = ((group.pages_needed(plan.max_model_len), group.pages_per_slab) for group in plan.groups)
    return sum(-(-requests * pages // per_slab) for pages, per_slab in needs)


def arena_text(plan: MemoryPlan, state: ArenaState) -> str:
    """The arena in a few lines of characters, with a legend line per group.

    A character usually stands for one slab. With many slabs it stands for several, and shows what most of them are. With few
    slabs it stands for a part of one. A capital letter is a page that is held, a small letter a page of the group that is free.
    """
    per_cell = max(-(-plan.num_slabs // _TEXT_CELLS), 1)
    parts = max(_FEW_CELLS // plan.num_slabs, 1)
    cells = [
        _cell(plan, state, at, per_cell, part, parts)
        for at in range(0, plan.num_slabs, per_cell)
        for part in range(parts)
    ]
    share = f"1/{parts} slab" if parts > 1 else "a slab" if per_cell == 1 else f"{per_cell} slabs"
    lines = [f"arena: each character is {share} ({human_bytes(plan.slab_bytes * per_cell // parts)})"]
    lines += ["  " + "".join(cells[at : at + _LINE]) for at in range(0, len(cells), _LINE)]
    counts = Counter(state.slab_group)
    for number, group in enumerate(plan.groups):
        held = len(state.page_owner[number])
        lines.append(
            f"  {_letter(number).upper()} {group.name}: {_of(counts[number], 'slab')}, {_of(held, 'page')} held"
        )
    lines.append(f"  {_letter(FREE)} free: {_of(counts[FREE], 'slab')}")
    return "\n".join(lines)


def _cell(plan: MemoryPlan, state: ArenaState, slab: int, slabs: int, part: int, parts: int) -> str:
    """One character: the slabs [slab, slab + slabs), or one of the parts of a single one."""
    number = Counter(state.slab_group[slab : slab + slabs]).most_common(1)[0][0]
    if number == FREE:
        return _letter(FREE)
    per_slab = plan.groups[number].pages_per_slab
    first = slab * per_slab + per_slab * part // parts
    stop = max((slab + slabs - 1) * per_slab + per_slab * (part + 1) // parts, first + 1)
    held = state.page_owner[number]
    letter = _letter(number)
    return letter.upper() if any(page in held for page in range(first, stop)) else letter


def _of(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _letter(group: int) -> str:
    return "." if group == FREE else _LETTERS[group % len(_LETTERS)]


def arena_svg(plan: MemoryPlan, state: ArenaState) -> str:
    """An SVG document: a square per slab, framed in its group's color, filled by the owners of its pages.

    With more than 1,024 slabs the first ones are drawn, and the title says so. A run of pages of one owner is one strip.
    """
    drawn = min(plan.num_slabs, _SVG_CELLS)
    names = {owner for pages in state.page_owner for owner in pages.values()}
    owners = sorted(names, key=lambda owner: (owner == CACHED, len(owner), owner))
    hues = {owner: place * 137 % 360 for place, owner in enumerate(owners)}
    legend_top = 40 + -(-drawn // _COLUMNS) * (_CELL + 4)
    shown_owners = owners[:24]
    height = legend_top + 24 + 20 * max(len(plan.groups) + 1, len(shown_owners))
    width = 20 + _COLUMNS * (_CELL + 4)
    some = "" if drawn == plan.num_slabs else f" (the first {drawn:,} are drawn)"
    title = (
        f"{human_bytes(plan.kv_bytes)} of pages: {_of(plan.num_slabs, 'slab')} of {human_bytes(plan.slab_bytes)}{some}, "
        f"max_model_len {plan.max_model_len:,}"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="10" y="22" font-size="14">{escape(title)}</text>',
    ]
    budget = _SVG_RUNS
    for slab in range(drawn):
        strips = _strips(plan, state, slab)
        if len(strips) > max(budget // (drawn - slab), 1):
            strips = _merged(strips)
        budget -= len(strips)
        parts += _slab_svg(plan, state.slab_group[slab], slab, strips, hues)
    parts += _legend_svg(plan, state, shown_owners, len(owners), hues, legend_top)
    return "\n".join([*parts, "</svg>"]) + "\n"


Strip = tuple[str, float, float]  # owner ("" is nobody), from and to as shares of the slab


def _strips(plan: MemoryPlan, state: ArenaState, slab: int) -> list[Strip]:
    number = state.slab_group[slab]
    if number == FREE:
        return []
    group, held = plan.groups[number], state.page_owner[number]
    first = slab * group.pages_per_slab
    share = group.page_bytes / plan.slab_bytes
    strips: list[Strip] = []
    pages = range(group.pages_per_slab)
    for owner, run in groupby(pages, key=lambda page: held.get(first + page, "")):
        places = list(run)
        strips.append((owner, places[0] * share, (places[-1] + 1) * share))
    return [strip for strip in strips if strip[0]]


def _merged(strips: Sequence[Strip]) -> list[Strip]:
    """One strip per owner, as long as all of the owner's strips together."""
    sums: dict[str, float] = {}
    for owner, start, stop in strips:
        sums[owner] = sums.get(owner, 0.0) + stop - start
    merged, at = [], 0.0
    for owner, share in sums.items():
        merged.append((owner, at, at + share))
        at += share
    return merged


def _slab_svg(
    plan: MemoryPlan, group: int, slab: int, strips: Iterable[Strip], hues: Mapping[str, int]
) -> Iterable[str]:
    left, top = 10 + slab % _COLUMNS * (_CELL + 4), 36 + slab // _COLUMNS * (_CELL + 4)
    color = "#cccccc" if group == FREE else _COLORS[group % len(_COLORS)]
    name = "free" if group == FREE else plan.groups[group].name
    yield f"<g><title>slab {slab}: {escape(name)}</title>"
    for owner, start, stop in strips:
        yield (
            f'<rect x="{left}" y="{top + start * _CELL:.2f}" width="{_CELL}" height="{(stop - start) * _CELL:.2f}" '
            f'fill="{_fill(owner, hues)}"><title>{escape(owner)}</title></rect>'
        )
    yield (
        f'<rect x="{left}" y="{top}" width="{_CELL}" height="{_CELL}" fill="none" stroke="{color}" stroke-width="2"/></g>'
    )


def _fill(owner: str, hues: Mapping[str, int]) -> str:
    return "#e4e4e4" if owner == CACHED else f"hsl({hues[owner]},60%,75%)"


def _legend_svg(
    plan: MemoryPlan, state: ArenaState, owners: Sequence[str], num_owners: int, hues: Mapping[str, int], top: int
) -> Iterable[str]:
    counts = Counter(state.slab_group)
    names = [(group.name, _COLORS[at % len(_COLORS)], counts[at]) for at, group in enumerate(plan.groups)]
    for row, (name, color, count) in enumerate([*names, ("free", "#cccccc", counts[FREE])]):
        y = top + 20 * row
        yield f'<rect x="11" y="{y}" width="12" height="12" fill="none" stroke="{color}" stroke-width="2"/>'
        slabs = _of(count, "slab")
        yield f'<text x="30" y="{y + 11}">{escape(name)}: {slabs}</text>'
    for row, owner in enumerate(owners):
        y = top + 20 * row
        yield f'<rect x="400" y="{y}" width="12" height="12" fill="{_fill(owner, hues)}"/>'
        yield f'<text x="420" y="{y + 11}">{escape(owner)}</text>'
    if num_owners > len(owners):
        yield f'<text x="420" y="{top + 20 * len(owners) + 11}">and {num_owners - len(owners):,} more</text>'
