"""Models whose matrices are in panels: the same tokens, the same bytes, one copy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_window import make_window_checkpoint
from helpers.compiler import needs_compiler
from helpers.quantise import quantise
from pagerunner import LLM, SamplingParams
from pagerunner.layers.embedding import Embedding
from pagerunner.layers.linear import Linear
from pagerunner.layers.moe import Experts
from pagerunner.models.checkpoint.loader import (
    Model,
    build_model,
    dummy_weights,
    load_weights,
    materialize,
    weights_bytes,
)
from pagerunner.models.checkpoint.panels import store_in_panels
from pagerunner.models.configs.reader import read_model_config
from pagerunner.ops.native.library import SWITCH
from pagerunner.quant.dequantized import DequantizedExperts
from pagerunner.quant.expert_panels import ExpertsInPanels
from pagerunner.quant.panels import InPanels

pytestmark = needs_compiler
WIDE = {"hidden_size": 64, "intermediate_size": 96}


def models(path: Path, *, fill: bool = True) -> tuple[Model, Model]:
    """The model with plain matrices, and with matrices in panels."""
    found = []
    for in_panels in (False, True):
        model = build_model(read_model_config(path), "float32")
        assert not in_panels or store_in_panels(model) > 0
        materialize(model, torch.full((weights_bytes(model),), 255, dtype=torch.uint8))
        if fill:
            load_weights(model, path)
        found.append(model)
    return found[0], found[1]


def matrices(model: Model) -> list[torch.Tensor]:
    linears = [module.dense_OI for module in model.modules() if isinstance(module, Linear)]
    return linears + [module.table_VD for module in model.modules() if isinstance(module, Embedding)]


def experts_of(model: Model, plain: Model) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each expert's matrices in panels, unpacked, and the plain ones."""
    found = []
    for ours, theirs in zip(model.modules(), plain.modules(), strict=True):
        if isinstance(ours, Experts) and isinstance(theirs, Experts):
            assert isinstance(ours.method, ExpertsInPanels)
            assert ours.stays_packed and not ours.unpacked_bytes(10)
            for name, panels in ours.weights.items():
                if name.endswith("weight"):
                    unpacked = ours.method.matrix({"weight": panels})
                    assert isinstance(unpacked, torch.Tensor)
                    found.append((unpacked, theirs.weights[name]))
    return found


@pytest.mark.parametrize("inner", [24, 25])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_fill_panels(tmp_path: Path, family: str, inner: int) -> None:
    sizes = {"moe_intermediate_size": inner} if family == "qwen3_moe" else {"intermediate_size": inner}
    plain, model = models(make_window_checkpoint(tmp_path, family, tokenizer=False, **sizes))
    pairs = experts_of(model, plain)
    assert len(pairs) >= 4 and all(torch.equal(ours, theirs) for ours, theirs in pairs)
    for one in (plain, model):
        dummy_weights(one, 3)
    assert equal(plain, model)
    assert all(torch.equal(ours, theirs) for ours, theirs in experts_of(model, plain))


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("qwen3_moe", "fp8 block"),
        ("qwen3_moe", "awq"),
        ("qwen3_moe", "gptq"),
        ("gpt_oss", "mxfp4"),
    ],
)
def test_quantised_experts_are_unpacked_into_panels(tmp_path: Path, family: str, kind: str) -> None:
    sizes = {"moe_intermediate_size": 32} if family == "qwen3_moe" else {}
    path = make_window_checkpoint(tmp_path, family, tokenizer=False, **sizes)
    quantise(path, kind)
    plain, model = models(path)
    assert all(isinstance(x.method, DequantizedExperts) for x in plain.modules() if isinstance(x, Experts))
    pairs = experts_of(model, plain)
    assert len(pairs) >= 4 and all(torch.equal(ours, theirs) for ours, theirs in pairs)
    assert equal(plain, model)
    room = sum(panels.numel() - matrix.numel() for panels, matrix in sizes_of(model, plain))
    assert weights_bytes(model) - weights_bytes(plain) <= 4 * room, "there is a second copy of something"


def sizes_of(model: Model, plain: Model) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Weights of linears, embeddings and experts in panels, which may be partly empty, and the plain ones."""
    return [
        (ours.weights[name], theirs.weights[name])
        for ours, theirs in zip(model.modules(), plain.modules(), strict=True)
        if isinstance(ours, Linear | Embedding | Experts)
        for name in ours.weights
    ]


def equal(one: Model, other: Model) -> bool:
    return all(torch.equal(a, b) for a, b in zip(matrices(one), matrices(other), strict=True))


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_fills_panels(tmp_path: Path, tied: bool) -> None:
    path = make_checkpoint(tmp_path, "qwen3", tokenizer=False, tie_word_embeddings=tied, **WIDE)
    plain, model = models(path)
    assert weights_bytes(plain) == weights_bytes(model), "there is a second copy of something"
    assert equal(plain, model)
    tables = [module for module in model.modules() if isinstance(module, Embedding)]
    assert [isinstance(table.method, InPanels) for table in tables] == [tied]
    numbers = torch.tensor([0, 5, 17, 5])
    assert torch.equal(tables[0](numbers), tables[0].table_VD[numbers])


def test_dummy_weights_are_those_of_plain_matrices(tmp_path: Path) -> None:
    plain, model = models(make_checkpoint(tmp_path, "llama", tokenizer=False, **WIDE), fill=False)
    dummy_weights(plain, 3)
    dummy_weights(model, 3)
    assert equal(plain, model)


@pytest.mark.parametrize("kind", ["fp8 tensor", "awq"])
def test_quantised_weights_are_unpacked_into_panels(tmp_path: Path, kind: str) -> None:
    path = make_checkpoint(tmp_path, "qwen3", tokenizer=False, hidden_size=128, intermediate_size=128)
    quantise(path, kind)
    plain, model = models(path)
    assert equal(plain, model)
    assert any(isinstance(x, Linear) and isinstance(x.method, InPanels) and x.method.forms for x in model.modules())


ODD = {"hidden_size": 60, "intermediate_size": 97, "vocab_size": 301}


@pytest.mark.parametrize("tied", [True, False])
def test_sizes_that_fill_no_whole_panels(tmp_path: Path, tied: bool) -> None:
    path = make_checkpoint(tmp_path, "qwen3", tokenizer=False, tie_word_embeddings=tied, **ODD)
    plain, model = models(path)
    assert equal(plain, model)
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    assert all(isinstance(module.method, InPanels) for module in linears)


@pytest.mark.parametrize("sizes", [WIDE, ODD])
def test_tokens_with_and_without_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]
) -> None:
    path = str(make_checkpoint(tmp_path, "qwen3", tokenizer=False, **sizes))
    prompts = [{"prompt_token_ids": [3 + i, 7, 11, *range(i)]} for i in range(20)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)

    def tokens() -> list[list[int]]:
        llm = LLM(path, skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 22)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    with_kernels = tokens()
    monkeypatch.setenv(SWITCH, "0")
    assert tokens() == with_kernels
