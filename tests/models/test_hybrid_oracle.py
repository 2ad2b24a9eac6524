"""Families with recurrent layers compute what transformers computes, however their sequences are divided."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from helpers.checkpoints_hybrid import make_hybrid_checkpoint, make_vision_checkpoint
from helpers.effort import by_days
from helpers.forward import check, load, prompts
from helpers.hybrid import HybridHarness
from pagerunner.attention.paged_recurrent import PagedRecurrentBackend
from pagerunner.attention.recurrent import RecurrentBackend
from pagerunner.errors import CheckpointError

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next dense": ("qwen3_next_dense", {}),
    "qwen3_next dense, other sizes": (
        "qwen3_next_dense",
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "linear_conv_kernel_dim": 3,
            "linear_num_value_heads": 2,
            "rope_parameters": YARN | {"partial_rotary_factor": 0.5},
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
        },
    ),
    "qwen3_5": ("qwen3_5", {}),
    "qwen3_5 tied, all rotated": (
        "qwen3_5",
        {
            "tie_word_embeddings": True,
            "linear_num_value_heads": 6,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "partial_rotary_factor": 1.0,
                "mrope_section": [3, 3, 2],
                "mrope_interleaved": True,
            },
        },
    ),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_next, some layers dense": ("qwen3_next", {"mlp_only_layers": [1], "norm_topk_prob": False}),
    "qwen3_next, every second layer": ("qwen3_next", {"decoder_sparse_step": 2, "num_experts_per_tok": 3}),
    "qwen3_5_moe": ("qwen3_5_moe", {}),
    "bamba": ("bamba", {}),
    "bamba, biases": (
        "bamba",
        {
            "mamba_proj_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_conv_bias": False,
            "tie_word_embeddings": True,
            "mamba_n_groups": 1,
            "attn_layer_indices": [0, 3],
        },
    ),
}
BACKENDS = [RecurrentBackend, PagedRecurrentBackend]
CHUNKED = ["qwen3_next", "qwen3_5", "qwen3_5_moe", "bamba"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from a variant's name to our model, its config and the reference model, each made once."""
    directory = tmp_path_factory.mktemp("hybrids")

    @functools.cache
    def get(name: str) -> tuple[Any, Any, Any]:
        family, overrides = VARIANTS[name]
        path, reference = make_hybrid_checkpoint(directory, family, seed=len(name), **overrides)
        return (*load(path), reference)

    return get


@pytest.mark.days(3)
@pytest.mark.parametrize(("name", "backend"), by_days(VARIANTS, BACKENDS))
@torch.inference_mode()
def test_every_variant(checkpoints: Any, name: str, backend: Any) -> None:
    model, config, reference = checkpoints(name)
    harness = HybridHarness(model, config, recurrent=backend())
    texts = prompts([1, 33, 150])
    rows = [harness.start(text) for text in texts]
    harness.generate(rows, 6, chunk=64)
    for text, row in zip(texts, rows, strict=True):
        check(reference, text, row)


@pytest.mark.days(2)
@pytest.mark.parametrize(("name", "chunk", "page_tokens"), by_days(CHUNKED, [1, 7, 64, 10**9], [1, 16, 48]))
@torch.inference_mode()
def test_tokens_do_not_depend_on_chunks_and_pages(checkpoints: Any, name: str, chunk: int, page_tokens: int) -> None:
    model, config, reference = checkpoints(name)
    texts = prompts([40] if chunk == 1 else [5, 70, 17, 16, 1, 130])
    harness = HybridHarness(model, config, page_tokens=page_tokens, num_pages=-(-400 // page_tokens) + 8)
    rows = [harness.start(text) for text in texts]
    harness.generate(rows, 8, chunk=chunk)
    for text, row in zip(texts, rows, strict=True):
        check(reference, text, row)


@pytest.mark.days(3)
@pytest.mark.parametrize(("name", "backend"), by_days(CHUNKED, BACKENDS))
@torch.inference_mode()
def test_a_row_resumes_from_any_snapshot_that_a_step_saved(checkpoints: Any, name: str, backend: Any) -> None:
    model, config, reference = checkpoints(name)
    prefix, first, second, other = prompts([96, 20, 9, 40])
    harness = HybridHarness(model, config, recurrent=backend())
    row, neighbour = harness.start(prefix + first), harness.start(other)
    positions = [64, 112, 16, 96]
    harness.step([(neighbour, 39), (row, 112)], {1: positions})
    snapshots = dict(zip(positions, harness.saved, strict=True))
    for position in (16, 64, 96):
        resumed = harness.resume(prefix + second, position, snapshots[position], row.pages[: position // 16])
        harness.generate([resumed, neighbour] if position == 64 else [resumed], 5)
        check(reference, prefix + second, resumed)
    resumed = harness.resume(prefix + first, 112, snapshots[112], row.pages[:7])
    harness.generate([row], 5, chunk=3)
    harness.generate([resumed], 5)
    check(reference, prefix + first, row)
    check(reference, prefix + first, resumed)
    check(reference, other, neighbour)


@pytest.mark.parametrize("family", ["qwen3_5", "bamba"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@torch.inference_mode()
def test_half_precision_is_as_close_to_float32_as_the_reference_is(tmp_path: Path, family: str, dtype: Any) -> None:
    path, exact = make_hybrid_checkpoint(tmp_path, family)
    rounded = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    model, config = load(path, dtype)
    harness = HybridHarness(model, config, dtype=dtype)
    (text,) = prompts([90])
    row = harness.start(text)
    found = [harness.step([(row, count)])[0] for count in (50, 39, 1)]
    want, theirs = (m(torch.tensor([text])).logits[0].float().log_softmax(-1) for m in (exact, rounded))
    for logprobs, position in zip(found, (49, 88, 89), strict=True):
        error, reference_error = ((x - want[position]).abs().mean() for x in (logprobs, theirs[position]))
        assert error < 2 * reference_error + 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
@torch.inference_mode()
def test_a_decoding_row_saves_its_state(checkpoints: Any, backend: Any) -> None:
    model, config, reference = checkpoints("qwen3_5")
    (text, other) = prompts([32, 31])
    harness = HybridHarness(model, config, recurrent=backend())
    row, neighbour = harness.start(text), harness.start(other)
    harness.step([(row, 31), (neighbour, 30)])
    harness.step([(neighbour, 1), (row, 1)], {1: [32]})
    resumed = harness.resume(text + other, 32, harness.saved[0], row.pages)
    harness.generate([resumed], 4)
    check(reference, text + other, resumed)


@torch.inference_mode()
def test_a_state_page_that_is_not_zeroed_is_noticed(checkpoints: Any) -> None:
    model, config, _ = checkpoints("bamba")
    harness = HybridHarness(model, config)
    row = harness.start(prompts([20])[0])
    harness.state_bytes(row.state).fill_(0xFF)
    assert harness.step([(row, 20)]).isnan().all()


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
@torch.inference_mode()
def test_the_text_part_of_a_checkpoint_with_vision(tmp_path: Path, family: str) -> None:
    path, reference = make_vision_checkpoint(tmp_path, family)
    with safe_open(path / "model.safetensors", framework="pt") as file:
        assert any(name.startswith("model.visual.") for name in file.keys())
    model, config = load(path)
    harness = HybridHarness(model, config)
    texts = prompts([3, 70])
    rows = [harness.start(text) for text in texts]
    harness.generate(rows, 5, chunk=32)
    for text, row in zip(texts, rows, strict=True):
        check(reference, text, row)


@torch.inference_mode()
def test_layers_that_guess_more_tokens_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, _ = make_hybrid_checkpoint(tmp_path, "qwen3_next_dense")
    weights = load_file(path / "model.safetensors")
    save_file(weights | {"mtp.norm.weight": torch.ones(4)}, path / "model.safetensors")
    with caplog.at_level("INFO"):
        load(path)
    assert "mtp.norm.weight" in caplog.text
    save_file(weights | {"mtq.norm.weight": torch.ones(4)}, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"mtq\.norm\.weight"):
        load(path)


@torch.inference_mode()
def test_experts_may_be_stacked_in_the_file(tmp_path: Path) -> None:
    path, reference = make_hybrid_checkpoint(tmp_path, "qwen3_5_moe")
    weights = load_file(path / "model.safetensors")
    state = reference.state_dict()
    stacked = {name: tensor.clone() for name, tensor in state.items() if ".mlp.experts." in name}
    assert stacked
    plain = {name: tensor for name, tensor in weights.items() if ".mlp.experts." not in name}
    save_file(plain | stacked, path / "model.safetensors")
    model, config = load(path)
    harness = HybridHarness(model, config)
    (text,) = prompts([40])
    row = harness.start(text)
    harness.generate([row], 4)
    check(reference, text, row)
    save_file(weights | stacked, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="experts"):
        load(path)
