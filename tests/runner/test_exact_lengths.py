"""Lengths of rows that may have more drafts than were right: the host knows bounds, and backends that plan from lists need the lengths."""

from __future__ import annotations

from typing import Any, cast

import pytest

from helpers.checkpoints import make_checkpoint
from helpers.planted_drafts import drafting
from pagerunner.attention.base import PlanInputs
from pagerunner.config import EngineArgs
from pagerunner.engine.startup.build import build_from
from pagerunner.engine.startup.resolve import resolve
from pagerunner.runner.runner import ModelRunner
from pagerunner.types import StepRow


@pytest.mark.parametrize("backend", ["torch_ref", "triton"])
def test_backends_that_plan_from_lists_get_lengths_and_others_get_bounds(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """On any device: a read of the device, which backends whose kernels read it themselves don't wait for."""
    model = str(make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1, tokenizer=False))
    limits: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 128, "kv_cache_memory_bytes": 2**22}
    args = EngineArgs(model=model, skip_tokenizer_init=True, attention_backend=backend, **limits, **drafting(3))
    runner = cast(ModelRunner, build_from(resolve(args))._executor._runner)
    builder, planned = runner._builder, list[PlanInputs]()
    (planner,) = builder._backends
    monkeypatch.setattr(planner, "plan", lambda inputs, state: planned.append(inputs))
    builder._state.lengths[1] = 37
    rows = [StepRow(0, 0, 5, [7] * 5, True), StepRow(1, 40, 3, [], True)]
    step = runner._staging.stage(rows, {}, [], [], runner._sampler.new_settings(), width=4, strided=False)
    batch = builder.eager(step)
    assert batch.rows.seq_lens_R.tolist() == [5, 40]
    assert [list(inputs.seq_lens) for inputs in planned] == [[5, 43 if planner.capabilities.graphs else 40]]
    assert planner.capabilities.graphs == (backend == "triton")
