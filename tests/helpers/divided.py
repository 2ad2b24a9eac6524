"""A rank's part of a model, and what it computes. Processes of ranks import this, so it imports little."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from helpers.forward import Harness, prompts
from pagerunner.dist.base import Comm
from pagerunner.dist.gloo import GlooComm
from pagerunner.layers.shares import Share
from pagerunner.models.checkpoint.loader import Model, load_weights, materialize, weights_bytes
from pagerunner.models.checkpoint.panels import store_in_panels
from pagerunner.models.checkpoint.ranks import build_share, join_ranks, token_ids
from pagerunner.models.configs.base import ExpertShare, ModelConfig
from pagerunner.models.configs.reader import read_model_config
from pagerunner.runner.sampling.vocabulary import DividedVocabulary

LENGTHS = [5, 23, 1]
NEW_TOKENS = 6


def of_rank(
    path: Path, comm: Comm, *, panels: bool = False, keep: bool | None = None, experts: bool = False
) -> tuple[Model, ModelConfig, Share]:
    """A rank's model, loaded from the whole checkpoint. `experts`: ranks have whole ones."""
    config = replace(read_model_config(path), expert_share=ExpertShare() if experts else None)
    model, share = build_share(config, "float32", "cpu", comm.rank, comm.size, keep_forms=keep)
    if panels:
        store_in_panels(model)
    join_ranks(model, share, comm)
    materialize(model, torch.full((weights_bytes(model),), 255, dtype=torch.uint8))
    load_weights(model, path, share=share)
    return model, config.of_rank(share.counts), share


class Whole:
    """A rank's model with the logits of all token ids."""

    def __init__(self, model: Model, share: Share, comm: Comm) -> None:
        self._model, self._vocabulary = model, DividedVocabulary(comm, token_ids(share))

    def __call__(self, batch: Any) -> torch.Tensor:
        return self._model(batch)

    def compute_logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        return self._vocabulary.whole(self._model.compute_logits(hidden_SD))


def of_ranks(path: Path, comm: Comm, chunk: int, **stored: Any) -> tuple[list[list[int]], torch.Tensor]:
    """What ranks make of the prompts together."""
    model, config, share = of_rank(path, comm, **stored)
    return tokens_and_scores(Whole(model, share, comm), config, chunk)


def tokens_and_scores(model: Model | Whole, config: ModelConfig, chunk: int) -> tuple[list[list[int]], torch.Tensor]:
    """What a model makes of the prompts, and all log-probabilities."""
    harness = Harness(model, config, dtype=torch.float32, page_tokens=4, num_pages=64)
    found = harness.generate(prompts(LENGTHS), NEW_TOKENS, chunk=chunk)
    return [one.tokens for one in found], torch.stack([score for one in found for score in one.logprobs])


def work(rank: int, size: int, directory: Path) -> Any:
    """What a process of `helpers.ranks` does: tokens, and a sum of the scores' bits."""
    with torch.inference_mode():
        tokens, scores = of_ranks(directory / "model", GlooComm(directory, rank, size, 60.0), 7)
    return tokens, scores.view(torch.int32).sum().item()
