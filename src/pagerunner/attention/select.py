"""Which attention backend serves which memory group: by capability, with the reason logged, never by model name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from pagerunner.attention.base import AttentionBackend, DeviceBackend
from pagerunner.attention.flashinfer_backend import FlashInferBackend, FlashInferLatentBackend
from pagerunner.attention.mla import LatentBackend
from pagerunner.attention.paged import PagedBackend
from pagerunner.attention.paged_mla import PagedLatentBackend
from pagerunner.attention.paged_recurrent import PagedRecurrentBackend
from pagerunner.attention.recurrent import RecurrentBackend
from pagerunner.attention.torch_ref import TorchBackend
from pagerunner.errors import ConfigError
from pagerunner.memory.planner import GroupPlan

Backend = AttentionBackend | DeviceBackend
KindBackend = RecurrentBackend | LatentBackend | PagedRecurrentBackend | PagedLatentBackend | FlashInferLatentBackend
Candidate = Callable[[], Backend | KindBackend]
logger = logging.getLogger(__name__)

# For groups of keys and values. FlashInfer builds its kernels for a minute or more, so it serves those who ask for it only.
BACKENDS: dict[str, Candidate] = {
    "triton": PagedBackend,
    "flashinfer": FlashInferBackend,
    "torch_ref": TorchBackend,
}
# What is tried in this order: for "auto" by the kind of device, else by the name asked for.
AUTO: dict[str, tuple[str, ...]] = {"cuda": ("triton", "torch_ref")}
ANYWHERE = ("torch_ref",)
NAMED: dict[str, tuple[str, ...]] = {"flashinfer": ("flashinfer", "triton")}
# The same for groups of other kinds.
KIND_BACKENDS: dict[str, dict[str, tuple[Candidate, ...]]] = {
    "recurrent": {
        "cuda": (PagedRecurrentBackend, RecurrentBackend),
        "triton": (PagedRecurrentBackend,),
        "flashinfer": (PagedRecurrentBackend,),
        "torch_ref": (RecurrentBackend,),
    },
    "latent": {
        "cuda": (PagedLatentBackend, LatentBackend),
        "triton": (PagedLatentBackend,),
        "flashinfer": (FlashInferLatentBackend, PagedLatentBackend),
        "torch_ref": (LatentBackend,),
    },
}


def select_backends(
    groups: Sequence[GroupPlan], wanted: str, device: torch.device, dtype: torch.dtype
) -> list[Backend | KindBackend]:
    """One backend per group: the first candidate that can serve all of the group's layers. The reasons are logged.

    Raises:
        ConfigError: `wanted` is unknown or serves no group, or nothing can serve a group; the message says why not.
    """
    if wanted != "auto" and wanted not in BACKENDS:
        raise ConfigError(f"attention_backend must be auto or one of {', '.join(BACKENDS)}, got {wanted!r}.")
    found, refusals = [], []
    for group in groups:
        backend, reasons = _first_that_serves(group, _candidates(group.kind, wanted, device), device, dtype)
        logger.info("attention of group %s: %s (%s)", group.name, backend.name, "; ".join(reasons) or "first choice")
        found.append(backend)
        refusals += reasons
    if wanted == "flashinfer" and not any(backend.name.startswith(wanted) for backend in found):
        reasons = "; ".join(dict.fromkeys(refusals)) or "the model has recurrent layers only"
        raise ConfigError(f"attention_backend {wanted!r} can't serve any layer of this model: {reasons}.")
    return found


def _candidates(kind: str, wanted: str, device: torch.device) -> tuple[Candidate, ...]:
    if kind in KIND_BACKENDS:
        own = KIND_BACKENDS[kind]
        return own.get(device.type if wanted == "auto" else wanted, own["torch_ref"])
    names = AUTO.get(device.type, ANYWHERE) if wanted == "auto" else NAMED.get(wanted, (wanted,))
    return tuple(BACKENDS[name] for name in names)


def _first_that_serves(
    group: GroupPlan, candidates: Sequence[Candidate], device: torch.device, dtype: torch.dtype
) -> tuple[Backend | KindBackend, list[str]]:
    reasons = []
    for make in candidates:
        backend = make()
        reason = next(filter(None, (backend.unsupported(part.spec, device.type, dtype) for part in group.layers)), None)
        if reason is None:
            return backend, reasons
        reasons.append(f"not {backend.name}: {reason}")
    raise ConfigError(f"No attention backend can serve group {group.name} on {device.type}: {'; '.join(reasons)}.")
