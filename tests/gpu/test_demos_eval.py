"""Both demo models in bfloat16 on the device, with pages in bfloat16 and fp8: each task at the score of the CPU's float32."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.device import DEVICE, counted_graphs, device_llm
from pagerunner import LLM
from pagerunner.demo import demo_path
from pagerunner.eval.runner import EvalReport, evaluate

COUNT = 12
MARGIN = 1  # of 12 examples a task may lose to rounding, and
ALL_MARGIN = 2  # of all tasks' together
LIMITS: dict[str, Any] = {"max_num_seqs": 32, "poison_fresh_pages": True}


def lost(found: EvalReport, expected: EvalReport) -> list[int]:
    """How many answers fewer each task has right."""
    pairs = zip(found.scores, expected.scores, strict=True)
    assert [score.name for score in found.scores] == [score.name for score in expected.scores]
    return [wanted.correct - score.correct for score, wanted in pairs]


@pytest.mark.parametrize("model", ["demo", "demo-hybrid"])
def test_scores_are_the_cpus(model: str) -> None:
    path = demo_path(model)
    cpu = LLM(str(path), device="cpu", num_gpu_blocks_override=1024, use_tqdm=False, **LIMITS)
    expected = evaluate(cpu, count=COUNT)
    assert all(score.accuracy >= 0.9 for score in expected.scores), expected.text()
    for kv_cache_dtype in ("auto", "fp8"):
        with counted_graphs() as graphs:
            llm = device_llm(path, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype, **LIMITS)
            found = evaluate(llm, count=COUNT)
        assert (llm.device, llm.dtype) == (DEVICE, "bfloat16")
        assert any(key.decode for key in graphs.replays)
        behind = lost(found, expected)
        report = f"pages in {kv_cache_dtype}, on the device:\n{found.text()}\non the CPU:\n{expected.text()}"
        assert max(behind) <= MARGIN and sum(behind) <= ALL_MARGIN, report
