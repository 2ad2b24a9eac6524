"""What of a model's weights a step reads: all but the embedding's other rows, and of a mixture only the experts that were chosen."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import cast

import torch

from pagerunner.config import DTYPE_BYTES, Dtype, EngineArgs
from pagerunner.layers.linear import Linear
from pagerunner.layers.moe import Experts, Router
from pagerunner.models.checkpoint.loader import Model, build_model, weights_bytes
from pagerunner.models.configs.base import ModelConfig
from pagerunner.models.configs.reader import read_model_config
from pagerunner.ops.routing import counting_experts, touched_experts
from pagerunner.ops.stored import Stored8


@dataclass(frozen=True, slots=True)
class StepWeights:
    """Bytes of a mixture's weights as they are stored: of an expert, and of all that every step reads; layers and their experts.

    `token_weights` are multiplied with each token, `head_weights` with each that is sampled from. Products whose input is rounded to 8
    bits have twice the rate of bfloat16's: `operation_rate` is 2 if those of experts are such products.
    """

    expert_bytes: int
    other_bytes: int
    layers: int
    experts: int
    token_weights: int = 0
    head_weights: int = 0
    operation_rate: int = 1

    @classmethod
    def read(cls, args: EngineArgs, dtype: str, device: str) -> StepWeights | None:
        """Of the model that `args` name; None if it isn't a mixture."""
        config, model, size = _model(args, dtype, device)
        modules = list(model.modules())
        layers = [module for module in modules if isinstance(module, Experts)]
        if not layers:
            return None
        own = sum(tensor.nbytes for module in layers for tensor in module.weights.values())
        experts = layers[0].sizes.experts
        head = config.vocab_size * config.hidden_size
        weights = sum(one.in_features * one.out_features for one in modules if isinstance(one, Linear))
        weights -= 0 if config.tie_word_embeddings else head
        active = (one.routing.active for one in modules if isinstance(one, Router))
        for module, chosen in zip(layers, active, strict=False):
            weights += chosen * 3 * module.sizes.features * module.sizes.inner
        rounds = all(isinstance(one, Stored8) and one.activations != "none" for one in layers[0].stored)
        rate = 2 if layers[0].stored and rounds else 1
        return cls(own // (len(layers) * experts), size - own, len(layers), experts, weights, head, rate)


def step_bytes(args: EngineArgs, dtype: str, device: str) -> int:
    """Bytes of the weights that a step of the model that `args` name reads if it uses all of them, as they are stored."""
    return _model(args, dtype, device)[2]


def _model(args: EngineArgs, dtype: str, device: str) -> tuple[ModelConfig, Model, int]:
    """Its config, the model without memory, and the bytes of its weights without an embedding of its own, of which a step looks up a few rows."""
    config = read_model_config(args.model, None, args.hf_overrides, quantised=True, quantization=args.quantization)
    model = build_model(config, cast(Dtype, dtype), keep_forms=device == "cuda")
    table = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size * DTYPE_BYTES[dtype]
    return config, model, weights_bytes(model) - table


def counting() -> AbstractContextManager[None]:
    """Let products count the experts that they read, for `touched_so_far`. The engine is built in here, as graphs count if they were captured so."""
    return counting_experts()


def touched_so_far(device: str) -> tuple[int, int]:
    """Experts read in this process inside of `counting`, and calls of a layer in which they were."""
    where = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    touched, calls = touched_experts(where).tolist()
    return touched, calls
