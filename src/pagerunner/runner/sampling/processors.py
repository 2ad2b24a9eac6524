"""Logits processors: each changes, in place, the logits of the rows that ask for it. Shape letters as in `layout`."""

from __future__ import annotations

import torch

from pagerunner.runner.sampling.layout import AllowedRows, BadWordRows, PenaltyRows

_NEVER = float("-inf")


def allow_only(logits_SV: torch.Tensor, allowed: AllowedRows) -> None:
    """Mask every token that isn't listed for its row."""
    shape = (allowed.rows.shape[0], logits_SV.shape[-1])
    blocked = torch.ones(shape, dtype=torch.bool, device=logits_SV.device)
    blocked.view(-1).index_fill_(0, allowed.flat, False)
    logits_SV[allowed.rows] = logits_SV.index_select(0, allowed.rows).masked_fill_(blocked, _NEVER)


def ban_words(
    logits_SV: torch.Tensor, bad: BadWordRows, recent: torch.Tensor, drafts_NK: torch.Tensor | None = None
) -> None:
    """Mask the last token of every banned sequence whose prefix is what the row generated last.

    `recent` int32 [slots, H] holds each slot's latest generated tokens, newest last, -1 where there is none. `drafts_NK` are what may follow, if rows
    have several places.
    """
    column = recent.shape[-1] - bad.distance
    if drafts_NK is not None:
        recent, column = torch.cat((recent, drafts_NK[: len(recent)].to(torch.int32)), 1), column + bad.place_of_prefix
    seen = recent[bad.slot_of_prefix, column]
    matched = torch.zeros_like(bad.prefix_len).index_add_(0, bad.word, (seen == bad.prefix).to(torch.int64))
    change = torch.zeros_like(bad.target, dtype=logits_SV.dtype).masked_fill_(matched == bad.prefix_len, _NEVER)
    logits_SV.view(-1).index_add_(0, bad.target, change)


def penalize(
    logits_SV: torch.Tensor, rows: PenaltyRows, seen: torch.Tensor, drafts_NK: torch.Tensor | None = None
) -> None:
    """Repetition penalty on prompt and output tokens, then frequency and presence penalties on output tokens.

    `seen` int32 [slots, V] is twice a token's count in the output, plus 1 if it stands in the prompt. If rows have several places, `drafts_NK` are the
    slots' drafts, and those before a place count for it as output.
    """
    seen_NV = seen.index_select(0, rows.slots)
    if drafts_NK is not None:
        own_NK = drafts_NK.index_select(0, rows.slots)
        before_NK = (torch.arange(own_NK.shape[1], device=own_NK.device) < rows.places[:, None]) & (own_NK >= 0)
        seen_NV.scatter_add_(1, own_NK.clamp(min=0), 2 * before_NK.to(seen_NV.dtype))
    logits_NV = logits_SV.index_select(0, rows.rows)
    if rows.repetition is not None:
        scaled = torch.where(logits_NV > 0, logits_NV / rows.repetition, logits_NV * rows.repetition)
        logits_NV = torch.where(seen_NV > 0, scaled, logits_NV)
    if rows.frequency is not None or rows.presence is not None:
        count_NV = seen_NV >> 1
        if rows.frequency is not None:
            logits_NV -= rows.frequency * count_NV
        if rows.presence is not None:
            logits_NV -= rows.presence * (count_NV > 0)
    logits_SV[rows.rows] = logits_NV
