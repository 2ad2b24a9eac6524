"""Mamba-2's state space recurrence (SSD, arXiv 2405.21060), for one token of many rows and for many tokens of one row.

Each head holds a matrix S of P values by N state elements. A token with input x, step size dt, and vectors B and C that
a group of heads shares first fades S by a = exp(dt A), then adds dt x B^T, then reads y = S C + D x. Within a chunk, with
G the running sum of log a, the same is a masked product of the chunk's own tokens and a read of the state before it:

    Y = (C B^T * e^(G_t - G_i), i <= t) (dt X) + e^G C S0^T + D X

Everything but the sum G is float32, whatever the inputs. Shape letters: B rows, L tokens, H heads, P head size, G groups, N
state size, T tokens of a step, C channels, E page table entries.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pagerunner.ops.dispatch import gpu_kernel
from pagerunner.ops.gdn import running_sum, within_chunk_decay
from pagerunner.ops.state_rows import CHUNK, StateRows, run_span, spans


def _per_head(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[.., G, N] -> [.., H, N] float32: each group's vector once per head."""
    return x.float().repeat_interleave(num_heads // x.shape[-2], -2)


def mamba2_step(
    x_BHP: torch.Tensor,
    dt_BH: torch.Tensor,
    a_H: torch.Tensor,
    b_BGN: torch.Tensor,
    c_BGN: torch.Tensor,
    d_H: torch.Tensor,
    state_BHPN: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of every row: outputs [B, H, P] float32 and the new states, float32. `a` is negative."""
    num_heads = x_BHP.shape[1]
    x_BHP, dt_BH, b_BHN, c_BHN = x_BHP.float(), dt_BH.float(), _per_head(b_BGN, num_heads), _per_head(c_BGN, num_heads)
    fade_BH = (dt_BH * a_H.float()).exp()
    added = (x_BHP * dt_BH.unsqueeze(-1)).unsqueeze(-1) * b_BHN.unsqueeze(-2)
    state_BHPN = state_BHPN.float() * fade_BH[..., None, None] + added
    read_BHP = torch.matmul(state_BHPN, c_BHN.unsqueeze(-1)).squeeze(-1)
    return read_BHP + x_BHP * d_H.float().unsqueeze(-1), state_BHPN


def mamba2_chunks(
    x_LHP: torch.Tensor,
    dt_LH: torch.Tensor,
    a_H: torch.Tensor,
    b_LGN: torch.Tensor,
    c_LGN: torch.Tensor,
    d_H: torch.Tensor,
    state_HPN: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All tokens of one row, in chunks of 64: outputs [L, H, P] float32 and the state after the last, float32."""
    num_heads = x_LHP.shape[1]
    x_LHP, dt_LH = x_LHP.float(), dt_LH.float()
    scaled_HLP = (x_LHP * dt_LH.unsqueeze(-1)).transpose(0, 1)
    b_HLN, c_HLN = _per_head(b_LGN, num_heads).transpose(0, 1), _per_head(c_LGN, num_heads).transpose(0, 1)
    log_decay_HL = (dt_LH * a_H.float()).t()
    state_HPN = state_HPN.float()
    outputs = []
    for first in range(0, x_LHP.shape[0], CHUNK):
        part = slice(first, first + CHUNK)
        x, b, c = scaled_HLP[:, part], b_HLN[:, part], c_HLN[:, part]
        total_HC = running_sum(log_decay_HL[:, part])
        fade = total_HC.float().exp().unsqueeze(-1)
        own = torch.matmul(torch.matmul(c, b.transpose(-1, -2)).mul_(within_chunk_decay(total_HC)), x)
        outputs.append(torch.matmul(c, state_HPN.transpose(-1, -2)).mul_(fade).add_(own))
        kept = x * (total_HC[:, -1:] - total_HC).float().exp().unsqueeze(-1)
        state_HPN = torch.matmul(kept.transpose(-1, -2), b).addcmul_(state_HPN, fade[:, -1:])
    return torch.cat(outputs, 1).transpose(0, 1).addcmul_(x_LHP, d_H.float().unsqueeze(-1)), state_HPN


def split_parts(
    mixed_TC: torch.Tensor, heads: int, head_dim: int, state_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [T, H, P], B and C [T, G, N], from the output of the convolution."""
    inner = heads * head_dim
    b_TGN, c_TGN = mixed_TC[:, inner:].unflatten(1, (2, -1, state_size)).unbind(1)
    return mixed_TC[:, :inner].unflatten(1, (heads, head_dim)), b_TGN, c_TGN


@gpu_kernel("recurrent.mamba2")
def mamba2_rows(
    mixed_TC: torch.Tensor,
    steps_TH: torch.Tensor,
    decay_log_H: torch.Tensor,
    step_bias_H: torch.Tensor,
    skip_H: torch.Tensor,
    state_EHPN: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    """Every row of a step, from and into its state in pages; [T, H, P] in mixed's dtype. Padding gets finite numbers.

    `mixed` holds x, B and C side by side; `steps` are step sizes before their bias and softplus. Both may have tokens of journals
    behind the step's, see `ops.causal_conv.journaled_conv_rows`.
    """
    heads, head_dim, state_size = state_EHPN.shape[1:]
    x, b, c = split_parts(mixed_TC, heads, head_dim, state_size)
    dt_TH, a_H = F.softplus(steps_TH.float() + step_bias_H), -decay_log_H.float().exp()
    out_THP = torch.zeros_like(x, memory_format=torch.contiguous_format)
    for span in spans(rows):

        def run(part: slice, state_HPN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return mamba2_chunks(x[part], dt_TH[part], a_H, b[part], c[part], skip_H, state_HPN)

        run_span(span, state_EHPN, run, out_THP, rows)
    return out_THP[: rows.step.num_tokens]
