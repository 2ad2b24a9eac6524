"""A model that two devices divide: its tokens are those of one device, and the end of a rank is the engine's.

Ranks add up by our own kernel ("ours"), or by NCCL alone. On a machine with one device they share it, which NCCL can't.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import faulty_ranks
from helpers.adapters import random_adapter
from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_hybrid import make_hybrid_checkpoint
from helpers.checkpoints_window import make_window_checkpoint
from helpers.device import ON_CUDA
from helpers.families import MAKERS
from helpers.patience import patient, until
from pagerunner import LLM, LoRARequest, SamplingParams
from pagerunner.config import EngineArgs
from pagerunner.engine.startup.machine import SHARE_DEVICES
from pagerunner.errors import EngineDeadError
from pagerunner.ops import numerics
from pagerunner.types import EngineRequest

pytestmark = pytest.mark.skipif(not ON_CUDA, reason="needs a CUDA device")

SUMS = ("ours", "nccl")
NEAR = 0.13
"""How much less likely, in logarithms, a token may be than the best one where two engines choose differently: two steps of logits between 8 and 16
in bfloat16, which are 1/16 apart."""
BESIDE = 4
"""How many token ids may lie between two engines' first different draws. Logits in bfloat16 differ in their last bits, so the running sum of the
weights does at its fourth digit. A uniform falls between two such sums in a seventh of the draws, as most of the 512 tokens weigh about as much.
It is the next token then. Draws with other random numbers are 170 ids apart.
"""
WIDE: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
PROMPTS = [{"prompt_token_ids": [7 + n, *range(20, 20 + 9 * n)]} for n in range(24)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=5)


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.device_count() == 1:
        monkeypatch.setenv(SHARE_DEVICES, "1")


def check_devices(ranks: int, sums: str) -> None:
    """Skip a test that needs more devices."""
    count = torch.cuda.device_count()
    if 1 < count < ranks or (count == 1 and sums == "nccl"):
        pytest.skip(f"needs {ranks} CUDA devices{'' if sums == 'nccl' else ', or a single one, which ranks share'}")


def engine(path: Path, ranks: int, way: str = "tensor_parallel_size", sums: str = "ours", **options: Any) -> LLM:
    options |= {"disable_custom_all_reduce": True} if sums == "nccl" else {}
    return LLM(
        str(path), use_tqdm=False, skip_tokenizer_init=True, max_model_len=512, max_num_seqs=32,
        kv_cache_memory_bytes=2**28, enable_prefix_caching=False, **({way: ranks} | options),
    )  # fmt: skip


def tokens(llm: LLM) -> list[Any]:
    return [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def same(alone: list[Any], found: list[Any], near: float) -> int:
    """How many tokens are the same, up to each text's first place where the best two are so near that another order of sums decides."""
    count = 0
    for left, right in zip(alone, found, strict=True):
        for step, (a, b) in enumerate(zip(left.token_ids, right.token_ids, strict=True)):
            if a != b:
                likely = left.logprobs[step]
                assert b in likely and likely[a].logprob - likely[b].logprob < near, (step, a, b)
                break
            count += 1
    return count


@pytest.mark.parametrize(
    ("way", "ranks", "eager", "sums"),
    [
        *(
            ("tensor_parallel_size", ranks, eager, sums)
            for sums in SUMS
            for ranks, eager in ((2, False), (2, True), (4, False))
        ),
        ("pipeline_parallel_size", 2, False, "ours"),
        ("pipeline_parallel_size", 2, True, "ours"),
    ],
)
def test_tokens_are_those_of_one_device(way: str, ranks: int, eager: bool, sums: str, tmp_path: Path) -> None:
    """Up to the first place where the logits are nearly tied; and the same again in a second run, which has the same steps: no prompt's tokens are
    found in the first one's pages."""
    check_devices(ranks, sums)
    path = make_checkpoint(tmp_path, "qwen3", dtype="bfloat16", num_hidden_layers=4, **WIDE)
    one, two = (engine(path, number, way, sums, enforce_eager=eager) for number in (1, ranks))
    found = tokens(two)
    assert same(tokens(one), found, NEAR) > 0.5 * len(PROMPTS) * 24
    assert [one.token_ids for one in tokens(two)] == [one.token_ids for one in found]
    plain = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)  # from keys alone, without gathered logits
    assert [x.outputs[0].token_ids for x in two.generate(PROMPTS, plain, use_tqdm=False)] == [
        x.token_ids for x in found
    ]
    drawn = [
        SamplingParams(temperature=1, seed=n << 30, min_p=1e-4 * (n % 2), max_tokens=24, ignore_eos=True)
        for n in range(len(PROMPTS))  # every second one from gathered logits; min-p leaves all tokens
    ]
    left, right = ([x.outputs[0].token_ids for x in llm.generate(PROMPTS, drawn, use_tqdm=False)] for llm in (one, two))
    for number, pairs in enumerate(zip(left, right, strict=True)):
        a, b = next(((a, b) for a, b in zip(*pairs, strict=True) if a != b), (0, 0))
        assert abs(a - b) <= BESIDE, (number, pairs)
    two._core._executor._compare()  # type: ignore[attr-defined]
    two.sleep(0)
    two.wake_up()


def test_three_ranks_have_unequal_parts(tmp_path: Path) -> None:
    """Inner features of 1,365, 1,365 and 1,366: of gate and up, one rank has more weights than a product of few tokens that has the norm in it, and
    two have fewer. All launch the same sums, or the warm-up would never end."""
    check_devices(3, "ours")
    sizes = {
        "hidden_size": 3072,
        "intermediate_size": 4096,
        "num_attention_heads": 24,
        "num_key_value_heads": 3,
        "head_dim": 128,
    }
    parts = [2 * sizes["hidden_size"] * ((rank + 1) * 4096 // 3 - rank * 4096 // 3) for rank in range(3)]
    assert min(parts) <= numerics.FAST.products.few_weights < max(parts)
    three = engine(make_checkpoint(tmp_path, "qwen3", dtype="bfloat16", num_hidden_layers=2, **sizes), 3)
    found = tokens(three)
    assert [one.token_ids for one in tokens(three)] == [one.token_ids for one in found]
    [few] = three.generate(PROMPTS[1:2], GREEDY, use_tqdm=False)
    assert len(few.outputs[0].token_ids) == 24
    three._core._executor._compare()  # type: ignore[attr-defined]


@pytest.mark.parametrize("sums", SUMS)
@pytest.mark.parametrize(("ranks", "eager"), [(1, False), (1, True), (2, False)])
def test_teams_have_the_tokens_of_one_device(ranks: int, eager: bool, sums: str, tmp_path: Path) -> None:
    """Two teams, whose steps have unequally many tokens and end at different times. Rounding may send a token to another expert, so most tokens are equal."""
    check_devices(2 * ranks, sums)
    path = make_window_checkpoint(tmp_path, "qwen3_moe", dtype="bfloat16", moe_intermediate_size=128, **WIDE)
    alone = tokens(engine(path, 1, enforce_eager=eager))
    teams = engine(path, ranks, sums=sums, enforce_eager=eager, data_parallel_size=2, enable_expert_parallel=True)
    for _ in range(2):
        both = zip(alone, tokens(teams), strict=True)
        pairs = [(a, b) for left, right in both for a, b in zip(left.token_ids, right.token_ids, strict=True)]
        assert sum(a == b for a, b in pairs) > 0.5 * len(pairs)
    assert all(team.generation_tokens_total for team in teams.stats().teams)
    [short] = teams.generate(PROMPTS[:1], GREEDY, use_tqdm=False)  # the other team has no rows
    assert short.outputs[0].token_ids[0] == alone[0].token_ids[0]
    teams._core._executor._compare()  # type: ignore[attr-defined]


OTHERS = (
    "gemma3_text", "gpt_oss", "qwen3_moe", "llama4_text", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "qwen3_next", "qwen3_5_moe_text", "bamba",
)  # fmt: skip


@pytest.mark.parametrize(
    ("family", "pages", "whole"),
    [
        *((family, "auto", False) for family in OTHERS),
        ("qwen3", "fp8", False),
        ("gemma3_text", "fp8", False),
        ("qwen3_moe", "auto", True),
    ],
)
def test_other_families_and_pages_have_the_tokens_of_one_device(
    family: str, pages: str, whole: bool, tmp_path: Path
) -> None:
    """In float32, in graphs; with parts of experts or `whole` ones. A code of fp8 may be the next one, as what is rounded is a sum in another order."""
    check_devices(2, "ours")
    if family == "bamba":  # two ranks have the same group
        sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "mamba_n_groups": 1}
        path = make_hybrid_checkpoint(tmp_path, family, **sizes)[0]
    else:
        path = MAKERS[family](tmp_path)
    one = engine(path, 1, dtype="float32", kv_cache_dtype=pages)
    two = engine(path, 2, dtype="float32", kv_cache_dtype=pages, enable_expert_parallel=whole)
    found = tokens(two)
    assert same(tokens(one), found, 1e-3 if pages == "auto" else NEAR) > 0.9 * len(PROMPTS) * 24
    assert [x.token_ids for x in tokens(two)] == [x.token_ids for x in found]
    two._core._executor._compare()  # type: ignore[attr-defined]


CORE = """
import sys
from cuda.bindings import driver
from pagerunner import LLM
llm = LLM(sys.argv[1], tensor_parallel_size=2, enforce_eager=True, skip_tokenizer_init=True, use_tqdm=False, kv_cache_memory_bytes=2**27)
llm.generate({"prompt_token_ids": [7, 8, 9]}, use_tqdm=False)
print([driver.cuDevicePrimaryCtxGetState(number)[2] for number in range(driver.cuDeviceGetCount()[1])])
"""


@pytest.mark.parametrize(
    ("family", "ways"),
    [
        ("qwen3", {"tensor_parallel_size": 2}),
        ("qwen3", {"tensor_parallel_size": 4}),
        ("qwen3", {"pipeline_parallel_size": 2}),
        ("qwen3_moe", {"tensor_parallel_size": 2}),
        ("qwen3_moe", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    ],
)
def test_adapters_have_the_tokens_of_one_device(family: str, ways: dict[str, Any], tmp_path: Path) -> None:
    """In float32, many rows and one alone: three of four rows have one of three adapters, of which two are in slots at a time."""
    check_devices(max(ways.values()), "ours")
    path = make_checkpoint(tmp_path, family, num_hidden_layers=2, **WIDE) if family == "qwen3" else None
    path = path or make_window_checkpoint(tmp_path, family)
    made = [random_adapter(path, tmp_path / f"a{n}", rank=rank, seed=n) for n, rank in enumerate((4, 16, 40))]
    own = [None, *(LoRARequest(f"a{n}", n + 1, str(one)) for n, one in enumerate(made))]
    options: dict[str, Any] = {"dtype": "float32", "enable_lora": True, "max_loras": 2, "max_lora_rank": 64}

    def answers(llm: LLM) -> list[Any]:
        many = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=[own[n % 4] for n in range(len(PROMPTS))])
        alone = llm.generate(PROMPTS[5], GREEDY, use_tqdm=False, lora_request=own[1])
        return [output.outputs[0] for output in (*many, *alone)]

    same(answers(engine(path, 1, **options)), answers(engine(path, 1, **options, **ways)), 1e-3)


def test_a_core_takes_no_memory_of_its_ranks_devices(tmp_path: Path) -> None:
    """A context is some hundred MiB."""
    path = make_checkpoint(tmp_path, "qwen3", dtype="bfloat16", **WIDE)
    done = subprocess.run([sys.executable, "-c", CORE, str(path)], capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[-2] == str([0] * torch.cuda.device_count()), done.stderr
    assert ("NCCL makes all sums" in done.stderr) == (not over_nvlink()), done.stderr


def over_nvlink() -> bool:
    """Whether the first two devices have atomic operations on each other's memory. Ranks that share a device do, too."""
    from cuda.bindings import driver

    attribute = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    return torch.cuda.device_count() == 1 or driver.cuDeviceGetP2PAttribute(attribute, 0, 1)[1] == 1


@pytest.mark.alone
def test_a_rank_that_is_killed_ends_the_engine_and_frees_both_devices(tmp_path: Path) -> None:
    free = [torch.cuda.mem_get_info(device)[0] for device in range(torch.cuda.device_count())]
    llm = engine(make_checkpoint(tmp_path, "qwen3", dtype="bfloat16", **WIDE), 2)
    ranks = llm._core._executor._ranks.watch._processes  # type: ignore[attr-defined]
    began: list[float] = []
    threading.Timer(0.5, lambda: (began.append(time.monotonic()), os.kill(ranks[1].pid, signal.SIGKILL))).start()  # type: ignore[func-returns-value]
    with pytest.raises(EngineDeadError, match="Rank 1 of 2 was ended by SIGKILL"):
        while True:
            tokens(llm)
    assert time.monotonic() - began[0] < patient(2)
    until(lambda: all(torch.cuda.mem_get_info(device)[0] > before - 2**28 for device, before in enumerate(free)), 5)


@pytest.mark.alone
@pytest.mark.parametrize("sums", SUMS)
def test_a_device_that_waits_for_ever_for_another_ends_the_engine(sums: str, tmp_path: Path) -> None:
    """Rank 1 leaves a step out, so rank 0's first sum waits for what never comes. No kernel has a limit: the watch does, and a killed process's kernels end."""
    check_devices(2, sums)
    free = [torch.cuda.mem_get_info(device)[0] for device in range(torch.cuda.device_count())]
    args = EngineArgs(
        model=str(make_checkpoint(tmp_path, "qwen3", dtype="bfloat16", **WIDE)), skip_tokenizer_init=True, max_model_len=512, max_num_seqs=8,
        kv_cache_memory_bytes=2**28, tensor_parallel_size=2, disable_custom_all_reduce=sums == "nccl",
    )  # fmt: skip
    core = faulty_ranks.build(args)
    core._executor._ranks.watch._seconds = 3.0  # type: ignore[attr-defined]
    began = time.monotonic()
    core.add(
        EngineRequest(request_id="lost", prompt_token_ids=[7, faulty_ranks.LOSE], params=GREEDY, seed=0, max_tokens=4)
    )
    with pytest.raises(EngineDeadError, match=r"of 2: its device has worked for 3 seconds .* and hangs"):
        while core.has_work:
            core.step()
    assert 2 < time.monotonic() - began < patient(8)
    until(lambda: all(torch.cuda.mem_get_info(device)[0] > before - 2**28 for device, before in enumerate(free)), 5)
