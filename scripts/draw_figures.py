"""Draw docs/pages.svg from what the scheduler really plans: who owns which page, at three moments.

Nothing is computed but plans: the script plays the runner and answers every plan with made-up tokens.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

from pagerunner.memory.manager import KVManager
from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.memory.planner import plan_memory
from pagerunner.memory.specs import FullKV
from pagerunner.sched.scheduler import Scheduler
from pagerunner.types import EngineRequest, SamplingParams, StepPlan, StepResult

COLUMNS, ROWS, CELL, GAP = 8, 5, 30, 4
PANEL = COLUMNS * (CELL + GAP) + 30
SHARED, CACHED, FREE = "#4c5c96", "#c9cfe8", "#f4f4f1"
OWN = ("#e0a458", "#6fa287", "#c8553d", "#8d7aa8", "#5b8fb0")
NAMES = "ABCDE"
OUTPUT = Path(__file__).resolve().parents[1] / "docs" / "pages.svg"


@dataclass
class PageMap:
    """Who owns each page, read from the table writes of the plans alone."""

    plan: MemoryPlan
    owner: dict[int, set[int]] = field(default_factory=dict)  # page -> slots
    tables: dict[int, dict[int, int]] = field(default_factory=dict)  # slot -> index in its table -> page
    length: dict[int, int] = field(default_factory=dict)  # slot -> tokens computed
    cached: set[int] = field(default_factory=set)

    def apply(self, plan: StepPlan) -> None:
        """Follow one step."""
        group = self.plan.groups[0]
        for init in plan.admitted:
            self.tables[init.slot], self.length[init.slot] = {}, 0
        for write in plan.table_writes:
            for index, entry in enumerate(write.entries, write.first):
                page = entry * group.unit // group.page_bytes
                self.tables[write.slot][index] = page
                self.owner.setdefault(page, set()).add(write.slot)
                self.cached.discard(page)
        for row in plan.rows:
            self.length[row.slot] = row.start + row.num_tokens

    def release(self, slot: int) -> None:
        """A request ended: its full pages become cache, unless another request owns them too."""
        page_tokens = self.plan.groups[0].page_tokens
        for index, page in self.tables.pop(slot).items():
            self.owner[page].discard(slot)
            if not self.owner[page]:
                del self.owner[page]
                if (index + 1) * page_tokens <= self.length[slot]:
                    self.cached.add(page)


class Play:
    """A scheduler whose plans are answered with made-up tokens."""

    def __init__(self) -> None:
        specs = [FullKV(num_kv_heads=4, head_dim=64, dtype="float32") for _ in range(16)]
        limits = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 512}
        plan = plan_memory(
            specs,
            page_tokens=16,
            budget_bytes=None,
            num_pages_override=COLUMNS * ROWS,
            model_max_len=512,
            **limits,
        )
        self.pages = PageMap(plan)
        self.scheduler = Scheduler(KVManager(plan, enable_prefix_caching=True), **limits)
        self.slots: dict[str, int] = {}

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        """Queue a request."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add(
            EngineRequest(request_id=name, prompt_token_ids=prompt, params=params, seed=0, max_tokens=max_tokens)
        )

    def step(self) -> bool:
        """Run one step; False when there was nothing to do."""
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        self.pages.apply(plan)
        self.slots |= {init.request.request_id: init.slot for init in plan.admitted}
        tokens = [[7] if row.samples else [] for row in plan.rows]
        for update in self.scheduler.commit(plan, StepResult(step_id=plan.step_id, token_ids=tokens)):
            if update.finish_reason is not None:
                self.pages.release(self.slots[update.request_id])
        return True

    def check(self) -> None:
        """The map must agree with the scheduler's own count."""
        [usage] = self.scheduler.stats().groups
        if (usage.pages_in_use, usage.pages_cached) != (len(self.pages.owner), len(self.pages.cached)):
            raise RuntimeError(f"the map has {len(self.pages.owner)}, {len(self.pages.cached)} pages, not {usage}")


def draw_panel(play: Play, left: int, title: str) -> list[str]:
    """One grid of pages with its title and counts."""
    play.check()
    pages = play.pages
    names = {slot: name for name, slot in play.slots.items() if slot in pages.tables}
    shapes = [f'<text x="{left}" y="22" class="title">{title}</text>']
    for page in range(COLUMNS * ROWS):
        owners = pages.owner.get(page, set())
        name = names[next(iter(owners))] if len(owners) == 1 else ""
        colour = SHARED if len(owners) > 1 else OWN[NAMES.index(name)] if name else FREE
        colour = CACHED if page in pages.cached else colour
        label = f"x{len(owners)}" if len(owners) > 1 else name
        x, y = left + page % COLUMNS * (CELL + GAP), 36 + page // COLUMNS * (CELL + GAP)
        shapes.append(f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" rx="4" fill="{colour}"/>')
        if label:
            shapes.append(f'<text x="{x + CELL / 2:g}" y="{y + 20}" class="cell">{label}</text>')
    free = COLUMNS * ROWS - len(pages.owner) - len(pages.cached)
    counts = f"{len(pages.owner)} owned, {len(pages.cached)} cached, {free} free"
    return [*shapes, f'<text x="{left}" y="{36 + ROWS * (CELL + GAP) + 16}" class="note">{counts}</text>']


def draw() -> str:
    """The whole figure."""
    play = Play()
    prefix = list(range(1000, 1080))
    play.add("A", [*prefix, *range(100, 120)], 60)
    for _ in range(30):
        play.step()
    panels = draw_panel(play, 10, "A alone")
    for number, name in enumerate("BCD"):
        play.add(name, [*prefix, *range(200 + 40 * number, 230 + 40 * number)], 24 + 6 * number)
    for _ in range(18):
        play.step()
    panels += draw_panel(play, 10 + PANEL, "B, C and D share A's prefix")
    while play.step():
        pass
    play.add("E", list(range(2000, 2180)), 40)
    for _ in range(20):
        play.step()
    panels += draw_panel(play, 10 + 2 * PANEL, "all ended, E uses free pages first")
    legend, x = [], 10
    y = 36 + ROWS * (CELL + GAP) + 34
    for colour, text in ((SHARED, "owned by several"), (OWN[0], "owned by one"), (CACHED, "cache"), (FREE, "free")):
        legend.append(f'<rect x="{x}" y="{y}" width="14" height="14" rx="3" fill="{colour}" stroke="#bbb"/>')
        legend.append(f'<text x="{x + 20}" y="{y + 12}" class="note">{text}</text>')
        x += 40 + 8 * len(text)
    width, height = 3 * PANEL, y + 24
    style = (
        "text { font-family: sans-serif; fill: #333 } .title { font-size: 15px; font-weight: bold } "
        ".note { font-size: 13px } .cell { font-size: 12px; fill: #fff; text-anchor: middle }"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    background = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    return "\n".join([head, f"<style>{style}</style>", background, *panels, *legend, "</svg>", ""])


def main() -> None:
    """Write the figure, or with --check fail if the stored one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the figure is out of date")
    figure = draw()
    if parser.parse_args().check:
        raise SystemExit(OUTPUT.read_text(encoding="utf-8") != figure)
    OUTPUT.write_text(figure, encoding="utf-8")


if __name__ == "__main__":
    main()
