"""What steps of a CPU engine take beside weights, pages and tables, counted from a config alone."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence

import torch

from pagerunner.attention.cpu import CpuBackend
from pagerunner.attention.torch_plan import scratch_bytes
from pagerunner.memory.specs import FullKV, Spec
from pagerunner.ops.native.paged import attention_memory
from pagerunner.runner.recorded import RECORDED_BYTES


def step_memory(
    specs: Sequence[Spec],
    backend: str,
    dtype: str,
    scores: Collection[str],
    *,
    max_model_len: int,
    max_num_seqs: int,
    tokens: int,
    heads: int,
    work_space: int,
    eager: bool,
) -> Iterator[tuple[str, int]]:
    """Lines of a plan: what each is for, and its bytes.

    `backend` and `eager` are what the user asked for, `scores` and `heads` the model's. Steps have up to `tokens` tokens. Their
    products and mixtures work in up to `work_space` bytes.
    """
    groups: dict[Hashable, list[Spec]] = {}
    for spec in specs:
        groups.setdefault(spec.lifetime, []).append(spec)
    ours = [group for group in groups.values() if backend in ("auto", "cpu") and _is_served(group, dtype, scores)]
    others = [spec for group in groups.values() if group not in ours for spec in group]
    if others:
        yield "gathered pages", scratch_bytes(others, max_model_len, max_num_seqs, dtype)
    largest = [work_space] if work_space else []
    for spec in (spec for group in ours for spec in group if isinstance(spec, FullKV)):
        largest.append(attention_memory(tokens, max(heads, spec.num_kv_heads), spec))
    if largest:
        yield "work space of CPU kernels", max(largest)
    if ours and not others and not eager:
        yield "tensors of recorded steps", RECORDED_BYTES


def _is_served(group: Sequence[Spec], dtype: str, scores: Collection[str]) -> bool:
    capabilities = CpuBackend.capabilities
    return not any(capabilities.refusal(spec, "cpu", getattr(torch, dtype), scores) for spec in group)
