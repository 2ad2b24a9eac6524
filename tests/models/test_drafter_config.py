"""Configurations and files of drafters: what is read, what is refused, and in which words."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_drafters import EAGLE, add_tensors, eagle_weights, qwen_mtp_weights, write_drafter
from helpers.checkpoints_hybrid import make_hybrid_checkpoint
from helpers.draft_harness import load_drafting
from pagerunner.errors import CheckpointError, ConfigError
from pagerunner.models.checkpoint.drafters import with_drafter
from pagerunner.models.checkpoint.loader import build_model, weights_bytes
from pagerunner.models.configs.base import ModelConfig
from pagerunner.models.configs.drafter import EagleConfig, check_draft_length
from pagerunner.models.configs.reader import read_model_config

IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return read_model_config(
        make_checkpoint(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=8, tokenizer=False)
    )


def read(target: ModelConfig, directory: Path, fields: dict[str, Any]) -> EagleConfig:
    """The config of a drafter with these fields and no files of weights."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields))
    found = with_drafter(target, "eagle3", str(directory)).drafter
    assert isinstance(found, EagleConfig)
    return found


@pytest.mark.parametrize(
    ("fields", "takes"),
    [
        ({}, (2, 4, 5)),  # EAGLE's own choice of 8 layers
        ({IDS: [1, 3, 8]}, (1, 3, 8)),  # speculators count layers
        ({"eagle_config": {IDS: [0, 2, 6], "use_aux_hidden_state": True}}, (1, 3, 7)),  # numbers of layers, from 0
        ({"eagle_config": {IDS: [2, 5, 8]}}, (2, 5, 8)),  # the last number says that they count layers
        ({IDS: [2, 3], "eagle_config": {IDS: [1, 2]}}, (2, 3)),
        ({"eagle_config": {"use_aux_hidden_state": False}}, ()),
    ],
)
def test_which_layers_are_taken(
    target: ModelConfig,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    fields: dict[str, Any],
    takes: tuple[int, ...],
) -> None:
    with caplog.at_level(logging.INFO):
        found = read(target, tmp_path, EAGLE | fields)
    assert found.takes == takes
    said = f"after {', '.join(map(str, takes))} of" if takes else "behind the final norm of"
    assert f"the drafter takes hidden states {said} the target's 8 layers." in caplog.text


def test_a_config_of_speculators(target: ModelConfig, tmp_path: Path) -> None:
    layer = {name: value for name, value in EAGLE.items() if name not in ("architectures", "draft_vocab_size")}
    fields = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [{"speculative_tokens": 3}]},
        "transformer_layer_config": layer,
        "draft_vocab_size": 96,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "target_hidden_size": None,
        IDS: [2, 4, 6],
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
    }
    found = read(target, tmp_path, fields)
    assert (found.takes, found.draft_vocab_size, found.norm_before_residual) == ((2, 4, 6), 96, True)
    assert found.rope.theta == 5000.0
    with pytest.raises(
        ConfigError, match="speculators_model_type is 'eagle', but speculative_config says method eagle3"
    ):
        read(target, tmp_path, fields | {"speculators_model_type": "eagle"})


# What the makers of heads write beside the sizes.
QWEN_WORDS = {"max_window_layers": 36, "sliding_window": None, "use_sliding_window": False, "rope_scaling": None}
MODEL_OPTIMIZER = {
    IDS: [1, 3, 4],
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 1,
}


@pytest.mark.parametrize(
    ("fields", "takes"),
    [
        (QWEN_WORDS | {"architectures": ["Eagle3LlamaForCausalLM"]}, (2, 4, 5)),  # AngelSlim's for Qwen3
        (QWEN_WORDS | {"eagle_config": {IDS: [1, 3, 5], "use_aux_hidden_state": True}}, (2, 4, 6)),  # SpecForge's
        (QWEN_WORDS | {"fc_norm": True, "norm_output": True}, (2, 4, 5)),
        (
            QWEN_WORDS | {"model_type": "kimi_k2", "eagle_config": {IDS: [2, 3, 5]}},
            (3, 4, 6),
        ),  # of SpecForge's for Kimi-K2
        ({"eagle_config": MODEL_OPTIMIZER, "pretraining_tp": 1, "mlp_bias": False}, (2, 4, 5)),  # Model Optimizer's
    ],
)
def test_what_makers_of_heads_write(
    target: ModelConfig, tmp_path: Path, fields: dict[str, Any], takes: tuple[int, ...]
) -> None:
    assert read(target, tmp_path, EAGLE | fields).takes == takes


def test_model_optimizers_first_version(target: ModelConfig, tmp_path: Path) -> None:
    """Its first layer has no norm before attention, and there is none behind the last."""
    names = ("use_input_layernorm_in_first_layer", "use_last_layernorm", "use_aux_hidden_state")
    fields = {name: value for name, value in EAGLE.items() if name != "draft_vocab_size"}
    for given, fits in ((False, True), (True, False)):
        config = fields | {"eagle_config": MODEL_OPTIMIZER | dict.fromkeys(names, given) | {IDS: []}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        if fits:
            assert with_drafter(target, "eagle", str(tmp_path)).drafter is not None
            continue
        with pytest.raises(ConfigError, match="use_input_layernorm_in_first_layer is true; of method eagle only"):
            with_drafter(target, "eagle", str(tmp_path))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({IDS: [2, 4, 9]}, f"{IDS} is [2, 4, 9], but the target has 8 layers"),
        ({"eagle_config": {IDS: [-2, 4, 5]}}, f"eagle_config: {IDS} is [-2, 4, 5], but the target has 8 layers"),
        ({IDS: [2, 2, 4]}, "names a layer twice"),
        (
            {IDS: [1, 3, 5], "eagle_config": {IDS: [1, 3, 5]}},
            "means the states after (1, 3, 5) layers, and that in eagle_config those after (2, 4, 6)",
        ),
        ({IDS: [2, 4], "num_aux_hidden_states": 3}, f"num_aux_hidden_states is 3, but {IDS} names 2"),
        ({"target_hidden_size": 4096}, "target_hidden_size is 4096, but the target "),
        ({"hidden_size": 96}, "hidden_size is 96, but the target "),
        ({"vocab_size": 600}, "vocab_size is 600, but the target "),
        ({"draft_vocab_size": 513}, "draft_vocab_size is 513, more than vocab_size=512"),
        (
            {"model_type": "mamba", "architectures": ["MambaForCausalLM"]},
            "model_type is 'mamba'; drafters have layers of llama or qwen3",
        ),
        (
            {"mask_token_id": 7},
            "mask_token_id is 7, a field that pagerunner does not know. It may change what the drafter computes",
        ),
        (
            {"eagle_config": {"parallel_draft_step": 4}},
            "eagle_config: parallel_draft_step is 4; drafters that guess several",
        ),
        (
            {"eagle_config": {"use_last_layernorm": False}},
            "use_last_layernorm is false; of method eagle3 only drafters with true",
        ),
        (
            {"eagle_config": {"use_mtp_layernorm": True}},
            "use_mtp_layernorm is true; of method eagle3 only drafters with false",
        ),
        (
            {"eagle_config": {"own_norms": 3}},
            "own_norms is 3, a field that pagerunner does not know. It may change what the drafter computes",
        ),
        ({"use_sliding_window": True, "sliding_window": 512}, "sliding_window is "),
    ],
)
def test_what_is_refused(target: ModelConfig, tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        read(target, tmp_path, EAGLE | fields)


def test_a_drafter_with_fewer_positions_than_the_engine(target: ModelConfig, tmp_path: Path) -> None:
    found = read(target, tmp_path, EAGLE | {"max_position_embeddings": 512})
    check_draft_length(found, 512)
    with pytest.raises(
        ConfigError,
        match="max_model_len=513 is more than the 512 positions of the drafter .* Lower max_model_len to 512",
    ):
        check_draft_length(found, 513)


def _with_weights(target: ModelConfig, directory: Path, weights: dict[str, torch.Tensor], **fields: Any) -> ModelConfig:
    return with_drafter(target, "eagle3", str(write_drafter(directory, EAGLE | fields, weights)))


def test_tensors_that_do_not_land(target: ModelConfig, tmp_path: Path) -> None:
    weights = eagle_weights(EAGLE)
    without = {name: tensor for name, tensor in weights.items() if name != "layers.0.hidden_norm.weight"}
    for number, (held, said) in enumerate(
        (
            (without, "the checkpoint lacks the tensor layers.0.hidden_norm.weight"),
            (
                weights | {"layers.1.mlp.up_proj.weight": torch.zeros(3, 3)},
                "the tensor layers.1.mlp.up_proj.weight is not part of the model",
            ),
            (weights | {"norm.weight": torch.ones(65)}, "norm.weight has shape [65]; the config asks for [64]"),
            (weights | {"d2t": weights["d2t"] + 400}, "d2t holds 5"),
            (weights | {"d2t": weights["d2t"][:-1]}, "d2t has shape [95]; the config asks for [96]"),
            ({name: tensor for name, tensor in weights.items() if name != "d2t"}, "lacks the tensor d2t"),
        )
    ):
        config = _with_weights(target, tmp_path / str(number), held)
        with pytest.raises(CheckpointError, match=re.escape(said)) as caught:
            load_drafting(config)
        assert str(tmp_path / str(number)) in str(caught.value)


def test_a_copy_of_the_targets_embedding_takes_no_memory(target: ModelConfig, tmp_path: Path) -> None:
    weights = eagle_weights(EAGLE)
    alone = weights_bytes(load_drafting(_with_weights(target, tmp_path / "none", weights)))
    embed = load_file(Path(target.path) / "model.safetensors")["model.embed_tokens.weight"]
    copied = load_drafting(_with_weights(target, tmp_path / "copy", weights | {"embed_tokens.weight": embed.clone()}))
    assert weights_bytes(copied) == alone
    own = load_drafting(_with_weights(target, tmp_path / "own", weights | {"embed_tokens.weight": embed + 1}))
    assert weights_bytes(own) == alone + embed.nbytes
    assert torch.equal(own.drafter.embed_tokens.table_VD, embed + 1)
    layers = sum(tensor.nbytes for name, tensor in weights.items() if name != "t2d")
    assert 0 <= alone - weights_bytes(build_model(target, "float32")) - layers < 256 * len(weights)


def test_a_checkpoint_without_the_module(tmp_path: Path) -> None:
    path, _ = make_hybrid_checkpoint(tmp_path, "qwen3_next")
    config = read_model_config(path)
    with pytest.raises(
        CheckpointError, match=re.escape(f"{path}: method mtp needs") + ".* no tensor that begins with mtp\\."
    ):
        with_drafter(config, "mtp")
    weights = qwen_mtp_weights(json.loads((path / "config.json").read_text()))
    del weights["fc.weight"]
    add_tensors(path, weights, "mtp.")
    with pytest.raises(
        CheckpointError,
        match=re.escape(f"{path}: the checkpoint lacks the tensor mtp.fc.weight that method mtp asks for"),
    ):
        load_drafting(with_drafter(config, "mtp"))
    add_tensors(path, {}, "", mtp_num_hidden_layers=0)
    with pytest.raises(ConfigError, match="config.json says mtp_num_hidden_layers=0; 1 is supported"):
        with_drafter(read_model_config(path), "mtp")


def test_a_family_without_such_modules(target: ModelConfig) -> None:
    with pytest.raises(ConfigError, match="models of model_type llama have no multi-token prediction module"):
        with_drafter(target, "mtp")


def test_the_module_is_passed_over_without_speculation(tmp_path: Path) -> None:
    path, _ = make_hybrid_checkpoint(tmp_path, "qwen3_5")
    add_tensors(path, qwen_mtp_weights(json.loads((path / "config.json").read_text())), "mtp.")
    config = read_model_config(path)
    assert config.drafter is None
    assert weights_bytes(build_model(config, "float32")) < weights_bytes(
        build_model(with_drafter(config, "mtp"), "float32")
    )
