"""Ranks with a share of a model each compute together what the whole model computes, and all of them the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_window import make_window_checkpoint
from helpers.divided import of_rank, of_ranks, tokens_and_scores, work
from helpers.effort import by_days
from helpers.families import MAKERS
from helpers.forward import load
from helpers.quantise import quantise
from helpers.ranks import Ranks
from helpers.threads_of_ranks import in_ranks
from pagerunner.dist.gloo import GlooComm
from pagerunner.dist.null import NullComm
from pagerunner.errors import CheckpointError, ConfigError
from pagerunner.layers.moe import Experts
from pagerunner.layers.shares import Share
from pagerunner.models.checkpoint.loader import Model, load_weights, materialize, weights_bytes
from pagerunner.models.checkpoint.ranks import build_share, layers_of_stages
from pagerunner.models.configs.base import ExpertShare, ModelConfig
from pagerunner.models.configs.reader import read_model_config

pytestmark = pytest.mark.usefixtures("forked")

SIZES: dict[str, tuple[int, dict[str, Any]]] = {
    "two ranks": (2, {}),
    "three ranks, inner features and token ids in unequal parts": (
        3,
        {
            "hidden_size": 96,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "intermediate_size": 100,
            "vocab_size": 515,
        },
    ),
    "four ranks, two of them with the same key/value head": (4, {"num_attention_heads": 8, "vocab_size": 513}),
    "three ranks with one key/value head": (3, {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 1}),
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 16},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
}


def check(path: Path, size: int, directory: Path, chunk: int = 7, **stored: Any) -> None:
    with torch.inference_mode():
        tokens, scores = tokens_and_scores(*load(path), chunk)

    @torch.inference_mode()
    def act(comm: GlooComm) -> Any:
        return of_ranks(path, comm, chunk, **stored)

    found = in_ranks(size, directory, act)
    for got, same in found:
        assert got == tokens
        assert torch.equal(same, found[0][1]), "ranks differ"
        torch.testing.assert_close(same, scores, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("family", "case"), by_days(FAMILIES, SIZES))
def test_ranks_compute_the_whole_model(family: str, case: str, tmp_path: Path) -> None:
    size, sizes = SIZES[case]
    check(make_checkpoint(tmp_path, family, **FAMILIES[family], **sizes), size, tmp_path / "ranks")


@pytest.mark.days(3)
@pytest.mark.parametrize("family", ["gemma3_text", "gemma3", "gpt_oss", "qwen3_moe", "llama4_text", "mistral3"])
def test_ranks_compute_windows_sinks_and_mixtures(family: str, tmp_path: Path) -> None:
    """Every expert is divided; norms behind a half, caps of logits and routers see the ranks' sum."""
    check(MAKERS[family](tmp_path), 2, tmp_path / "ranks")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_matrices_in_panels_are_divided_too(family: str, tmp_path: Path) -> None:
    check(MAKERS[family](tmp_path), 2, tmp_path / "ranks", panels=True)


@pytest.mark.days(3)
@pytest.mark.parametrize(("family", "kind"), [("gpt_oss", "mxfp4"), ("qwen3_moe", "nvfp4"), ("qwen3_moe", "gptq")])
def test_ranks_divide_experts_in_few_bits(family: str, kind: str, tmp_path: Path) -> None:
    names = {"gpt_oss": "intermediate_size", "qwen3_moe": "moe_intermediate_size"}
    path = make_window_checkpoint(tmp_path, family, **{"hidden_size": 64, names[family]: 128})
    quantise(path, kind)
    check(path, 2, tmp_path / "ranks")


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "llama4_text"])
def test_ranks_with_whole_experts_compute_the_whole_model(family: str, tmp_path: Path) -> None:
    """Shared experts are divided by features, beside them. Latents and recurrences: `tests/engine/test_ranks.py`."""
    check(MAKERS[family](tmp_path), 2, tmp_path / "ranks", experts=True)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_ranks_may_have_unequal_numbers_of_experts(family: str, tmp_path: Path) -> None:
    experts = {"gpt_oss": "num_local_experts", "qwen3_moe": "num_experts"}[family]
    path = make_window_checkpoint(tmp_path, family, num_attention_heads=6, num_key_value_heads=3, **{experts: 5})
    config = replace(read_model_config(path), expert_share=ExpertShare())
    numbers = [experts.own for experts in all_experts(config, 3)]
    assert len({*map(len, numbers)}) == 2 and [one for own in numbers for one in own] == [*range(numbers[-1].stop)]
    check(path, 3, tmp_path / "ranks", experts=True, panels=family == "qwen3_moe")
    with pytest.raises(ConfigError, match=r"experts can't be divided among 30 ranks"):
        build_share(replace(config, num_heads=30, num_kv_heads=30), "float32", "cpu", 0, 30)


def all_experts(config: ModelConfig, size: int) -> list[Experts]:
    """Each rank's experts of one layer."""
    models = (build_share(config, "float32", "cpu", rank, size)[0] for rank in range(size))
    return [next(one for one in model.modules() if isinstance(one, Experts)) for model in models]


def test_whole_experts_are_asked_of_a_mixture(tmp_path: Path) -> None:
    config = replace(read_model_config(make_checkpoint(tmp_path, "qwen3")), expert_share=ExpertShare())
    with pytest.raises(
        ConfigError, match=r"enable_expert_parallel divides whole experts among ranks, and the model has none"
    ):
        build_share(config, "float32", "cpu", 0, 2)


@pytest.mark.parametrize("together", [False, True])
def test_a_rank_reads_its_own_experts_alone(together: bool, tmp_path: Path) -> None:
    family = "gpt_oss" if together else "qwen3_moe"
    path = make_window_checkpoint(tmp_path, family)
    config = replace(read_model_config(path), expert_share=ExpertShare())
    read: list[int] = []

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        read.append(source.numel())
        target.copy_(source)

    model, share = build_share(config, "float32", "cpu", 1, 2)
    materialize(model, torch.zeros(weights_bytes(model), dtype=torch.uint8))
    load_weights(model, path, copy=copy, share=share)
    assert sum(read) == sum(tensor.numel() for module in model.modules() for tensor in module.weights.values())


@pytest.mark.days(3)
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("gpt_oss", "mxfp4"),
        ("qwen3_moe", "nvfp4"),
        ("qwen3_moe", "gptq"),
        ("qwen3_moe", "fp8 block"),
        ("qwen3_moe", "int4"),
    ],
)
def test_ranks_divide_whole_experts_in_few_bits(family: str, kind: str, tmp_path: Path) -> None:
    """Experts of 96 inner features in blocks of 96 can't be divided otherwise."""
    names = {"gpt_oss": "intermediate_size", "qwen3_moe": "moe_intermediate_size"}
    sizes = {"hidden_size": 64, names[family]: 128}
    if kind == "fp8 block":
        sizes = {"hidden_size": 96, "head_dim": 96, names[family]: 96}
    path = make_window_checkpoint(tmp_path, family, **sizes)
    quantise(path, kind)
    check(path, 2, tmp_path / "ranks", experts=True)


@pytest.mark.days(3)
@pytest.mark.parametrize(
    "kind", ["compressed-tensors channel", "modelopt tensor", "fp8 block", "int4", "gptq", "awq", "nvfp4"]
)
def test_ranks_divide_checkpoints_in_few_bits(kind: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3", hidden_size=192, head_dim=96, intermediate_size=384)
    quantise(path, kind)
    check(path, 2, tmp_path / "ranks")


@pytest.mark.days(3)
@pytest.mark.parametrize("kind", ["compressed-tensors channel", "fp8 block", "int4", "nvfp4"])
def test_ranks_divide_weights_that_stay_in_few_bits(kind: str, tmp_path: Path) -> None:
    """As on a CUDA device; products are computed by the kernels' twins."""
    path = make_checkpoint(tmp_path, "qwen3", hidden_size=192, head_dim=96, intermediate_size=384)
    quantise(path, kind)
    check(path, 2, tmp_path / "ranks", keep=True)


def test_columns_ordered_by_group_are_refused_by_name(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3", hidden_size=192, head_dim=96, intermediate_size=384)
    quantise(path, "gptq zeros permuted")
    with pytest.raises(ConfigError, match=r"_proj.*desc_act"):
        of_rank(path, NullRank(0, 2))


class NullRank(NullComm):
    """One of several ranks that never speaks to the others."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def test_ranks_in_processes_have_the_tokens_of_the_whole_model(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3").rename(tmp_path / "model")
    with torch.inference_mode():
        tokens, _ = tokens_and_scores(*load(tmp_path / "model"), 7)
    with Ranks(work, 2, tmp_path) as ranks:
        first, second = ranks.line(0), ranks.line(1)
    assert first == second and first[0] == tokens


def all_shares(path: Path, size: int) -> Iterator[tuple[Model, Share]]:
    for rank in range(size):
        model, _, share = of_rank(path, NullRank(rank, size))
        yield model, share


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_reads_its_part_of_a_file_and_no_more(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are views of the mapped file. Columns are copied, as many as the rank has."""
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 6, "tie_word_embeddings": False}
    path = make_checkpoint(tmp_path, "qwen3", **sizes)
    config = read_model_config(path)
    whole = sum(tensor.numel() for tensor in load_file(path / "model.safetensors").values())
    read: list[int] = []

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        assert source.is_contiguous()
        read.append(source.numel())
        target.copy_(source)

    shares = []
    for rank in range(size):
        model, share = build_share(config, "float32", "cpu", rank, size)
        materialize(model, torch.zeros(weights_bytes(model), dtype=torch.uint8))
        read.clear()
        load_weights(model, path, copy=copy, share=share)
        held = sum(tensor.numel() for module in model.modules() for tensor in module.weights.values())
        shares.append(sum(read))
        assert sum(read) == held
    norms = 64 * 5 + 16 * 4  # each rank has all of these
    assert sum(shares) == whole + (size - 1) * norms


def test_a_tied_models_output_weights_in_the_file_are_compared_by_each_rank(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen2", tie_word_embeddings=True, vocab_size=513)
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, {"format": "pt"})
    assert len(list(all_shares(path, 2))) == 2
    tensors["lm_head.weight"][400] += 1
    save_file(tensors, file, {"format": "pt"})
    of_rank(path, NullRank(0, 2))  # it is the other one's row
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        of_rank(path, NullRank(1, 2))


def test_a_tensor_of_another_shape_is_named_with_the_whole_shape(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3")
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name][:48].clone()  # what a rank of two wants
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"up_proj.weight has shape \[48, 64\]; the config asks for \[96, 64\]"):
        of_rank(path, NullRank(0, 2))


def test_sizes_that_can_not_be_divided_are_refused_with_those_that_can(tmp_path: Path) -> None:
    config = read_model_config(make_checkpoint(tmp_path, "qwen3", num_attention_heads=12, num_key_value_heads=4))
    with pytest.raises(ConfigError, match=r"12 heads can't be divided among 5 ranks\. .*: 1, 2, 4, 12\.$"):
        build_share(config, "float32", "cpu", 0, 5)
    with pytest.raises(ConfigError, match=r"4 key/value heads can't be divided among 3 ranks"):
        build_share(config, "float32", "cpu", 0, 3)


@pytest.mark.parametrize("layers", [range(1), range(1, 2), range(2, 3)], ids=["first", "middle", "last"])
def test_a_stage_loads_its_own_tensors_and_knows_the_others(layers: range, tmp_path: Path) -> None:
    """A tied embedding is on the first and on the last stage. Its copy in the file is looked at there, and passed over elsewhere."""
    path = make_checkpoint(tmp_path, "qwen2", num_hidden_layers=3, tie_word_embeddings=True)
    held = load_file(path / "model.safetensors")
    embedding = held["model.embed_tokens.weight"]

    def loaded(**more: torch.Tensor) -> Model:
        save_file(held | more, path / "model.safetensors")
        model, share = build_share(read_model_config(str(path)), "float32", "cpu", 0, 1, layers=layers)
        materialize(model, torch.empty(weights_bytes(model), dtype=torch.uint8))
        load_weights(model, path, share=share)
        return model

    copy = {"lm_head.weight": embedding.clone()}
    own = {tensor.name for tensor in loaded(**copy).checkpoint()}
    number, middle = layers.start, layers == range(1, 2)
    assert {name for name in own if ".layers." in name} == {name for name in held if f".layers.{number}." in name}
    assert {name for name in own if ".layers." not in name} == (
        set() if middle else {"model.embed_tokens.weight"} | ({"model.norm.weight"} if number else set())
    )
    with pytest.raises(CheckpointError, match="the tensor model.extra.weight is not part of the model"):
        loaded(**{"model.extra.weight": embedding.clone()})
    if middle:
        loaded(**{"lm_head.weight": embedding + 1})
    else:
        with pytest.raises(CheckpointError, match="lm_head.weight differs from model.embed_tokens.weight"):
            loaded(**{"lm_head.weight": embedding + 1})
    del held[f"model.layers.{number}.self_attn.o_proj.weight"]
    with pytest.raises(CheckpointError, match=rf"lacks the tensor model\.layers\.{number}\.self_attn\.o_proj\.weight"):
        loaded()


@pytest.mark.parametrize(
    ("count", "stages", "asked", "sizes"),
    [(36, 2, "", [18, 18]), (62, 4, "", [15, 16, 16, 15]), (35, 4, "", [9, 9, 9, 8]), (5, 3, " 3,1, 1", [3, 1, 1])],
)
def test_stages_have_equally_many_layers_or_as_many_as_asked_for(
    count: int, stages: int, asked: str, sizes: list[int]
) -> None:
    found = layers_of_stages(count, stages, asked)
    assert [len(own) for own in found] == sizes
    assert [layer for own in found for layer in own] == list(range(count))
