"""A step that fails because the device has: the reason is the device's, and nothing of it is freed any more."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from pagerunner import LLM, SamplingParams
from pagerunner.demo import demo_path
from pagerunner.engine.core import core
from pagerunner.engine.core.faults import step_fault
from pagerunner.engine.core.messages import WireError
from pagerunner.errors import EngineDeadError
from pagerunner.ops.device_errors import device_failure

LOST = "CUDA error: an illegal memory access was encountered"


class Tensors:
    """Stands for what a failed device's tensors are held by."""


def failing_llm(monkeypatch: pytest.MonkeyPatch, failure: str | None) -> tuple[LLM, weakref.ref[Tensors]]:
    """Its steps fail; `failure` is what the device says about itself. The reference is to what its executor holds."""
    llm = LLM(str(demo_path()), max_num_seqs=2, max_model_len=64)
    tensors = Tensors()
    executor = llm._core._executor
    executor.tensors = tensors

    def run(plan):
        raise ValueError("Pointer argument cannot be accessed")

    monkeypatch.setattr(executor, "run", run)
    monkeypatch.setattr(core, "device_failure", lambda: failure)
    return llm, weakref.ref(tensors)


@pytest.mark.parametrize(
    ("failure", "sentence"),
    [(LOST, rf"The device failed in a step \({LOST}\)"), (None, r"A step failed \(ValueError: Pointer argument")],
)
def test_the_reason_is_the_devices_where_it_has_one(monkeypatch, failure: str | None, sentence: str) -> None:
    llm, _ = failing_llm(monkeypatch, failure)
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=sentence):
            llm.generate("Once", SamplingParams(max_tokens=1), use_tqdm=False)


@pytest.mark.parametrize("failure", [LOST, None])
def test_tensors_of_a_lost_device_are_never_freed_and_others_are(monkeypatch, failure: str | None) -> None:
    llm, tensors = failing_llm(monkeypatch, failure)
    with pytest.raises(EngineDeadError):
        llm.generate("Once", SamplingParams(max_tokens=1), use_tqdm=False)
    monkeypatch.undo()  # it holds the executor too
    del llm
    gc.collect()
    assert (tensors() is not None) == (failure is not None)


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_full_device_is_told_from_a_failed_one(kind: type[RuntimeError]) -> None:
    assert "start it with a lower gpu_memory_utilization" in step_fault(kind("CUDA error: out of memory"))
    assert step_fault(kind("CUDA error: out of memory"), LOST).startswith(f"The device failed in a step ({LOST})")


def test_an_error_brings_its_first_cause() -> None:
    """Triton shows where in a kernel it stopped, and has the reason in the cause alone."""
    try:
        try:
            try:
                raise AssertionError("`tile` has 16 numbers, and then 8\nHint: none")
            except AssertionError as error:
                raise TypeError("at 3:1") from error
        except TypeError as error:
            raise RuntimeError("at 9:4:\nthe line") from error
    except RuntimeError as error:
        reason = "(AssertionError: `tile` has 16 numbers, and then 8"
        assert WireError.of(error).message == f"RuntimeError: at 9:4:\nthe line {reason}\nHint: none)"
        assert f"(RuntimeError: at 9:4: {reason})), and" in step_fault(error)


def test_a_process_without_a_device_has_not_lost_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_failure() is None
    llm, _ = failing_llm(monkeypatch, LOST)
    monkeypatch.setattr(llm._core._executor, "failure_fd", 7)  # of ranks in other processes, which have the device
    with pytest.raises(EngineDeadError, match="A step failed"):
        llm.generate("Once", SamplingParams(max_tokens=1), use_tqdm=False)
