"""All ranks launch the same kernels for their sums, whatever part of the model each has: the programs of a kernel wait for those of the other ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.borders import set_borders
from helpers.checkpoints import make_checkpoint
from helpers.checkpoints_window import make_window_checkpoint
from helpers.divided import Whole
from helpers.forward import Harness, prompts
from pagerunner.layers.linear import FusedLinear
from pagerunner.models.checkpoint.loader import Model, load_weights, materialize, weights_bytes
from pagerunner.models.checkpoint.ranks import build_share, join_ranks
from pagerunner.models.configs.base import ExpertShare
from pagerunner.models.configs.reader import read_model_config

pytest.importorskip("triton")
from helpers.noted_sums import noting
from pagerunner.ops.peer_sums import Limits

Sizes = dict[str, Any]
ONE_HEAD_EACH = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48, "head_dim": 16}


def made(directory: Path, family: str, sizes: Sizes) -> Path:
    make: Any = (
        make_checkpoint if family == "qwen3" else lambda *args, **fields: make_window_checkpoint(*args, **fields)
    )
    path: Path = make(directory, family, dtype="bfloat16", num_hidden_layers=2, **sizes)
    return path


def sizes_before_sums(model: Model) -> list[int]:
    """The sizes of the matrices that stand behind a norm."""
    return [one.out_features * one.in_features for one in model.modules() if isinstance(one, FusedLinear)]


@pytest.mark.parametrize(
    ("ranks", "family", "sizes", "experts"),
    [
        (3, "qwen3", ONE_HEAD_EACH | {"intermediate_size": 64}, False),
        (
            8,
            "qwen3",
            {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16, "intermediate_size": 100},
            False,
        ),
        (3, "qwen3_moe", {"num_attention_heads": 6, "num_key_value_heads": 3, "moe_intermediate_size": 64}, False),
        (3, "gpt_oss", {"num_attention_heads": 6, "num_key_value_heads": 3, "num_local_experts": 5}, True),
    ],
)
def test_ranks_with_unequal_parts_make_the_same_calls(
    ranks: int, family: str, sizes: Sizes, experts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest part of a matrix is one whose product has the norm in it, and the largest isn't."""
    path = made(tmp_path, family, sizes)
    config = replace(read_model_config(path), expert_share=ExpertShare() if experts else None)
    built = [build_share(config, "bfloat16", "cpu", rank, ranks) for rank in range(ranks)]
    parts = [sizes_before_sums(model) for model, _ in built]
    unequal = [one for one in zip(*parts, strict=True) if len(set(one)) > 1]
    assert unequal or family != "qwen3"
    set_borders(monkeypatch, "products", few_weights=min(map(min, unequal or parts)))
    found = []
    for rank, (model, share) in enumerate(built):
        comm, launched = noting(rank, ranks, Limits(500, 2**31, bare=500))
        with torch.inference_mode():
            join_ranks(model, share, comm)
            materialize(model, torch.zeros(weights_bytes(model), dtype=torch.uint8))
            load_weights(model, path, share=share)
            own = config.of_rank(share.counts)
            Harness(Whole(model, share, comm), own, dtype=torch.bfloat16, page_tokens=4, num_pages=64).generate(
                prompts([5, 23, 1]), 2, chunk=12
            )
        found.append(launched)
    kinds = {name for name, *_ in found[0]}
    assert kinds >= {"peer_bare", "peer_units"} and any(("NORM", 1) in one for one in found[0])
    for rank, launched in enumerate(found):
        assert launched == found[0], f"rank {rank} has other calls than rank 0"
