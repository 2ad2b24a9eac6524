"""Places that clients share: none is lost, whoever leaves and whenever."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from pagerunner.text.fair_slots import FairSlots


def test_the_client_with_the_fewest_places_is_next() -> None:
    async def main() -> None:
        slots = FairSlots(2)
        await slots.acquire("a")
        await slots.acquire("a")
        order: list[str] = []

        async def wait(source: str) -> None:
            await slots.acquire(source)
            order.append(source)

        waiting = [asyncio.create_task(wait(source)) for source in ("a", "a", "b")]
        await asyncio.sleep(0)
        assert not slots.take("c")
        slots.release("a")
        slots.release("a")
        await asyncio.gather(*waiting[:1], waiting[2])
        assert order == ["b", "a"]
        waiting[1].cancel()

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(5))
def test_no_place_is_lost_when_waiters_leave(seed: int) -> None:
    random_ = random.Random(seed)
    held: Counter[str] = Counter()

    async def use(slots: FairSlots, source: str) -> None:
        await slots.acquire(source)
        held["all"] += 1
        try:
            assert held["all"] <= 3
            for _ in range(random_.randrange(3)):
                await asyncio.sleep(0)
        finally:
            held["all"] -= 1
            slots.release(source)

    async def main() -> None:
        slots = FairSlots(3)
        tasks = []
        for _ in range(300):
            tasks.append(asyncio.create_task(use(slots, random_.choice("abc"))))
            if random_.random() < 0.5:
                random_.choice(tasks).cancel()
            if random_.random() < 0.5:
                await asyncio.sleep(0)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(one is None or isinstance(one, asyncio.CancelledError) for one in results)
        assert slots.free == 3 and all(slots.take("d") for _ in range(3)) and not slots.take("d")

    asyncio.run(main())
