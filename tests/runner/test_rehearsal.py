"""A rehearsal of a start looks which kernels there are, and none of them runs: what they would have written is zero."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from triton.runtime import interpreter  # noqa: E402 - only where it is installed

from helpers.checkpoints import make_checkpoint  # noqa: E402
from helpers.checkpoints_drafters import make_followed, make_module  # noqa: E402
from helpers.planted_drafts import drafting  # noqa: E402
from pagerunner.config import EngineArgs  # noqa: E402
from pagerunner.engine.startup.resolve import resolve  # noqa: E402
from pagerunner.engine.worker.worker import load_worker  # noqa: E402
from pagerunner.ops import ahead  # noqa: E402
from pagerunner.ops.dispatch import Op  # noqa: E402
from pagerunner.ops.kernels.ahead import _Zeros  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs on machines without a GPU")
LIMITS: dict[str, Any] = {
    "max_num_seqs": 3, "max_model_len": 64, "max_num_batched_tokens": 32, "kv_cache_memory_bytes": 2**24, "skip_tokenizer_init": True,
}  # fmt: skip


def of_ngrams(tmp_path: Path) -> dict[str, Any]:
    model = make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1, tokenizer=False)
    return {"model": str(model), "attention_backend": "torch_ref", **drafting(3)}


def of_a_head(tmp_path: Path) -> dict[str, Any]:
    target, head = make_followed(tmp_path)
    config = {"method": "eagle", "model": str(head), "num_speculative_tokens": 3}
    return {"model": str(target), "attention_backend": "torch_ref", "speculative_config": config}


def of_a_module(tmp_path: Path) -> dict[str, Any]:
    config = {"method": "mtp", "num_speculative_tokens": 3}
    return {"model": str(make_module(tmp_path, "deepseek_v4")), "speculative_config": config}


@pytest.mark.days(3)
@pytest.mark.parametrize("made", [of_ngrams, of_a_head, of_a_module])
def test_backends_that_plan_from_lists_rehearse_steps_with_drafts(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error would leave kernels to be compiled one by one, and an index that isn't valid would end a device's process."""
    monkeypatch.setenv("PAGERUNNER_CPU_KERNELS", "0")
    worker = load_worker(resolve(EngineArgs(**LIMITS, **made(tmp_path))))
    runner: Any = worker.runner
    planned = list[int]()

    def noting(plan: Any) -> Any:
        return lambda inputs, state: planned.extend(inputs.seq_lens) or plan(inputs, state)

    for backend in runner._builder._backends:
        monkeypatch.setattr(backend, "plan", noting(backend.plan))
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda self, *args, **kwargs: None)
    monkeypatch.setattr(Op, "__call__", lambda self, *args, **kwargs: self.kernel(*args, **kwargs))
    token = ahead._rehearsing.set(True)
    try:
        with torch.inference_mode(), _Zeros():
            runner._init_slots()
            runner._first_runs(runner._more_counts(), rehearsal=True)
    finally:
        ahead._rehearsing.reset(token)
    assert planned and min(planned) > 0
