"""Decode steps that run from recordings give the tokens of steps that run call by call."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_chunked import make_chunked_checkpoint
from helpers.checkpoints_hybrid import HYBRID_FAMILIES, make_hybrid_checkpoint
from helpers.checkpoints_latent import make_latent_checkpoint
from helpers.checkpoints_window import make_window_checkpoint
from helpers.compiler import needs_compiler
from helpers.effort import share_of_the_day
from helpers.engine_oracle import check, engine, prompt, run
from helpers.programs import run_python
from helpers.quantise import quantise
from pagerunner import LLM, SamplingParams
from pagerunner.models import llama4
from pagerunner.ops.native import calls
from pagerunner.ops.native.library import SWITCH
from pagerunner.ops.native.mixture import FEW_TOKENS
from pagerunner.runner import recorded as steps_recorded
from pagerunner.runner.recorded import RecordedSteps

pytestmark = needs_compiler
PROMPTS = [{"prompt_token_ids": [3 + i, 7, 11, *range(i)]} for i in range(9)]
PARAMS = [
    SamplingParams(
        temperature=0 if i % 2 else 0.8,
        seed=i,
        max_tokens=3 + 2 * i,
        ignore_eos=True,
        detokenize=False,
        presence_penalty=0.5 if i == 3 else 0.0,
        logprobs=2 if i == 4 else None,
    )
    for i in range(9)
]


def recorded(llm: LLM) -> RecordedSteps | None:
    return llm._core._executor._runner._recorded  # type: ignore[attr-defined]


def tokens(llm: LLM) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


CAPS = {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0}
MODELS: dict[str, Callable[[Path], Path]] = {
    **{name: partial(make_checkpoint, family=name, tokenizer=False) for name in ("qwen3", "llama", "mistral", "qwen2")},
    **{
        name: partial(make_window_checkpoint, family=name, tokenizer=False)
        for name in ("qwen3_moe", "gpt_oss", "gemma3_text")
    },
    "gemma3_text with soft caps": partial(make_window_checkpoint, family="gemma3_text", tokenizer=False, **CAPS),
}


@pytest.mark.days(2)
@pytest.mark.parametrize("model", MODELS)
def test_tokens_are_those_of_single_calls(tmp_path: Path, model: str) -> None:
    path = str(MODELS[model](tmp_path))
    llm = LLM(path, skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 22)
    plain = LLM(path, skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 22, enforce_eager=True)
    assert recorded(plain) is None
    assert tokens(llm) == tokens(plain)
    steps = recorded(llm)
    assert steps is not None and steps.recorded == steps.steps > 10


ORACLES: dict[str, Callable[[Path], tuple[Path, Any]]] = {
    **{name: partial(make_latent_checkpoint, family=name) for name in ("deepseek_v2", "deepseek_v3")},
    **{name: partial(make_hybrid_checkpoint, family=name) for name in HYBRID_FAMILIES},
    "llama4_text": make_chunked_checkpoint,
}


@pytest.mark.parametrize("model", [list(ORACLES)[number] for number in share_of_the_day(len(ORACLES), 2)])
def test_recorded_tokens_and_logprobs_are_those_of_transformers(tmp_path: Path, model: str) -> None:
    """Rows begin and end at different steps, a text is continued from its pages, and pages are NaN when fresh."""
    path, reference = ORACLES[model](tmp_path)
    llm, plain = engine(path), engine(path, enforce_eager=True)
    check(reference, run(llm, [prompt(seed, 3 + 7 * seed) for seed in range(5)]))
    check(reference, run(llm, [prompt(9, 70)], n=3))
    assert tokens(llm) == tokens(plain)
    steps = recorded(llm)
    assert steps is not None and steps.recorded == steps.steps > 20


def test_the_first_step_imports_no_compiler() -> None:
    """torch's takes two seconds to import, which the first request's second token would wait for."""
    code = (
        "import sys; from pagerunner import LLM, SamplingParams; "
        "llm = LLM('demo', use_tqdm=False, kv_cache_memory_bytes=1 << 24); before = set(sys.modules); "
        "llm.generate('hi', SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False); "
        "print(llm._core._executor._runner._recorded.recorded, 'torch._dynamo' in sys.modules, len(set(sys.modules) - before))"
    )
    done = run_python(code, (), dict(os.environ))
    assert done.returncode == 0, done.stderr
    steps, compiler, modules = done.stdout.split()
    assert int(steps) >= 3 and compiler == "False" and int(modules) < 20


@pytest.mark.parametrize(
    ("family", "kind"),
    [("qwen3", "fp8 block"), ("qwen3", "awq"), ("qwen3_moe", "gptq"), ("gpt_oss", "mxfp4")],
)
def test_steps_of_quantised_checkpoints_are_recorded(tmp_path: Path, family: str, kind: str) -> None:
    sizes = {"moe_intermediate_size": 32} if family == "qwen3_moe" else {}
    make = make_checkpoint if family == "qwen3" else make_window_checkpoint
    path = make(tmp_path, family, tokenizer=False, **sizes)
    quantise(path, kind)
    llm = LLM(str(path), skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 22)
    plain = LLM(str(path), skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 22, enforce_eager=True)
    assert tokens(llm) == tokens(plain)
    steps = recorded(llm)
    assert steps is not None and steps.recorded == steps.steps > 10


def test_recordings_are_made_again_after_sleep(tmp_path: Path) -> None:
    path = str(make_checkpoint(tmp_path, "qwen3", tokenizer=False))
    llm = LLM(path, skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 22, enable_sleep_mode=True)
    want = tokens(llm)
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        assert tokens(llm) == want


def attempts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The memory of each recording that is begun from now on."""
    begun: list[int] = []

    def counted(memory: torch.Tensor, work: Callable[[], Any]) -> Any:
        begun.append(memory.numel())
        return calls.record(memory, work)

    monkeypatch.setattr(steps_recorded, "record", counted)
    return begun


def test_few_recordings_are_tried_that_the_memory_is_too_small_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(make_checkpoint(tmp_path, "qwen3", tokenizer=False))
    prompts = [{"prompt_token_ids": [3 + i, 7]} for i in range(40)]
    params = [SamplingParams(temperature=0, max_tokens=2 + i, ignore_eos=True, detokenize=False) for i in range(40)]
    monkeypatch.setattr(steps_recorded, "RECORDED_BYTES", 1 << 15)
    begun = attempts(monkeypatch)
    found = []
    for eager in (False, True):
        llm = LLM(path, skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 24, max_num_seqs=40, enforce_eager=eager)
        found.append([list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)])
        if not eager:
            steps = recorded(llm)
            assert steps is not None and steps.recorded > 0
            assert 5 < len(begun) - len(steps._held) < 15, "as many failed"
    assert found[0] == found[1]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "gemma3_text"])
def test_steps_of_as_many_rows_as_kernels_take_are_recorded(tmp_path: Path, family: str) -> None:
    path = str(make_window_checkpoint(tmp_path, family, tokenizer=False))
    prompts = [{"prompt_token_ids": [3 + i, 7]} for i in range(FEW_TOKENS)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    found = []
    for eager in (False, True):
        llm = LLM(
            path, skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 24, max_num_seqs=FEW_TOKENS, enforce_eager=eager
        )
        found.append([list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)])
        if not eager:
            steps = recorded(llm)
            assert steps is not None and steps.recorded == steps.steps > 1
            assert FEW_TOKENS in steps._held
    assert found[0] == found[1]


def test_a_step_of_too_many_rows_for_a_kernel_leaves_smaller_ones_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(make_window_checkpoint(tmp_path, "qwen3_moe", tokenizer=False))
    rows = FEW_TOKENS + 2
    prompts = [{"prompt_token_ids": [3 + i, 7]} for i in range(rows)]
    params = [
        SamplingParams(temperature=0, max_tokens=3 + i % 5, ignore_eos=True, detokenize=False) for i in range(rows)
    ]
    begun = attempts(monkeypatch)
    found = []
    for eager in (False, True):
        llm = LLM(path, skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 24, max_num_seqs=rows, enforce_eager=eager)
        found.append([list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)])
        if not eager:
            steps = recorded(llm)
            assert steps is not None and steps.recorded == steps.steps - 1 > 1
            assert len(begun) == 1 + len(steps._held)
            before = steps.recorded
            assert tokens(llm)
            assert steps.recorded > before
    assert found[0] == found[1]


def test_models_that_compute_with_torch_run_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama4, "temper", lambda q_THD, *_: q_THD * 1.5)
    path = str(make_chunked_checkpoint(tmp_path)[0])
    llm = LLM(path, skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 22)
    begun = attempts(monkeypatch)
    found, steps = tokens(llm), recorded(llm)
    assert steps is not None and steps.recorded == 0
    assert len(begun) == 1 and not steps._memory.numel()
    monkeypatch.setenv(SWITCH, "0")
    plain = LLM(path, skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 22)
    assert recorded(plain) is None
    assert tokens(plain) == found
