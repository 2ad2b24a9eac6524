"""The arena as text and as SVG."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from helpers.plans import one_group, two_groups
from pagerunner.memory.drawing import CACHED, FREE, ArenaState, arena_svg, arena_text, packed_state


def rectangles(svg: str) -> list[tuple[str, str | None]]:
    """Fill and title of every rectangle."""
    root = ElementTree.fromstring(svg)
    name = "{http://www.w3.org/2000/svg}"
    return [(rect.attrib["fill"], rect.findtext(f"{name}title")) for rect in root.iter(f"{name}rect")]


def test_a_full_arena_holds_what_the_plan_promises() -> None:
    plan = two_groups(20)
    state = packed_state(plan)
    assert len(state.slab_group) == plan.num_slabs
    for number, group in enumerate(plan.groups):
        held = state.page_owner[number]
        one = [page for page, owner in held.items() if owner == "request 1"]
        assert len(one) == group.pages_needed(plan.max_model_len)
        assert all(state.slab_group[page // group.pages_per_slab] == number for page in held)
    assert state.slab_group.count(FREE) < plan.num_slabs


def test_text_has_a_character_per_slab_and_counts_per_group() -> None:
    plan = two_groups(150, slab_bytes=6160)
    state = ArenaState((0, 0, 1) + (FREE,) * 147, ({0: "x"}, {}))
    lines = arena_text(plan, state).splitlines()
    assert "".join(lines[1:4]).replace(" ", "") == "Aab" + "." * 147
    assert lines[4].strip() == "A full: 2 slabs, 1 page held"
    assert lines[6].strip() == ". free: 147 slabs"


def test_few_slabs_are_drawn_in_parts() -> None:
    plan = one_group(997)
    assert plan.num_slabs == 1
    text = arena_text(plan, ArenaState((0,), (dict.fromkeys(range(500), "x"),)))
    assert "each character is 1/120 slab" in text
    assert text.count("A") == 62 and text.count("a") - text.lower().splitlines()[0].count("a") > 50


def test_many_slabs_are_drawn_several_to_a_character() -> None:
    plan = one_group(64 * 10_007)
    text = arena_text(plan, packed_state(plan))
    assert re.search(r"each character is \d+ slabs", text) and len(text) < 1500


def test_svg_shows_every_owner_where_its_pages_are() -> None:
    plan = two_groups(20)
    per_slab = plan.groups[0].pages_per_slab
    free = (FREE,) * (plan.num_slabs - 2)
    cached = {per_slab - 1: CACHED} if per_slab > 2 else {}
    state = ArenaState((0, 1, *free), ({**cached, 0: "<x>", 1: "<x> + y"}, {plan.groups[1].pages_per_slab: "<x>"}))
    titles = [title for _, title in rectangles(arena_svg(plan, state))]
    assert titles.count("<x>") == 2 and titles.count("<x> + y") == 1
    assert titles.count(CACHED) == int(per_slab > 2)


def test_svg_stays_small_however_many_pages_and_owners_there_are() -> None:
    plan = one_group(64 * 500)
    owners = {page: f"request {page % 97}" for page in range(64 * 500)}
    svg = arena_svg(plan, ArenaState((0,) * plan.num_slabs, (owners,)))
    assert len(rectangles(svg)) < 60_000 and len(svg) < 8_000_000
    assert "and 73 more" in svg
