"""How many places for logits the rows of an eager step with drafts have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from helpers.checkpoints import make_checkpoint
from helpers.planted_drafts import drafting
from pagerunner.config import EngineArgs
from pagerunner.engine.startup.build import build_from
from pagerunner.engine.startup.resolve import resolve
from pagerunner.runner.runner import ModelRunner
from pagerunner.types import StepRow


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    """Of an engine that may choose 0, 1, 2, 3, 5 or 7 drafts."""
    model = str(make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=1, tokenizer=False))
    drafts: dict[str, Any] = drafting(7, num_speculative_tokens_per_batch_size=None)
    limits: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 128, "kv_cache_memory_bytes": 2**22}
    core = build_from(resolve(EngineArgs(model=model, skip_tokenizer_init=True, **limits, **drafts)))
    return cast(ModelRunner, core._executor._runner)


def rows_of(*tokens: int) -> list[StepRow]:
    prompt = StepRow(len(tokens), 0, 20, [5] * 20, True)
    return [*(StepRow(slot, 40, count, [], True) for slot, count in enumerate(tokens)), prompt]


def test_rows_on_a_gpu_have_the_places_of_the_least_number_that_may_be_chosen(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of the most: 256 rows with a draft each would have logits of 2,048 places, not of 512."""
    monkeypatch.setattr(runner, "_state", SimpleNamespace(tokens=SimpleNamespace(is_cuda=True)))
    for most, width in ((1, 1), (2, 2), (3, 3), (4, 4), (5, 6), (7, 8), (8, 8)):
        assert runner._width(rows_of(1, most), {}) == (width, False)
    assert runner._width(rows_of(), {}) == (1, False)


def test_a_warm_up_runs_steps_of_each_such_width(runner: ModelRunner) -> None:
    steps = (rows for rows in runner._first_steps() if not rows[0].tokens)
    met = {(len(rows), rows[0].num_tokens) for rows in steps if rows[0].num_tokens > 1}
    assert met == {(rows, width) for rows in (1, 3, 4) for width in (2, 3, 4, 6, 8)}
