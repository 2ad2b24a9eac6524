"""What a plan for a CPU counts beside weights and pages, against what steps take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.alive import Alive
from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_hybrid import make_hybrid_directory
from helpers.checkpoints_latent import make_latent_checkpoint
from helpers.compiler import needs_compiler
from helpers.families import MAKERS
from pagerunner import LLM, SamplingParams
from pagerunner.config import EngineArgs
from pagerunner.engine.startup.resolve import resolve
from pagerunner.models.checkpoint.loader import build_model, weights_bytes
from pagerunner.models.checkpoint.panels import store_in_panels
from pagerunner.models.configs.reader import read_model_config
from pagerunner.ops.native import calls
from pagerunner.ops.native.library import SWITCH

WORK, RECORDED, GATHERED = "work space of CPU kernels", "tensors of recorded steps", "gathered pages"


def lines(path: Path, **options: object) -> dict[str, int]:
    args = EngineArgs(model=str(path), device="cpu", num_gpu_blocks_override=1024, **options)  # type: ignore[arg-type]
    return dict(resolve(args, plan_only=True).plan.other)


@needs_compiler
def test_a_plan_counts_what_the_backend_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint(tmp_path, "qwen3", tokenizer=False)
    assert {WORK, RECORDED} <= set(lines(path)) and GATHERED not in lines(path)
    assert RECORDED not in lines(path, enforce_eager=True)
    assert {WORK, GATHERED} <= set(lines(path, attention_backend="torch_ref"))
    assert GATHERED in lines(path, dtype="bfloat16") and WORK not in lines(path, dtype="bfloat16")
    monkeypatch.setenv(SWITCH, "0")
    assert GATHERED in lines(path) and WORK not in lines(path)


@needs_compiler
def test_a_mixed_model_is_counted_by_group(tmp_path: Path) -> None:
    path = make_hybrid_directory(tmp_path, "qwen3_next")
    assert {WORK, RECORDED} <= set(lines(path)) and GATHERED not in lines(path)
    narrow = lines(path, kv_cache_dtype="bfloat16")  # torch reads such pages
    assert {WORK, GATHERED} <= set(narrow) and RECORDED not in narrow


@needs_compiler
def test_latents_are_gathered_for_long_rows_alone(tmp_path: Path) -> None:
    path, sparse = (make_latent_checkpoint(tmp_path, family)[0] for family in ("deepseek_v2", "deepseek_v32"))
    assert {WORK, GATHERED, RECORDED} <= set(lines(path))
    assert {WORK, GATHERED} <= set(lines(sparse)) and RECORDED not in lines(sparse)


def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of the memory that each command works in from now on."""
    taken: list[int] = []
    real = torch.empty

    class Watched:
        float32 = torch.float32

        def __getattr__(self, name: str) -> object:
            return getattr(torch, name)

        @staticmethod
        def empty(*shape: object, **options: object) -> torch.Tensor:
            made = real(*shape, **options)  # type: ignore[call-overload]
            if isinstance(shape[0], int):  # a command's memory, not what it makes
                taken.append(made.nbytes)
            return made

    monkeypatch.setattr(calls, "torch", Watched())
    return taken


@needs_compiler
def test_latents_work_in_what_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 256, "intermediate_size": 8}
    path, _ = make_latent_checkpoint(tmp_path, "deepseek_v2", moe_intermediate_size=8, **sizes)
    taken = watched(monkeypatch)
    llm = LLM(str(path), skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 23, max_num_batched_tokens=16)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": [5] * 40}], params, use_tqdm=False)
    assert max(taken) == lines(path, max_num_batched_tokens=16)[WORK]


@needs_compiler
def test_the_work_space_is_what_the_largest_step_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint(tmp_path, "qwen3", tokenizer=False, intermediate_size=321, vocab_size=300)
    taken = watched(monkeypatch)
    llm = LLM(str(path), skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 23, max_num_batched_tokens=512)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": [5] * 600}], params, use_tqdm=False)
    said = lines(path, max_num_batched_tokens=512)
    assert max(taken) == said[WORK]
    model = build_model(read_model_config(path), "float32")
    store_in_panels(model)
    assert said["weights"] == weights_bytes(model)


@pytest.mark.parametrize("switch", ["0", "1"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_a_step_holds_no_more_than_is_counted(
    family: str, switch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, switch)
    path = MAKERS[family](tmp_path)
    llm = LLM(str(path), skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 23, max_num_batched_tokens=120)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
    with Alive() as alive:
        llm.generate([{"prompt_token_ids": list(range(3, 123))}], params, use_tqdm=False)
    said = lines(path, max_num_batched_tokens=120)
    counted = sum(said.get(name, 0) for name in ("activations", "logits of one step", WORK, GATHERED))
    assert alive.peak <= counted and said["activations"] < 3 * alive.peak


@needs_compiler
def test_activations_are_more_than_everything_else_has_room_for(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama", tokenizer=False, intermediate_size=4096)
    llm = LLM(str(path), skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 23, max_num_batched_tokens=120)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    with Alive() as alive:
        llm.generate([{"prompt_token_ids": list(range(3, 123))}], params, use_tqdm=False)
    said = lines(path, max_num_batched_tokens=120)
    others = said["logits of one step"] + said[WORK]
    assert others < alive.peak <= others + said["activations"]
