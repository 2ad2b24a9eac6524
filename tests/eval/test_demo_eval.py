"""The demo model through the whole engine: healthy scores, and what damaged pages do to them."""

from __future__ import annotations

import pytest
import torch

from helpers.effort import effort
from pagerunner import LLM
from pagerunner.demo import demo_path
from pagerunner.eval.runner import evaluate
from pagerunner.eval.tasks import RECALL_DISTANCES, TASKS
from pagerunner.runner.pages import Pages

COUNT = effort(10, 20)
HEALTHY = 1 - 1 / COUNT  # one wrong answer at most
ENDS = (RECALL_DISTANCES[0], RECALL_DISTANCES[-1])


@pytest.fixture(scope="module")
def llm():
    return LLM(str(demo_path()), num_gpu_blocks_override=1024, max_num_seqs=32, poison_fresh_pages=True, use_tqdm=False)


def damage_one_page_in_ten(monkeypatch):
    """Before each step, pages 3, 13, 23, ... hold noise, as if somebody else had written there."""
    healthy = Pages.prepare
    noise = torch.Generator().manual_seed(0)

    def prepare(self, step):
        healthy(self, step)
        for layer in self.layers:
            for values in (layer.k, layer.v):
                damaged = values[3::10]
                damaged.copy_(torch.randn(damaged.shape, generator=noise, dtype=damaged.dtype))

    monkeypatch.setattr(Pages, "prepare", prepare)


@pytest.mark.days(2)
@pytest.mark.parametrize("task", TASKS)
def test_every_task_is_healthy(llm, task):
    count = effort(6, COUNT) if task == "recall" else COUNT
    report = evaluate(llm, tasks=[task], count=count, distances=effort(ENDS, RECALL_DISTANCES))
    assert all(score.accuracy >= 1 - 1 / count for score in report.scores), report.text()


@pytest.mark.days(2)
@pytest.mark.parametrize("distance", effort((64, 256), RECALL_DISTANCES))
def test_recall_notices_one_damaged_page_in_ten(llm, distance, monkeypatch):
    llm.reset_prefix_cache()
    damage_one_page_in_ten(monkeypatch)
    report = evaluate(llm, tasks=["recall"], count=effort(6, COUNT), distances=[distance])
    monkeypatch.undo()
    llm.reset_prefix_cache()
    assert report.accuracy("recall") < 0.5, report.text()
    assert evaluate(llm, tasks=["recall"], count=4, distances=[distance]).accuracy("recall") >= 0.75


def test_chat_template_asks_the_same_question(llm):
    assert evaluate(llm, tasks=["addition"], count=COUNT, as_chat=True).accuracy("addition") >= HEALTHY
