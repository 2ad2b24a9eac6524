"""What stands around attention over latents, by the CPU kernels: float32 queries, vectors and pages.

Shape letters: T tokens, H heads, N elements of a query without rotary position, P rotary ones, D both, C elements of a latent, L of a vector
(C + P), V elements of a value, E page table entries, X slots of a page.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import torch

from pagerunner.batch import WritePlaces
from pagerunner.ops.native.calls import HEAD_PRODUCT, LATENT_HEADS, call, empty, made, operand

if TYPE_CHECKING:
    from pagerunner.ops.latent_heads import LatentPrep

_PRODUCT = struct.Struct("3P9qi4x")  # HeadProduct in native/latent.h
_HEADS = struct.Struct("9P8qfi")  # LatentHeads


def absorbed_heads_(
    q_THD: torch.Tensor,
    vectors_TL: torch.Tensor,
    prep: LatentPrep | None,
    keys_HNC: torch.Tensor,
    pages_EXL: torch.Tensor,
    write: WritePlaces,
) -> torch.Tensor:
    """Queries in the latent space with their rotary parts behind them, [T, H, L].

    The vectors are made ready in place, by `prep` if there is one, and stored in pages. Tokens whose entry is -1 are not stored.
    """
    tokens, heads, vector = *q_THD.shape[:2], vectors_TL.shape[1]
    latent, key_dim = keys_HNC.shape[2], keys_HNC.shape[1]
    rope = vector - latent
    weight, cos, sin = (None, None, None) if prep is None else (prep.norm.weight_I, *prep.angles)
    assert prep is None or not prep.norm.offset, "no model's latents have such a norm"
    out_THL = empty(tokens, heads, vector)
    operands = (
        operand("queries", q_THD, tokens, heads, key_dim + rope, dense=2),
        operand("vectors", vectors_TL, tokens, vector),
        operand("pages of latents", pages_EXL, None, None, vector, dense=2),
        made(out_THL),
        operand("the latents' norm", weight, latent),
        operand("cosines", cos, tokens, 1, rope, dense=3),
        operand("sines", sin, tokens, 1, rope, dense=3),
        operand("write entries", write.entry_T, tokens, dtype=torch.int64),
        operand("write offsets", write.offset_T, tokens, dtype=torch.int64),
    )
    sizes = tokens, heads, key_dim, rope, latent, q_THD.stride(0), vectors_TL.stride(0), pages_EXL.stride(0)
    eps, pairs = (0.0, False) if prep is None else (prep.norm.eps, prep.pairs)
    call(LATENT_HEADS, _HEADS, operands, *sizes, eps, pairs)
    head_product(q_THD[..., :key_dim], keys_HNC, out_THL[..., :latent], by_inputs=True)
    return out_THL


def values(latents_THC: torch.Tensor, values_HVC: torch.Tensor) -> torch.Tensor:
    """Weighted latents as values, [T, H, V]."""
    out_THV = empty(latents_THC.shape[0], *values_HVC.shape[:2])
    head_product(latents_THC, values_HVC, out_THV, by_inputs=False)
    return out_THV


def head_product(x_THI: torch.Tensor, weight: torch.Tensor, out_THO: torch.Tensor, *, by_inputs: bool) -> None:
    """Fill `out` with every head's product: `x @ weight.T` of weights [H, O, I], or with `by_inputs` `x @ weight` of weights [H, I, O]."""
    (tokens, heads, inputs), outputs = x_THI.shape, out_THO.shape[2]
    matrix = (inputs, outputs) if by_inputs else (outputs, inputs)
    operands = (
        operand("x", x_THI),
        operand("the heads' matrices", weight, heads, *matrix, dense=2),
        operand("the heads' products", out_THO, tokens, heads, outputs),
    )
    strides = *x_THI.stride()[:2], *out_THO.stride()[:2], weight.stride(0)
    call(HEAD_PRODUCT, _PRODUCT, operands, tokens, heads, inputs, outputs, *strides, by_inputs)
