"""Drafts from the text itself: what followed the last few tokens where they stood before.

Example: the text ends with the tokens 5 6 7, and 5 6 7 stood before, followed by 8 9. Then 8 and 9 are the drafts. The longest end of the text that stood before counts, of equally
long ones the latest. Where that reaches into the end itself, the text repeats with a period, and the drafts go on repeating it. Shape letters as in `ops/accept.py`; L positions of a slot.
"""

from __future__ import annotations

import torch

from pagerunner.ops.dispatch import gpu_kernel


@gpu_kernel("sampling.ngram")
def draft_ngrams(
    found_SW: torch.Tensor,
    slots_S: torch.Tensor,
    positions_S: torch.Tensor,
    texts_NL: torch.Tensor,
    drafts_NK: torch.Tensor,
    count: int,
    least: int,
    most: int,
) -> None:
    """Write the rows' new tokens to their texts, and `count` drafts of the tokens after these to `drafts_NK`, -1 where there is none.

    Args:
        found_SW: int64, new tokens; those below 0 are none.
        slots_S: int64; a row of slot -1 is padding.
        positions_S: int64, of the tokens before the new ones. These two may have any stride.
        texts_NL: int32, the slots' tokens by position.
        drafts_NK: int64.
        count: 0 writes the texts only.
        least, most: how many tokens of the end must have stood before, and how many are looked at.
    """
    rows = zip(found_SW.tolist(), slots_S.tolist(), positions_S.tolist(), strict=True)
    for found, slot, position in rows:
        if slot < 0:
            continue
        new = [token for token in found if token >= 0]
        end = position + len(new)  # of the text's last token
        texts_NL[slot, position + 1 : end + 1] = torch.tensor(new, dtype=torch.int32, device=texts_NL.device)
        drafts_NK[slot, :count] = -1
        if not count or not end:
            continue
        text = texts_NL[slot, : end + 1]
        # by the position where an earlier end would be
        matched = torch.zeros(end, dtype=torch.int64, device=text.device)
        alike = torch.ones(end, dtype=torch.bool, device=text.device)
        for back in range(min(most, end)):
            alike[:back] = False
            alike[back:] &= text[: end - back] == text[end - back]
            matched += alike
        best = int((matched * (end + 1) + torch.arange(end, device=text.device)).max())
        if best // (end + 1) < least:
            continue
        first, period = best % (end + 1) + 1, end - best % (end + 1)
        places = first + torch.arange(count, device=text.device) % period
        drafts_NK[slot, :count] = text.index_select(0, places).to(torch.int64)
