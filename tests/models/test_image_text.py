"""Text models of image-and-text checkpoints, by either naming of tensors: transformers' tokens, the vision part passed over."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoints_image import make_image_checkpoint, publish, tensor_names
from helpers.engine_oracle import check, engine, prompt, run
from helpers.families import MAKERS
from pagerunner.errors import CheckpointError

pytest.importorskip("transformers")


@pytest.mark.parametrize("old_names", [True, False], ids=["makers' names", "transformers' names"])
@pytest.mark.parametrize(
    ("family", "text"),
    [("gemma3", {}), ("mistral3", {}), ("gemma3", {"tie_word_embeddings": False}), ("kimi_k25", {})],
    ids=["gemma3", "mistral3", "gemma3 with its own output weights", "kimi_k25"],
)
def test_tokens_are_those_of_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, text: dict[str, Any], old_names: bool
) -> None:
    torch.manual_seed(0)
    model = make_image_checkpoint(tmp_path, family, old_names=old_names, **text)
    if old_names:
        publish(tmp_path, drop=("layer_types",))
    names = tensor_names(tmp_path)
    assert any(name.startswith("vision_tower." if old_names else "model.vision_tower.") for name in names)
    with caplog.at_level(logging.INFO):
        llm = engine(tmp_path)
    outputs = run(llm, [prompt(1, 5), prompt(2, 60)])
    check(model, outputs)
    passed = [record.getMessage() for record in caplog.records if "not used by text" in record.getMessage()]
    assert len(passed) == 1 and "tensors such as" in passed[0]


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "llama4"])
def test_other_wrappers_load_and_their_vision_part_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str
) -> None:
    made = MAKERS[family](tmp_path)
    with caplog.at_level(logging.INFO):
        engine(made)
    [line] = [record.getMessage() for record in caplog.records if "not used by text" in record.getMessage()]
    assert "tensors such as" in line


def test_a_tensor_of_nobody_is_still_an_error(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make_image_checkpoint(tmp_path, "gemma3", old_names=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["language_model.model.layers.0.self_attn.sinks"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.sinks is not part of the model"):
        engine(tmp_path)


def test_a_text_model_has_no_vision_part_to_pass_over(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from helpers.checkpoints import make_checkpoint

    path = make_checkpoint(tmp_path, "llama", tokenizer=False)
    tensors = load_file(path / "model.safetensors")
    tensors["vision_tower.weight"] = torch.ones(4)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="vision_tower.weight is not part of the model"):
        engine(path)
