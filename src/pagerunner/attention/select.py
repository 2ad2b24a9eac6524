"""Which attention backend serves which memory group: by declared capability, with the reason logged, never by model name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from pagerunner.attention.base import AttentionBackend
from pagerunner.attention.calls import AttentionCall
from pagerunner.attention.compressed import CompressedBackend
from pagerunner.attention.cpu import CPU_KINDS, CpuBackend
from pagerunner.attention.flashinfer_backend import FlashInferBackend, FlashInferLatentBackend
from pagerunner.attention.mla import LatentBackend
from pagerunner.attention.paged import PagedBackend
from pagerunner.attention.paged_mla import PagedLatentBackend
from pagerunner.attention.paged_recurrent import PagedRecurrentBackend
from pagerunner.attention.paged_sparse import PagedSparseBackend
from pagerunner.attention.paged_vectors import PagedVectorsBackend
from pagerunner.attention.paired import PairedBackend
from pagerunner.attention.recurrent import RecurrentBackend
from pagerunner.attention.torch_ref import TorchBackend
from pagerunner.errors import ConfigError
from pagerunner.memory.memory_plan import GroupPlan

Backend = AttentionBackend[Any]
logger = logging.getLogger(__name__)

BACKENDS: dict[str, Callable[[], AttentionBackend[AttentionCall]]] = {
    "triton": PagedBackend,
    "flashinfer": FlashInferBackend,
    "cpu": CpuBackend,
    "torch_ref": TorchBackend,
}
# What "auto" tries, in this order, by the kind of device. Others serve a device when they are named.
AUTO: dict[str, tuple[str, ...]] = {"cuda": ("triton", "torch_ref"), "cpu": ("cpu", "torch_ref")}
ANYWHERE = ("torch_ref",)
# FlashInfer must be asked for by name. Triton serves the groups that it can't.
NAMED: dict[str, tuple[str, ...]] = {"flashinfer": ("flashinfer", "triton")}
# Groups of these kinds have backends of their own. Those that graphs can capture come first on CUDA devices, and elsewhere when they are
# asked for by name; otherwise they come last. CPU kernels serve before all (CPU_KINDS).
KIND_BACKENDS: dict[str, tuple[Callable[[], Backend], ...]] = {
    "recurrent": (PagedRecurrentBackend, RecurrentBackend),
    "latent": (PagedLatentBackend, PagedSparseBackend, PagedVectorsBackend, LatentBackend, CompressedBackend),
}
FLASHINFER_KINDS: dict[str, tuple[Callable[[], Backend], ...]] = {"latent": (FlashInferLatentBackend,)}
# Why "auto" doesn't take one of these that is installed and could serve. It takes what is measured to be the fastest (docs/performance/paged-attention.md).
LEFT_OUT = {
    "flashinfer_mla": "it plans on the host before each step, builds its kernels for half a minute, and is faster with 128 heads only: 140 us where ours "
    "take 191, but 82 and 81 with 16 (64 rows of 4,096 on an H200; attention_backend=flashinfer takes it)"
}


def check_name(wanted: str) -> None:
    """Raise ConfigError unless a backend is called `wanted`, or it is "auto"."""
    if wanted != "auto" and wanted not in BACKENDS:
        raise ConfigError(f"attention_backend must be auto or one of {', '.join(BACKENDS)}, got {wanted!r}.")


def select_backends(
    groups: Sequence[GroupPlan],
    wanted: str,
    device: torch.device,
    dtype: torch.dtype,
    scores: Collection[str] = (),
    *,
    batch_invariant: bool = False,
) -> list[Backend]:
    """One backend per group: the one named `wanted`, or for "auto" the first that can serve all of the group's layers.

    `scores` are what the model's attention scores have beside a scale (`ModelConfig.attention_scores`). Recurrent and latent
    groups have backends of their own. FlashInfer leaves groups that it can't serve to others. With `batch_invariant` a backend has to be able
    to make its sums in a fixed order, and does.

    Raises:
        ConfigError: `wanted` is unknown or serves no group, or nothing can serve a group; the message says why not.
    """
    check_name(wanted)
    found, refusals = [], []
    for group in groups:
        candidates = _candidates(group.kind, wanted, device)
        backend, reasons = _first_that_serves(group, candidates, device, dtype, scores)
        if wanted == "auto":
            reasons = [*_left_out(group, device, dtype, scores), *reasons]
        if batch_invariant:
            _fix(group, backend, device, reasons)
        logger.info("attention of group %s: %s (%s)", group.name, backend.name, "; ".join(reasons) or "first choice")
        found.append(backend)
        refusals += reasons
    if wanted == "flashinfer" and not any(backend.name.startswith(wanted) for backend in found):
        why = "; ".join(dict.fromkeys(refusals)) or "all of them are recurrent"
        raise ConfigError(f"attention_backend {wanted!r} can't serve any layer of this model: {why}.")
    return found


def _fix(group: GroupPlan, backend: Backend, device: torch.device, reasons: Sequence[str]) -> None:
    by_kernels = device.type == "cuda" or backend.capabilities.cpu_kernels  # twins sum by the step
    if not (isinstance(backend, PagedBackend) and backend.capabilities.invariant and by_kernels):
        raise ConfigError(
            f"batch_invariant=True isn't there for group {group.name} ({group.kind}): its layers are served by {backend.name}, whose sums depend on "
            f"what else a step computes{''.join(f'; {reason}' for reason in reasons)}. Leave batch_invariant out."
        )
    backend.fixed = True


def _names(wanted: str, device: torch.device) -> tuple[str, ...]:
    return AUTO.get(device.type, ANYWHERE) if wanted == "auto" else NAMED.get(wanted, (wanted,))


def _candidates(kind: str, wanted: str, device: torch.device) -> list[Backend]:
    """New backends for each group, because a backend may keep what it has learned of its layers."""
    made: list[Backend] = [BACKENDS[name]() for name in _names(wanted, device)]
    graphs = any(backend.capabilities.graphs for backend in made)
    if kind not in KIND_BACKENDS:  # vectors are a kind of windows
        return [PagedVectorsBackend(), *made] if graphs and kind == "window" else made
    first = FLASHINFER_KINDS.get(kind, ()) if wanted == "flashinfer" else ()
    if any(backend.capabilities.cpu_kernels for backend in made):
        first = (CPU_KINDS[kind],) if kind in CPU_KINDS else ()
    own = sorted((make() for make in KIND_BACKENDS[kind]), key=lambda backend: backend.capabilities.graphs != graphs)
    return [*(make() for make in first), *own]


def _left_out(group: GroupPlan, device: torch.device, dtype: torch.dtype, scores: Collection[str]) -> list[str]:
    """Why none of the optional backends for this kind of group is taken without being named; nothing where they have no kernels."""
    found = []
    for backend in (make() for make in FLASHINFER_KINDS.get(group.kind, ()) if device.type == "cuda"):
        refusals = (backend.capabilities.refusal(part.spec, device.type, dtype, scores) for part in group.layers)
        found.append(f"not {backend.name}: {next(filter(None, refusals), None) or LEFT_OUT[backend.name]}")
    return found


def _first_that_serves(
    group: GroupPlan, candidates: Sequence[Backend], device: torch.device, dtype: torch.dtype, scores: Collection[str]
) -> tuple[Backend, list[str]]:
    """The first backend that serves every layer.

    A backend that takes only one query a row is paired with the next backend that takes several."""
    reasons: list[str] = []
    one_query: Backend | None = None
    for backend in candidates:
        refusals = (backend.capabilities.refusal(part.spec, device.type, dtype, scores) for part in group.layers)
        reason = next(filter(None, refusals), None)
        if reason is not None:
            reasons.append(f"not {backend.name}: {reason}")
        elif not backend.capabilities.several_queries and one_query is None:
            one_query = backend
        elif backend.capabilities.several_queries:
            return (backend if one_query is None else PairedBackend(one_query, backend)), reasons
    if one_query is not None:
        reasons.append(f"{one_query.name} serves rows of one token, and nothing serves rows of several")
    raise ConfigError(f"No attention backend can serve group {group.name} on {device.type}: {'; '.join(reasons)}.")
