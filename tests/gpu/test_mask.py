"""Masks on the device at real sizes of vocabularies."""

from __future__ import annotations

import pytest

from helpers.mask_cases import check_allow_bits
from pagerunner.ops.mask import allow_bits


@pytest.mark.parametrize("vocab", [1029, 151_936])
def test_the_kernel_reads_the_bits(vocab: int) -> None:
    check_allow_bits(allow_bits.kernel, vocab, 1, "cuda")
    check_allow_bits(allow_bits.twin, vocab, 1, "cuda")
