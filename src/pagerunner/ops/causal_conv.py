"""Depthwise causal convolution over a few past tokens, as recurrent layers use before their recurrence.

The state is the last `width - 1` inputs, oldest first, zeros before the first token. Shape letters: B rows, L tokens of
a row, C channels, W taps, T tokens of a step, E page table entries.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pagerunner.ops.dispatch import gpu_kernel
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


@gpu_kernel("causal_conv")
def causal_conv_rows(
    x_TC: torch.Tensor,
    state_EWC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    rows: StateRows,
) -> torch.Tensor:
    """`causal_conv` of every row of a step, from and into its state in pages; [T, C]. Padding gets finite numbers."""
    out_TC = torch.zeros_like(x_TC)
    for span in spans(rows):

        def run(part: slice, state_WC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            out, state = causal_conv(x_TC[part].unsqueeze(0), state_WC.unsqueeze(0), weight_CW, bias_C)
            return out.squeeze(0), state.squeeze(0)

        run_span(span, state_EWC, run, out_TC)
    return out_TC
