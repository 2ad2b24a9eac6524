"""Hyper-connections: a layer with several residual streams (DeepSeek-V4, section 2.2 of its report).

A sublayer reads a mixture of the streams, and its result is added to all of them, each by its own share. The streams are mixed among
each other by a matrix whose rows and columns sum to one (Sinkhorn's steps). All of these numbers are computed from the token's streams.

What a sublayer leaves is added where the next one begins. So the streams are written once for each sublayer. Example: 4 streams of 4,096
numbers are 32 KiB a token in bfloat16; a sublayer reads them twice and writes them once.

Shape letters: T tokens, M streams, D hidden features, X numbers that are computed of a token's streams: (2 + M) M, or M where the
streams end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from pagerunner.ops.dispatch import gpu_kernel
from pagerunner.ops.linear import Norm
from pagerunner.ops.norm import rms_norm


class StreamWeights(NamedTuple):
    """What a token's numbers are computed by: `fn_XF` [X, M * D], `base_X`, and a scale for each of their kinds. All float32.

    `eps` is added to what is read and to sums, `norm_eps` to the streams' mean square.
    """

    fn_XF: torch.Tensor
    base_X: torch.Tensor
    scale: torch.Tensor
    eps: float
    norm_eps: float


class Gates(NamedTuple):
    """What goes where, float32: `out_TM` of a sublayer's result to each stream, `among_TMM` of stream i to stream j."""

    out_TM: torch.Tensor
    among_TMM: torch.Tensor


class Left(NamedTuple):
    """What a sublayer has computed and how the streams take it."""

    y_TD: torch.Tensor
    gates: Gates


def add_left(streams_TMD: torch.Tensor, left: Left) -> torch.Tensor:
    """The streams behind a sublayer, [T, M, D]: mixed among each other, plus its result."""
    mixed_TMD = torch.matmul(left.gates.among_TMM.transpose(1, 2), streams_TMD.float())
    return (mixed_TMD + left.gates.out_TM.unsqueeze(-1) * left.y_TD.float().unsqueeze(1)).to(streams_TMD.dtype)


@gpu_kernel("streams")
def enter_sublayer(
    streams_TMD: torch.Tensor, left: Left | None, weights: StreamWeights, iterations: int, norm: Norm
) -> tuple[torch.Tensor, torch.Tensor, Gates]:
    """What a sublayer reads [T, D], normed; the streams with what was `left` added to them [T, M, D]; and the sublayer's gates."""
    count = streams_TMD.shape[1]
    streams_TMD = streams_TMD if left is None else add_left(streams_TMD, left)
    sizes = (count, count, count * count)
    read, out, among = _numbers(streams_TMD, weights).split(sizes, -1)
    read_base, out_base, among_base = weights.base_X.split(sizes)
    read_TM = torch.sigmoid(read * weights.scale[0] + read_base) + weights.eps
    out_TM = 2 * torch.sigmoid(out * weights.scale[1] + out_base)
    logits_TMM = (among * weights.scale[2] + among_base).unflatten(-1, (count, count))
    among_TMM = logits_TMM.softmax(-1) + weights.eps
    among_TMM = among_TMM / (among_TMM.sum(-2, keepdim=True) + weights.eps)
    for _ in range(iterations - 1):
        among_TMM = among_TMM / (among_TMM.sum(-1, keepdim=True) + weights.eps)
        among_TMM = among_TMM / (among_TMM.sum(-2, keepdim=True) + weights.eps)
    return norm(_read(streams_TMD, read_TM)), streams_TMD, Gates(out_TM, among_TMM)


@gpu_kernel("streams")
def end_streams(
    streams_TMD: torch.Tensor, left: Left | None, weights: StreamWeights, norm: Norm
) -> tuple[torch.Tensor, torch.Tensor]:
    """The streams as one, weighted by what is in them, and normed [T, D]; and the streams with what was `left` [T, M, D]."""
    streams_TMD = streams_TMD if left is None else add_left(streams_TMD, left)
    read_TM = torch.sigmoid(_numbers(streams_TMD, weights) * weights.scale + weights.base_X) + weights.eps
    return norm(_read(streams_TMD, read_TM)), streams_TMD


def _numbers(streams_TMD: torch.Tensor, weights: StreamWeights) -> torch.Tensor:
    flat_TF = streams_TMD.flatten(1).float()
    return F.linear(rms_norm(flat_TF, torch.ones_like(flat_TF[0]), weights.norm_eps), weights.fn_XF)


def _read(streams_TMD: torch.Tensor, read_TM: torch.Tensor) -> torch.Tensor:
    return (read_TM.unsqueeze(-1) * streams_TMD).sum(1).to(streams_TMD.dtype)
