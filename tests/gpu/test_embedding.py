"""Rows of a table that ranks divide, on the device."""

from __future__ import annotations

import pytest
import torch

from helpers.device import DEVICE
from helpers.embedding_cases import check_span
from pagerunner.ops.embedding import span_embedding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("features", [40, 4096])
def test_rows_of_its_ids_and_zeros(features: int, dtype: torch.dtype) -> None:
    check_span(span_embedding, features, dtype, DEVICE)
