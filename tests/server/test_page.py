"""The page at /ui: its files, who may have its data, and the page itself in a real headless Chromium."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import pagerunner
from helpers import browser as browsers
from helpers.browser import Browser
from helpers.patience import LONG, patient
from helpers.serving import RunningServer, running_server
from pagerunner.config import EngineArgs
from pagerunner.engine.core.client import DEFAULT_FACTORY
from pagerunner.server.page_routes import FILE_PATHS

pytestmark = pytest.mark.days(2)  # each takes a browser through pages

PACKAGE = Path(pagerunner.__file__).parent
PAGE = PACKAGE / "server" / "page"
IDLE = "return pagerunner.model.plan && pagerunner.model.requests.length === 0"


def test_every_file_is_served_and_names_only_files_that_are(server: RunningServer) -> None:
    assert "/ui" in FILE_PATHS and len(FILE_PATHS) == len(list(PAGE.iterdir()))
    for path in FILE_PATHS:
        response = server.get(path)
        assert response.status_code == 200 and response.headers["content-type"].startswith(("text/", "image/svg"))
        assert "default-src 'none'" in response.headers["content-security-policy"]
        text = response.text
        found = re.findall(r'(?:src|href)="([^"]+)"', text) if path == "/ui" else re.findall(r'from "\./([^"]+)"', text)
        assert {f"/{name}" if path == "/ui" else f"/ui/{name}" for name in found} <= FILE_PATHS
    assert server.get("/ui/none.js").status_code == 404
    assert server.get("/ui/..%2fapp.py").status_code == 404


def test_the_page_asks_nobody_else() -> None:
    for path in PAGE.iterdir():
        outside = re.findall(r"https?://[^\s\"']+", path.read_text(encoding="utf-8"))
        assert set(outside) <= {"http://www.w3.org/2000/svg"}, path.name


def test_the_files_need_no_key_and_the_data_does(text_side: Path) -> None:
    with running_server(EngineArgs(model=str(text_side)), api_keys=["k"], admin_keys=["k"]) as server:
        assert server.get("/ui").status_code == 200
        assert server.get("/ui/main.js").status_code == 200
        assert server.get("/ui/live").status_code == 401
        assert server.get("/ui/").status_code == 401
        with httpx.stream(
            "GET", f"{server.url}/ui/live", headers={"Authorization": "Bearer k"}, timeout=LONG
        ) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            first = json.loads(next(stream.iter_lines()).removeprefix("data: "))
    assert first["plan"] == server.engine.memory_plan and first["requests"] == []


def test_a_stream_doesnt_hold_up_the_servers_end(text_side: Path) -> None:
    with running_server(EngineArgs(model=str(text_side))) as server:
        ended = threading.Event()

        def look() -> None:
            with httpx.stream("GET", f"{server.url}/ui/live", timeout=LONG) as stream:
                for _ in stream.iter_lines():
                    looking.set()
            ended.set()

        looking = threading.Event()
        thread = threading.Thread(target=look)
        thread.start()
        assert looking.wait(LONG)
        server.stop()
        assert ended.wait(LONG)
        thread.join()


# -- in a browser

browser_test = pytest.mark.skipif(browsers.missing() != "", reason=f"no browser: {browsers.missing()}")


@contextmanager
def demo_server(args: dict[str, Any] | None = None, **options: Any) -> Iterator[RunningServer]:
    defaults = {"enable_sleep_mode": True, "kv_cache_memory_bytes": 64 * 2**20, "max_num_seqs": 4}
    args = EngineArgs(model=str(PACKAGE / "demo" / "demo"), **(defaults | (args or {})))
    with running_server(args, core_factory=DEFAULT_FACTORY, **options) as server:
        yield server


@pytest.fixture(scope="module")
def demo() -> Iterator[RunningServer]:
    with demo_server() as server:
        yield server


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsers.browser(tmp_path_factory.mktemp("chromium")) as window:
        yield window


@contextmanager
def looking_at(chromium: Browser, server: RunningServer) -> Iterator[None]:
    """The page of a server that will end: it is left before, and what the browser said about it is forgotten."""
    chromium.screen(1280, 900)
    chromium.open(f"{server.url}/ui")
    yield
    chromium.open("about:blank")
    chromium.complaints()


@pytest.fixture
def page(chromium: Browser, demo: RunningServer) -> Iterator[Browser]:
    """The page, connected to an engine that does nothing."""
    chromium.screen(1280, 900)
    chromium.open(f"{demo.url}/ui")
    chromium.until(IDLE)
    yield chromium
    assert chromium.complaints() == []


def requests(server: RunningServer, count: int, tokens: int = 1500) -> AbstractContextManager[None]:
    """Long requests on one prefix, while the block runs."""
    prompt = "The quick brown fox jumps over the lazy dog. " * 4
    return server.streaming(count, lambda number: [{"prompt": f"{prompt}{number}", "max_tokens": tokens}])


@browser_test
def test_a_chat_shows_its_tokens_with_what_else_could_have_come(page: Browser) -> None:
    page.click("#ask summary")
    page.type("[name=seed]", "1")
    page.type("[name=temperature]", "0")
    page.type("#prompt", "What is 12 + 30?")
    page.click("#send")
    note = page.until(
        "return !document.querySelector('#stop').offsetParent && document.querySelector('.note')?.textContent"
    )
    assert "end: stop" in note and "tokens/s" in note
    tokens = page.js("return [...document.querySelectorAll('.tok:not(.silent)')].map(one => one.textContent)")
    assert "".join(tokens) == "12 + 30 = 42" and len(tokens) > 3
    page.hover(".tok")
    rows = page.js("return [...document.querySelectorAll('#tip tr')].map(one => one.textContent)")
    assert len(rows) == 5 and rows[0].startswith("▸ 1") and rows[0].endswith("%")
    page.js("document.querySelector('#log').focus()")
    page.type("#log", "\ue014\ue014")  # two arrows to the right
    assert page.text(".tok.current") == tokens[1]
    page.type("#prompt", "What is 5 + 6?")
    page.click("#send")
    page.until("return document.querySelectorAll('.note').length === 2")
    assert page.text("article:last-child .text").startswith("5 + 6 = 11")
    page.until(IDLE)
    assert page.js("return pagerunner.model.groups[0].counts[2]") > 0  # cached pages


@browser_test
def test_stop_ends_the_answer_and_frees_its_pages(page: Browser, demo: RunningServer) -> None:
    with requests(demo, 4):
        page.until("return pagerunner.model.requests.length === 4")
        page.type("#prompt", "Tell me a story.")
        page.click("#send")
        row = page.until(
            "return [...document.querySelectorAll('tr.waits')].map(one => one.textContent).find(one => one.startsWith('chat'))"
        )
        assert "waits for a slot" in row
        page.click("#stop")
        page.until("return document.querySelector('.note')?.textContent === 'stopped'")
        page.until("return !pagerunner.model.requests.some(one => one.id.startsWith('chatcmpl'))")
    page.until(IDLE)


@browser_test
def test_pages_fill_and_free_and_say_whose_they_are(page: Browser, demo: RunningServer) -> None:
    used = "return pagerunner.model.groups[0].counts[3] + pagerunner.model.groups[0].counts[4]"
    assert page.js(used) == 0
    with requests(demo, 3):
        few = page.until("return pagerunner.model.requests.length === 3 && pagerunner.model.groups[0].counts[3]")
        assert page.until("return pagerunner.model.groups[0].counts[4]") > 3  # shared pages of the prefix
        page.until(f"return pagerunner.model.groups[0].counts[3] > {few} + 20")
        page.js("document.querySelector('#arena-canvas').focus()")
        page.type("#arena-canvas", "\ue014")
        words = page.until("return document.querySelector('#page-words').textContent")
        assert re.match(r"Page \d+ · slab 0 · group full", words)
        page.js("pagerunner.map.zoomTo(0)")
        held = page.js("return pagerunner.model.requests[0].pages[0].at(-1)")
        x, y = page.js(
            """const {layout, model} = pagerunner.map, per = model.groups[0].perSlab, held = arguments[0];
            const across = Math.round((layout.tileWidth - layout.gap) / layout.width), slab = Math.floor(held / per);
            const cell = held % per, box = document.querySelector('#arena-canvas').getBoundingClientRect();
            return [(slab % layout.columns) * layout.tileWidth + layout.gap + (cell % across + .5) * layout.width - box.width / 2,
                    Math.floor(slab / layout.columns) * layout.tileHeight + layout.gap + (Math.floor(cell / across) + .5) * layout.height
                    - document.querySelector('#arena').scrollTop - box.height / 2]""",
            held,
        )
        page.hover("#arena-canvas", round(x), round(y))
        tip = page.text("#tip")
        assert f"Page {held} " in tip and "tokens" in tip and "cmpl…" in tip, tip
        assert page.text("#figure-running") == "3"
        assert page.js("return pagerunner.model.steps.length") > 5 and "rows" in page.text("#step-words")
    page.until(IDLE)
    assert page.js(used) == 0 and page.js("return pagerunner.model.groups[0].counts[2]") > 0
    page.click("#reset")
    page.until("return pagerunner.model.groups[0].counts[2] === 0")


@browser_test
def test_sleep_and_wake_by_button(page: Browser, demo: RunningServer) -> None:
    page.click("#sleep")
    page.until("return document.querySelector('#status').textContent === 'asleep, level 1'")
    assert page.js("return [document.querySelector('#sleep').disabled, document.querySelector('#wake').disabled]") == [
        True,
        False,
    ]
    page.click("#wake")
    page.until("return document.querySelector('#status').textContent === 'awake'")
    page.type("#prompt", "What is 12 + 30?")
    page.click("#send")
    page.until("return document.querySelector('.note')")
    assert page.text("article:last-child .text").startswith("12 + 30 = 42")


DIALOG_OPEN = "return document.querySelector('#key-dialog').open"
DIALOG_CLOSED = "return !document.querySelector('#key-dialog').open"
STATUS = "return document.querySelector('#status').textContent === arguments[0]"


@pytest.fixture(scope="module")
def guarded(text_side: Path) -> Iterator[RunningServer]:
    """Over the fake core, which is there in no time: keys are the server's."""
    with running_server(EngineArgs(model=str(text_side)), api_keys=["secret"], admin_keys=["boss"]) as server:
        yield server


@pytest.fixture
def locked(chromium: Browser, guarded: RunningServer) -> Iterator[Browser]:
    """The page of a server with an API key and an admin key, which asks for them."""
    chromium.screen(1280, 900)
    chromium.open(f"{guarded.url}/ui")
    chromium.until(DIALOG_OPEN)
    yield chromium
    assert all("401" in line for line in chromium.complaints())


def give(page: Browser, api: str, admin: str) -> None:
    for name, key in (("api", api), ("admin", admin)):
        page.clear(f"#{name}-key")
        if key:
            page.type(f"#{name}-key", key)
    page.click("#use-keys")


def ask(page: Browser) -> str:
    """The answer of a server over the fake core, to which the question says it."""
    page.type("#prompt", "<|begin|>12 + 30 = 42")
    page.click("#send")
    page.until("return document.querySelector('.note')?.textContent")
    return page.text("article:last-child .text")


@browser_test
def test_two_keys_open_the_playground_and_the_figures_and_are_forgotten_by_a_reload(
    locked: Browser, guarded: RunningServer
) -> None:
    assert locked.text("#api-key-words") == "The server asks for an API key."
    give(locked, "secret", "boss")
    locked.until(IDLE)
    assert locked.js(DIALOG_CLOSED) and locked.js(STATUS, "awake")
    assert ask(locked) == "12 + 30 = 42"
    locked.click("#reset")
    locked.until("return !document.querySelector('#reset').disabled")
    assert locked.text("#notice") == ""
    assert locked.js("return [document.cookie, localStorage.length, sessionStorage.length]") == ["", 0, 0]
    locked.open(f"{guarded.url}/ui")
    locked.until(DIALOG_OPEN)


@browser_test
def test_a_wrong_key_is_named_in_the_dialog(locked: Browser) -> None:
    give(locked, "wrong", "boss")
    locked.until("return document.querySelector('#api-key-words').textContent.includes('does not take this API key')")
    assert locked.text("#admin-key-words") == "" and locked.js(DIALOG_OPEN)
    give(locked, "secret", "wrong")
    locked.until("return document.querySelector('#admin-key-words').textContent.includes('not take this admin key')")
    assert locked.text("#api-key-words") == "" and locked.js(DIALOG_OPEN)
    give(locked, "secret", "boss")
    locked.until(IDLE)
    assert locked.js(DIALOG_CLOSED)


@browser_test
def test_the_playground_works_without_an_admin_key_and_the_figures_say_what_they_need(locked: Browser) -> None:
    give(locked, "secret", "")
    locked.until(STATUS, "playground only")
    assert "need the admin key" in locked.text("#arena-empty")
    assert ask(locked) == "12 + 30 = 42"
    locked.js("return new Promise(done => setTimeout(done, 1200))")  # nothing asks again by itself
    assert locked.js(DIALOG_CLOSED) and locked.js(STATUS, "playground only")
    locked.click("#keys")
    give(locked, "secret", "boss")
    locked.until(IDLE)


@browser_test
def test_the_admin_key_alone_opens_everything(locked: Browser) -> None:
    give(locked, "", "boss")
    locked.until(IDLE)
    assert ask(locked) == "12 + 30 = 42"


@browser_test
def test_a_server_without_an_admin_key_says_so_and_is_not_asked_again(chromium: Browser, text_side: Path) -> None:
    with running_server(EngineArgs(model=str(text_side)), api_keys=["secret"]) as server, looking_at(chromium, server):
        chromium.until(DIALOG_OPEN)
        give(chromium, "secret", "")
        chromium.until(STATUS, "playground only")
        assert "started without --admin-key" in chromium.text("#arena-empty") and chromium.js(DIALOG_CLOSED)
        assert ask(chromium) == "12 + 30 = 42"


@browser_test
def test_before_the_first_figures_there_is_a_sentence_and_no_black_box(locked: Browser) -> None:
    assert locked.js(
        "return document.querySelector('#arena').hidden && !document.querySelector('#overview').offsetParent"
    )
    assert locked.js("return document.querySelector('#arena-empty').offsetHeight > 40")
    assert "No step has run yet." in locked.text(".chart") and locked.js("return !pagerunner.model.plan")


@browser_test
def test_sleep_is_off_with_a_reason_where_the_server_cannot(chromium: Browser, text_side: Path) -> None:
    with running_server(EngineArgs(model=str(text_side))) as server, looking_at(chromium, server):
        chromium.until(IDLE)
        assert chromium.js("return document.querySelector('#sleep').disabled")
        assert "--enable-sleep-mode" in chromium.text("#no-sleep")
        assert chromium.js("return document.querySelector('#no-sleep').offsetWidth > 0")
        assert "--enable-sleep-mode" in chromium.js("return document.querySelector('#sleep').title")


@browser_test
def test_a_few_used_slabs_among_a_thousand_fill_the_map(chromium: Browser) -> None:
    with demo_server({"kv_cache_memory_bytes": 4 * 2**30}) as server, looking_at(chromium, server):
        chromium.until(IDLE)
        assert re.fullmatch(r"All 1,0\d\d slabs are free\.", chromium.text("#arena-empty"))
        with requests(server, 3):
            chromium.until("return pagerunner.model.requests.length === 3 && pagerunner.map.layout")
            tiles, cell, all_ = chromium.until(
                "const {map} = pagerunner; return map.tiles?.count && [map.tiles.count, map.layout.width, map.drawsAll]"
            )
            assert tiles < 10 and cell >= 16 and not all_
            assert re.search(r"1,0\d\d slabs of 4\.\d MiB, \d in use", chromium.text("#memory-summary"))
            chromium.js(
                "const one = document.querySelector('#extent'); one.value = 'all'; one.dispatchEvent(new Event('change'))"
            )
            chromium.until("return pagerunner.map.tiles.count > 1000")


@browser_test
def test_the_charts_have_axes_with_numbers_and_units_and_fill_their_place(page: Browser, demo: RunningServer) -> None:
    with requests(demo, 3):
        axes = page.until("return pagerunner.timeline.axes?.bars > 40 && pagerunner.timeline.axes")
        assert axes["tokens"][:2] == ["1", "10"]
        assert len(axes["seconds"]) == 3 and all(re.fullmatch(r"[\d.]+ m?s", word) for word in axes["seconds"])
        assert axes["bars"] * axes["pitch"] >= 0.95 * (axes["width"] - axes["left"])
        gap = page.js(
            """const panel = document.querySelector('.steps').getBoundingClientRect(),
            last = document.querySelector('.steps .legend').getBoundingClientRect(); return panel.bottom - last.bottom"""
        )
        assert gap < 20
    page.until(IDLE)


@browser_test
@pytest.mark.parametrize("width", [1280, 390])
def test_the_requests_show_whole_rows_and_every_figure(page: Browser, width: int) -> None:
    page.screen(width, 844)
    faults = page.js(
        """const {model} = pagerunner, before = model.requests;
        model.requests = Array.from({length: 40}, (_, i) => ({id: 'chatcmpl-' + 'a'.repeat(20) + i, slot: i % 2 ? -1 : i, age: 8.2 + 31 * i,
          prompt: 131072, tokens: 131073, computed: 131073, cached: 100000, limit: 262144, wait: i % 2 ? 'snapshot' : '',
          pages: [Int32Array.of(1, 2, 3)]}));
        pagerunner.show();
        const box = document.querySelector('.scroll'), rows = [...document.querySelectorAll('#request-rows tr')], faults = [];
        const high = rows[1].offsetTop - rows[0].offsetTop || rows[0].offsetHeight, edge = box.getBoundingClientRect();
        const whole = (box.clientHeight - (rows[0].getBoundingClientRect().top - edge.top)) / high;
        if (Math.abs(whole - Math.round(whole)) > .05) faults.push('a row is cut: ' + whole);
        if (box.scrollWidth > box.clientWidth) faults.push('it scrolls sideways');
        for (const cell of rows[1].children) {
          if (cell.getBoundingClientRect().right > edge.right + .5) faults.push(cell.textContent + ' sticks out');
          if (cell.scrollWidth > cell.clientWidth + 1 || !cell.offsetWidth) faults.push(cell.textContent + ' is cut by ' + (cell.scrollWidth - cell.clientWidth));
        }
        const ages = rows.map(row => row.lastChild.textContent);
        model.requests = before;
        pagerunner.show();
        return [faults, ages.slice(0, 2), ages.at(-1)]"""
    )
    assert faults == [[], ["8.2 s", "39.2 s"], "1,217.2 s"]


@browser_test
def test_on_a_phone_the_playground_comes_first_and_the_engines_buttons_are_folded_away(page: Browser) -> None:
    page.screen(390, 844)
    page.until("return !document.querySelector('#controls').open")
    assert page.js("return document.querySelector('.chat').getBoundingClientRect().top") < 80
    assert page.js("return document.querySelector('#send').getBoundingClientRect().bottom") < 844
    assert not page.js("return document.querySelector('#reset').checkVisibility()")
    page.click("#controls summary")
    assert page.js("return document.querySelector('#reset').checkVisibility()")
    assert page.js("return document.documentElement.scrollWidth <= innerWidth")
    page.screen(1280, 900)
    page.until("return document.querySelector('#controls').open && document.querySelector('#reset').checkVisibility()")


@browser_test
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390, 320])
def test_nothing_sticks_out_and_everything_has_a_name(
    page: Browser, demo: RunningServer, width: int, dark: bool
) -> None:
    with requests(demo, 2):
        page.until("return pagerunner.model.requests.length === 2")
        page.screen(width, 844, dark=dark)
        page.until(f"return innerWidth <= {width} && pagerunner.map.layout")
        assert page.js("return document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"
        nameless = page.js(
            """return [...document.querySelectorAll('button, input, select, textarea, canvas')].filter(one =>
            !(one.textContent.trim() && one.matches('button')) && !one.labels?.length && !one.ariaLabel).map(one => one.outerHTML)"""
        )
        assert nameless == []
        ground = page.js("return getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground))) < 200) == dark
    page.until(IDLE)


@browser_test
def test_several_groups_have_their_own_hit_rates(page: Browser) -> None:
    words = page.js(
        """const {model} = pagerunner, {groups, stats} = model, [one] = groups;
        model.groups = ['full', 'window', 'state'].map((name) => Object.assign(Object.create(one), {name}));
        model.stats = {...stats, groups: [[800, 600], [600, 150], [0, 0]].map(([queries_total, hits_total]) => ({queries_total, hits_total}))};
        document.querySelector('#paint').dispatchEvent(new Event('change'));
        const words = document.querySelector('#legend').textContent;
        Object.assign(model, {groups, stats});
        document.querySelector('#paint').dispatchEvent(new Event('change'));
        return words;"""
    )
    assert words.endswith("group full, prefix hits 75.0 %group window, prefix hits 25.0 %group state"), words


@browser_test
def test_50000_pages_and_256_requests_are_drawn_in_a_frame(page: Browser) -> None:
    """A synthetic state of that size, with every page held by somebody: taking it in and drawing it."""
    spent = page.js(
        """const {model, map} = pagerunner, big = new model.constructor(), pages = 195, groups = [{name: 'full', kind: 'full',
          page_tokens: 16, page_bytes: 81920, pages_per_slab: 50}];
        const text = (array) => { let s = ''; for (const b of new Uint8Array(array.buffer)) s += String.fromCharCode(b); return btoa(s); };
        const slabs = Int32Array.from({length: 1000}, (_, i) => i), whole = {plan: {groups, num_slabs: 1000, slab_bytes: 4096000,
          kv_bytes: 4096000000}, clock: 1, sleep: -1, stats: {...model.stats}, first_token: [], inter_token: [], steps: [],
          slabs: [text(slabs), text(new Uint8Array(1000))], cached: [''], requests: Array.from({length: 256}, (_, i) =>
          ['chatcmpl-' + i, i, 1, 3000, 3120, 3119, 0, 4000, '', [[0, text(Int32Array.from({length: pages}, (_, p) => i + 256 * p % 50000))]]])};
        big.apply(whole);
        const next = {...whole, plan: undefined, slabs: undefined, cached: [null], requests: whole.requests.map(r => [...r.slice(0, 9), [null]])};
        const started = performance.now();
        for (let i = 0; i < 10; i++) big.apply(next);
        const taken = (performance.now() - started) / 10;
        map.model = big;
        map.draw();
        return new Promise(done => setTimeout(() => { const drawn = map.drawMs; map.model = model; map.draw();
          done([taken, drawn, big.groups[0].counts[3]]); }, 150));"""
    )
    assert spent[2] > 49_000
    assert spent[0] < patient(50) and spent[1] < patient(50), f"{spent[0]:.1f} ms to take in, {spent[1]:.1f} ms to draw"
    print(f"50,000 pages: {spent[0]:.1f} ms to take a frame in, {spent[1]:.1f} ms to draw")
