"""What a start on a device measures of its steps, and how well that foresees those of requests."""

from __future__ import annotations

import pytest

from pagerunner import LLM, SamplingParams

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize("speculative", [None, NGRAM])
def test_a_start_times_steps_in_little_time_and_foresees_others(speculative: dict[str, object] | None) -> None:
    llm = LLM("demo", target_itl_ms=5, num_gpu_blocks_override=4096, max_num_seqs=64, speculative_config=speculative)
    measured = llm.startup.steps
    assert llm.startup.seconds["step costs"] < 0.5
    assert measured.bytes_per_second > 1e10
    assert sorted(measured.decode_graphs) == ([0] if speculative is None else [0, 1, 2, 3])
    assert all(1e-6 < seconds < 0.1 for _, seconds in measured.steps)
    decode = [seconds for shape, seconds in measured.steps if shape.decode and not shape.drafts]
    assert decode[0] < 1.2 * decode[-1]
    prompts = [{"prompt_token_ids": [5 + number, 9, 30, 4] * 40} for number in range(64)]
    outs = llm.generate(prompts, SamplingParams(max_tokens=64, ignore_eos=True), use_tqdm=False)
    assert all(len(out.outputs[0].token_ids) == 64 for out in outs)
    stats = llm.stats()
    assert stats.costs is not None and stats.costs.measured_seconds_total <= 1.01 * stats.busy_seconds
    assert stats.costs.error_seconds_total < stats.costs.measured_seconds_total
