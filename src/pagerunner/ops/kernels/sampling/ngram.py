"""The kernel of ops/ngram.py: one program for each row, which reads the row's text once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 2048


@triton.jit(do_not_specialize=["slot_stride", "position_stride", "text_stride", "width", "count"])
def _draft_ngrams(
    found_SW, slots_S, positions_S, texts_NL, drafts_NK, slot_stride, position_stride, text_stride, width, count, K: tl.constexpr,
    LEAST: tl.constexpr, MOST: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_S + row * slot_stride).to(tl.int64)
    if slot < 0:
        return
    position = tl.load(positions_S + row * position_stride)
    text = texts_NL + slot * text_stride.to(tl.int64)
    place = tl.arange(0, PLACES)
    found = tl.load(found_SW + row * width + place, place < width, -1)
    tl.store(text + position + 1 + place, found.to(tl.int32), found >= 0)
    if count == 0:
        return
    tl.debug_barrier()  # what this program has written, it reads below
    end = position + tl.sum((found >= 0).to(tl.int64), 0)
    best = tl.full((), -1, tl.int64)  # tokens matched * 2^32 + position of the match's last token
    for first in range(0, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        alike = (at < end) & (tl.load(text + at, at < end, -1) == tl.load(text + end))
        if tl.max(alike.to(tl.int32), 0) > 0:
            matched = alike.to(tl.int64)
            for back in tl.static_range(1, MOST):
                if back <= end:
                    alike = alike & (at >= back)
                    alike = alike & (tl.load(text + at - back, alike, -1) == tl.load(text + end - back))
                    matched += alike.to(tl.int64)
            score = tl.where((at < end) & (matched >= LEAST), matched * 4294967296 + at, -1)
            best = tl.maximum(best, tl.max(score, 0))
    after = best % 4294967296 + 1
    there = (best >= 0) & (place < count)
    draft = tl.load(text + after + place % (end + 1 - after), there, -1)
    tl.store(drafts_NK + slot * K + place, draft.to(tl.int64), place < count)


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
    """See ops/ngram.py."""
    rows, width = found_SW.shape
    _draft_ngrams[(rows,)](
        found_SW, slots_S, positions_S, texts_NL, drafts_NK, slots_S.stride(0), positions_S.stride(0), texts_NL.stride(0), width, count, K=drafts_NK.shape[1],
        LEAST=least, MOST=most, PLACES=triton.next_power_of_2(1 + drafts_NK.shape[1]), BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
