"""What the page at /ui computes before it draws, run by node: no browser is needed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import pagerunner
from helpers.patience import LONG

PAGE = Path(pagerunner.__file__).parent / "server" / "page"
pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")

MODEL = """
const {FREE, CACHED, USED} = model;
const modelOf = (slabOwner, groups, used = []) => {
  const model = {slabs: slabOwner.length, slabOwner, groups: groups.map((perSlab) => ({perSlab, state: new Uint8Array(slabOwner.length * perSlab)}))};
  for (const [group, page, kind] of used) model.groups[group].state[page] = kind;
  return model;
};
const listed = (tiles) => Array.from({length: tiles.count}, (_, i) => [tiles.slabs[i], tiles.cells[i], tiles.pages(i)]);
"""


@pytest.fixture
def node(tmp_path: Path) -> Any:
    """Runs the body of an async function with the page's modules in scope; returns what it returns."""
    folder = tmp_path / "page"
    shutil.copytree(PAGE, folder)
    (folder / "package.json").write_text('{"type": "module"}', encoding="utf-8")

    def run(body: str) -> Any:
        imports = "".join(
            f"import * as {name} from './{name}.js';\n" for name in ("layout", "model", "panels", "timeline")
        )
        script = (
            f"{imports}{MODEL}\nconst value = await (async () => {{ {body} }})();\nconsole.log(JSON.stringify(value));"
        )
        (folder / "test.js").write_text(script, encoding="utf-8")
        done = subprocess.run(["node", "test.js"], cwd=folder, capture_output=True, text=True, timeout=LONG)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_only_slabs_in_use_are_tiles_and_all_of_them_on_demand(node: Any) -> None:
    owned, everything, places = node(
        """const model = modelOf([-1, 0, -1, 1, -1], [4, 2]);
        const some = new layout.Tiles(model, false), all = new layout.Tiles(model, true);
        return [listed(some), listed(all), [some.find(3, 1), some.find(0), all.find(3, 1), all.find(4)]];"""
    )
    assert owned == [[1, 0, 4], [3, 0, 2]]
    assert everything == [[0, 0, 0], [1, 0, 4], [2, 0, 0], [3, 0, 2], [4, 0, 0]]
    assert places == [1, -1, 3, 4]


def test_of_one_huge_slab_only_the_parts_in_use_are_tiles(node: Any) -> None:
    parts, all_parts, places = node(
        """const model = modelOf([0], [1000], [[0, 3, USED], [0, 600, CACHED], [0, 999, FREE]]);
        const some = new layout.Tiles(model, false);
        return [listed(some), new layout.Tiles(model, true).count, [some.find(0, 700), some.find(0, 300), some.find(0, 999)]];"""
    )
    assert parts == [[0, 0, 256], [0, 512, 256]] and all_parts == 4
    assert places == [1, -1, -1]


def test_a_slab_that_was_just_taken_is_there(node: Any) -> None:
    assert node("return listed(new layout.Tiles(modelOf([0], [1000]), false))") == [[0, 0, 256]]


def test_a_few_tiles_get_large_cells_and_every_tile_has_a_place(node: Any) -> None:
    few, many, crowded = node(
        """return [[5, 50], [1028, 50], [1, 256]].map(([count, pages]) => {
          const index = layout.fittingCell(count, pages, 990, 458), found = layout.fit(layout.CELLS[index], count, pages, 990);
          return [layout.CELLS[index][0], found.tall, found.columns * found.tileWidth + found.gap];
        });"""
    )
    assert few[0] == 24 and many[0] <= 3 and crowded[0] == 24
    assert all(tall <= 458 and wide <= 990 for _, tall, wide in (few, many, crowded))


def test_free_slabs_are_shown_where_they_can_be_told_apart(node: Any) -> None:
    assert node(
        """return [85, 1028].map((slabs) => layout.allLegible(modelOf(new Int16Array(slabs).fill(-1), [18]), 830, 460))"""
    ) == [True, False]


def test_the_room_stays_while_the_number_of_tiles_moves_a_little(node: Any) -> None:
    rooms = node(
        """let room = 0; return [0, 5, 6, 7, 8, 6, 3, 2, 40].map((count) => (room = layout.roomFor(count, room)))"""
    )
    assert rooms == [4, 7, 7, 7, 10, 10, 4, 4, 50]


def test_the_strip_says_which_parts_of_the_arena_are_in_use(node: Any) -> None:
    wide, narrow = node(
        """const model = modelOf([0, -1, 1, 1], [4, 4]);
        return [[...layout.strip(model, 8)], [...layout.strip(model, 2)]];"""
    )
    assert wide == [0, 0, -1, -1, 1, 1, 1, 1] and narrow == [0, 1]


def test_axes_have_round_numbers_and_units(node: Any) -> None:
    assert node("return [1, 7, 100, 101].map((most) => layout.decades(most))") == [
        [1, 10],
        [1, 10],
        [1, 10, 100],
        [1, 10, 100, 1000],
    ]
    assert node("return [0.0003, 0.02, 0.11, 3].map((longest) => timeline.timeAxis(longest))") == [
        {
            "top": pytest.approx(0.0005),
            "marks": [[0, "0 ms"], [pytest.approx(0.00025), "0.25 ms"], [pytest.approx(0.0005), "0.5 ms"]],
        },
        {"top": pytest.approx(0.02), "marks": [[0, "0 ms"], [0.01, "10 ms"], [0.02, "20 ms"]]},
        {"top": pytest.approx(0.2), "marks": [[0, "0 ms"], [0.1, "100 ms"], [0.2, "200 ms"]]},
        {"top": 5, "marks": [[0, "0 s"], [2.5, "2.5 s"], [5, "5 s"]]},
    ]
    shares = node("return [1, 10, 100].map((value) => layout.onDecades(value, 100))")
    assert 0.1 < shares[0] < shares[1] < shares[2] == 1 and shares[1] - shares[0] == pytest.approx(
        shares[2] - shares[1]
    )


def test_bars_fill_the_chart_when_there_are_enough_steps(node: Any) -> None:
    few, some, many = node("return [5, 60, 240].map((count) => timeline.bars(count, 400))")
    assert few == {"shown": 5, "pitch": 16}
    assert some["shown"] * some["pitch"] == pytest.approx(400)
    assert many == {"shown": 100, "pitch": 4}


def test_times_are_written_in_one_way(node: Any) -> None:
    assert node("return [0.04, 8.2, 11, 1234.56].map(panels.age)") == ["0.0 s", "8.2 s", "11.0 s", "1,234.6 s"]
    assert node("return [[0.4, 5.5, 12], [0.0096, 0.031, 0.078], []].map(panels.together)") == [
        "0.4 · 5.5 · 12.0 s",
        "9.6 · 31.0 · 78.0 ms",
        "–",
    ]


def test_what_became_of_drafts_between_two_frames(node: Any) -> None:
    none, some, first = node(
        """return [model.draftsSince([5, 1], [5, 1]), model.draftsSince([10, 0, 0], [12, 3, 5]), model.draftsSince(undefined, [0, 4])];"""
    )
    assert none is None and first == {"length": 2, "rates": [1]}
    assert some == {"length": 2.3, "rates": [0.8, 0.5]}
