"""The least time a workload can take on a card: bytes that must be read over its bandwidth, operations over its rate.

Torch-free. Known for dense decoders: config.json says which operations count, the weights' declarations how many bytes a step reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pagerunner.bench.workloads import BenchRequest
from pagerunner.errors import ConfigError

DENSE = ("llama", "mistral", "qwen2", "qwen3")


class Ceilings(msgspec.Struct, frozen=True):
    """What a card does at best: bytes per second of a device copy (reads and writes counted), operations per second of a
    large bfloat16 matrix product.
    """

    bytes_per_second: float
    flops_per_second: float

    @classmethod
    def parse(cls, text: str) -> Ceilings:
        """From "4.3,760": TB/s and TFLOP/s. Raises ConfigError."""
        try:
            copy, matmul = (float(part) for part in text.split(","))
        except ValueError:
            raise ConfigError(f"--ceilings takes TB/s and TFLOP/s, such as 4.3,760; got {text!r}.") from None
        if not (0 < copy < math.inf and 0 < matmul < math.inf):
            raise ConfigError(f"--ceilings must be positive, got {text!r}.")
        return cls(copy * 1e12, matmul * 1e12)

    def times(self, devices: int) -> Ceilings:
        """Of so many such cards together."""
        return Ceilings(devices * self.bytes_per_second, devices * self.flops_per_second)


class Floor(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes and operations that a workload can't do without, the seconds they take at the card's ceilings, and the share
    of the best measured time that the longer of the two is.
    """

    ceilings: Ceilings
    bytes: int
    flops: int
    bytes_seconds: float
    flops_seconds: float
    share: float

    def text(self) -> str:
        """Two lines for a person."""
        copy, matmul = self.ceilings.bytes_per_second / 1e12, self.ceilings.flops_per_second / 1e12
        bound = "bytes" if self.bytes_seconds >= self.flops_seconds else "operations"
        return (
            f"  ceilings: {copy:.2f} TB/s, {matmul:.0f} TFLOP/s; floors: {self.bytes / 1e9:.1f} GB in "
            f"{self.bytes_seconds:.4f} s, {self.flops / 1e12:.1f} TFLOP in {self.flops_seconds:.4f} s\n"
            f"  reached: {self.share:.1%} of what {bound} allow"
        )


@dataclass(frozen=True, slots=True)
class DenseModel:
    """What counts of a dense decoder: weights that every token uses, those of the output, sizes of a token's attention."""

    body_weights: int
    head_weights: int
    layers: int
    query_size: int
    step_bytes: int  # of the weights that every step reads, as they are stored
    token_bytes: int  # of one token's keys and values, all layers

    @classmethod
    def read(cls, config: Mapping[str, Any], step_bytes: int, token_bytes: int) -> DenseModel | None:
        """From config.json's fields; None for a family whose floors aren't known."""
        if config.get("model_type") not in DENSE:
            return None
        hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads", heads)
        size = config.get("head_dim") or hidden // heads
        attention = hidden * size * (2 * heads + 2 * kv_heads)
        return cls(
            body_weights=layers * (attention + 3 * hidden * inner),
            head_weights=hidden * config["vocab_size"],
            layers=layers,
            query_size=heads * size,
            step_bytes=step_bytes,
            token_bytes=token_bytes,
        )

    def bytes(self, requests: Sequence[BenchRequest]) -> int:
        """Bytes that must be read: the weights once for each token of the longest answer, and each request's keys and
        values for each token after the first. A shared prefix counts once for each request.
        """
        steps = max(request.output_len for request in requests)
        weights = steps * self.step_bytes
        read = sum(
            _sum(len(request.prompt_token_ids) + 1, len(request.prompt_token_ids) + request.output_len - 1)
            for request in requests
        )
        return weights + read * self.token_bytes

    def flops(self, requests: Sequence[BenchRequest], cached_tokens: int) -> int:
        """Operations of all tokens except those found in the prefix cache (taken as spread evenly), and of one output a token."""
        cached = cached_tokens // len(requests)
        total = 0
        for request in requests:
            end = len(request.prompt_token_ids) + request.output_len - 1
            total += 2 * self.body_weights * (end - cached) + 2 * self.head_weights * request.output_len
            total += 4 * self.layers * self.query_size * _sum(cached + 1, end)
        return total

    def floor(
        self, requests: Sequence[BenchRequest], cached_tokens: int, ceilings: Ceilings, best_seconds: float
    ) -> Floor:
        """The floors of a workload, and how near the best time came."""
        size, work = self.bytes(requests), self.flops(requests, cached_tokens)
        bytes_seconds, flops_seconds = size / ceilings.bytes_per_second, work / ceilings.flops_per_second
        return Floor(
            ceilings=ceilings,
            bytes=size,
            flops=work,
            bytes_seconds=bytes_seconds,
            flops_seconds=flops_seconds,
            share=max(bytes_seconds, flops_seconds) / best_seconds,
        )


def _sum(first: int, last: int) -> int:
    """first + ... + last; 0 if there is none."""
    return (first + last) * (last - first + 1) // 2 if last >= first else 0
