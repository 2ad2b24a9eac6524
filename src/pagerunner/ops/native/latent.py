"""What stands around attention over latents, by the CPU kernels: float32 queries, vectors and pages.

Shape letters: T tokens, H heads, N elements of a query without rotary position, P rotary ones, D both, C elements of a latent, L of a vector
(C + P), V elements of a value, E page table entries, X slots of a page.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import torch

from pagerunner.ops.native.calls import HEAD_PRODUCT, LATENT_HEADS, address, call, empty, sized

if TYPE_CHECKING:
    from pagerunner.ops.latent_heads import LatentPrep

_PRODUCT = struct.Struct("3P9qi4x")  # HeadProduct in native/latent.h
_HEADS = struct.Struct("9P8qfi")  # LatentHeads
_F32, _I64 = torch.float32, torch.int64


def absorbed_heads_(
    q_THD: torch.Tensor,
    vectors_TL: torch.Tensor,
    prep: LatentPrep | None,
    keys_HNC: torch.Tensor,
    pages_EXL: torch.Tensor,
    write_entry_T: torch.Tensor,
    write_offset_T: torch.Tensor,
) -> torch.Tensor:
    """Queries in the latent space with their rotary parts behind them, [T, H, L].

    The vectors are made ready in place, by `prep` if there is one, and stored in pages. Tokens whose entry is -1 are not stored.
    """
    tokens, heads, vector = *q_THD.shape[:2], vectors_TL.shape[1]
    latent, key_dim = keys_HNC.shape[2], keys_HNC.shape[1]
    rope = vector - latent
    sized("queries", q_THD, tokens, heads, key_dim + rope)
    sized("vectors", vectors_TL, tokens, vector)
    sized("pages of latents", pages_EXL, None, None, vector)
    out_THL = empty(tokens, heads, vector)
    norm, cos, sin = (0, 0, 0) if prep is None else _prep_addresses(prep, tokens, latent, rope)
    packed = _HEADS.pack(
        address("queries", q_THD, _F32, 2),
        address("vectors", vectors_TL, _F32, 1),
        address("pages of latents", pages_EXL, _F32, 2),
        out_THL.data_ptr(),
        norm,
        cos,
        sin,
        _numbers("write entries", write_entry_T, tokens),
        _numbers("write offsets", write_offset_T, tokens),
        tokens,
        heads,
        key_dim,
        rope,
        latent,
        q_THD.stride(0),
        vectors_TL.stride(0),
        pages_EXL.stride(0),
        0.0 if prep is None else prep.norm.eps,
        prep is not None and prep.pairs,
    )
    parts = () if prep is None else (prep.norm.weight_I, *prep.angles)
    call(LATENT_HEADS, packed, (q_THD, vectors_TL, pages_EXL, out_THL, write_entry_T, write_offset_T, *parts))
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
    sized("the heads' matrices", weight, heads, *((inputs, outputs) if by_inputs else (outputs, inputs)))
    sized("the heads' products", out_THO, tokens, heads, outputs)
    packed = _PRODUCT.pack(
        address("x", x_THI, _F32, 1),
        address("the heads' matrices", weight, _F32, 2),
        address("the heads' products", out_THO, _F32, 1),
        tokens,
        heads,
        inputs,
        outputs,
        x_THI.stride(0),
        x_THI.stride(1),
        out_THO.stride(0),
        out_THO.stride(1),
        weight.stride(0),
        by_inputs,
    )
    call(HEAD_PRODUCT, packed, (x_THI, weight, out_THO))


def _prep_addresses(prep: LatentPrep, tokens: int, latent: int, rope: int) -> tuple[int, int, int]:
    assert not prep.norm.offset, "no model's latents have such a norm"
    cos_T1D, sin_T1D = prep.angles
    sized("the latents' norm", prep.norm.weight_I, latent)
    sized("cosines", cos_T1D, tokens, 1, rope)
    sized("sines", sin_T1D, tokens, 1, rope)
    return (
        address("the latents' norm", prep.norm.weight_I, _F32, 1),
        address("cosines", cos_T1D, _F32, 3),
        address("sines", sin_T1D, _F32, 3),
    )


def _numbers(name: str, x: torch.Tensor, tokens: int) -> int:
    sized(name, x, tokens)
    return address(name, x, _I64, 1)
