"""Latent attention of prompts that have nothing before them, over keys and values expanded from their own tokens' latents.

Shape letters: T tokens, H heads, D query and key size (N elements without rotary positions, then P rotary ones), C latent size,
L vector size (C + P), V value head size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from pagerunner.ops import numerics
from pagerunner.ops.fresh_rows import attend_fresh_rows

LIBRARY_SIZES = (192, 128)  # of queries and values: DeepSeek's
MAX_ELEMENTS = 2**27  # of keys and values that are expanded together


@functools.cache
def _has_library(device: torch.device) -> bool:
    return torch.backends.cudnn.is_available() and torch.cuda.get_device_capability(device) >= (9, 0)


def library_serves(q_THD: torch.Tensor, value_dim: int, lengths: Sequence[int]) -> bool:
    """Whether `fresh_attention` is faster for rows of these lengths than attention over keys expanded from pages.

    cuDNN computed 572 TFLOP/s where our kernel reached 386 (8,192 tokens, 16 heads, H200).
    """
    return (
        bool(lengths)
        and q_THD.is_cuda
        and q_THD.dtype in (torch.bfloat16, torch.float16)
        and (q_THD.shape[-1], value_dim) == LIBRARY_SIZES
        and not any(length % numerics.FAST.attention.library_latent_queries for length in lengths)
        and _has_library(q_THD.device)
    )


def fresh_attention(
    q_THD: torch.Tensor,
    vectors_TL: torch.Tensor,
    keys_HNC: torch.Tensor,
    values_HVC: torch.Tensor,
    lengths: Sequence[int],
    scale: float,
) -> torch.Tensor:
    """Causal attention of rows of `lengths` tokens, T in all, each over its own tokens; [T, H, V].

    On a CUDA device cuDNN computes it, and `library_serves` must say that it can.
    """
    tokens, heads, size = q_THD.shape
    width = max(1, MAX_ELEMENTS // (tokens * (size + values_HVC.shape[1])))
    out_THV = q_THD.new_empty(tokens, heads, values_HVC.shape[1])
    for first in range(0, heads, width):
        part = slice(first, first + width)
        k_THD, v_THV = _expand(vectors_TL, keys_HNC[part], values_HVC[part])
        found_THV = attend_fresh_rows(q_THD[:, part], k_THD, v_THV, lengths, scale)
        if found_THV.shape == out_THV.shape:
            return found_THV
        out_THV[:, part] = found_THV
    return out_THV


def _expand(
    vectors_TL: torch.Tensor, keys_HNC: torch.Tensor, values_HVC: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [T, H, D] and values [T, H, V]."""
    heads, key_dim, latent = keys_HNC.shape
    latents_HTC = vectors_TL[:, :latent].expand(heads, -1, -1)
    rope_TP = vectors_TL[:, latent:]
    k_THD = vectors_TL.new_empty(vectors_TL.shape[0], heads, key_dim + rope_TP.shape[1])
    v_THV = vectors_TL.new_empty(vectors_TL.shape[0], heads, values_HVC.shape[1])
    torch.bmm(latents_HTC, keys_HNC.transpose(1, 2), out=k_THD[..., :key_dim].transpose(0, 1))
    torch.bmm(latents_HTC, values_HVC.transpose(1, 2), out=v_THV.transpose(0, 1))
    target_THP, source_T1P = k_THD[..., key_dim:], rope_TP.unsqueeze(1)
    if all(map(_has_words, (target_THP, source_T1P))):  # a fourth of the elements to copy
        target_THP, source_T1P = target_THP.view(torch.int64), source_T1P.view(torch.int64)
    target_THP.copy_(source_T1P)
    return k_THD, v_THV


def _has_words(x: torch.Tensor) -> bool:
    """Whether rows of halves are rows of 64-bit words."""
    return x.itemsize == 2 and not any(n % 4 for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))
