"""The memory table: what published models need here, beside what vLLM 0.26 needs for the same.

vLLM's figures come from running its own planning code on the same configurations. Ours are computed by the planner, and
where a request has to move by the real manager and scheduler; no model runs.

    python scripts/memory_table.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import memory_models
from memory_models import ModelMemory
from pagerunner.memory.grant import Grant
from pagerunner.memory.manager import KVManager
from pagerunner.memory.memory_plan import MemoryPlan
from pagerunner.memory.planner import plan_memory, smallest_plan
from pagerunner.memory.prefix import PrefixChain, chain_seed
from pagerunner.memory.units import human_bytes
from pagerunner.sched.scheduler import Scheduler
from pagerunner.types import EngineRequest, SamplingParams, StateSave, StepResult

GIB = 1 << 30
PAGE_TOKENS = 16
STEP_TOKENS = 8_192
_ROUNDS = 5  # a time is the least of so many measurements: noise of a busy machine only adds


@dataclass(frozen=True, slots=True)
class Row:
    """One line: what is compared, vLLM's figure, ours."""

    what: str
    theirs: str
    ours: str


def model_plan(model: ModelMemory, budget_bytes: int, max_model_len: int | str | None = None) -> MemoryPlan:
    """The model's plan with 8,192-token steps and 16-token pages."""
    return plan_memory(
        model.specs,
        page_tokens=PAGE_TOKENS,
        budget_bytes=budget_bytes,
        max_model_len=max_model_len,
        model_max_len=model.length,
        max_num_seqs=256,
        max_num_batched_tokens=STEP_TOKENS,
    )


def least_bytes(model: ModelMemory, tokens: int) -> int:
    """Bytes with which one request of `tokens` tokens fits, in whole slabs."""
    return smallest_plan(model_plan(model, 64 * GIB), tokens).kv_bytes


class _Watched(KVManager):
    """Notes the most bytes that pages held in any step: with snapshots that it takes, and before its own leftovers are given back."""

    peak_bytes = 0

    def end_plan(self, rows: Iterable[tuple[Grant, int, int]]) -> list[StateSave]:
        before = list(self.pool.used)
        saves = super().end_plan(rows)
        held = zip(self.plan.groups, map(max, before, self.pool.used), strict=True)
        self.peak_bytes = max(self.peak_bytes, sum(group.page_bytes * used for group, used in held))
        return saves


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one request did: the most bytes it held, bytes it left in the prefix cache, and its prefill's steps."""

    peak_bytes: int
    cached_bytes: int
    prefill_steps: int


class Engine:
    """A scheduler and manager over a plan, and a runner that samples token 1 whatever is asked."""

    def __init__(self, plan: MemoryPlan, *, caches: bool = True) -> None:
        self.plan = plan
        self.manager = _Watched(plan, enable_prefix_caching=caches)
        self.scheduler = Scheduler(
            self.manager, max_num_seqs=256, max_num_batched_tokens=STEP_TOKENS, max_model_len=plan.max_model_len
        )
        self._made = 0

    def run(self, prompt: Sequence[int], max_tokens: int = 1) -> Traffic:
        """One request from start to end, alone."""
        self._made += 1
        self.manager.peak_bytes = 0
        self.scheduler.add(
            EngineRequest(
                request_id=str(self._made),
                parent_id=str(self._made),
                prompt_token_ids=list(prompt),
                params=SamplingParams(max_tokens=None, ignore_eos=True),
                seed=0,
                max_tokens=max_tokens,
            )
        )
        prefill_steps = 0
        while self.scheduler.has_work:
            plan = self.scheduler.schedule()
            if plan is None:
                raise RuntimeError("the scheduler has work but plans none")
            prefill_steps += plan.rows[0].start < len(prompt)
            sampled = [[1] if row.samples else [] for row in plan.rows]
            self.scheduler.commit(plan, StepResult(step_id=plan.step_id, token_ids=sampled))
        cached = zip(self.plan.groups, self.manager.pool.cached, strict=True)
        left = sum(group.page_bytes * len(pages) for group, pages in cached)
        return Traffic(self.manager.peak_bytes, left, prefill_steps)

    def reachable_hit(self, prompt: Sequence[int]) -> int:
        """Leading tokens of the prompt that a new request with the same prompt takes from the cache."""
        chain = self.manager.chain()
        grant = self.manager.admit(0, chain, list(prompt), len(prompt) - 1)
        if grant is None:
            return 0
        hit = grant.cached_tokens
        self.manager.release(grant)
        return hit


def prompt_of(tokens: int, seed: int = 7) -> list[int]:
    """Distinct-looking token ids below 128,000."""
    return [(at * 7919 + seed * 104_729) % 128_000 for at in range(tokens)]


def hashing_seconds(tokens: int) -> float:
    """Hashing a prompt for the prefix index, for any model: units are the same for all."""
    prompt = prompt_of(tokens)
    return min(_timed(lambda: PrefixChain(chain_seed()).cover(prompt, tokens)) for _ in range(_ROUNDS))


def manager_seconds(model: ModelMemory, tokens: int, decode_steps: int = 2_048) -> tuple[float, float]:
    """The manager's time for a prefill of `tokens` tokens in 8,192-token steps (its hashes known), and for a decode step.

    Admission, growth, publishing, freeing what windows leave, snapshots and table writes, for all groups.
    """
    plan = model_plan(model, 40 * GIB)
    prompt = prompt_of(tokens + decode_steps)
    prefill, decode = [], []
    for _ in range(_ROUNDS):
        manager = KVManager(plan)
        chain = manager.chain()
        chain.cover(prompt, len(prompt))
        grants: list[Grant] = []

        def fill(manager: KVManager = manager, chain: PrefixChain = chain, grants: list[Grant] = grants) -> None:
            grant = manager.admit(0, chain, prompt[:tokens], tokens - 1)
            if grant is None:
                raise RuntimeError("the request doesn't fit")
            grants.append(grant)
            for start in range(0, tokens, STEP_TOKENS):
                _step(manager, grant, prompt, start, min(start + STEP_TOKENS, tokens))

        def run_on(manager: KVManager = manager, grants: list[Grant] = grants) -> None:
            for start in range(tokens, tokens + decode_steps):
                _step(manager, grants[0], prompt, start, start + 1)

        prefill.append(_timed(fill))
        decode.append(_timed(run_on) / decode_steps)
    return min(prefill), min(decode)


def _step(manager: KVManager, grant: Grant, tokens: Sequence[int], start: int, end: int) -> None:
    """What the scheduler calls for one row of one plan."""
    while start < end:
        stop = manager.grow(grant, start, end) if end > grant.capacity else end
        if not stop:
            raise RuntimeError("the pages don't suffice")
        manager.publish(grant, tokens, stop)
        manager.end_plan([(grant, start, stop)])
        manager.take_table_writes()
        manager.take_fresh()
        manager.take_copies()
        start = stop


def _timed(work: Callable[[], None]) -> float:
    """Processor seconds: waiting for other programs doesn't count."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def planned_rows() -> list[Row]:
    """What the planner answers by itself."""
    gemma, gpt_oss = memory_models.gemma3_27b(), memory_models.gpt_oss_20b()
    qwen_next, qwen35 = memory_models.qwen3_next_80b(), memory_models.qwen35_27b()
    mix = model_plan(memory_models.full_and_window(20, 30), 16 * GIB)
    empty = max(1 - group.useful_page_bytes / group.page_bytes for group in mix.groups)
    plans = [model_plan(model, 40 * GIB) for model in memory_models.all_models()]
    return [
        Row("Gemma-3-27B, one request of 131,072 tokens", "17.98 GiB", _gib(least_bytes(gemma, 131_072))),
        Row(
            "Gemma-3-27B, longest auto length in 10 GiB",
            "26,528",
            f"{model_plan(gemma, 10 * GIB, 'auto').max_model_len:,}",
        ),
        Row("gpt-oss-20b, one request of 131,072 tokens", "3.38 GiB", _gib(least_bytes(gpt_oss, 131_072))),
        Row(
            "Qwen3-Next-80B, pages of a 100-token request",
            "51 MiB",
            human_bytes(model_plan(qwen_next, 40 * GIB).request_bytes(100)),
        ),
        Row(
            "Qwen3.5-27B, pages of a 100-token request",
            "196 MiB",
            human_bytes(model_plan(qwen35, 40 * GIB).request_bytes(100)),
        ),
        Row("20 full + 30 window layers, slots left empty", "33 %", f"{empty:.0%}"),
        Row("waste of slabs and pages, worst of all models", "32 %", f"{max(plan.waste for plan in plans):.2%}"),
    ]


def moving_rows() -> list[Row]:
    """What the manager and the scheduler do with one request."""
    v4_plan = model_plan(memory_models.deepseek_v4_flash(), 40 * GIB)
    v4 = Engine(v4_plan).run(prompt_of(65_536))
    v4_alone = Engine(v4_plan, caches=False).run(prompt_of(65_536))
    hybrid = Engine(model_plan(memory_models.qwen3_next_80b(), 40 * GIB))
    prompt = prompt_of(10_000)
    ran = hybrid.run(prompt)
    return [
        Row("DeepSeek-V4-Flash (fp8), peak of a 64K-token prompt", "6.71 GiB", _gib(v4.peak_bytes)),
        Row("the same without prefix caching", "", _gib(v4_alone.peak_bytes)),
        Row("DeepSeek-V4-Flash (fp8), what it leaves in the prefix cache", "5.70 GiB", _gib(v4.cached_bytes)),
        Row(
            "Qwen3-Next-80B, 10,000-token prompt: reachable hit, steps of its prefill",
            "9,792 in 3",
            f"{hybrid.reachable_hit(prompt):,} in {ran.prefill_steps}",
        ),
    ]


def timed_rows() -> list[Row]:
    """What the manager's work costs on this machine, for the worst of the models."""
    times = [manager_seconds(model, 65_536) for model in memory_models.all_models() if model.length > 65_536]
    return [
        Row("hashing a 131K prompt", "10-162 ms", f"{hashing_seconds(131_072) * 1e3:.1f} ms"),
        Row(
            "allocating a 64K prefill in 8K steps, worst model",
            "48-143 ms",
            f"{max(prefill for prefill, _ in times) * 1e3:.1f} ms",
        ),
        Row(
            "manager's work for a decode step, worst model",
            "18-71 us",
            f"{max(decode for _, decode in times) * 1e6:.1f} us",
        ),
    ]


def needs_rows() -> list[Row]:
    """Bytes of one request of full length, for every model."""
    theirs = {
        "Gemma-3-27B": "17.98 GiB",
        "gpt-oss-20b": "3.38 GiB",
        "Qwen3-Next-80B": "6.04 GiB",
        "Qwen3.5-27B": "16.17 GiB",
        "Qwen3.5-35B-A3B": "5.08 GiB",
        "Qwen3.5-397B": "7.74 GiB",
        "Nemotron-3-Nano": "1.56 GiB",
        "DeepSeek-V3": "10.72 GiB",
        "DeepSeek-V3.2 (fp8)": "7.33 GiB",
        "DeepSeek-V4-Flash (fp8)": "10.56 GiB",
    }
    return [
        Row(
            f"{model.name}, {model.length:,} tokens", theirs.get(model.name, ""), _gib(least_bytes(model, model.length))
        )
        for model in memory_models.all_models()
    ]


def memory_table() -> str:
    """All rows as Markdown."""
    first = [*planned_rows(), *moving_rows(), *timed_rows()]
    return "\n".join(
        [
            *_markdown("bf16, one device, 8,192-token steps, 16-token pages", first),
            "",
            *_markdown("One request of full length", needs_rows()),
        ]
    )


def _markdown(title: str, rows: Sequence[Row]) -> list[str]:
    cells = [(title, "vLLM 0.26", "pagerunner"), *((row.what, row.theirs, row.ours) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


if __name__ == "__main__":
    print(memory_table())
