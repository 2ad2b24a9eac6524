"""Depthwise causal convolution over a few past tokens, as recurrent layers use before their recurrence.

The state is the last `width - 1` inputs, oldest first, zeros before the first token. Shape letters: B rows, L tokens of
a row, C channels, W taps, T tokens of a step, E page table entries.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pagerunner.ops.dispatch import gpu_kernel
from pagerunner.ops.side_by_side import by_groups, side_by_side
from pagerunner.ops.state_rows import StateRows, run_span, spans


def causal_conv(
    x_BLC: torch.Tensor, state_BWC: torch.Tensor, weight_CW: torch.Tensor, bias_C: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`silu(bias + sum over w of weight[:, w] * input[t - (W - 1) + w])` and the state after the last token.

    `state` is [B, W - 1, C]. Sums are float32. A token's sum is taken in the same order however its sequence is
    divided. Returns [B, L, C] in x's dtype, and a new state in the state's.
    """
    length, taps = x_BLC.shape[1], weight_CW.shape[1]
    seen = torch.cat((state_BWC.to(x_BLC.dtype), x_BLC), 1)
    wide, weight_WC = seen.float(), weight_CW.float().t().contiguous()
    total = wide[:, :length] * weight_WC[0]
    for tap in range(1, taps):
        total.addcmul_(wide[:, tap : tap + length], weight_WC[tap])
    if bias_C is not None:
        total += bias_C
    return F.silu(total).to(x_BLC.dtype), seen[:, length:].to(state_BWC.dtype)


@gpu_kernel("recurrent.causal_conv")
def causal_conv_rows(
    x_TC: torch.Tensor,
    state_EWC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    rows: StateRows,
    groups: int = 0,
    key_dim: int = 0,
) -> torch.Tensor:
    """`causal_conv` of every row of a step, from and into its state in pages; [T, C]. Padding gets finite numbers.

    With `groups`, x is a projection ordered by these, of `key_dim` queries and keys each, with gates that aren't read.
    """
    if groups:
        x_TC = side_by_side(by_groups(x_TC, groups, key_dim)[:3])
    out_TC = torch.zeros_like(x_TC)
    for span in spans(rows):

        def run(part: slice, state_WC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            out, state = causal_conv(x_TC[part].unsqueeze(0), state_WC.unsqueeze(0), weight_CW, bias_C)
            return out.squeeze(0), state.squeeze(0)

        run_span(span, state_EWC, run, out_TC, rows)
    return out_TC


@gpu_kernel("recurrent.causal_conv")
def journaled_conv_rows(
    x_TC: torch.Tensor,
    gates: tuple[torch.Tensor, ...],
    state_EWC: torch.Tensor,
    journal: tuple[torch.Tensor, ...],
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    rows: StateRows,
) -> tuple[torch.Tensor, ...]:
    """`causal_conv_rows` with a journal [E, K, ..] of the inputs, which are x and one or two `gates` [T, H].

    Returns the outputs, and copies of the gates, each with all rows' accepted drafts behind the step's tokens, [T + R * K, ..]: what
    the recurrence after it is to run (`StateRows.entries`). The drafts of the step are in the journal then.
    """
    tokens, count = x_TC.shape[0], journal[0].shape[1]
    inputs = [torch.cat((part, part.new_zeros(rows.step.num_rows * count, part.shape[1]))) for part in (x_TC, *gates)]
    out = torch.zeros_like(inputs[0])
    for span in spans(rows):
        behind = tokens + span.row * count
        for part, entries in zip(inputs, journal, strict=True):
            part[behind : behind + span.replayed] = entries[span.entry, : span.replayed]
            entries[span.entry, : span.end - span.certain] = part[span.certain : span.end]

        def run(part: slice, state_WC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            result, state = causal_conv(inputs[0][part].unsqueeze(0), state_WC.unsqueeze(0), weight_CW, bias_C)
            return result.squeeze(0), state.squeeze(0)

        run_span(span, state_EWC, run, out, rows)
    return out, *inputs[1:]
