"""A drafter that knows the texts: engines with drafts of any quality, whatever the model."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from pagerunner.engine.worker import build
from pagerunner.ops.batch import SlotState
from pagerunner.runner.spec import Computed, NoDrafts, Verified
from pagerunner.types import SlotInit

VOCAB = 500


class PlantedDrafter:
    """Each draft is the text's next token with probability `right`, and else another one or none."""

    texts: Mapping[tuple[int, ...], Sequence[int]] = {}
    """By the prompt and the seed of a request, its tokens with the prompt's."""
    right = 0.5
    made = 0
    checks = True
    onward = None

    def __init__(self, state: SlotState) -> None:
        self._state, self._rng = state, random.Random(3)
        self._by_slot: dict[int, Sequence[int]] = {}

    def init_slot(self, init: SlotInit) -> None:
        request = init.request
        self._by_slot[init.slot] = self.texts.get((*request.prompt_token_ids, request.seed), ())

    def draft(self, verified: Verified | None, count: int, computed: Computed | None) -> None:
        if verified is None:
            return
        found, slots, positions = (tensor.tolist() for tensor in verified)
        for tokens, slot, position in zip(found, slots, positions, strict=True):
            if slot < 0:
                continue
            last = position + sum(token >= 0 for token in tokens)
            assert not self.checks or int(self._state.lengths[slot]) == last
            text = self._by_slot.get(slot, ())
            drafts = [self._guess(text[at] if at < len(text) else 0) for at in range(last + 1, last + 1 + count)]
            type(self).made += count
            self._state.drafts[slot, :count] = torch.tensor(drafts, dtype=torch.int64)

    def _guess(self, token: int) -> int:
        if self._rng.random() < self.right:
            return token
        return -1 if self._rng.random() < 0.1 else (token + 1) % VOCAB


def plant(patched: pytest.MonkeyPatch, texts: Mapping[tuple[int, ...], Sequence[int]], right: float) -> None:
    """Engines that draft by n-grams draft by these texts instead."""
    patched.setattr(PlantedDrafter, "texts", texts)
    patched.setattr(PlantedDrafter, "right", right)
    patched.setattr(PlantedDrafter, "made", 0)
    patched.setattr(
        build, "make_drafter", lambda asked, state, *more: NoDrafts() if asked is None else PlantedDrafter(state)
    )


def drafting(drafts: int = 3, **more: Any) -> dict[str, Any]:
    """Engine arguments for so many drafts in each step."""
    config = {
        "method": "ngram",
        "num_speculative_tokens": drafts,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
        "num_speculative_tokens_per_batch_size": [[1, 1000, drafts]],
    }
    return {"speculative_config": {**config, **more}}
