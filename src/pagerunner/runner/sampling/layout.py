"""Which rows of a step need what before they are sampled: the host's index work, done once per composition of rows.

A layout is about the rows that ask for more than temperature, min-p, top-k and top-p: their logits are changed or reported.
They are N of a step's sampled rows, and the layout's tensors number them from 0. While decoding, the same rows ask step after
step. Then the layout of the step before is found again and costs nothing. Shape letters: N rows of the layout, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pagerunner.ops.async_copy import to_device
from pagerunner.runner.sampling.slots import SlotParams


@dataclass(frozen=True, slots=True)
class PenaltyRows:
    """Rows with penalties: their rows, slots, and float32 [n, 1] coefficients. None is a penalty that no row uses."""

    rows: torch.Tensor
    state_start: torch.Tensor  # [n] index of the slot's first count in the flattened state
    slots: torch.Tensor
    places: torch.Tensor  # [n] how many of the slot's drafts are before the row's place
    repetition: torch.Tensor | None
    frequency: torch.Tensor | None
    presence: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class BadWordRows:
    """The bad words of all rows, flattened: see `slots.BadWords`; `target` indexes the flattened logits. `heads` are the step's rows whose first place is
    here, and `head_slots` their slots."""

    heads: torch.Tensor | None
    head_slots: torch.Tensor
    target: torch.Tensor  # [W] row * V + last token
    prefix_len: torch.Tensor  # [W]
    prefix: torch.Tensor  # [P]
    distance: torch.Tensor  # [P]
    word: torch.Tensor  # [P]
    slot_of_prefix: torch.Tensor  # [P]
    place_of_prefix: torch.Tensor  # [P]


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
class LogprobRows:
    """Rows that report log-probabilities, and how many alternatives each asks for; `row_numbers` are the step's."""

    row_numbers: list[int]
    rows: torch.Tensor
    top: list[int]


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything that the composition of a batch decides. A feature that no row uses is None.

    `row_numbers` are the places of the layout's rows among the step's sampled rows, `index` int64 [N] the same on the
    device. `errors` are by the step's rows.
    """

    row_numbers: list[int]
    index: torch.Tensor
    logprobs: LogprobRows | None
    allowed: AllowedRows | None
    bad_words: BadWordRows | None
    held: tuple[HeldRow, ...]
    bias_flat: torch.Tensor | None
    bias_values: torch.Tensor | None
    penalties: PenaltyRows | None
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


def build_layout(
    row_numbers: Sequence[int],
    slots: Sequence[int],
    params: Sequence[SlotParams],
    vocab_size: int,
    device: torch.device,
    width: int = 1,
) -> Layout:
    """The layout of rows `row_numbers` of a step's sampled rows; `slots` and `params` are theirs. With a `width` a row is one place of so many."""
    places = [number % width for number in row_numbers]
    biased = [(row, p.bias) for row, p in enumerate(params) if p.bias is not None]
    return Layout(
        row_numbers=list(row_numbers),
        index=to_device(row_numbers, torch.int64, device),
        logprobs=_logprob_rows(row_numbers, params, device),
        allowed=_allowed_rows(params, vocab_size, device),
        bad_words=_bad_word_rows(row_numbers, slots, params, vocab_size, device, width),
        held=tuple(
            HeldRow(row, p.prompt_len + p.min_tokens, tuple(row * vocab_size + token for token in p.held_ids))
            for row, p in enumerate(params)
            if p.min_tokens > 0
        ),
        bias_flat=torch.cat([bias.ids + row * vocab_size for row, bias in biased]) if biased else None,
        bias_values=torch.cat([bias.values for _, bias in biased]) if biased else None,
        penalties=_penalty_rows(slots, places, params, vocab_size, device),
        errors={row: p.error for row, p in zip(row_numbers, params, strict=True) if p.error is not None},
    )


def _logprob_rows(row_numbers: Sequence[int], params: Sequence[SlotParams], device: torch.device) -> LogprobRows | None:
    rows = [row for row, p in enumerate(params) if p.logprobs is not None]
    if not rows:
        return None
    return LogprobRows(
        [row_numbers[row] for row in rows],
        to_device(rows, torch.int64, device),
        [params[row].logprobs or 0 for row in rows],
    )


def _allowed_rows(params: Sequence[SlotParams], vocab_size: int, device: torch.device) -> AllowedRows | None:
    found = [(row, p.allowed) for row, p in enumerate(params) if p.allowed is not None]
    if not found:
        return None
    flat = torch.cat([ids + i * vocab_size for i, (_, ids) in enumerate(found)])
    return AllowedRows(to_device([row for row, _ in found], torch.int64, device), flat)


def _bad_word_rows(
    row_numbers: Sequence[int],
    slots: Sequence[int],
    params: Sequence[SlotParams],
    vocab_size: int,
    device: torch.device,
    width: int,
) -> BadWordRows | None:
    found = [(row, p.bad_words) for row, p in enumerate(params) if p.bad_words is not None]
    if not found:
        return None
    words_before = [0]
    for _, bad in found:
        words_before.append(words_before[-1] + bad.last.numel())
    heads = [row for row, _ in found if row_numbers[row] % width == 0]
    return BadWordRows(
        heads=to_device([row_numbers[row] // width for row in heads], torch.int64, device) if heads else None,
        head_slots=to_device([slots[row] for row in heads], torch.int64, device),
        target=torch.cat([bad.last + row * vocab_size for row, bad in found]),
        prefix_len=torch.cat([bad.prefix_len for _, bad in found]),
        prefix=torch.cat([bad.prefix for _, bad in found]),
        distance=torch.cat([bad.distance for _, bad in found]),
        word=torch.cat([bad.word + start for (_, bad), start in zip(found, words_before, strict=False)]),
        slot_of_prefix=torch.cat([torch.full_like(bad.prefix, slots[row]) for row, bad in found]),
        place_of_prefix=torch.cat([torch.full_like(bad.prefix, row_numbers[row] % width) for row, bad in found]),
    )


def _penalty_rows(
    slots: Sequence[int], places: Sequence[int], params: Sequence[SlotParams], vocab_size: int, device: torch.device
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
        places=to_device([places[row] for row, _ in found], torch.int64, device),
        repetition=column([p.repetition for _, p in found], 1.0),
        frequency=column([p.frequency for _, p in found], 0.0),
        presence=column([p.presence for _, p in found], 0.0),
    )
