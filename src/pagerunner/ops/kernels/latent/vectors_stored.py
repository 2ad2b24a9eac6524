"""Vectors in pages as kernels take them: numbers, or codes with rotary parts and scales. See `kernels/latent/vectors_attention.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from pagerunner.ops.kernels.paged.paged_heads import fp8_type
from pagerunner.ops.sparse_latents import Latents


class Stored(NamedTuple):
    """Codes, rotary parts and scales of vectors in fp8, as kernels take them; the vectors thrice if they are numbers. `dtype` is that of either."""

    codes: torch.Tensor
    rope: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, pages: torch.Tensor | Latents) -> Stored:
        """Of a layer's pages."""
        if not isinstance(pages, Latents):
            return cls(pages, pages, pages, pages.dtype)
        assert pages.scales_ESG is not None
        return cls(pages.latent_ESC.view(torch.uint8), pages.rope_ESP, pages.scales_ESG, pages.latent_ESC.dtype)

    @property
    def strides(self) -> tuple[int, ...]:
        """From page to page and from slot to slot, of each part."""
        return *self.codes.stride()[:2], *self.rope.stride()[:2], *self.scales.stride()[:2]

    @property
    def steps(self) -> tuple[int, ...]:
        """From page to page and from slot to slot in 16 bytes of codes, and in 8 of scales."""
        return *(step // 16 for step in self.codes.stride()[:2]), *(step // 8 for step in self.scales.stride()[:2])

    @property
    def sizes(self) -> dict[str, Any]:
        """Elements that are codes, those that share a scale, and the type of codes; None if there are none."""
        size, coded = self.codes.shape[-1], self.codes is not self.scales
        block = size // self.scales.shape[-1] if coded else 1
        return {"C": size, "BLOCK": block, "FP8": fp8_type(self.dtype) if coded else None}
