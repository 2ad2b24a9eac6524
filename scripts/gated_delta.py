"""Qwen3.5's layers for training: the formulas of transformers in fewer steps, and without loops over the sequence.

transformers walks through a sequence chunk by chunk, which leaves a GPU idle when heads are small. Here all chunks are
worked on at once: what a chunk does to the state before it is a linear map, and the maps are composed by a scan of
logarithmic depth (Yang et al., Gated Delta Networks, 2024, for the chunks; Hillis and Steele, 1986, for the scan).

Shape letters: B rows, H heads, N chunks, C tokens of a chunk, K key size, V value size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, rms_norm, silu
from transformers.models.qwen3_5 import modeling_qwen3_5


def gated_delta(
    query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, chunk_size: int = 32, **_: Any
) -> tuple[Tensor, None]:
    """Outputs [B, T, H, V] of queries and keys [B, T, H, K], values [B, T, H, V], log decays and rates [B, T, H].

    States start from zero and are not returned; queries and keys are normalized.
    """
    with torch.autocast(query.device.type, enabled=False):
        return _gated_delta(query, key, value, g, beta, chunk_size), None


def _gated_delta(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, size: int) -> Tensor:
    length = query.shape[1]
    missing = -length % size

    def chunks(x: Tensor) -> Tensor:
        x = pad(x.transpose(1, 2).float(), (0, 0, 0, missing))
        return x.unflatten(2, (-1, size))

    q_BHNCK, k_BHNCK = (chunks(unit(x.float())) for x in (query, key))
    q_BHNCK = q_BHNCK * q_BHNCK.shape[-1] ** -0.5
    rate_BHNC1 = chunks(rate[..., None])
    decay_BHNC = chunks(decay[..., None])[..., 0].cumsum(-1)
    later = torch.ones(size, size, dtype=torch.bool, device=query.device).triu(1)
    # decays from token to token of a chunk
    between = (decay_BHNC[..., :, None] - decay_BHNC[..., None, :]).masked_fill(later, float("-inf")).exp()
    since_start = decay_BHNC.exp()[..., None]
    until_end = (decay_BHNC[..., -1:] - decay_BHNC).exp()[..., None]

    fast_k = k_BHNCK * rate_BHNC1
    system = (fast_k @ k_BHNCK.mT) * between
    right = torch.cat([chunks(value) * rate_BHNC1, fast_k * since_start], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    written, read = solved.split([value.shape[-1], key.shape[-1]], -1)

    into = (k_BHNCK * until_end).mT
    kept = torch.eye(key.shape[-1], device=query.device) * since_start[..., -1:, :]
    maps = torch.cat([kept - into @ read, into @ written], -1)
    state = states_before(maps)
    inside = (q_BHNCK @ k_BHNCK.mT) * between
    out = (q_BHNCK * since_start) @ state + inside @ (written - read @ state)
    return out.flatten(2, 3)[:, :, :length].transpose(1, 2).to(query.dtype)


def unit(x: Tensor) -> Tensor:
    """Vectors of length one."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def states_before(maps: Tensor) -> Tensor:
    """The states [B, H, N, K, V] before each chunk, from a zero before the first.

    `maps` [B, H, N, K, K + V] holds a matrix and an addend per chunk: state after = matrix @ state before + addend.
    """
    inner, count = maps.shape[-2], maps.shape[2]
    width = maps.shape[-1] - inner
    shift = 1
    while shift < count:
        later = maps[:, :, shift:]
        composed = later[..., :inner] @ maps[:, :, :-shift] + pad(later[..., inner:], (inner, 0))
        maps = torch.cat([maps[:, :, :shift], composed], 2)
        shift *= 2
    after = maps[:, :, :, :, inner:]
    return torch.cat([torch.zeros_like(after[:, :, :1]), after[:, :, :-1]], 2).reshape(*maps.shape[:-1], width)


def causal_conv(hidden: Tensor, weight: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
    """SiLU of a causal convolution of every channel by itself: inputs [B, channels, T], weights [channels, taps]."""
    length, taps = hidden.shape[-1], weight.shape[-1]
    padded = pad(hidden, (taps - 1, 0))
    weight = weight.to(hidden.dtype)
    out = sum(padded[..., i : i + length] * weight[:, i, None] for i in range(taps))
    return silu(out if bias is None else out + bias[:, None])


def offset_norm(self: Any, x: Tensor) -> Tensor:
    """Qwen3_5RMSNorm.forward, in the dtype that matrix products will read."""
    normed = rms_norm(x.float(), (x.shape[-1],), 1.0 + self.weight, self.eps)
    device = x.device.type
    return normed.to(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype)


def gated_norm(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    """Qwen3_5RMSNormGated.forward."""
    normed = rms_norm(x.float(), (x.shape[-1],), self.weight, self.variance_epsilon)
    return (normed * silu(gate.float())).to(x.dtype)


_OURS: tuple[tuple[Any, str, Any], ...] = (
    (modeling_qwen3_5, "torch_chunk_gated_delta_rule", gated_delta),
    (modeling_qwen3_5, "causal_conv1d_fn", causal_conv),
    (modeling_qwen3_5.Qwen3_5RMSNorm, "forward", offset_norm),
    (modeling_qwen3_5.Qwen3_5RMSNormGated, "forward", gated_norm),
)


@contextmanager
def fast_layers() -> Iterator[None]:
    """Within this, Qwen3.5's layers of transformers compute with the functions above."""
    theirs = [(owner, name, getattr(owner, name)) for owner, name, _ in _OURS]
    try:
        for owner, name, function in _OURS:
            setattr(owner, name, function)
        yield
    finally:
        for owner, name, function in theirs:
            setattr(owner, name, function)
