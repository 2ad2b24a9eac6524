"""How long sleep and wake take and how much memory they free, by level, and whether answers stay the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from pagerunner.types import SamplingParams

if TYPE_CHECKING:
    from pagerunner.llm import LLM

MIB = 2**20
NAP = 1.0
"""Seconds asleep. A driver clears memory that was given back before anyone has it again (on an H200 120 GiB take it 0.15 s
after they were released), which who is woken at once has to wait for.
"""
# What is measured: a name, the level, seconds asleep, and the tags that are woken one after the other.
ROUNDS: tuple[tuple[str, int, float, tuple[tuple[str, ...] | None, ...]], ...] = (
    ("level 1, right after the start", 1, NAP, (None,)),
    ("level 1", 1, NAP, (None,)),
    ("level 1, woken at once", 1, 0.0, (None,)),
    ("level 1, by tags", 1, NAP, (("weights",), ("kv_cache",))),
    ("level 2", 2, NAP, (None,)),
    ("level 2, pages first", 2, NAP, (("kv_cache",), ("weights",))),
    ("level 0", 0, 0.0, (None,)),
)


class Nap(msgspec.Struct, frozen=True, kw_only=True):
    """One sleep. Seconds of the calls (`wake` by what was woken), free MiB before, meanwhile and afterwards, and whether a
    prompt's answer after waking was the one before.
    """

    name: str
    sleep: float
    wake: dict[str, float]
    free_before: float
    free_asleep: float
    free_after: float
    same_answer: bool


class SleepReport(msgspec.Struct, frozen=True, kw_only=True):
    """All sleeps, in the order in which they were made."""

    label: str
    naps: list[Nap]

    def text(self) -> str:
        """A table for a person."""
        width = max(len(nap.name) for nap in self.naps)
        lines = [f"{self.label}: seconds, and free MiB before, asleep and after"]
        for nap in self.naps:
            wake = ", ".join(f"{name} {seconds:.3f}" for name, seconds in nap.wake.items())
            free = f"{nap.free_before:,.0f} -> {nap.free_asleep:,.0f} -> {nap.free_after:,.0f}"
            answer = "same answer" if nap.same_answer else "THE ANSWER HAS CHANGED"
            lines.append(f"  {nap.name:<{width}}  sleep {nap.sleep:.3f}  wake {wake}  free {free}  {answer}")
        return "\n".join(lines)


def measure_sleep(llm: LLM, free_bytes: Callable[[], int], *, label: str) -> SleepReport:
    """Sleep and wake in every way of ROUNDS. `free_bytes` reads the free memory of the engine's device."""
    prompt = {"prompt_token_ids": list(range(300, 364))}
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)

    def answer() -> list[int]:
        llm.reset_prefix_cache()  # with a cached prefix, the prompt would run in other shapes and round otherwise
        return list(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)

    expected = answer()
    naps = []
    for name, level, nap, wakes in ROUNDS:
        before = free_bytes()
        started = time.perf_counter()
        llm.sleep(level)
        slept = time.perf_counter() - started
        asleep = free_bytes()
        time.sleep(nap)
        woken: dict[str, float] = {}
        for tags in wakes:
            started = time.perf_counter()
            llm.wake_up(tags)
            woken["all" if tags is None else " and ".join(tags)] = time.perf_counter() - started
        after = free_bytes()
        naps.append(
            Nap(
                name=name,
                sleep=slept,
                wake=woken,
                free_before=before / MIB,
                free_asleep=asleep / MIB,
                free_after=after / MIB,
                same_answer=answer() == expected,
            )
        )
    return SleepReport(label=label, naps=naps)


def device_free_bytes(devices: int) -> int:
    """Free bytes of the first so many CUDA devices together, or of all there are, when all work of this process is done."""
    import torch

    torch.cuda.synchronize()
    return sum(int(torch.cuda.mem_get_info(device)[0]) for device in range(min(devices, torch.cuda.device_count())))
