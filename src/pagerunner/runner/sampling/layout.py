"""Which rows of a step need what before they are sampled: the host's index work, done once per composition of rows.

A layout is about the rows that ask for more than temperature, min-p, top-k and top-p: their logits are changed or reported.
Those whose logits change are N of a step's sampled rows, and the layout's tensors number them from 0. While decoding, the same rows ask step after
step. Then the layout of the step before is found again and costs nothing. Shape letters: N rows of the layout, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from pagerunner.ops.async_copy import to_device
from pagerunner.ops.penalties import Penalties
from pagerunner.runner.sampling.slots import SlotParams


@dataclass(frozen=True, slots=True)
class PenaltyRows:
    """The penalties of all of a layout's rows. Of those that have some: their numbers among the step's rows, and the index of their slots' first counts in the flattened state."""

    of_rows: Penalties
    index: torch.Tensor
    state_start: torch.Tensor


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
    """Rows restricted to some ids, int64 [n], and their masks, int32 [n, W]."""

    rows: torch.Tensor
    bits: torch.Tensor


@dataclass(frozen=True, slots=True)
class HeldRows:
    """Tokens that end a text, int64 [H], masked while their row's position is below `until_H`: `flat_H` indexes the flattened logits, and `place_H` the step's rows. `rows` has each
    row's place among the step's, and until when."""

    rows: tuple[tuple[int, int], ...]
    flat_H: torch.Tensor
    place_H: torch.Tensor
    until_H: torch.Tensor


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Rows that report log-probabilities, and how many alternatives each asks for; `row_numbers` are the step's, `index` the same on the device, and `rows` their
    numbers among the rows that ask for more."""

    row_numbers: list[int]
    index: torch.Tensor
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
    held: HeldRows | None
    bias_flat: torch.Tensor | None
    bias_values: torch.Tensor | None
    penalties: PenaltyRows | None
    errors: dict[int, str]

    @property
    def edits(self) -> bool:
        """Whether anything but penalties may write into the logits."""
        return bool(
            self.allowed is not None
            or self.bad_words is not None
            or self.held is not None
            or self.bias_flat is not None
        )


def build_layout(
    places: Sequence[int],
    slots: Sequence[int],
    params: Sequence[SlotParams],
    vocab_size: int,
    device: torch.device,
    width: int = 1,
    masked: Collection[int] | None = (),
) -> Layout:
    """The layout of these places among a step's sampled rows; `slots` and `params` are theirs. With a `width` a row is one place of so many.

    Rows whose logits change are those whose parameters say so and those that are `masked`; None: all.
    """
    found = list(zip(places, slots, params, strict=True))
    changed = found if masked is None else [one for one in found if one[2].changes or one[0] in masked]
    row_numbers, own_slots, own = [list(one) for one in zip(*changed, strict=True)] if changed else ([], [], [])
    biased = [(row, p.bias) for row, p in enumerate(own) if p.bias is not None]
    return Layout(
        row_numbers=row_numbers,
        index=to_device(row_numbers, torch.int64, device),
        logprobs=_logprob_rows(places, params, device),
        allowed=_allowed_rows(own, device),
        bad_words=_bad_word_rows(row_numbers, own_slots, own, vocab_size, device, width),
        held=_held_rows(row_numbers, own, vocab_size, device),
        bias_flat=torch.cat([bias.ids + row * vocab_size for row, bias in biased]) if biased else None,
        bias_values=torch.cat([bias.values for _, bias in biased]) if biased else None,
        penalties=_penalty_rows(row_numbers, own_slots, own, vocab_size, device, width),
        errors={place: p.error for place, p in zip(places, params, strict=True) if p.error is not None},
    )


def _logprob_rows(row_numbers: Sequence[int], params: Sequence[SlotParams], device: torch.device) -> LogprobRows | None:
    rows = [row for row, p in enumerate(params) if p.logprobs is not None]
    if not rows:
        return None
    numbers = [row_numbers[row] for row in rows]
    both = to_device([numbers, rows], torch.int64, device)
    return LogprobRows(numbers, both[0], both[1], [params[row].logprobs or 0 for row in rows])


def _allowed_rows(params: Sequence[SlotParams], device: torch.device) -> AllowedRows | None:
    found = [(row, p.allowed) for row, p in enumerate(params) if p.allowed is not None]
    if not found:
        return None
    return AllowedRows(
        to_device([row for row, _ in found], torch.int64, device), torch.stack([one for _, one in found])
    )


def _held_rows(
    row_numbers: Sequence[int], params: Sequence[SlotParams], vocab_size: int, device: torch.device
) -> HeldRows | None:
    found = [(row, p.prompt_len + p.min_tokens, p.held_ids) for row, p in enumerate(params) if p.min_tokens > 0]
    if not found:
        return None
    each = [(row * vocab_size + token, row_numbers[row], until) for row, until, ids in found for token in ids]
    tensors = to_device(list(zip(*each, strict=True)), torch.int64, device)
    return HeldRows(tuple((row_numbers[row], until) for row, until, _ in found), *tensors)


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
    row_numbers: Sequence[int],
    slots: Sequence[int],
    params: Sequence[SlotParams],
    vocab_size: int,
    device: torch.device,
    width: int,
) -> PenaltyRows | None:
    some = [row for row, p in enumerate(params) if p.penalties is not None]
    if not some:
        return None
    factors = [
        (p.penalties.repetition, p.penalties.frequency, p.penalties.presence)
        if p.penalties is not None
        else (1.0, 0.0, 0.0)
        for p in params
    ]
    both = to_device([list(slots), [number % width for number in row_numbers]], torch.int64, device)
    theirs = to_device(
        [[row_numbers[row] for row in some], [slots[row] * vocab_size for row in some]], torch.int64, device
    )
    return PenaltyRows(Penalties(both[0], to_device(factors, torch.float32, device), both[1]), *theirs)
