"""A device that fails or has no memory: sentences with numbers, nobody waits for ever, and processes end.

What fails for good does so in processes of their own, so that the tests' keep their device.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from typing import Any

import pytest

from helpers import faulty_device
from helpers.device import DEVICE, MIB, ON_CUDA, all_taken_but, device_llm, needs_cuda
from helpers.faulty_device import ASSERT, ILLEGAL, LONG, OUT_OF_MEMORY
from pagerunner import LLM, SamplingParams
from pagerunner.config import EngineArgs
from pagerunner.demo import demo_path
from pagerunner.errors import CapacityError, EngineDeadError

PAGES = 2**28 if ON_CUDA else 2**25
SETTINGS: dict[str, Any] = {
    "device": DEVICE,
    "max_num_seqs": 8,
    "max_model_len": 2048,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": PAGES,
    "max_in_flight": 2,
}
ENDED = "and the engine has ended"
REASONS = {  # torch, Triton and the driver have different words for them
    ASSERT: rf"failed.* \(.*(device-side assert|ASSERT).*\), {ENDED}" if ON_CUDA else rf"A step failed \(.*\), {ENDED}",
    ILLEGAL: rf"failed.* \(.*(illegal memory access|ILLEGAL_ADDRESS).*\), {ENDED}",
    OUT_OF_MEMORY: rf"ran out of memory in a step \(.*Tried to allocate .*\), {ENDED}: .*lower gpu_memory_utilization",
}
NAMES = {ASSERT: "assert", ILLEGAL: "illegal", OUT_OF_MEMORY: "memory"}
SOON = 30  # seconds in which whoever waits must hear, which a loaded machine needs for nothing but itself
START = 240  # seconds in which an engine that compiles its kernels comes up


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("token", NAMES, ids=NAMES.values())
def test_every_waiting_request_hears_why_and_the_cores_process_ends(token: int) -> None:
    pytest.importorskip("zmq")
    from pagerunner.engine.frontend.async_engine import AsyncEngine

    async def scenario() -> None:
        args = EngineArgs(model=str(demo_path()), enable_sleep_mode=True, **SETTINGS)
        async with asyncio.timeout(START):
            engine = await AsyncEngine.from_args(args, core_factory=faulty_device.FACTORY)
        try:
            pid = engine.replicas[0].client.pid
            params = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
            prompts = [[50 + n] * (n + 1) for n in range(12)]
            prompts[5] = [60] * LONG + [token]
            streams = []
            for n, prompt in enumerate(prompts):  # of which 8 run
                streams.append(await engine.add_request(str(n), {"prompt_token_ids": prompt}, params))
                if n == 0:
                    await streams[0].get()
                    engine.check_health()
            async with asyncio.timeout(SOON):
                for stream in streams:
                    with pytest.raises(EngineDeadError, match=REASONS[token]):
                        while not (await stream.get()).finished:
                            pass
            with pytest.raises(EngineDeadError, match=REASONS[token]):
                engine.check_health()
            with pytest.raises(EngineDeadError, match=REASONS[token]):
                await engine.add_request("late", {"prompt_token_ids": [50]}, params)
            with pytest.raises(EngineDeadError, match=REASONS[token]):
                await engine.sleep(1)
            ends = time.monotonic() + SOON
            while alive(pid):
                assert time.monotonic() < ends, "the core's process is still there"
                await asyncio.sleep(0.05)
        finally:
            await engine.shutdown()

    asyncio.run(scenario())


IN_PROCESS = """
import json, sys
import torch
from helpers import faulty_device
from helpers.faulty_device import ASSERT, LONG, FaultyExecutor
from pagerunner import LLM, SamplingParams
from pagerunner.errors import EngineDeadError

model, settings = sys.argv[1], json.loads(sys.argv[2])
llm = LLM(model, use_tqdm=False, enable_sleep_mode=True, **settings)
llm._core._executor = FaultyExecutor(llm._core._executor, settings["device"])
params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
stream = llm.stream({"prompt_token_ids": [40, 41, 42]}, params)
next(stream)
bad = [{"prompt_token_ids": [60] * 7 + [ASSERT]}, {"prompt_token_ids": [61]}]
heard = []
for call in (
    lambda: llm.generate(bad, params, use_tqdm=False),
    lambda: list(stream),  # what was on its way may still come
    lambda: llm.generate(bad[1], params, use_tqdm=False),
    lambda: llm.sleep(1),
    lambda: llm.wake_up(),
):
    try:
        call()
    except EngineDeadError as error:
        heard.append(str(error))
print(json.dumps(heard))
"""


def child(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own; it must end by itself."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=START + SOON,
        check=False,
    )


def test_an_llm_whose_device_fails_says_so_ever_after_and_its_process_can_end() -> None:
    done = child(IN_PROCESS, str(demo_path()), json.dumps(SETTINGS))
    assert done.returncode == 0, done.stderr[-3000:]
    heard = json.loads(done.stdout.splitlines()[-1])
    assert len(heard) == 5 and len(set(heard)) == 1
    assert re.search(REASONS[ASSERT], heard[0])


OUT_OF_MEMORY_IN = """
import json, sys
import torch
from helpers.device import device_llm
from helpers.faulty_device import no_memory
from pagerunner import SamplingParams
from pagerunner.errors import CapacityError
from pagerunner.runner.runner import ModelRunner

model, settings = sys.argv[1], json.loads(sys.argv[2])
device = torch.device(settings["device"])
heard = []
for phase in ("warm_up", "capture"):
    plain = getattr(ModelRunner, phase)

    def starved(*args, plain=plain, **options):
        with no_memory(device):
            return plain(*args, **options)

    setattr(ModelRunner, phase, starved)
    try:
        device_llm(model, **settings)
    except CapacityError as error:
        heard.append(str(error))
    setattr(ModelRunner, phase, plain)
llm = device_llm(model, **settings)
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
prompts = [{"prompt_token_ids": [(7 * i + j) % 300 + 20 for j in range(3 + 40 * i)]} for i in range(6)]
tokens = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
print(json.dumps([heard, tokens]))
"""


def test_a_start_that_runs_out_of_memory_says_where_and_the_next_one_is_sound() -> None:
    settings = SETTINGS | {"dtype": "float32"}
    done = child(OUT_OF_MEMORY_IN, str(demo_path()), json.dumps(settings))
    assert done.returncode == 0, done.stderr[-3000:]
    heard, tokens = json.loads(done.stdout.splitlines()[-1])
    assert len(heard) == 2
    for phase, sentence in zip(("warm-up", "capture"), heard, strict=True):
        assert sentence.startswith(f"Out of device memory in the start-up phase {phase!r}")
        if ON_CUDA:
            # by use or "nothing": processes of other tests take memory and give it back meanwhile
            assert re.search(
                r": \d+\.\d\d GiB of the device's \d+\.\d\d GiB are free, and this engine has taken .+ before", sentence
            )
        assert "max_num_batched_tokens or max_num_seqs" in sentence
    llm = LLM(str(demo_path()), use_tqdm=False, **settings | {"device": "cpu"})
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [{"prompt_token_ids": [(7 * i + j) % 300 + 20 for j in range(3 + 40 * i)]} for i in range(6)]
    assert tokens == [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


@needs_cuda
def test_more_pages_than_the_device_has_are_refused_before_anything_is_loaded() -> None:
    for asked in (2**40, 2**50):
        with pytest.raises(
            CapacityError, match=rf"kv_cache_memory_bytes={asked} asks for .* are left beside .*lower it"
        ):
            device_llm(demo_path(), kv_cache_memory_bytes=asked)
    with pytest.raises(CapacityError, match=r"num_gpu_blocks_override=\d+ asks for .* lower it to \d+"):
        device_llm(demo_path(), num_gpu_blocks_override=10**9)


@pytest.mark.alone
@needs_cuda
def test_a_device_that_others_have_filled_is_refused_with_numbers_and_served_later() -> None:
    limits = {
        "device": "cuda",
        "max_num_seqs": 4,
        "max_model_len": 256,
        "max_num_batched_tokens": 64,
        "use_tqdm": False,
    }
    params = SamplingParams(temperature=0, max_tokens=3)
    refused = 0
    # what is missed first differs: a stream, pages, kernels' code, graphs
    for left in (2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 96):
        with all_taken_but(left * MIB):
            try:
                LLM(str(demo_path()), **limits)
            except CapacityError as error:
                # What is left for pages may be less than one request needs, which has a sentence of its own.
                assert re.search(r"\d [MK]iB.*(free|there are \d.* for pages\.)", str(error)), error
                refused += 1
    assert refused >= 3
    with all_taken_but(2048 * MIB):
        llm = LLM(str(demo_path()), **limits)
        assert 0 < llm.memory_plan.kv_bytes < 2048 * MIB
        assert llm.startup.memory["free"] < 1024 * MIB
        assert llm.generate("Once upon a time", params, use_tqdm=False)[0].error is None
        del llm
