"""The drafter that an engine's settings ask for, what it takes, and what it needs of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagerunner.attention.base import AttentionBackend
from pagerunner.config import DRAFT_MODELS, SpeculativeConfig
from pagerunner.errors import ConfigError
from pagerunner.memory.memory_plan import GroupPlan
from pagerunner.models.drafting import DraftModel
from pagerunner.ops.batch import SlotState
from pagerunner.ops.drafting import PassTensors
from pagerunner.runner.builder import BatchBuilder
from pagerunner.runner.sampling.vocabulary import DividedVocabulary
from pagerunner.runner.spec.base import Drafter, NoDrafts
from pagerunner.runner.spec.hidden import HiddenDrafter
from pagerunner.runner.spec.ngram import NgramDrafter


def make_drafter(
    asked: SpeculativeConfig | None,
    state: SlotState,
    max_model_len: int,
    builder: BatchBuilder,
    model: DraftModel | None,
    pieces: int,
    vocabulary: DividedVocabulary | None,
) -> Drafter:
    """Who leaves drafts in `state`. A `model` that drafts has the last `pieces` of memory; see HiddenDrafter."""
    if model is not None:
        return HiddenDrafter(model, builder, state, pieces, max_model_len, vocabulary)
    if asked is None or asked.method != "ngram":  # a suffix index drafts on the host
        return NoDrafts()
    return NgramDrafter(state, max_model_len, asked.prompt_lookup_min, asked.prompt_lookup_max)


def drafting_bytes(
    asked: SpeculativeConfig | None, max_num_seqs: int, max_model_len: int, num_groups: int
) -> tuple[tuple[str, int], ...]:
    """Bytes of the device, by use, that a drafter takes beside weights and pages."""
    if asked is not None and asked.method in DRAFT_MODELS:
        ends = 8 * num_groups * max_num_seqs  # of the slots' pages
        return (("inputs of drafts", PassTensors.num_bytes(max_num_seqs, num_groups) + ends),)
    if asked is None or asked.method != "ngram":
        return ()
    size = NgramDrafter.state_bytes(max_num_seqs, max_model_len, asked.num_speculative_tokens)
    return (("texts to draft from", size),)


def check_backends(groups: Sequence[GroupPlan], backends: Sequence[AttentionBackend[Any]]) -> None:
    """Raise ConfigError where a group's backend on a GPU doesn't serve rows with drafts."""
    for group, backend in zip(groups, backends, strict=True):
        if not backend.capabilities.drafts:
            raise ConfigError(
                f"speculative_config doesn't go with attention backend {backend.name!r}, which serves the model's {group.name} layers: it doesn't take rows with "
                'drafts on a GPU. Leave speculative_config out, or take attention_backend="auto".'
            )
