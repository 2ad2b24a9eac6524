"""Masks, by the twin and by the kernel in Triton's interpreter."""

from __future__ import annotations

import pytest

from helpers.mask_cases import check_allow_bits
from pagerunner.ops.mask import allow_bits

CASES = pytest.mark.parametrize(("vocab", "spare_words"), [(1, 0), (31, 0), (32, 2), (1029, 1), (2048, 0)])


@CASES
def test_the_twin_reads_the_bits(vocab: int, spare_words: int) -> None:
    check_allow_bits(allow_bits.twin, vocab, spare_words)


@CASES
def test_the_kernel_reads_the_bits(vocab: int, spare_words: int) -> None:
    pytest.importorskip("triton")
    check_allow_bits(allow_bits.kernel, vocab, spare_words)
