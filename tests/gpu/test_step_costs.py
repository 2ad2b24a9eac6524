"""What a start on a device measures of its steps, and how well that foresees those of requests.

The device has to be quiet: what another process computes there counts as a step's time. Other tests of this folder wait (`alone`). If anybody else
is at work, the test is skipped, as its figures would say nothing: a product of always the same size then doesn't take the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from helpers.device import DEVICE, ON_CUDA
from pagerunner import LLM, SamplingParams

pytestmark = [pytest.mark.alone, pytest.mark.skipif(not ON_CUDA, reason="is about a CUDA device's times")]

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@contextmanager
def quiet_device() -> Iterator[None]:
    """Skips the test where others use the device before it, or when it has failed."""
    skip_if_shared()
    try:
        yield
    except AssertionError:
        skip_if_shared()
        raise


def skip_if_shared() -> None:
    matrix = torch.ones(2048, 2048, device=DEVICE)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(60)]
    for event in events:
        matrix @ matrix
        event.record()
    torch.cuda.synchronize()
    times = sorted(one.elapsed_time(other) for one, other in zip(events[20:], events[21:], strict=False))
    if times[-1] > 1.5 * times[0]:
        pytest.skip(f"something else uses the device: a product takes {times[0]:.3f} to {times[-1]:.3f} ms")


@pytest.mark.parametrize("speculative", [None, NGRAM])
def test_a_start_times_steps_in_little_time_and_foresees_others(speculative: dict[str, object] | None) -> None:
    with quiet_device():
        check_start(speculative)


def check_start(speculative: dict[str, object] | None) -> None:
    llm = LLM("demo", target_itl_ms=5, num_gpu_blocks_override=4096, max_num_seqs=64, speculative_config=speculative)
    measured = llm.startup.steps
    assert llm.startup.seconds["step costs"] < 0.5
    assert measured.bytes_per_second > 1e10
    assert sorted(measured.decode_graphs) == ([0] if speculative is None else [0, 1, 2, 3])
    assert all(1e-6 < seconds < 0.1 for _, seconds in measured.steps)
    decode = [seconds for shape, seconds in measured.steps if shape.decode and not shape.drafts]
    assert decode[0] < 1.5 * decode[-1]
    prompts = [{"prompt_token_ids": [5 + number, 9, 30, 4] * 40} for number in range(64)]
    outs = llm.generate(prompts, SamplingParams(max_tokens=64, ignore_eos=True), use_tqdm=False)
    assert all(len(out.outputs[0].token_ids) == 64 for out in outs)
    stats = llm.stats()
    assert stats.costs is not None and stats.costs.measured_seconds_total <= 1.01 * stats.busy_seconds
    assert stats.costs.error_seconds_total < stats.costs.measured_seconds_total
