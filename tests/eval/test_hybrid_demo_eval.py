"""The hybrid demo through the engine: healthy scores, what damage to each kind of memory does, and tokens that stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.effort import effort, share_of_the_day
from pagerunner import LLM, SamplingParams
from pagerunner.batch import StatePages
from pagerunner.demo import demo_path
from pagerunner.eval.runner import evaluate
from pagerunner.eval.tasks import RECALL_DISTANCES, TASKS, make_examples
from pagerunner.models.qwen3_next import Qwen35ForCausalLM

COUNT = effort(10, 20)
RECALLED = effort(6, COUNT)  # most of the time: prompts of up to 1024 tokens
MODEL = str(demo_path("demo-hybrid"))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(MODEL, num_gpu_blocks_override=1024, max_num_seqs=32, poison_fresh_pages=True, use_tqdm=False)


@pytest.fixture(scope="module")
def eager_llm() -> LLM:
    """Each of its steps calls the model, so `damage` comes before each step. Recorded steps don't."""
    return LLM(MODEL, num_gpu_blocks_override=1024, max_num_seqs=32, enforce_eager=True, use_tqdm=False)


def damage(monkeypatch: pytest.MonkeyPatch, llm: LLM, kind: str, every: int, first: int) -> None:
    """Before each step, pages first, first + every, ... of each request's table in the groups of a kind hold noise.

    A request has one page of recurrent state; of those, every so many requests' pages are damaged.
    """
    healthy = Qwen35ForCausalLM.__call__
    noise = torch.Generator().manual_seed(0)
    damaged_group = [group.layers[0].spec.kind for group in llm.memory_plan.groups].index(kind)
    rule = llm.memory_plan.groups[damaged_group].rule

    def call(self: Any, batch: Any) -> torch.Tensor:
        group = batch.groups[damaged_group]
        entries = []
        starts = batch.rows.seq_lens_R - batch.rows.query_start_R1.diff()
        spans = zip(batch.rows.slots_R.tolist(), starts.tolist(), batch.rows.seq_lens_R.tolist(), strict=True)
        for row, (slot, start, end) in enumerate(spans):
            if kind == "recurrent":
                entries += [int(group.page_table[slot, 0])] if row % every == first else []
                continue
            pages = [page for page in range(*rule.span(start, end)) if page % every == first]
            entries += [int(group.page_table[slot, page % group.page_table.shape[1]]) for page in pages]
        damaged = torch.tensor([entry for entry in entries if entry >= 0], dtype=torch.int64)
        for layer in batch.kv:
            if layer.group == damaged_group:
                for values in layer.states if isinstance(layer, StatePages) else (layer.k, layer.v):
                    values[damaged] = torch.randn(values[damaged].shape, generator=noise).to(values.dtype)
        return healthy(self, batch)

    monkeypatch.setattr(Qwen35ForCausalLM, "__call__", call)


def test_the_model_holds_three_kinds_of_memory(llm: LLM) -> None:
    kinds = [group.layers[0].spec.kind for group in llm.memory_plan.groups]
    assert sorted(kinds) == ["full", "recurrent", "window"]


@pytest.mark.days(2)
@pytest.mark.parametrize("task", TASKS)
def test_every_task_is_healthy(llm: LLM, task: str) -> None:
    count = RECALLED if task == "recall" else COUNT
    distances = effort((RECALL_DISTANCES[0], RECALL_DISTANCES[-1]), RECALL_DISTANCES)
    report = evaluate(llm, tasks=[task], count=count, distances=distances)
    assert all(score.accuracy >= 1 - 1 / count for score in report.scores), report.text()


DAMAGE: list[list[tuple[str, int, int, str, int | None]]] = [  # a case of each kind on each day
    [("full", 10, 3, "recall", 64), ("full", 10, 3, "recall", 512)],
    [("window", 10, 3, "sorting", None), ("window", 10, 3, "recall", 512)],
    [
        ("recurrent", 2, 0, "recall", 512),
        ("recurrent", 2, 0, "addition", None),
        ("recurrent", 2, 0, "sentences", None),
    ],
]


@pytest.mark.parametrize(
    ("kind", "every", "first", "task", "distance"),
    [cases[number] for cases in DAMAGE for number in share_of_the_day(len(cases), len(cases))],
)
def test_damage_to_each_kind_of_memory_shows(
    eager_llm: LLM, monkeypatch: pytest.MonkeyPatch, kind: str, every: int, first: int, task: str, distance: int | None
) -> None:
    chosen = {} if distance is None else {"distances": [distance]}
    eager_llm.reset_prefix_cache()
    damage(monkeypatch, eager_llm, kind, every, first)
    report = evaluate(eager_llm, tasks=[task], count=RECALLED if task == "recall" else COUNT, **chosen)
    monkeypatch.undo()
    eager_llm.reset_prefix_cache()
    assert report.accuracy(task) <= 0.6, report.text()
    assert evaluate(eager_llm, tasks=[task], count=4, **chosen).accuracy(task) >= 0.75


CONDITIONS: dict[str, dict[str, Any]] = {
    "steps of 40 tokens": {"max_num_batched_tokens": 40, "max_in_flight": 2},
    "pages of 48 tokens": {"block_size": 48, "max_num_batched_tokens": 300},
    "no prefix cache": {"enable_prefix_caching": False},
    "a small pool": {"max_model_len": 768, "kv_cache_memory_bytes": 2_400_000, "max_num_batched_tokens": 64},
}


@pytest.fixture(scope="module")
def expected() -> tuple[list[str], list[list[int]]]:
    """Prompts of all tasks, and the tokens of a run with room for everything."""
    examples = [
        example for task in TASKS for example in make_examples(task, effort(3, 4), 5, 256 if task == "recall" else None)
    ]
    prompts = [example.prompt for example in examples] + [examples[0].prompt]
    return prompts, run(LLM(MODEL, dtype="float32", kv_cache_memory_bytes=2**27, use_tqdm=False), prompts)


def run(llm: LLM, prompts: list[str]) -> list[list[int]]:
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("condition", [list(CONDITIONS)[number] for number in share_of_the_day(len(CONDITIONS), 2)])
def test_tokens_do_not_depend_on_memory(expected: tuple[list[str], list[list[int]]], condition: str) -> None:
    prompts, tokens = expected
    options: dict[str, Any] = {"kv_cache_memory_bytes": 2**27} | CONDITIONS[condition]
    llm = LLM(MODEL, dtype="float32", poison_fresh_pages=True, use_tqdm=False, **options)
    assert run(llm, prompts) == tokens
    before = llm.stats().prefix_hits_total
    assert run(llm, prompts) == tokens
    if condition == "a small pool":
        assert llm.stats().preemptions_total > 0, "the pool was not small enough to preempt anything"
    else:
        assert (llm.stats().prefix_hits_total > before) == (condition != "no prefix cache")
