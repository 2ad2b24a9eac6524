"""What every model family's configuration tells the rest of the engine. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self

from pagerunner.config import Dtype, KVDtype
from pagerunner.errors import ConfigError
from pagerunner.memory.specs import Spec
from pagerunner.quant.formats import Format

RopeKind = Literal["default", "linear", "llama3", "yarn"]


class ExpertShare(NamedTuple):
    """Ranks divide whole experts: the model has those of `rank` of `ranks`. `inner` are an expert's inner features, 0 as the config says."""

    rank: int = 0
    ranks: int = 1
    inner: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ABC):
    """The part of a config.json that is the same for every family; a family's own class adds what its model needs.

    `family` is the model_type. `dtype` is that of the weights on disk, as the config names it (float32 where it names none).
    `eos_token_ids` joins config.json's and generation_config.json's. `sampling_defaults` are generation_config.json's, by
    the names of SamplingParams. `quantization` is the quantization_config of weights that are stored in fewer bits than
    `dtype` has; `format` is what it says, if such weights can be loaded. With `tie_word_embeddings` the output weights are
    the embedding's. `expert_share`: None if ranks divide the inner features of every expert. `drafter` is the model that drafts tokens for this one;
    if its path is this one's, its weights are in this checkpoint.
    """

    path: str
    family: str
    dtype: Dtype
    num_layers: int
    vocab_size: int
    hidden_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, Any]
    quantization: Mapping[str, Any] | None = None
    format: Format | None = None
    expert_share: ExpertShare | None = None
    drafter: ModelConfig | None = None

    @property
    def attention_scores(self) -> frozenset[str]:
        """What attention scores have beside a scale: "sinks", "softcap". Backends say which of them they compute."""
        return frozenset()

    @property
    def choices(self) -> frozenset[tuple[int, int]]:
        """How many slots indexers choose, and of how many tokens a slot is, for each kind of layer that has one."""
        return frozenset()

    divided: ClassVar[Mapping[str, str]] = {
        "vocab_size": "vocabulary",
        "num_heads": "heads",
        "num_kv_heads": "kv_heads",
        "intermediate_size": "inner",
    }
    """Fields that count features which ranks divide (`layers/cuts.py`), and the features' names. A family has some of them, and may add others."""

    def of_rank(self, own: Mapping[tuple[str, int], int]) -> Self:
        """The config of the model that one of several ranks has, with `own` of the features, by their name and count in the whole model.

        A field whose features no layer has stays as it is.
        """
        counts = {field: (name, getattr(self, field, 0)) for field, name in self.divided.items()}
        found: dict[str, Any] = {field: own[features] for field, features in counts.items() if features in own}
        return replace(self, **found)

    def mtp(self) -> Self:
        """The config of the multi-token prediction module in the model's checkpoint, a model of one layer.

        Raises ConfigError if there is none.
        """
        raise ConfigError(f"method mtp: models of model_type {self.family} have no multi-token prediction module.")

    @property
    def spec_layers(self) -> tuple[int, ...]:
        """The layer of each of `layer_specs`."""
        return tuple(range(self.num_layers))

    def specs(self, kv_dtype: KVDtype) -> tuple[Spec, ...]:
        """`layer_specs`, and behind them those of the drafter."""
        own = self.layer_specs(kv_dtype)
        return own if self.drafter is None else (*own, *self.drafter.layer_specs(kv_dtype))

    def _one_mtp_layer(self, name: str, count: int) -> None:
        """Raise ConfigError unless field `name` of config.json, which is `count`, says that there is one layer."""
        if count != 1:
            raise ConfigError(f"method mtp: config.json says {name}={count}; 1 is supported.")

    @abstractmethod
    def layer_specs(self, kv_dtype: KVDtype) -> tuple[Spec, ...]:
        """The memory of each layer, by layer index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: the base, and how its frequencies are stretched beyond the trained length.

    `partial` is the share of each head, from its start, that is rotated. `scale` multiplies cosines and sines.
    `original_length`, `low_freq_factor` and `high_freq_factor` belong to llama3 (Llama 3.1's rule); `original_length`,
    `beta_fast`, `beta_slow` and `truncate` to yarn (arXiv 2309.00071). `softmax_scale` multiplies the scores of the
    families that take yarn's magnitude there as well (DeepSeek).
    """

    kind: RopeKind = "default"
    theta: float = 10000.0
    partial: float = 1.0
    factor: float = 1.0
    scale: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    softmax_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class HeadsConfig(ModelConfig):
    """A model whose attention has query heads, and keys and values for groups of them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope: RopeConfig
