"""Snapshots of rows with drafts: a plan has bounds, the device knows where a state is. A page that is found must have been written, and there."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from helpers.effort import TEST_DAY, effort
from helpers.memory_bench import tokens
from helpers.plans import mixed
from helpers.recount import recount
from pagerunner.memory.grant import NO_PAGE, Grant
from pagerunner.memory.manager import KVManager
from pagerunner.memory.prefix import PrefixChain
from pagerunner.memory.rules import FOREVER

HYBRID = {"full": (16, 1), "recurrent": (16, 2)}
DRAFTS, IN_FLIGHT = 7, 2
Tamper = Callable[[Grant], None]


@dataclass
class Text:
    """A request. On the device the state is at `state`, and the next row begins at `start`."""

    name: int
    grant: Grant
    chain: PrefixChain
    tokens: list[int]
    end: int
    start: int = 0
    state: int = 0
    flying: deque[int] = field(default_factory=deque)  # tokens that plans in flight bring
    wide: deque[int] = field(default_factory=deque)  # and their drafts

    def token(self, position: int) -> int:
        return self.name * 100_000 + position


class Device:
    """What was written into pages of states, by their offset: (text's tokens so far)."""

    def __init__(self, megabytes: float, seed: int, tamper: Tamper) -> None:
        self.manager = KVManager(mixed(HYBRID, int(megabytes * (1 << 20)), batched=4000, model_max_len=600))
        self.random = random.Random(seed)
        self.written: dict[int, tuple[int, ...]] = {}
        self.tamper, self.asked, self.found, self.hits = tamper, 0, 0, 0

    def apply(self, text: Text, begin: int, end: int, saves: list[tuple[int, int]], told: list[int]) -> None:
        """A row that passes the positions from `begin` on up to `end`; `told` are its text's tokens as far as the device has them."""
        for position, target in saves:
            if begin < position <= end:
                self.written[target] = tuple(told[:position])
        text.state = end

    def plan(self, text: Text) -> None:
        """A plan with one row, which runs at once; the host is told later."""
        manager, grant = self.manager, text.grant
        manager.begin_step()
        known = len(text.tokens)
        prompt = text.start < known and not text.flying and text.start < grant.target
        low, k = known + len(text.flying) - 1, self.random.randint(0, DRAFTS)
        high = low + sum(text.wide)
        if prompt:
            low, high, k = text.start, known - 1, 0
        if not manager.grow(grant, low if prompt else high, high + 1 + k):
            return
        if prompt:
            manager.publish(grant, text.tokens, known)
        manager.take_table_writes()
        saves = manager.end_plan([(grant, low, high + 1)])
        self.tamper(grant)
        for copy in manager.take_copies():
            self.written[copy.target] = self.written.get(copy.source, ())
        manager.take_fresh()
        self.asked += len(saves)
        told = [*text.tokens, *(text.token(at) for at in range(known, text.start + 1))]
        certain = known if prompt else text.start + 1
        self.apply(text, text.state, certain, [(save.position, save.target) for save in saves], told)
        accepted = self.random.choice((0, k, self.random.randint(0, k)))
        text.start = certain + accepted
        text.flying.append(1 + accepted)
        text.wide.append(k)

    def commit(self, text: Text) -> None:
        """The host is told what the oldest plan brought."""
        count, known = text.flying.popleft(), len(text.tokens)
        text.wide.popleft()
        text.grant.passed = max(text.grant.passed, known)
        text.tokens += [text.token(at) for at in range(known, known + count)]
        self.manager.publish(text.grant, text.tokens, len(text.tokens) - 1 + bool(text.flying))

    def check(self, text: Text) -> None:
        """Every snapshot that can be found of this text is of its position."""
        snapshots = self.manager._snapshots
        for position in range(16, len(text.chain.hashes) * 16 + 1, 16):
            if (page := snapshots.find(text.chain, position)) != NO_PAGE:
                self.found += position > text.grant.target
                held = self.written.get(self.manager.plan.page_offset(1, page))
                assert held == tuple(text.tokens[:position]), f"the snapshot at {position} of text {text.name}"


def live(seed: int, tamper: Tamper = lambda grant: None, megabytes: float = 0.6, texts: int = 12) -> Device:
    """Texts that begin as others did, end at any time, or go on from where they ended."""
    device = Device(megabytes, seed, tamper)
    rand, running, ended = device.random, list[Text](), list[list[int]]()
    for name in range(texts):
        prompt = tokens(rand.randint(1, 150), 7)
        if ended and rand.random() < 0.6:
            prompt = rand.choice(ended) + tokens(rand.randint(1, 30), name * 1_000_000)
        chain = device.manager.chain()
        grant = device.manager.admit(name % 8, chain, prompt[:500], len(prompt[:500]) - 1)
        if grant is not None:
            device.hits += grant.cached_tokens > 150
            begin = grant.cached_tokens
            text = Text(name, grant, chain, prompt[:500], min(len(prompt) + rand.randint(1, 200), 560), begin, begin)
            running.append(text)
        while running and (len(running) > 2 or rand.random() < 0.95):
            text = rand.choice(running)
            if len(text.flying) < IN_FLIGHT and rand.random() < 0.6 and (text.flying or text.start < len(text.tokens)):
                device.plan(text)
            elif text.flying:
                device.commit(text)
            for one in running:
                device.check(one)
            if len(text.tokens) >= text.end or len(text.tokens) + 2 * (1 + DRAFTS) > 590:
                device.manager.release(text.grant)
                ended.append(text.tokens)
                running.remove(text)
        recount(device.manager)
    return device


def test_a_snapshot_that_is_found_is_of_its_position() -> None:
    runs = [live(TEST_DAY + number) for number in range(effort(6, 60))]
    assert sum(device.found for device in runs) > 0 and sum(device.hits for device in runs) > 0


def _too_soon(grant: Grant) -> None:
    grant.passed = FOREVER


def _once(grant: Grant) -> None:
    grant.asks_again = False


@pytest.mark.parametrize("fault", [_too_soon, _once])
def test_planted_faults_are_noticed(fault: Tamper) -> None:
    with pytest.raises(AssertionError, match="the snapshot at"):
        for seed in range(40):
            live(seed, fault)


def test_a_snapshot_is_asked_for_until_a_plan_must_have_passed_it() -> None:
    manager = KVManager(mixed(HYBRID, 1 << 20, batched=4000, model_max_len=600))
    chain, prompt = manager.chain(), tokens(40)
    grant = manager.admit(0, chain, prompt, 39)
    assert grant is not None and manager.grow(grant, 0, 40) == 40
    manager.publish(grant, prompt, 40)
    assert [save.position for save in manager.end_plan([(grant, 0, 40)])] == [32]
    asked = []
    for low, high in ((57, 60), (58, 64), (61, 67), (62, 67), (63, 70), (64, 71), (67, 71)):
        manager.grow(grant, high, high + 4)
        asked.append([save.position for save in manager.end_plan([(grant, low, high + 1)])])
        manager.publish(grant, [*prompt, *range(60)], low + 1)
        there = manager._snapshots.find(chain, 64) if len(chain.hashes) >= 4 else NO_PAGE
        assert (there != NO_PAGE) == (low >= 63), "found when a plan was made that must have passed it"
    assert asked == [[], [64], [64], [64], [64], [], []]
    recount(manager)


def test_of_two_snapshots_that_are_unsure_at_once_one_stays_in_the_end() -> None:
    """With 33 tokens a row and two plans in flight, bounds are further apart than latest snapshots."""
    manager = KVManager(mixed(HYBRID, 1 << 20, batched=4000, model_max_len=600))
    chain, prompt = manager.chain(), tokens(40)
    grant = manager.admit(0, chain, prompt, 39)
    assert grant is not None and manager.grow(grant, 0, 40) == 40
    manager.publish(grant, prompt, 40)
    manager.end_plan([(grant, 0, 40)])
    text = [*prompt, *range(200)]
    for low, high in ((64, 70), (120, 130), (125, 195), (196, 196)):  # 64 is sure, 128 and 192 are not, all are sure
        manager.grow(grant, high, high + 4)
        manager.end_plan([(grant, low, high + 1)])
        manager.publish(grant, text, low + 1)
    found = [position for position in (64, 128, 192) if manager._snapshots.find(chain, position) != NO_PAGE]
    assert found == [192]
    recount(manager)


def test_a_plan_asks_for_two_snapshots_of_a_row_at_most() -> None:
    """As many as graphs have room for. Bounds this far apart need several plans in flight."""
    manager = KVManager(mixed(HYBRID, 1 << 20, batched=4000, model_max_len=600))
    grant = manager.admit(0, manager.chain(), tokens(40), 39)
    assert grant is not None and manager.grow(grant, 0, 40) == 40
    manager.end_plan([(grant, 0, 40)])
    asked = []
    for high in (70, 135, 200, 260):
        manager.grow(grant, high, high + 4)
        asked.append([save.position for save in manager.end_plan([(grant, 50, high + 1)])])
    assert asked == [[64], [64, 128], [64, 128], [64, 128]]
    manager.release(grant)
    recount(manager)
