"""Which rows of a step need what: the host-side index work of a batch, done once per composition of slots.

While the same slots are sampled step after step (decoding), the layout is found again and costs nothing.
Shape letters: S sampled rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pagerunner.ops.sample import Filters
from pagerunner.ops.transfer import to_device
from pagerunner.runner.sampling.slots import SlotParams


@dataclass(frozen=True, slots=True)
class PenaltyRows:
    """Rows with penalties: their rows, slots, and float32 [n, 1] coefficients; a None is a penalty nobody uses."""

    rows: torch.Tensor
    state_start: torch.Tensor  # [n] index of the slot's first count in the flattened state
    slots: torch.Tensor
    repetition: torch.Tensor | None
    frequency: torch.Tensor | None
    presence: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class BadWordRows:
    """The bad words of all rows, flattened: see `slots.BadWords`; `target` indexes the flattened logits."""

    rows: torch.Tensor
    slots: torch.Tensor
    target: torch.Tensor  # [W] row * V + last token
    prefix_len: torch.Tensor  # [W]
    prefix: torch.Tensor  # [P]
    distance: torch.Tensor  # [P]
    word: torch.Tensor  # [P]
    slot_of_prefix: torch.Tensor  # [P]


@dataclass(frozen=True, slots=True)
class AllowedRows:
    """Rows restricted to some ids: `flat` indexes the flattened [n, V] mask of these rows."""

    rows: torch.Tensor
    flat: torch.Tensor


@dataclass(frozen=True, slots=True)
class HeldRow:
    """A row whose stop tokens are masked while its position is below `until`."""

    row: int
    until: int
    flat_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RandomRows:
    """Rows that draw. `index` is None when they are all rows of the step, in order."""

    params: list[SlotParams]
    row_numbers: list[int]
    index: torch.Tensor | None
    filters: Filters


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Rows that report log-probabilities, and how many alternatives each asks for."""

    row_numbers: list[int]
    rows: torch.Tensor
    top: list[int]


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything that the composition of a batch decides. A None feature isn't used by any row."""

    num_rows: int
    logprobs: LogprobRows | None
    allowed: AllowedRows | None
    bad_words: BadWordRows | None
    held: tuple[HeldRow, ...]
    bias_flat: torch.Tensor | None
    bias_values: torch.Tensor | None
    penalties: PenaltyRows | None
    random: RandomRows | None
    errors: dict[int, str]

    @property
    def changes_logits(self) -> bool:
        """Whether any processor may write into the logits."""
        return bool(
            self.allowed is not None
            or self.bad_words is not None
            or self.held
            or self.bias_flat is not None
            or self.penalties is not None
        )


def build_layout(slots: Sequence[int], params: Sequence[SlotParams], vocab_size: int, device: torch.device) -> Layout:
    """The layout of a step that samples `slots` in this order."""
    biased = [(row, p.bias) for row, p in enumerate(params) if p.bias is not None]
    return Layout(
        num_rows=len(slots),
        logprobs=_logprob_rows(params, device),
        allowed=_allowed_rows(params, vocab_size, device),
        bad_words=_bad_word_rows(slots, params, vocab_size, device),
        held=tuple(
            HeldRow(row, p.prompt_len + p.min_tokens, tuple(row * vocab_size + token for token in p.held_ids))
            for row, p in enumerate(params)
            if p.min_tokens > 0
        ),
        bias_flat=torch.cat([bias.ids + row * vocab_size for row, bias in biased]) if biased else None,
        bias_values=torch.cat([bias.values for _, bias in biased]) if biased else None,
        penalties=_penalty_rows(slots, params, vocab_size, device),
        random=_random_rows(params, vocab_size, device),
        errors={row: p.error for row, p in enumerate(params) if p.error is not None},
    )


def _logprob_rows(params: Sequence[SlotParams], device: torch.device) -> LogprobRows | None:
    rows = [row for row, p in enumerate(params) if p.logprobs is not None]
    if not rows:
        return None
    return LogprobRows(rows, to_device(rows, torch.int64, device), [params[row].logprobs or 0 for row in rows])


def _allowed_rows(params: Sequence[SlotParams], vocab_size: int, device: torch.device) -> AllowedRows | None:
    found = [(row, p.allowed) for row, p in enumerate(params) if p.allowed is not None]
    if not found:
        return None
    flat = torch.cat([ids + i * vocab_size for i, (_, ids) in enumerate(found)])
    return AllowedRows(to_device([row for row, _ in found], torch.int64, device), flat)


def _bad_word_rows(
    slots: Sequence[int], params: Sequence[SlotParams], vocab_size: int, device: torch.device
) -> BadWordRows | None:
    found = [(row, p.bad_words) for row, p in enumerate(params) if p.bad_words is not None]
    if not found:
        return None
    words_before = [0]
    for _, bad in found:
        words_before.append(words_before[-1] + bad.last.numel())
    return BadWordRows(
        rows=to_device([row for row, _ in found], torch.int64, device),
        slots=to_device([slots[row] for row, _ in found], torch.int64, device),
        target=torch.cat([bad.last + row * vocab_size for row, bad in found]),
        prefix_len=torch.cat([bad.prefix_len for _, bad in found]),
        prefix=torch.cat([bad.prefix for _, bad in found]),
        distance=torch.cat([bad.distance for _, bad in found]),
        word=torch.cat([bad.word + start for (_, bad), start in zip(found, words_before, strict=False)]),
        slot_of_prefix=torch.cat([torch.full_like(bad.prefix, slots[row]) for row, bad in found]),
    )


def _penalty_rows(
    slots: Sequence[int], params: Sequence[SlotParams], vocab_size: int, device: torch.device
) -> PenaltyRows | None:
    found = [(row, p.penalties) for row, p in enumerate(params) if p.penalties is not None]
    if not found:
        return None

    def column(values: list[float], off: float) -> torch.Tensor | None:
        if all(value == off for value in values):
            return None
        return to_device(values, torch.float32, device)[:, None]

    slot_ids = to_device([slots[row] for row, _ in found], torch.int64, device)
    return PenaltyRows(
        rows=to_device([row for row, _ in found], torch.int64, device),
        state_start=slot_ids * vocab_size,
        slots=slot_ids,
        repetition=column([p.repetition for _, p in found], 1.0),
        frequency=column([p.frequency for _, p in found], 0.0),
        presence=column([p.presence for _, p in found], 0.0),
    )


def _random_rows(params: Sequence[SlotParams], vocab_size: int, device: torch.device) -> RandomRows | None:
    rows = [row for row, p in enumerate(params) if p.temperature > 0.0]
    if not rows:
        return None
    chosen = [params[row] for row in rows]

    def column(get: Callable[[SlotParams], float], off: float) -> torch.Tensor | None:
        values = [get(p) for p in chosen]
        if all(value == off for value in values):
            return None
        return to_device(values, torch.float32, device)

    cut = [i for i, p in enumerate(chosen) if p.top_k > 0 or p.top_p < 1.0]
    ks = [p.top_k or vocab_size for p in chosen]
    ps = [p.top_p if p.top_p < 1.0 else float("inf") for p in chosen]
    filters = Filters(
        temperature_N=column(lambda p: p.temperature, 1.0),
        min_p_N=column(lambda p: p.min_p, 0.0),
        top_k_N=to_device(ks, torch.int64, device) if cut else None,
        top_p_N=to_device(ps, torch.float64, device) if cut else None,
        truncated=to_device(cut, torch.int64, device) if cut and len(cut) < len(chosen) else None,
        max_top_k=max((ks[i] for i in cut), default=0),
    )
    index = None if len(rows) == len(params) else to_device(rows, torch.int64, device)
    return RandomRows(chosen, rows, index, filters)
