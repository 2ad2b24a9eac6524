"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464), for one token of many rows and for many tokens of one row.

Each head holds a matrix S that maps keys to values. A token with key k (length 1), value v, decay a and rate b first
fades S, then replaces part of what S answers to k by v, then reads:

    S <- a S;    S <- S + k d^T with d = b (v - S^T k);    o = S^T q / sqrt(K)

Within a chunk of C tokens, with G the running sum of log a, the corrections d solve a triangular system:

    (I + A) D = b (V - e^G K S0),    A[t, i] = b_t e^(G_t - G_i) k_t.k_i  for i < t

so that a chunk is a few matrix products. Everything but G is float32, whatever the inputs. Key heads are repeated for each value
head, except in `gated_delta_rows`.

Shape letters: B rows, L tokens, H value heads, K key size, V value size, T tokens of a step, E page table entries.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pagerunner.ops.dispatch import gpu_kernel
from pagerunner.ops.state_rows import CHUNK, StateRows, run_span, spans

_EPSILON = 1e-6


def unit_length(x: torch.Tensor) -> torch.Tensor:
    """`x / sqrt(|x|^2 + 1e-6)` over the last dimension, float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _EPSILON)


def running_sum(log_decay_HC: torch.Tensor) -> torch.Tensor:
    """Running sums over a chunk, float64: a strong decay makes the sums large, and only their small differences are used."""
    return log_decay_HC.cumsum(-1, dtype=torch.float64)


def within_chunk_decay(total_HC: torch.Tensor) -> torch.Tensor:
    """`exp(total[t] - total[i])` for i <= t and 0 above the diagonal, [H, C, C] float32; `total` is from `running_sum`."""
    size = total_HC.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=total_HC.device).triu(1)
    return (total_HC.unsqueeze(-1) - total_HC.unsqueeze(-2)).float().masked_fill_(later, float("-inf")).exp_()


def gated_delta_step(
    q_BHK: torch.Tensor,
    k_BHK: torch.Tensor,
    v_BHV: torch.Tensor,
    log_decay_BH: torch.Tensor,
    rate_BH: torch.Tensor,
    state_BHKV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of every row: outputs [B, H, V] float32 and the new states, float32."""
    q_BHK, k_BHK = unit_length(q_BHK) * q_BHK.shape[-1] ** -0.5, unit_length(k_BHK)
    state_BHKV = state_BHKV.float() * log_decay_BH.float().exp()[..., None, None]
    known_BHV = torch.matmul(k_BHK.unsqueeze(-2), state_BHKV).squeeze(-2)
    change_BHV = (v_BHV.float() - known_BHV) * rate_BH.float().unsqueeze(-1)
    state_BHKV = state_BHKV + k_BHK.unsqueeze(-1) * change_BHV.unsqueeze(-2)
    return torch.matmul(q_BHK.unsqueeze(-2), state_BHKV).squeeze(-2), state_BHKV


def gated_delta_chunks(
    q_LHK: torch.Tensor,
    k_LHK: torch.Tensor,
    v_LHV: torch.Tensor,
    log_decay_LH: torch.Tensor,
    rate_LH: torch.Tensor,
    state_HKV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All tokens of one row, in chunks of 64: outputs [L, H, V] float32 and the state after the last, float32."""
    q_HLK = unit_length(q_LHK).mul_(q_LHK.shape[-1] ** -0.5).transpose(0, 1)
    k_HLK = unit_length(k_LHK).transpose(0, 1)
    v_HLV = v_LHV.float().transpose(0, 1)
    log_decay_HL, rate_HL1 = log_decay_LH.float().t(), rate_LH.float().t().unsqueeze(-1)
    state_HKV = state_HKV.float()
    outputs = []
    for first in range(0, q_LHK.shape[0], CHUNK):
        part = slice(first, first + CHUNK)
        q, k, rate = q_HLK[:, part], k_HLK[:, part], rate_HL1[:, part]
        total_HC = running_sum(log_decay_HL[:, part])
        fade, decay = total_HC.float().exp().unsqueeze(-1), within_chunk_decay(total_HC)
        system = torch.matmul(k, k.transpose(-1, -2)).mul_(decay).mul_(rate)  # its diagonal is not read
        wanted = (v_HLV[:, part] - torch.matmul(k, state_HKV).mul_(fade)).mul_(rate)
        change = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        attended = torch.matmul(torch.matmul(q, k.transpose(-1, -2)).mul_(decay), change)
        outputs.append(torch.matmul(q, state_HKV).mul_(fade).add_(attended))
        kept = k * (total_HC[:, -1:] - total_HC).float().exp().unsqueeze(-1)
        state_HKV = torch.matmul(kept.transpose(-1, -2), change).addcmul_(state_HKV, fade[:, -1:])
    return torch.cat(outputs, 1).transpose(0, 1), state_HKV


def decay_logs(logits: torch.Tensor, decay_log_H: torch.Tensor, bias_H: torch.Tensor) -> torch.Tensor:
    """`-e^decay_log * softplus(logits + bias)`, float32, [.., H]."""
    return -decay_log_H.float().exp() * F.softplus(logits.float() + bias_H)


def split_heads(
    mixed_TC: torch.Tensor, key_heads: int, heads: int, key_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys (repeated for each value head) and values, from the output of the convolution."""
    keys = key_heads * key_dim
    q_TKd, k_TKd = mixed_TC[:, : 2 * keys].unflatten(1, (2, key_heads, key_dim)).unbind(1)
    v_THd = mixed_TC[:, 2 * keys :].unflatten(1, (heads, -1))
    repeats = heads // key_heads
    return q_TKd.repeat_interleave(repeats, 1), k_TKd.repeat_interleave(repeats, 1), v_THd


@gpu_kernel("recurrent.gdn")
def gated_delta_rows(
    mixed_TC: torch.Tensor,
    rates_TH: torch.Tensor,
    decays_TH: torch.Tensor,
    decay_log_H: torch.Tensor,
    decay_bias_H: torch.Tensor,
    state_EHKV: torch.Tensor,
    key_heads: int,
    rows: StateRows,
) -> torch.Tensor:
    """Every row of a step, from and into its state in pages; [T, H, V] in mixed's dtype. Padding gets finite numbers.

    `mixed` holds queries and keys of `key_heads` heads and values of H side by side; `rates` and `decays` are logits. All three may
    have tokens of journals behind the step's, see `ops.causal_conv.journaled_conv_rows`.
    """
    heads, key_dim, value_dim = state_EHKV.shape[1:]
    q, k, v = split_heads(mixed_TC, key_heads, heads, key_dim)
    log_decay_TH, rate_TH = decay_logs(decays_TH, decay_log_H, decay_bias_H), rates_TH.sigmoid()
    out_THV = mixed_TC.new_zeros(mixed_TC.shape[0], heads, value_dim)
    for span in spans(rows):

        def run(part: slice, state_HKV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return gated_delta_chunks(q[part], k[part], v[part], log_decay_TH[part], rate_TH[part], state_HKV)

        run_span(span, state_EHKV, run, out_THV, rows)
    return out_THV[: rows.step.num_tokens]
