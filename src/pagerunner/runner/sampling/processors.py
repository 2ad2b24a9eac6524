"""Logits processors: each changes, in place, the logits of the rows that ask for it. Shape letters as in `layout`."""

from __future__ import annotations

import torch

from pagerunner.runner.sampling.layout import BadWordRows

_NEVER = float("-inf")


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
