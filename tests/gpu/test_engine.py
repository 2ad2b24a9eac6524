"""The demo model on the device, eagerly and in graphs: in float32 the CPU's tokens."""

from __future__ import annotations

import gc

import pytest
import torch

from pagerunner import LLM, SamplingParams
from pagerunner.demo import demo_path
from pagerunner.runner.graphs import StepGraphs

PROMPTS = ["Once upon a time", "The little dog", "One day, a girl named Lily went to the park. She", "Tom"] * 5
GREEDY = SamplingParams(temperature=0, max_tokens=40)
LIMITS = {"max_num_seqs": 12, "max_num_batched_tokens": 300, "max_model_len": 256}


def tokens(**settings) -> list[list[int]]:
    """Greedy tokens of all prompts, after a run that mixes in random requests."""
    llm = LLM(str(demo_path()), **LIMITS, **settings)
    random = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=20, logprobs=1)
    llm.generate(PROMPTS, [random if index % 3 else GREEDY for index in range(len(PROMPTS))], use_tqdm=False)
    found = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    return found


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return tokens(device="cpu", dtype="float32")


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_tokens_in_float32_are_the_cpus(expected, eager, in_flight, monkeypatch) -> None:
    replays = []
    replay = StepGraphs.replay
    monkeypatch.setattr(StepGraphs, "replay", lambda self, *args: replays.append(args[0].key) or replay(self, *args))
    found = tokens(
        device="cuda",
        dtype="float32",
        enforce_eager=eager,
        max_in_flight=in_flight,
        kv_cache_memory_bytes=2**28,
        poison_fresh_pages=True,
    )
    assert found == expected
    assert bool(replays) != eager


def test_decoding_never_waits_for_the_device_while_it_launches() -> None:
    """With torch's check for synchronising calls on, decode steps run in graphs and eagerly."""
    for eager in (True, False):
        llm = LLM(
            str(demo_path()), **LIMITS, device="cuda", max_in_flight=2, enforce_eager=eager, kv_cache_memory_bytes=2**28
        )
        runner = llm._core._executor._runner
        run = runner.run

        def strict(plan, run=run):
            decodes = not plan.admitted and all(row.num_tokens == 1 for row in plan.rows)
            torch.cuda.set_sync_debug_mode("error" if decodes else "default")
            try:
                return run(plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        runner.run = strict
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)


def test_a_page_may_be_read_in_the_step_that_completes_it() -> None:
    """The first prompt's last token completes a page that the second prompt, of which one token is left, begins with."""
    prompt = list(range(40, 72))
    prompts = [{"prompt_token_ids": prompt}, {"prompt_token_ids": [*prompt, 99]}]
    found = []
    for device in ("cpu", "cuda"):
        limits = {**LIMITS, "max_num_batched_tokens": 31, "dtype": "float32", "kv_cache_memory_bytes": 2**28}
        llm = LLM(str(demo_path()), **limits, device=device, poison_fresh_pages=True)
        found.append([output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)])
    assert found[0] == found[1]
