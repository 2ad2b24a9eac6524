"""Rows of a table of embeddings that ranks divide, by the twin and by the kernel in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from helpers.embedding_cases import check_span
from pagerunner.ops.embedding import span_embedding

CASES = pytest.mark.parametrize(
    ("features", "dtype"), [(1, torch.float32), (40, torch.bfloat16), (1100, torch.float16)]
)


@CASES
def test_the_twin_has_rows_of_its_ids_and_zeros(features: int, dtype: torch.dtype) -> None:
    check_span(span_embedding.twin, features, dtype, "cpu")


@pytest.mark.usefixtures("compiled_too")
@CASES
def test_the_kernel_has_rows_of_its_ids_and_zeros(features: int, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    check_span(span_embedding.kernel, features, dtype, "cpu")
