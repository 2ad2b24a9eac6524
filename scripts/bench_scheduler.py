"""Times the scheduler and the memory manager alone: no model, no torch. Prints microseconds and milliseconds."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from functools import partial

from memory_models import ModelMemory, gemma3_27b, qwen35_27b
from pagerunner.memory.grant import Grant
from pagerunner.memory.manager import KVManager
from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.memory.planner import plan_memory
from pagerunner.memory.prefix import PrefixChain, chain_seed
from pagerunner.memory.specs import FullKV, LatentKV, RecurrentState, Spec, WindowKV
from pagerunner.runner.copy_launches import copy_launches
from pagerunner.sched.scheduler import Scheduler
from pagerunner.types import EngineRequest, SamplingParams, StepResult


def make_plan(num_pages: int, max_model_len: int, max_num_seqs: int, batched: int) -> MemoryPlan:
    """A plan of one full-attention group with that many 16-token pages."""
    return plan_memory(
        [FullKV(8, 128, "bfloat16")] * 32,
        page_tokens=16,
        budget_bytes=None,
        num_pages_override=num_pages,
        max_model_len=max_model_len,
        model_max_len=1 << 20,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
    )


def make_mixed_plan(name: str) -> MemoryPlan:
    """A plan of several groups with room for four requests of 64K tokens, in 8,192-token steps."""
    full, window = FullKV(8, 64, "bfloat16"), WindowKV(8, 64, "bfloat16", window=128)
    state = RecurrentState(((32, 128, 128), (8192, 3)), ("float32", "bfloat16"))
    specs: list[Spec] = {
        "full + window": [full] * 12 + [window] * 12,
        "full + recurrent": [full] * 12 + [state] * 36,
        "2 latents + window + recurrent": [LatentKV(512, 64, "bfloat16", compression=4)] * 21
        + [LatentKV(512, 64, "bfloat16", compression=128)] * 20
        + [LatentKV(512, 64, "bfloat16", window=128)] * 43
        + [state] * 2,
    }[name]
    sizes = {spec.lifetime: 128 if "latent" in name else 16 for spec in specs}
    return plan_memory(
        specs,
        page_tokens=sizes,
        budget_bytes=16 << 30,
        max_model_len=65_536,
        model_max_len=1 << 20,
        max_num_seqs=4,
        max_num_batched_tokens=8192,
    )


MIXES = ("full + window", "full + recurrent", "2 latents + window + recurrent")


def best(measure: Callable[[], float], repeats: int = 7) -> float:
    """The smallest of several measurements."""
    return min(measure() for _ in range(repeats))


def decode(num_seqs: int, depth: int, steps: int = 400) -> float:
    """Microseconds of schedule + commit per step with `num_seqs` requests decoding from 200 tokens on."""
    length, batched = 200 + steps + 40, 200 * num_seqs
    manager = KVManager(make_plan(-(-length // 16) * num_seqs, length, num_seqs, batched))
    scheduler = Scheduler(
        manager, max_num_seqs=num_seqs, max_num_batched_tokens=batched, max_model_len=length, max_in_flight=depth
    )
    for number in range(num_seqs):
        prompt = [number * 1000 + i for i in range(200)]
        scheduler.add(
            EngineRequest(
                request_id=str(number),
                prompt_token_ids=prompt,
                params=SamplingParams(max_tokens=None),
                seed=0,
                max_tokens=length,
                eos_token_ids=(2, 3),
            )
        )
    plans = [scheduler.schedule() for _ in range(depth)]
    spent = 0.0
    for step in range(steps + 20):
        if step == 20:
            spent = 0.0
        plan = plans.pop(0)
        assert plan is not None and len(plan.rows) == num_seqs
        result = StepResult(step_id=plan.step_id, token_ids=[[7] for _ in plan.rows])
        start = time.perf_counter()
        scheduler.commit(plan, result)
        plans.append(scheduler.schedule())
        spent += time.perf_counter() - start
    return spent / steps * 1e6


def grow_one(plan: MemoryPlan) -> float:
    """Microseconds that the manager spends on one request's decode step: grow, publish, end of plan, over many pages."""
    manager = KVManager(plan)
    tokens = list(range(40_000))
    grant = manager.admit(0, manager.chain(), tokens[:32], 0)
    assert grant is not None and manager.grow(grant, 0, 32)
    start = time.perf_counter()
    for end in range(33, 30_033):
        if end > grant.capacity:
            manager.grow(grant, end - 1, end)
        if end >= grant.next_publish:
            manager.publish(grant, tokens, end)
        manager.take_table_writes()
        manager.end_plan([(grant, end - 1, end)])
        manager.take_fresh()
        manager.take_copies()
    return (time.perf_counter() - start) / 30_000 * 1e6


def hashing() -> float:
    """Milliseconds to hash a 131,072-token prompt."""
    generator = random.Random(0)
    tokens = [generator.randrange(150_000) for _ in range(131_072)]
    chain = PrefixChain(chain_seed())
    start = time.perf_counter()
    chain.cover(tokens, len(tokens))
    return (time.perf_counter() - start) * 1e3


def prefill(full_pool: bool, hashed: bool = True, plan: MemoryPlan | None = None) -> float:
    """Milliseconds to allocate and publish 64K tokens in 8K steps; with `full_pool` pages must first be evicted."""
    manager = KVManager(plan or make_plan(4231, 65_536, 1, 8192))
    passes = [part << 20 for part in range(16 if plan else 2)][::-1] if full_pool else [0]
    spent = 0.0
    for first in passes:
        tokens = list(range(first, first + 65_536))
        chain = manager.chain()
        if hashed:
            chain.cover(tokens, len(tokens))
        start = time.perf_counter()
        grant = manager.admit(0, chain, tokens, len(tokens) - 1)
        assert grant is not None
        for at in range(0, 65_536, 8192):
            assert manager.grow(grant, at, at + 8192) == at + 8192
            manager.publish(grant, tokens, at + 8192)
            manager.take_table_writes()
            manager.end_plan([(grant, at, at + 8192)])
            manager.take_fresh()
            manager.take_copies()
        spent = (time.perf_counter() - start) * 1e3
        manager.release(grant)
    return spent


def lookup() -> float:
    """Milliseconds to admit a 64K-token prompt that is wholly in the index."""
    manager = KVManager(make_plan(8448, 65_536, 1, 8192))
    tokens = list(range(65_536))
    first = manager.admit(0, manager.chain(), tokens, 0)
    assert first is not None and manager.grow(first, 0, 65_536)
    manager.publish(first, tokens, 65_536)
    manager.release(first)
    chain = manager.chain()
    chain.cover(tokens, len(tokens))
    start = time.perf_counter()
    assert manager.admit(0, chain, tokens, 65_535) is not None
    return (time.perf_counter() - start) * 1e3


def moves(model: ModelMemory, steps: int = 3_000) -> tuple[float, int, int]:
    """A pool of 60 GiB while requests of four lengths come and go, `steps` times: the most milliseconds of the host that one
    step spent on moving pages (processor time), the most moves of a step, and all moves.
    """
    plan = plan_memory(
        model.specs,
        page_tokens=16,
        budget_bytes=60 << 30,
        max_model_len=32_768,
        model_max_len=model.length,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
    )
    manager = KVManager(plan)
    spent = 0.0

    def timed(move: Callable[..., bool]) -> Callable[..., bool]:
        def run(*needs: object) -> bool:
            nonlocal spent
            start = time.process_time()
            try:
                return move(*needs)
            finally:
                spent += time.process_time() - start

        return run

    mover = manager._moves
    for name in ("tidy", "make_room_for"):
        setattr(mover, name, timed(getattr(mover, name)))
    generator = random.Random(1)
    running: list[Grant] = []
    slots = set(range(256))
    worst, most, total = 0.0, 0, 0
    for _ in range(steps):
        spent = 0.0
        manager.begin_step()
        leaves = bool(running) and (generator.random() < 0.48 or not slots)
        tokens = [generator.randrange(50_000) for _ in range(generator.choice((200, 2_000, 8_000, 20_000)))]
        grant = None if leaves else manager.admit(min(slots), manager.chain(), tokens, len(tokens) - 1)
        if grant is not None:
            slots.discard(grant.slot)
            running.append(grant)
            end = 0
            while end < len(tokens) and (grown := manager.grow(grant, end, min(len(tokens), end + 8192))):
                end = grown
                manager.end_plan([])
            manager.publish(grant, tokens, end)
        elif running:
            manager.release(gone := running.pop(generator.randrange(len(running))))
            slots.add(gone.slot)
        copies = manager.take_copies()
        manager.take_fresh()
        manager.take_table_writes()
        start = time.process_time()
        copy_launches([(copy.source, copy.target, plan.groups[copy.group].page_bytes) for copy in copies])
        worst = max(worst, spent + time.process_time() - start)
        most, total = max(most, len(copies)), total + len(copies)
    return worst * 1e3, most, total


def main() -> None:
    """Print every figure."""
    gc.disable()
    for num_seqs in (1, 32, 256):
        for depth in (1, 2):
            spent = best(partial(decode, num_seqs, depth))
            print(f"schedule + commit, {num_seqs:3} decoding, depth {depth}: {spent:8.1f} us")
    one_group = make_plan(8192, 65536, 1, 8192)
    print(f"manager, one decode step of one request:  {best(lambda: grow_one(one_group)):8.2f} us")
    for name in MIXES:
        plan = make_mixed_plan(name)
        step = best(partial(grow_one, plan), 3)
        empty = best(partial(prefill, False, True, plan), 3)
        full = best(partial(prefill, True, True, plan), 3)
        print(f"{name}: decode step {step:.2f} us, 64K prefill {empty:.2f} ms, evicting {full:.2f} ms")
    print(f"hash a 131,072-token prompt:              {best(hashing):8.2f} ms")
    print(f"64K prefill in 8K steps, empty pool:      {best(lambda: prefill(False)):8.2f} ms")
    print(f"64K prefill in 8K steps, evicting:        {best(lambda: prefill(True)):8.2f} ms")
    print(f"64K prefill, evicting, with its hashing:  {best(lambda: prefill(True, False)):8.2f} ms")
    print(f"admit a 64K prompt that is all cached:    {best(lookup):8.2f} ms")
    for model in (qwen35_27b(), gemma3_27b()):
        worst, most, total = moves(model)
        print(f"moving pages, {model.name}: at most {worst:.2f} ms and {most} pages a step, {total:,} pages in all")


if __name__ == "__main__":
    main()
