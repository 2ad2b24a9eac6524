"""A rank that is killed in any phase of its life ends the engine with its own sentence, and no process is left."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.test_parallel import rank_pids
from helpers import faulty_ranks
from helpers.adapters import load_adapters, random_adapter
from helpers.checkpoints import make_checkpoint
from helpers.effort import TEST_DAY
from helpers.patience import patient
from pagerunner import LoRARequest, SamplingParams
from pagerunner.config import EngineArgs
from pagerunner.engine.core.core import EngineCore
from pagerunner.errors import EngineDeadError
from pagerunner.types import EngineRequest
from pagerunner.types.weights import FinishUpdate

pytestmark = pytest.mark.usefixtures("forked")
WAY = ("tensor_parallel_size", "pipeline_parallel_size")[TEST_DAY // 4 % 2]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and an adapter."""
    folder = tmp_path_factory.mktemp("phases")
    base = make_checkpoint(folder, "qwen3", num_hidden_layers=2)
    return base, random_adapter(base, folder / "adapter", rank=4, seed=1)


def ask(core: EngineCore, lora: str = "") -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    core.add(EngineRequest(request_id="r", prompt_token_ids=[7, 8], params=params, seed=0, max_tokens=3, lora=lora))
    while core.has_work:
        core.step()


def asleep(core: EngineCore) -> None:
    core.sleep(1)
    core.wake_up()


ACTS: dict[str, Callable[[EngineCore, LoRARequest], object]] = {
    "prepare_sleep": lambda core, _: asleep(core),
    "sleep": lambda core, _: asleep(core),
    "wake_up": lambda core, _: asleep(core),
    "change_weights": lambda core, _: core._executor.change_weights(FinishUpdate()),
    "state_digest": lambda core, _: core._executor._compare(),  # type: ignore[attr-defined]
    "read_adapter": lambda core, one: load_adapters(core, [one]),
    "fill_adapter": lambda core, one: load_adapters(core, [one]) and ask(core, "a"),
}
"""What an engine that serves is asked for. In the other phases it hasn't come up."""


@pytest.mark.days(5)
@pytest.mark.parametrize("phase", faulty_ranks.KILLED_IN)
def test_a_rank_that_is_killed_in_a_phase(
    paths: tuple[Path, Path], phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(faulty_ranks.VARIABLE, f"killed in {phase}")
    limits: dict[str, Any] = {"max_model_len": 64, "num_gpu_blocks_override": 64, "block_size": 32, "device": "cpu"}
    args = EngineArgs(model=str(paths[0]), enable_lora=True, enable_sleep_mode=True, **limits, **{WAY: 2})
    adapter = LoRARequest("a", 1, str(paths[1]))
    with pytest.raises(EngineDeadError, match=r"^Rank 1 of 2 was ended by SIGKILL") as found:
        core = faulty_ranks.build(args)
        ask(core)
        began = time.monotonic()
        ACTS[phase](core, adapter)
    assert rank_pids() == []
    if phase in ACTS:
        assert time.monotonic() - began < patient(2)
        with pytest.raises(EngineDeadError) as again:
            ask(core)
        assert str(again.value) == str(found.value)
