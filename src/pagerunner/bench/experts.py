"""What a mixture's steps read: which share of a layer's experts, and the least time that bytes and operations take.

A step reads an expert's weights once if any token chose it, and all other weights. Attention reads each request's keys and values, or its
recurrent state, for each token after the first. Operations are those of the weights that each token uses; attention's are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from pagerunner.bench.floors import Ceilings
from pagerunner.bench.workloads import BenchRequest
from pagerunner.memory.specs import ChunkedKV, FullKV, LatentKV, RecurrentState, Spec

if TYPE_CHECKING:
    from pagerunner.engine.startup.step_weights import StepWeights

_TOKENS = 1024  # of a page by which a token's share is told: a page's scales are little beside them


class ExpertsRead(msgspec.Struct, frozen=True, kw_only=True):
    """One repetition: experts of a layer, how many of them a step touched on average, bytes of weights and of keys and values that were
    read, and operations. The seconds are what these take at the card's ceilings (None where they aren't known). No run takes less than
    the longer of the two. Prompts' operations hardly overlap with the bytes, which are mostly those of answers. So few runs take less
    than the bytes and then `prompt_seconds`, which prompts' operations take.
    """

    experts: int
    touched: float
    bytes: int
    kv_bytes: int = 0
    operations: int = 0
    seconds: float | None = None
    operation_seconds: float | None = None
    prompt_seconds: float | None = None

    def text(self) -> str:
        """Two lines for a person."""
        floor = ""
        if self.seconds is not None and self.operation_seconds is not None and self.prompt_seconds is not None:
            floor = (
                f"; floor {max(self.seconds, self.operation_seconds):.4f} s (bytes {self.seconds:.4f}, operations "
                f"{self.operation_seconds:.4f}; bytes, then prompts' operations {self.seconds + self.prompt_seconds:.4f})"
            )
        return (
            f"  experts: a step touched {self.touched:.1f} of a layer's {self.experts} ({self.touched / self.experts:.1%})\n"
            f"  read: {self.bytes / 1e9:.1f} GB of weights, {self.kv_bytes / 1e9:.1f} GB of keys and values; "
            f"{self.operations / 1e12:.1f} TFLOP{floor}"
        )


def experts_read(
    mixture: StepWeights,
    touched: int,
    calls: int,
    ceilings: Ceilings | None,
    specs: Iterable[Spec] = (),
    requests: Sequence[BenchRequest] = (),
    cached_tokens: int = 0,
) -> ExpertsRead:
    """The report for a number of experts touched in so many calls of a layer, by requests whose layers keep what `specs` say.

    `cached_tokens` of the prompts were found in the prefix cache and not computed.
    """
    read = touched * mixture.expert_bytes + calls // mixture.layers * mixture.other_bytes
    kv_bytes = sum(_kv_bytes(spec, requests) for spec in specs)
    prompts = sum(len(one.prompt_token_ids) for one in requests) - cached_tokens
    prompt_operations = 2 * mixture.token_weights * prompts
    operations = prompt_operations + sum(
        2 * mixture.token_weights * (one.output_len - 1) + 2 * mixture.head_weights * one.output_len for one in requests
    )
    seconds = operation_seconds = prompt_seconds = None
    if ceilings is not None:
        seconds = (read + kv_bytes) / ceilings.bytes_per_second
        operation_seconds, prompt_seconds = (
            count / (ceilings.flops_per_second * mixture.operation_rate) for count in (operations, prompt_operations)
        )
    return ExpertsRead(
        experts=mixture.experts,
        touched=touched / max(calls, 1),
        bytes=read,
        kv_bytes=kv_bytes,
        operations=operations,
        seconds=seconds,
        operation_seconds=operation_seconds,
        prompt_seconds=prompt_seconds,
    )


def _kv_bytes(spec: Spec, requests: Sequence[BenchRequest]) -> int:
    """Bytes of one layer's keys and values, or state, that tokens after the first read. 0 for attention to what an indexer chooses."""
    if isinstance(spec, RecurrentState):
        return spec.page_bytes(1) * sum(one.output_len - 1 for one in requests)
    if isinstance(spec, LatentKV) and (spec.indexer_dim or spec.compression > 1):
        return 0
    if not isinstance(spec, FullKV | LatentKV):
        return 0
    window, chunk = getattr(spec, "window", None), spec.chunk if isinstance(spec, ChunkedKV) else None
    tokens = 0
    for one in requests:
        first = len(one.prompt_token_ids) + 1
        for length in range(first, first + one.output_len - 1):
            seen = (length - 1) % chunk + 1 if chunk else length
            tokens += min(seen, window) if window else seen
    return spec.page_bytes(_TOKENS) * tokens // _TOKENS
