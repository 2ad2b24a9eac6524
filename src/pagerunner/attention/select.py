"""Which attention backend serves which memory group: by capability, with the reason logged, never by model name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch

from pagerunner.attention.base import AttentionBackend
from pagerunner.attention.compressed import CompressedBackend
from pagerunner.attention.mla import LatentBackend
from pagerunner.attention.recurrent import RecurrentBackend
from pagerunner.attention.torch_ref import TorchBackend
from pagerunner.errors import ConfigError
from pagerunner.memory.planner import GroupPlan

KindBackend = RecurrentBackend | LatentBackend | CompressedBackend
logger = logging.getLogger(__name__)

BACKENDS: dict[str, Callable[[], AttentionBackend]] = {"torch_ref": TorchBackend}
# Groups of these kinds have backends of their own, which do not depend on what the user asks for.
KIND_BACKENDS: dict[str, tuple[Callable[[], KindBackend], ...]] = {
    "recurrent": (RecurrentBackend,),
    "latent": (LatentBackend, CompressedBackend),
}


def select_backends(
    groups: Sequence[GroupPlan], wanted: str, device: torch.device, dtype: torch.dtype
) -> list[AttentionBackend | KindBackend]:
    """One backend per group: the one named `wanted`, or for "auto" the first that can serve all of the group's layers.

    Recurrent and latent groups have a backend of their own, whatever is wanted.

    Raises:
        ConfigError: `wanted` is unknown, or nothing can serve a group; the message says why not.
    """
    if wanted != "auto" and wanted not in BACKENDS:
        raise ConfigError(f"attention_backend must be auto or one of {', '.join(BACKENDS)}, got {wanted!r}.")
    names = list(BACKENDS) if wanted == "auto" else [wanted]
    made = {name: BACKENDS[name]() for name in names}
    return [_first_that_serves(group, _candidates(group.kind, made), device, dtype) for group in groups]


def _candidates(kind: str, made: dict[str, AttentionBackend]) -> Mapping[str, AttentionBackend | KindBackend]:
    if kind in KIND_BACKENDS:
        return {own.name: own for own in (make() for make in KIND_BACKENDS[kind])}
    return made


def _first_that_serves(
    group: GroupPlan, made: Mapping[str, AttentionBackend | KindBackend], device: torch.device, dtype: torch.dtype
) -> AttentionBackend | KindBackend:
    reasons = []
    for name, backend in made.items():
        reason = next(filter(None, (backend.unsupported(part.spec, device.type, dtype) for part in group.layers)), None)
        if reason is None:
            logger.info("attention of group %s: %s (%s)", group.name, name, "; ".join(reasons) or "first choice")
            return backend
        reasons.append(f"not {name}: {reason}")
    raise ConfigError(f"No attention backend can serve group {group.name} on {device.type}: {'; '.join(reasons)}.")
