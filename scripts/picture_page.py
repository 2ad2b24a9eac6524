"""Take the pictures of the page at /ui that the documents show: docs/ui-light.png and docs/ui-dark.png.

    python scripts/picture_page.py [--folder docs]

Needs chromium and chromedriver. Serves the demo model demo-hybrid on loopback, keeps it busy with streams on shared prefixes, talks to
it in the playground, and points at a token (light) and at a page that requests share (dark).
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.browser import Browser, browser, missing  # noqa: E402
from helpers.serving import running_server  # noqa: E402
from pagerunner.config import EngineArgs  # noqa: E402
from pagerunner.engine.core.client import DEFAULT_FACTORY  # noqa: E402

STREAMS = 15
ASKED = ("What is 12 + 30?", "Tell me a story.")
SHARED_PAGE = """const {map, model} = pagerunner, group = model.groups.findIndex(one => one.name === 'full');
  const page = model.groups[group].state.indexOf(4), per = model.groups[group].perSlab, slab = Math.floor(page / per);
  if (page < 0) return null;
  const {columns, tileWidth, tileHeight, gap} = map.layout, tile = map.tiles.find(slab, page % per), box = map.canvas.getBoundingClientRect();
  const across = Math.round((tileWidth - gap) / map.layout.width), cell = page % per;
  return [tile % columns * tileWidth + gap + (cell % across + .5) * map.layout.width - box.width / 2,
    Math.floor(tile / columns) * tileHeight + gap + (Math.floor(cell / across) + .5) * map.layout.height - box.height / 2];"""


def bodies(number: int) -> Iterator[dict[str, Any]]:
    """Endless requests on one of four prefixes."""
    for count in itertools.count(1):
        prompt = "The quick brown fox jumps over the lazy dog. " * (4 + 5 * (number % 4))
        yield {"prompt": f"{prompt}{number * 100 + count}", "max_tokens": 100 + 37 * number}


def talk(page: Browser) -> None:
    """Ask in the playground, and wait for the answers."""
    for count, text in enumerate(ASKED, start=1):
        page.type("#prompt", text)
        page.click("#send")
        page.until(f"return document.querySelectorAll('.note').length === {count}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Take the pictures of /ui.")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs")
    folder = parser.parse_args(argv).folder
    if missing():
        raise SystemExit(f"No picture: {missing()}.")
    model = str(ROOT / "src" / "pagerunner" / "demo" / "demo-hybrid")
    args = EngineArgs(model=model, enable_sleep_mode=True, kv_cache_memory_bytes=24 * 2**20, max_num_seqs=12)
    with running_server(args, core_factory=DEFAULT_FACTORY) as server, browser(Path(tempfile.mkdtemp())) as page:
        page.screen(1280, 1000)
        page.open(f"{server.url}/ui")
        page.until("return window.pagerunner && pagerunner.model.plan")
        page.js("document.querySelector('#model option').textContent = 'demo-hybrid'")
        talk(page)
        with server.streaming(STREAMS, bodies):
            time.sleep(12)
            tokens = page.js("return document.querySelectorAll('article:last-child .tok').length")
            page.js("document.querySelector('#log').focus()")
            page.type("#log", "\ue012" * (tokens // 3))  # arrows to the left, from the last token
            page.picture(folder / "ui-light.png")
            page.screen(1280, 1000, dark=True)
            time.sleep(1)
            place = page.until(SHARED_PAGE)
            page.hover("#arena-canvas", round(place[0]), round(place[1]))
            time.sleep(0.5)
            page.picture(folder / "ui-dark.png")


if __name__ == "__main__":
    main()
