"""Draw docs/processes.svg: the processes of a server, what runs in each, and what travels between them.

python scripts/draw_processes.py
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

OUTPUT = Path(__file__).resolve().parents[1] / "docs" / "processes.svg"
WIDTH, HEIGHT = 960, 550
INK, LINE, PANEL, MUTED, ACCENT = "#1a2230", "#8e99a8", "#f3f5f8", "#566173", "#2457d6"


@dataclass(frozen=True)
class Box:
    """A process (or what stands beside them): its name, where it lies, the folders whose code runs there, and whether there may be several."""

    name: str
    x: int
    y: int
    width: int
    height: int
    lines: tuple[str, ...]
    ours: bool = True
    several: bool = False


CLIENTS = Box("clients", 20, 120, 120, 90, ("OpenAI clients,", "curl, the page /ui"), ours=False)
SERVER = Box(
    "API process",
    200,
    60,
    260,
    210,
    (
        "server/gate.py: keys, limits",
        "server/: HTTP, chat, streams",
        "text/: tokenise, detokenise",
        "engine/frontend/: requests in,",
        "outputs to text",
        "engine/core/client.py",
    ),
    several=True,
)
CORE = Box(
    "engine core (-dp: several)",
    650,
    60,
    290,
    210,
    (
        "engine/core/core.py: the loop",
        "sched/ and memory/: a StepPlan",
        "engine/core/executors/: plans to ranks",
        "threads: next masks of grammars",
    ),
    several=True,
)
TEMPLATES = Box("template workers", 150, 340, 180, 64, ("render chat templates,", "no keys, 512 MiB, 5 s"))
GRAMMARS = Box("grammar helpers", 370, 340, 180, 64, ("try a grammar before", "it may be queued"))
RANKS = Box(
    "rank (a single one runs in the core)",
    650,
    320,
    290,
    90,
    ("runner/: staging, tables, graphs, sampling", "models/, layers/, attention/, ops/", "dist/: sums of ranks"),
    several=True,
)
SUPERVISOR = Box(
    "supervisor",
    150,
    460,
    400,
    64,
    ("starts API processes and cores, and watches them;", "a server with one API process has none"),
)
DEVICE = Box(
    "GPU, or the CPU's threads", 680, 470, 230, 64, ("weights, pages, page tables", "slots' last tokens"), ours=False
)
BOXES = (CLIENTS, SERVER, CORE, RANKS, TEMPLATES, GRAMMARS, SUPERVISOR, DEVICE)
# From, to, and the words beside the arrow: where they begin.
ARROWS = (
    ((140, 150), (200, 150), ("HTTP", 153, 142)),
    ((200, 185), (140, 185), ("events", 150, 202)),
    ((460, 130), (650, 130), ("EngineRequest, abort", 476, 122)),
    ((650, 190), (460, 190), ("tokens, statistics", 476, 182)),
    ((260, 270), (240, 340), ("messages, text", 150, 312)),
    ((400, 270), (430, 340), ("yes, or a sentence", 426, 312)),
    ((760, 270), (760, 320), ("StepPlan", 700, 302)),
    ((820, 320), (820, 270), ("sampled tokens", 830, 302)),
    ((760, 410), (760, 470), ("one copy a step", 662, 446)),
    ((820, 470), (820, 410), ("sampled tokens", 830, 446)),
)


def _text(x: int, y: int, words: str, *, size: int = 13, colour: str = INK, weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" font-weight="{weight}">{escape(words)}</text>'


def _box(box: Box) -> Iterator[str]:
    dash = "" if box.ours else ' stroke-dasharray="5 4"'
    for behind in (6, 0) if box.several else (0,):
        yield (
            f'<rect x="{box.x + behind}" y="{box.y - behind}" width="{box.width}" height="{box.height}" rx="8" fill="{PANEL}" '
            f'stroke="{ACCENT if box.ours else LINE}" stroke-width="1.5"{dash}/>'
        )
    yield _text(box.x + 12, box.y + 22, box.name, weight="600")
    for number, line in enumerate(box.lines):
        yield _text(
            box.x + 12, box.y + 48 + 25 * number if box.height > 100 else box.y + 40 + 16 * number, line, size=12
        )


def draw() -> str:
    """The picture."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" role="img" aria-label="The processes of a server">',
        f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0 0 8 4 0 8z" fill="{MUTED}"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(
            20,
            32,
            "A server's processes. Solid frames are ours, double ones may be several. With LLM, API process and core are one.",
            size=14,
        ),
    ]
    for box in BOXES:
        parts += _box(box)
    for (x1, y1), (x2, y2), (words, x, y) in ARROWS:
        parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{MUTED}" stroke-width="1.5" marker-end="url(#tip)"/>'
        )
        parts.append(_text(x, y, words, size=12, colour=MUTED))
    parts.append(_text(476, 222, "typed messages (msgspec)", size=12, colour=MUTED))
    parts.append(_text(476, 238, "over a local ZeroMQ socket", size=12, colour=MUTED))
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw docs/processes.svg.")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.parse_args(argv).output.write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
