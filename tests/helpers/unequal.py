"""A model family for tests whose layers differ in their number and size of heads, which no published family here does.

T tokens, D hidden features, H query heads, K key/value heads, E the size of a head, V vocabulary.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagerunner.layers.attention import PagedAttention
from pagerunner.layers.embedding import Embedding
from pagerunner.layers.linear import Linear
from pagerunner.layers.module import Module
from pagerunner.memory.specs import FullKV, Spec, WindowKV
from pagerunner.models.configs.base import ModelConfig
from pagerunner.models.configs.fields import Fields
from pagerunner.models.registry import Family

HIDDEN = 32
WINDOW = 20
# key/value heads, head size, whether it is a window layer
LAYERS = ((2, 8, False), (1, 16, False), (4, 4, True), (1, 24, False), (2, 16, True))


@dataclass(frozen=True, kw_only=True)
class UnequalConfig(ModelConfig):
    """Nothing beyond what all share."""

    def layer_specs(self, kv_dtype: Any) -> tuple[Spec, ...]:
        return tuple(
            WindowKV(heads, size, kv_dtype, window=WINDOW) if window else FullKV(heads, size, kv_dtype)
            for heads, size, window in LAYERS
        )


class _Layer(Module):
    def __init__(self, index: int, heads: int, size: int) -> None:
        super().__init__()
        self.heads, self.size = heads, size
        self.q, self.k, self.v, self.o = (
            Linear(*shape, torch.float32)
            for shape in ((HIDDEN, 2 * heads * size), (HIDDEN, heads * size), (HIDDEN, heads * size))
            + ((2 * heads * size, HIDDEN),)
        )
        self.attend = PagedAttention(index, size**-0.5)

    def __call__(self, x_TD: torch.Tensor, batch: Any) -> torch.Tensor:
        q, k, v = (
            part(x_TD).view(x_TD.shape[0], -1, self.size) * scale
            for part, scale in ((self.q, 30), (self.k, 30), (self.v, 1))
        )
        out_THE: torch.Tensor = self.attend(q, k, v, batch)
        return x_TD + 300 * self.o(out_THE.reshape(x_TD.shape[0], -1))


class UnequalForCausalLM(Module):
    """Attention layers only, over embeddings that also tell the position."""

    drafter = None

    def __init__(self, config: UnequalConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.embed = Embedding(config.vocab_size, HIDDEN, dtype)
        self.layers = tuple(_Layer(index, heads, size) for index, (heads, size, _) in enumerate(LAYERS))

    def __call__(self, batch: Any) -> torch.Tensor:
        angle_TD = batch.positions[:, None] / torch.arange(1, HIDDEN + 1)
        x_TD = 50 * self.embed(batch.token_ids) + angle_TD.sin()
        for layer in self.layers:
            x_TD = layer(x_TD, batch)
            x_TD = x_TD / x_TD.norm(dim=-1, keepdim=True) * HIDDEN**0.5
        return x_TD

    def run(self, batch: Any) -> tuple[torch.Tensor, None]:
        return self(batch), None

    def compute_logits(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        return self.embed.logits(hidden_SD).float() * 20


def read(fields: Fields, common: dict[str, Any]) -> UnequalConfig:
    return UnequalConfig(**common, hidden_size=HIDDEN, rms_norm_eps=1e-6, tie_word_embeddings=True)


FAMILY = Family(read, "unequal", "UnequalForCausalLM")
sys.modules["pagerunner.models.unequal"] = sys.modules[__name__]


def write_config(directory: Path) -> Path:
    """A directory for load_format="dummy"."""
    values = {"model_type": "unequal", "vocab_size": 300, "num_hidden_layers": len(LAYERS)}
    (directory / "config.json").write_text(json.dumps(values | {"max_position_embeddings": 512}), encoding="utf-8")
    return directory
