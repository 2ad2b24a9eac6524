"""See `ops/penalties.py`: one launch, which reads a row once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagerunner.ops.kernels.launch import blocks, dependent, start_next_and_wait
from pagerunner.ops.penalties import Penalties

BLOCK = 2048


@triton.jit(
    do_not_specialize=["vocab", "drafts_stride"],  # numbers and places that go by the number of rows
    do_not_specialize_on_alignment=["rows_ptr", "slots_ptr", "places_ptr", "drafts_ptr"],
)
def _penalties_kernel(
    logits_ptr, rows_ptr, out_ptr, slots_ptr, factors_ptr, places_ptr, seen_ptr, drafts_ptr, vocab, row_stride, drafts_stride,
    GATHER: tl.constexpr, DRAFTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A block of a row's tokens."""
    start_next_and_wait(PDL)
    n = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = token < vocab
    row = tl.load(rows_ptr + n) if GATHER else n
    x = tl.load(logits_ptr + row * row_stride + token, mask=mask, other=0.0).to(tl.float32)
    repetition, frequency = tl.load(factors_ptr + 3 * n), tl.load(factors_ptr + 3 * n + 1)
    presence = tl.load(factors_ptr + 3 * n + 2)
    if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
        slot = tl.load(slots_ptr + n)
        seen = tl.load(seen_ptr + slot * vocab + token, mask=mask, other=0)
        if DRAFTS:
            place = tl.load(places_ptr + n)
            for draft in range(DRAFTS):
                guess = tl.load(drafts_ptr + slot * drafts_stride + draft, mask=draft < place, other=-1)
                seen += tl.where(token == guess, 2, 0)
        scaled = tl.where(x > 0, tl.div_rn(x, repetition + tl.zeros((BLOCK,), tl.float32)), x * repetition)
        count = seen >> 1
        x = tl.where(seen > 0, scaled, x) - frequency * count.to(tl.float32) - tl.where(count > 0, presence, 0.0)
    tl.store(out_ptr + n * vocab + token, x, mask=mask)


def penalized(
    logits_SV: torch.Tensor,
    rows_N: torch.Tensor | None,
    penalties: Penalties,
    seen: torch.Tensor,
    drafts_NK: torch.Tensor | None = None,
) -> torch.Tensor:
    """See the twin."""
    count, vocab = len(penalties.slots_N), logits_SV.shape[1]
    out_NV = logits_SV
    if rows_N is not None:
        out_NV = torch.empty(count, vocab, dtype=torch.float32, device=logits_SV.device)
    drafts = penalties.slots_N.view(1, -1)[:, :0] if drafts_NK is None else drafts_NK
    _penalties_kernel[(count, blocks(vocab, BLOCK))](
        logits_SV, penalties.slots_N if rows_N is None else rows_N, out_NV, *penalties[:2], penalties.places_N, seen, drafts, vocab,
        logits_SV.stride(0), drafts.stride(0), GATHER=rows_N is not None, DRAFTS=drafts.shape[1], BLOCK=BLOCK, num_warps=8, **dependent(logits_SV.device),
    )  # fmt: skip
    return out_NV
