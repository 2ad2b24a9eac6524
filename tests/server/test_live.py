"""The page's data: frames put together again give the state; nothing is sampled for nobody; viewers share one sampling."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import numpy as np
import pytest

from helpers.memory_bench import Bench, tokens
from helpers.patience import LONG
from pagerunner.engine.core.live import LiveState, LiveStep, StepLog
from pagerunner.errors import EngineDeadError
from pagerunner.memory.ownership import memory_state
from pagerunner.sched.live import Wait, page_books
from pagerunner.sched.scheduler import Scheduler
from pagerunner.server import live
from pagerunner.server.errors import HttpError
from pagerunner.server.live import LiveFeed, bitmap, frame, percentiles, splice
from pagerunner.server.metrics import Latencies, Metrics
from pagerunner.types import StepPlan, StepRow


def state_of(scheduler: Scheduler, clock: float = 0.0, cost: float = 0.0) -> LiveState:
    slabs, owners, cached = page_books(scheduler.manager)
    return LiveState(clock, cost, -1, scheduler.stats(), slabs, owners, cached, scheduler.live(), [])


class Reader:
    """What page/model.js does with frames."""

    def __init__(self) -> None:
        self.slabs: dict[int, int] = {}
        self.cached: list[list[int]] = []
        self.pages: dict[str, list[list[int]]] = {}

    def apply(self, frame: dict[str, Any]) -> None:
        if "slabs" in frame:
            ids, owners = (base64.b64decode(part) for part in frame["slabs"])
            self.slabs = dict(zip(np.frombuffer(ids, np.int32).tolist(), owners, strict=True))
        self.cached = self.cached or [[] for _ in frame["cached"]]
        for group, bits in enumerate(frame["cached"]):
            if bits is not None:
                flags = np.unpackbits(np.frombuffer(base64.b64decode(bits), np.uint8), bitorder="little")
                self.cached[group] = np.flatnonzero(flags).tolist()
        pages = {}
        for row in frame["requests"]:
            before = self.pages.get(row[0]) or [[] for _ in row[9]]
            pages[row[0]] = [
                old if change is None else [*old[: change[0]], *np.frombuffer(base64.b64decode(change[1]), np.int32)]
                for old, change in zip(before, row[9], strict=False)
            ]
        self.pages = pages


def sent(value: Any) -> Any:
    return json.loads(msgspec.json.encode(value))


@pytest.mark.parametrize(
    "kinds",
    [{"full": (16, 1)}, {"full": (16, 1), "window-40": (16, 3)}, {"full": (16, 1), "recurrent": (16, 2)}],
    ids=lambda kinds: "+".join(kinds),
)
def test_frames_put_together_are_the_state(kinds: dict[str, tuple[int, int]]) -> None:
    bench = Bench(kinds, megabytes=1.5, batched=256)
    reader, last, changes = Reader(), None, 0
    for number in range(60):
        if number < 12:
            bench.add(f"r{number}", tokens(100 + 40 * (number % 3), 50 * (number % 2)), 20)
        if bench.scheduler.has_work:
            bench.step()
        if number == 30:
            bench.scheduler.preempt_all()
        if number % 3:
            continue
        state = state_of(bench.scheduler)
        sent_frame = sent(frame(state, last))
        reader.apply(sent_frame)
        changes += "slabs" not in sent_frame
        last = state
        manager, pool = bench.manager, bench.manager.pool
        assert reader.slabs == pool.owner
        assert reader.cached == [sorted(cached) for cached in pool.cached]
        held = {one.request_id: one.pages for one in bench.scheduler.live() if one.slot >= 0}
        assert {name: pages for name, pages in reader.pages.items() if pages} == {
            name: [np.frombuffer(part, np.int32).tolist() for part in pages] for name, pages in held.items()
        }
        counted = memory_state(manager, {})
        for group, refs in enumerate(pool.refs):
            listed = {page for pages in reader.pages.values() if pages for page in pages[group] if page >= 0}
            assert listed == set(refs) and counted.groups[group].in_use == len(listed)
        fresh = Reader()
        fresh.apply(sent(frame(state, None)))
        assert (fresh.slabs, fresh.cached, fresh.pages) == (reader.slabs, reader.cached, reader.pages)
    assert changes > 3  # not every frame was a whole one


def test_the_page_has_words_for_every_reason_to_wait() -> None:
    panels = (Path(live.__file__).parent / "page" / "panels.js").read_text()
    words = panels.partition("const WAITS = {")[2].partition("};")[0]
    assert set(re.findall(r"^  (\w+): ", words, re.MULTILINE)) == set(get_args(Wait)) - {""}


def test_what_has_not_changed_is_not_sent_again() -> None:
    bench = Bench({"full": (16, 1)})
    bench.run("gone", tokens(100, 5000))
    bench.add("alive", tokens(200), 30)
    bench.step()
    state = state_of(bench.scheduler)
    again = frame(state, state)
    assert "slabs" not in again and again["cached"] == [None]
    assert [row[9] for row in again["requests"]] == [[None]]


def test_a_list_of_pages_changes_at_its_end_or_as_a_whole() -> None:
    old, longer, other = (np.array(pages, np.int32).tobytes() for pages in ([1, 2], [1, 2, 3], [1, 5, 3]))
    assert splice(old, old) is None
    assert splice(old, longer) == (2, base64.b64encode(longer[8:]).decode())
    assert splice(longer, other) == (0, base64.b64encode(other).decode())
    assert splice(longer, old) == (0, base64.b64encode(old).decode())


def test_a_bitmap_reaches_to_the_highest_page() -> None:
    assert bitmap(b"") == ""
    assert base64.b64decode(bitmap(np.array([9, 0, 3], np.int32).tobytes())) == bytes([0b1001, 0b10])


def test_percentiles_are_values_that_occurred() -> None:
    assert percentiles(deque()) == []
    assert percentiles(deque([3.0])) == [3.0, 3.0, 3.0]
    assert percentiles(deque(float(value) for value in range(100))) == [50.0, 90.0, 99.0]


def test_latencies_are_kept_only_while_somebody_looks() -> None:
    metrics = Metrics("m")
    metrics.on_inter_token(1.0)
    metrics.latencies.open = True
    metrics.on_inter_token(2.0)
    metrics.on_first_token(3.0)
    metrics.of_engine(1).on_first_token(4.0)
    assert (list(metrics.latencies.inter_token), list(metrics.latencies.first_token)) == ([2.0], [3.0])


class FakeEngine:
    """Answers with ever new states."""

    places = [(SimpleNamespace(memory_plan={"groups": []}), 0)]

    def __init__(self, cost: float = 0.0) -> None:
        self.calls: list[int] = []
        self.cost = cost
        self.death: Exception | None = None
        self._scheduler = Bench({"full": (16, 1)}).scheduler

    async def watch(self, since: int, engine: int) -> LiveState:
        if self.death is not None:
            raise self.death
        self.calls.append(since)
        state = state_of(self._scheduler, float(len(self.calls)), self.cost)
        return state._replace(steps=[LiveStep(len(self.calls), 0.0, 0.001, 1, 1, False)])


def feed_of(engine: Any, closing: asyncio.Event | None = None, can_sleep: bool = True, ranks: int = 1) -> LiveFeed:
    return LiveFeed(engine, Latencies(), closing or asyncio.Event(), can_sleep=can_sleep, ranks=ranks)


async def read(events: AsyncGenerator[bytes, None]) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((await anext(events)).removeprefix(b"data: "))
    return value


def run(monkeypatch: pytest.MonkeyPatch, main: Callable[[], Coroutine[Any, Any, None]], period: float = 0.01) -> None:
    monkeypatch.setattr(live, "PERIOD_SECONDS", period)
    asyncio.run(main())


def test_nothing_is_asked_of_the_engine_while_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine = FakeEngine()
        feed = feed_of(engine)
        await asyncio.sleep(0.05)
        assert engine.calls == []
        events = feed.view()
        assert "plan" in await read(events) and "plan" not in await read(events)
        await events.aclose()
        assert feed.viewers == 0
        asked = len(engine.calls)
        await asyncio.sleep(0.05)
        assert len(engine.calls) == asked
        events = feed.view()
        first = await read(events)
        assert "plan" in first and engine.calls[asked] == 0  # from the beginning again
        await events.aclose()

    run(monkeypatch, main)


@pytest.mark.parametrize(("can_sleep", "ranks"), [(False, 1), (True, 2)])
def test_a_whole_frame_says_whether_the_engine_can_sleep_and_how_many_ranks_it_has(
    monkeypatch: pytest.MonkeyPatch, can_sleep: bool, ranks: int
) -> None:
    async def main() -> None:
        events = feed_of(FakeEngine(), can_sleep=can_sleep, ranks=ranks).view()
        whole = await read(events)
        assert (whole["can_sleep"], whole["ranks"]) == (can_sleep, ranks)
        assert "can_sleep" not in await read(events)
        await events.aclose()

    run(monkeypatch, main)


def test_viewers_share_one_sampling_and_a_slow_one_gets_a_whole_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine = FakeEngine()
        feed = feed_of(engine)
        quick, slow = feed.view(), feed.view()
        await read(slow)
        clocks = [(await read(quick))["clock"] for _ in range(6)]
        assert clocks == sorted(set(clocks)) and len(engine.calls) <= clocks[-1] + 1
        late = await read(slow)
        assert "plan" in late and [step[0] for step in late["steps"]] == list(range(1, int(late["clock"]) + 1))
        await quick.aclose()
        assert (await read(slow))["clock"] > late["clock"]
        await slow.aclose()

    run(monkeypatch, main)


def test_a_dear_look_makes_looks_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine = FakeEngine(cost=1.0)
        events = feed_of(engine).view()
        await read(events)
        await asyncio.sleep(0.3)
        assert len(engine.calls) == 1  # the next one is due after 200 seconds
        await events.aclose()

    run(monkeypatch, main)


def test_the_engines_end_and_the_servers_end_end_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine, closing = FakeEngine(), asyncio.Event()
        feed = feed_of(engine, closing)
        events = feed.view()
        await read(events)
        engine.death = EngineDeadError("The device is on fire.")
        found = [json.loads(event.removeprefix(b"data: ")) async for event in events]
        assert found[-1] == {"error": "The device is on fire."}
        engine.death = None
        events = feed.view()
        assert "plan" in await read(events)
        closing.set()
        async with asyncio.timeout(LONG):
            assert len([event async for event in events]) < 3
        assert feed.viewers == 0

    run(monkeypatch, main)


def test_there_is_a_limit_to_viewers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(live, "MAX_VIEWERS", 2)
        feed = feed_of(FakeEngine())
        views = [feed.view() for _ in range(2)]
        for view in views:
            await read(view)
        with pytest.raises(HttpError, match="2 viewers watch"):
            feed.view()
        for view in views:
            await view.aclose()
        await feed.view().aclose()

    run(monkeypatch, main)


def test_the_limit_holds_for_viewers_who_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(live, "MAX_VIEWERS", 2)
        feed = feed_of(FakeEngine())
        views = [feed.view() for _ in range(3)]
        assert "error" not in await read(views[0]) and "error" not in await read(views[1])
        assert "2 viewers watch" in (await read(views[2]))["error"] and feed.viewers == 2
        for view in views:
            await view.aclose()
        assert feed.viewers == 0

    run(monkeypatch, main)


def test_steps_are_kept_only_after_somebody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    log = StepLog()
    plan = StepPlan(
        step_id=0, rows=[StepRow(0, 0, 5, [1] * 5, True), StepRow(1, 7, 1, [], True)], admitted=[], table_writes=[],
        zero=[], copies=[], state_saves=[],
    )  # fmt: skip
    assert not log.watched
    assert log.after(0) == [] and log.watched
    log.note(plan, 0.0, True)
    log.note(plan, 0.0, False)
    first, second = log.after(0)
    assert (first.number, first.rows, first.tokens, first.graph) == (1, 2, 6, True)
    assert second.seconds == pytest.approx(second.at - first.at)
    assert log.after(1) == [second]
    monkeypatch.setattr("pagerunner.engine.core.live.time.monotonic", lambda: second.at + 60)
    log.note(plan, 0.0, False)
    assert not log.watched and log.after(0) == []
