"""Both demos, quantised by scripts/quantise.py, keep their scores; and what the script refuses."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import quantise as script
from helpers import families
from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_latent import make_latent_checkpoint
from helpers.checkpoints_window import make_window_checkpoint
from helpers.effort import effort, share_of_the_day
from pagerunner import LLM
from pagerunner.cli.main import main
from pagerunner.demo import demo_names, demo_path
from pagerunner.errors import ConfigError
from pagerunner.eval.runner import evaluate
from pagerunner.eval.tasks import RECALL_DISTANCES
from pagerunner.models.checkpoint.loader import build_model, load_weights, materialize, weights_bytes
from pagerunner.models.configs.reader import read_model_config

CASES = [(demo, number) for number in script.FORMATS for demo in demo_names()]
COUNT = effort(8, 50)
ENDS = (RECALL_DISTANCES[0], RECALL_DISTANCES[-1])


@pytest.mark.parametrize(("demo", "number"), [CASES[i] for i in share_of_the_day(len(CASES), len(CASES))])
def test_a_quantised_demo_keeps_its_scores(tmp_path: Path, capsys, demo: str, number: str) -> None:
    path = tmp_path / "quantised"
    assert script.main([str(demo_path(demo)), str(path), "--format", number]) == 0
    assert "MiB, before " in capsys.readouterr().out
    llm = LLM(str(path), num_gpu_blocks_override=1024, max_num_seqs=32, use_tqdm=False)
    report = evaluate(
        llm, tasks=["recall", "addition", "sorting"], count=COUNT, distances=effort(ENDS, RECALL_DISTANCES)
    )
    scores = [score.accuracy for score in report.scores]  # the demos' own are 1, see test_demo_eval.py
    assert sum(scores) >= 0.95 * len(scores), report.text()


def test_eval_runs_a_quantised_demo(tmp_path: Path, capsys) -> None:
    script.quantise(demo_path("demo"), tmp_path / "quantised", "int4")
    words = ["--tasks", "addition", "--num-examples", "4", "--json", "--quiet"]
    assert main(["eval", "--model", str(tmp_path / "quantised"), *words]) == 0
    assert [score["accuracy"] for score in json.loads(capsys.readouterr().out)["scores"]] == [1.0]


def loaded(path: Path) -> dict[str, torch.Tensor]:
    """The model's tensors by name; quantised matrices are unpacked."""
    model = build_model(read_model_config(path), "float32")
    materialize(model, torch.zeros(weights_bytes(model), dtype=torch.uint8))
    load_weights(model, path)
    return {
        f"{i}.{name}": tensor for i, module in enumerate(model.modules()) for name, tensor in module.weights.items()
    }


STACKED = ("gpt_oss", "llama4", "llama4_text")  # experts of a layer in one tensor
IMAGES = ("gemma3", "llama4", "mistral3", "qwen3_5")

CASES = list(itertools.product(script.FORMATS, sorted({*STACKED, *IMAGES})))


@pytest.mark.parametrize(
    ("number", "family"), [CASES[case] for case in share_of_the_day(len(CASES), len(CASES) // len(script.FORMATS))]
)
def test_what_is_written_is_loaded_and_images_are_left_alone(tmp_path: Path, family: str, number: str) -> None:
    made = families.MAKERS[family](tmp_path)
    model = made if isinstance(made, Path) else made[0]
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text("{}")
    script.quantise(model, tmp_path / "out", number, 32)
    assert loaded(tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    floats = (torch.float32, torch.bfloat16)
    assert all(tensor.dtype in floats for name, tensor in tensors.items() if "vision" in name or "visual" in name)
    assert all(tensor.dtype in floats for tensor in tensors.values() if tensor.dim() == 3), "experts in one tensor"
    assert (tmp_path / "out" / "1_Pooling" / "config.json").read_text() == "{}"
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o044


MAKERS = {
    "qwen2": lambda path: make_checkpoint(path, "qwen2", shards=3),
    "qwen3_moe": lambda path: make_window_checkpoint(path, "qwen3_moe", moe_intermediate_size=32),
    "deepseek_v3": lambda path: make_latent_checkpoint(path, "deepseek_v3", hidden_size=64, moe_intermediate_size=32)[
        0
    ],
}


@pytest.mark.parametrize("number", script.FORMATS)
@pytest.mark.parametrize("family", MAKERS)
def test_weights_stay_near_and_what_must_not_be_rounded_stays_equal(tmp_path: Path, family: str, number: str) -> None:
    folder = tmp_path / "floats"
    folder.mkdir()
    model = MAKERS[family](folder)
    script.quantise(model, tmp_path / "out", number, 64)
    found, want = loaded(tmp_path / "out"), loaded(model)
    bound = 0.04 if number == "fp8" else 0.2
    rounded = 0
    for name, tensor in want.items():
        if not torch.equal(found[name], tensor):
            rounded += 1
            assert float((found[name] - tensor).norm() / tensor.norm()) < bound, name
    assert rounded > 3
    files = sorted(file.name for file in model.iterdir() if not file.name.endswith(".bin"))
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == files


def test_groups_that_do_not_divide_become_smaller_or_leave_the_matrix(tmp_path: Path) -> None:
    assert [script.fitting_group(size, 128) for size in (256, 192, 96, 48, 2880)] == [128, 64, 32, None, 64]
    model = make_checkpoint(tmp_path, "llama", hidden_size=64, intermediate_size=80, tokenizer=False)
    said = script.quantise(model, tmp_path / "out", "int4", 128)
    assert [group["weights"]["group_size"] for group in said["config_groups"].values()] == [64]
    assert "model.layers.0.mlp.down_proj" in said["ignore"]
    loaded(tmp_path / "out")


def test_a_scale_is_the_best_of_its_candidates() -> None:
    weight = torch.randn(16, 128)
    packed = script.to_int4(weight, 32)
    numbers = torch.stack([packed["weight_packed"] >> 4 * i & 15 for i in range(8)], 2).flatten(1) - 8
    error = (numbers * packed["weight_scale"].repeat_interleave(32, 1) - weight).square().sum()
    scale = (weight.unflatten(1, (-1, 32)).abs().amax(2) / 7.5).repeat_interleave(32, 1)
    assert error < ((weight / scale).round().clamp(-8, 7) * scale - weight).square().sum()


def test_what_the_script_refuses_is_named(tmp_path: Path, capsys) -> None:
    model = make_checkpoint(tmp_path, "llama", tokenizer=False)
    out = tmp_path / "out"
    script.quantise(model, out, "fp8")
    with pytest.raises(ConfigError, match="quantised already .compressed-tensors"):
        script.quantise(out, tmp_path / "twice", "fp8")
    with pytest.raises(ConfigError, match="is not empty"):
        script.quantise(model, out, "fp8")
    with pytest.raises(ConfigError, match="power of two of at least 32, got 48"):
        script.quantise(model, tmp_path / "odd", "int4", 48)
    assert script.main([str(tmp_path / "nothing"), str(tmp_path / "none")]) == 1
    assert "There is no model directory" in capsys.readouterr().err
