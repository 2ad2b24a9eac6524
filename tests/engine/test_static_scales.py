"""fp8 pages with a checkpoint's scales: read strictly, used, and as good as pages with scales of their own."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.checkpoints import make_checkpoint
from pagerunner import LLM, SamplingParams
from pagerunner.config import EngineArgs
from pagerunner.engine.startup.resolve import resolve
from pagerunner.errors import CheckpointError
from pagerunner.memory.specs import LatentKV, RecurrentState
from pagerunner.models.checkpoint.kv_scales import place_of, read_kv_scales
from pagerunner.models.checkpoint.loader import checkpoint_files

LAYERS = 2
PROMPTS = [[(7 * i + 3 * j) % 500 + 4 for j in range(length)] for i, length in enumerate((5, 60, 100, 17))]


def write(directory: Path, scales: dict[str, Any], config: dict[str, Any] | None = None) -> str:
    """A tiny model whose file also holds `scales`; numbers become tensors without dimensions."""
    path = make_checkpoint(directory, "qwen3", **(config or {}))
    file = Path(path) / "model.safetensors"
    tensors = {name: x if isinstance(x, torch.Tensor) else torch.tensor(float(x)) for name, x in scales.items()}
    save_file(load_file(file) | tensors, file)
    return str(path)


def named(pattern: str, k: float = 0.05, v: float = 0.03) -> dict[str, float]:
    """Scales of all layers; `pattern` has the layer's number and k or v in it."""
    found = {pattern.format(layer=i, x="k"): k * (i + 1) for i in range(LAYERS)}
    return found | {pattern.format(layer=i, x="v"): v * (i + 1) for i in range(LAYERS)}


def logprobs(path: str, kv_cache_dtype: str = "fp8", **options: Any) -> list[float]:
    llm = LLM(path, kv_cache_dtype=kv_cache_dtype, skip_tokenizer_init=True, **options)
    return of(llm)


def of(llm: LLM) -> list[float]:
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=0, logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    assert not any(output.error for output in outputs)
    return [next(iter(entry.values())).logprob for output in outputs for entry in output.prompt_logprobs[1:]]


def distance(found: list[float], wanted: list[float]) -> tuple[float, float]:
    errors = [abs(a - b) for a, b in zip(found, wanted, strict=True)]
    return sum(errors) / len(errors), max(errors)


@pytest.mark.parametrize(
    "pattern",
    [
        "model.layers.{layer}.self_attn.{x}_scale",
        "model.layers.{layer}.self_attn.{x}_proj.{x}_scale",
        "model.layers.{layer}.self_attn.attn.{x}_scale",
        "model.layers.{layer}.self_attn.{x}_proj.output_scale",
    ],
)
def test_every_way_to_name_them(tmp_path: Path, pattern: str) -> None:
    resolved = resolve(EngineArgs(model=write(tmp_path, named(pattern)), kv_cache_dtype="fp8"))
    assert {layer: tuple(round(x, 4) for x in pair) for layer, pair in resolved.kv_scales.items()} == {
        0: (0.05, 0.03),
        1: (0.1, 0.06),
    }
    assert all(piece.spec.static_scales for group in resolved.plan.groups for piece in group.layers)


def test_one_scale_may_serve_keys_and_values(tmp_path: Path) -> None:
    path = write(tmp_path, {f"model.layers.{i}.self_attn.kv_scale": 0.25 for i in range(LAYERS)})
    assert resolve(EngineArgs(model=path, kv_cache_dtype="fp8")).kv_scales == {0: (0.25, 0.25), 1: (0.25, 0.25)}


def test_other_tensors_are_no_scales() -> None:
    for name in (
        "model.layers.0.self_attn.k_proj.weight_scale",
        "model.layers.0.mlp.k_scale",
        "mtp.layers.0.self_attn.k_scale",
        "model.layers.0.self_attn.k_proj.weight",
    ):
        assert place_of(name) is None
    assert place_of("model.language_model.layers.11.self_attn.v_scale") == (11, (1,))
    for name in ("self_attn.q_scale", "self_attn.q_proj.q_scale", "self_attn.attn.prob_scale"):
        assert place_of(f"model.layers.3.{name}") == (3, ())  # of what is never rounded


def test_pages_hold_no_scales_and_need_no_zeroing(tmp_path: Path) -> None:
    def group(path: str) -> Any:
        return resolve(EngineArgs(model=path, kv_cache_dtype="fp8", max_model_len=64)).plan.groups[0]

    path = write(tmp_path, named("model.layers.{layer}.self_attn.{x}_scale"))
    static, own = group(path), group(str(make_checkpoint(tmp_path, "qwen3")))
    assert own.zero_fresh and not static.zero_fresh
    for one, other in zip(own.layers, static.layers, strict=True):
        scales = 16  # float32 of two heads' keys and values
        assert one.spec.page_bytes(16) == other.spec.page_bytes(16) + scales


def test_values_stay_near_those_of_float32_pages_whatever_the_memory(tmp_path: Path) -> None:
    path = write(tmp_path, named("model.layers.{layer}.self_attn.{x}_scale"))
    exact = logprobs(path, "auto")
    found = logprobs(path)
    mean, most = distance(found, exact)
    assert 0 < mean < 0.06 and most < 0.5
    conditions: tuple[dict[str, Any], ...] = (
        {"max_num_batched_tokens": 7},
        {"block_size": 48, "poison_fresh_pages": True},
        {"num_gpu_blocks_override": 14, "max_model_len": 128, "poison_fresh_pages": True},
    )
    for condition in conditions:
        assert distance(logprobs(path, **condition), found)[1] < 0.02


def test_the_numbers_are_used(tmp_path: Path) -> None:
    fitting = write(tmp_path, named("model.layers.{layer}.self_attn.{x}_scale"))
    exact = logprobs(fitting, "auto")
    mean, _ = distance(logprobs(fitting), exact)
    # Keys and values reach far beyond 448 of these scales, where numbers saturate; they are never NaN.
    small = write(tmp_path, named("model.layers.{layer}.self_attn.{x}_scale", 1e-4, 1e-4))
    assert distance(logprobs(small), exact)[0] > 4 * mean
    assert all(map(math.isfinite, logprobs(small)))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16", "fp8_e5m2"])
def test_other_dtypes_make_no_use_of_them_and_say_so(
    tmp_path: Path, kv_cache_dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "pagerunner"):
        scaled = logprobs(write(tmp_path, named("model.layers.{layer}.self_attn.{x}_scale")), kv_cache_dtype)
    assert "makes no use of them" in caplog.text
    assert scaled == logprobs(str(make_checkpoint(tmp_path, "qwen3")), kv_cache_dtype)


@pytest.mark.parametrize("level", [1, 2])
def test_they_survive_sleep(tmp_path: Path, level: int) -> None:
    path = write(tmp_path, named("model.layers.{layer}.self_attn.{x}_scale"))
    llm = LLM(path, kv_cache_dtype="fp8", enable_sleep_mode=True, skip_tokenizer_init=True)
    before = of(llm)
    llm.sleep(level=level)
    llm.wake_up()
    assert of(llm) == before


def rescale(path: str, scales: dict[str, float]) -> None:
    """The same weights with other scales, or with none."""
    file = Path(path) / "model.safetensors"
    weights = {name: tensor for name, tensor in load_file(file).items() if place_of(name) is None}
    save_file(weights | {name: torch.tensor(x) for name, x in scales.items()}, file)


def test_a_wake_from_level_2_reads_them_again_or_refuses(tmp_path: Path) -> None:
    pattern = "model.layers.{layer}.self_attn.{x}_scale"
    path = write(tmp_path, named(pattern))
    llm = LLM(path, kv_cache_dtype="fp8", enable_sleep_mode=True, skip_tokenizer_init=True)
    before = of(llm)
    rescale(path, named(pattern, 0.11, 0.17))
    llm.sleep(level=1)
    llm.wake_up()
    assert of(llm) == before  # the weights weren't read again, so neither are the scales
    llm.sleep(level=2)
    llm.wake_up()
    assert of(llm) == logprobs(path) != before
    for scales, said in (
        (
            {},
            r"holds no scales of keys and values, but .* layer 0, 0.05 and 0.03 .* Put them back, or start the engine",
        ),
        (dict(list(named(pattern).items())[:2]), "layer 0 has no value scale"),
    ):
        llm.sleep(level=2)
        rescale(path, scales)
        with pytest.raises(CheckpointError, match=said):
            llm.wake_up()
    rescale(path, named(pattern))
    llm.wake_up()
    assert of(llm) == before


def test_dummy_weights_have_none(tmp_path: Path) -> None:
    path = write(tmp_path, named("model.layers.{layer}.self_attn.{x}_scale"))
    assert resolve(EngineArgs(model=path, kv_cache_dtype="fp8", load_format="dummy")).kv_scales == {}


FULL = named("model.layers.{layer}.self_attn.{x}_scale")
FAULTS: dict[str, tuple[Callable[[dict[str, Any]], Any], tuple[str, ...]]] = {
    "a layer lacks both": (
        lambda s: [s.pop(f"model.layers.1.self_attn.{x}_scale") for x in "kv"],
        ("layer 1", "key", "every layer"),
    ),
    "a layer lacks one": (lambda s: s.pop("model.layers.0.self_attn.v_scale"), ("layer 0", "value")),
    "zero": (lambda s: s.update({"model.layers.0.self_attn.k_scale": 0.0}), ("layers.0.self_attn.k_scale", "0.0")),
    "negative": (lambda s: s.update({"model.layers.1.self_attn.v_scale": -1.0}), ("layers.1.self_attn.v_scale", "-1")),
    "nan": (lambda s: s.update({"model.layers.1.self_attn.v_scale": math.nan}), ("v_scale", "nan")),
    "infinite": (lambda s: s.update({"model.layers.1.self_attn.v_scale": math.inf}), ("v_scale", "inf")),
    "per head": (lambda s: s.update({"model.layers.0.self_attn.k_scale": torch.ones(2)}), ("k_scale", "[2]")),
    "whole number": (lambda s: s.update({"model.layers.0.self_attn.k_scale": torch.tensor(1)}), ("k_scale", "int64")),
    "an unknown layer": (lambda s: s.update({"model.layers.2.self_attn.k_scale": 1.0}), ("layer 2",)),
    "twice": (
        lambda s: s.update({"model.layers.0.self_attn.k_proj.k_scale": 1.0}),
        ("layers.0.self_attn.k_proj.k_scale", "layers.0.self_attn.k_scale", "both"),
    ),
}


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "auto"])
@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_scales_are_named(tmp_path: Path, fault: str, kv_cache_dtype: str) -> None:
    change, words = FAULTS[fault]
    scales: dict[str, Any] = dict(FULL)
    change(scales)
    with pytest.raises(CheckpointError) as error:
        resolve(EngineArgs(model=write(tmp_path, scales), kv_cache_dtype=kv_cache_dtype))
    assert all(word in str(error.value) for word in words), error.value


def test_a_scale_of_one_element_is_a_number(tmp_path: Path) -> None:
    scales = {name: torch.full((1,), value, dtype=torch.bfloat16) for name, value in FULL.items()}
    path = write(tmp_path, scales)
    found = resolve(EngineArgs(model=path, kv_cache_dtype="fp8")).kv_scales
    assert found[0] == (
        float(scales["model.layers.0.self_attn.k_scale"]),
        float(scales["model.layers.0.self_attn.v_scale"]),
    )


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def test_a_config_that_quantises_pages_only_is_accepted(tmp_path: Path) -> None:
    quantization = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME}
    path = write(tmp_path, FULL, {"quantization_config": quantization})
    assert set(resolve(EngineArgs(model=path, kv_cache_dtype="fp8")).kv_scales) == {0, 1}


def test_scales_of_what_latents_are_projected_to_and_of_queries_are_passed_over(tmp_path: Path) -> None:
    spec = LatentKV(8, 4, "fp8_e4m3")
    path = write(tmp_path, {"model.layers.0.self_attn.k_proj.k_scale": 1.0, "model.layers.1.self_attn.q_scale": 0.0})
    assert read_kv_scales(checkpoint_files(Path(path)), (spec, spec)) == {}
    state = RecurrentState(((2, 2),), ("float32",))
    with pytest.raises(CheckpointError, match="layer 0, which has no keys and values"):
        read_kv_scales(checkpoint_files(Path(path)), (state, spec))
