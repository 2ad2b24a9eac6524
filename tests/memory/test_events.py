"""What readers of KV events believe to be cached is what the prefix index has, whatever the traffic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from helpers.effort import effort
from helpers.plans import one_group
from helpers.traffic import Traffic, expect_failure, mixes, run_until
from pagerunner.memory import growth, rules
from pagerunner.memory.events import BlockShape, Change, LoggedIndex
from pagerunner.memory.manager import KVManager
from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.memory.prefix import PrefixChain, PrefixIndex

KINDS = ["full", "latent-1", "latent-4", "window-5", "window-40", "chunked-32", "recurrent"]


@st.composite
def plans(draw: st.DrawFn) -> MemoryPlan:
    """Pools with a group that keeps every token, and any others; or with a window alone."""
    if draw(st.integers(0, 9)) == 0:
        return draw(mixes(("window-40",)))
    first = draw(st.sampled_from(["full", "latent-1", "latent-4"]))
    others = draw(st.lists(st.sampled_from(KINDS), max_size=2))
    return draw(mixes(tuple(dict.fromkeys((first, *others)))))


class Reader:
    """What a reader makes of changes: for each medium, the beginnings of prompts that it has, block by block."""

    def __init__(self) -> None:
        self.cached: dict[str, set[tuple[str, tuple[int, ...]]]] = {}

    def take(self, changes: Sequence[Change | None]) -> None:
        for change in changes:
            if change is None:
                self.cached.clear()
                continue
            held, beginning = self.cached.setdefault(change.medium, set()), text(change.block)
            assert (beginning in held) is not change.here, "told twice"
            if change.here:
                held.add(beginning)
            else:
                held.remove(beginning)


def text(block: Any) -> tuple[str, tuple[int, ...]]:
    """A block's salt, and all tokens up to its end."""
    parts: list[Any] = [block]
    while parts[-1].parent is not None:
        parts.append(parts[-1].parent)
    return parts[-1].salt, tuple(token for part in reversed(parts) for token in part.tokens)


class LoggedManager(KVManager):
    def __init__(self, plan: MemoryPlan, **options: Any) -> None:
        super().__init__(plan, **options, log_events=True)


class LoggedTraffic(Traffic):
    """Each request's tokens are kept, so that all that the index can have is known."""

    manager_class: type[KVManager] = LoggedManager
    pools = plans()
    cachings = st.just(True)
    told: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.reader = Reader()

    def listen(self) -> None:
        events = self.manager.events
        assert events is not None
        self.reader.take(events.take())
        type(self).told += bool(self.reader.cached.get("GPU"))

    reset_prefix_cache = sleep = None  # type: ignore[assignment]  # so often, the cache would mostly be empty

    @rule(choice=st.integers(0, 11))
    def go_on(self, choice: int) -> None:
        """Mostly steps. Seldom everything is forgotten, or some changes don't reach the reader, which is told everything again."""
        if choice == 0:
            self.scheduler.reset_prefix_cache()
        elif choice == 1:
            Traffic.sleep(self)
        elif choice == 2 and self.manager.events is not None:
            self.manager.events.take()
            self.manager.events.retell()
        else:
            for _ in range(10 * choice):
                self.step()

    @invariant()
    def the_reader_knows_what_the_index_has(self) -> None:
        if hasattr(self, "manager"):
            self.listen()
            known, there = self.reader.cached.get("GPU", set()), self.in_index()
            assert known == there, f"told but not there: {known - there}; there but not told: {there - known}"

    def in_index(self) -> set[tuple[str, tuple[int, ...]]]:
        """Beginnings of all prompts and outputs so far that can be found, by the index's own books."""
        found: set[tuple[str, tuple[int, ...]]] = set()
        shape = BlockShape.of(self.plan)
        chains = {
            (request.cache_salt, (*request.prompt_token_ids, *self.outputs[name]))
            for name, request in self.requests.items()
        }
        chains |= {(salt, tuple(words[:-1])) for salt, words in list(chains)}  # its last token may not be computed
        for salt, words in chains:
            chain = self.manager.chain(salt)
            chain.cover(words, len(words))
            behind = False
            for number in reversed(range(len(words) // shape.tokens)):
                there = all(key in self.manager.index.pages[group] for group, key in self.pages(chain, number, shape))
                state = chain.hashes[(number + 1) * shape.tokens // 16 - 1]
                behind = there and (shape.state < 0 or behind or state in self.manager.index.pages[shape.state])
                if behind:
                    found.add((salt, words[: (number + 1) * shape.tokens]))
        return found

    def pages(self, chain: PrefixChain, number: int, shape: BlockShape) -> Iterator[tuple[int, bytes]]:
        for group in shape.groups:
            rule_, size = self.plan.groups[group].rule, self.plan.groups[group].page_tokens
            for page in range(number * shape.tokens // size, (number + 1) * shape.tokens // size):
                yield group, rule_.key(chain, page)


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rules, growth):
        monkeypatch.setattr(module, "SHORT_CHUNK", 24)


def test_a_reader_knows_what_the_index_has_after_random_traffic() -> None:
    LoggedTraffic.told = 0
    run_until(LoggedTraffic, lambda: LoggedTraffic.told > 100, effort(25, 600), steps=30, phases=[Phase.generate])


@pytest.mark.days(2)
@pytest.mark.parametrize("missed", ["publish", "forget"])
def test_a_change_that_nobody_is_told_of_is_noticed(monkeypatch: pytest.MonkeyPatch, missed: str) -> None:
    monkeypatch.setattr(LoggedIndex, missed, getattr(PrefixIndex, missed))
    kinds = {"pools": mixes(("full", "recurrent"))} if missed == "publish" else {}  # snapshots come one by one
    expect_failure(
        type("Broken", (LoggedTraffic,), kinds), (AssertionError,), match="told but not there|there but not told"
    )


def test_pages_that_were_loaded_are_told_when_a_prompt_has_found_them() -> None:
    manager = KVManager(one_group(8), log_events=True)
    events, tokens = manager.events, list(range(50))
    assert events is not None
    chain = manager.chain()
    chain.cover(tokens, 50)
    lease = manager.load([chain.hashes[:3]], [[0, 1, 2]])
    assert lease is not None
    manager.take_transfers()
    manager.end_transfer(lease.number, well=True)
    reader = Reader()
    reader.take(events.take())
    assert not reader.cached, "nobody knows their tokens"
    grant = manager.admit(0, chain, tokens, 49)
    assert grant is not None and grant.cached_tokens == 48
    reader.take(events.take())
    assert reader.cached["GPU"] == {("", tuple(tokens[:size])) for size in (16, 32, 48)}


def test_a_medium_that_holds_a_block_keeps_its_name() -> None:
    """The host's pages outlive the device's; what comes back is told at once, before anybody asks for it."""
    manager = KVManager(one_group(8), log_events=True)
    events, tokens = manager.events, list(range(32))
    assert events is not None
    host = LoggedIndex(1, events, "CPU")
    grant = manager.admit(0, manager.chain(), tokens, 0)
    assert grant is not None and manager.grow(grant, 0, 32)
    manager.publish(grant, tokens, 32)
    first, second = grant.chain.hashes
    host.publish(0, first, 0)
    host.publish(0, second, 1)
    manager.release(grant)
    reader = Reader()
    manager.reset_prefix_cache()
    reader.take(events.take())
    both = {("", tuple(tokens[:16])), ("", tuple(tokens))}
    assert reader.cached == {"GPU": set(), "CPU": both}, "host memory still has them"
    lease = manager.load([[second]], [[1]])
    assert lease is not None
    manager.take_transfers()
    manager.end_transfer(lease.number, well=True)
    reader.take(events.take())
    assert reader.cached["GPU"] == {("", tuple(tokens))}
    host.forget(0, 0)
    host.clear()
    manager.reset_prefix_cache()
    reader.take(events.take())
    assert not any(reader.cached.values()) and not events.blocks
    # nothing is left to remember: the next clear is one event
    manager.reset_prefix_cache()
    assert events.take() == [None]
