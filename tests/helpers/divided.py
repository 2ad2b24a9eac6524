"""A rank's part of a model, and what it computes. Processes of ranks import this, so it imports little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from helpers.forward import Harness, prompts
from pagerunner.dist.base import Comm
from pagerunner.dist.gloo import GlooComm
from pagerunner.layers.shares import Share
from pagerunner.models.checkpoint.loader import Model, load_weights, materialize, weights_bytes
from pagerunner.models.checkpoint.panels import store_in_panels
from pagerunner.models.checkpoint.ranks import build_share, join_ranks
from pagerunner.models.configs.base import ModelConfig
from pagerunner.models.configs.reader import read_model_config

LENGTHS = [5, 23, 1]
NEW_TOKENS = 6


def of_rank(
    path: Path, comm: Comm, *, panels: bool = False, keep: bool | None = None
) -> tuple[Model, ModelConfig, Share]:
    """A rank's model, loaded from the whole checkpoint."""
    config = read_model_config(path)
    model, share = build_share(config, "float32", "cpu", comm.rank, comm.size, keep_forms=keep)
    if panels:
        store_in_panels(model)
    join_ranks(model, share, comm)
    materialize(model, torch.full((weights_bytes(model),), 255, dtype=torch.uint8))
    load_weights(model, path, share=share)
    return model, config.of_rank(share.counts), share


def tokens_and_scores(model: Model, config: ModelConfig, chunk: int) -> tuple[list[list[int]], torch.Tensor]:
    """What a model makes of the prompts, and all log-probabilities."""
    harness = Harness(model, config, dtype=torch.float32, page_tokens=4, num_pages=64)
    found = harness.generate(prompts(LENGTHS), NEW_TOKENS, chunk=chunk)
    return [one.tokens for one in found], torch.stack([score for one in found for score in one.logprobs])


def work(rank: int, size: int, directory: Path) -> Any:
    """What a process of `helpers.ranks` does: tokens, and a sum of the scores' bits."""
    with torch.inference_mode():
        model, config, _ = of_rank(directory / "model", GlooComm(directory, rank, size, 60.0))
        tokens, scores = tokens_and_scores(model, config, 7)
    return tokens, scores.view(torch.int32).sum().item()
