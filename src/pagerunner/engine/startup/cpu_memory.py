"""What steps of a CPU engine take beside weights, pages and tables, counted from a config alone."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence

import torch

from pagerunner.attention.cpu import CPU_KINDS, MAX_SHORT_QUERIES, CpuBackend
from pagerunner.attention.torch_plan import scratch_bytes
from pagerunner.memory.specs import FullKV, LatentKV, Spec
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
    gathered = others + [spec for group in ours for spec in group if isinstance(spec, LatentKV)]  # of long rows
    if gathered:
        yield "gathered pages", scratch_bytes(gathered, max_model_len, max_num_seqs, dtype)
    largest = [work_space] if work_space else []
    largest += [_work_space(spec, tokens, heads) for group in ours for spec in group]
    if largest:
        yield "work space of CPU kernels", max(largest)
    if ours and not others and not eager:
        yield "tensors of recorded steps", RECORDED_BYTES


def _work_space(spec: Spec, tokens: int, heads: int) -> int:
    """Bytes that a layer's attention works in."""
    if isinstance(spec, LatentKV):
        return attention_memory(
            min(tokens, MAX_SHORT_QUERIES), heads, 1, spec.latent_dim + spec.rope_dim, spec.latent_dim
        )
    if isinstance(spec, FullKV):
        return attention_memory(tokens, max(heads, spec.num_kv_heads), spec.num_kv_heads, spec.head_dim, spec.value_dim)
    return 0


def _is_served(group: Sequence[Spec], dtype: str, scores: Collection[str]) -> bool:
    made = (CpuBackend.capabilities, *(backend.capabilities for backend in CPU_KINDS.values()))
    refusals = ((one.refusal(spec, "cpu", getattr(torch, dtype), scores) for spec in group) for one in made)
    return any(not any(own) for own in refusals)
