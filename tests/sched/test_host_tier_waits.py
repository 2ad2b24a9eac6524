"""Who waits over a host tier: how often it is looked up, what sleep leaves of that, and stores that can't be had."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pagerunner.memory.manager import KVManager
from pagerunner.memory.planner import plan_memory
from pagerunner.memory.prefix import PrefixChain
from pagerunner.memory.specs import FullKV
from pagerunner.sched.scheduler import Scheduler
from pagerunner.tiers.books import Waiting
from pagerunner.tiers.host import HostTier
from pagerunner.tiers.policy import Tiering
from pagerunner.types import EngineRequest, SamplingParams, StepResult, TransferEnd

TOKENS = 160


class Counted(Tiering):
    """Counts what it looks up."""

    looks = 0

    def look_up(self, request: Waiting, behind: Iterable[Waiting] | None = None) -> bool:
        before = self._refused
        found = super().look_up(request, behind)
        self.looks += found or before != self._refused  # else it knew that there is no room
        return found


class Engine:
    """A scheduler whose transfers end with the step that they began with. By default there is room for one prompt of TOKENS and what it generates."""

    def __init__(self, room: int = 250, seqs: int = 4, longest: int = 240) -> None:
        plan = plan_memory(
            [FullKV(1, 16, "bfloat16")],
            page_tokens=16,
            budget_bytes=64 * room,
            model_max_len=longest,
            max_num_seqs=seqs,
            max_num_batched_tokens=64,
        )
        self.manager = KVManager(plan)
        self.host = HostTier(plan, 64 * TOKENS * 8)
        self.tiers = Counted(self.manager, self.host)
        self.tiers.grow(self.host.num_bytes)
        self.scheduler = Scheduler(
            self.manager, max_num_seqs=seqs, max_num_batched_tokens=64, max_model_len=longest, tiers=self.tiers
        )

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        params = SamplingParams(max_tokens=None, ignore_eos=True)
        self.scheduler.add(
            EngineRequest(request_id=name, prompt_token_ids=prompt, params=params, seed=0, max_tokens=max_tokens)
        )

    def step(self) -> dict[str, int]:
        """The cached tokens of requests that report their first token."""
        plan = self.scheduler.schedule()
        if plan is None:
            return {}
        tokens = [[7] if row.samples else [] for row in plan.rows]
        updates = self.scheduler.commit(plan, StepResult(step_id=plan.step_id, token_ids=tokens))
        for transfer in plan.transfers:
            self.scheduler.end_transfer(TransferEnd(transfer.number, True, 0.01))
        return {update.request_id: update.num_cached_tokens for update in updates if update.num_cached_tokens}

    def run(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for _ in range(1_000):
            if not self.scheduler.has_work:
                return found
            found |= self.step()
        raise AssertionError("requests are left")


def _one_waits() -> Engine:
    """Host memory has a prompt. A request for it waits, as another has the room."""
    engine = Engine()
    engine.add("first", list(range(TOKENS)), 2)
    engine.run()
    engine.add("runs", [5] * TOKENS, 60)
    while engine.scheduler.stats().generation_tokens_total < 10:
        engine.step()
    engine.add("waits", list(range(TOKENS)), 2)
    engine.step()
    assert engine.scheduler.stats().waiting == 1
    return engine


def test_who_has_no_room_is_looked_up_again_only_after_pages_came_back() -> None:
    engine = _one_waits()
    before = engine.tiers.looks
    for _ in range(20):
        engine.step()
    assert engine.scheduler.stats().waiting == 1
    assert engine.tiers.looks == before
    assert engine.run()["waits"] >= TOKENS - 16  # room has come: it loads what host memory has


def test_who_has_no_room_is_not_looked_up_whenever_another_request_ends() -> None:
    engine = Engine()
    engine.add("runs", [5] * TOKENS, 60)
    for number in range(3):  # of a page each: there are 15
        engine.add(f"short {number}", [number] * 4, 3 + number)
    engine.step()
    engine.add("waits", list(range(TOKENS)), 2)
    for _ in range(4):
        engine.step()
    before, version = engine.tiers.looks, engine.manager.version
    while engine.scheduler.stats().running > 1:
        engine.step()
    assert engine.manager.version >= version + 2
    assert engine.tiers.looks == before
    engine.run()


def test_who_has_no_room_is_looked_up_again_when_another_request_computes_its_prompt() -> None:
    engine = Engine()
    for number in range(3):
        engine.add(f"short {number}", [500 + number] * 4, 12 if number else 6)
    engine.add("runs", list(range(TOKENS)), 40)
    engine.step()
    engine.add("waits", [*range(TOKENS), *[600] * 32], 2)
    engine.step()
    assert engine.tiers.looks == 5  # each once, the last one without room
    found: dict[str, int] = {}
    while "waits" not in found:
        found |= engine.step()
    assert found["waits"] == TOKENS
    assert "runs" in engine.scheduler  # it hasn't waited for all the room that it would need alone
    assert engine.tiers.looks == 7  # and twice when pages of its prompt had come: host memory is asked, too


def test_who_waited_while_the_engine_slept_finds_what_host_memory_has() -> None:
    engine = _one_waits()
    sequence = engine.scheduler._state.sequences["waits"]
    sequence.looked_up = True  # as when there was nothing to load, since the device had it
    engine.scheduler.preempt_all()
    assert engine.run()["waits"] >= TOKENS - 16


def test_prompts_that_were_evicted_before_host_memory_was_locked_are_counted() -> None:
    engine = Engine()
    engine.host = HostTier(engine.manager.plan, 64 * TOKENS * 8)
    engine.tiers.host = engine.host  # nothing of it is locked yet
    engine.add("runs", [9] * 8, 60)
    for number in range(5):
        engine.add(f"{number}", [100 * number + token % 100 for token in range(TOKENS)], 1)
        for _ in range(6):
            engine.step()
    engine.tiers.grow(engine.host.num_bytes)
    engine.run()
    stored = len(engine.host.index.pages[0]) // (TOKENS // 16)
    assert (stored, engine.tiers.stats().stores_skipped_total) == (1, 4)


def test_a_store_that_has_no_room_holds_up_no_other_while_host_memory_is_being_locked() -> None:
    plan = plan_memory(
        [FullKV(1, 16, "bfloat16")],
        page_tokens=16,
        budget_bytes=64 * 16 * 4_000,
        model_max_len=40_000,
        max_num_seqs=8,
        max_num_batched_tokens=256,
    )
    manager, host = KVManager(plan), HostTier(plan, 64 * 2**20)
    tiers = Tiering(manager, host)
    tiers.grow(32 * 2**20)  # and no more for now
    num_pages = host.ready_bytes // plan.groups[0].page_bytes
    held = host.take([num_pages - 100])
    assert held is not None
    for slot, length in enumerate((200 * 16, 5 * 16)):
        tokens, chain = [slot] * length, manager.chain()
        grant = manager.admit(slot, chain, tokens, 0, shares=True, parent_id="", prompt_len=length)
        assert grant is not None
        manager.begin_step()
        assert manager.grow(grant, 0, length) == length
        manager.publish(grant, tokens, length)
        tiers.wish(chain, length)
    tiers.begin([], 1, idle=False)
    assert [len(one.fresh[0]) for one in tiers._under_way.values()] == [5]
    tiers.grow(64 * 2**20)
    tiers.begin([], 1, idle=False)
    assert [len(one.fresh[0]) for one in tiers._under_way.values()] == [5, 200]
    assert tiers.counts.stores_skipped == 0


def test_what_came_before_host_memory_was_locked_is_stored_when_it_is() -> None:
    engine = Engine()
    engine.tiers.host = host = HostTier(engine.manager.plan, 64 * TOKENS * 8)  # nothing of it is locked yet
    engine.add("first", list(range(TOKENS)), 1)
    engine.run()
    assert not engine.scheduler.has_work
    chain = engine.manager.chain()
    chain.cover(list(range(TOKENS)), TOKENS)
    assert engine.tiers.storing(chain, TOKENS)
    engine.tiers.grow(host.num_bytes)
    engine.run()
    assert (len(host.index.pages[0]), engine.tiers.stats().stores_skipped_total) == (TOKENS // 16, 0)


class Disk:
    """A store below host memory that has every prompt. What was asked for comes when the test says so."""

    num_reads = hits = released = 0
    room = 100

    @property
    def frees(self) -> bool:
        return bool(self.asked or self.come)

    def __init__(self, host: HostTier, prompts: list[PrefixChain]) -> None:
        self.index = [{key: 0 for chain in prompts for key in chain.hashes}]
        self.host, self.asked, self.come = host, dict[Any, list[bytes]](), list[Any]()

    def settle(self) -> None:
        pass

    def seconds(self, keys: Any) -> float:
        return 1e-6

    def too_large(self, keys: Any) -> bool:
        return False

    def keep(self, pages: Any) -> None:
        pass

    def fetch(self, request: Any, keys: list[list[bytes]], beside: Any) -> bool:
        if len(self.asked) + len(self.come) >= self.room:
            return False
        [self.asked[request]] = keys
        return True

    def arrive(self, request: Any) -> None:
        keys = self.asked.pop(request)
        pages = self.host.take([len(keys)])
        assert pages is not None
        for key, page in zip(keys, pages[0], strict=True):
            self.host.index.publish(0, key, page)
        self.host.release(pages)
        self.come.append(request)

    def arrivals(self, served: Callable[[Any], bool]) -> None:
        before, self.come = self.come, [request for request in self.come if not served(request)]
        self.released += len(before) - len(self.come)


def test_what_comes_from_the_disk_takes_no_room_of_a_request_before_it_in_line() -> None:
    engine = Engine(400, 1)
    engine.add("runs", [5] * TOKENS, 60)
    while engine.scheduler.stats().generation_tokens_total < 10:
        engine.step()
    prompts = {name: [token] * TOKENS for name, token in (("a", 2), ("b", 3))}
    chains = []
    for prompt in prompts.values():
        chains.append(chain := engine.manager.chain(""))
        chain.cover(prompt, TOKENS)
    disk: Any = Disk(engine.host, chains)
    engine.tiers.below = disk
    for name, prompt in prompts.items():
        engine.add(name, prompt, 2)
    engine.step()
    sequences = engine.scheduler._state.sequences
    for name in prompts:
        disk.arrive(sequences[name])
        engine.step()
        assert engine.tiers.provides(sequences["a"]) and not engine.tiers.provides(sequences["b"])
    found = engine.run()
    assert found == {"a": TOKENS - 16, "b": TOKENS - 16} and disk.hits == 2 * (TOKENS - 16) and not disk.come
    loaded = engine.tiers.counts.load_bytes
    assert loaded == 2 * 64 * (TOKENS - 16), "each prompt is loaded once"


def test_who_has_no_room_in_host_memory_for_what_the_disk_has_waits_for_its_turn() -> None:
    engine = Engine(2_000, 8)
    names = [f"{number}" for number in range(6)]
    chains = []
    for number in range(6):
        chains.append(chain := engine.manager.chain(""))
        chain.cover([number] * TOKENS, TOKENS)
    disk: Any = Disk(engine.host, chains)
    disk.room = 1
    engine.tiers.below = disk
    engine.add("runs", [500] * 4, 200)
    engine.step()
    for number, name in enumerate(names):
        engine.add(name, [number] * TOKENS, 2)
    sequences, found, order = engine.scheduler._state.sequences, dict[str, int](), list[str]()
    for _ in range(200):
        found |= engine.step()
        for request in list(disk.asked):
            order.append(request.request_id)
            disk.arrive(request)
        if order == ["0"] and "1" in sequences:  # who is gone is no longer in line
            engine.scheduler.abort(["1"])
    assert order == ["0", "2", "3", "4", "5"], "each in its turn"
    assert {name: found[name] for name in order} == dict.fromkeys(order, TOKENS - 16)
    assert not engine.tiers.fetching and not engine.tiers._line


def test_what_came_for_a_request_before_it_was_sent_back_keeps_no_room_from_it() -> None:
    engine = Engine(2_000, 8)
    chain = engine.manager.chain("")
    chain.cover([3] * TOKENS, TOKENS)
    disk: Any = Disk(engine.host, [chain])
    disk.room = 1
    engine.tiers.below = disk
    engine.add("a", [3] * TOKENS, 2)
    engine.step()
    (request,) = disk.asked
    del disk.asked[request]  # its pages couldn't be read
    disk.come.append(request)
    engine.step()
    assert len(engine.scheduler._state.running) == 1
    engine.scheduler.preempt_all()
    engine.step()
    assert engine.tiers.fetching and request in engine.tiers._line
    engine.step()
    assert request in disk.asked and not engine.tiers._line
    disk.arrive(request)
    engine.run()
    assert engine.tiers.counts.load_bytes == 64 * (TOKENS - 16)


def test_the_first_long_prompt_that_a_disk_has_is_computed_as_nothing_else_would_say_how_long_that_takes() -> None:
    """Of prompts that are found only their ends are computed, so a disk that is slower than computing would be read for ever."""
    engine = Engine(2_000, 4, 400)
    chains = []
    for number in range(4):
        chains.append(chain := engine.manager.chain(""))
        chain.cover([number] * 320, 320)
    disk: Any = Disk(engine.host, chains)
    engine.tiers.below = disk
    sequences = engine.scheduler._state.sequences
    for number in range(2):
        engine.add(f"{number}", [number] * 320, 1)
    found = engine.step()
    assert list(disk.asked) == [sequences["1"]], "others don't wait for it"
    disk.arrive(sequences["1"])
    assert found | engine.run() == {"1": 304}
    engine.tiers.rates.computed(320, 0.32)
    disk.seconds = lambda keys: 0.5
    engine.add("2", [2] * 320, 1)
    assert engine.run() == {} and not disk.asked, "slower than computing"
    disk.seconds = lambda keys: 0.1
    engine.add("3", [3] * 320, 1)
    engine.step()
    disk.arrive(sequences["3"])
    assert engine.run() == {"3": 304}
